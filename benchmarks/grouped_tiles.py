"""Time tiles of grouped products on a GPU, beside torch's bare `grouped_mm`: what they are chosen by.

    python benchmarks/grouped_tiles.py benchmarks/results/GPU-DATE-grouped-tiles.csv

The products are those of the table `grouped`: gate and up in one kernel, beside torch's product that writes
both, and down with routing weights, beside torch's product alone. Kernels alone, in CUDA graphs, interleaved,
from a cold L2; microseconds, medians.
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

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain
from cute_backend.bench.grouped import MODELS, Experts, Split, gated
from cute_backend.bench.measure import relative_difference
from cute_backend.bench.timing import require_gpu, time_units, unit_of
from cute_backend.planning import Alignment, TileConfig, choose
from cute_backend.planning.search import clustered
from cute_backend.runtime.bind import Binding
from cute_backend.runtime.build import Outcome, obtain
from cute_backend.runtime.device import device_at, max_active_clusters
from cute_backend.runtime.kernel import Kernel
from cute_backend.runtime.outputs import Outputs
from cute_backend.spec import EpilogueSpec

COLUMNS = ("model", "tokens", "split", "product", "m", "n", "k", "groups", "tile", "us")
BF16 = torch.bfloat16
_BYTES = 6 * 2**30
"""Bytes of weights that rotate, so that every call of a graph has its own."""

_CALLS = 6


def down(x: Tensor, weight: Tensor, ends: Tensor, routing: Tensor) -> Tensor:
    """The second product, times routing weights."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends) * routing[:, None]


@dataclass(frozen=True)
class Case:
    """One product of one model."""

    experts: Experts
    tokens: int
    split: Split
    product: str

    @property
    def m(self) -> int:
        return self.tokens * self.experts.chosen

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        hidden, inner = self.experts.hidden, self.experts.inner
        return (inner, hidden) if self.product == "gated" else (hidden, inner)

    def operands(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        """A and offsets, the B, loads, and the weight (G, columns, K) that the B are parts of."""
        (n, k), gate = self.sizes, self.product == "gated"
        ends = torch.tensor(list(accumulate(self.experts.rows(self.tokens, self.split))), dtype=torch.int32)
        weight = torch.empty(self.experts.count, n * (2 if gate else 1), k, dtype=BF16, device="cuda")
        weight.normal_(std=k**-0.5)
        b = weight.transpose(1, 2)
        x = torch.randn(self.m, k, dtype=BF16, device="cuda")
        loads = [] if gate else [torch.rand(self.m, dtype=BF16, device="cuda")]
        return [x, ends.cuda()], list(b.split(n, -1)), loads, weight


def specs() -> dict[str, EpilogueSpec]:
    """The spec of each product; sizes don't count."""
    x, ends = torch.randn(32, 64, dtype=BF16), torch.tensor([16, 32], dtype=torch.int32)
    wide, weight = torch.randn(2, 128, 64, dtype=BF16), torch.randn(2, 64, 64, dtype=BF16)
    routing = torch.rand(32, dtype=BF16)
    return {
        "gated": explain(gated, x, wide, ends, dynamic=False).first_region().spec,
        "down": explain(down, x, weight, ends, routing, dynamic=False).first_region().spec,
    }


def tiles(spec: EpilogueSpec) -> list[TileConfig]:
    """Tiles and clusters, but those of 256 rows, of 128 by 64, and of columns that are no multiple of 64."""
    found = clustered(device_at(0).arch, spec)
    few = [each for each in found if each.tile_m < 256 and each.mma_n % 64 == 0]
    return [each for each in few if (each.tile_m, each.mma_n) != (128, 64)]


@torch.no_grad()
def measure(case: Case, spec: EpilogueSpec, built: dict[Kernel, Outcome], rounds: int) -> dict[str, float]:
    """Microseconds by tile, and by `torch`. A tile that the driver refuses is reported and left out, and so
    is one whose result is wrong."""
    n, k = case.sizes
    taken = 2 * case.experts.count * n * k * len(spec.accumulators)
    sets, products = [], []
    for _ in range(max(1, min(_CALLS, _BYTES // taken))):
        a, bs, loads, weight = case.operands()
        bound = Binding(spec).bind(a, bs, loads)
        _, memory = Outputs(spec, next(iter(built)).config).of_size(case.m, n).allocate(a[0])
        sets.append(tuple(bound.tensors + memory))
        products.append((a[0], weight, a[1]))
    units = {"torch": unit_of(lambda x, weight, ends: F.grouped_mm(x, weight.mT, offs=ends), products)}
    expected = gated(*products[-1]) if case.product == "gated" else down(*products[-1], loads[0])
    for kernel, function in built.items():
        clusters = max_active_clusters(0, kernel.config.cluster_size)
        try:
            memory[0].fill_(float("nan"))
            unit = unit_of(lambda *args, f=function, c=clusters: f(*args, c), sets)
        except (RuntimeError, ValueError) as error:
            print(f"{case}: {kernel.config.name}: {error}", file=sys.stderr)
            continue
        difference = relative_difference(memory[0], expected)
        if difference < 0.01:
            units[kernel.config.name] = unit
        else:
            print(f"{case}: {kernel.config.name} is WRONG by {difference:.3g}", flush=True)
    return {name: timing.median_us for name, timing in time_units(units, rounds).items()}


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The cases that the command names, once for each number of tokens."""
    for tokens, split, experts, kind in product(arguments.tokens, Split, MODELS, arguments.products):
        if experts.name in arguments.models and split.value in arguments.splits:
            yield Case(experts, tokens, split, kind)


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
    parser.add_argument("--minutes", type=float, default=60.0, help="no product is begun later")
    arguments = parser.parse_args()
    require_gpu()
    until = time.monotonic() + 60 * arguments.minutes
    gpu, found = device_at(0), specs()
    kernels = {
        kind: [Kernel(spec, each, Alignment.TMA) for each in tiles(spec)] for kind, spec in found.items()
    }
    built = obtain([kernel for kind in arguments.products for kernel in kernels[kind]])
    failed = {kernel: outcome for kernel, outcome in built.items() if isinstance(outcome, Exception)}
    for kernel, outcome in failed.items():
        print(f"{kernel.config.name}: {outcome}", file=sys.stderr)
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
            chosen = choose(gpu.arch, spec, case.m, n, k, gpu.sm_count, groups=case.experts.count).name
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
