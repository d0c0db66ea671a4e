"""Matrix products as graphs spell them, and what can be asked of one node beside them."""
