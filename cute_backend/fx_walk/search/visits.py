"""The order in which products get their regions: from the last to the first but, if one op reads two, the
larger one first.

If one op reads two products, the product that is visited first gets the op, and the result of the other is an
operand. LoRA adds a product with a small K to the layer's own product, `x @ w + s * (x @ a) @ b`. The kernel
with the larger K has more time to load a plane ahead, and if gate and up are both of this kind, they become a
pair.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from cute_backend.fx_walk.graph.static import known
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.refusals.reasons import Refused
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape

_STEPS = 16
"""The number of nodes that are searched on either side of an op that reads two products."""


def visits(anchors: dict[fx.Node, Anchor | Refused]) -> Iterator[fx.Node]:
    """The products in the order in which they get the work after them. A product that was moved to an earlier
    place comes again at its own place, for work that may be left then."""
    for node in reversed(anchors):
        larger = _larger(node, anchors)
        if larger is not None:
            yield larger
        yield node


def _larger(node: fx.Node, anchors: dict[fx.Node, Anchor | Refused]) -> fx.Node | None:
    """The product of a larger K that an op combines with this one, through work that nothing else reads."""
    anchor = anchors[node]
    if not isinstance(anchor, Anchor):
        return None
    before, current = node, node
    for _ in range(_STEPS):
        if len(current.users) != 1:
            return None
        before, (current,) = current, current.users
        if not _is_work(current):
            return None
        for source in current.all_input_nodes:
            other = None if source is before else _product_behind(source, anchors)
            if other is not None:
                met = anchors[other]
                return other if isinstance(met, Anchor) and _is_larger(met, anchor) else None
    return None


def _product_behind(node: fx.Node, anchors: dict[fx.Node, Anchor | Refused]) -> fx.Node | None:
    """The product from which a value is computed through work that nothing else reads."""
    stack, steps = [node], 0
    while stack and steps < _STEPS:
        current, steps = stack.pop(), steps + 1
        if len(current.users) != 1:
            continue
        if current in anchors:
            return current
        if _is_work(current):
            stack.extend(current.all_input_nodes)
    return None


def _is_work(node: fx.Node) -> bool:
    return is_pointwise(node) or is_reshape(node)


def _is_larger(anchor: Anchor, than: Anchor) -> bool:
    """Whether two products give one plane and the first is proven to have the larger K."""
    return known(anchor.m == than.m) and known(anchor.n == than.n) and known(anchor.k > than.k)
