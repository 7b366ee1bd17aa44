"""Checkpoints of a run: their files, the folder that keeps them, and the thread that writes them."""
