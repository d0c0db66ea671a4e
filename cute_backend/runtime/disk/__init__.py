"""Compiled kernels on disk: the cache with the folders that it may use, its upkeep, and packs."""
