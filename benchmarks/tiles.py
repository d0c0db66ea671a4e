"""Time every tile that the heuristic is offered on a GPU, for few and for many waves: what it is fitted to.

    python benchmarks/tiles.py benchmarks/results/GPU-DATE-tiles.csv

The program is `full` of the built-in table: fp8, rowwise scales, bias, tanh-gelu, a residual. Kernels alone,
in CUDA graphs, interleaved, from a cold L2, beside torch's bare product; microseconds, medians.
"""

from __future__ import annotations

import csv
import gc
import itertools
import sys
from pathlib import Path

import torch
from rich.progress import track

from cute_backend import explain
from cute_backend.bench import scaled_mm
from cute_backend.bench.timing import require_gpu, time_units, unit_of
from cute_backend.planning import Variant, offered
from cute_backend.runtime.build import obtain
from cute_backend.runtime.device import device_at, max_active_clusters
from cute_backend.runtime.kernel import Kernel
from cute_backend.runtime.timing import arguments_of
from cute_backend.spec import EpilogueSpec

SHAPES = (
    *itertools.product((1, 16, 64, 96, 128, 192, 256, 384, 512, 1000), (8192,), (8192,)),
    *itertools.product((16, 64, 128, 160, 192, 256, 320, 512), (28672,), (8192,)),
    *itertools.product((16, 64, 128, 256, 512, 4096), (4096,), (4096,)),
    *itertools.product((16, 128), (512, 1024, 2048), (2048, 8192)),
    (256, 1024, 8192),
    (576, 8192, 8192),
    (256, 4096, 14336),
    (2048, 8192, 2048),
    (8192, 8192, 1024),
)
"""(M, N, K)."""

_BYTES = 2 * 2**30
"""Of inputs that rotate, for every call of a graph its own."""


def spec_of_full() -> EpilogueSpec:
    """The region of `scaled_mm.full`."""
    full = scaled_mm.problem(256, 512, 256).workloads[1]
    return explain(full.fn, *full.inputs(), dynamic=False).first_region().spec


@torch.no_grad()
def measure(spec: EpilogueSpec, kernels: dict[Kernel, object], m: int, n: int, k: int) -> dict[str, float]:
    """Microseconds by tile, and by `torch`."""
    generator = torch.Generator("cuda").manual_seed(0)
    calls = max(2, min(40, _BYTES // (m * k + n * k + 4 * m * n)))
    with torch.device("cuda"):
        products = [scaled_mm.operands(m, n, k) for _ in range(calls)]
    configs = [kernel.config for kernel in kernels]
    sets = [arguments_of(spec, configs, m, n, k, generator) for _ in range(calls)]
    units = {"torch": unit_of(scaled_mm.bare, products)}
    for kernel, function in kernels.items():
        clusters = max_active_clusters(0, kernel.config.cluster_size)
        units[kernel.config.name] = unit_of(lambda *args, f=function, c=clusters: f(*args, c), sets)
    return {name: timing.median_us for name, timing in time_units(units, rounds=15).items()}


def main() -> None:
    """Writes the file that the command names: m, n, k, tile, us."""
    require_gpu()
    (path,) = map(Path, sys.argv[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = spec_of_full()
    wanted = [Kernel(spec, config, Variant.TMA) for config in offered(device_at(0).arch, spec)]
    kernels = obtain(wanted)
    failures = [outcome for outcome in kernels.values() if isinstance(outcome, Exception)]
    if failures:
        raise failures[0]
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["m", "n", "k", "tile", "us"])
        for shape in track(SHAPES, "timing"):
            rows.writerows([*shape, tile, f"{us:.2f}"] for tile, us in measure(spec, kernels, *shape).items())
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
