"""The strength and the scope of accesses to memory (PTX ISA 8 "Memory Consistency Model")."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from cute_backend.simulator.syntax import Instruction


@dataclass(frozen=True)
class CtaId:
    """The identity of a CTA in a launch: the number of its cluster, and its rank there."""

    cluster: int
    rank: int


class Scope(IntEnum):
    """The threads that an operation is ordered with, narrowest first (PTX ISA 8.5)."""

    CTA = 0
    CLUSTER = 1
    GPU = 2
    SYS = 3

    def spans(self, one: CtaId, other: CtaId) -> bool:
        """Whether the scope of an operation in one CTA includes the threads of the other."""
        if self >= Scope.GPU or one == other:
            return True
        return self is Scope.CLUSTER and one.cluster == other.cluster


_SCOPES = {"cta": Scope.CTA, "cluster": Scope.CLUSTER, "gpu": Scope.GPU, "gl": Scope.GPU, "sys": Scope.SYS}


@dataclass(frozen=True)
class Order:
    """The memory order of an access. `scope` is None for a weak one; `size` is the bytes of one element.

    `updates` is true for an atomic update, which reads and writes. `cached` is true for ld.global.nc, which
    may read data that a cache held before the kernel began.
    """

    size: int
    scope: Scope | None = None
    acquires: bool = False
    releases: bool = False
    updates: bool = False
    cached: bool = False

    @property
    def strong(self) -> bool:
        return self.scope is not None


def order_of(instruction: Instruction, size: int, *, updates: bool = False) -> Order:
    """The order of a load, a store or an atomic update of elements of `size` bytes (PTX ISA 8.4).

    .volatile and .mmio mean .relaxed.sys; an atomic update without a modifier is .relaxed.gpu.
    """
    words = instruction.parts[1:]
    acquires = "acquire" in words or "acq_rel" in words
    releases = "release" in words or "acq_rel" in words
    scope = scope_of(instruction)
    if "volatile" in words or "mmio" in words:
        scope = Scope.SYS if scope is None else scope
    elif not (updates or acquires or releases or "relaxed" in words):
        scope = None
    elif scope is None:
        scope = Scope.GPU
    return Order(size, scope, acquires, releases, updates, "nc" in words)


def scope_of(instruction: Instruction) -> Scope | None:
    """The scope that an instruction names, or None if it names none."""
    return next((_SCOPES[word] for word in instruction.parts[1:] if word in _SCOPES), None)
