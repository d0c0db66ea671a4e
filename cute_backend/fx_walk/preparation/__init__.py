"""Rewrites of the graph ahead of the search, so that products stand where regions can grow."""
