"""How programs are timed: several at once, interleaved, each from a cold L2, without the host's time.

A unit is timed as a whole: several calls of a program in a row, each with inputs of its own. Together they
take long enough that the few microseconds of inaccuracy of events and of the start of a graph don't matter.
The calls are captured in one CUDA graph and replayed, so that a kernel of 10 us is not timed as the host's 50
us. The GPU waits a microsecond between two kernels of a graph, as it does in a served model; this time
counts.

Cold means that no call finds in L2 what it reads. Two ways were considered:

- Writing a large buffer before each call, as `triton.testing.do_bench` does. It leaves L2 full of dirty
  lines, which the timed kernel then has to write back: up to 50 MB on an H200, 12 us of its memory's time,
  as much as a decoding kernel itself takes. Small problems would seem slow, and all variants alike.
- Rotating inputs, whose sets together exceed L2 by far. Nothing is charged to the kernel but its own traffic,
  and outputs are written back as they are in a model. But tiny inputs would need thousands of sets.

So inputs rotate, and before each unit L2 is swept by reading a large buffer, which fills it with clean lines
that no call reads. Each set is read once in a unit, so even a small set is cold. The sweep runs before the
first event; while it does, the host enqueues the unit. It is repeated for units of many calls: when other
programs kept all cores busy, a graph of 64 kernels was enqueued only after one sweep had ended, and calls of
3 us seemed to take 7.

In each round every unit runs once, in a new random order, so that clocks, heat and other programs disturb all
units alike. Rounds follow each other closely, so the GPU is as hot, and its clock as low, as under steady
load.
"""

from __future__ import annotations

import fcntl
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cute_backend.bench.results import Timing
from cute_backend.errors import UsageError, root_cause
from cute_backend.runtime.compiling.build import settle
from cute_backend.runtime.disk.cache import writable_cache

UNIT_US = 1000.0
"""The least microseconds that a unit's calls take together, unless it has MAX_CALLS of them."""

MAX_CALLS = 64

_SWEPT_BYTES = 256 * 2**20
"""Bytes that are read between two units: more than any GPU's L2 holds."""

_CALLS_A_SWEEP = 8
"""The number of calls that the host enqueues during one sweep, even if all of its cores are busy."""

_WARMUP_S = 0.3
"""Seconds of untimed rounds at the start: an idle GPU takes a while to raise its clock."""

Key = TypeVar("Key", bound=Hashable)


def require_gpu() -> None:
    """Raises UsageError if there is no GPU to time on."""
    if not torch.cuda.is_available():
        raise UsageError("bench times kernels on a GPU, and torch finds no CUDA device on this machine")


@dataclass(frozen=True)
class Unit:
    """Calls that are timed together. `uncaptured` says why they are launched one by one, if they are.

    `kept` holds the objects that a replay needs: the inputs, and the program with its loaded kernels.
    """

    run: Callable[[], Any]
    calls: int
    uncaptured: str = ""
    kept: Any = None


def unit_of(program: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Unit:
    """One call of `program` on each of `sets`, captured if that is possible. It compiles and warms up."""

    def calls() -> list[Any]:
        return [program(*args) for args in sets]  # all results are alive at once: each has memory of its own

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError as error:
        torch.cuda.synchronize()
        why = next(iter(str(root_cause(error)).splitlines()), type(error).__name__)
        return Unit(calls, len(sets), f"not captured in a CUDA graph, so host time may count: {why}")
    return Unit(graph.replay, len(sets), kept=(program, sets))


def time_units(
    units: Mapping[Key, Unit], rounds: int, meanwhile: Callable[[], Any] = lambda: None
) -> dict[Key, Timing]:
    """Microseconds of one call of each unit. `meanwhile` is called once a round, while the GPU is at work.

    Processes of one user time one after the other, since concurrent work would lengthen each other's timings.
    They may compile at the same time, and prepare their programs (`preparing`).
    """
    with own_turn() as turn:
        return turn.time(units, rounds, meanwhile)


@contextmanager
def own_turn() -> Iterator[Turn]:
    """A turn in which no other process of the user times or prepares. Raises UsageError without a GPU."""
    require_gpu()
    with _gpu_lock(fcntl.LOCK_EX):
        yield Turn()


class Turn:
    """The right to time on the GPU alone. Only the first timing of a turn warms the GPU up."""

    def __init__(self) -> None:
        self._warm = False

    def time(
        self, units: Mapping[Key, Unit], rounds: int, meanwhile: Callable[[], Any] = lambda: None
    ) -> dict[Key, Timing]:
        """Times units as `time_units` does."""
        settle()
        sweep = torch.zeros(_SWEPT_BYTES // 4, device="cuda").sum
        order, shuffle = list(units), random.Random(0).shuffle
        warm = time.monotonic() + (0 if self._warm else _WARMUP_S)
        while time.monotonic() < warm:
            _round(units, order, sweep, lambda: None)
        self._warm = True
        times: dict[Key, list[float]] = {key: [] for key in units}
        for _ in range(rounds):
            shuffle(order)
            for key, taken in _round(units, order, sweep, meanwhile).items():
                times[key].append(taken)
        return {key: Timing.of(taken) for key, taken in times.items()}


def preparing() -> AbstractContextManager[None]:
    """A context in which no process of the user times. Several processes may be in it."""
    return _gpu_lock(fcntl.LOCK_SH)


@contextmanager
def _gpu_lock(kind: int) -> Iterator[None]:
    with (writable_cache().root / "timing.lock").open("a") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing unlocks only if no forked child has the file too


def _round(
    units: Mapping[Key, Unit], order: Iterable[Key], sweep: Callable[[], Any], meanwhile: Callable[[], Any]
) -> dict[Key, float]:
    events = {}
    for key in order:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(-(-units[key].calls // _CALLS_A_SWEEP)):
            sweep()
        start.record()
        units[key].run()
        end.record()
        events[key] = (start, end)
    meanwhile()
    torch.cuda.synchronize()
    return {key: start.elapsed_time(end) * 1e3 / units[key].calls for key, (start, end) in events.items()}
