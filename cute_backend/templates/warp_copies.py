"""The feed without TMA: the warps that multiply copy A and B by cp.async, each a share of every k tile.

The ring of stages continues from one tile to the next. Once the warps have met for a k tile, the copies of
all warps are complete, no warp still reads the stage that is copied to next, and warp 0 has copied the
rowvecs. During the epilogue of a tile the first k tiles of the next one are being copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint8

from cute_backend.templates.feed import Feed
from cute_backend.templates.staged import Lines
from cute_backend.templates.warp_mainloop import Copies

if TYPE_CHECKING:
    from cute_backend.templates.sm80 import Sm80Shared


class WarpCopies(Feed):
    """Copies by cp.async, in a group for each k tile, `stages - 1` k tiles ahead of the one that is
    multiplied.

    The exact loads of a tile's first subtiles are in one group with the k tile that is copied after them.

    If several CTAs share a multiprocessor, the k loop has two bodies: one for k tiles that lie wholly within
    A and B, whose vectors need no count of their bytes, and one for all others. With two bodies, 128 x 128
    took 0.92 to 0.94 of the time that it took with one. Tiles with one CTA on a multiprocessor were slower
    with two bodies: 256 x 128 took 1.01 times as long, and 128 x 64 1.15 times (H200,
    benchmarks/findings/warp-mma.md).
    """

    leaves_a_stage = True

    def begin(self, shared: Sm80Shared, first_item: Int32, thread: Int32) -> tuple[KTile, Int32]:
        ahead = self._first(shared, Int32(first_item), Int32(0))
        for _ in range(self.stages.ab - 1):
            self._bring_a(shared, ahead, thread)
            self._bring_b(shared, ahead, thread)
            ahead = self._after_it(shared, ahead)
        return KTile(Int32(0), ahead), Int32(0)

    def wait(self, shared: Sm80Shared, at: KTile) -> Int32:
        cute.arch.cp_async_wait_group(self.stages.ab - 2)
        cute.arch.sync_threads()
        return at.stage

    @cute.jit
    def multiply(
        self,
        shared: Sm80Shared,
        at: KTile,
        thread: Int32,
        step: cutlass.Constexpr[Callable[[Copies], None]],
    ):
        copies = self._copies(shared, at.ahead, thread)
        if cutlass.const_expr(self.gemm.config.occupancy == 1):
            step(copies)
        elif self._is_whole(shared, at.ahead):
            step(self._copies(shared, at.ahead.whole, thread))
        else:
            step(copies)

    def _is_whole(self, shared: Sm80Shared, ahead: Ahead) -> Boolean:
        """Whether a k tile lies wholly within A and B. All B have one shape."""
        column = ahead.k * ahead.columns
        a_filled = self.gemm.a_stage.is_filled(shared.a, ahead.rows_a, column)
        return a_filled & self.gemm.piece.is_filled(shared.bs[0], ahead.rows_b, column)

    def _copies(self, shared: Sm80Shared, ahead: Ahead, thread: Int32) -> Copies:
        """The copies of a k tile."""
        return [partial(bring, shared, ahead, thread) for bring in (self._bring_a, self._bring_b)]

    def left_stage(self, shared: Sm80Shared, at: KTile) -> Int32:
        return cutlass.select_(at.stage == 0, Int32(self.stages.ab - 1), at.stage - 1)

    def next(self, shared: Sm80Shared, at: KTile) -> KTile:
        ahead = self._after_it(shared, at.ahead)
        return KTile(_after(at.stage, self.stages.ab), ahead)

    @cute.jit
    def await_first_planes(self, shared: Sm80Shared, later: int):
        # The group of the planes also has k tile `stages - 1`. If the tile has one, the k loop waited for it.
        if shared.k_tiles < self.stages.ab:
            cute.arch.cp_async_wait_group(0)

    def rows(self, shared: Sm80Shared, rows_at: Int32) -> list[cute.Tensor]:
        return [s_row[(None, rows_at)] for s_row in shared.rows]

    def rows_read(self, shared: Sm80Shared, rows_at: Int32) -> Int32:
        return _after(rows_at, self.stages.row)

    def end(self) -> None:
        cute.arch.cp_async_wait_group(0)

    def _bring_a(self, shared: Sm80Shared, ahead: Ahead, thread: Int32) -> None:
        """Begins to copy the next k tile of A, if there is one."""
        stage = self.gemm.a_stage
        target = cute.recast_ptr(shared.s_a.iterator, dtype=Uint8) + ahead.stage * stage.bytes
        stage.bring(shared.a, target, ahead.of_a, ahead.batch, thread, self.gemm.threads)

    def _bring_b(self, shared: Sm80Shared, ahead: Ahead, thread: Int32) -> None:
        """Begins to copy the next k tile of B, if there is one, as one group with A's."""
        piece = self.gemm.piece
        target = cute.recast_ptr(shared.s_b.iterator, dtype=Uint8) + ahead.stage * self.gemm.b_stage.bytes
        for b in shared.bs:
            piece.bring(b, target, ahead.of_b, ahead.batch, thread, self.gemm.threads)
            target += piece.bytes
        cute.arch.cp_async_commit_group()

    def _first(self, shared: Sm80Shared, item: Int32, stage: Int32) -> Ahead:
        """The first k tile of a work item. It has no rows if there is no such item."""
        config, place = self.gemm.config, shared.schedule.place(item)
        m0, n0 = self.gemm._origin(shared, place)
        b0 = n0 * config.products // config.pieces
        valid = shared.schedule.is_valid(item)
        rows_a, rows_b = (
            cutlass.select_(valid, Int32(operand.shape[0] - row), Int32(0))
            for operand, row in ((shared.a, m0), (shared.bs[0], b0))
        )
        columns, batch = self.gemm.a_stage.columns, Int32(place.batch)
        k = self.first_k(shared, batch)
        return Ahead(item, k, stage, Int32(m0), Int32(b0), rows_a, rows_b, batch, columns)

    @cute.jit
    def _after_it(self, shared: Sm80Shared, ahead: Ahead) -> Ahead:
        """The k tile that follows one. The places of the next work item are computed only once."""
        item, k, stage = ahead.item, ahead.k + 1, _after(ahead.stage, self.stages.ab)
        row_a, row_b, rows_a, rows_b = ahead.row_a, ahead.row_b, ahead.rows_a, ahead.rows_b
        batch = ahead.batch
        if k == self.first_k(shared, batch) + shared.k_tiles:
            first = self._first(shared, item + shared.item_step, stage)
            item, k = first.item, first.k
            row_a, row_b, rows_a, rows_b = first.row_a, first.row_b, first.rows_a, first.rows_b
            batch = first.batch
        return Ahead(item, k, stage, row_a, row_b, rows_a, rows_b, batch, ahead.columns)


@dataclass(frozen=True)
class Ahead:
    """The k tile that is copied next: its work item, its index among the item's k tiles, and its stage.

    It begins at `row_a` of A and at `row_b` of each B, in the `batch`-th product. At most `rows_a` and
    `rows_b` rows are copied from there on, and at most those of the stage. They are None if the k tile is
    known to lie wholly within A and B. `columns` is the number of elements of K in a k tile.
    """

    item: Int32
    k: Int32
    stage: Int32
    row_a: Int32
    row_b: Int32
    rows_a: Int32 | None
    rows_b: Int32 | None
    batch: Int32
    columns: int

    @property
    def whole(self) -> Ahead:
        """The same k tile, known to lie wholly within A and B."""
        return replace(self, rows_a=None, rows_b=None)

    @property
    def of_a(self) -> Lines:
        """Its rows of A."""
        return Lines(self.row_a, self.rows_a, self.k * self.columns)

    @property
    def of_b(self) -> Lines:
        """Its rows of each B."""
        return Lines(self.row_b, self.rows_b, self.k * self.columns)


@dataclass(frozen=True)
class KTile:
    """The stage of the k tile that is multiplied next, and the k tile that is copied at that time."""

    stage: Int32
    ahead: Ahead


@cute.jit
def _after(stage: Int32, stages: int):
    """The stage after one in a ring."""
    after = stage + 1
    if after == stages:
        after = Int32(0)
    return after
