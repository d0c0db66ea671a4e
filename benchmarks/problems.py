"""Random problems, with sizes drawn from a seed. The cost model is fitted to some and judged by others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain, gemm
from cute_backend.bench import block_scaled_mm, scaled_mm
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Store

ROWS = (1, 16384)
"""The least and the largest M, both of which may be drawn."""

COLUMNS = (256, 32768)
"""The least and the largest N, and K."""

MULTIPLE = 16
"""N and K are multiples of this, as fp8 operands and rows of 16 bytes require."""

MOST_OPERATIONS = 4e12
"""The limit of one problem. A larger problem is drawn again, as a few of them would take all of the time."""


class Epilogue(str, Enum):
    """The epilogue of a product. BARE is the product alone."""

    FULL = "full"
    """Bias, an activation and a residual, (M, N)."""
    GATED = "gated"
    """silu of the first half of the columns times the second half, (M, N / 2)."""
    ROW_MAXIMA = "row maxima"
    """The output, (M, N), and the largest magnitude of each row, (M, 1)."""
    BARE = "bare"


class Operands(str, Enum):
    """The dtypes of A and B and, for fp8, the scales and the accumulation."""

    FP8 = "fp8"
    BF16 = "bf16"
    FP16 = "fp16"
    SLOW = "fp8-slow"
    """Rowwise scales, and sums that are promoted to fp32."""
    BLOCKS = "fp8-blocks"
    """Scales of blocks of 1 x 128 of A and of 128 x 128 of B."""
    LINES = "fp8-lines"
    """Scales of blocks of 1 x 128 of both."""

    @property
    def dtype(self) -> torch.dtype:
        wide = {Operands.BF16: torch.bfloat16, Operands.FP16: torch.float16}
        return wide.get(self, torch.float8_e4m3fn)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float16 if self is Operands.FP16 else torch.bfloat16


DRAWN = (Operands.FP8, Operands.BF16, Operands.FP16)
"""The kinds of operands that problems are drawn with."""

_SCALED: dict[Operands, Callable[..., Tensor]] = {
    Operands.FP8: scaled_mm.bare,
    Operands.SLOW: scaled_mm.bare_slow,
    Operands.BLOCKS: block_scaled_mm.blocks,
    Operands.LINES: block_scaled_mm.blocks,
}


@dataclass(frozen=True)
class Drawn:
    """One problem: A is (M, K), the weight (N, K)."""

    m: int
    n: int
    k: int
    operands: Operands
    epilogue: Epilogue

    @property
    def columns(self) -> int:
        """The columns of the output."""
        return self.n // 2 if self.epilogue is Epilogue.GATED else self.n

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}-{self.operands.value}-{self.epilogue.value}"

    def product(self, x: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
        """torch's bare product; `scales` are those of `product_inputs`."""
        if self.operands in _SCALED:
            return _SCALED[self.operands](x, weight, *scales)
        return torch.mm(x, weight.t())

    def by_gemm(self, x: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
        """The bare product by one of our kernels. `torch.compile` would leave it to torch, as nothing follows
        it."""
        scale_a, scale_b = scales or (None, None)
        if scale_b is not None and self.operands in (Operands.BLOCKS, Operands.LINES):
            scale_b = scale_b.t()
        return gemm(x, weight.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=self.operands.out_dtype)

    @property
    def program(self) -> Callable[..., Any]:
        """The function that is compiled. Its arguments are `inputs`, with the operands first."""
        count = 4 if self.operands in _SCALED else 2

        def bare(*args: Tensor) -> Tensor:
            return self.product(*args[:count])

        def full(*args: Tensor) -> Tensor:
            bias, residual = args[count:]
            y = self.product(*args[:count]) + bias
            y = F.gelu(y, approximate="tanh") if self.operands in _SCALED else y.relu()
            return y + residual

        def gated(*args: Tensor) -> Tensor:
            gate, up = self.product(*args[:count]).chunk(2, -1)
            return F.silu(gate) * up

        def row_maxima(*args: Tensor) -> tuple[Tensor, Tensor]:
            y = self.product(*args[:count])
            return y, y.abs().amax(-1, keepdim=True)

        programs = {
            Epilogue.BARE: bare,
            Epilogue.FULL: full,
            Epilogue.GATED: gated,
            Epilogue.ROW_MAXIMA: row_maxima,
        }
        return programs[self.epilogue]

    def product_inputs(self) -> tuple[Tensor, ...]:
        """x, the weight and, for fp8, the scales, on the default device. Results are near 1."""
        if self.operands in (Operands.BLOCKS, Operands.LINES):
            lines = block_scaled_mm.BLOCK if self.operands is Operands.BLOCKS else 1
            return block_scaled_mm.block_operands(self.m, self.n, self.k, lines)
        if self.operands in _SCALED:
            return scaled_mm.operands(self.m, self.n, self.k)
        dtype = self.operands.dtype
        return torch.randn(self.m, self.k, dtype=dtype), torch.randn(
            self.n, self.k, dtype=dtype
        ) / self.k**0.5

    def extra_inputs(self) -> tuple[Tensor, ...]:
        """The further operands of the epilogue: for FULL the bias, (N,), and the residual, (M, N)."""
        if self.epilogue is not Epilogue.FULL:
            return ()
        dtype = self.operands.out_dtype
        return torch.randn(self.n, dtype=dtype), torch.randn(self.m, self.n, dtype=dtype)

    def spec(self) -> EpilogueSpec:
        """The spec of the program's kernel, or of `gemm`'s for a bare product of 16-bit operands. It holds no
        sizes."""
        if self.epilogue is Epilogue.BARE and self.operands not in _SCALED:
            dtype = DType.F16 if self.operands is Operands.FP16 else DType.BF16
            acc = Accumulator("acc", dtype, dtype)
            return EpilogueSpec((acc,), (), (), (Store("out0", acc.name, dtype),))
        small = Drawn(256, 512, 384, self.operands, self.epilogue)
        with torch.device("cpu"):
            inputs = (*small.product_inputs(), *small.extra_inputs())
        return explain(small.program, *inputs, dynamic=False, arch="sm_90a").first_region().spec


def draw(
    seed: int, count: int, epilogues: tuple[Epilogue, ...] | None = None, rows: tuple[int, int] = ROWS
) -> Iterator[Drawn]:
    """`count` problems, equally many of each kind of operands and epilogue; sizes are log-uniform.

    Without `epilogues` they are all but BARE. `rows` are the least and the largest M.
    """
    generator = random.Random(seed)
    kinds = epilogues or tuple(each for each in Epilogue if each is not Epilogue.BARE)
    pairs = [(operands, epilogue) for epilogue in kinds for operands in DRAWN]
    for index in range(count):
        yield Drawn(*_sizes(generator, rows), *pairs[index % len(pairs)])


def _sizes(generator: random.Random, rows: tuple[int, int]) -> tuple[int, int, int]:
    while True:
        m = round(_log_uniform(generator, rows))
        n, k = (MULTIPLE * round(_log_uniform(generator, COLUMNS) / MULTIPLE) for _ in range(2))
        if 2 * m * n * k <= MOST_OPERATIONS:
            return m, n, k


def _log_uniform(generator: random.Random, ends: tuple[int, int]) -> float:
    return math.exp(generator.uniform(*map(math.log, ends)))
