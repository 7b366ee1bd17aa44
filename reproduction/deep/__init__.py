"""Deep models under delay: which rules survive it, and synchronous training beside them."""
