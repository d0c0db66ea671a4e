"""The op, and what stands behind it: compilation, the cache on disk, launches."""
