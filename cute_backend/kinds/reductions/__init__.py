"""The reductions that a kernel computes: of rows, of columns, of the whole plane, and of blocks of columns.

Except for sums and products, the result does not depend on the order of the elements, so a kernel may divide
a plane in any way. To add a kind, write a `ReductionKind` in a file here and name it in `REDUCTIONS`.
"""

from __future__ import annotations

from cute_backend.errors import SpecError
from cute_backend.kinds.reductions.axis import BATCH_ROWS, Axis, Reduction
from cute_backend.kinds.reductions.extrema import MAX, MIN
from cute_backend.kinds.reductions.kind import Part, ReductionKind, Values
from cute_backend.kinds.reductions.logsumexp import LOGSUMEXP
from cute_backend.kinds.reductions.places import ARGMAX, ARGMIN
from cute_backend.kinds.reductions.sums import MEAN, PROD, SUM

__all__ = [
    "ARGMAX",
    "ARGMIN",
    "BATCH_ROWS",
    "LOGSUMEXP",
    "MAX",
    "MEAN",
    "MIN",
    "PROD",
    "REDUCTIONS",
    "SUM",
    "Axis",
    "Part",
    "Reduction",
    "ReductionKind",
    "Values",
    "named",
]

REDUCTIONS = (SUM, MEAN, PROD, MAX, MIN, ARGMAX, ARGMIN, LOGSUMEXP)

_BY_NAME = {kind.name: kind for kind in REDUCTIONS}


def named(name: str) -> ReductionKind:
    """The kind of a name. Raises SpecError if there is none."""
    if name not in _BY_NAME:
        raise SpecError(f"no reduction is called {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
