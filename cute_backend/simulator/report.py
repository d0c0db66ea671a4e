"""The report of a run: instructions, waits, bytes per warp role, exposed loads, events for a timeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.banks import wavefronts

if TYPE_CHECKING:
    from cute_backend.simulator.syntax import Entry
    from cute_backend.simulator.warp import Wait, Warp


@dataclass
class Recorder:
    """The waits of a run, as (warp, role, PTX line, text, start, end), its asynchronous operations, as (pipe,
    text, issued, finished), and the ends of its warps, as (warp, role, time). Times count warp instructions
    of the cluster, not cycles.
    """

    waits: list[tuple[str, str, int, str, int, int]] = field(default_factory=list)
    operations: list[tuple[str, str, int, int]] = field(default_factory=list)
    exits: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass
class Counts:
    """Counters of warps.

    bytes: bytes moved, by kind ("ld.global", "st.shared", "TMA load", ...). waits: the number of times that a
    warp was parked, by barrier instruction. exposed_loads: for each tile, the global loads between the
    accumulator wait and the tile's first store. wavefronts: the wavefronts of shared memory that the bytes
    need, by instruction; conflicts: those beyond. The last two are counted only if there is an observer,
    because counting takes a tenth of a run's time.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    exposed_loads: list[int] = field(default_factory=list)
    wavefronts: Counter[str] = field(default_factory=Counter)
    conflicts: Counter[str] = field(default_factory=Counter)


@dataclass
class RoleReport(Counts):
    """Sums over the warps of one role."""

    role: str = ""
    warps: int = 0
    instructions: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    """The report of one launch. `instructions` counts warp instructions, `ticks` the longest cluster's."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    roles: dict[str, RoleReport] = field(default_factory=dict)
    instructions: int = 0
    ticks: int = 0

    @property
    def exposed_loads(self) -> list[int]:
        """The exposed loads of all roles; see RoleReport."""
        return [n for role in self.roles.values() for n in role.exposed_loads]

    def __str__(self) -> str:
        lines = [
            f"{self.entry}: grid {self.grid}, cluster {self.cluster}, {self.instructions} warp instructions"
        ]
        for role in sorted(self.roles.values(), key=lambda r: r.role):
            moved = ", ".join(f"{kind} {n}" for kind, n in sorted(role.bytes.items()))
            lines.append(
                f"  {role.role}: {role.warps} warps, {role.instructions} instructions, "
                f"{sum(role.waits.values())} waits; bytes: {moved or 'none'}"
                + (
                    f"; exposed global loads per tile: max {max(role.exposed_loads)}"
                    if role.exposed_loads
                    else ""
                )
                + (
                    f"; bank conflicts: {role.conflicts.total()} wavefronts beyond {role.wavefronts.total()}"
                    if role.wavefronts
                    else ""
                )
            )
        return "\n".join(lines)


class WarpReport(Counts):
    """The counters of one warp while it runs."""

    def __init__(self, warp: Warp, observer: Recorder | None) -> None:
        super().__init__()
        self.warp = warp
        self.observer = observer
        self.loads_since_wait: int | None = None

    def waited(self, wait: Wait) -> None:
        instruction = self.warp.program.entry.instructions[self.warp.pc]
        self.waits[instruction.opcode] += 1
        if self.observer is not None:
            now, line, text = self.warp.cta.cluster.engine.now, instruction.line, instruction.text
            self.observer.waits.append((self.warp.name, self.warp.role, line, text, wait.since, now))

    def shared(self, lanes: np.ndarray, offsets: np.ndarray, nbytes: int) -> None:
        """Lanes access `nbytes` each of shared memory at these offsets."""
        if self.observer is not None:
            opcode = self.warp.program.entry.instructions[self.warp.pc].opcode
            took, least = wavefronts(lanes, offsets, nbytes)
            self.wavefronts[opcode] += least
            self.conflicts[opcode] += took - least

    def accumulator_ready(self) -> None:
        """The warp has passed the wait for an accumulator."""
        self.loads_since_wait = 0

    def global_load(self) -> None:
        if self.loads_since_wait is not None:
            self.loads_since_wait += 1

    def stored(self) -> None:
        if self.loads_since_wait is not None:
            self.exposed_loads.append(self.loads_since_wait)
            self.loads_since_wait = None


class ReportBuilder:
    """Collects the warps' counters as they exit."""

    def __init__(self, report: Report, observer: Recorder | None) -> None:
        self.report = report
        self.observer = observer
        self._executed: dict[tuple[int, int], list[int]] = {}
        self._roles: dict[tuple[int, int], str] = {}

    def warp(self, warp: Warp) -> WarpReport:
        return WarpReport(warp, self.observer)

    def counts(self, warp: Warp) -> list[int]:
        """How many times each instruction was executed by the warps of this number and rank in all clusters,
        which have one role."""
        key = warp.index, warp.cta.rank
        if key not in self._executed:
            self._executed[key] = [0] * len(warp.program.steps)
        return self._executed[key]

    def add(self, warp: Warp) -> None:
        role = warp.role
        if self.observer is not None:
            self.observer.exits.append((warp.name, role, warp.cta.cluster.engine.now))
        summary = self.report.roles.setdefault(role, RoleReport(role=role))
        summary.warps += 1
        self._roles[warp.index, warp.cta.rank] = role
        summary.bytes.update(warp.report.bytes)
        summary.waits.update(warp.report.waits)
        summary.exposed_loads.extend(warp.report.exposed_loads)
        summary.wavefronts.update(warp.report.wavefronts)
        summary.conflicts.update(warp.report.conflicts)

    def finish(self, entry: Entry) -> None:
        """Counts the instructions of all warps by their opcodes."""
        for key, counts in self._executed.items():
            summary, executed = self.report.roles[self._roles[key]], np.array(counts)
            summary.instructions += int(executed.sum())
            for place in np.flatnonzero(executed):
                summary.opcodes[entry.instructions[place].opcode] += int(executed[place])
        self.report.instructions = sum(each.instructions for each in self.report.roles.values())
