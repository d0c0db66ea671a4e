"""Time what a further kernel of a CUDA graph costs, for `LAUNCH_BYTES` in cute_backend/fx_walk/boundary.py.

    python benchmarks/launches.py [--rounds N]

As many bytes are doubled in place by 1, 2, 4 and 8 kernels, each of its share, in a chain: the least-squares
slope is what one kernel more costs. L2 is swept before each chain. Prints, for each size, the chains'
microseconds, the slope, and the bytes that a copy moves meanwhile. Takes some 10 seconds on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cute_backend.bench.measure import measure_ceilings
from cute_backend.bench.timing import time_units, unit_of

KERNELS = (1, 2, 4, 8)
MEBIBYTES = (1, 8, 32, 128)
"""Bytes read and written by a chain: from a vector's to a plane's of a long prefill."""


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the straight line with the least squares."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def chain(parts: Sequence[Tensor]) -> Callable[[], None]:
    """A program of a kernel for each part."""

    def run() -> None:
        for part in parts:
            part.mul_(2)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    bandwidth = measure_ceilings([], rounds).bandwidth
    planes = {size: torch.zeros(size * 2**19, dtype=torch.uint8, device="cuda") for size in MEBIBYTES}
    units = {
        (size, count): unit_of(chain(plane.chunk(count)), [()])
        for size, plane in planes.items()
        for count in KERNELS
    }
    timings = time_units(units, rounds)
    print(f"{'MiB':>5}  {'us of 1, 2, 4, 8 kernels':30}  {'us a kernel':>11}  {'its bytes':>9}")
    for size in MEBIBYTES:
        times = [timings[size, count].median_us for count in KERNELS]
        each = slope(KERNELS, times)
        shown = " ".join(f"{time:7.2f}" for time in times)
        print(f"{size:5}  {shown:30}  {each:11.2f}  {each * bandwidth / 1e6 / 2**20:5.1f} MiB")
    print(f"{torch.cuda.get_device_name()}, a copy's {bandwidth / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
