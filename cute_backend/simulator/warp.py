"""A warp: 32 lanes as numpy vectors, with a program counter per lane.

Lanes at the same program counter form a group. Of the groups that don't wait, the one with the lowest counter
runs (PTX ISA 3.1: lanes of a warp may diverge and advance on their own). An instruction that needs the whole
warp (`.aligned`, or a membermask) makes its group wait until the other lanes reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cute_backend.simulator.asynchrony import Pipe
from cute_backend.simulator.lane_accesses import LaneAccesses, LaneReleases, bits
from cute_backend.simulator.memory import GlobalMemory, LocalMemory
from cute_backend.simulator.scopes import CtaId, Order, Scope
from cute_backend.simulator.shadow import Access, Clock
from cute_backend.simulator.simulation_errors import RaceError

if TYPE_CHECKING:
    from cute_backend.simulator.bound_program import Program
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.global_shadow import Release

T = TypeVar("T")

LANES = 32
ALL = b"\1" * LANES
NONE = b"\0" * LANES
LANE_IDS = np.arange(LANES)


def _same(mask: np.ndarray, other: np.ndarray) -> bool:
    return mask is other or mask.tobytes() == other.tobytes()


Fresh = Callable[[tuple[int, ...], type[np.generic]], np.ndarray]


class _Moved:
    """Returned by a step that has set the program counter itself."""


MOVED = _Moved()


@dataclass
class Wait:
    """The reason why a group can't continue.

    Once `ready` is true, the instruction runs again if `retry` is set, and counts as done otherwise. `then`
    runs before the warp continues. `expires` allows a spurious time-out (mbarrier.try_wait).
    """

    ready: Callable[[], bool]
    describe: Callable[[], str]
    retry: bool = True
    then: Callable[[], None] | None = None
    expires: bool = False
    since: int = 0


class Group:
    """Lanes at one program counter."""

    __slots__ = ("mask", "pc", "wait")

    def __init__(self, pc: int, mask: np.ndarray) -> None:
        self.pc = pc
        self.mask = mask
        self.wait: Wait | None = None


class File(dict[int, np.ndarray]):
    """A register file under one type: `array` is (registers, 32), and an entry a register, as a view of it.

    Views are kept, since making one takes a third of the time of an instruction.
    """

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __missing__(self, slot: int) -> np.ndarray:
        register: np.ndarray = self.array[slot]
        dict.__setitem__(self, slot, register)
        return register

    def __setitem__(self, slot: int, value: np.ndarray) -> None:
        self.array[slot] = value

    def view(self, dtype: type[np.generic]) -> File:
        return File(self.array.view(dtype))


class Registers:
    """The register files of 32 lanes, each under the types that it can be seen as.

    `fresh` makes an array of a shape and dtype: the contents before the first write.
    """

    def __init__(self, counts: dict[str, int], fresh: Fresh) -> None:
        self.pred = File(fresh((counts["p"], LANES), np.bool_))
        self.u16 = File(fresh((counts["h"], LANES), np.uint16))
        self.s16 = self.u16.view(np.int16)
        self.f16 = self.u16.view(np.float16)
        self.u32 = File(fresh((counts["w"], LANES), np.uint32))
        self.s32 = self.u32.view(np.int32)
        self.f32 = self.u32.view(np.float32)
        self.u64 = File(fresh((counts["d"], LANES), np.uint64))
        self.s64 = self.u64.view(np.int64)
        self.f64 = self.u64.view(np.float64)
        self.u128 = File(fresh((counts["q"], LANES, 2), np.uint64))


class Warp(Registers):
    """Registers, masks, program counters, clock and counters of one warp."""

    def __init__(
        self, cta: Cta, index: int, program: Program, special: dict[str, Any], mask: np.ndarray
    ) -> None:
        self.cta = cta
        self.index = index
        self.program = program
        self.special = special
        super().__init__(program.entry.register_counts, cta.cluster.engine.garbage)
        self.threads = mask
        self.register_limit = program.launch_registers
        self.alive = mask.copy()
        self.group = Group(0, mask)
        self.groups = [self.group]
        self.pc = 0
        self.mask = mask
        self.full = bool(mask.all())
        self.exited = False
        self.alone = not cta.cluster.launch.overlaps
        self.timed_out = False
        self.name = f"warp {index} of {cta.name}"
        cluster = cta.cluster
        self.agent = cluster.agents.new(self.name, generic=True)
        self.clock = Clock(cluster.agents.size)
        self.epoch = 1
        self.clock.seen[self.agent] = 1
        # Accesses that not all lanes know of: the first event of each, and the lanes that made it.
        self.apart: list[tuple[int, np.ndarray]] = []
        self.fenced: Clock | None = None
        self.lane_accesses = LaneAccesses(cluster.agents.new(f"global memory of {self.name}"), self.clock)
        self.lane_releases = LaneReleases()
        # The clock of the last fence that releases to each scope, and the releases that strong reads have met
        # and that a later fence may acquire.
        self.fences: dict[Scope, Clock] = {}
        self.observed: dict[tuple[CtaId, Scope, Scope], Release] = {}
        self.local = LocalMemory(cta.cluster.engine.garbage((program.local_bytes, LANES), np.uint8))
        self.counts = cluster.reports.counts(self)
        self.carry = np.zeros(LANES, np.uint8)
        self.cluster_round: Any = None
        self.pipes: dict[str, Any] = {}
        self.report = cluster.reports.warp(self)

    @property
    def role(self) -> str:
        """The role of the warp: see roles.py."""
        return self.program.roles.of(self)

    @property
    def global_memory(self) -> GlobalMemory:
        """Global memory, for an instruction that is about to access it.

        Raises RaceError while earlier kernels may still run: until this warp has waited for their end, or has
        met at a barrier with a warp that has.
        """
        if not self.alone:
            if not self.clock.seen[self.cta.cluster.ahead]:
                raise RaceError(
                    "global memory is accessed before griddepcontrol.wait, in a launch that may begin before "
                    "the kernels ahead of it in the stream have ended"
                )
            self.alone = True
        return self.cta.cluster.memory

    # --- running -----------------------------------------------------------------------------------------
    def run(self, budget: int) -> int:
        """Executes up to `budget` instructions, fewer if the warp has to wait; returns how many."""
        steps, counts = self.program.steps, self.counts
        done = 0
        while done < budget:
            pc = self.pc
            done += 1
            outcome = steps[pc](self)
            if outcome is None:
                counts[pc] += 1
                self.pc = pc + 1
                if len(self.groups) > 1:
                    self._choose()
            elif outcome.__class__ is int:
                counts[pc] += 1
                self.pc = outcome
                if len(self.groups) > 1:
                    self._choose()
            elif outcome is MOVED:
                counts[pc] += 1
                if self.exited or self.group.wait is not None:
                    break
            else:
                outcome.since = self.cta.cluster.engine.now
                self.group.wait = outcome
                if not outcome.retry:
                    counts[pc] += 1
                self._choose()
                if self.group.wait is not None:
                    break
        return done

    def wake(self) -> bool:
        """Tests the waits; True if some group can run."""
        if self.exited:
            return False
        if len(self.groups) == 1:
            wait = self.group.wait
            if wait is None:
                return True
            if not wait.ready():
                return False
            self._resume(self.group)
            return True
        woken = False
        self.group.pc = self.pc
        for group in self.groups:
            if group.wait is None or group.wait.ready():
                if group.wait is not None:
                    self._resume(group)
                woken = True
        if woken:
            self.pc = self.group.pc
            self._choose()
        return woken

    def _resume(self, group: Group) -> None:
        wait = group.wait
        assert wait is not None
        group.wait = None
        self.report.waited(wait)
        if wait.then is not None:
            wait.then()
        if not wait.retry:
            group.pc += 1
            if group is self.group or len(self.groups) == 1:
                self.pc = group.pc

    def expire(self) -> bool:
        """Ends one expiring wait by a spurious time-out; False if there is none."""
        for group in self.groups:
            if group.wait is not None and group.wait.expires:
                self.group.pc = self.pc
                self.report.waited(group.wait)
                group.wait = None
                self.timed_out = True
                self.pc = self.group.pc
                self._choose()
                return True
        return False

    # --- divergence --------------------------------------------------------------------------------------
    def split(self, target: int, taken: np.ndarray, rest: np.ndarray) -> _Moved:
        """A branch that some lanes take. It makes two groups; the one with the lower program counter runs."""
        self.group.mask = rest
        self.group.pc = self.pc + 1
        self.groups.append(Group(target, taken))
        self.pc += 1
        self._choose()
        return MOVED

    def spread(self, targets: np.ndarray) -> _Moved:
        """An indexed branch: one target per lane."""
        mask = self.mask
        self.groups.remove(self.group)
        for target in np.unique(targets[mask]):
            self.groups.append(Group(int(target), mask & (targets == target)))
        self.group = self.groups[-1]
        self.pc = self.group.pc
        self._choose()
        return MOVED

    def exit(self, lanes: np.ndarray) -> _Moved:
        """Ends these lanes."""
        self.alive &= ~lanes
        rest = self.group.mask & ~lanes
        if rest.any():
            self.group.mask = rest
            self.group.pc = self.pc + 1
            self.pc += 1
        else:
            self.groups.remove(self.group)
            if not self.groups:
                self.exited = True
                return MOVED
            self.group = self.groups[0]
            self.pc = self.group.pc
        self._choose()
        return MOVED

    def state(self) -> int:
        """A digest of all that decides the warp's next steps, except for what it shares with other warps."""
        files = (each.array for each in (self.pred, self.u16, self.u32, self.u64, self.u128))
        groups = [(group.pc, group.mask.tobytes()) for group in self.groups]
        return hash((*groups, *(hash(each.tobytes()) for each in (*files, self.carry, self.local.data))))

    def _choose(self) -> None:
        """Joins groups that have met, and selects the lowest that can run."""
        self.group.pc = self.pc
        groups = self.groups
        if len(groups) == 1 and groups[0].mask is self.mask:
            return
        if len(groups) > 1:
            groups.sort(key=lambda g: g.pc)
            merged = [groups[0]]
            for group in groups[1:]:
                last = merged[-1]
                waits_apart = any(g.wait is not None and not g.wait.retry for g in (last, group))
                if group.pc == last.pc and not waits_apart:
                    last.mask = last.mask | group.mask
                    last.wait = None
                else:
                    merged.append(group)
            self.groups = groups = merged
        chosen = next((g for g in groups if g.wait is None), None)
        if chosen is None:
            chosen = next((g for g in groups if g is self.group), groups[0])
        self.group = chosen
        self.pc = chosen.pc
        self.mask = chosen.mask
        self.full = bool(chosen.mask.all())

    def together(self, members: np.ndarray | None = None) -> Wait | None:
        """A wait for the living lanes (of `members`), or None if all of them are in the running group."""
        if self.full:
            return None

        def missing() -> np.ndarray:
            wanted = self.alive if members is None else self.alive & members
            return wanted & ~group.mask

        group = self.group
        if not missing().any():
            return None

        def describe() -> str:
            lanes = np.flatnonzero(missing()).tolist()
            return f"lanes {lanes} of the same warp, which don't reach this instruction"

        return Wait(lambda: not missing().any(), describe)

    # --- happens-before ----------------------------------------------------------------------------------
    def release(self) -> Clock:
        """A clock of the events that the running lanes know, their own included. A new event of the warp
        begins.

        The running lanes don't know the accesses that other lanes made since all last met.
        """
        clock = self.clock.copy()
        clock.seen[self.agent] = self._known(self.mask)
        self.lane_accesses.publish(clock, self.mask)
        if self.lane_releases:
            self._hear(clock, self.lane_releases.of_any(bits(self.mask)))
        self._begin_event()
        return clock

    def global_clock(self) -> Clock:
        """The clock of the running lanes for an access to global memory."""
        if not self.lane_releases:
            return self.clock
        clock = self.clock.copy()
        self._hear(clock, self.lane_releases.of_all(bits(self.mask)))
        return clock

    def _hear(self, clock: Clock, releases: list[Release]) -> None:
        for release in releases:
            clock.hear(release.clock, release.cta.cluster, self.cta.cluster.index)

    def acquire(self, clock: Clock) -> None:
        """The running lanes learn the events of `clock`. If all lanes are running, they also learn the warp's
        own events up to the release of that clock."""
        self.clock.join(clock)
        if self.lane_accesses.apart:
            self.lane_accesses.meet(clock)
        if self.lane_releases and not (self.alive & ~self.mask).any():
            self.lane_releases.forget(self.clock)
        if self.apart and not (self.alive & ~self.mask).any():
            before = int(clock.seen[self.agent])
            ends = [*(first - 1 for first, _ in self.apart[1:]), self.epoch]
            self.apart = [
                (max(first, before + 1), lanes)
                for (first, lanes), end in zip(self.apart, ends, strict=True)
                if end > before
            ]

    def publish(self, *, shared: bool = True, globally: bool = True) -> None:
        """fence.proxy.async: publishes the events that the running lanes know to the async proxy, and begins
        a new event. It applies to shared memory, to global memory, or to both."""
        if shared:
            self.clock.publish()
            self.clock.published[self.agent] = self._known(self.mask)
        if globally:
            public = self.clock.copy()
            public.public = None
            self._hear(public, self.lane_releases.of_any(bits(self.mask)))
            self.lane_accesses.publish(public, self.mask)
            self.clock.publish_too(public)
        self._begin_event()

    def learn(self, release: Release) -> None:
        """The running lanes learn the events of a release. Other lanes don't learn those of another cluster,
        until all lanes meet."""
        if release.cta.cluster == self.cta.cluster.index:
            self.acquire(release.clock)
        elif (self.alive & ~self.mask).any():
            self.lane_releases.add(release, bits(self.mask))
        else:
            self._hear(self.clock, [release])

    def observe(self, releases: list[Release], order: Order) -> None:
        """Records the releases that a strong read met. An acquire learns their events at once, any other read
        at the next fence."""
        for release in releases:
            if order.acquires:
                self.learn(release)
            elif order.scope is not None:
                self.observed[release.cta, release.scope, order.scope] = release

    def fence(self, scope: Scope, *, acquires: bool, releases: bool) -> None:
        """A fence of global memory. If it acquires, the lanes learn the releases that earlier strong reads
        met; if it releases, later strong writes pass on the events that are known now."""
        if acquires:
            for key, release in list(self.observed.items()):
                if scope.spans(self.cta.id, release.cta):
                    self.learn(self.observed.pop(key))
        if releases:
            clock = self.release()
            self.fences.update((narrower, clock) for narrower in Scope if narrower <= scope)

    def access(self, text: str) -> Access:
        """An access of the running lanes through the generic proxy, now."""
        if not self.apart or not _same(self.apart[-1][1], self.mask):
            self._begin_event()
            self.apart.append((self.epoch, self.mask))
        return Access(self.agent, self.epoch, self.clock, "generic", text)

    def issue(self, agent: int, epoch: int, text: str) -> Access:
        """An access of asynchronous work that the running lanes issue, as event `epoch` of `agent`.

        Each lane knows its own events, and those of the others up to the last time that all met.
        """
        clock = self.clock.copy()
        self._hear(clock, self.lane_releases.of_all(bits(self.mask)))
        alone = np.count_nonzero(self.mask) == 1
        lanes = self.mask if alone else np.zeros_like(self.mask)
        clock.seen[self.agent] = self._known(lanes)
        self.lane_accesses.publish(clock, lanes)
        return Access(agent, epoch, clock, "async", text, self.agent)

    def _known(self, lanes: np.ndarray) -> int:
        """The last event before the first access, since all lanes met, of a lane that is not among these."""
        return next((first - 1 for first, mask in self.apart if (mask & ~lanes).any()), self.epoch)

    def _begin_event(self) -> None:
        self.epoch += 1
        self.clock.seen[self.agent] = self.epoch

    def own(self, kind: str, make: Callable[[Warp], T]) -> T:
        """This warp's state of a kind of asynchronous work, which `make` makes on first use."""
        if (found := self.pipes.get(kind)) is None:
            found = self.pipes[kind] = make(self)
        return found

    def new_pipe(self, kind: str) -> Pipe:
        return Pipe(f"{kind} of {self.name}", self.cta.cluster.engine)
