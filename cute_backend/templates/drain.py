"""The epilogue of a tile whose sums are complete: one loop over its subtiles, for every architecture.

    tile     begin | each block of columns | end
    block    each sweep of the epilogue: Keep | Reduce | Visit      the first two for some epilogues
    subtile  wait for exact loads | read accumulators | the epilogue's method | leave what the sweep leaves

A *sweep* is a loop over the subtiles of a block, which reads planes and leaves something. It ends before the
next one begins, so a block has as many subtiles as the widest sweep spans, or one. A thread's *seat* is where
its accumulators are: `fragments.RegisterSeat`, or `tensor_memory.TensorMemorySeat`. It reads and writes
them, and makes turns: in a loop of Python, in one that the compiler unrolls, or in one at run time. A kernel
brings planes to its sweeps and takes them from there.
"""

# ruff: noqa: B027, because some kernels need no code in some hooks.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import cutlass.cute as cute

from cute_backend.planning import Stages, TileConfig
from cute_backend.templates.epilogue import BlockSubtiles, Epilogue, by_name
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
    thread's part of the tile, what the epilogue holds, the tile's staged rowvecs, and the number of values
    that an element has: one for each product, or the one that a sweep has kept in their place."""

    shared: Any
    seat: Any
    place: Place
    tile: Any
    held: SimpleNamespace
    rows: list[cute.Tensor]
    values: int


@dataclass(frozen=True)
class Sweep(ABC):
    """A loop over the subtiles of a block of columns, for a method of the epilogue."""

    span: int = 0
    """The columns of a block, all of which the sweep has passed before the next one begins; 0 for one
    subtile."""
    planes: tuple[str, ...] = ()
    """The exact loads in shared memory that its method reads, which come in one stage for each subtile."""

    @abstractmethod
    def run(self, drain: Drain, work: Work, at: Position, first: Any) -> tuple[Work, Position]:
        """Passes over the block that begins with the subtile `first`. Returns what later sweeps work with,
        and the next position."""

    def end(self, drain: Drain, work: Work) -> None:
        """Called after the last block of a tile."""


@dataclass(frozen=True)
class Keep(Sweep):
    """Leaves the value that the method `keep` returns for each element in the place of its first
    accumulator."""

    def run(self, drain: Drain, work: Work, at: Position, first: Any) -> tuple[Work, Position]:
        body = partial(self._subtile, drain, work, first)
        at = work.seat.turns(Turns(drain.block_subtiles, 1, body, writes=True), at)
        work.seat.end_writes()
        return replace(work, values=1), at

    def _subtile(self, drain: Drain, work: Work, first: Any, at: Position, within: Any) -> Position:
        seat, visit = work.seat, first + within
        begun = seat.begin(visit, 0, work.values)
        if not self.planes:
            drain._pace(work)
        loads, release = drain._awaited(self, work, at, visit)
        sub, *accumulators = seat.finish(work.tile, begun)
        smem = drain._smem(work.rows, loads, [], release)
        epilogue: Any = drain.epilogue
        values = epilogue.keep(sub, *accumulators, work.shared.glob, work.held, smem)
        seat.write(visit, accumulators[0], values)
        return drain._passed(self, work, at, visit)


@dataclass(frozen=True)
class Reduce(Sweep):
    """Leaves what the method `reduce_blocks` returns: the results of a block, which later sweeps hold.

    A subtile is read `again` in each pass of the method after the first.
    """

    def run(self, drain: Drain, work: Work, at: Position, first: Any) -> tuple[Work, Position]:
        passed: set[int] = set()

        def read(i: int) -> tuple[Any, ...]:
            again = i in passed
            passed.add(i)
            return work.seat.finish(work.tile, work.seat.begin(first, i, work.values), again)

        blocks = BlockSubtiles(work.tile, drain.block_subtiles, read)
        epilogue: Any = drain.epilogue
        smem = drain._smem(work.rows, [], [], _release_nothing)
        results = epilogue.reduce_blocks(blocks, work.shared.glob, work.held, smem)
        return replace(work, held=SimpleNamespace(**vars(work.held), **vars(results))), at


@dataclass(frozen=True)
class Visit(Sweep):
    """Leaves results: those of each subtile, which the method `visit` writes, and those of the whole tile."""

    pads_rows: bool = False
    """Whether `visit` also writes rows beyond M, up to a multiple of 128. It then runs for all rows of a
    tile."""
    ends: bool = False
    """Whether the method `end` writes what a thread holds for the whole tile."""

    def run(self, drain: Drain, work: Work, at: Position, first: Any) -> tuple[Work, Position]:
        body = partial(self._subtile, drain, work, first)
        return work, work.seat.turns(Turns(drain.block_subtiles, 1, body), at)

    def _subtile(self, drain: Drain, work: Work, first: Any, at: Position, within: Any) -> Position:
        seat, visit = work.seat, first + within
        drain._make_room(work, visit)
        begun = seat.begin(visit, 0, work.values)
        loads, release = drain._awaited(self, work, at, visit)
        sub, *accumulators = seat.finish(work.tile, begun)
        seat.release(visit)
        smem = drain._smem(work.rows, loads, drain._stores(work, at, visit), release)
        drain._visit_rows(self, work, smem, sub, *accumulators)
        if not self.planes:
            release()
        at = drain._passed(self, work, at, visit)
        return drain._leave(work, at, visit) if drain.stages.store > 0 else at

    def end(self, drain: Drain, work: Work) -> None:
        if self.ends:
            epilogue: Any = drain.epilogue
            epilogue.end(work.tile, work.shared.glob, work.held)


class Drain(ABC):
    """A kernel's loop over the subtiles of a tile, of which a thread has `visits` in each of its blocks of
    rows."""

    epilogue: Epilogue
    config: TileConfig
    stages: Stages
    visits: int

    @property
    def block_subtiles(self) -> int:
        """The subtiles of a block of columns, which each sweep ends before the next one begins."""
        return max(1, *(sweep.span // self.config.subtile_n for sweep in self.epilogue.sweeps))

    @property
    def waiting(self) -> list[Sweep]:
        """The sweeps that take a stage of exact loads for each subtile: those that read planes. If none does,
        visits take the stages, which are filled for other segments."""
        sweeps = self.epilogue.sweeps
        return [sweep for sweep in sweeps if sweep.planes] or [*sweeps[-1:]]

    @property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """The exact loads of each subtile that come in one stage, as indices in `shared_loads`: a round for
        each sweep that waits."""
        names = [operand.name for operand in self.epilogue.shared_loads]
        return tuple(tuple(names.index(name) for name in sweep.planes) for sweep in self.waiting)

    @cute.jit
    def _drain(self, work: Work, at: Position):
        """Runs the epilogue on all subtiles of a tile. Returns the position after them."""
        whole = self.block_subtiles
        for seat, has_rows in work.seat.blocks(work.tile):
            if has_rows:
                body = partial(self._drain_block, replace(work, seat=seat))
                at = seat.turns(Turns(self.visits // whole, whole, body), at)
        return at

    def _drain_block(self, work: Work, at: Position, first: Any) -> Position:
        """Runs the epilogue on the block of columns that begins with the subtile `first`."""
        for sweep in self.epilogue.sweeps:
            work, at = sweep.run(self, work, at, first)
        return at

    def _awaited(
        self, sweep: Sweep, work: Work, at: Position, visit: Any
    ) -> tuple[list[cute.Tensor], Callable[[], None]]:
        """A subtile's exact loads of a sweep, for which the thread waits, and the function to call once they
        are read."""
        if self._waits(sweep):
            return self._loaded(work, at, visit, self.waiting.index(sweep))
        return [], _release_nothing

    def _passed(self, sweep: Sweep, work: Work, at: Position, visit: Any) -> Position:
        """The position after a subtile's exact loads of a sweep."""
        return self._loads_read(work, at, visit) if self._waits(sweep) else at

    def _waits(self, sweep: Sweep) -> bool:
        """Whether a sweep takes stages of exact loads."""
        return self.stages.exact > 0 and sweep in self.waiting

    def _smem(
        self,
        rows: Sequence[cute.Tensor],
        loads: Sequence[cute.Tensor],
        stores: Sequence[cute.Tensor],
        release: Callable[[], None],
    ) -> SimpleNamespace:
        """The epilogue's operands in shared memory, by name: staged rowvecs, exact loads and outputs, each
        all or none. With them is `release`, which the epilogue calls once it has read the loads."""
        epilogue = self.epilogue
        given = (epilogue.staged, rows), (epilogue.shared_loads, loads), (epilogue.shared_stores, stores)
        names = [operand.name for operands, tensors in given if tensors for operand in operands]
        return by_name([*names, "release"], [*rows, *loads, *stores, release])

    def _end(self, work: Work) -> None:
        """Ends the sweeps of a tile, after its last block."""
        for sweep in self.epilogue.sweeps:
            sweep.end(self, work)

    def _visit_rows(
        self, sweep: Visit, work: Work, smem: SimpleNamespace, sub: Any, *accumulators: cute.Tensor
    ) -> None:
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
