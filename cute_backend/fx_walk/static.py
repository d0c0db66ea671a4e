"""What is known of sizes and strides without asking at run time.

Every question here is answered from static knowledge alone: a `False` means "not proven", and no answer adds
a guard to the program that is being compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """The stride that axes have as one mode, 0 where none is longer than 1, None where there is none."""
    axes = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if not known(size == 1)]
    for (_, outer), (size, inner) in pairwise(axes):
        if not known(outer == size * inner):
            return None
    return axes[-1][1] if axes else 0


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that stands for a node's result, None where the result is not one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def fake(node: fx.Node) -> torch.Tensor:
    """As `tensor_of`, for nodes that are known to have one tensor for a result."""
    value = tensor_of(node)
    if value is None:
        raise TypeError(f"{node.name} has {type(node.meta.get('val')).__name__} where a tensor is wanted")
    return value


def hint(size: Size) -> int | None:
    """A size, or the example that a symbolic size was made from, or None where there is none."""
    if not isinstance(size, torch.SymInt):
        return size
    example = size.node.hint
    return None if example is None else int(example)


def target_name(node: fx.Node) -> str:
    """An op's full name, such as "aten.add.Tensor"; for other nodes what FX says."""
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else node._pretty_print_target(node.target)
    )


def arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, with the schema's defaults where the graph omits them."""
    schema = node.target._schema  # type: ignore[union-attr]
    values: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[index]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values


def describe(sizes: Sequence[Size]) -> str:
    return "(" + ", ".join(str(size) for size in sizes) + ")"
