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
from cutlass import Boolean, Int32, Int64, Uint8

from cute_backend.templates.cp_async import Share
from cute_backend.templates.feed import Feed
from cute_backend.templates.staged import Lines
from cute_backend.templates.warp_mainloop import Copies

if TYPE_CHECKING:
    from cute_backend.templates.feed import Sm80Shared


class WarpCopies(Feed):
    """Copies by cp.async, in a group for each k tile, `stages - 1` k tiles ahead of the one that is
    multiplied.

    The exact loads of a tile's first subtiles are in one group with the k tile that is copied after them.

    If several CTAs share a multiprocessor, the k loop has two bodies. One copies a k tile that lies wholly
    within A and B, so that its vectors need no count of their bytes, and that is not the last of its work
    item, so that the next one lies beside it. The other body copies all other k tiles. With two bodies, 128 x
    128 took 0.92 to 0.94 of the time that it took with one. Tiles with one CTA on a multiprocessor were
    slower with two bodies: 256 x 128 took 1.01 times as long, and 128 x 64 1.15 times (H200,
    benchmarks/findings.md).
    """

    leaves_a_stage = True

    def begin(self, shared: Sm80Shared) -> tuple[KTile, Int32]:
        ahead = self._first(shared, Int32(shared.items.first))
        for _ in range(self.stages.ab - 1):
            self._bring_a(shared, ahead)
            self._bring_b(shared, ahead)
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
        step: cutlass.Constexpr[Callable[[Copies], None]],
    ):
        ahead = at.ahead
        if cutlass.const_expr(self.gemm.config.occupancy == 1):
            step(self._copies(shared, ahead))
            ahead = self._after_it(shared, ahead)
        else:
            if self._is_whole(shared, ahead) & (ahead.k + 1 != self._end(shared, ahead)):
                step(self._copies(shared, ahead.whole))
                ahead = self._beside(shared, ahead)
            else:
                step(self._copies(shared, ahead))
                ahead = self._after_it(shared, ahead)
        return KTile(_after(at.stage, self.stages.ab), ahead)

    def _end(self, shared: Sm80Shared, ahead: Ahead) -> Int32:
        """The index after the last k tile of the work item of one."""
        return shared.items.begin_k(ahead.batch) + shared.items.k_tiles

    def _is_whole(self, shared: Sm80Shared, ahead: Ahead) -> Boolean:
        """Whether a k tile lies wholly within A and B. All A have one shape, and all B."""
        a, piece = shared.every_a[0], self.gemm.a_piece
        a_filled = piece.is_filled(a, ahead.rows_a, ahead.k * ahead.columns_a)
        return a_filled & self.gemm.piece.is_filled(shared.bs[0], ahead.rows_b, ahead.k * ahead.columns_b)

    def _copies(self, shared: Sm80Shared, ahead: Ahead) -> Copies:
        """The copies of a k tile."""
        return [partial(bring, shared, ahead) for bring in (self._bring_a, self._bring_b)]

    def left_stage(self, shared: Sm80Shared, at: KTile) -> Int32:
        return cutlass.select_(at.stage == 0, Int32(self.stages.ab - 1), at.stage - 1)

    @cute.jit
    def await_first_planes(self, shared: Sm80Shared, later: int):
        # The group of the planes also has k tile `stages - 1`. If the tile has one, the k loop waited for it.
        if shared.items.k_tiles < self.stages.ab:
            cute.arch.cp_async_wait_group(0)

    def rows(self, shared: Sm80Shared, rows_at: Int32) -> list[cute.Tensor]:
        return [s_row[(None, rows_at)] for s_row in shared.rows]

    def rows_read(self, shared: Sm80Shared, rows_at: Int32) -> Int32:
        return _after(rows_at, self.stages.row)

    def end(self) -> None:
        cute.arch.cp_async_wait_group(0)

    def _bring_a(self, shared: Sm80Shared, ahead: Ahead) -> None:
        """Begins to copy the next k tile of A, if there is one."""
        piece = self.gemm.a_piece
        target = cute.recast_ptr(shared.s_a.iterator, dtype=Uint8) + ahead.stage * self.gemm.a_stage.bytes
        for i, a in enumerate(shared.every_a):
            piece.bring(a, target, ahead.of_a(i), Share(shared.thread, self.gemm.threads))
            target += piece.bytes

    def _bring_b(self, shared: Sm80Shared, ahead: Ahead) -> None:
        """Begins to copy the next k tile of B, if there is one, as one group with A's."""
        piece = self.gemm.piece
        target = cute.recast_ptr(shared.s_b.iterator, dtype=Uint8) + ahead.stage * self.gemm.b_stage.bytes
        for i, b in enumerate(shared.bs):
            piece.bring(b, target, ahead.of_b(i), Share(shared.thread, self.gemm.threads))
            target += piece.bytes
        cute.arch.cp_async_commit_group()

    def _first(self, shared: Sm80Shared, item: Int32) -> Ahead:
        """The first k tile of a work item, in stage 0. It has no rows if there is no such item."""
        config, place = self.gemm.config, shared.items.place(item)
        m0, n0 = self.gemm._origin(shared, place)
        b0 = n0 * config.abreast // config.pieces
        valid = shared.items.is_valid(item)
        rows_a, rows_b = (
            cutlass.select_(valid, Int32(operand.shape[0] - row), Int32(0))
            for operand, row in ((shared.every_a[0], m0), (shared.bs[0], b0))
        )
        columns_a, columns_b = self.gemm.a_piece.columns, self.gemm.piece.columns
        batch = Int32(place.batch)
        k = shared.items.begin_k(batch)
        places_a = tuple(
            self.gemm.a_piece.place(a, Int32(m0), k * columns_a, batch, shared.thread) for a in shared.every_a
        )
        places_b = tuple(
            self.gemm.piece.place(b, Int32(b0), k * columns_b, batch, shared.thread) for b in shared.bs
        )
        return Ahead(item, k, Int32(0), places_a, places_b, rows_a, rows_b, batch, columns_a, columns_b)

    def _beside(self, shared: Sm80Shared, ahead: Ahead) -> Ahead:
        """The next k tile of the same work item."""
        places_a = tuple(map(self.gemm.a_piece.after, shared.every_a, ahead.places_a))
        places_b = tuple(map(self.gemm.piece.after, shared.bs, ahead.places_b))
        stage = _after(ahead.stage, self.stages.ab)
        return replace(ahead, k=ahead.k + 1, stage=stage, places_a=places_a, places_b=places_b)

    @cute.jit
    def _after_it(self, shared: Sm80Shared, ahead: Ahead):
        """The k tile that follows one: the next of its work item, or the first of the next work item."""
        after = self._beside(shared, ahead)
        if after.k == self._end(shared, ahead):
            first = self._first(shared, ahead.item + shared.items.step)
            after = replace(first, stage=after.stage)
        return after


@dataclass(frozen=True)
class Ahead:
    """The k tile that is copied next: its work item, its index among the item's k tiles, and its stage.

    A thread's first vectors are at `places_a` of each A and at `places_b` of each B. At most `rows_a` and
    `rows_b` rows are copied from there on, and at most those of the stage. They are None if the k tile is
    known to lie wholly within A and B. It is of the `batch`-th product. `columns_a` and `columns_b` are the
    numbers of elements of A and B along K in a k tile.
    """

    item: Int32
    k: Int32
    stage: Int32
    places_a: tuple[Int64, ...]
    places_b: tuple[Int64, ...]
    rows_a: Int32 | None
    rows_b: Int32 | None
    batch: Int32
    columns_a: int
    columns_b: int

    @property
    def whole(self) -> Ahead:
        """The same k tile, known to lie wholly within A and B."""
        return replace(self, rows_a=None, rows_b=None)

    def of_a(self, index: int) -> Lines:
        """Its rows of an A."""
        return Lines(self.places_a[index], self.rows_a, self.k * self.columns_a)

    def of_b(self, index: int) -> Lines:
        """Its rows of a B."""
        return Lines(self.places_b[index], self.rows_b, self.k * self.columns_b)


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
