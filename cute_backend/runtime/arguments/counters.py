"""The counters of tiles by which kernels find a row's last tile: zeros that no two kernels use at once.

A kernel leaves its counters as it found them, 0 (`templates/last_tile.py`). So kernels that run one after
another may share counters, and kernels that may run at the same time may not:

- Launches of one thread to one stream share them. They run one after another: a kernel that begins before the
  end of the one ahead of it waits for that before it touches global memory (`templates/overlap.py`).
- A launch that a CUDA graph captures gets counters of its own, since the graph may run on any stream, beside
  any other kernel; a graph does not run beside itself. Their memory is never used for anything else. It is
  not the graph's: memory of a graph's pool has other contents when the graph runs again, and nothing can be
  zeroed once for all while a graph is captured. So it is set aside before.

If a captured launch finds no counters set aside, it gets none, and a second kernel finishes the reductions.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from cute_backend.runtime.host.forks import free_in_children

SLAB = 1 << 18
"""Counters that are set aside at a time for launches that graphs capture: 1 MiB. A dense product of 128 rows
takes 8 of them (`planning.counters_needed`)."""

MOST_SLABS = 64
"""The most slabs that are set aside on a GPU, since nothing gives them back."""

_LEAST = 1 << 10
"""The fewest counters of a thread and a stream."""

_lock = free_in_children(threading.Lock())


class _Reserve:
    """The counters of a GPU that are set aside for captured launches: those of `slab` from `used` on are
    free."""

    def __init__(self) -> None:
        self.slab: Tensor | None = None
        self.used = self.slabs = 0

    @property
    def is_low(self) -> bool:
        """Whether more have to be set aside."""
        return self.slabs < MOST_SLABS and (self.slab is None or self.used > SLAB // 2)


_reserves: dict[int, _Reserve] = {}


class _OfThread(threading.local):
    """The counters of a thread, by GPU and stream. Threads share no stream by its number: each has a default
    stream of its own that has the same number in all of them (CUDA Runtime API, cudaStreamPerThread)."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], Tensor] = {}


_own = _OfThread()


def counters_for(count: int, like: Tensor) -> Tensor:
    """Returns at least `count` counters, int32, for the next launch to the current stream of the device of
    `like`; none if `count` is 0 or the launch has to do without. On a CPU they are new."""
    if count == 0 or not like.is_cuda:
        return torch.zeros(count, dtype=torch.int32, device=like.device)
    device = like.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _of_current_stream(count, device)
    return _of_current_stream(count, device)


def _of_current_stream(count: int, device: int) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        return _of_capture(count, device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    counters = _own.by_stream.get((device, stream))
    if counters is None or len(counters) < count:
        room = max(_LEAST, 1 << (count - 1).bit_length())
        counters = torch.zeros(room, dtype=torch.int32, device=torch.device("cuda", device))
        _own.by_stream[device, stream] = counters
    if (reserve := _reserves.get(device)) is None or reserve.is_low:
        set_aside(device)
    return counters


def set_aside(device: int) -> None:
    """Sets counters aside for launches that graphs will capture on a GPU, if few are left. Does nothing while
    one is captured, or for the CPU, whose index is -1."""
    if device < 0:
        return
    with _lock, torch.cuda.device(device):
        reserve = _reserves.setdefault(device, _Reserve())
        if not reserve.is_low or torch.cuda.is_current_stream_capturing():
            return
        slab = torch.zeros(SLAB, dtype=torch.int32, device=torch.device("cuda", device))
        torch.cuda.current_stream().synchronize()  # a graph may run on a stream that nothing else orders
        reserve.slab, reserve.used, reserve.slabs = slab, 0, reserve.slabs + 1


def _of_capture(count: int, device: int) -> Tensor:
    with _lock:
        reserve = _reserves.get(device)
        if reserve is not None and reserve.slab is not None and reserve.used + count <= SLAB:
            first, reserve.used = reserve.used, reserve.used + count
            return reserve.slab[first : first + count]
    return torch.empty(0, dtype=torch.int32, device=torch.device("cuda", device))
