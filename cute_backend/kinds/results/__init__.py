"""The memory of planes that are stored by heads: in tensors of their own, or in rows of a cache."""

from cute_backend.kinds.results.by_heads import ByHeads
from cute_backend.kinds.results.cache import Cache
from cute_backend.kinds.results.heads import HEAD_COLUMNS, Heads

__all__ = ["HEAD_COLUMNS", "ByHeads", "Cache", "Heads"]
