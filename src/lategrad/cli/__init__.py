"""Commands of the command line, a file each; ``options``, ``given`` and ``noted`` are what they share."""
