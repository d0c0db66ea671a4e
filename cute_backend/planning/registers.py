"""The registers of an epilogue thread: an estimate of what its kernel needs, by which tiles are chosen.

Whether a kernel spills is the compiler's answer, and the steps down from a tile that does are in `ladder`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_backend.planning.budget import register_budget
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.targets.target import MAX_REGISTERS, WARPGROUP
from cute_backend.planning.tiles import WARP_COLUMNS, Alignment, TileConfig
from cute_backend.spec import EpilogueSpec, Load

NARROW_SUBTILE_N = 32
"""Columns of a subtile if wider subtiles would leave planes no room in shared memory, or gain nothing."""

MAX_ROW_IN_A_THREAD = 64
"""The most columns of a row that one thread has in a visit: each is a register, beside those that the planes
of the visit take."""

COPYING = 40
"""Registers for addresses of operands if the warps that multiply also copy them, without TMA."""


WRITING, READING = 2, 3
"""Registers for the addresses of shared memory that an unrolled visit under ping-pong writes planes to, and
reads them from, if it has no more columns than a warp copies at once: the compiler computes those of all
visits at once."""


@dataclass(frozen=True)
class Registers:
    """The 32-bit registers in which one thread keeps its values of a tile."""

    accumulators: int
    """Accumulators: those of the tile or, if these are in tensor memory, of a visit."""
    sums: int
    """Further registers while k tiles are multiplied: sets of sums that are promoted, those that are scaled,
    or values that are converted."""
    fragments: int
    """Registers of the elements of a visit. An element has two for each plane that is written but the first,
    and for each plane that is read by element, from an address of its own; one for each other result, unless
    it is the first."""
    steps: int
    """Registers of the steps of transcendental functions, as one of which passes count. Visits of
    accumulators in registers wait for nothing, so the compiler interleaves several. An element has one for
    each function but the first."""
    copying: int
    """Addresses of operands."""
    visits: int = 0
    """Addresses of the planes of narrow visits under ping-pong."""

    @staticmethod
    def of(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Registers:
        """Counts the registers for a spec and an alignment. The configuration must have the subtiles of that
        alignment (`Rung.of`)."""
        in_registers = config.target.accumulators.in_registers
        accumulators = config.thread_accumulators if in_registers else config.products * config.subtile_n
        sums = mainloop_of(spec, config.target).registers(config)
        loads = spec.loaded_planes
        planes = max(len(spec.planes) - 1, 0) + sum(_by_element(load, config, alignment) for load in loads)
        others = len(spec.stores) - max(len(spec.planes), 1)
        elements = config.block_m * config.subtile_n // WARPGROUP
        copying = 0 if config.target.planes_by_tma else COPYING
        functions = _count(spec, "is_transcendental") + bool(spec.pass_columns)
        steps = max(functions - 1, 0) * elements if in_registers else 0
        narrow = config.pingpong and config.unrolled and config.subtile_n <= WARP_COLUMNS
        visits = config.blocks * config.group_n // config.subtile_n
        read = any(not _by_element(load, config, alignment) for load in loads)
        visits *= WRITING * bool(spec.planes) + READING * read if narrow else 0
        return Registers(accumulators, sums, (2 * planes + others) * elements, steps, copying, visits)

    @property
    def total(self) -> int:
        """Registers at once: no k tiles are multiplied during visits."""
        visits = self.fragments + self.steps + self.visits
        return self.accumulators + max(self.sums, visits) + self.copying


def spare_registers(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> int:
    """The registers that the estimate leaves a thread for hoisted rowvecs; below 0 if a tile is too large.
    The spec is the transposed one if the tile is transposed, and a segment if columns are in segments."""
    return register_budget(config, spec) - Registers.of(spec, config, alignment).total


def leaves_registers(config: TileConfig, spec: EpilogueSpec, alignment: Alignment = Alignment.TMA) -> bool:
    """Whether the estimate says that a kernel does not spill. The spec is as for `spare_registers`, but may
    have segments."""
    return all(spare_registers(each, config.summing, alignment) >= 0 for each in spec.segments)


def holds_values(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the estimate leaves a thread registers if the compiler interleaves no visits. If no tile leaves
    more, such a tile serves a spec. The spec is as for `spare_registers`."""
    needed = Registers.of(spec, config, Alignment.TMA)
    return replace(needed, steps=0).total <= register_budget(config, spec)


def holds_sums(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the estimate leaves a thread registers for what its mainloop has beside accumulators. The spec
    is as for `spare_registers`."""
    needed = Registers.of(spec, config, Alignment.TMA)
    return needed.accumulators + needed.sums <= register_budget(config, spec)


def most_written(width: int, read: int, tables: int) -> int | None:
    """Returns the most planes that a kernel writes in visits of `width` columns, of which it reads `read`
    planes, or None if these set no limit. A thread has up to `MAX_ROW_IN_A_THREAD` elements of each plane of
    a wide visit at once, and registers for those of three; the first result takes the place of the
    accumulators. If two planes are read by element, the addresses, of two registers each, would take all. A
    thread reads `tables` of the planes in runs, from one address for each row."""
    if width <= MAX_ROW_IN_A_THREAD or not read:
        return None
    return max(MAX_REGISTERS // MAX_ROW_IN_A_THREAD - read, 0) if read - tables <= 1 else 0


def holds_visit(width: int, spec: EpilogueSpec) -> bool:
    """Whether a thread has registers for its elements of all planes of a visit of `width` columns."""
    exact = spec.loaded_planes
    most = most_written(width, len(exact), sum(load.in_runs for load in exact))
    return most is None or len(spec.planes) <= most


def hoisted_registers(load: Load, config: TileConfig) -> int:
    """Returns the registers of a hoisted rowvec. Two 16-bit values share a register; other dtypes are not
    packed."""
    return config.thread_columns // (2 if load.dtype.bits == 16 else 1)


def hoist_budget(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> int:
    """Returns the fp32 registers of a thread that hoisted rowvecs may take.

    It is 0 if visits are the iterations of a loop, since registers can't be indexed at run time. It is also 0
    with ping-pong: there, the MMA of one warpgroup has to hide the last epilogue of the other and all that
    the other does before its next MMA. A load and a clamped address for every column took too long for that:
    a sixth of a tile's time (H200, M = N = 8192, K = 1024).
    """
    if config.rolled or config.pingpong:
        return 0
    return max(spare_registers(spec, config, alignment), 0)


def _by_element(load: Load, config: TileConfig, alignment: Alignment) -> bool:
    """Whether each element of a plane is read from an address of its own: not in boxes, nor in runs of a
    block's columns."""
    if load.in_runs:
        return False
    return alignment is not Alignment.TMA or load.order is None


def long_ops(spec: EpilogueSpec) -> int:
    """Returns how many ops of a spec take many instructions, such as draws; a visit has only a few of
    each."""
    return _count(spec, "is_long")


def _count(spec: EpilogueSpec, attribute: str) -> int:
    """The ops of a spec whose rows have an attribute."""
    from cute_backend.ops import OPS  # here, since it imports torch

    return sum(getattr(OPS[op.op], attribute) for op in spec.ops)
