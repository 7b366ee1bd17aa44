"""Workers of different speed that take local steps: outer rules in virtual time, and synchronous rounds."""
