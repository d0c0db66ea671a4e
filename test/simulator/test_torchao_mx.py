"""torchao's quantisation to MXFP8 in a kernel's epilogue, on the simulated Blackwell: that of eager to the
bit."""

from __future__ import annotations

import pytest
import torch

import cute_backend
from support.torchao_mx import plane_of_largest, same_fp8, to_mx_behind_products

pytest.importorskip("torchao.prototype.mx_formats")


@pytest.mark.parametrize(
    "mode", ["RCEIL", *(pytest.param(mode, marks=pytest.mark.sim) for mode in ("FLOOR", "CEIL", "EVEN"))]
)
def test_scales_and_values_are_those_of_eager(mode: str) -> None:
    """Of every exponent and mantissas around those that round up, zeros, infinities and NaN."""
    program, inputs = to_mx_behind_products(mode), plane_of_largest(192, 512)
    scales, values = cute_backend.simulate(program, *inputs, arch="sm_100a", async_seed=1)
    of_eager, wanted = program(*inputs)
    assert torch.equal(scales.view(torch.uint8), of_eager.view(torch.uint8))
    assert same_fp8(values, wanted)
