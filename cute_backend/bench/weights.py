"""The built-in table of weights of 8 and 4 bits: the linears of a Llama 8B at few rows, as in decoding.

The linear of queries, keys and values is timed as one weight, and as three of one input, which share a
launch. The baseline is the same linear in bf16. The scales are those of torchao's Int8WeightOnly, which stand
behind the product, or have zeros beside them for each group of 128 of K, and of its Float8WeightOnly, which
stand in front of the product. Of 4 bits, a byte has two values, in the same groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.int8 import LINEARS
from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

BF16 = torch.bfloat16

ROWS = (2, 8, 16, 64, 128)

GROUP = 128
"""Values of K that share a scale and a zero."""


def bf16(x: Tensor, weight: Tensor) -> Tensor:
    """The linear in bf16."""
    return F.linear(x, weight)


def int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The linear with a weight of int8, and a scale of each column behind it."""
    return F.linear(x, weight.to(BF16)) * scales.to(BF16).reshape(-1)


def int8_groups(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The linear with a weight of int8, and a scale and a zero of each column and group of K."""
    wide = weight.reshape(len(weight), -1, GROUP).to(BF16) - zeros[..., None].to(BF16)
    return F.linear(x, (wide * scales[..., None]).to(BF16).reshape(weight.shape))


def nibble_groups(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The linear with a weight of which a byte has two values, and a scale and a zero of each column and
    group of K in the input's dtype and in int8."""
    values = torch.stack([weight & 15, weight >> 4], -1).view(len(weight), -1, GROUP).to(BF16)
    return F.linear(x, ((values - zeros[..., None].to(BF16)) * scales[..., None]).view(len(weight), -1))


def e4m3(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The linear with a weight of e4m3, scaled in fp32 in front of it."""
    return F.linear(x, (weight.float() * scales).to(BF16))


def of_bf16(n: int, k: int) -> tuple[Tensor, ...]:
    """A weight in bf16."""
    return (torch.randn(n, k, dtype=BF16).div_(k**0.5),)


def of_int8(n: int, k: int) -> tuple[Tensor, ...]:
    """A weight of int8, and its scales in fp32."""
    return torch.randint(-128, 128, (n, k), dtype=torch.int8), (torch.rand(n, 1) + 0.5) / (128 * k**0.5)


def of_e4m3(n: int, k: int) -> tuple[Tensor, ...]:
    """The same, as e4m3."""
    weight, scales = of_int8(n, k)
    return weight.to(torch.float8_e4m3fn), scales


def of_int8_groups(n: int, k: int) -> tuple[Tensor, ...]:
    """A weight of int8, and the scales and zeros of its groups, in fp32 and int8."""
    weight, _ = of_int8(n, k)
    scales = (torch.rand(n, k // GROUP) + 0.5) / (128 * k**0.5)
    return weight, scales, torch.randint(-8, 8, scales.shape, dtype=torch.int8)


def of_nibble_groups(n: int, k: int) -> tuple[Tensor, ...]:
    """A weight of bytes of two values, and the scales and zeros of its groups, in bf16 and int8."""
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = ((torch.rand(n, k // GROUP) + 0.5) / (8 * k**0.5)).to(BF16)
    return weight, scales, torch.randint(0, 16, scales.shape, dtype=torch.int8)


def several(linear: Callable[..., Tensor], count: int) -> Callable[..., tuple[Tensor, ...]]:
    """A program of several linears of one input, each with a weight and its vectors."""

    def program(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        each = len(given) // count
        return tuple(linear(x, *given[i : i + each]) for i in range(0, len(given), each))

    return program


def problem(name: str, m: int, widths: tuple[int, ...], k: int) -> Problem:
    """A linear for a number of rows, or one of each of several weights."""
    rate, operations = Rate.BF16, 2 * m * sum(widths) * k

    def workload(
        form: str,
        linear: Callable[..., Tensor],
        made: Callable[[int, int], tuple[Tensor, ...]],
        *runners: Runner,
    ) -> Workload:
        def inputs() -> tuple[Tensor, ...]:
            return torch.randn(m, k, dtype=BF16), *(each for n in widths for each in made(n, k))

        fn = several(linear, len(widths)) if len(widths) > 1 else linear
        return Workload(form, fn, inputs, rate, operations, runners)

    runners = (Runner.INDUCTOR, Runner.MAX_AUTOTUNE, Runner.CUTE)
    return Problem(
        f"{name}-{m}-weights",
        (
            workload("bf16", bf16, of_bf16, Runner.EAGER),
            workload("int8", int8, of_int8, *runners),
            workload("int8 groups", int8_groups, of_int8_groups, *runners),
            workload("int4 groups", nibble_groups, of_nibble_groups, *runners),
            workload("e4m3", e4m3, of_e4m3, *runners),
        ),
    )


PROBLEMS = {name: ((n,), k) for name, (n, k) in LINEARS.items()} | {"q-k-v": ((4096, 1024, 1024), 4096)}
"""Columns of each weight of one input, and K."""

_BF16 = Cell("bf16", Runner.EAGER)

WEIGHTS = Table(
    "weights",
    title="Linears of Llama 8B with quantised weights, scaled by columns or groups, by rows. bf16: F.linear; "
    "q-k-v: three weights",
    baseline=_BF16,
    ratios=tuple(
        Ratio(Cell(name, Runner.CUTE), other)
        for name in ("int8", "int8 groups", "int4 groups", "e4m3")
        for other in (_BF16, Cell(name, Runner.INDUCTOR), Cell(name, Runner.MAX_AUTOTUNE))
    ),
    problems=tuple(problem(name, rows, *sizes) for name, sizes in PROBLEMS.items() for rows in ROWS),
)
