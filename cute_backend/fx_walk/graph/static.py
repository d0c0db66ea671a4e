"""Facts about sizes and strides that are known statically.

Every question is answered from static knowledge alone. `False` means "not proven", and no answer adds a guard
to the program that is being compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, Union

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cute_backend.numerics import TORCH_DTYPES
from cute_backend.spec import VALUE_DTYPES, DType

Size = Union[int, torch.SymInt]

DTYPES: dict[torch.dtype, DType] = {TORCH_DTYPES[dtype]: dtype for dtype in VALUE_DTYPES}

RESULT_DTYPES = DTYPES | {torch.int64: DType.I64}
"""The dtypes of a region's results, with that of whole numbers, which only reductions give."""

PLACES = {torch.int32: DType.I32, torch.int64: DType.I64}
"""The dtypes of operands that say where elements are: in a row, or in a cache."""


def known(condition: Any) -> bool:
    """Whether a (symbolic) condition is proven."""
    return statically_known_true(condition)


def product(sizes: Iterable[Size]) -> Size:
    return prod(sizes)


def on_plane(shape: Sequence[Size], m: Size, n: Size) -> bool:
    """Whether a shape is (..., N) with leading axes that are proven to collapse to M."""
    return len(shape) > 0 and known(shape[-1] == n) and known(product(shape[:-1]) == m)


def same_sizes(shape: Sequence[Size], other: Sequence[Size]) -> bool:
    """Whether two shapes are proven to be the same."""
    return len(shape) == len(other) and all(known(a == b) for a, b in zip(shape, other, strict=True))


def collapsed_stride(sizes: Sequence[Size], strides: Sequence[Size]) -> Size | None:
    """The stride of axes as one mode: 0 if none is longer than 1, and None if they have no common stride."""
    axes = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if not known(size == 1)]
    for (_, outer), (size, inner) in pairwise(axes):
        if not known(outer == size * inner):
            return None
    return axes[-1][1] if axes else 0


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that stands for a node's result. None if the result is not one tensor, or if the
    argument is not a node."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def fake(node: fx.Node) -> torch.Tensor:
    """The result of `tensor_of` for nodes whose result is known to be one tensor."""
    value = tensor_of(node)
    if value is None:
        raise TypeError(f"{node.name} has {type(node.meta.get('val')).__name__} where a tensor is wanted")
    return value


def hint(size: Size) -> int | None:
    """A size, or the example that a symbolic size was made from, or None if there is none."""
    if not isinstance(size, torch.SymInt):
        return size
    example = size.node.hint
    return None if example is None else int(example)


_USUAL = 4096
"""The size that is assumed if no example of it is known."""


def usual(size: Size) -> int:
    """A size, or an example of it: the one that a symbolic size was made from, if there is one."""
    return hint(size) or _USUAL


def target_name(node: fx.Node) -> str:
    """An op's full name, such as "aten.add.Tensor". For other nodes it is FX's description."""
    if isinstance(node.target, torch._ops.OpOverload):
        return _op_name(node.target)
    return node._pretty_print_target(node.target)


@cache
def _op_name(op: torch._ops.OpOverload) -> str:
    """The name of an op. It is cached, because torch builds the name at each request, and the walker needs it
    often for every node."""
    return str(op)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an aten call by name, in the schema's order.

    A graph gives an argument by position, by keyword, or not at all if it has the schema's default. The
    walker reads every argument here or by `first_argument`, never by its place in `node.args`.
    """
    return {
        name: node.args[index] if index < len(node.args) else node.kwargs.get(name, default)
        for index, (name, default) in enumerate(_parameters(node.target))
    }


def leading_arguments(node: fx.Node, count: int) -> list[Any] | None:
    """The first `count` arguments of an aten call, None if it has fewer or is given another one."""
    values = list(arguments(node).values())
    defaults = [default for _, default in _parameters(node.target)]
    others = zip(values[count:], defaults[count:], strict=True)
    plain = all(not isinstance(value, fx.Node) and value == default for value, default in others)
    return values[:count] if plain and len(values) >= count else None


def first_argument(node: fx.Node) -> Any:
    """The first argument of a call, which for a view, a cast or a reduction is its source. None for a call
    without arguments."""
    if node.args or not isinstance(node.target, torch._ops.OpOverload):
        return node.args[0] if node.args else None
    return next(iter(arguments(node).values()), None)


@cache
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    """The parameters of an aten op, as names and defaults; keyword-only ones come last."""
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)


def describe(sizes: Sequence[Size]) -> str:
    return "(" + ", ".join(str(size) for size in sizes) + ")"
