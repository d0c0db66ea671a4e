"""Problems that nobody chose: sizes drawn by a seed, which the model of time is fitted to and held to."""

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

from cute_backend import explain
from cute_backend.bench import scaled_mm
from cute_backend.spec import EpilogueSpec

ROWS = (1, 16384)
"""The least and the largest M, both of which may be drawn."""

COLUMNS = (256, 32768)
"""The same of N and of K."""

MULTIPLE = 16
"""N and K are multiples of it: what fp8 operands and 16-byte rows need."""

MOST_OPERATIONS = 4e12
"""Of one problem; what would take longer is drawn anew, or a few problems would take all of the time."""


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
    """The dtypes of A and B: e4m3 with rowwise scales and fast accumulation, or 16-bit floats."""

    FP8 = "fp8"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        return {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float16 if self is Operands.FP16 else torch.bfloat16


@dataclass(frozen=True)
class Drawn:
    """One problem: A is (M, K), the weight (N, K)."""

    m: int
    n: int
    k: int
    operands: Operands
    epilogue: Epilogue

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}-{self.operands.value}-{self.epilogue.value}"

    def product(self, x: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
        """torch's bare product; `scales` are (M, 1) and (1, N) beside fp8, and none beside other dtypes."""
        if self.operands is Operands.FP8:
            return scaled_mm.bare(x, weight, *scales)
        return torch.mm(x, weight.t())

    @property
    def program(self) -> Callable[..., Any]:
        """The function that is compiled, of `inputs`, the operands first."""
        count = 4 if self.operands is Operands.FP8 else 2

        def bare(*args: Tensor) -> Tensor:
            return self.product(*args[:count])

        def full(*args: Tensor) -> Tensor:
            bias, residual = args[count:]
            y = self.product(*args[:count]) + bias
            y = F.gelu(y, approximate="tanh") if self.operands is Operands.FP8 else y.relu()
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
        """x, the weight and, of fp8, the scales, on the default device; results are near 1."""
        if self.operands is Operands.FP8:
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
        """The spec of the kernel that the program becomes; sizes don't count."""
        small = Drawn(256, 512, 256, self.operands, self.epilogue)
        with torch.device("cpu"):
            inputs = (*small.product_inputs(), *small.extra_inputs())
        return explain(small.program, *inputs, dynamic=False).first_region().spec


def draw(
    seed: int, count: int, epilogues: tuple[Epilogue, ...] | None = None, rows: tuple[int, int] = ROWS
) -> Iterator[Drawn]:
    """`count` problems, of operands and epilogues in turn, so that each has as many; sizes are log-uniform.

    Without `epilogues` they are all but BARE. `rows` are the least and the largest M.
    """
    generator = random.Random(seed)
    kinds = epilogues or tuple(each for each in Epilogue if each is not Epilogue.BARE)
    pairs = [(operands, epilogue) for epilogue in kinds for operands in Operands]
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
