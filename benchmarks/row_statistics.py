"""Times a statistic of rows between two products, computed by the first product's kernel or by a later kernel
that reads the rows again.

    python benchmarks/row_statistics.py benchmarks/results/GPU-DATE-row-statistics.csv

Two programs: a product with a residual, an RMSNorm and another product, in bf16 (N and K equal); and a
product with a gelu, rowwise quantisation to fp8 and another product (K and the second N 4096). `columns` is
the length of the rows between the two products. Each program is compiled by Inductor alone and twice with our
pass, which is made to find no reduction of rows, or to fuse each one whatever a launch costs and however
short its rows are. `finished` says what combines the partials of a row then: the row's last tile, or a second
kernel. Kernels are timed alone, in CUDA graphs, interleaved, from a cold L2; figures are medians in
microseconds. The command takes some four minutes on a GPU.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_leaves

from cute_backend import explain
from cute_backend.api import Region
from cute_backend.backend import cute
from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.fx_walk.ends import boundary, crossings
from cute_backend.fx_walk.members import reductions
from cute_backend.runtime.calls import launch

ROWS = (64, 2048, 8192)
COLUMNS = {"norm": (1024, 2048, 4096), "quantise": (2048, 14336)}
"""The lengths of the rows between the two products of each program."""
WIDTH = 4096
ROUNDS = 20
CALLS = {64: 16, 2048: 4, 8192: 1}
"""Calls of a unit, each with different inputs, by the number of rows."""

WRONG = 0.02
"""The smallest difference from eager's result, relative in norm, that is an error."""

FP8 = torch.float8_e4m3fn


def norm(x: Tensor, residual: Tensor, first: Tensor, gain: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    stream = x @ first.t() + residual
    return stream, F.rms_norm(stream, gain.shape, gain, 1e-6) @ second.t()


def quantise(x: Tensor, scale: Tensor, first: Tensor, second: Tensor, columns: Tensor) -> Tensor:
    def product(rows: Tensor, weight: Tensor, of_rows: Tensor) -> Tensor:
        of_columns = columns[:, : len(weight)]
        return torch._scaled_mm(
            rows, weight.t(), of_rows, of_columns, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    hidden = F.gelu(product(x, first, scale), approximate="tanh")
    largest = hidden.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    return product((hidden.float() / largest).clamp(-448, 448).to(FP8), second, largest)


PROGRAMS: dict[str, Callable[..., Any]] = {"norm": norm, "quantise": quantise}


def inputs(name: str, columns: int, rows: int) -> tuple[Tensor, ...]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if name == "norm":
        first, second = (random(columns, columns) / columns**0.5 for _ in range(2))
        return random(rows, columns), random(rows, columns), first, random(columns), second
    of_columns = torch.full((1, max(columns, WIDTH)), WIDTH**-0.5, device="cuda")
    scale = torch.ones(rows, 1, device="cuda")
    return (
        random(rows, WIDTH).to(FP8),
        scale,
        random(columns, WIDTH).to(FP8),
        random(WIDTH, columns).to(FP8),
        of_columns,
    )


@contextmanager
def statistics(wanted: bool) -> Iterator[None]:
    """A context in which our pass either finds no reduction of rows, or fuses each whatever a launch and a
    second reading cost."""
    with ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch.object(boundary, "LAUNCH_BYTES", 0))
            stack.enter_context(mock.patch.object(boundary, "LAST_TILE_BYTES", 0))
            stack.enter_context(mock.patch.object(crossings, "ROW_HELD", 0))
        else:
            stack.enter_context(mock.patch.object(reductions, "read_reduction", lambda head: None))
        # The cache of graphs knows the pass by its settings and sources, which are the same for both.
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        boundary.choose.cache_clear()
        yield
    boundary.choose.cache_clear()


@torch.no_grad()
def main() -> None:
    """Writes all times to the file that the command names, and prints a row for each case."""
    require_gpu()
    cases = {
        (name, columns, rows): [inputs(name, columns, rows) for _ in range(CALLS[rows])]
        for name, of_rows in COLUMNS.items()
        for columns in of_rows
        for rows in ROWS
    }
    found: dict[tuple[tuple[str, int, int], bool], Any] = {}
    for case, sets in cases.items():
        for wanted in (False, True):
            with statistics(wanted):
                found[case, wanted] = explain(PROGRAMS[case[0]], *sets[0]).regions
            assert any(each.spec.reductions for each in found[case, wanted]) == wanted
    regions = [region for each in found.values() for region in each]
    launch.announce(
        [(each.spec, *each.sizes, each.groups) for each in regions], torch.device("cuda"), at_once=True
    )
    with Path(sys.argv[1]).open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("program", "columns", "rows", "finished", "by", "us"))
        for case, sets in cases.items():
            program, (finished,) = PROGRAMS[case[0]], _finished(found[case, True])
            expected = program(*sets[0])
            units = {}
            for by, backend, wanted in (
                ("inductor", "inductor", False),
                ("without", cute, False),
                ("with", cute, True),
            ):
                torch._dynamo.reset()
                with statistics(wanted):
                    compiled = torch.compile(program, backend=backend, dynamic=False)
                    _compare(f"{case} by {by}", compiled(*sets[0]), expected)
                units[by] = unit_of(compiled, sets)
            times = {by: timing.median_us for by, timing in time_units(units, ROUNDS).items()}
            table.writerows((*case, finished, by, f"{us:.2f}") for by, us in times.items())
            file.flush()
            print(*case, finished, ", ".join(f"{by} {us:.1f}" for by, us in times.items()), sep=", ")


def _finished(regions: Sequence[Region]) -> set[str]:
    """The placements of the reductions of rows in some regions."""
    return {store.placement for region in regions for store in region.stores if store.reduce}


def _compare(name: str, results: Any, expected: Any) -> None:
    """Raises AssertionError if a result differs from eager's by more than rounding, in norm."""
    for result, right in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        error = ((result.float() - right.float()).norm() / right.float().norm()).item()
        assert error < WRONG, f"{name} differs from eager by {error:.2e}"


if __name__ == "__main__":
    main()
