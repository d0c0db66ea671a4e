"""The names that an epilogue of CUTLASS Operators may use without importing them, as torch functions.

They have the meanings of that package: `max(x, dim=[1])` reduces, unlike Python's `max`. The shape of the
tensor that a reduction is written to gives its axis: one element is a reduction of everything, (N,) or
(1, N) has one result for each column, and (M,) or (M, 1) one for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.errors import UsageError
from cute_backend.spec import Axis

Value = Union[Tensor, int, float]


@dataclass(frozen=True)
class Reduced:
    """A reduction of a value, whose destination gives its axis; `axis` is the argument `dim=`, if any."""

    reduce: Callable[..., Tensor]
    value: Tensor
    axis: Axis | None

    def to(self, name: str, shape: Sequence[int], plane: tuple[int, int]) -> Tensor:
        """The reduction for a destination of this shape. Raises UsageError if no reduction has this shape."""
        for axis in reversed(Axis) if self.axis is None else (self.axis,):
            kept = axis.kept(*plane)
            kept_as_one = tuple(1 if i in axis.over else size for i, size in enumerate(plane))
            if tuple(shape) in (kept, kept or (1,), kept_as_one):
                return self.reduce(self.value.expand(plane), dim=axis.over)
        wanted = "" if self.axis is None else f" for each {self.axis.value}"
        raise UsageError(
            f"{name} has shape {tuple(shape)}, which no reduction{wanted} of the plane {plane} has"
        )


def _reduction(reduce: Callable[..., Tensor]) -> Callable[..., Reduced]:
    def reduced(value: Tensor, dim: int | Sequence[int] | None = None) -> Reduced:
        return Reduced(reduce, value, None if dim is None else _axis(dim))

    return reduced


def _axis(dim: int | Sequence[int]) -> Axis:
    dims = [dim] if isinstance(dim, int) else list(dim)
    reduced = tuple(sorted({each % 2 for each in dims if -2 <= each < 2}))
    for axis in Axis:
        if reduced == axis.over and len(reduced) == len(dims):
            return axis
    raise UsageError(f"a reduction over dim={dim} is not possible: the (M, N) plane has dims 0 and 1")


def _extremum(
    of_tensors: Callable[..., Tensor], with_number: Callable[..., Tensor]
) -> Callable[[Value, Value], Tensor]:
    """`maximum` or `minimum`. Either operand may be a number."""

    def extremum(a: Value, b: Value) -> Tensor:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return of_tensors(a, b)
        return with_number(a, b) if isinstance(a, Tensor) else with_number(b, a)

    return extremum


def _multiply_add(a: Value, b: Value, c: Value) -> Value:
    return a * b + c


def _identity(value: Value) -> Value:
    return value


def _no_layout(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError(
            f"{name} changes the layout, and these kernels write (M, N) planes as they compute them"
        )

    return refuse


VOCABULARY: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "exp": torch.exp,
    "maximum": _extremum(torch.maximum, torch.clamp_min),
    "minimum": _extremum(torch.minimum, torch.clamp_max),
    "multiply_add": _multiply_add,
    "identity": _identity,
    "sum": _reduction(torch.sum),
    "max": _reduction(torch.amax),
    "min": _reduction(torch.amin),
    "permute": _no_layout("permute"),
    "reshape": _no_layout("reshape"),
}
