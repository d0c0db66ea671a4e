"""Times one function as eager, Inductor and cute run it, on the GPU that is here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .errors import UsageError

L2_BYTES = 256 * 2**20
"""Written between two timings, so that no variant finds its operands in L2. More than any GPU's L2 holds."""


@dataclass(frozen=True)
class Timing:
    """Microseconds on the device: the median of the rounds, and their 10th and 90th percentiles."""

    median: float
    low: float
    high: float


def require_gpu() -> None:
    """Raises UsageError where there is no GPU to time on."""
    if not torch.cuda.is_available():
        raise UsageError("bench times kernels on a GPU, and torch finds no CUDA device on this machine")


def time_interleaved(
    variants: Mapping[str, Callable[[], Any]], rounds: int = 50, warmup: int = 5
) -> dict[str, Timing]:
    """Time each variant once a round, in turn, so that clocks and neighbours disturb all of them alike.

    A timing is what CUDA events see between the variant's first kernel and its last, from a cold L2. The
    write that clears L2 also gives the host time to get ahead, so short kernels are not hidden by launches.
    """
    require_gpu()
    cold = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in variants}
    for round_ in range(warmup + rounds):
        for name, run in variants.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cold.zero_()
            start.record()
            run()
            end.record()
            if round_ >= warmup:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: _summary([a.elapsed_time(b) * 1e3 for a, b in pairs]) for name, pairs in events.items()}


def _summary(times: list[float]) -> Timing:
    deciles = statistics.quantiles(times, n=10)
    return Timing(statistics.median(times), deciles[0], deciles[-1])


def compare(fn: Callable[..., Any], args: tuple[Any, ...], rounds: int = 50) -> dict[str, Timing]:
    """Times `fn(*args)` as "eager", as "inductor" and as "cute" run it."""
    require_gpu()
    runs = {
        "eager": fn,
        "inductor": torch.compile(fn, backend="inductor"),
        "cute": torch.compile(fn, backend="cute"),
    }
    with torch.no_grad():
        return time_interleaved({name: partial(run, *args) for name, run in runs.items()}, rounds)
