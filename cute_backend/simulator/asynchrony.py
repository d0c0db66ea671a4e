"""Work that completes later: TMA, tensor-core operations, commits, bulk stores.

Each pipe finishes its operations in the order of their issue, each after a delay counted in warp
instructions of the cluster. Data moves when an operation completes, never before. With a seed the delays,
the order of the warps and their speed are random, and differ from seed to seed; without one they are fixed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.simulation_errors import SimulationError

if TYPE_CHECKING:
    from cute_backend.simulator.report import Recorder

FIXED_DELAY = 40

POOL_BYTES = 1 << 20
"""The bytes that fresh registers and memory are copied from, each seed's from another place. To draw them
would take ten times as long, up to a seventh of a kernel's time."""


@cache
def _pool() -> np.ndarray:
    return np.frombuffer(np.random.default_rng(0).bytes(POOL_BYTES), np.uint8)


@dataclass
class Operation:
    """An operation in progress. `complete` moves its data and signals its barrier."""

    pipe: Pipe
    text: str
    issued: int
    due: int
    complete: Callable[[], None]


class Pipe:
    """Operations of one kind of one CTA, finished in order."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.last_due = 0

    def issue(self, text: str, complete: Callable[[], None]) -> None:
        self.engine.schedule(self, text, complete)


class Engine:
    """The clock of a cluster, and its operations in progress."""

    def __init__(self, seed: int | None, observer: Recorder | None = None) -> None:
        self.random = None if seed is None else np.random.default_rng(seed)
        self._place = int(np.random.default_rng(seed or 0).integers(POOL_BYTES))
        self.now = 0
        self.observer = observer
        self._queue: list[tuple[int, int, Operation]] = []
        self._order = itertools.count()

    def garbage(self, shape: int | tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """The contents of memory and registers before their first write. They differ from seed to seed."""
        array = np.empty(shape, dtype)
        left, pool = array.reshape(-1).view(np.uint8), _pool()
        while left.size:
            part = pool[self._place : self._place + left.size]
            left[: part.size] = part
            left = left[part.size :]
            self._place = (self._place + part.size) % POOL_BYTES
        if dtype is np.bool_:
            array.view(np.uint8)[:] &= 1
        return array

    def delay(self) -> int:
        if self.random is None:
            return FIXED_DELAY
        # Most delays are short; some are so long that all other work has to wait for the operation.
        return int(
            self.random.integers(1, 60) if self.random.random() < 0.8 else self.random.integers(60, 2500)
        )

    def schedule(self, pipe: Pipe, text: str, complete: Callable[[], None]) -> None:
        due = max(self.now + self.delay(), pipe.last_due)
        pipe.last_due = due
        heapq.heappush(self._queue, (due, next(self._order), Operation(pipe, text, self.now, due, complete)))

    def advance(self, ticks: int) -> None:
        """Advances the clock and completes the operations that are due by then."""
        self.now += ticks
        while self._queue and self._queue[0][0] <= self.now:
            self._complete_one()

    def jump(self) -> bool:
        """Advances the clock to the next operation and completes it. Returns False if there is none.

        It is called when no warp can run.
        """
        if not self._queue:
            return False
        self.now = max(self.now, self._queue[0][0])
        self._complete_one()
        return True

    def drain(self) -> None:
        while self.jump():
            pass

    def pending(self) -> list[Operation]:
        return [entry[2] for entry in sorted(self._queue, key=lambda e: e[:2])]

    def _complete_one(self) -> None:
        _, _, operation = heapq.heappop(self._queue)
        try:
            operation.complete()
        except SimulationError as error:
            if error.where is None:
                error.where = f"the completion of `{operation.text}` in {operation.pipe.name}"
            raise
        if self.observer is not None:
            done = operation.pipe.name, operation.text, operation.issued, self.now
            self.observer.operations.append(done)
