"""What several test modules need; no test is in here, and no test module imports another."""
