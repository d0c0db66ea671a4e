"""Times the cost of one more kernel in a CUDA graph, and of reading rows a second time in Inductor's kernels.

    python benchmarks/launches.py [--rounds N]

The costs in fx_walk/ends/boundary.py come from here. A chain of 1, 2, 4 or 8 kernels doubles the same number
of bytes in place, an equal part each; the least-squares slope is the cost of one more kernel. Then rows are
quantised to fp8 by a scale that is computed from them, and by a given one. The difference is the cost of the
second reading, which is printed beside the time of a copy of its bytes. L2 is swept before each timing. The
command takes 30 seconds on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cute_backend.bench.measure import measure_ceilings
from cute_backend.bench.program_timing import time_units, unit_of

KERNELS = (1, 2, 4, 8)
MEBIBYTES = (1, 8, 32, 128)
"""Bytes read and written by a chain: from those of a vector to those of a plane of a long prefill."""

ROWS = ((64, 4096), (64, 14336), (2048, 4096), (2048, 14336), (8192, 4096), (8192, 14336))
"""Sizes of the rows that are read twice."""


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of the straight line with the least squares."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def chain(parts: Sequence[Tensor]) -> Callable[[], None]:
    """A program of a kernel for each part."""

    def run() -> None:
        for part in parts:
            part.mul_(2)

    return run


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of (M, N) in fp8, and their scales (M, 1): a kernel that reads each row twice."""
    return by_scale(x, x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448)


def by_scale(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def second_readings(rounds: int, bandwidth: float) -> None:
    """Prints the table of second readings."""
    twice, once = torch.compile(quantised, dynamic=False), torch.compile(by_scale, dynamic=False)
    units = {}
    for m, n in ROWS:
        x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        scale = torch.ones(m, 1, device="cuda")
        units[m, n, True], units[m, n, False] = unit_of(twice, [(x,)]), unit_of(once, [(x, scale)])
    timings = time_units(units, rounds)
    print(f"{'rows':>12}  {'us with amax':>12}  {'without':>8}  {'difference':>10}  {'as a copy':>9}")
    for m, n in ROWS:
        with_amax, without = (timings[m, n, has].median_us for has in (True, False))
        copied = 2e6 * m * n / bandwidth
        print(f"{m:5} x {n:4}  {with_amax:12.2f}  {without:8.2f}  {with_amax - without:10.2f}  {copied:9.2f}")


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
    second_readings(rounds, bandwidth)
    print(f"{torch.cuda.get_device_name()}, a copy's {bandwidth / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
