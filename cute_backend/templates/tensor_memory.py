"""The accumulators of a thread in tensor memory: a thread of an epilogue warpgroup has one of 128 rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from cute_backend.planning import TileConfig
from cute_backend.templates.crew import WARP, WARPS
from cute_backend.templates.drain import Position, Turns
from cute_backend.templates.row_tile import Sm100Subtile, Sm100Tile

WARPGROUP = WARPS * WARP
"""Threads of a warpgroup."""


@dataclass(frozen=True)
class Thread:
    """The position of a thread among the warps of the epilogue. `group` is the index of its warpgroup, which
    meets at `barrier`; `thread` and `warp` are indices within the warpgroup."""

    group: Any
    thread: Int32
    warp: Int32
    barrier: pipeline.NamedBarrier

    @property
    def thread_of_all(self) -> Int32:
        """Its number among the threads of all warpgroups."""
        return self.group * WARPGROUP + self.thread


@dataclass(frozen=True)
class Copy:
    """A thread's copy of subtiles between its registers, whose shape is `shape`, and `memory`, its own row
    of subtiles (128, subtile_n, 1, subtiles, stage)."""

    tiled: cute.TiledCopy
    memory: cute.Tensor
    shape: Any

    @staticmethod
    def of(acc: cute.Tensor, thread: Int32, columns: int, *, writes: bool = False) -> Copy:
        """The copy of a thread to or from accumulators. One instruction moves a power of two columns."""
        box = (WARPGROUP, columns)
        pieces = cute.flat_divide(acc[((None, None), 0, 0, None)], box)
        count = tcgen05.Repetition(columns & -columns)
        op = tcgen05.St32x32bOp(count) if writes else tcgen05.Ld32x32bOp(count)
        atom = cute.make_copy_atom(op, acc.element_type)
        tiled = tcgen05.make_tmem_copy(atom, pieces[(None, None, 0, 0, 0)])
        own = tiled.get_slice(thread)
        identity = cute.make_identity_tensor(box)
        if writes:
            return Copy(tiled, own.partition_D(pieces), own.partition_S(identity).shape)
        return Copy(tiled, own.partition_S(pieces), own.partition_D(identity).shape)

    def registers(self, first: cute.Pointer) -> cute.Tensor:
        """The registers from `first` on, of a subtile."""
        return cute.make_tensor(first, cute.make_layout(self.shape))


@dataclass(frozen=True)
class TensorMemorySeat:
    """The accumulators of a thread of the epilogue: `sums` of a tile are in a stage of `ring`.

    `parts` are the sums of the other CTAs of a cluster with split-K, or None, and `stores` are the TMA stores
    of the warpgroup.
    """

    config: TileConfig
    thread: Thread
    acc: cute.Tensor
    read: Copy
    parts: Any
    ring: pipeline.PipelineUmmaAsync
    stores: pipeline.PipelineTmaStore
    sums: pipeline.PipelineState

    @property
    def visits(self) -> int:
        """The subtiles of the warpgroup's columns."""
        return self.config.group_n // self.config.subtile_n

    def blocks(self, tile: Sm100Tile) -> list[tuple[TensorMemorySeat, bool]]:
        return [(self, True)]

    @cute.jit
    def turns(self, turns: cutlass.Constexpr[Turns], at: Position):
        if cutlass.const_expr(self.config.rolled):
            for turn in cutlass.range(turns.count, unroll=1):
                at = turns.body(at, Int32(turn) * turns.size)
        else:
            for turn in cutlass.range_constexpr(turns.count):
                at = turns.body(at, turn * turns.size)
        return at

    def begin(self, first: Any, i: int, values: int) -> tuple[Any, int, cute.Tensor]:
        visit = first + i
        registers = cute.make_rmem_tensor(values * self.config.subtile_n, self.acc.element_type)
        for j in range(values):
            into = self.read.registers(registers.iterator + j * self.config.subtile_n)
            cute.copy(self.read.tiled, self._piece(self.read, visit, j), into)
        return visit, values, registers

    def finish(
        self, tile: Sm100Tile, begun: tuple[Any, int, cute.Tensor], again: bool = False
    ) -> tuple[Any, ...]:
        visit, values, registers = begun
        cute.arch.fence_view_async_tmem_load()
        if self.parts is not None:
            self.parts.add(registers, self.thread.thread_of_all, visit, self.config.split_k)
        sub = Sm100Subtile(self.config, tile, visit)
        return sub, *(sub.accumulators(registers, i) for i in range(values))

    def write(self, first: Any, accumulators: cute.Tensor, values: cute.Tensor) -> None:
        back = Copy.of(self.acc, self.thread.thread, self.config.subtile_n, writes=True)
        cute.copy(back.tiled, back.registers(values.iterator), self._piece(back, first, 0))

    def end_writes(self) -> None:
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def release(self, visit: Any):
        if visit == self.visits - 1:
            with cute.arch.elect_one():
                self.ring.consumer_release(self.sums)

    def _piece(self, copy: Copy, visit: Any, product: int) -> cute.Tensor:
        """A product's part of a subtile in tensor memory."""
        piece = piece_of(self.config, subtile_of(self.config, self.thread.group, visit), product)
        return copy.memory[(None, None, None, 0, piece, self.sums.index)]


def subtile_of(config: TileConfig, group: Any, visit: Any) -> Any:
    """The index, in a CTA's tile, of the subtile that a warpgroup's `visit`-th visit covers."""
    return group * (config.group_n // config.subtile_n) + visit


def piece_of(config: TileConfig, subtile: Any, product: int) -> Any:
    """The position of a product's subtile among the MMA's columns, counted in subtiles."""
    if config.pieces == 1:
        return subtile * config.products + product
    part = config.piece_n // config.subtile_n
    return subtile // part * (part * config.pieces) + product * part + subtile % part
