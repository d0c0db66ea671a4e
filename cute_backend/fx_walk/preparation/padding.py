"""Removes the rows and columns with which Inductor pads matrix products on a GPU.

Inductor's `pad_mm`, which runs before any post-grad pass, makes the sizes of a bf16 or fp16 product multiples
of 8 if a timing shows that cuBLAS gains. It pads the operands with zeros, and slices the product to its size.
Kernels here take any M, and any N of a K-major B, and the slice that removes the padding would be between the
product and the work after it. A padded K stays, because it makes rows that TMA can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import Mutations, is_view
from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.static import Size, arguments, fake, known, target_name
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape

_PRODUCTS = {
    "aten.mm.default": ("self", "mat2"),
    "aten.addmm.default": ("mat1", "mat2"),
    "aten.bmm.default": ("self", "mat2"),
}
"""The ops whose padding is removed, and the names of the two factors of each."""
_PAD, _JOIN, _SLICE = "aten.constant_pad_nd.default", "aten.cat.default", "aten.slice.Tensor"


def take_padding_back(graph: fx.Graph) -> None:
    """Replaces every sliced product of padded operands that has work after it by the product of the original
    operands. That reads them where the slice was, so a product behind a write in place stays as it is."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    written = Mutations(order).start
    for node in graph.nodes:
        if target_name(node) not in _PRODUCTS:
            continue
        cut = _cut(node)
        if cut is not node and _has_work(cut) and (written is None or order[cut] < written):
            with graph.inserting_before(cut):
                whole = _whole(graph, node, fake(cut).shape)
            if whole is not None:
                cut.replace_all_uses_with(whole)
    graph.eliminate_dead_code()


def _has_work(node: fx.Node) -> bool:
    """Whether work follows a node, directly or behind views that take a part of it, such as even columns."""
    stack, seen = [node], {node}
    while stack:
        users = [user for user in stack.pop().users if user not in seen]
        if any(map(_is_work, users)):
            return True
        stack += filter(_takes_a_part, users)
        seen.update(users)
    return False


def _is_work(node: fx.Node) -> bool:
    return is_pointwise(node) or is_reshape(node) or is_reduction(node)


def _takes_a_part(node: fx.Node) -> bool:
    return is_view(node) or node.target is getitem


def _cut(product: fx.Node) -> fx.Node:
    """The last slice of a chain of slices that keep the first rows and columns. Each is the only user of its
    source."""
    last = product
    while len(last.users) == 1:
        (user,) = last.users
        if target_name(user) != _SLICE or arguments(user)["start"] != 0 or arguments(user)["step"] != 1:
            break
        last = user
    return last


def _whole(graph: fx.Graph, product: fx.Node, shape: Sequence[Size]) -> fx.Node | None:
    """The product of the tensors that its operands were padded from. None if it does not have the shape (M,
    N), with the batches before them in a bmm."""
    args = arguments(product)
    *batches, m, n = shape
    names = _PRODUCTS[target_name(product)]
    a, b = (args[name] for name in names)
    a_source, b_source = _source(a), _source(b)
    if known(fake(a_source).shape[-2] == m) and a_source is not a:
        k_padding = fake(a).shape[-1] - fake(a_source).shape[-1]
        if known(k_padding == 0):
            a = a_source
        elif isinstance(k_padding, int):
            a = _call(graph, a, arguments(a) | {"self": a_source, "pad": [0, k_padding, 0, 0]})
    if _fits(b_source, (*fake(b).shape[:-1], n)) and known(fake(b_source).stride(-2) == 1):
        b = b_source
    if target_name(product) == "aten.addmm.default":
        addend = _addend(args["self"], m, n)
        if addend is None:
            return None
        args["self"] = addend
    if not _fits(a, (*batches, m, fake(a).shape[-1])) or not known(fake(b).shape[-1] == n):
        return None
    return _call(graph, product, args | dict(zip(names, (a, b), strict=True)))


def _source(operand: fx.Node) -> fx.Node:
    """The node that was padded at the ends of its rows and columns; the operand itself if none was."""
    if target_name(operand) != _PAD:
        return operand
    args = arguments(operand)
    sides = [*args["pad"], 0, 0]  # those of the last axis first: before and after it
    return operand if sides[0] or sides[2] or any(sides[4:]) else args["self"]


def _addend(joined: fx.Node, m: Size, n: Size) -> fx.Node | None:
    """The tensor that was padded by concatenation to give an addend; None if it was made otherwise."""
    while not _broadcasts(joined, (m, n)):
        if target_name(joined) != _JOIN:
            return None
        args = arguments(joined)
        first = args["tensors"][0]
        axis = args["dim"] % fake(joined).dim()
        if not known(fake(first).shape[axis] == (m, n)[axis - fake(joined).dim()]):
            return None  # this axis was not padded from the kept size
        joined = first
    return joined


def _fits(node: fx.Node, shape: Sequence[Size]) -> bool:
    return all(known(size == want) for size, want in zip(fake(node).shape, shape, strict=True))


def _broadcasts(node: Any, shape: Sequence[Size]) -> bool:
    ends = zip(reversed(fake(node).shape), reversed(shape), strict=False)
    return all(known(size == 1) or known(size == want) for size, want in ends)


def _call(graph: fx.Graph, like: fx.Node, args: dict[str, Any]) -> fx.Node:
    """The call of a node's op with these arguments."""
    target: Any = like.target
    count = len(like.args)
    positional, named = tuple(args.values())[:count], dict(tuple(args.items())[count:])
    return call(graph, like, target, *positional, **{name: named[name] for name in like.kwargs})
