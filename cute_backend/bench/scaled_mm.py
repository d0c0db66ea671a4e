"""The first built-in table: a linear with fp8 rowwise scales, bare and with the ops that follow it in models.

Weights are (N, K), as a linear holds them. The scales keep results near 1, so that e4m3 does not overflow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def bare(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """The product with rowwise scales, fast accumulation, bf16 out: the baseline of fused epilogues."""
    return torch._scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=BF16, use_fast_accum=True)


def bare_slow(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """The product of `bare`, with its partial sums promoted to fp32."""
    return torch._scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=BF16, use_fast_accum=False)


def full(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor, residual: Tensor
) -> Tensor:
    """Scales, bias, tanh-gelu and a residual, bf16 out."""
    y = torch._scaled_mm(x, weight.t(), x_scale, weight_scale, bias, out_dtype=BF16, use_fast_accum=True)
    return F.gelu(y, approximate="tanh") + residual


def quant(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, other: Tensor, scale: Tensor
) -> Tensor:
    """Scales, silu, a product with a tensor and a scalar, and a cast to e4m3: the input of the next
    linear."""
    y = torch._scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=BF16, use_fast_accum=True)
    return (F.silu(y) * other * scale).to(E4M3)


def bf16_bare(x: Tensor, weight: Tensor) -> Tensor:
    """The bf16 product alone."""
    return torch.mm(x, weight.t())


def bf16_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """bf16 addmm and relu."""
    return torch.addmm(bias, x, weight.t()).relu()


def operands(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    """x (M, K) and weight (N, K) in e4m3, their scales (M, 1) and (1, N)."""
    return (
        torch.randn(m, k).to(E4M3),
        torch.randn(n, k).to(E4M3),
        (torch.rand(m, 1) + 0.5) / k**0.5,
        torch.rand(1, n) + 0.5,
    )


def _name(m: int, n: int, k: int) -> str:
    return f"{m}x{n}x{k}"


def problem(m: int, n: int, k: int) -> Problem:
    """One shape: bare, with the full epilogue, and quantised."""
    plane = lambda: torch.randn(m, n, dtype=BF16)  # noqa: E731
    eager, inductor, cute = Runner.EAGER, Runner.INDUCTOR, Runner.CUTE
    extras: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "bare": lambda: (),
        "full": lambda: (torch.randn(n, dtype=BF16), plane()),
        "quant": lambda: (plane(), torch.full((), 4.0)),
    }

    def workload(name: str, fn: Callable[..., Tensor], *runners: Runner, tolerance: float = 0.01) -> Workload:
        return Workload(
            name,
            fn,
            inputs=lambda: (*operands(m, n, k), *extras[name]()),
            rate=Rate.FP8,
            operations=2 * m * n * k,
            runners=runners,
            tolerance=tolerance,
        )

    # Eager rounds to bf16 before the epilogue, which moves some values across a rounding boundary of e4m3.
    return Problem(
        _name(m, n, k),
        (
            workload("bare", bare, eager, Runner.QUACK, cute),
            workload("full", full, eager, inductor, Runner.MAX_AUTOTUNE, Runner.QUACK, cute),
            workload("quant", quant, eager, inductor, cute, tolerance=0.05),
        ),
    )


def slow_problem(m: int, n: int, k: int) -> Problem:
    """One shape with slow accumulation, against torch's slow accumulation."""
    workload = Workload(
        "bare",
        bare_slow,
        inputs=lambda: operands(m, n, k),
        rate=Rate.FP8,
        operations=2 * m * n * k,
        runners=(Runner.EAGER, Runner.CUTE),
    )
    return Problem(_name(m, n, k) + "-slow", (workload,))


def bf16_problem(m: int, n: int, k: int) -> Problem:
    """One shape in bf16: addmm and relu, against the bare mm."""

    def inputs() -> tuple[Tensor, Tensor]:
        return torch.randn(m, k, dtype=BF16), torch.randn(n, k, dtype=BF16) / k**0.5

    def with_bias() -> tuple[Tensor, ...]:
        return *inputs(), torch.randn(n, dtype=BF16)

    operations = 2 * m * n * k
    fused = (Runner.EAGER, Runner.INDUCTOR, Runner.MAX_AUTOTUNE, Runner.CUTE)
    return Problem(
        _name(m, n, k) + "-bf16",
        (
            Workload("bare", bf16_bare, inputs, Rate.BF16, operations, (Runner.EAGER,)),
            Workload("full", bf16_relu, with_bias, Rate.BF16, operations, fused),
        ),
    )


SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 8192, 1024),
    (512, 28672, 8192),
    (2048, 8192, 28672),
    (128, 8192, 8192),
    (16, 8192, 8192),
)
"""(M, N, K): cubes, a short K with an expensive epilogue, a Llama's projections, and few rows, as in
decoding."""

_BARE, _FULL, _QUANT = (Cell(name, Runner.CUTE) for name in ("bare", "full", "quant"))
_TORCH = Cell("bare", Runner.EAGER)

SCALED_MM = Table(
    "scaled_mm",
    title="A linear and its epilogue. bare: fp8 rowwise scaled_mm; full: with bias, tanh-gelu and residual; "
    "quant: with silu, times a tensor, times a scalar, to e4m3. -slow: slow accumulation; "
    "-bf16: mm, and in full addmm and relu",
    baseline=_TORCH,
    ratios=(
        Ratio(_BARE, _TORCH),
        Ratio(_FULL, _TORCH),
        Ratio(_QUANT, _TORCH),
        Ratio(_FULL, Cell("full", Runner.INDUCTOR)),
        Ratio(_FULL, Cell("full", Runner.MAX_AUTOTUNE)),
        Ratio(_FULL, Cell("full", Runner.QUACK)),
    ),
    problems=(
        *(problem(*shape) for shape in SHAPES),
        slow_problem(4096, 4096, 4096),
        slow_problem(8192, 8192, 8192),
        bf16_problem(8192, 8192, 8192),
    ),
)
