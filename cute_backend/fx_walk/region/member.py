"""Members that join a region as a whole: several nodes of a graph that mean one thing.

A new kind is a file in `members/` with a finder and a class, and the finder is added to `FINDERS` in
`members/kinds.py`. If an op of the kind reads a whole axis, `is_reduction` in `graph/axes.py` has to know it,
since Inductor's own kernels end there: the end of a region counts their bytes (`ends/`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.refusals.reasons import Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.value import Value


class Search(Protocol):
    """The facts of the search for regions that members depend on."""

    @property
    def heads(self) -> Mapping[fx.Node, Sequence[fx.Node]]:
        """The heads of the members that a node is an inner node of."""

    @property
    def taken_back(self) -> Mapping[fx.Node, Refused]:
        """The heads of members that regions can't keep, each with the reason."""

    def may_share(self, anchors: Sequence[Anchor]) -> bool:
        """Whether the region of these anchors may share a launch with products of the same A."""

    def unshared(self, anchors: Sequence[Anchor]) -> str:
        """The reason why the region of these anchors shares no launch; empty if it may."""


@dataclass(frozen=True)
class Member(ABC):
    """Nodes of a graph that mean one thing: the `head` has the result, and `inner` are the nodes on the way
    to it, in order, which have no value of their own. No node outside may read an inner node, or the member
    has to be refused: readers get `Reason.FEEDBACK`."""

    head: fx.Node
    inner: tuple[fx.Node, ...]

    joins_late = False
    """Whether its head may join after values that are complete only when the kernel has ended, because steps
    on the way may be its own."""

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """The nodes outside of the region that it loads. The region joins it only if they do not depend on
        the region."""
        return ()

    @property
    def needs_shared_launch(self) -> bool:
        """Whether a region may have it only if it shares its launch with other products of its A."""
        return False

    @abstractmethod
    def joins(self, draft: Draft) -> bool:
        """Whether the region has what the member reads. Its head then joins as this member or not at all;
        otherwise it may join as another one, or as a node like others."""

    @abstractmethod
    def join(self, search: Search, draft: Draft) -> Value:
        """The value of the head as a member of the region. If it lies on the plane, its frame is recorded in
        the draft. It has the dtype of the head (`lower_cast`), and is not rounded otherwise. Raises Refused
        if the region can't have it."""

    def is_whole(self, draft: Draft) -> bool:
        """Whether the region may have it as a whole only. Otherwise its inner nodes may join one by one."""
        return True

    def unfit(self, draft: Draft) -> Refused | None:
        """The reason why a region can't keep it, asked once it is known what the kernel stores. It is then
        taken out of the region, with all that follows from it, and `join` finds the reason in
        `Search.taken_back`."""
        return None
