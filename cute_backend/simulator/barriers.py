"""Barrier objects: mbarriers, the sixteen named barriers of a CTA, the barrier of a cluster.

mbarrier: PTX ISA 9.7.13.15. A phase completes when no arrival is pending and the transaction count is zero;
the pending count then starts again from the expected count. Each barrier passes the clocks of the agents that
arrive to those that wait (see shadow.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_backend.simulator.shadow import Clock
from cute_backend.simulator.simulation_errors import BarrierError

if TYPE_CHECKING:
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.warp import Warp

TX_LIMIT = (1 << 20) - 1
COUNT_LIMIT = (1 << 20) - 1


class Mbarrier:
    """One mbarrier object. `agent` counts its phases for the shadow state: see `next_epoch`."""

    def __init__(self, cta: Cta, offset: int, count: int, agent: int, epoch: int) -> None:
        if not 1 <= count <= COUNT_LIMIT:
            raise BarrierError(f"mbarrier.init with count {count}; 1 to {COUNT_LIMIT} is allowed")
        self.cta = cta
        self.offset = offset
        self.expected = count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.agent = agent
        self.first_epoch = epoch
        self.gathering = Clock(cta.cluster.agents.size)
        self.complete = Clock(cta.cluster.agents.size)
        self.by_commit = False
        self.completed_by_commit = False
        self.made_by = (agent, 0)

    @property
    def name(self) -> str:
        return f"mbarrier at shared {self.offset:#x} of {self.cta.name}"

    @property
    def next_epoch(self) -> int:
        """The number of the event that completes the current phase."""
        return self.first_epoch + self.phase + 1

    def describe(self) -> str:
        text = (
            f"{self.name}: phase {self.phase} (parity {self.phase & 1}) has "
            f"{self.expected - self.pending} of {self.expected} arrivals"
        )
        if self.tx > 0:
            text += f", {self.tx} bytes of transactions outstanding"
        elif self.tx < 0:
            text += f", and {-self.tx} bytes have landed that it did not expect"
        return text

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete (mbarrier.test_wait.parity)."""
        return (self.phase & 1) != parity

    def arrive(self, count: int, clock: Clock | None, *, drop: bool = False, commit: bool = False) -> int:
        """Registers `count` arrivals. Returns the phase that they count for."""
        phase = self.phase
        if count > self.pending:
            raise BarrierError(f"{count} arrival(s) more than it expects on {self.describe()}")
        self.pending -= count
        if drop:
            self.expected -= count
        if clock is not None:
            self.gathering.join(clock)
        self.by_commit |= commit
        self._settle()
        return phase

    def expect(self, nbytes: int) -> None:
        self.tx += nbytes
        self._check_tx()

    def complete_tx(self, nbytes: int) -> None:
        """Registers bytes that have arrived. Their event becomes visible with the phase."""
        self.tx -= nbytes
        self._check_tx()
        self._settle()

    def _check_tx(self) -> None:
        if abs(self.tx) > TX_LIMIT:
            raise BarrierError(f"transaction count {self.tx} beyond +-{TX_LIMIT} on {self.name}")

    def _settle(self) -> None:
        if self.pending or self.tx:
            return
        self.gathering.seen[self.agent] = self.next_epoch
        self.complete, self.gathering = self.gathering, self.gathering.copy()
        self.completed_by_commit, self.by_commit = self.by_commit, False
        self.phase += 1
        self.pending = self.expected
        self.cta.cluster.activity += 1


class Round:
    """One use of a barrier by all its threads. It is complete once all have arrived; `clock` joins their
    clocks.
    """

    def __init__(self, size: int) -> None:
        self.arrived = 0
        self.expected = 0
        self.clock = Clock(size)
        self.who: list[str] = []
        self.votes: list[int] = []
        self.voters = 0
        self.complete = False


class NamedBarrier:
    """barrier 0..15 of a CTA (PTX ISA 9.7.13.1). Arrivals count threads."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta = cta
        self.number = number
        self.round = Round(cta.cluster.agents.size)

    def describe(self) -> str:
        now = self.round
        return (
            f"barrier {self.number} of {self.cta.name}: {now.arrived} of {now.expected} threads have arrived"
            + (f" ({', '.join(now.who)})" if now.who else "")
        )

    def arrive(self, warp: Warp, threads: int, expected: int, votes: int = 0) -> Round:
        """Registers `threads` threads of `warp`, `votes` of them voting yes; returns the round they belong
        to.
        """
        now = self.round
        if now.arrived and expected != now.expected:
            raise BarrierError(
                f"barrier {self.number} of {self.cta.name}: {warp.name} expects {expected} threads, "
                f"{', '.join(now.who)} expected {now.expected}"
            )
        if expected % 32 or not 0 < expected <= 1024:
            raise BarrierError(
                f"barrier {self.number}: a thread count of {expected}; multiples of 32 are allowed"
            )
        now.expected = expected
        now.arrived += threads
        now.who.append(warp.name)
        now.votes.append(votes)
        now.clock.join(warp.release())
        if now.arrived > expected:
            raise BarrierError(f"{self.describe()}: too many")
        if now.arrived == expected:
            now.complete = True
            self.round = Round(self.cta.cluster.agents.size)
            self.cta.cluster.activity += 1
        return now


class ClusterBarrier:
    """barrier.cluster (PTX ISA 9.7.13.4): all threads of all CTAs that have not exited."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.round = Round(size)
        self.arrived: set[int] = set()

    def describe(self) -> str:
        return f"the cluster barrier: {len(self.arrived)} warps have arrived ({', '.join(self.round.who)})"

    def arrive(self, warp: Warp, clock: Clock | None) -> Round:
        """Registers a warp; `clock` is None for .relaxed with no fence before it."""
        if warp.agent in self.arrived:
            raise BarrierError(f"{warp.name} arrives twice at the cluster barrier with no wait between")
        now = self.round
        self.arrived.add(warp.agent)
        now.who.append(warp.name)
        if clock is not None:
            now.clock.join(clock)
        self.settle(warp)
        return now

    def settle(self, warp: Warp) -> None:
        """Completes the round if every warp that has not exited has arrived."""
        alive = {w.agent for cta in warp.cta.cluster.ctas for w in cta.warps if not w.exited}
        if self.arrived and alive <= self.arrived:
            self.round.complete = True
            self.round = Round(self.size)
            self.arrived = set()
            warp.cta.cluster.activity += 1
