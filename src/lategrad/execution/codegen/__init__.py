"""A rule's update as generated C loops."""
