"""The accesses to each byte of global memory in one launch, and their order: finds races between all CTAs.

A launch has one GlobalShadow. For each cell of memory it keeps the accesses that a later one may still have
to be ordered after. Two accesses of a byte, one of which writes, are a race unless the vector clocks of
shadow.py say that the later one's agent knows of the earlier one, or both are morally strong: both are
strong, have the same size, go through the same proxy, and have scopes that include both CTAs (PTX ISA 8
"Memory Consistency Model"). A cell is as long as the narrowest access to it, 16 bytes at most, so adjacent
cells may belong to two CTAs.

Clocks pass from cluster to cluster at addresses that strong operations write. The clock of a release, or of
the last fence before a strong write, is recorded at the address and kept through atomic updates. A reader
receives it if it reads with acquire, or reads strongly and fences afterwards, and if both scopes include both
CTAs (release and acquire patterns, observation order). Barriers pass on these clocks like all others. For the
async proxy, the writer or the reader has to execute a fence.proxy.async in between.

Reads are recorded, and checked only when the same array is written. So inputs, which no CTA writes, cost
almost nothing.

Not checked: tensor maps in global memory, and races between the lanes of one warp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cute_backend.simulator.scopes import CtaId, Order, Scope
from cute_backend.simulator.simulation_errors import MissingProxyFence, RaceError

if TYPE_CHECKING:
    from cute_backend.simulator.memory import Range
    from cute_backend.simulator.shadow import Clock

LARGEST_CELL = 16

UNORDERED = "no barrier, and no release and acquire whose scopes include both, orders one after the other"
UNPUBLISHED = (
    "it did so through the generic proxy, and no fence.proxy.async of global memory stands between the two"
)


class Footprint(Protocol):
    """The bytes of an access: runs of equal length."""

    def runs(self) -> tuple[np.ndarray, int]:
        """The offset of each run in its registered range, and the length of one."""


@dataclass(slots=True)
class Lanes:
    """`nbytes` bytes at each of `offsets`."""

    offsets: np.ndarray
    nbytes: int

    def runs(self) -> tuple[np.ndarray, int]:
        return self.offsets, self.nbytes


@dataclass(slots=True, eq=False)
class Event:
    """An access by `agent`, in the cluster of `cta`.

    `epoch` is its number among the agent's events, or IN_FLIGHT while the access is in progress. `lanes` are
    the lanes of a warp that made it, as bits; each has a run of `footprint`, in their order. `who` names the
    agent in errors, and `text` is the instruction.
    """

    cta: CtaId
    agent: int
    epoch: int
    lanes: int
    proxy: str
    writes: bool
    order: Order
    who: str
    text: str
    footprint: Footprint

    def known_to(self, cta: CtaId, clock: Clock, lanes: int = -1) -> bool:
        """Whether an agent of `cta` with this clock knows the event: all of it, or the part of some
        `lanes`."""
        known = clock if cta.cluster == self.cta.cluster else clock.elsewhere.get(self.cta.cluster)
        return known is not None and known.covers(self.agent, self.epoch, self.lanes & lanes)

    def lanes_at(self, starts: np.ndarray, nbytes: int) -> int:
        """The lanes that accessed some of these bytes."""
        if not self.lanes:
            return 0
        offsets, length = self.footprint.runs()
        met = (offsets[:, None] < starts + nbytes) & (starts < offsets[:, None] + length)
        lanes = [1 << lane for lane in range(self.lanes.bit_length()) if self.lanes >> lane & 1]
        return sum(lanes[i] for i in np.flatnonzero(met.any(axis=1)))

    def may_meet(self, other: Event) -> bool:
        """Whether the two are morally strong, so that neither order is a race."""
        mine, theirs = self.order, other.order
        return (
            mine.scope is not None
            and theirs.scope is not None
            and mine.size == theirs.size
            and self.proxy == other.proxy
            and mine.scope.spans(self.cta, other.cta)
            and theirs.scope.spans(self.cta, other.cta)
        )

    def hides(self, old: Event) -> bool:
        """Whether every access that doesn't race with this later write doesn't race with `old` either."""
        mine, before = self.order, old.order
        return mine.scope is None or (
            before.scope is not None
            and before.scope >= mine.scope >= Scope.GPU
            and before.size == mine.size
            and self.proxy == old.proxy
        )

    def stands_for(self, read: Event) -> bool:
        """Whether an access that is ordered after this later read is also ordered after `read`, of the same
        lanes."""
        return (
            not read.writes
            and self.agent == read.agent
            and self.lanes == read.lanes
            and self.cta.cluster == read.cta.cluster
            and self.order == read.order
        )


class Sets:
    """Sets of events by number. 0 is the empty one."""

    def __init__(self) -> None:
        self.members: list[tuple[Event, ...]] = [()]
        self._numbers: dict[tuple[Event, ...], int] = {(): 0}

    def number(self, members: tuple[Event, ...]) -> int:
        found = self._numbers.get(members)
        if found is None:
            found = self._numbers[members] = len(self.members)
            self.members.append(members)
        return found


class Watched:
    """A registered range: the set of events of each cell, and the reads that are not in a set yet."""

    def __init__(self, place: Range, sets: Sets) -> None:
        self.place = place
        self.sets = sets
        self.lead = place.address % LARGEST_CELL
        self.cell = LARGEST_CELL
        self.numbers: np.ndarray | None = None
        self.reads: dict[tuple[object, ...], Event] = {}

    def remember(self, event: Event) -> None:
        """Records a read. Repeated reads of an agent are kept once."""
        footprint = event.footprint
        what = footprint.offsets.tobytes() if isinstance(footprint, Lanes) else event
        self.reads[event.cta.cluster, event.agent, event.lanes, event.text, what] = event

    def settle(self) -> None:
        """Moves the recorded reads to their cells."""
        for event in self.reads.values():
            self.put(self.cells(event.footprint), event, event.stands_for)
        self.reads.clear()

    def cells(self, footprint: Footprint) -> np.ndarray:
        """The cells of an access. Cells that are longer than the access's own elements are divided."""
        starts, nbytes = footprint.runs()
        starts = starts + self.lead
        odd = int(np.bitwise_or.reduce(starts)) | nbytes
        self._shorten(min(odd & -odd, LARGEST_CELL))
        if nbytes == self.cell:
            return starts // self.cell
        return ((starts // self.cell)[:, None] + np.arange(nbytes // self.cell)).reshape(-1)

    def _shorten(self, cell: int) -> None:
        if self.numbers is None:
            self.cell = cell
            self.numbers = np.zeros((self.lead + self.place.nbytes) // cell + 1, np.int32)
        elif cell < self.cell:
            self.numbers = np.repeat(self.numbers, self.cell // cell)
            self.cell = cell

    def taken(self, cells: np.ndarray) -> bool:
        """Whether any of these cells has been accessed."""
        assert self.numbers is not None
        return bool(self.numbers[cells].any())

    def put(self, cells: np.ndarray, event: Event, stands_for: Callable[[Event], bool]) -> None:
        """Adds an event to the sets of cells, replacing those for which `stands_for` is true."""
        assert self.numbers is not None
        before = self.numbers[cells]
        if not before.any():
            self.numbers[cells] = self.sets.number((event,))
            return
        for number in np.unique(before):
            kept = tuple(old for old in self.sets.members[number] if not stands_for(old))
            self.numbers[cells[before == number]] = self.sets.number((*kept, event))

    def met(self, cells: np.ndarray) -> Iterable[tuple[np.ndarray, Event]]:
        """The events of cells, each with the offsets of cells that have it."""
        assert self.numbers is not None
        numbers = self.numbers[cells]
        for number in np.unique(numbers):
            starts = cells[numbers == number] * self.cell - self.lead
            for event in self.sets.members[number]:
                yield starts, event


@dataclass(frozen=True)
class Release:
    """A release at an address: the clock that it published, its CTA and its scope."""

    cta: CtaId
    scope: Scope
    clock: Clock

    def includes(self, other: Release) -> bool:
        """Whether one who has acquired this release knows all that the other one published."""
        at_home = self.cta.cluster == other.cta.cluster
        return at_home and bool((self.clock.seen >= other.clock.seen).all())


@dataclass(frozen=True)
class Flag:
    """An element of `size` bytes that strong operations write, with the releases that a reader may
    observe."""

    size: int
    releases: dict[tuple[CtaId, Scope], Release]


class GlobalShadow:
    """The global memory of one launch."""

    def __init__(self) -> None:
        self._sets = Sets()
        self._watched: dict[int, Watched] = {}
        self._flags: dict[int, Flag] = {}

    def read(self, place: Range, event: Event, clock: Clock) -> None:
        """Checks and records a read by an agent that knows `clock`."""
        watched = self._of(place)
        if watched.numbers is not None and watched.taken(watched.cells(event.footprint)):
            self._check(watched, watched.cells(event.footprint), event, clock)
        watched.remember(event)

    def write(self, place: Range, event: Event, clock: Clock) -> None:
        """Checks and records a write, or an atomic update."""
        watched = self._of(place)
        watched.settle()
        cells = watched.cells(event.footprint)
        if watched.taken(cells):
            self._check(watched, cells, event, clock)
        watched.put(cells, event, lambda old: event.hides(old) and old.known_to(event.cta, clock))
        if self._flags and event.order.scope is None:
            starts, nbytes = event.footprint.runs()
            flags = np.array([*self._flags])
            offsets = flags[:, None] - place.address - starts
            for address in flags[((offsets >= 0) & (offsets < nbytes)).any(axis=1)].tolist():
                del self._flags[address]

    def record_releases(self, addresses: np.ndarray, order: Order, releases: list[Release]) -> None:
        """Records a strong write of an element at each address, with its releases."""
        for address in {int(a) for a in addresses}:
            old = self._flags.pop(address, None)
            found = dict(old.releases) if old is not None and order.updates and old.size == order.size else {}
            for release in releases:
                key = release.cta, release.scope
                known = found.get(key)
                clock = release.clock if known is None else known.clock.joined(release.clock)
                found[key] = Release(release.cta, release.scope, clock)
            if found:
                self._flags[address] = Flag(order.size, found)

    def observe(self, addresses: np.ndarray, order: Order, cta: CtaId) -> list[Release]:
        """The releases that a strong read of an element at each address, by a thread of `cta`, may
        observe."""
        scope = order.scope
        if not self._flags or scope is None:
            return []
        return [
            release
            for address in {int(a) for a in addresses} & self._flags.keys()
            if self._flags[address].size == order.size
            for release in self._flags[address].releases.values()
            if scope.spans(cta, release.cta) and release.scope.spans(cta, release.cta)
        ]

    def _of(self, place: Range) -> Watched:
        watched = self._watched.get(place.address)
        if watched is None:
            watched = self._watched[place.address] = Watched(place, self._sets)
        return watched

    def _check(self, watched: Watched, cells: np.ndarray, event: Event, clock: Clock) -> None:
        for starts, old in watched.met(cells):
            if not (event.writes or old.writes):
                continue

            def known(clock: Clock | None, old: Event = old, starts: np.ndarray = starts) -> bool:
                return clock is not None and (
                    old.known_to(event.cta, clock)
                    or old.known_to(event.cta, clock, old.lanes_at(starts, watched.cell))
                )

            if event.order.cached:
                error, why = RaceError, "ld.global.nc may read only memory that no thread of it writes"
            elif not known(clock):
                if event.may_meet(old):
                    continue
                error, why = RaceError, UNORDERED
            elif _crosses(old, event) and not known(clock.public):
                error, why = MissingProxyFence, UNPUBLISHED
            else:
                continue
            verb = "overwrites" if event.writes else "reads"
            does = "updates" if old.order.updates else "writes" if old.writes else "reads"
            raise error(
                f"{event.who} {verb} byte {int(starts[0]):#x} of {watched.place.owner}, which {old.who} "
                f"{does} in the same kernel (`{old.text}`): {why}"
            )


def _crosses(old: Event, new: Event) -> bool:
    """Whether the async proxy accesses data that the generic proxy wrote."""
    return new.proxy == "async" and old.writes and old.proxy == "generic"
