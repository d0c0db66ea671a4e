"""The built-in table of block-scaled products: DeepSeek's fp8, at sizes of its models, and rowwise scales.

A has a scale for each block of 1 x 128: (M, K / 128), contiguous along M. B has one for each block of
128 x 128, or of 1 x 128. torch's kernels require that K and N are multiples of 128, and M of 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.bench.scaled_mm import BF16, E4M3, bare, bare_slow, operands
from cute_backend.bench.table import Cell, Problem, Rate, Ratio, Runner, Table, Workload

BLOCK = 128


def blocks(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """The product with scales of blocks, in bf16. x_scale is (M, K / 128), and weight_scale (N / 128, K /
    128) or (N, K / 128)."""
    return torch._scaled_mm(x, weight.t(), x_scale, weight_scale.t(), out_dtype=BF16)


def full(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor, residual: Tensor
) -> Tensor:
    """The same with a bias, silu and a residual."""
    return F.silu(blocks(x, weight, x_scale, weight_scale) + bias) + residual


def block_operands(m: int, n: int, k: int, lines: int) -> tuple[Tensor, ...]:
    """x (M, K) and weight (N, K) in e4m3, with scales of blocks of 1 x 128 and of `lines` x 128. Adjacent
    scales differ. The scales of x are contiguous along M, and the weight's along N if `lines` is 1."""
    of_x = ((torch.rand(k // BLOCK, m) + 0.5) / k**0.5).t()
    of_weight = torch.rand(n // lines, k // BLOCK) + 0.5
    of_weight = of_weight if lines > 1 else of_weight.t().contiguous().t()
    return torch.randn(m, k).to(E4M3), torch.randn(n, k).to(E4M3), of_x, of_weight


def problem(m: int, n: int, k: int) -> Problem:
    """One shape: rowwise scales with fast and slow accumulation, and both recipes of blocks, bare and with
    the full epilogue."""
    both, cute = (Runner.EAGER, Runner.CUTE), (Runner.CUTE,)

    def workload(
        name: str,
        fn: Callable[..., Tensor],
        inputs: Callable[[], tuple[Tensor, ...]],
        runners: tuple[Runner, ...],
    ) -> Workload:
        return Workload(name, fn, inputs, Rate.FP8, 2 * m * n * k, runners)

    def behind() -> tuple[Tensor, Tensor]:
        return torch.randn(n, dtype=BF16), torch.randn(m, n, dtype=BF16)

    def by_blocks(name: str, lines: int) -> tuple[Workload, Workload]:
        return (
            workload(name, blocks, lambda: block_operands(m, n, k, lines), both),
            workload(f"{name} full", full, lambda: (*block_operands(m, n, k, lines), *behind()), cute),
        )

    workloads = (
        workload("rowwise", bare, lambda: operands(m, n, k), both),
        workload("slow", bare_slow, lambda: operands(m, n, k), both),
        *by_blocks("blocks", BLOCK),
        *by_blocks("lines", 1),
    )
    return Problem(f"{m}x{n}x{k}-blocks", workloads)


SHAPES = (
    (4096, 7168, 16384),
    (4096, 4096, 7168),
    (4096, 24576, 1536),
    (4096, 7168, 2048),
    (128, 7168, 16384),
    (64, 4096, 7168),
    (16, 24576, 1536),
)
"""(M, N, K) of DeepSeek-V3's linears, for a prompt and for few tokens."""

_BLOCKS, _LINES = Cell("blocks", Runner.CUTE), Cell("lines", Runner.CUTE)

BLOCK_SCALED = Table(
    "block_scaled",
    title="Block-scaled fp8 products, A by 1 x 128. blocks: B by 128 x 128; lines: B by 1 x 128; full: with "
    "bias, silu and residual; rowwise and slow: rowwise scales, with fast and slow accumulation",
    baseline=Cell("blocks", Runner.EAGER),
    ratios=(
        Ratio(_BLOCKS, Cell("blocks", Runner.EAGER)),
        Ratio(_BLOCKS, Cell("slow", Runner.CUTE)),
        Ratio(Cell("blocks full", Runner.CUTE), _BLOCKS),
        Ratio(_LINES, Cell("lines", Runner.EAGER)),
        Ratio(_LINES, Cell("rowwise", Runner.CUTE)),
        Ratio(Cell("lines full", Runner.CUTE), _LINES),
    ),
    problems=tuple(problem(*shape) for shape in SHAPES),
)
