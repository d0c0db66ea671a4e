"""Products of int8 on a GPU: sums that are exact, and scales behind them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SIZES = [
    (1, 4096, 4096),
    (5, 1000, 2064),
    (16, 136, 16384),
    (64, 4096, 14336),
    (130, 24, 1040),
    (2048, 999, 720),
]
"""M, N and K: few rows, tails of tiles, and split-K."""


def scaled(
    x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    y = torch._int_mm(x, weight.t())
    return y + shift, ((y * of_rows) * of_columns).bfloat16()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_are_exact_and_scales_come_behind_them(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    generator = torch.Generator("cuda").manual_seed(m)

    def integers(lines: int) -> Tensor:
        drawn = torch.randint(-128, 128, (lines, k), dtype=torch.int8, device="cuda", generator=generator)
        drawn[0] = -128  # the largest sum
        return drawn

    x, weight = integers(m), integers(n)
    of_rows = torch.rand(m, 1, device="cuda", generator=generator) / k
    of_columns = torch.rand(n, device="cuda", generator=generator)
    shift = torch.arange(n, dtype=torch.int32, device="cuda")
    replayed = counters["cute_backend"]["replayed"]
    torch._dynamo.reset()
    whole, narrow = torch.compile(scaled, backend="cute")(x, weight, of_rows, of_columns, shift)
    assert counters["cute_backend"]["replayed"] == replayed
    exact = (x.double() @ weight.double().t()).long()
    assert torch.equal(whole.long(), exact + shift)
    expected = exact.float() * of_rows * of_columns
    assert ((narrow.float() - expected).norm() / expected.norm()).item() < 4e-3
