"""Values of a region's members: what is stored of them, and how further members read them.

The search and the end of a region know only this face. A value that only one kind of member has is defined
beside that member (`members/`). It is a dataclass, since members with equal values share a store. Most
members have a `Plane`, and need no value of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import DTYPES, target_name
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.kinds.results import Form, ordered
from cute_backend.spec import PAIRED_DTYPES, Op, Operand, Order, Reduction

if TYPE_CHECKING:
    from typing_extensions import Self

    from cute_backend.fx_walk.region.draft import Draft

E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Reading:
    """A node that reads a member's value. `side` is the anchor of a pair whose slice of the columns it
    reads, if it reads the whole plane of a product in two slices."""

    node: fx.Node
    member: fx.Node
    side: int | None = None


class Value(ABC):
    """The value of a member of a region."""

    reduction: Reduction | None = None
    """How the kernel reduces the plane to the value, which is complete only when the kernel has ended."""

    after: tuple[Op, ...] = ()
    """The ops that finish the reduction."""

    orders: tuple[Order, ...] = (Order.ROW,)
    """The memory orders in which a kernel can store it."""

    alternate = False
    """Whether its parts are its even and its odd columns."""

    is_plane = False
    """Whether it is one value of the chain, so that a kernel may write it by heads."""

    is_split = False
    """Whether it is a product's plane in two slices, one for each anchor of a pair."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The values of the chain whose planes make up its plane in memory, from left to right, or the even
        and the odd columns. There are none if no kernel stores it."""

    @property
    def operands(self) -> Sequence[Operand]:
        """The values of the chain that it has, whether or not a kernel stores it."""
        return self.parts

    def renamed(self, names: Mapping[Operand, Operand]) -> Value:
        """It in a chain that has other `names` for its operands."""
        return self

    @abstractmethod
    def read(self, draft: Draft, reading: Reading) -> Operand:
        """The value of the chain that a node reads. Raises Refused if the node can't read this one."""

    def admits(self, reader: fx.Node, is_inner: bool) -> bool:
        """Whether a reader may join after it. `is_inner` says that the reader is an inner node of a
        member."""
        return True

    def is_followed(self, draft: Draft, node: fx.Node) -> bool:
        """Whether a node that reads it changes its form, takes a part of it or finishes it, and does nothing
        else."""
        return False

    def follow(self, draft: Draft, node: fx.Node) -> Value:
        """The value of a node for which `is_followed` holds; this one, unless the node changes it. Raises
        Refused if no kernel computes it."""
        return self

    def can_store(self, dtype: torch.dtype) -> bool:
        """Whether a kernel stores the value of a node of this dtype."""
        if self.alternate:
            return DTYPES.get(dtype) in PAIRED_DTYPES
        return dtype in DTYPES or dtype is E8M0

    def elements(self, m: int, n: int, block: int) -> int:
        """The number of its elements, for a plane of `m` rows and `n` columns. `block` is the number of
        columns that each element stands for, by the frame of the member."""
        return len(self.parts) * m * n // block

    def form(self, order: Order, block: int) -> Form:
        """The form in which a kernel stores it in this order, given the number of columns that each element
        stands for, by the frame of the member."""
        return ordered(order, 0 if block == 1 else block)


@dataclass(frozen=True)
class Plane(Value):
    """One value of the chain, or a number that all elements have."""

    value: Operand
    orders = (Order.ROW, Order.COLUMN)
    is_plane = True

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.value,) if isinstance(self.value, str) else ()

    def renamed(self, names: Mapping[Operand, Operand]) -> Plane:
        return replace(self, value=names.get(self.value, self.value))

    def read(self, draft: Draft, reading: Reading) -> Operand:
        if reading.side is not None:
            raise Refused(Reason.UNPAIRED, target=target_name(reading.node))
        return self.value


@dataclass(frozen=True)
class StoredValue(Value):
    """One value of the chain that a kernel stores in a form of its own, which no op on the plane reads."""

    value: str

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.value,)

    def renamed(self, names: Mapping[Operand, Operand]) -> Self:
        return replace(self, value=str(names.get(self.value, self.value)))

    def read(self, draft: Draft, reading: Reading) -> Operand:
        raise Refused(Reason.FEEDBACK, reduction=reading.member, into=reading.node)


@dataclass(frozen=True)
class Step(Value):
    """A node on the way to a member of several nodes, which has no value of its own."""

    @property
    def parts(self) -> tuple[str, ...]:
        return ()

    def read(self, draft: Draft, reading: Reading) -> Operand:
        raise Refused(Reason.FEEDBACK, reduction=reading.member, into=reading.node)


STEP = Step()
