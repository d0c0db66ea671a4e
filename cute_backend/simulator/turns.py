"""Runs a cluster: its warps take turns."""

from __future__ import annotations

from collections.abc import Iterator

from cute_backend.simulator.cta import Cluster
from cute_backend.simulator.report import ReportBuilder
from cute_backend.simulator.roles import UNNAMED
from cute_backend.simulator.simulation_errors import ResourceError, SimulationError
from cute_backend.simulator.warp import Warp

QUANTUM = 32
"""Instructions that a warp executes before another warp continues."""
IDLE_LIMIT = 100_000
"""Instructions without effect after which a cluster may be spinning for ever."""
SPIN_LIMIT = 20_000
"""Further instructions after which it is spinning, if none of its warps has reached a new state."""


class RunningCluster:
    """A running cluster: its warps take turns."""

    def __init__(self, cluster: Cluster, builder: ReportBuilder) -> None:
        self.cluster = cluster
        self.builder = builder
        self.warps = [warp for cta in cluster.ctas for warp in cta.warps]
        random = cluster.engine.random
        self.speeds = [QUANTUM] * len(self.warps)
        self.starts = [0] * len(self.warps)
        if random is not None:
            self.speeds = [int(s) for s in random.integers(2, 2 * QUANTUM, len(self.warps))]
            self.starts = [int(s) for s in random.integers(0, 300, len(self.warps))]
        self.last_start = max(self.starts)
        self.quiet_since = 0
        self.quiet_activity = -1
        self.states: set[tuple[int, int]] = set()
        self.new_state_at = 0
        self.expired_at = -1
        self.executed = 0
        self.finished = False

    def turn(self) -> bool:
        """Runs every warp once. Returns False if no warp moved and no wait can time out."""
        engine = self.cluster.engine
        ran = []
        for warp in self._order():
            if warp.exited or not warp.wake():
                continue
            executed = self._run(warp, self._budget(warp))
            ran.append(warp)
            self.executed += executed
            engine.advance(executed)
            if warp.exited:
                self._retire(warp)
        self.warps = [w for w in self.warps if not w.exited]
        if not self.warps:
            engine.drain()
            self.finished = True
            return True
        if ran:
            return self._watch(ran)
        if self._start_late() or engine.jump():
            return True
        return self._expire()

    def _start_late(self) -> bool:
        """Advances the clock to the start of the next warp. Returns False if all have started.

        It is called when all warps that have started wait.
        """
        engine = self.cluster.engine
        later = [s for s in (self.starts[self._number(w)] for w in self.warps) if s > engine.now]
        if later:
            engine.advance(min(later) - engine.now)
        return bool(later)

    def _order(self) -> Iterator[Warp]:
        engine = self.cluster.engine
        warps = self.warps
        if engine.now < self.last_start:
            warps = [w for w in warps if engine.now >= self.starts[self._number(w)]] or warps
        if engine.random is None:
            return iter(warps)
        return (warps[i] for i in engine.random.permutation(len(warps)))

    def _number(self, warp: Warp) -> int:
        return warp.cta.rank * len(warp.cta.warps) + warp.index

    def _budget(self, warp: Warp) -> int:
        random = self.cluster.engine.random
        speed = self.speeds[self._number(warp)]
        return speed if random is None else 1 + int(random.integers(0, speed))

    def _run(self, warp: Warp, budget: int) -> int:
        try:
            return warp.run(budget)
        except SimulationError as error:
            if error.where is None:
                error.where = where(warp)
            raise

    def _retire(self, warp: Warp) -> None:
        self.builder.add(warp)
        cta = warp.cta
        self.cluster.activity += 1
        self.cluster.barrier.settle(warp)
        if all(w.exited for w in cta.warps):
            cta.finished = True
            if cta.tmem.allocated:
                raise ResourceError(
                    f"{cta.name} exits with tensor memory allocated (columns: size {cta.tmem.allocated}); "
                    "tcgen05.dealloc must come first"
                )

    def _watch(self, ran: list[Warp]) -> bool:
        """Records that these warps ran. Returns False once they have, for a long time, changed nothing that
        another warp could wait for, and reached no new state. A warp that computes reaches new states."""
        cluster, now = self.cluster, self.cluster.engine.now
        if cluster.activity != self.quiet_activity:
            self.quiet_activity = cluster.activity
            self.quiet_since = now
            self.states.clear()
        if self.quiet < IDLE_LIMIT:
            self.new_state_at = now
            return True
        found = {(self._number(warp), warp.state()) for warp in ran if not warp.exited}
        if not found <= self.states:
            self.states |= found
            self.new_state_at = now
        return now < self.new_state_at + SPIN_LIMIT

    @property
    def quiet(self) -> int:
        """Instructions since the last event that another warp or cluster could wait for."""
        return self.cluster.engine.now - self.quiet_since

    def _expire(self) -> bool:
        """Makes each wait that may time out do so once. It is called when no warp runs and no operation is in
        progress."""
        if self.expired_at == self.cluster.activity:
            return False
        self.expired_at = self.cluster.activity
        return any(warp.expire() for warp in self.warps)

    def describe(self, unless_waiting: str) -> str:
        """The current instruction of every warp, and the event that it waits for."""
        lines = [f"in cluster {self.cluster.index}:"]
        for warp in self.warps:
            waits = "; ".join(g.wait.describe() for g in warp.groups if g.wait is not None)
            lines.append(f"  {where(warp)}\n    {f'waits for {waits}' if waits else unless_waiting}")
        return "\n".join(lines)


def where(warp: Warp) -> str:
    """A warp and its current instruction, for errors."""
    instructions = warp.program.entry.instructions
    place = warp.name if warp.role == UNNAMED else f"{warp.role} {warp.name}"
    if len(warp.cta.cluster.ctas) > 1:
        place += f" (rank {warp.cta.rank})"
    if warp.pc >= len(instructions):
        return f"{place}, past the last instruction"
    instruction = instructions[warp.pc]
    source = f" ({instruction.source})" if instruction.source else ""
    return f"{place}, PTX line {instruction.line}{source}: {instruction.text[:160]}"
