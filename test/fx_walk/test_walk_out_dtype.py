"""Products of 16-bit operands that give fp32, as `torch.mm(a, b, out_dtype=torch.float32)`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_backend import explain

M, N, K, BATCH = 24, 40, 128, 3

PROGRAMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "mm": (lambda c, a, b: torch.mm(a[0], b[0], out_dtype=torch.float32), lambda c, a, b: a[0] @ b[0]),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a[0], b[0], out_dtype=torch.float32, beta=0.5, alpha=2),
        lambda c, a, b: 0.5 * c + 2 * (a[0] @ b[0]),
    ),
    "bmm": (lambda c, a, b: torch.bmm(a, b, out_dtype=torch.float32), lambda c, a, b: a @ b),
}
"""Each with its arithmetic in fp32. A CPU has no kernels for these ops: its results are those of regions."""


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Sums of these integers are exact in fp32, and most are not in bf16."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-16, 17, size, generator=generator).bfloat16()
        for size in ((BATCH, M, K), (BATCH, K, N))
    )
    return torch.arange(N).bfloat16(), a, b


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_accumulators_are_not_rounded_to_16_bits(name: str) -> None:
    program, arithmetic = PROGRAMS[name]
    given = operands()
    torch._dynamo.reset()
    result = torch.compile(lambda *args: program(*args).relu(), backend="cute")(*given)
    exact = arithmetic(*(each.float() for each in given)).relu()
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(result, exact)


def test_the_result_may_be_rounded_behind_the_epilogue() -> None:
    given = operands()
    (region,) = explain(lambda c, a, b: (PROGRAMS["mm"][0](c, a, b) + c).bfloat16(), *given).regions
    assert region.formula == "out0 = bf16(acc + rowvec0)"
