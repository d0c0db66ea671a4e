"""Matrix products as graphs spell them, pairs of them, and what can be asked of one node beside them."""
