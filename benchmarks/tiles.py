"""Times tiles on a GPU, and torch's bare product. The cost model (`planning/cost.py`) is fitted to the
times.

    python benchmarks/tiles.py benchmarks/results/GPU-DATE-tiles.csv              the shapes listed here
    python benchmarks/tiles.py FILE --seed 1 --count 60 --operands fp8 bf16       shapes that are drawn
    python benchmarks/tiles.py FILE --shapes 128x7168x16384 --epilogue bare       shapes that are given
    python benchmarks/tiles.py FILE --count 100 --rows 1 1024 --even --most 12    tiles as wide as the rows

The program is the product with a bias, an activation and a residual, or with another of `problems.Epilogue`;
torch's is the product alone. Kernels are timed alone, in CUDA graphs, interleaved, from a cold L2; figures
are medians in microseconds. A run adds missing timings to FILE, so it continues one that was cut off.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import math
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from problems import ROWS, Drawn, Epilogue, Operands, draw
from rich.progress import track

from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.planning import Alignment, Sizes, TileConfig, offered, plan
from cute_backend.planning.cost import cost
from cute_backend.planning.search import clustered, for_rows
from cute_backend.runtime.arguments.device import device_at, max_active_clusters
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.tuning.timing import arguments_of, taken_by
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
    (8192, 8192, 8192),
    (2048, 8192, 28672),
    (4096, 14336, 4096),
    (16384, 1024, 4096),
    (6144, 6144, 512),
    (3000, 5008, 1536),
    (450, 5120, 13824),
    (300, 14336, 4096),
    (200, 12800, 5120),
    (64, 11008, 4096),
)
"""(M, N, K)."""

COLUMNS = ("m", "n", "k", "operands", "epilogue", "tile", "us")
"""n counts all columns of the product: those of both halves of a gated pair."""

_BYTES = 2 * 2**30
"""Bytes of inputs that rotate, so that every call of a graph has different ones."""

_CALLS_US = 1500.0
"""The approximate time of all calls of one graph together."""


@torch.no_grad()
def measure(
    drawn: Drawn, spec: EpilogueSpec, functions: dict[TileConfig, KernelFunction], rounds: int
) -> dict[str, float]:
    """Microseconds of each tile, and of `torch`. A tile that the driver refuses is left out."""
    m, n, k = drawn.m, drawn.columns, drawn.k
    generator = torch.Generator("cuda").manual_seed(0)
    fitting = _BYTES // (m * k + n * k + 4 * m * n)
    calls = int(max(2, min(40, fitting, _CALLS_US / (2e6 * m * n * k / 6e14 + 5))))
    with torch.device("cuda"):
        products = [drawn.product_inputs() for _ in range(calls)]
    plans = {tile: plan(spec, tile, Alignment.TMA) for tile in functions}
    sets = [arguments_of([*plans.values()], m, n, k, generator) for _ in range(calls)]
    units = {"torch": unit_of(drawn.product, products)}
    for tile, function in functions.items():
        clusters = max_active_clusters(0, tile.cluster_size)
        try:
            own = [taken_by(plans[tile], each) for each in sets]
            units[tile.name] = unit_of(lambda *args, f=function, c=clusters: f(*args, c), own)
        except (RuntimeError, ValueError) as error:
            print(f"{drawn.name}: {tile.name}: {error}", file=sys.stderr)
    return {name: timing.median_us for name, timing in time_units(units, rounds).items()}


def tiles(drawn: Drawn, spec: EpilogueSpec, arguments: argparse.Namespace) -> list[TileConfig]:
    """The tiles that the heuristic chooses from for any M or, with `--even`, for this M or, with `--every`,
    all tiles and clusters that fit the spec. Only tiles whose names match `--tiles` are kept."""
    arch = device_at(0).arch
    found = list(offered(arch, spec))
    if arguments.even:
        found = list(for_rows(arch, spec, drawn.m, drawn.columns, device_at(0).sm_count))
    if arguments.every:
        found += clustered(arch, spec)
        found += [replace(each, cluster_m=3) for each in found if (each.tile_m, each.tile_n) == (64, 192)]
        found += [replace(each, cluster_m=4) for each in found if (each.tile_m, each.tile_n) == (64, 256)]
    # The cost model does not distinguish shallow tiles.
    by_name = {each.name: each for each in found if not each.shallow}
    return [config for name, config in by_name.items() if re.fullmatch(arguments.tiles, name)]


def promising(
    drawn: Drawn, spec: EpilogueSpec, able: Iterable[TileConfig], arguments: argparse.Namespace
) -> list[TileConfig]:
    """The tiles whose predicted time is at most `--within` times the best one's: `--most` of them, drawn
    anew for each problem."""
    sizes, sm_count = Sizes(drawn.m, drawn.columns, drawn.k), device_at(0).sm_count
    costs = {each: cost(each, spec, sizes, sm_count) for each in able}
    near = [each for each, us in costs.items() if us <= arguments.within * min(costs.values())]
    return random.Random(drawn.name).sample(near, min(len(near), arguments.most))


def wanted(arguments: argparse.Namespace) -> Iterator[Drawn]:
    """The problems, with operands round-robin."""
    if arguments.count:
        epilogue = (Epilogue(arguments.epilogue),)
        for drawn in draw(arguments.seed, arguments.count, epilogue, tuple(arguments.rows)):
            operands = Operands(arguments.operands[drawn.m % len(arguments.operands)])
            yield replace(drawn, operands=operands)
    else:
        shapes = [tuple(map(int, each.split("x"))) for each in arguments.shapes] or SHAPES
        for shape, operands in itertools.product(shapes, arguments.operands):
            yield Drawn(*shape, Operands(operands), Epilogue(arguments.epilogue))


def main() -> None:
    """Adds rows to the file that the command names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=0, help="problems to draw; 0 for the listed shapes")
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="MxNxK", help="time these shapes, not those listed"
    )
    parser.add_argument("--epilogue", default="full", choices=[each.value for each in Epilogue])
    parser.add_argument("--operands", nargs="+", default=["fp8"], choices=[each.value for each in Operands])
    parser.add_argument("--every", action="store_true", help="every tile and cluster, not those offered")
    parser.add_argument("--even", action="store_true", help="also tiles as wide as even shares of M")
    parser.add_argument("--rows", type=int, nargs=2, default=ROWS, help="the least and the largest M drawn")
    parser.add_argument("--tiles", default=".*", help="a regular expression for the names of tiles")
    parser.add_argument(
        "--within",
        type=float,
        default=math.inf,
        help="leave out tiles whose predicted time is more than this times the best one's",
    )
    parser.add_argument("--most", type=int, default=sys.maxsize, help="time this many of a problem's tiles")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no problem later than this")
    arguments = parser.parse_args()
    require_gpu()
    until = time.monotonic() + 60 * arguments.minutes
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    done = set()
    if arguments.file.exists():
        with arguments.file.open() as file:
            done = {tuple(row[each] for each in COLUMNS[:5]) for row in csv.DictReader(file)}
    specs = {
        operands: Drawn(256, 512, 256, operands, Epilogue(arguments.epilogue)).spec()
        for operands in map(Operands, arguments.operands)
    }
    kernels: dict[Drawn, dict[TileConfig, Kernel]] = {}
    for drawn in wanted(arguments):
        spec = specs[drawn.operands]
        able = promising(drawn, spec, tiles(drawn, spec, arguments), arguments)
        kernels[drawn] = {each: Kernel(plan(spec, each, Alignment.TMA)) for each in able}
    built = obtain(list({kernel: None for each in kernels.values() for kernel in each.values()}))
    for kernel, outcome in built.items():
        if isinstance(outcome, Exception):
            print(f"{kernel.plan.tile.name}: {outcome}", file=sys.stderr)
    with arguments.file.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if not done:
            rows.writerow(COLUMNS)
        for drawn, of_tiles in track(kernels.items(), "timing"):
            identity = (drawn.m, drawn.n, drawn.k, drawn.operands.value, drawn.epilogue.value)
            if tuple(map(str, identity)) in done or time.monotonic() > until:
                continue
            ready = {
                tile: function
                for tile, kernel in of_tiles.items()
                if not isinstance(function := built[kernel], Exception)
            }
            times = measure(drawn, specs[drawn.operands], ready, arguments.rounds)
            rows.writerows([*identity, tile, f"{us:.2f}"] for tile, us in times.items())
            file.flush()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
