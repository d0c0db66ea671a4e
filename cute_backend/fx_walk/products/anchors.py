"""The table of matrix products that a region can grow from.

`_scaled_mm` (both versions), `mm`, `addmm` and `bmm` (also with an `out_dtype`), `baddbmm`,
`_addmm_activation`, `_int_mm`, `_grouped_mm` with groups of rows, of columns or of K, or with a batch, and
both versions of `_scaled_grouped_mm`, are read into one form, an Anchor: two operands, an accumulator, and
the work of the op itself on the accumulator (scales, bias, the addend of `addmm`, an activation, its result
dtype), which becomes ordinary loads and ops. Other grouped products have their own reasons of refusal. torch
2.13 does not trace `baddbmm` with an `out_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from cute_backend.fx_walk.graph.static import target_name
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.dense_products import (
    read_addmm_activation,
    read_int_mm,
    read_mm,
    read_sum,
)
from cute_backend.fx_walk.products.grouped_products import (
    read_grouped_mm,
    read_scaled_grouped_mm,
    read_scaled_grouped_mm_v2,
)
from cute_backend.fx_walk.products.opaque_products import in_plain_aten, opaque_product
from cute_backend.fx_walk.products.packed_heads import with_blocks
from cute_backend.fx_walk.products.scaled_products import read_scaled_mm, read_scaled_mm_v2
from cute_backend.fx_walk.refusals.reasons import Reason, Refused


def is_anchor(node: fx.Node) -> bool:
    """Whether the walker has to decide about this node: either fuse it, or refuse it with a reason."""
    return node.op == "call_function" and (target_name(node) in _READERS or opaque_product(node) is not None)


def read_anchor(node: fx.Node) -> Anchor:
    """The anchor behind a node for which `is_anchor` holds. Raises Refused if no kernel computes it."""
    reader = _READERS.get(target_name(node))
    if reader is None:
        name = opaque_product(node)
        is_async = name is not None and name.startswith("symm_mem.")
        if is_async:
            raise Refused(Reason.LEFT_TO_ASYNC_TP, target=name)
        raise Refused(Reason.OPAQUE_PRODUCT, target=name, instead=in_plain_aten(name))
    return with_blocks(reader(node))


_READERS: dict[str, Callable[[fx.Node], Anchor]] = {
    "aten.mm.default": read_mm,
    "aten.mm.dtype": read_mm,
    "aten.addmm.default": read_sum("mat"),
    "aten.addmm.dtype": read_sum("mat"),
    "aten._addmm_activation.default": read_addmm_activation,
    "aten.bmm.default": read_mm,
    "aten.bmm.dtype": read_mm,
    "aten.baddbmm.default": read_sum("batch"),
    "aten._int_mm.default": read_int_mm,
    "aten._grouped_mm.default": read_grouped_mm,
    "aten._scaled_grouped_mm.default": read_scaled_grouped_mm,
    "aten._scaled_grouped_mm_v2.default": read_scaled_grouped_mm_v2,
    "aten._scaled_mm.default": read_scaled_mm,
    "aten._scaled_mm_v2.default": read_scaled_mm_v2,
}
