"""Linears that libraries quantise: whether a kernel reads the weight as it is stored, as the table in
docs/what-fuses.md says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain
from cute_backend.spec import DType

N, K = 64, 256


def torchao(config: str, **options: Any) -> Callable[[], torch.nn.Module]:
    def made() -> torch.nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        linear = torch.nn.Linear(K, N, dtype=torch.bfloat16).requires_grad_(False)
        quantization.quantize_(linear, getattr(quantization, config)(**options))
        return linear

    return made


def by_group(values: int) -> Any:
    return pytest.importorskip("torchao.quantization.granularity").PerGroup(values)


def gemma(bits: int) -> Callable[[], torch.nn.Module]:
    def made() -> torch.nn.Module:
        linears = pytest.importorskip("transformers.integrations.gemma_quant")
        return linears.QuantizedLinear(K, N, num_bits=bits).requires_grad_(False)

    return made


LIBRARIES: dict[str, tuple[Callable[[], torch.nn.Module], DType]] = {
    "torchao int8": (torchao("Int8WeightOnlyConfig"), DType.I8),
    "torchao int8 by groups": (
        lambda: torchao("Int8WeightOnlyConfig", granularity=by_group(128))(),
        DType.I8,
    ),
    "torchao float8": (torchao("Float8WeightOnlyConfig"), DType.E4M3),
    "torchao int4 by groups": (
        lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=by_group(64))(),
        DType.I8,
    ),
    "torchao int4 by axes": (torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), DType.BF16),
    "torchao int4 behind a quantised input": (
        lambda: torchao(
            "Int8DynamicActivationIntxWeightConfig",
            weight_dtype=torch.int4,
            weight_granularity=by_group(32),
        )(),
        DType.I8,
    ),
    "torchao int8 by int8": (torchao("Int8DynamicActivationInt8WeightConfig"), DType.I8),
    "Gemma int8": (gemma(8), DType.I8),
    "Gemma int4": (gemma(4), DType.I4X2),
    "Gemma int2, which Inductor unpacks": (gemma(2), DType.I8),
}
"""Linears, each with the dtype in which a kernel reads the weight."""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_120a"])
def test_kernels_read_the_weights_of_libraries(library: str, arch: str) -> None:
    make, stored = LIBRARIES[library]
    linear = make()

    def program(x: Tensor) -> Tensor:
        return F.silu(linear(x))

    with torch.no_grad():
        (region,) = explain(program, torch.randn(24, K).bfloat16(), arch=arch).regions
    assert region.spec.product.b_dtype is stored
