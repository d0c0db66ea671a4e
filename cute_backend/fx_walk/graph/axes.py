"""Calls that reduce axes of a tensor, or join tensors along one, whether or not a kernel of ours does it."""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import arguments, fake, known, same_sizes, target_name
from cute_backend.kinds.reductions import REDUCTIONS

_TARGETS = {call if isinstance(call, str) else call[0] for kind in REDUCTIONS for call in kind.aten}
_NAMES = {target.split(".")[1] for target in _TARGETS} | {"var", "var_mean", "any", "all"}


def is_reduction(node: fx.Node) -> bool:
    """Whether a call reads a whole axis, or several, for each element of its result."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in _NAMES


def reduced_axes(node: fx.Node) -> tuple[int, ...]:
    """The axes that a reduction reduces, counted from 0; all of them where it names none. A tensor without
    axes may be reduced over its axis 0 or -1, which torch takes for none."""
    args = arguments(node)
    rank, dim = fake(args["self"]).dim(), args.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return tuple(sorted({axis % rank for axis in dims})) if rank else ()


def is_gather_along_rows(node: fx.Node) -> bool:
    """Whether a call is a `gather` along the last axis, for every row of its source."""
    if node.op != "call_function" or target_name(node) != "aten.gather.default":
        return False
    args = arguments(node)
    source, index = fake(args["self"]).shape, fake(args["index"]).shape
    return args["dim"] in (-1, len(source) - 1) and same_sizes(source[:-1], index[:-1])


def picks_from_rows(node: fx.Node) -> bool:
    """Whether a call is a `gather` of one element of each row of its source."""
    if not is_gather_along_rows(node):
        return False
    shape = fake(node).shape
    return len(shape) > 1 and known(shape[-1] == 1)


def is_concatenation(node: fx.Node) -> bool:
    """Whether a call joins tensors along an axis. torch writes a `stack` as one."""
    return node.op == "call_function" and target_name(node) == "aten.cat.default"
