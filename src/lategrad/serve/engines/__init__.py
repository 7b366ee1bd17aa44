"""How workers run and how vectors travel: threads, processes."""
