"""Products with some columns of each head of one weight, where heads are packed side by side.

GPT-NeoX's weight has the query, the key and the value of the first head, then those of the second. The
columns of all queries are blocks of B, (K, H, D), at a constant distance. As an operand of `mm` they are
copied to (K, H * D). A kernel reads the blocks themselves, and those of a bias or of scales, so `packed`
writes such a product with nodes that this module recognises, and no copy is made if its region is kept.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.static import fake, first_argument, known
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.values.classify import LoadView, classify

COLUMNS_OF_HEADS = "cute_backend_columns_of_heads"
"""The key in the meta of an operand that is a copy of blocks of columns. Its value is the number of nodes
from the operand back to the blocks."""


def with_blocks(anchor: Anchor) -> Anchor:
    """The product with blocks of columns in place of the copies of them, if it has such operands."""
    if COLUMNS_OF_HEADS not in anchor.b.meta:
        return anchor
    b = _blocks(anchor.b)
    accumulator = replace(anchor.accumulator, b_block=fake(b).shape[-1])
    addend = anchor.addend and replace(anchor.addend, view=_view(anchor.addend.view, anchor))
    return replace(
        anchor,
        b=b,
        accumulator=accumulator,
        addend=addend,
        scale_b=anchor.scale_b and _view(anchor.scale_b, anchor),
    )


def _blocks(node: fx.Node) -> fx.Node:
    for _ in range(node.meta[COLUMNS_OF_HEADS]):
        node = first_argument(node)
    return node


def _view(view: LoadView, anchor: Anchor) -> LoadView:
    """The view of an operand over the plane (M, H, D)."""
    if COLUMNS_OF_HEADS not in view.node.meta:
        return view
    blocks = _blocks(view.node)
    heads, columns = fake(blocks).shape[-2:]
    rows = () if known(anchor.m == 1) else (0,)
    return classify(blocks, (anchor.m, heads, columns), anchor.device, Frame(rows, (1, 2)))
