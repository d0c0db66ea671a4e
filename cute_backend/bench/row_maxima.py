"""The built-in table of row maxima: the cost of computing each row's largest magnitude along with the output.

Dynamic quantisation for the next layer needs it, and then need not read the output to compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_backend.bench.scaled_mm import BF16, bare, bf16_relu, operands
from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload


def with_maxima(fn: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The program, with the largest magnitude of each row of its result."""

    def program(*args: Tensor) -> tuple[Tensor, Tensor]:
        out = fn(*args)
        return out, out.abs().amax(-1)

    return program


def _problem(
    name: str, size: int, fn: Callable[..., Tensor], inputs: Callable[[], tuple[Any, ...]], rate: Rate
) -> Problem:
    programs: dict[str, Callable[..., Any]] = {"alone": fn, "maxima": with_maxima(fn)}
    runners = (Runner.EAGER, Runner.INDUCTOR, Runner.CUTE)
    return Problem(
        f"{size}x{size}x{size}{name}-maxima",
        tuple(
            Workload(workload, program, inputs, rate, 2 * size**3, runners)
            for workload, program in programs.items()
        ),
    )


def fp8_problem(size: int) -> Problem:
    """M = N = K in fp8 with rowwise scales, bf16 out."""
    return _problem("", size, bare, lambda: operands(size, size, size), Rate.FP8)


def bf16_problem(size: int) -> Problem:
    """M = N = K in bf16, with a bias and relu: a bare product is left to cuBLAS."""

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        plane = torch.randn(2, size, size, dtype=BF16)
        return plane[0], plane[1] / size**0.5, torch.randn(size, dtype=BF16)

    return _problem("-bf16", size, bf16_relu, inputs, Rate.BF16)


_MAXIMA, _ALONE = Cell("maxima", Runner.CUTE), Cell("alone", Runner.CUTE)

ROW_MAXIMA = Table(
    "row_maxima",
    title="Each row's largest magnitude beside a bf16 output. alone: fp8 rowwise scaled_mm; maxima: the "
    "same, and amax(abs) over the last axis. -bf16: addmm and relu in place of scaled_mm",
    baseline=Cell("alone", Runner.EAGER),
    ratios=(Ratio(_MAXIMA, _ALONE), Ratio(_MAXIMA, Cell("maxima", Runner.INDUCTOR))),
    problems=(
        *(fp8_problem(size) for size in (4096, 8192)),
        *(bf16_problem(size) for size in (4096, 8192)),
    ),
)
