"""Parts of the last axis of a value, however a program takes them: slices, selects, splits and unbinds."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

from torch import fx

from cute_backend.fx_walk.graph.static import arguments, fake, target_name


@dataclass(frozen=True)
class Piece:
    """Elements of the last axis of `source`, `step` apart from `start` on. `inner` are the nodes that take
    them, in order. A `step` of 0 is that of a select, whose result lacks the axis."""

    source: fx.Node
    start: int
    inner: tuple[fx.Node, ...]
    step: int = 1


def taken_piece(node: fx.Node) -> Piece | None:
    """The elements of a value's last axis that a slice, a select, or one result of a `split` or an `unbind`
    has."""
    if node.op != "call_function":
        return None
    if node.target is getitem:
        return _of_several(node)
    if target_name(node) not in ("aten.slice.Tensor", "aten.select.int") or not _is_along_last(node):
        return None
    args = arguments(node)
    size = fake(args["self"]).shape[-1]
    if target_name(node) == "aten.select.int":
        start, step = args["index"] % size, 0
    else:
        start, step = args["start"] or 0, args["step"]
    start = start + size if isinstance(start, int) and start < 0 else start
    if not isinstance(start, int) or start < 0 or step not in (0, 1, 2):
        return None
    return Piece(args["self"], start, (node,), step)


_SEVERAL = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int")


def _of_several(node: fx.Node) -> Piece | None:
    """The part that is one result of a `split` or an `unbind`."""
    call, index = node.args
    if not isinstance(call, fx.Node) or not isinstance(index, int):
        return None
    if target_name(call) not in _SEVERAL or not _is_along_last(call):
        return None
    inner, source = (call, node), arguments(call)["self"]
    if target_name(call) == "aten.unbind.int":
        return Piece(source, index, inner, step=0)
    start = sum(part.shape[-1] for part in call.meta["val"][:index])
    return Piece(source, start, inner) if isinstance(start, int) else None


def _is_along_last(node: fx.Node) -> bool:
    args = arguments(node)
    rank = fake(args["self"]).dim()
    return args["dim"] % rank == rank - 1
