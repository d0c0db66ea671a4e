"""Mainloops: how the k tiles of an output tile become its accumulators.

A template decides which tiles there are, how many k tiles each has, and in which order warpgroups run. A
mainloop only decides how a k tile is multiplied; it is independent of schedules, split-K and the epilogue. On
sm_90a each warpgroup calls

    begin(tile, operands, acc, state)                 when a tile begins: takes its first `lead` k tiles;
                                                      returns what the steps need, and `state`
    step(operands, acc, held, state, release, count)  for the next `count` k tiles; returns `state`, `release`
    end(operands, acc, held, release)                 when the last k tile is with the tensor cores

where `state` is the next stage of A and B to wait for, and `release` the next stage to release. On sm_100a
the MMA warp calls `begin(mma)` for a tile and `step(mma, acc, operands, stage)` for each of its k tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Protocol, TypeAlias

import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05, warpgroup
from cutlass.memory import SmemAllocator

from cute_backend.planning import TileConfig
from cute_backend.planning.stage_scales import NO_SCALES, StageScales
from cute_backend.templates.block_scales import ScaleStages
from cute_backend.templates.scheduler import Place
from cute_backend.templates.sums import sums_of

State: TypeAlias = pipeline.PipelineState


@dataclass(frozen=True)
class WarpgroupOperands:
    """The operands of a warpgroup: its fragments of all stages of A and B, the ring that delivers them, and
    the MMA in two forms, one that adds to the sums and one that overwrites them."""

    ring: pipeline.PipelineTmaAsync
    a: cute.Tensor
    b: list[cute.Tensor]
    """The fragments of each piece of the tile's columns: of all columns, if the pieces are blocks of rows."""
    adding: cute.TiledMma
    setting: cute.TiledMma
    scales: ScaleStages | None = None
    """The scales of the blocks of A and B, for a mainloop that has a `scaling`."""
    by_rows: bool = False
    """Whether each piece of a k tile is one of the warpgroup's blocks of 64 rows, by all columns."""

    def first_block(self) -> WarpgroupOperands:
        """The same operands, but with only the first block of 64 rows of A."""
        return replace(self, a=block_of(self.a, 0))

    def multiply(
        self, sums: cute.Tensor, state: State, *, anew: bool = False, piece: int = 0, looked: Any = None
    ) -> None:
        """Issues the wgmmas of one piece of a stage's k tile as one group; `anew` overwrites the sums. Issue
        piece 0 first: it waits for the stage. `looked` is the result of `look` for this stage."""
        if piece == 0:
            self.ring.consumer_wait(state, looked)
        a, b = (block_of(self.a, piece), self.b[0]) if self.by_rows else (self.a, self.b[piece])
        warpgroup.fence()
        for k_block in range(cute.size(a, mode=[2])):
            stage = (None, None, k_block, state.index)
            mma = self.setting if anew and k_block == 0 else self.adding
            cute.gemm(mma, sums, a[stage], b[stage], sums)
        warpgroup.commit_group()

    def look(self, state: State) -> Any:
        """Whether a stage has been filled. The answer arrives later, beside the instructions that follow."""
        return self.ring.consumer_try_wait(state)

    def release(self, state: State) -> None:
        """Releases a stage that the warp has read. One lane arrives, after all lanes have read the scales."""
        if self.scales is not None:
            cute.arch.sync_warp()
        self.ring.consumer_release(state)


def block_of(fragments: cute.Tensor, index: int) -> cute.Tensor:
    """The fragments of one instruction along M, of fragments (instruction, along M, ...)."""
    instruction, _, *rest = fragments.shape
    layout = cute.make_layout((instruction, 1, *rest), stride=fragments.stride)
    place = (None, index, *(None for _ in rest))
    return cute.make_tensor(fragments[place].iterator, layout)


def check_face(mainloop: object, face: type) -> None:
    """Raises ValueError unless a mainloop has the methods of `face`, which the template calls."""
    for name in ("operands", "stored", "begin", "step", "end"):
        if (method := getattr(face, name, None)) is None:
            continue
        _, *given = signature(method).parameters
        try:
            signature(getattr(mainloop, name)).bind(*given)
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{type(mainloop).__name__} is no {face.__name__}, whose {name} is called with "
                f"{', '.join(given)}; the row of a mainloop serves the kernels of its own template alone"
            ) from error


class Sm90Mainloop(Protocol):
    """A mainloop of wgmma; the module's docstring says when each method is called.

    `begin` takes `lead` k tiles, 0 or 1. Each step takes `k_tiles_a_step` k tiles, a power of two; the last
    steps take a half, a quarter and so on of that number, to cover the remaining k tiles. Decorate a method
    that has a branch or a loop at run time with `cute.jit`. A mainloop with a `scaling` receives the scales
    of each k tile. The tile of a warpgroup is divided into `pieces`, which are multiplied one after the
    other: its blocks of 64 rows if they are as many as the pieces, or else parts of its columns. If it
    `converts`, it is an `Sm90Converting`.
    """

    lead: int
    k_tiles_a_step: int
    pieces: int
    scaling: StageScales
    converts: bool

    def begin(
        self, tile: Any, operands: WarpgroupOperands, acc: cute.Tensor, state: State
    ) -> tuple[Any, State]: ...

    def step(
        self,
        operands: WarpgroupOperands,
        acc: cute.Tensor,
        held: Any,
        state: State,
        release: State,
        count: int,
    ) -> tuple[State, State]: ...

    def end(self, operands: WarpgroupOperands, acc: cute.Tensor, held: Any, release: State) -> None: ...


class Sm90Converting(Sm90Mainloop, Protocol):
    """A mainloop that brings A to registers, from which the MMA takes it."""

    def stored(
        self,
        s_a: cute.Tensor,
        fragments: cute.Tensor,
        row: Int32,
        block_rows: int,
        rows: Int32,
        products: int,
    ) -> Any:
        """A as a thread reads it from shared memory, for `WarpgroupOperands.a`: 16 rows from `row` on of each
        `block_rows` rows, of products that have `rows` rows each."""


class Sm90Plain:
    """The tensor cores add up all k tiles. The stage of one k tile is released while they work on the
    next."""

    lead, k_tiles_a_step, pieces = 1, 1, 1
    scaling = NO_SCALES
    converts = False

    def begin(
        self, tile: Any, operands: WarpgroupOperands, acc: cute.Tensor, state: State
    ) -> tuple[None, State]:
        operands.multiply(acc, state, anew=True)
        state.advance()
        return None, state

    def step(
        self,
        operands: WarpgroupOperands,
        acc: cute.Tensor,
        held: None,
        state: State,
        release: State,
        count: int,
    ) -> tuple[State, State]:
        operands.multiply(acc, state)
        # One k tile stays in flight; the one before it has been read, so its stage can be released.
        warpgroup.wait_group(1)
        operands.ring.consumer_release(release)
        release.advance()
        state.advance()
        return state, release

    def end(self, operands: WarpgroupOperands, acc: cute.Tensor, held: None, release: State) -> None:
        warpgroup.wait_group(0)
        operands.ring.consumer_release(release)


@dataclass(frozen=True)
class Partial:
    """Registers for the sums of the k tiles in flight, and the output tile that they belong to."""

    sums: list[cute.Tensor]
    tile: Any


class Sm90Promoted:
    """Each k tile's sums are added to accumulators in fp32 registers, because the tensor cores accumulate fp8
    products in fewer bits.

    A step takes several k tiles: while the threads add the sums of one, the tensor cores work on the next,
    whose sums lie in another of the `sets` of registers. No product is in flight at the end of the loop body,
    because there the compiler would move the registers of its sums. With one set, the products of the other
    warpgroup hide the additions of this one. Within a step, a thread asks whether the stage of the next
    products has been filled before it adds sums, which hides the latency of the barrier. If the accumulators
    leave too few registers, a set holds the sums of only one piece of the tile, and the pieces of a k tile
    are multiplied one after the other.
    """

    lead = 0
    scaling: StageScales = NO_SCALES
    converts = False
    reads_stages_late = False
    """Whether `promote` reads the stage of A and B, which then can't be released before."""

    def __init__(self, sets: int = 2, k_tiles_a_step: int = 2, pieces: int = 1) -> None:
        self.sets, self.k_tiles_a_step, self.pieces = sets, k_tiles_a_step, pieces

    def begin(
        self, tile: Any, operands: WarpgroupOperands, acc: cute.Tensor, state: State
    ) -> tuple[Partial, State]:
        acc.fill(0.0)
        instruction, blocks, columns = acc.shape
        of_rows, of_columns = (self.pieces, 1) if operands.by_rows else (1, self.pieces)
        shape = (instruction, blocks // of_rows, columns // of_columns)
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.sets)]
        return Partial(sums, tile), state

    def step(
        self,
        operands: WarpgroupOperands,
        acc: cute.Tensor,
        held: Partial,
        state: State,
        release: State,
        count: int,
    ) -> tuple[State, State]:
        sets, pieces = self.sets, self.pieces
        groups = count * pieces
        scales: Any = None
        looked: Any = None

        def multiply(group: int) -> None:
            if group < groups:
                piece = group % pieces
                operands.multiply(held.sums[group % sets], state, anew=True, piece=piece, looked=looked)
                if piece == pieces - 1:
                    state.advance()

        for group in range(sets):
            multiply(group)
        for group in range(groups):
            piece = group % pieces
            if piece == 0:
                scales = self.scales(operands, held, release)
            under_way = min(groups - 1 - group, sets - 1)
            warpgroup.wait_group(under_way)
            is_last = piece == pieces - 1
            if is_last and not self.reads_stages_late:
                operands.release(release)
            following, looked = group + sets, None
            if following < groups and following % pieces == 0:
                looked = operands.look(state)
            self.promote(acc, held.sums[group % sets], scales, piece)
            if is_last and self.reads_stages_late:
                operands.release(release)
            if is_last:
                release.advance()
            multiply(following)
        return state, release

    def scales(self, operands: WarpgroupOperands, held: Partial, state: State) -> Any:
        """Returns the scales of a k tile, read while its products are in flight; None without scaling. The
        stage has been waited for by the products."""

    def promote(self, acc: cute.Tensor, sums: cute.Tensor, scales: Any = None, piece: int = 0) -> None:
        """Adds the sums of a piece of one k tile to the accumulators."""
        first = piece * cute.size(sums)
        for i in range(cute.size(sums)):
            acc[first + i] = acc[first + i] + sums[i]

    def end(self, operands: WarpgroupOperands, acc: cute.Tensor, held: Partial, release: State) -> None:
        """Does nothing, as no product is in flight."""


@dataclass(frozen=True)
class Sm100Operands:
    """The operands of the MMA warp: the fragments of all stages of A and B, and the `scales` of their blocks,
    as the mainloop's `scale_operands` returned them."""

    a: cute.Tensor
    b: cute.Tensor
    scales: Any = None


class Sm100Mainloop(Protocol):
    """A mainloop of tcgen05.mma; the module's docstring says when each method is called.

    `values` returns an operand as a tensor of its values, `instruction` the MMA of a tile (M, N) for the
    operands' types and majors. The next five methods handle the scales of blocks of a mainloop with a
    `scaling`. `maps` returns the tensor maps that load the scales, `allocate` their shared memory, `boxes`
    the scales of all k tiles of the output `tile` (row, column) of a CTA, `scale_operands` their place in
    tensor memory, from `start` on, and `of_tile` the operands of the output tiles in one column. `begin` and
    `step` return the instruction to issue next. With a `SumScales`, each k tile is one that begins and
    ends.
    """

    scaling: StageScales

    def values(self, operand: cute.Tensor) -> cute.Tensor: ...

    def instruction(
        self, dtypes: Sequence[Any], majors: Sequence[Any], group: tcgen05.CtaGroup, tile: tuple
    ) -> cute.TiledMma: ...

    def maps(
        self, scales: Sequence[cute.Tensor], lines: Sequence[Int32], k: Int32, config: TileConfig
    ) -> list: ...

    def allocate(
        self, smem: SmemAllocator, mma: cute.TiledMma, tile: tuple, stages: int, pieces: int
    ) -> list: ...

    def boxes(
        self, tmas: Sequence, scales: Sequence, place: Place, tile: tuple[Int32, Int32], config: TileConfig
    ) -> list: ...

    def scale_operands(
        self, scales: Sequence, mma: cute.TiledMma, tile: tuple, start: cute.Pointer, config: TileConfig
    ) -> Any: ...

    def of_tile(self, operands: Sm100Operands, column: Int32, config: TileConfig) -> Sm100Operands: ...

    def begin(self, mma: cute.TiledMma) -> cute.TiledMma: ...

    def step(
        self, mma: cute.TiledMma, acc: cute.Tensor, operands: Sm100Operands, stage: Any
    ) -> cute.TiledMma: ...


class Sm100Plain:
    """The tensor cores add up all k tiles, in tensor memory. There are no scales of blocks."""

    scaling: StageScales = NO_SCALES

    def values(self, operand: cute.Tensor) -> cute.Tensor:
        return operand

    def instruction(
        self, dtypes: Sequence[Any], majors: Sequence[Any], group: tcgen05.CtaGroup, tile: tuple
    ) -> cute.TiledMma:
        return blackwell.make_trivial_tiled_mma(*dtypes, *majors, sums_of(dtypes[0]), group, tile)

    def maps(
        self, scales: Sequence[cute.Tensor], lines: Sequence[Int32], k: Int32, config: TileConfig
    ) -> list:
        return []

    def allocate(
        self, smem: SmemAllocator, mma: cute.TiledMma, tile: tuple, stages: int, pieces: int
    ) -> list:
        return []

    def boxes(
        self, tmas: Sequence, scales: Sequence, place: Place, tile: tuple[Int32, Int32], config: TileConfig
    ) -> list:
        return []

    def scale_operands(
        self, scales: Sequence, mma: cute.TiledMma, tile: tuple, start: cute.Pointer, config: TileConfig
    ) -> Any:
        return None

    def of_tile(self, operands: Sm100Operands, column: Int32, config: TileConfig) -> Sm100Operands:
        return operands

    def begin(self, mma: cute.TiledMma) -> cute.TiledMma:
        mma.set(tcgen05.Field.ACCUMULATE, False)
        return mma

    def step(
        self, mma: cute.TiledMma, acc: cute.Tensor, operands: Sm100Operands, stage: Any
    ) -> cute.TiledMma:
        for k_block in range(cute.size(operands.a, mode=[2])):
            place = (None, None, k_block, stage)
            cute.gemm(mma, acc, operands.a[place], operands.b[place], acc)
            mma.set(tcgen05.Field.ACCUMULATE, True)
        return mma
