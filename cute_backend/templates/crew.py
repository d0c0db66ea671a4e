"""The roles of a CTA's warps and the arrivals at each barrier, declared as data and checked when a kernel is
created.

Arrival counts are computed from these declarations. A kernel whose declarations contradict each other would
hang, or read data that has not arrived. It is rejected before it is compiled, by an error that shows the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_backend.planning import SMEM_RESERVE

WARP = 32
"""Threads of a warp."""
WARPS = 4
"""Warps of a warpgroup."""

MAX_ARRIVALS = 2**20 - 1
"""The largest arrival count of an mbarrier (PTX ISA, mbarrier.init)."""
MAX_WARPS = 32
"""Warps of a CTA (CUDA C++ Programming Guide, technical specifications)."""
NAMED_BARRIERS = 16
"""The number of named barriers of a CTA. The first is the barrier of all its threads (PTX ISA, bar)."""
REGISTERS = 64 * 1024
"""The registers of a multiprocessor (CUDA C++ Programming Guide, technical specifications)."""
REGISTER_UNIT = 8
"""The number of a thread's registers is a multiple of this (PTX ISA, setmaxnreg)."""
MBARRIER_BYTES = 8

SMEM_ALIGN = 1024
"""The 128-byte swizzle repeats after this many bytes, so swizzled buffers are aligned to it."""
BARRIER_BYTES = SMEM_RESERVE - SMEM_ALIGN - 16
"""Bytes left for the barriers of rings. The 16 subtracted hold the address and barrier of tensor memory."""


@dataclass(frozen=True)
class Role:
    """Warps of a CTA with one job: `warps` of them, from warp number `first` on. They call `run` with the
    state of the CTA."""

    name: str
    first: int
    warps: int
    job: str
    run: Callable[[Any], object] = field(repr=False, compare=False)

    @property
    def numbers(self) -> range:
        """The numbers of its warps."""
        return range(self.first, self.first + self.warps)


@dataclass(frozen=True)
class Arrivals:
    """The arrivals at a barrier in one phase: `threads` threads in each of `warps` warps of `role`, in each
    of `ctas` CTAs. `warps` is only a part of the role's warps if parts alternate from phase to phase."""

    role: Role
    warps: int
    threads: int
    ctas: int = 1

    @property
    def count(self) -> int:
        """The number of arrivals that complete a phase."""
        return self.warps * self.threads * self.ctas

    def __str__(self) -> str:
        warps = f"{self.warps} warp{'s' * (self.warps > 1)} of {self.role.name}"
        factors = [warps, f"{self.threads} threads"] if self.threads > 1 else [warps]
        factors += [f"{self.ctas} CTAs"] if self.ctas > 1 else []
        return " x ".join(factors) + (f" = {self.count}" if len(factors) > 1 else "")


def one(role: Role) -> Arrivals:
    """The single arrival of a role's only warp, for TMA's bytes or, by a commit, for the tensor cores."""
    return Arrivals(role, 1, 1)


@dataclass(frozen=True)
class Ring:
    """Stages that one role fills and another empties, with two mbarriers each.

    A barrier counts the bytes that TMA writes separately, on top of the arrivals given here.
    """

    name: str
    stages: int
    filled: Arrivals
    emptied: Arrivals
    also_filled: Arrivals | None = None
    """The arrivals of a second role, which fills a part of each stage."""

    @property
    def fills(self) -> tuple[Arrivals, ...]:
        """The arrivals, by role, that together fill a stage."""
        return (self.filled, self.also_filled) if self.also_filled else (self.filled,)

    @property
    def barrier_bytes(self) -> int:
        """Bytes of shared memory that its barriers take."""
        return 2 * MBARRIER_BYTES * self.stages


@dataclass(frozen=True)
class Meeting:
    """A named barrier, at which warps of one role or of several wait for each other."""

    name: str
    barrier: int
    warps: tuple[tuple[Role, int], ...]

    @property
    def threads(self) -> int:
        """The number of threads that meet."""
        return WARP * sum(count for _, count in self.warps)


@dataclass(frozen=True)
class Crew:
    """The roles of a CTA, the rings between them, and the barriers at which they meet.

    `registers` holds the number of registers per thread for each warpgroup; it is empty if the kernel does
    not redistribute registers at its start. Raises ValueError if the declarations contradict each other or
    exceed a CTA's limits. `str` formats a crew as tables.
    """

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...]
    meetings: tuple[Meeting, ...] = ()
    registers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_roles()
        self._check_registers()
        for ring in self.rings:
            self._check_ring(ring)
        self._check_barriers()

    @property
    def threads(self) -> int:
        """Threads of a CTA: all warps up to the last that has a role or is in a warpgroup of `registers`."""
        return WARP * max(WARPS * len(self.registers), *(role.numbers.stop for role in self.roles))

    @cute.jit
    def run(self, roles: cutlass.Constexpr[Sequence[Role]], warp: Int32, shared: Any):
        """Does the work of that one of `roles` that the warp with this number has, if it has one."""
        for role in roles:
            if self.has_role(warp, role):
                role.run(shared)

    def has_role(self, warp: Int32, role: Role) -> bool | Boolean:
        """Whether the warp with this number has a role."""
        if role.warps * WARP == self.threads:
            return True
        if role.warps == 1:
            return warp == role.first
        return warp < role.numbers.stop if role.first == 0 else warp >= role.first

    def _check_roles(self) -> None:
        owners: dict[int, Role] = {}
        for role in self.roles:
            for warp in role.numbers:
                if warp in owners:
                    raise ValueError(
                        f"warp {warp} has two roles: {owners[warp].name} has warps {_span(owners[warp])}, "
                        f"{role.name} {_span(role)}"
                    )
                owners[warp] = role
        if self.threads > WARP * MAX_WARPS:
            raise ValueError(f"{self.threads // WARP} warps have roles; a CTA has {MAX_WARPS}")

    def _check_registers(self) -> None:
        if not self.registers:
            return
        groups, warps = len(self.registers), self.threads // WARP
        if warps != groups * WARPS:
            raise ValueError(
                f"registers are dealt out to {groups} warpgroups, {groups * WARPS} warps, of {warps}"
            )
        given = WARP * WARPS * sum(self.registers)
        each = REGISTERS // self.threads // REGISTER_UNIT * REGISTER_UNIT
        if given > each * self.threads:
            raise ValueError(
                f"{WARP * WARPS} threads x ({' + '.join(map(str, self.registers))}) registers = {given}; "
                f"{self.threads} threads begin with {each} each = {each * self.threads}"
            )

    def _check_ring(self, ring: Ring) -> None:
        if ring.stages < 1:
            raise ValueError(
                f"ring {ring.name} has {ring.stages} stages; {ring.filled.role.name} fills one at a time"
            )
        fills = [("filled", arrivals) for arrivals in ring.fills]
        for done, arrivals in (*fills, ("emptied", ring.emptied)):
            role = arrivals.role
            if role not in self.roles:
                raise ValueError(f"ring {ring.name} is {done} by {role.name}, which no warp of the CTA is")
            if arrivals.warps < 1 or role.warps % arrivals.warps:
                raise ValueError(
                    f"ring {ring.name} is {done} by {arrivals.warps} warps of {role.name} at a time, which "
                    f"don't divide its {role.warps}"
                )
            if not 1 <= arrivals.threads <= WARP:
                raise ValueError(
                    f"ring {ring.name} is {done} by {arrivals.threads} threads of each warp of {role.name}; "
                    f"a warp has {WARP}"
                )
            if not 1 <= arrivals.count <= MAX_ARRIVALS:
                raise ValueError(
                    f"ring {ring.name} is {done} by {arrivals.warps} warps x {arrivals.threads} threads x "
                    f"{arrivals.ctas} CTAs = {arrivals.count} arrivals; a barrier counts 1 to {MAX_ARRIVALS}"
                )

    def _check_barriers(self) -> None:
        met: dict[int, Meeting] = {}
        for meeting in self.meetings:
            if not 1 <= meeting.barrier < NAMED_BARRIERS:
                raise ValueError(
                    f"{meeting.name} is named barrier {meeting.barrier}, of 1 to {NAMED_BARRIERS - 1}"
                )
            if meeting.barrier in met:
                raise ValueError(
                    f"{met[meeting.barrier].name} and {meeting.name} are both named barrier {meeting.barrier}"
                )
            for role, warps in meeting.warps:
                if role not in self.roles or role.warps % warps:
                    raise ValueError(
                        f"at {meeting.name} meet {warps} warps of {role.name}, which has "
                        f"{role.warps if role in self.roles else 0}"
                    )
            met[meeting.barrier] = meeting
        self.check_further(0)

    def check_further(self, barriers: int) -> None:
        """Raises ValueError if shared memory has no room for `barriers` more beside those of the rings."""
        needed = sum(ring.barrier_bytes for ring in self.rings) + MBARRIER_BYTES * barriers
        if needed > BARRIER_BYTES:
            each = " + ".join(f"{ring.stages} of {ring.name}" for ring in self.rings)
            further = f" + {MBARRIER_BYTES} x {barriers}" if barriers else ""
            raise ValueError(
                f"barriers take {2 * MBARRIER_BYTES} bytes x ({each}){further} = {needed}; "
                f"{BARRIER_BYTES} are left"
            )

    def __str__(self) -> str:
        in_order = sorted(self.roles, key=lambda role: role.first)
        roles = [("warps", "role", "job"), *((_span(role), role.name, role.job) for role in in_order)]
        rings = [("ring", "stages", "filled by", "emptied by")]
        rings += [
            (ring.name, str(ring.stages), ", ".join(map(str, ring.fills)), str(ring.emptied))
            for ring in self.rings
        ]
        meetings = [("barrier", "of", "threads")] if self.meetings else []
        meetings += [(str(each.barrier), each.name, str(each.threads)) for each in self.meetings]
        return "\n\n".join("\n".join(_aligned(rows)) for rows in (roles, rings, meetings) if rows)


def _span(role: Role) -> str:
    return str(role.first) if role.warps == 1 else f"{role.first} to {role.numbers[-1]}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
