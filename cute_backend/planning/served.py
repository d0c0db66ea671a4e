"""Whether an architecture has the instructions that a spec needs, whatever its tile."""

from __future__ import annotations

from cute_backend.planning.mainloops import MAINLOOPS
from cute_backend.planning.targets import Target
from cute_backend.spec import EpilogueSpec, ProductKind


def unserved(spec: EpilogueSpec, target: Target) -> str | None:
    """Returns the reason why an architecture has no kernel for a spec, for people, or None if it has one."""
    taken = ", ".join(sorted(dtype.value for dtype in target.operands))
    for acc in spec.accumulators:
        if not acc.mma_operands <= target.operands:
            pair = f"{acc.a_dtype.value} by {acc.b_dtype.value}"
            return f"no MMA of {target.name} multiplies {pair}, as {acc.name} does; supported: {taken}"
        if lacking := next(filter(None, (each.lacking(acc, target) for each in MAINLOOPS)), ""):
            return lacking
        if acc.kind.has_offsets and not target.groups:
            what = "rows" if acc.kind is ProductKind.GROUPED else "K"
            return f"{target.name} has no kernel for {what} in groups, which {acc.name} is of"
        if acc.b_block and not target.planes_by_tma:
            return f"{target.name} has no TMA, which reads blocks of columns of B, as {acc.name} has"
    for store in spec.stores:
        if store.form.read_as not in (None, *target.scalings):
            return f"{store.name} has scales in tiles, which no MMA of {target.name} reads"
    converted = spec.dtypes | {store.name: store.dtype for store in spec.stores}
    for name, dtype in converted.items():
        if dtype.is_fp8 and not target.fp8:
            return f"{target.name} has no conversions of {dtype.value}, which {name} is"
    return None
