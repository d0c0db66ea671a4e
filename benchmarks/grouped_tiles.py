"""Times tiles of grouped products on a GPU, and torch's bare `grouped_mm`. Tiles are chosen by these timings.

    python benchmarks/grouped_tiles.py benchmarks/results/GPU-DATE-grouped-tiles.csv

The products are those of the table `grouped`, or with --fp8 of `grouped_fp8`. Gate and up in one kernel are
compared with torch's product that writes both, and down with routing weights with torch's product alone.
Kernels are timed alone, in CUDA graphs, interleaved, from a cold L2; figures are medians in microseconds.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain
from cute_backend.bench import grouped_fp8
from cute_backend.bench.grouped import MODELS, Experts, Split, gated
from cute_backend.bench.measure import relative_difference
from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.planning import Alignment, Sizes, TileConfig, choose, plan
from cute_backend.planning.search import clustered
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.device import device_at, max_active_clusters
from cute_backend.runtime.arguments.outputs import Outputs
from cute_backend.runtime.compiling.build import Outcome, obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import EpilogueSpec

COLUMNS = ("model", "tokens", "split", "product", "m", "n", "k", "groups", "tile", "us")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
_BYTES = 6 * 2**30
"""Bytes of weights that rotate, so that every call of a graph has different ones."""

_CALLS = 6


def down(x: Tensor, weight: Tensor, ends: Tensor, routing: Tensor) -> Tensor:
    """The second product, times routing weights."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends) * routing[:, None]


def product_of(x: Tensor, weight: Tensor, ends: Tensor, *scales: Tensor) -> Tensor:
    """torch's product with the weights (G, columns, K); for fp8, with scales of rows and of columns."""
    if scales:
        return grouped_fp8.product(x, weight, *scales, ends)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call: A with offsets, the weight (G, columns, K), the routing weights of the second
    product and, for fp8, the scales of rows and of the weight's columns."""

    a: list[Tensor]
    weight: Tensor
    scales: list[Tensor]
    routing: list[Tensor]

    @property
    def loads(self) -> list[Tensor]:
        """The loads of the kernel, which has two B and two vectors of scales for the two halves."""
        of_rows, of_columns = self.scales[:1], self.scales[1:]
        halves = [half for each in of_columns for half in (each.chunk(2, -1) if not self.routing else [each])]
        return [*of_rows, *halves, *self.routing]

    def expected(self) -> Tensor:
        """The result in eager."""
        (x, ends), routing = self.a, self.routing
        if self.scales:
            of_rows, of_columns = self.scales
            fn: Any = grouped_fp8.routed if routing else grouped_fp8.gated
            return fn(x, self.weight, of_rows, of_columns, ends, *routing)
        fn = down if routing else gated
        return fn(x, self.weight, ends, *routing)


@dataclass(frozen=True)
class Case:
    """One product of one model."""

    experts: Experts
    tokens: int
    split: Split
    product: str
    fp8: bool

    @property
    def m(self) -> int:
        return self.tokens * self.experts.chosen

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        hidden, inner = self.experts.hidden, self.experts.inner
        return (inner, hidden) if self.product == "gated" else (hidden, inner)

    def inputs(self) -> Inputs:
        (n, k), gate = self.sizes, self.product == "gated"
        ends = torch.tensor(list(accumulate(self.experts.rows(self.tokens, self.split))), dtype=torch.int32)
        columns = n * (2 if gate else 1)
        weight = torch.empty(self.experts.count, columns, k, dtype=BF16, device="cuda")
        weight.normal_(std=1.0 if self.fp8 else k**-0.5)
        x, scales = torch.randn(self.m, k, dtype=BF16, device="cuda"), []
        if self.fp8:
            of_columns = torch.rand(self.experts.count, columns, device="cuda") + 0.5
            scales = [torch.rand(self.m, device="cuda") + 0.5, of_columns / k**0.5]
            x, weight = x.to(FP8), weight.to(FP8)
        routing = [] if gate else [torch.rand(self.m, dtype=BF16, device="cuda")]
        return Inputs([x, ends.cuda()], weight, scales, routing)


def specs(fp8: bool) -> dict[str, EpilogueSpec]:
    """The spec of each product, which holds no sizes."""
    x, ends = torch.randn(32, 64, dtype=BF16), torch.tensor([16, 32], dtype=torch.int32)
    wide, weight = torch.randn(2, 128, 64, dtype=BF16), torch.randn(2, 64, 64, dtype=BF16)
    routing, further = torch.rand(32, dtype=BF16), {"dynamic": False}
    if not fp8:
        found = explain(gated, x, wide, ends, **further), explain(down, x, weight, ends, routing, **further)
    else:
        x, scale = x.to(FP8), torch.rand(32)
        of_wide, of_weight = torch.rand(2, 128), torch.rand(2, 64)
        wide, weight = wide.to(FP8), weight.to(FP8)
        found = (
            explain(grouped_fp8.gated, x, wide, scale, of_wide, ends, **further),
            explain(grouped_fp8.routed, x, weight, scale, of_weight, ends, routing, **further),
        )
    return {name: each.first_region().spec for name, each in zip(("gated", "down"), found, strict=True)}


def tiles(spec: EpilogueSpec, names: list[str]) -> list[TileConfig]:
    """The tiles of these names. Without names, they are all tiles and clusters except those of 256 rows, of
    128 by 64, shallow ones, and of columns that are not a multiple of 64."""
    found = clustered(device_at(0).arch, spec)
    if names:
        return [each for each in found if each.name in names]
    few = [each for each in found if each.tile_m < 256 and each.mma_n % 64 == 0 and not each.shallow]
    return [each for each in few if (each.tile_m, each.mma_n) != (128, 64)]


@torch.no_grad()
def measure(case: Case, spec: EpilogueSpec, built: dict[Kernel, Outcome], rounds: int) -> dict[str, float]:
    """Microseconds of each tile, and of `torch`. A tile is reported and left out if the driver refuses it, or
    if its result is wrong."""
    n, k = case.sizes
    taken = (1 if case.fp8 else 2) * case.experts.count * n * k * len(spec.accumulators)
    sets, products = [], []
    for _ in range(max(1, min(_CALLS, _BYTES // taken))):
        given = case.inputs()
        bs = list(given.weight.transpose(1, 2).split(n, -1))
        bound = Binding(spec).bind(given.a, bs, given.loads)
        _, memory = Outputs(next(iter(built)).plan).of_size(case.m, n).allocate(given.a[0])
        sets.append(tuple(bound.tensors + memory))
        products.append((given.a[0], given.weight, given.a[1], *given.scales))
    units = {"torch": unit_of(product_of, products)}
    expected = given.expected()
    for kernel, function in built.items():
        clusters = max_active_clusters(0, kernel.plan.tile.cluster_size)
        try:
            memory[0].fill_(float("nan"))
            unit = unit_of(lambda *args, f=function, c=clusters: f(*args, c), sets)
        except (RuntimeError, ValueError) as error:
            print(f"{case}: {kernel.plan.tile.name}: {error}", file=sys.stderr)
            continue
        difference = relative_difference(memory[0], expected)
        if difference < 0.01:
            units[kernel.plan.tile.name] = unit
        else:
            print(f"{case}: {kernel.plan.tile.name} is WRONG by {difference:.3g}", flush=True)
    return {name: timing.median_us for name, timing in time_units(units, rounds).items()}


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The cases that the command names, once for each number of tokens."""
    for tokens, split, experts, kind in product(arguments.tokens, Split, MODELS, arguments.products):
        if experts.name in arguments.models and split.value in arguments.splits:
            yield Case(experts, tokens, split, kind, arguments.fp8)


def main() -> None:
    """Writes the file that the command names, and prints the fastest tiles of each product."""
    names, splits = [each.name for each in MODELS], [each.value for each in Split]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--products", nargs="+", choices=["gated", "down"], default=["gated", "down"])
    parser.add_argument("--splits", nargs="+", choices=splits, default=splits)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiles", nargs="+", default=[], help="names of tiles, instead of most of them")
    parser.add_argument("--fp8", action="store_true", help="fp8 with scales of rows and of columns")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no product later than this")
    arguments = parser.parse_args()
    require_gpu()
    until = time.monotonic() + 60 * arguments.minutes
    gpu, found = device_at(0), specs(arguments.fp8)
    kernels = {
        kind: [Kernel(plan(spec, each, Alignment.TMA)) for each in tiles(spec, arguments.tiles)]
        for kind, spec in found.items()
    }
    built = obtain([kernel for kind in arguments.products for kernel in kernels[kind]])
    failed = {kernel: outcome for kernel, outcome in built.items() if isinstance(outcome, Exception)}
    for kernel, outcome in failed.items():
        print(f"{kernel.plan.tile.name}: {outcome}", file=sys.stderr)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    with arguments.file.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for case in cases(arguments):
            if time.monotonic() > until:
                break
            spec, (n, k) = found[case.product], case.sizes
            ready = {kernel: built[kernel] for kernel in kernels[case.product] if kernel not in failed}
            times = measure(case, spec, ready, arguments.rounds)
            identity = (case.experts.name, case.tokens, case.split.value, case.product)
            rows.writerows(
                [*identity, case.m, n, k, case.experts.count, tile, f"{us:.2f}"] for tile, us in times.items()
            )
            file.flush()
            sizes = Sizes(case.m, n, k, case.experts.count)
            chosen = choose(gpu.arch, spec, sizes, gpu.sm_count).name
            best = sorted((us, tile) for tile, us in times.items() if tile != "torch")[:4]
            print(
                *identity,
                f"torch {times['torch']:.0f}, chosen {chosen} {times.get(chosen, float('nan')):.0f};",
                ", ".join(f"{tile} {us:.0f}" for us, tile in best),
                flush=True,
            )
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
