"""Runs launches: clusters take turns until all warps have exited or none can continue."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cute_backend.simulator.asynchrony import Engine
from cute_backend.simulator.bound_program import Program
from cute_backend.simulator.cta import MBARRIERS_PER_CTA, SHARED_LIMIT, SHARED_RESERVED, Cluster, Cta
from cute_backend.simulator.global_shadow import GlobalShadow
from cute_backend.simulator.memory import PARAM_WINDOW, GlobalMemory
from cute_backend.simulator.ptx_parser import parse
from cute_backend.simulator.report import Recorder, Report, ReportBuilder
from cute_backend.simulator.simulation_errors import Deadlock, ResourceError, Runaway, SimulationError
from cute_backend.simulator.syntax import Entry, Module
from cute_backend.simulator.turns import RunningCluster
from cute_backend.simulator.warp import LANES, Warp

RESIDENT_CLUSTERS = 4
"""Clusters that run at first."""
MOST_RESIDENT_CTAS = 148
"""CTAs that run at once at most: a B200's multiprocessors."""
PATIENCE = 2_000
"""Instructions without effect after which a cluster may be waiting for one that has not started."""
AGENTS_PER_WARP = 7
AGENTS_PER_CTA = 4

PROGRESS_STEP = 100_000

Progress = Callable[[int, int, int], None]

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the driver would have received it; `params` holds the bytes of each parameter.

    `overlaps` says that it may begin before the kernels ahead of it in the stream have ended (programmatic
    stream serialization).
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    params: tuple[bytes, ...]
    overlaps: bool


_parse = lru_cache(maxsize=32)(parse)


def run_kernel(
    ptx: str,
    launch: Launch,
    memory: GlobalMemory,
    *,
    async_seed: int | None = None,
    observer: Recorder | None = None,
    progress: Progress | None = None,
    most_instructions: int | None = None,
) -> Report:
    """Runs one kernel launch to its end.

    ptx: the module's text; an empty name of a kernel stands for its only entry. memory: the memory behind the
    kernel's global addresses. async_seed: None for fixed delays of asynchronous work,
    else the seed of random delays, warp order and warp speed. progress: called with (clusters done, clusters
    in all, warp instructions so far) after each cluster and every PROGRESS_STEP instructions.
    most_instructions: the number of instructions beyond which a loop is assumed to be endless.

    Raises a `SimulationError` that names the instruction and the warp.
    """
    module, entry = _parse(ptx), launch.kernel
    if not entry and len(module.entries) == 1:
        entry = next(iter(module.entries))
    if entry not in module.entries:
        raise SimulationError(f"no entry {entry!r}; the module has {', '.join(module.entries) or 'none'}")
    running = RunningLaunch(module, module.entries[entry], launch, memory)
    try:
        with np.errstate(all="ignore"):
            return running.run(async_seed, observer, progress, most_instructions)
    finally:
        running.close()


class RunningLaunch:
    """The parts of a launch that all its clusters share."""

    def __init__(self, module: Module, entry: Entry, launch: Launch, memory: GlobalMemory) -> None:
        self.overlaps, self.smem_bytes = launch.overlaps, launch.smem_bytes
        self.grid, self.block, self.cluster = launch.grid, launch.block, launch.cluster
        self.entry = entry
        self.memory = memory
        self.shadow = GlobalShadow()
        self._check()
        self.globals: list[np.ndarray] = []
        symbols = {each.name: ("param", PARAM_WINDOW + each.offset) for each in entry.parameters}
        self.shared_bytes = SHARED_RESERVED
        local_bytes = 0
        for variable in (*module.variables.values(), *entry.variables.values()):
            if variable.space == "shared":
                if not variable.external:
                    start = _round_up(self.shared_bytes, variable.align)
                    symbols[variable.name] = ("shared", start)
                    self.shared_bytes = start + variable.nbytes
            elif variable.space == "local":
                start = _round_up(local_bytes, variable.align)
                symbols[variable.name] = ("local", start)
                local_bytes = start + variable.nbytes
            else:
                address = self._allocate(variable.name, variable.nbytes, variable.data)
                symbols[variable.name] = ("global", address)
        dynamic = self.shared_bytes
        for variable in (*module.variables.values(), *entry.variables.values()):
            if variable.space == "shared" and variable.external:
                symbols[variable.name] = ("shared", _round_up(dynamic, max(variable.align, 16)))
                self.shared_bytes = symbols[variable.name][1] + self.smem_bytes
        if self.shared_bytes == dynamic:
            self.shared_bytes += self.smem_bytes
        if self.shared_bytes - SHARED_RESERVED > SHARED_LIMIT:
            raise ResourceError(
                f"{self.shared_bytes - SHARED_RESERVED} bytes of shared memory; a CTA can have {SHARED_LIMIT}"
            )
        self.parameters = self._parameters(launch.params)
        try:
            self.program = Program(entry, symbols, self.parameters, local_bytes)
        except SimulationError:
            self.close()
            raise

    def _check(self) -> None:
        threads = self.block[0] * self.block[1] * self.block[2]
        if not 0 < threads <= 1024:
            raise ResourceError(f"a block of {threads} threads; 1 to 1024 are allowed")
        wanted = self.entry.required_threads
        if wanted is not None and wanted != self.block:
            raise ResourceError(f"a block of {self.block}; the kernel was compiled for {wanted}")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=False)):
            raise ResourceError(f"a grid of {self.grid} is not a multiple of the cluster {self.cluster}")
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        if size > 16:
            raise ResourceError(f"a cluster of {size} CTAs; 16 is the limit")

    def _allocate(self, name: str, nbytes: int, data: bytes | None) -> int:
        store = np.zeros(nbytes + 256, np.uint8)
        start = -store.ctypes.data % 256
        if data is not None:
            store[start : start + len(data)] = np.frombuffer(data, np.uint8)
        address = store.ctypes.data + start
        self.memory.register(address, nbytes, f"the module's variable {name}", keep=store)
        self.globals.append(store)
        return address

    def _parameters(self, params: Sequence[bytes]) -> np.ndarray:
        declared = self.entry.parameters
        if len(params) != len(declared):
            raise SimulationError(
                f"{len(params)} parameters given; {self.entry.name} declares {len(declared)}"
            )
        total = max((p.offset + p.nbytes for p in declared), default=0)
        raw = np.zeros(_round_up(total, 16) + 16, np.uint8)
        for parameter, given in zip(declared, params, strict=False):
            if len(given) != parameter.nbytes:
                raise SimulationError(
                    f"parameter {parameter.name} has {parameter.nbytes} bytes; {len(given)} bytes were given"
                )
            raw[parameter.offset : parameter.offset + len(given)] = np.frombuffer(bytes(given), np.uint8)
        return raw

    def close(self) -> None:
        for store in self.globals:
            self.memory.unregister(store.ctypes.data + -store.ctypes.data % 256)
        self.globals = []

    # --- running -----------------------------------------------------------------------------------------
    def run(
        self,
        seed: int | None,
        observer: Recorder | None,
        progress: Progress | None,
        most_instructions: int | None,
    ) -> Report:
        report = Report(self.entry.name, self.grid, self.block, self.cluster)
        builder = ReportBuilder(report, observer)
        self.unstarted = deque(enumerate(self._origins()))
        total = len(self.unstarted)
        running: list[RunningCluster] = []
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        room = RESIDENT_CLUSTERS
        executed = reported = 0
        while True:
            while self.unstarted and len(running) < room:
                index, origin = self.unstarted.popleft()
                running.append(RunningCluster(self._cluster(index, origin, seed, builder), builder))
            if not running:
                break
            moved = False
            for one in list(running):
                before = one.executed
                moved |= one.turn()
                executed += one.executed - before
                if one.finished:
                    running.remove(one)
                    report.ticks = max(report.ticks, one.cluster.engine.now)
                    moved = True
                if progress is not None and (one.finished or executed >= reported + PROGRESS_STEP):
                    reported = executed
                    progress(total - len(self.unstarted) - len(running), total, executed)
            if most_instructions is not None and executed > most_instructions:
                raise Runaway(
                    f"{executed} warp instructions were executed, where {most_instructions} are more than "
                    "enough: some loop does not end\n" + "\n".join(one.describe("runs") for one in running)
                )
            # All running clusters may wait for one that has not started; the machine has room for more.
            if self.unstarted and len(running) * size < MOST_RESIDENT_CTAS:
                if not moved or all(one.quiet > PATIENCE for one in running):
                    room = len(running) + 1
            elif not moved:
                raise Deadlock(
                    "no warp can continue, and no operation is in progress\n"
                    + "\n".join(one.describe("spins without effect") for one in running)
                )
        builder.finish(self.entry)
        return report

    def take_unstarted(self) -> tuple[int, int, int] | None:
        """The first CTA of a cluster that has not started; None if all have started."""
        return self.unstarted.popleft()[1] if self.unstarted else None

    def _origins(self) -> list[tuple[int, int, int]]:
        ranges = [range(0, g, c) for g, c in zip(self.grid, self.cluster, strict=False)]
        return [(x, y, z) for z, y, x in itertools.product(*reversed(ranges))]

    def _cluster(
        self, index: int, origin: tuple[int, int, int], seed: int | None, builder: ReportBuilder
    ) -> Cluster:
        engine = Engine(None if seed is None else seed * 7919 + index, builder.observer)
        cx, cy, cz = self.cluster
        size = cx * cy * cz
        threads = self.block[0] * self.block[1] * self.block[2]
        warps = (threads + LANES - 1) // LANES
        agents = 1 + size * (warps * AGENTS_PER_WARP + AGENTS_PER_CTA + MBARRIERS_PER_CTA)
        cluster = Cluster(index, self, engine, agents, builder)
        for rank in range(size):
            place = (rank % cx, rank // cx % cy, rank // (cx * cy))
            ctaid = (origin[0] + place[0], origin[1] + place[1], origin[2] + place[2])
            cta = Cta(cluster, rank, ctaid, self.shared_bytes)
            cluster.ctas.append(cta)
        for cta in cluster.ctas:
            for number in range(warps):
                special, mask = self._special(cta, number, warps, threads)
                cta.warps.append(Warp(cta, number, self.program, special, mask))
        return cluster

    def _special(self, cta: Cta, number: int, warps: int, threads: int) -> tuple[dict[str, Any], np.ndarray]:
        """The values of the special registers (PTX ISA 10) in one warp."""
        lanes = np.arange(LANES)
        linear = number * LANES + lanes
        bx, by, _ = self.block
        cx, cy, cz = self.cluster
        place = (cta.rank % cx, cta.rank // cx % cy, cta.rank // (cx * cy))
        one = np.uint32(1)
        special: dict[str, Any] = {
            "%tid.x": linear % bx,
            "%tid.y": linear // bx % by,
            "%tid.z": linear // (bx * by),
            "%laneid": lanes,
            "%warpid": number,
            "%nwarpid": warps,
            "%smid": cta.cluster.index * cx * cy * cz + cta.rank,
            "%nsmid": MOST_RESIDENT_CTAS,
            "%gridid": 0,
            "%cluster_ctarank": cta.rank,
            "%cluster_nctarank": cx * cy * cz,
            "%is_explicit_cluster": int(cx * cy * cz > 1),
            "%lanemask_eq": _BIT,
            "%lanemask_lt": _BIT - one,
            "%lanemask_le": 2 * _BIT - one,
            "%lanemask_gt": ~(2 * _BIT - one),
            "%lanemask_ge": ~(_BIT - one),
            "%dynamic_smem_size": self.smem_bytes,
            "%total_smem_size": self.shared_bytes - SHARED_RESERVED,
            "%aggr_smem_size": self.shared_bytes,
        }
        for axis, name in enumerate("xyz"):
            special[f"%ntid.{name}"] = self.block[axis]
            special[f"%ctaid.{name}"] = cta.ctaid[axis]
            special[f"%nctaid.{name}"] = self.grid[axis]
            special[f"%cluster_ctaid.{name}"] = place[axis]
            special[f"%cluster_nctaid.{name}"] = self.cluster[axis]
            special[f"%clusterid.{name}"] = cta.ctaid[axis] // self.cluster[axis]
            special[f"%nclusterid.{name}"] = self.grid[axis] // self.cluster[axis]
        return special, linear < threads


_BIT = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
"""The bit of each lane in a mask of lanes."""


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step
