"""Times a statistic of rows between two products, computed by the first product's kernel or by a later kernel
that reads the rows again.

    python benchmarks/row_statistics.py benchmarks/results/GPU-DATE-row-statistics.csv

Two programs: a product with a residual, an RMSNorm and another product, in bf16 (4096 x 4096 x 4096 each);
and a product with a gelu, rowwise quantisation to fp8 and another product (N and K 14336 and 4096). Each is
compiled by Inductor alone and twice with our pass, which is made to find no reduction of rows, or to fuse
each one whatever a launch costs and however short its rows are. Kernels are timed alone, in CUDA graphs,
interleaved, from a cold L2; figures are medians in microseconds. The command takes two minutes on a GPU.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
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
from cute_backend.backend import cute
from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.fx_walk import boundary, crossings
from cute_backend.runtime import launch

ROWS = (1, 64, 2048, 8192)
WIDTH, INNER = 4096, 14336
ROUNDS = 20
CALLS = {1: 16, 64: 16, 2048: 4, 8192: 1}
"""Calls of a unit, each with different inputs, by the number of rows."""

WRONG = 0.02
"""The smallest difference from eager's result, relative in norm, that is an error."""

FP8 = torch.float8_e4m3fn


def norm(x: Tensor, residual: Tensor, first: Tensor, gain: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    stream = x @ first.t() + residual
    return stream, F.rms_norm(stream, (WIDTH,), gain, 1e-6) @ second.t()


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


def inputs(name: str, rows: int) -> tuple[Tensor, ...]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if name == "norm":
        weights = (random(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(2))
        first, second = weights
        return random(rows, WIDTH), random(rows, WIDTH), first, random(WIDTH), second
    columns = torch.full((1, INNER), WIDTH**-0.5, device="cuda")
    scale = torch.ones(rows, 1, device="cuda")
    return (
        random(rows, WIDTH).to(FP8),
        scale,
        random(INNER, WIDTH).to(FP8),
        random(WIDTH, INNER).to(FP8),
        columns,
    )


@contextmanager
def statistics(wanted: bool) -> Iterator[None]:
    """A context in which our pass either finds no reduction of rows, or fuses each whatever a launch and a
    second reading cost."""
    with ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch.object(boundary, "LAUNCH_BYTES", 0))
            stack.enter_context(mock.patch.object(crossings, "ROW_HELD", 0))
        else:
            stack.enter_context(mock.patch("cute_backend.fx_walk.walk.find_reductions", lambda nodes: {}))
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
        (name, rows): [inputs(name, rows) for _ in range(CALLS[rows])] for name in PROGRAMS for rows in ROWS
    }
    found: dict[tuple[str, int, bool], Any] = {}
    for (name, rows), sets in cases.items():
        for wanted in (False, True):
            with statistics(wanted):
                found[name, rows, wanted] = explain(PROGRAMS[name], *sets[0]).regions
            assert any(each.spec.reductions for each in found[name, rows, wanted]) == wanted
    regions = [region for each in found.values() for region in each]
    launch.announce([(each.spec, *each.sizes, each.groups) for each in regions], torch.device("cuda"))
    with Path(sys.argv[1]).open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("program", "rows", "by", "us"))
        for (name, rows), sets in cases.items():
            expected = PROGRAMS[name](*sets[0])
            units = {}
            for by, backend, wanted in (
                ("inductor", "inductor", False),
                ("without", cute, False),
                ("with", cute, True),
            ):
                torch._dynamo.reset()
                with statistics(wanted):
                    compiled = torch.compile(PROGRAMS[name], backend=backend, dynamic=False)
                    _compare(f"{name} of {rows} rows by {by}", compiled(*sets[0]), expected)
                units[by] = unit_of(compiled, sets)
            times = {by: timing.median_us for by, timing in time_units(units, ROUNDS).items()}
            table.writerows((name, rows, by, f"{us:.2f}") for by, us in times.items())
            file.flush()
            print(f"{name:<9} {rows:>5} rows: " + ", ".join(f"{by} {us:.1f} us" for by, us in times.items()))


def _compare(name: str, results: Any, expected: Any) -> None:
    """Raises AssertionError if a result differs from eager's by more than rounding, in norm."""
    for result, right in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        error = ((result.float() - right.float()).norm() / right.float().norm()).item()
        assert error < WRONG, f"{name} differs from eager by {error:.2e}"


if __name__ == "__main__":
    main()
