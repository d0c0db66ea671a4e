"""Times widths of subtiles, and tiles, for epilogues that read and write several planes.

    python benchmarks/subtiles.py FILE.csv [--rounds N] [--only PATTERN]

Each plane that is read or written has two stages of shared memory, each as wide as a subtile. So with wide
subtiles, waits for TMA are rarer, but A and B have fewer stages. The rules in planning/rules.py come from
here. Kernels are timed alone, in CUDA graphs, interleaved, from a cold L2; figures are medians in
microseconds, with torch's bare product. The command takes 2 minutes on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from problems import Drawn, Epilogue, Operands
from tiles import measure
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend.bench.program_timing import require_gpu
from cute_backend.planning import Alignment, TileConfig, plan
from cute_backend.planning.rules import subtiled
from cute_backend.planning.search import clustered
from cute_backend.planning.shared_memory import plane_bits
from cute_backend.runtime.arguments.device import device_at
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import EpilogueSpec

SHAPES = (
    (4096, 4096, 4096),
    (4096, 4096, 14336),
    (4096, 14336, 4096),
    (2048, 4096, 14336),
    (8192, 1024, 1024),
)

TILES = ("128x128_1x2_pingpong", "128x128_2x1_pingpong", "256x128_2x1", "128x256_2x1")

WIDTHS = (64, 32, 16)

COLUMNS = ("program", "planes", "m", "n", "k", "tile", "us")


@dataclass(frozen=True)
class Program:
    """A program of a product `y` (M, N) in bf16, of (M, N) planes, of a row of N and of a column of M
    values."""

    name: str
    planes: int
    fn: Callable[..., Any]

    def spec(self) -> EpilogueSpec:
        """The spec of its region."""
        with FakeTensorMode(), torch.no_grad():
            a, b, *planes = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in range(2 + self.planes))
            row, column = torch.empty(256, dtype=torch.bfloat16), torch.empty(256, 1)
            found = cute_backend.explain(
                lambda: self.fn(a @ b.t(), row, column, *planes), arch=device_at(0).arch.value
            )
        (region,) = found.regions
        return region.kernel().plan.spec


def _gated_backward(
    y: Tensor, row: Tensor, column: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    gate, up, y = gate.float(), up.float(), y.float()
    sigmoid = torch.sigmoid(gate)
    return (y * gate * sigmoid).bfloat16(), (y * up * sigmoid * (1 + gate * (1 - sigmoid))).bfloat16()


def _norm_backward(
    y: Tensor, row: Tensor, column: Tensor, other: Tensor, *states: Tensor
) -> tuple[Tensor, Tensor]:
    y = y + other
    return y * row, (y.float() * (sum(states[1:], states[0]) * column)).sum(0)


PROGRAMS = (
    Program("relu", 0, lambda y, row, column: F.relu(y)),
    Program("residual", 1, lambda y, row, column, x: y + x + row),
    Program("saved", 0, lambda y, row, column: (y, F.gelu(y), F.relu(y) * row)),
    Program("residual_saved", 1, lambda y, row, column, x: (y, y + x)),
    Program("norm_backward", 2, _norm_backward),
    Program("two_states", 3, _norm_backward),
    Program("gated_backward", 2, _gated_backward),
    Program("four_planes", 4, lambda y, row, column, a, b, c, d: F.relu(y + a) * b + c * d),
)


def configs(spec: EpilogueSpec) -> Iterator[TileConfig]:
    """The tiles, each with every width of subtiles that the rules for planes do not change."""
    every = (replace(each, subtile_n=32) for each in clustered(device_at(0).arch, spec))
    offered = {each.name: each for each in every}
    for name in filter(offered.__contains__, TILES):
        for width in WIDTHS:
            config = replace(offered[name], subtile_n=width)
            if subtiled(spec, config, Alignment.TMA).subtile_n == width:
                yield config


def main() -> None:
    """Writes the file that the command names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="*", help="a pattern of programs' names")
    arguments = parser.parse_args()
    require_gpu()
    chosen = [program for program in PROGRAMS if fnmatchcase(program.name, arguments.only)]
    specs = {program: program.spec() for program in chosen}
    kernels = {
        program: {config: Kernel(plan(spec, config, Alignment.TMA)) for config in configs(spec)}
        for program, spec in specs.items()
    }
    built = obtain([kernel for each in kernels.values() for kernel in each.values()])
    with arguments.file.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for program, spec in specs.items():
            ready = {}
            for tile, kernel in kernels[program].items():
                if isinstance(made := built[kernel], Exception):
                    print(f"{program.name}: {tile.name}: {made}", file=sys.stderr)
                else:
                    ready[tile] = made
            for m, n, k in SHAPES:
                times = measure(Drawn(m, n, k, Operands.BF16, Epilogue.BARE), spec, ready, arguments.rounds)
                planes = plane_bits(spec) // 16
                rows.writerows(
                    [program.name, planes, m, n, k, tile, f"{us:.2f}"] for tile, us in times.items()
                )
                file.flush()
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
