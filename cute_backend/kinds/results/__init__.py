"""The forms in which values are stored: whole planes, also by heads and in rows of a cache, parts of a wider
result, and one value for each block of columns. Reductions are forms, too (`kinds/reductions/axis.py`).

`kinds/forms.py` lists all that have a field of their own in the JSON form of a spec.
"""

from cute_backend.kinds.axes import Order
from cute_backend.kinds.results.by_heads import ByHeads
from cute_backend.kinds.results.cache import Cache
from cute_backend.kinds.results.form import Form
from cute_backend.kinds.results.heads import HEAD_COLUMNS, Heads
from cute_backend.kinds.results.planes import PLANE, OfBlocks, PartOf, WholePlane
from cute_backend.kinds.results.tiled_scales import TiledScales

__all__ = [
    "HEAD_COLUMNS",
    "PLANE",
    "ByHeads",
    "Cache",
    "Form",
    "Heads",
    "OfBlocks",
    "PartOf",
    "TiledScales",
    "WholePlane",
    "ordered",
]


def ordered(order: Order, block: int = 0) -> Form:
    """The form of elements in this order: of the whole plane or, with a number of columns, of every block."""
    if order is Order.TILED:
        return TiledScales(block)
    return OfBlocks(block, order) if block else WholePlane(order)
