"""Taking back the rows and columns that Inductor pads matrix products with on a GPU.

Inductor's `pad_mm`, which runs before any post-grad pass, makes the sizes of a bf16 or fp16 product multiples
of 8 where a timing says that cuBLAS gains: it pads the operands with zeros, and cuts the product to its size.
Kernels here take any M, and any N of a K-major B, and what is cut off would stand between the product and the
work after it. A padded K stays, for it gives rows that TMA can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from cute_backend.fx_walk.lower import is_pointwise, is_reshape
from cute_backend.fx_walk.questions import is_reduction
from cute_backend.fx_walk.static import Size, arguments, fake, known, target_name

_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
_PAD, _JOIN, _SLICE = "aten.constant_pad_nd.default", "aten.cat.default", "aten.slice.Tensor"


def take_padding_back(graph: fx.Graph) -> None:
    """Replace every cut product of padded operands that work follows by the product itself."""
    for node in graph.nodes:
        if target_name(node) not in _PRODUCTS:
            continue
        cut = _cut(node)
        if cut is not node and any(map(_is_work, cut.users)):
            with graph.inserting_before(cut):
                whole = _whole(graph, node, fake(cut).shape)
            if whole is not None:
                cut.replace_all_uses_with(whole)
    graph.eliminate_dead_code()


def _is_work(node: fx.Node) -> bool:
    return is_pointwise(node) or is_reshape(node) or is_reduction(node)


def _cut(product: fx.Node) -> fx.Node:
    """The last of the slices, each the only user of what it reads, that keep the first rows and columns."""
    last = product
    while len(last.users) == 1:
        (user,) = last.users
        if target_name(user) != _SLICE or arguments(user)["start"] != 0 or arguments(user)["step"] != 1:
            break
        last = user
    return last


def _whole(graph: fx.Graph, product: fx.Node, shape: Sequence[Size]) -> fx.Node | None:
    """The product of what its operands were padded from, None where that has another shape: (M, N), and in
    a bmm the batches before them."""
    args: tuple[Any, ...] = product.args
    *batches, m, n = shape
    *addend, a, b = args
    a_source, b_source = _source(a), _source(b)
    if known(fake(a_source).shape[-2] == m) and a_source is not a:
        k_padding = fake(a).shape[-1] - fake(a_source).shape[-1]
        a = _call(graph, a, a_source, [0, k_padding, 0, 0]) if k_padding else a_source
    if _fits(b_source, (*fake(b).shape[:-1], n)) and known(fake(b_source).stride(-2) == 1):
        b = b_source
    while addend and not _broadcasts(addend[0], (m, n)):
        if target_name(addend[0]) != _JOIN:
            return None
        addend = [addend[0].args[0][0]]
    if not _fits(a, (*batches, m, fake(a).shape[-1])) or not known(fake(b).shape[-1] == n):
        return None
    return _call(graph, product, *addend, a, b, **product.kwargs)


def _source(operand: fx.Node) -> fx.Node:
    """What rows and columns were padded from at their ends; the operand itself if they were not."""
    if target_name(operand) != _PAD:
        return operand
    args: tuple[Any, ...] = operand.args
    source, (before_columns, _, before_rows, _, *batches) = args[:2]
    return operand if before_columns or before_rows or any(batches) else source


def _fits(node: fx.Node, shape: Sequence[Size]) -> bool:
    return all(known(size == want) for size, want in zip(fake(node).shape, shape, strict=True))


def _broadcasts(node: Any, shape: Sequence[Size]) -> bool:
    ends = zip(reversed(fake(node).shape), reversed(shape), strict=False)
    return all(known(size == 1) or known(size == want) for size, want in ends)


def _call(graph: fx.Graph, like: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """The call of a node's op with other arguments."""
    target: Any = like.target
    node = graph.call_function(target, args, kwargs)
    node.meta.update(like.meta)
    with fake(like).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*fx.map_arg(args, fake), **kwargs)
    return node
