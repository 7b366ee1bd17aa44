"""Deep models under delay: the rules that survive it, those that do not, and synchronous training beside them."""
