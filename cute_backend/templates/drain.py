"""The epilogue of a tile whose sums are complete: one loop over its subtiles, for every architecture.

    tile   begin | each block of columns | end
    block  keep each subtile | reduce the block | visit each subtile      the first two for some epilogues
    visit  wait for exact loads | read accumulators | the epilogue's `visit` | store planes

A block is as many subtiles as the epilogue reduces ahead of their visits, or one. A thread's *seat* is where
its accumulators are: `fragments.RegisterSeat`, or `tensor_memory.TensorMemorySeat`. It reads and writes
them, and makes turns: in an unrolled loop, or in one at run time. A kernel brings planes to its visits and
takes them from there.
"""

# ruff: noqa: B027, because some kernels need no code in some hooks.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import cutlass
import cutlass.cute as cute

from cute_backend.planning import Stages, TileConfig
from cute_backend.templates.epilogue import BlockSubtiles, Ending, Epilogue, Keeping, Reducing, by_name
from cute_backend.templates.rings import advanced
from cute_backend.templates.scheduler import Place


class Position(NamedTuple):
    """The next stage of exact loads, and the next plane of outputs."""

    exact: Any
    store: Any


@dataclass(frozen=True)
class Turns:
    """Iterations over the subtiles of a block of rows: `count`, each of `size` subtiles. `body` takes a
    position and the first subtile of a turn, and returns the next position."""

    count: int
    size: int
    body: Callable[[Position, Any], Position]
    writes: bool = False
    """Whether each turn writes accumulators, which later turns leave in their places."""


class Seat(Protocol):
    """A thread's accumulators of a tile, in one kind of memory.

    `blocks` gives the seats of the thread's blocks of rows, and whether these have rows. `begin` begins to
    read `values` accumulators of each element, those of the `i`-th subtile from `first` on, and `finish`
    returns the subtile and these. `write` replaces the first product's, which `end_writes` completes.
    `release` lets the tensor cores have the memory after the last visit.
    """

    def blocks(self, tile: Any) -> Sequence[tuple[Any, Any]]: ...

    def turns(self, turns: Turns, at: Position) -> Position: ...

    def begin(self, first: Any, i: int, values: int) -> Any: ...

    def finish(self, tile: Any, begun: Any, again: bool = False) -> tuple[Any, ...]: ...

    def write(self, first: Any, accumulators: cute.Tensor, values: cute.Tensor) -> None: ...

    def end_writes(self) -> None: ...

    def release(self, visit: Any) -> None: ...


@dataclass(frozen=True)
class Work:
    """A tile on which a thread runs the epilogue: the state of the CTA, the thread's seat, the work item, the
    thread's part of the tile, what the epilogue holds, and the tile's staged rowvecs."""

    shared: Any
    seat: Any
    place: Place
    tile: Any
    held: SimpleNamespace
    rows: list[cute.Tensor]


class Drain(ABC):
    """A kernel's loop over the subtiles of a tile, of which a thread has `visits` in each of its blocks of
    rows."""

    epilogue: Epilogue
    config: TileConfig
    stages: Stages
    visits: int

    @property
    def block_subtiles(self) -> int:
        """The subtiles of a block of columns that the epilogue reduces ahead of their visits; 0 without."""
        if not isinstance(self.epilogue, Reducing):
            return 0
        return self.epilogue.reduced_columns // self.config.subtile_n

    @property
    def keeps_value(self) -> bool:
        """Whether the epilogue keeps a value in the place of accumulators, for its passes and visits."""
        return isinstance(self.epilogue, Keeping)

    @property
    def values(self) -> int:
        """The values of an element that passes and visits begin with: one for each product, or the one that
        is kept."""
        return 1 if self.keeps_value else self.config.products

    @property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """The exact loads of each subtile that come in one stage, as indices in `shared_loads`: all of them,
        or first those that are read ahead of passes and then those that visits read, if there are both."""
        early = self.early_loads
        names = [operand.name for operand in self.epilogue.shared_loads]
        found = [[i for i, name in enumerate(names) if (name in early) is first] for first in (True, False)]
        return tuple(tuple(each) for each in found if each) or ((),)

    @property
    def visits_wait(self) -> bool:
        """Whether each visit takes a stage of exact loads: not without such stages, or if all are read ahead
        of passes."""
        return self.stages.exact > 0 and (not self.early_loads or len(self.rounds) > 1)

    @property
    def early_loads(self) -> tuple[str, ...]:
        """The names of the exact loads in shared memory that are read ahead of passes."""
        return getattr(self.epilogue, "early_loads", ())

    @cute.jit
    def _drain(self, work: Work, at: Position):
        """Runs the epilogue on all subtiles of a tile. Returns the position after them."""
        whole = max(self.block_subtiles, 1)
        for seat, has_rows in work.seat.blocks(work.tile):
            if has_rows:
                body = partial(self._drain_block, replace(work, seat=seat))
                at = seat.turns(Turns(self.visits // whole, whole, body), at)
        return at

    def _drain_block(self, work: Work, at: Position, first: Any) -> Position:
        """Runs the epilogue on the block of columns that begins with the subtile `first`."""
        whole = max(self.block_subtiles, 1)
        if self.keeps_value:
            at = work.seat.turns(Turns(whole, 1, partial(self._keep, work, first), writes=True), at)
            work.seat.end_writes()
        if self.block_subtiles > 0:
            work = replace(work, held=self._reduced(work, first))
        return work.seat.turns(Turns(whole, 1, partial(self._visit, work, first)), at)

    def _keep(self, work: Work, first: Any, at: Position, within: Any) -> Position:
        """Puts the value that the epilogue keeps of a subtile in the place of its first product's
        accumulators."""
        seat, visit, glob = work.seat, first + within, work.shared.glob
        begun = seat.begin(visit, 0, self.config.products)
        smem = self._smem(work.rows, [], [])
        if self.early_loads:
            loads, release = self._loaded(work, at, visit, 0)
            smem = self._smem(work.rows, loads, [])
            smem.release = release
        else:
            self._pace(work)
        sub, *accumulators = seat.finish(work.tile, begun)
        values = cast(Keeping, self.epilogue).keep(sub, *accumulators, glob, work.held, smem)
        seat.write(visit, accumulators[0], values)
        return self._loads_read(work, at, visit) if self.early_loads else at

    def _reduced(self, work: Work, first: Any) -> SimpleNamespace:
        """Reduces the block of columns that begins with the subtile `first`. Returns what its visits hold.

        A subtile is read `again` in each pass after the first.
        """
        passed: set[int] = set()

        def read(i: int) -> tuple[Any, ...]:
            again = i in passed
            passed.add(i)
            return work.seat.finish(work.tile, work.seat.begin(first, i, self.values), again)

        blocks = BlockSubtiles(work.tile, self.block_subtiles, read)
        smem, epilogue = self._smem(work.rows, [], []), cast(Reducing, self.epilogue)
        results = epilogue.reduce_blocks(blocks, work.shared.glob, work.held, smem)
        return SimpleNamespace(**vars(work.held), **vars(results))

    @cute.jit
    def _visit(self, work: Work, first: Any, at: Position, within: Any):
        """Visits a subtile. Returns the position after it."""
        seat, visit = work.seat, first + within
        self._make_room(work, visit)
        begun = seat.begin(visit, 0, self.values)
        loads: list[cute.Tensor] = []
        release: Callable[[], None] = _release_nothing
        if cutlass.const_expr(self.visits_wait):
            loads, release = self._loaded(work, at, visit, len(self.rounds) - 1)
        sub, *accumulators = seat.finish(work.tile, begun)
        seat.release(visit)
        smem = self._smem(work.rows, loads, self._stores(work, at, visit))
        smem.release = release
        self._visit_rows(work, smem, sub, *accumulators)
        if cutlass.const_expr(self.visits_wait and not self.epilogue.shared_loads):
            release()
        if cutlass.const_expr(self.visits_wait):
            at = self._loads_read(work, at, visit)
        if cutlass.const_expr(self.stages.store > 0):
            at = self._leave(work, at, visit)
        return at

    def _smem(
        self, rows: Sequence[cute.Tensor], loads: Sequence[cute.Tensor], stores: Sequence[cute.Tensor]
    ) -> SimpleNamespace:
        """The epilogue's operands in shared memory, by name: staged rowvecs, exact loads and outputs, each
        all or none."""
        epilogue = self.epilogue
        given = (epilogue.staged, rows), (epilogue.shared_loads, loads), (epilogue.shared_stores, stores)
        names = [operand.name for operands, tensors in given if tensors for operand in operands]
        return by_name(names, [*rows, *loads, *stores])

    def _end(self, work: Work) -> None:
        """The epilogue's hook after the last subtile, where it has one."""
        if isinstance(self.epilogue, Ending):
            self.epilogue.end(work.tile, work.shared.glob, work.held)

    def _visit_rows(self, work: Work, smem: SimpleNamespace, sub: Any, *accumulators: cute.Tensor) -> None:
        """Calls the epilogue's `visit` for the thread's rows of a subtile."""
        self.epilogue.visit(sub, *accumulators, work.shared.glob, work.held, smem)

    def _make_room(self, work: Work, visit: Any) -> None:
        """Waits, ahead of a visit, until the planes of its outputs may be written."""

    def _pace(self, work: Work) -> None:
        """Called before a value is kept for which no plane is waited for."""

    @abstractmethod
    def _loaded(
        self, work: Work, at: Position, visit: Any, of_round: int
    ) -> tuple[list[cute.Tensor], Callable[[], None]]:
        """A subtile's exact loads of one of the `rounds`, for which the thread waits, and the function to
        call once they are read."""

    def _loads_read(self, work: Work, at: Position, visit: Any) -> Position:
        """The position after a subtile's exact loads."""
        return at._replace(exact=advanced(at.exact))

    @abstractmethod
    def _stores(self, work: Work, at: Position, visit: Any) -> list[cute.Tensor]:
        """The planes of a subtile's outputs in shared memory."""

    @abstractmethod
    def _leave(self, work: Work, at: Position, visit: Any) -> Position:
        """Takes a subtile's outputs from shared memory. Returns the position after them."""


def _release_nothing() -> None:
    """Called in place of a release where no planes are waited for."""
