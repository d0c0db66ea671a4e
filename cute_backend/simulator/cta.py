"""The state of a cluster and of its CTAs: shared memory, tensor memory, barriers, pipes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.asynchrony import Engine, Pipe
from cute_backend.simulator.barriers import ClusterBarrier, Mbarrier, NamedBarrier
from cute_backend.simulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_backend.simulator.scopes import CtaId
from cute_backend.simulator.shadow import IN_FLIGHT, Agents, Shadow
from cute_backend.simulator.simulation_errors import BarrierError, IllegalAccess, ResourceError

if TYPE_CHECKING:
    from cute_backend.simulator.machine import RunningLaunch
    from cute_backend.simulator.report import ReportBuilder
    from cute_backend.simulator.warp import Warp

SHARED_RESERVED = 1024
SHARED_LIMIT = 232448
TMEM_LANES = 128
TMEM_COLUMNS = 512
MBARRIERS_PER_CTA = 128


class SharedMemory:
    """A CTA's shared memory: bytes, and their shadow per 4 bytes."""

    def __init__(self, cta: Cta, nbytes: int) -> None:
        self.cta = cta
        self.nbytes = (nbytes + 15) // 16 * 16
        self.data = cta.cluster.engine.garbage(self.nbytes, np.uint8)
        self.units = self.data.reshape(-1, 16)
        self.words = self.data.view(np.uint32)
        self.by_size = {size: self.data.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.shadow = Shadow(
            self.nbytes // 4, cta.cluster.agents, lambda cell: f"shared {cell * 4:#x} of {cta.name}"
        )

    def check(self, low: int, high: int) -> None:
        """Raises `IllegalAccess` unless [low, high) lies in the kernel's shared memory."""
        if low < SHARED_RESERVED or high > self.nbytes:
            raise IllegalAccess(
                f"shared access to bytes {low:#x} to {high:#x} of {self.cta.name}, which has "
                f"{SHARED_RESERVED:#x} to {self.nbytes:#x}"
            )
        if self.cta.finished:
            raise IllegalAccess(
                f"access to the shared memory of {self.cta.name}, all of whose warps have exited"
            )

    def gather(self, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        """Bytes (lanes, nbytes) at multiples of `nbytes`, 1 to 16."""
        if nbytes == 16:
            return self.units[offsets >> 4]
        cells = self.by_size[nbytes][offsets >> nbytes.bit_length() - 1]
        return cells.view(np.uint8).reshape(-1, nbytes)

    def scatter(self, offsets: np.ndarray, data: np.ndarray) -> None:
        """Writes bytes (lanes, nbytes) as `gather` reads them; where lanes collide, the highest lane wins."""
        nbytes = data.shape[1]
        if nbytes == 16:
            self.units[offsets >> 4] = data
        else:
            kind = self.by_size[nbytes].dtype
            cells = np.ascontiguousarray(data).view(kind).reshape(-1)
            self.by_size[nbytes][offsets >> nbytes.bit_length() - 1] = cells


class TensorMemory:
    """128 lanes of 512 columns of 32 bits, with the columns that are allocated (PTX ISA 9.7.16.1)."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.allocated: dict[int, int] = {}
        self.may_allocate = True
        self.wanted: int | None = None
        self.granted: int | None = None

    @cached_property
    def cells(self) -> np.ndarray:
        """Its contents, which few kernels use."""
        return self.cta.cluster.engine.garbage((TMEM_LANES, TMEM_COLUMNS), np.uint32)

    @cached_property
    def shadow(self) -> Shadow:
        return Shadow(
            (TMEM_LANES, TMEM_COLUMNS),
            self.cta.cluster.agents,
            lambda c: f"tensor memory lane {c // TMEM_COLUMNS} column {c % TMEM_COLUMNS} of {self.cta.name}",
        )

    def allocate(self, columns: int) -> int | None:
        """The first free block of `columns` columns, or None while there is none."""
        if columns < 32 or columns > TMEM_COLUMNS or columns & (columns - 1):
            raise ResourceError(
                f"tcgen05.alloc of {columns} columns; powers of two from 32 to 512 are allowed"
            )
        if not self.may_allocate:
            raise ResourceError("tcgen05.alloc after tcgen05.relinquish_alloc_permit of the same CTA")
        start = self.room(columns)
        if start is not None:
            self.allocated[start] = columns
        return start

    def room(self, columns: int) -> int | None:
        """The first of `columns` free columns, or None."""
        for start in range(0, TMEM_COLUMNS, columns):
            if all(start + columns <= s or s + n <= start for s, n in self.allocated.items()):
                return start
        return None

    def allocate_with(self, peer: TensorMemory, columns: int) -> int | None:
        """Allocates columns in both CTAs of a pair at once. The first to ask gets None until the other asks.

        PTX ISA 9.7.16.5: with .cta_group::2 a warp of each CTA performs the operation collectively.
        """
        if self.granted is None:
            self.wanted = columns
            if not self.may_allocate_with(peer):
                return None
            self.granted, peer.granted = self.allocate(columns), peer.allocate(columns)
            self.cta.cluster.activity += 1
        start, self.granted, self.wanted = self.granted, None, None
        return start

    def may_allocate_with(self, peer: TensorMemory) -> bool:
        """Whether a warp of each CTA of a pair requests columns, and both CTAs have them."""
        if self.wanted is None or peer.wanted is None:
            return False
        if self.wanted != peer.wanted:
            raise ResourceError(
                f"tcgen05.alloc.cta_group::2 of {self.wanted} columns in {self.cta.name} and of "
                f"{peer.wanted} in {peer.cta.name}; both CTAs of a pair allocate the same"
            )
        return self.room(self.wanted) is not None and peer.room(self.wanted) is not None

    def free(self, start: int, columns: int) -> None:
        if self.allocated.get(start) != columns:
            raise ResourceError(
                f"tcgen05.dealloc of {columns} columns at {start}; allocated are "
                + (", ".join(f"{n} at {s}" for s, n in sorted(self.allocated.items())) or "none")
            )
        del self.allocated[start]
        self.shadow.forget((slice(0, TMEM_LANES), slice(start, start + columns)))

    def check(self, start: int, columns: int) -> None:
        """Raises unless these columns are allocated."""
        if not any(s <= start and start + columns <= s + n for s, n in self.allocated.items()):
            raise IllegalAccess(
                f"tensor memory columns {start} to {start + columns - 1} of {self.cta.name}; allocated are "
                + (", ".join(f"{s} to {s + n - 1}" for s, n in sorted(self.allocated.items())) or "none")
            )


class Cta:
    """One CTA of a running cluster."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int], shared_bytes: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.ctaid = ctaid
        self.name = f"CTA {ctaid}"
        self.id = CtaId(cluster.index, rank)
        self.finished = False
        self.free_registers = 0
        self.warps: list[Warp] = []
        self.shared = SharedMemory(self, shared_bytes)
        self.shared_base = rank << RANK_SHIFT
        self.tmem = TensorMemory(self)
        self.named = [NamedBarrier(self, number) for number in range(16)]
        self.mbarriers: dict[int, Mbarrier] = {}
        self.barrier_agents: dict[int, tuple[int, int]] = {}
        self.mma_agent = cluster.agents.new(f"the tcgen05 pipe of {self.name}")
        self.mma_epoch = 0
        self.barrier_object = cluster.agents.new(f"an mbarrier object of {self.name}")
        self.pipes = {
            kind: Pipe(f"{kind} of {self.name}", cluster.engine) for kind in ("TMA load", "MMA", "TMA store")
        }

    def init_mbarrier(self, offset: int, count: int) -> Mbarrier:
        """mbarrier.init. A barrier that is initialised again continues to count its agent's events."""
        agent, epoch = self.barrier_agents.get(offset, (-1, 0))
        old = self.mbarriers.get(offset)
        if old is not None:
            raise BarrierError(
                f"mbarrier.init of the {old.name}, which {self.cluster.agents.names[old.made_by[0]]} has "
                "initialised; mbarrier.inval must come first"
            )
        if agent < 0:
            agent = self.cluster.agents.new(
                f"a TMA load counted on the mbarrier at shared {offset:#x} of {self.name}"
            )
        self.barrier_agents[offset] = (agent, epoch)
        cells = slice(offset // 4, offset // 4 + 2)
        self.shared.shadow.writer[cells] = self.barrier_object
        self.shared.shadow.epoch[cells] = IN_FLIGHT
        self.mbarriers[offset] = barrier = Mbarrier(self, offset, count, agent, epoch)
        return barrier

    def retire_mbarrier(self, offset: int) -> None:
        """mbarrier.inval: the memory is uninitialised again."""
        agent, _ = self.barrier_agents[offset]
        self.barrier_agents[offset] = (agent, self.mbarriers.pop(offset).next_epoch)
        self.shared.shadow.forget(slice(offset // 4, offset // 4 + 2))

    def mbarrier(self, offset: int) -> Mbarrier:
        barrier = self.mbarriers.get(offset)
        if barrier is None:
            raise BarrierError(f"no mbarrier was initialised at shared {offset:#x} of {self.name}")
        return barrier


class Cluster:
    """CTAs that run together, with their common clock and barrier."""

    def __init__(
        self, index: int, launch: RunningLaunch, engine: Engine, agent_count: int, reports: ReportBuilder
    ) -> None:
        self.launch = launch
        self.memory, self.global_shadow, self.shape = launch.memory, launch.shadow, launch.cluster
        self.reports = reports
        self.index = index
        self.engine = engine
        self.agents = Agents(agent_count)
        self.ahead = self.agents.new("the kernels ahead in the stream")
        self.ctas: list[Cta] = []
        self.barrier = ClusterBarrier(agent_count)
        self.activity = 0

    def locate(self, address: int) -> tuple[Cta, int]:
        """The CTA and offset of a shared::cluster address."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.ctas):
            raise IllegalAccess(
                f"shared address {address:#x} names CTA rank {rank} of a cluster of {len(self.ctas)}"
            )
        return self.ctas[rank], address & OFFSET_MASK

    def mbarrier_at(self, address: int) -> Mbarrier:
        cta, offset = self.locate(address)
        if cta.finished:
            raise IllegalAccess(
                f"mbarrier at shared {offset:#x} of {cta.name}, all of whose warps have exited"
            )
        return cta.mbarrier(offset)
