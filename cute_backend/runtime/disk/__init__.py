"""Compiled kernels on disk: the cache, its upkeep, and packs."""
