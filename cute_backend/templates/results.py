"""The interfaces by which kernels combine the partials of reductions, in `finish.py` and `last_tile.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import cutlass
from cutlass import Int64

from cute_backend.spec import Axis


class Held(Protocol):
    """A thread's partial of one result; `cute_backend.memory_ops.device_reduce.Partials` is one."""

    def __getitem__(self, slot: int) -> tuple[Any, ...]: ...

    def take(self, slot: int, partial: tuple[Any, ...], inside: Any) -> None: ...

    def across(self, lanes: Sequence[int]) -> None: ...


class Result(Protocol):
    """The interface by which a store combines partials: see `cute_backend.memory_ops.device_reduce.Result`.

    A partial has one component for each of `types`, and each component has a tensor of its own.
    """

    axis: Axis
    types: tuple[type[cutlass.Numeric], ...]
    rows: int
    """Rows of a batch, if the columns of each batch of rows have a result; else 0."""

    def identity(self) -> Held: ...

    def element(self, whole: tuple[Any, ...], count: Int64) -> cutlass.Numeric: ...
