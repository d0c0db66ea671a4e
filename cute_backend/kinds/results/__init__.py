"""The forms in which values are stored: whole planes, also by heads and in rows of a cache, and one value for
each block of columns. Reductions are forms, too (`kinds/reductions/axis.py`).
"""

from cute_backend.kinds.results.by_heads import ByHeads
from cute_backend.kinds.results.cache import Cache
from cute_backend.kinds.results.form import Form
from cute_backend.kinds.results.heads import HEAD_COLUMNS, Heads
from cute_backend.kinds.results.planes import OfBlocks, WholePlane
from cute_backend.kinds.results.tiled_scales import TiledScales

__all__ = ["HEAD_COLUMNS", "ByHeads", "Cache", "Form", "Heads", "OfBlocks", "TiledScales", "WholePlane"]
