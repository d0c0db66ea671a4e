"""`glu` of a product's columns, which becomes a gated pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from cute_backend import explain

BF16, F16 = torch.bfloat16, torch.float16
M, N, K = 24, 48, 32

PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda x, w, b: F.glu(F.linear(x, w, b)), (M, K)),
    "batched": (lambda x, w, b: F.glu(F.linear(x, w, b)), (2, M, K)),
    "work_on_both_sides": (lambda x, w, b: F.glu(F.linear(x, w, b) * 2) + 1, (M, K)),
    "axis_by_number": (lambda x, w, b: F.glu(F.linear(x, w, b), 2), (2, M, K)),
    "in_fp32": (lambda x, w, b: F.glu(F.linear(x, w, b).float()), (M, K)),
}


def operands(dtype: torch.dtype, size: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of these integers are exact."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randint(-2, 3, each, generator=generator).to(dtype) for each in (size, (N, K), (N,)))
    return x, w, b


@pytest.mark.sweep(5)
@pytest.mark.parametrize("unknown_rows", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_halves_of_columns_become_a_pair(
    name: str, dtype: torch.dtype, unknown_rows: bool, fresh_compiler: None
) -> None:
    """Under eager's roundings a result of 16 bits has eager's bits: torch's kernels of `glu` round the result
    alone."""
    program, size = PROGRAMS[name]
    x, w, b = operands(dtype, size)
    if unknown_rows:
        torch._dynamo.mark_dynamic(x, x.dim() - 2)
    with inductor_config.patch(emulate_precision_casts=True):
        result = torch.compile(program, backend="cute")(x, w, b)
    assert dict(counters["cute_backend"]) == {"anchors": 1, "regions": 1}
    wanted = program(x, w, b)
    error = 0.0 if wanted.dtype is dtype else None
    torch.testing.assert_close(result, wanted, rtol=error, atol=error)


def test_the_kernel_has_both_halves() -> None:
    (region,) = explain(PROGRAMS["linear"][0], *operands(BF16, (M, K))).regions
    assert region.formula == "out0 = bf16((acc0 + bias0) * sigmoid(acc1 + bias1))"


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("axis", "size"), [(0, (M, K)), (1, (2, M, K)), (0, (2, M, K))])
def test_halves_of_rows_are_right(axis: int, size: tuple[int, ...], fresh_compiler: None) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.glu(F.linear(x, w, b).relu(), axis)

    arguments = operands(BF16, size)
    result = torch.compile(program, backend="cute")(*arguments)
    assert counters["cute_backend"]["regions"] == 1
    torch.testing.assert_close(result, program(*arguments))


def test_a_gated_unit_of_float64_is_computed_in_float64(fresh_compiler: None) -> None:
    """It shares a graph with a region, for a graph without one stays as it is."""

    def program(x: Tensor, w: Tensor, b: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w, b).relu(), F.glu(wide)

    wide = torch.randn(M, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    arguments = (*operands(BF16, (M, K)), wide)
    for result, wanted in zip(
        torch.compile(program, backend="cute")(*arguments), program(*arguments), strict=True
    ):
        torch.testing.assert_close(result, wanted, rtol=1e-14, atol=1e-14)


def test_a_gated_unit_of_an_unknown_size_is_right(fresh_compiler: None) -> None:
    x, w, b = operands(BF16, (M, K))
    program = PROGRAMS["linear"][0]
    result = torch.compile(program, backend="cute", dynamic=True)(x, w, b)
    torch.testing.assert_close(result, program(x, w, b))
