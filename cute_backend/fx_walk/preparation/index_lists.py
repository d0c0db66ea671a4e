"""Lists of neighbouring indices, as in `x[..., [-2], :]`: they copy what a slice would view.

Falcon takes the key and the value of each group of heads by a list of one index. Such a list is a constant of
the graph: a filled tensor if it has one index, an attribute of the module if it has more, or an `arange`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import arguments, fake, first_argument, target_name, tensor_of
from cute_backend.fx_walk.values.lower import filling

_INTEGERS = (torch.int32, torch.int64)
_COPIES = ("aten.lift_fresh_copy.default", "aten.clone.default")
_MOST = 4096
"""The most indices that are read."""


@dataclass(frozen=True)
class Neighbours:
    """The elements `start` to `start + count` of an axis."""

    axis: int
    start: int
    count: int


def neighbours(node: fx.Node) -> Neighbours | None:
    """The neighbouring elements of one axis that an `index` takes in order, by indices that are constants of
    the graph. None for any other node."""
    if node.op != "call_function" or target_name(node) != "aten.index.Tensor":
        return None
    args = arguments(node)
    places = [(axis, index) for axis, index in enumerate(args["indices"]) if index is not None]
    if len(places) != 1:
        return None
    ((axis, index),) = places
    size, found = fake(args["self"]).shape[axis], _constants(index)
    if not found or not isinstance(size, int) or not all(-size <= each < size for each in found):
        return None
    start = found[0] % size
    if [each % size for each in found] != list(range(start, start + len(found))):
        return None
    return Neighbours(axis, start, len(found))


def _constants(node: fx.Node) -> list[int] | None:
    """The integers of a vector that is a constant of the graph; None if it is none."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() != 1 or tensor.dtype not in _INTEGERS:
        return None
    count = tensor.shape[0]
    if not isinstance(count, int) or not 0 < count <= _MOST:
        return None
    while target_name(node) in _COPIES:
        node = first_argument(node)
    if (number := filling(node)) is not None:
        return [int(number)] * count
    if target_name(node) == "prims.iota.default":
        args = arguments(node)
        start, step = args["start"], args["step"]
        whole = isinstance(start, int) and isinstance(step, int)
        return [start + step * place for place in range(count)] if whole else None
    return _attribute(node)


def _attribute(node: fx.Node) -> list[int] | None:
    """The values of a tensor of the graph's module."""
    module = node.graph.owning_module
    held = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    is_real = type(held) in (torch.Tensor, torch.nn.Buffer)
    return [int(each) for each in held.tolist()] if is_real and held is not None else None
