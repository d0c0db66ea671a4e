"""NVIDIA's own block-scaled GEMM, as it is published, on the simulated machine.

`dense_blockscaled_gemm_persistent.py` is among CUTLASS' examples (NVIDIA/cutlass,
examples/python/CuTeDSL/cute/blackwell/kernel/blockscaled_gemm) and no part of this project. The variable
CUTLASS_EXAMPLE names a copy of it; without one, these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend.simulator.simulated_gpu import Device
from support.simulator.compiled import launch

EXAMPLE = os.environ.get("CUTLASS_EXAMPLE", "")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not EXAMPLE, reason="CUTLASS_EXAMPLE names no copy of NVIDIA's example"),
]
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.float64)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nvidia_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nvidia_example"] = module
    spec.loader.exec_module(module)
    return module


def elements(kind: str, rows: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bytes of an operand, any codes but NaN, and its values."""
    if kind == "mxfp8":
        raw = torch.randint(0, 256, (rows, k), generator=generator, dtype=torch.uint8)
        raw[raw & 0x7F == 0x7F] = 0
        return raw, raw.view(torch.float8_e4m3fn).double()
    raw = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
    return raw, E2M1[torch.stack([raw & 15, raw >> 4], -1).reshape(rows, k).long()]


def scales(kind: str, rows: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scales in blocks of 128 by 4 (cuBLAS, "1D Block Scaling"), and their values (rows, count)."""
    low, high = (1, 127) if kind == "nvfp4" else (120, 134)
    raw = torch.randint(low, high, (rows, count), generator=generator, dtype=torch.uint8)
    dtype = torch.float8_e4m3fn if kind == "nvfp4" else torch.float8_e8m0fnu
    blocks = raw.view(rows // 128, 4, 32, count // 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(-1), raw.view(dtype).double()


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4", "mxfp8 by mxfp4"])
@pytest.mark.parametrize(
    ("tile", "cluster"),
    [((128, 128), (1, 1)), ((128, 64), (1, 2)), ((256, 256), (2, 1)), ((256, 192), (2, 2))],
)
def test_the_published_kernel(
    example: ModuleType, kind: str, tile: tuple[int, int], cluster: tuple[int, int], monkeypatch: Any
) -> None:
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_ptr
    from cutlass.tensor_utils import LayoutEnum

    formats = kind.split(" by ") if " by " in kind else [kind, kind]
    dtypes = [cutlass.Float8E4M3FN if each == "mxfp8" else cutlass.Float4E2M1FN for each in formats]
    scale = cutlass.Float8E4M3FN if kind == "nvfp4" else cutlass.Float8E8M0FNU
    block = 16 if kind == "nvfp4" else 32
    m, n, k = 512, 384, 512
    generator = torch.Generator().manual_seed(0)
    (a, of_a), (b, of_b) = (
        elements(each, rows, k, generator) for each, rows in zip(formats, (m, n), strict=True)
    )
    (sfa, by_a), (sfb, by_b) = (scales(kind, rows, k // block, generator) for rows in (m, n))
    out = torch.full((m, n), torch.nan)
    tensors = [a, b, sfa, sfb, out]

    def pointers(tensors: Sequence[Tensor]) -> list[Any]:
        return [
            make_ptr(each, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=32)
            for each, tensor in zip([*dtypes, scale, scale, cutlass.Float32], tensors, strict=True)
        ]

    gemm = example.Sm100BlockScaledPersistentDenseGemmKernel(block, tile, cluster)
    layouts = (OperandMajorMode.K, OperandMajorMode.K, LayoutEnum.ROW_MAJOR)
    sizes, stream = (m, n, k, 1), cuda.CUstream(0)
    compiled = cute.compile(
        gemm, *pointers(tensors), layouts, sizes, 4, stream, options="--keep-ptx --gpu-arch sm_100a"
    )
    # The host code is given pointers, from which the device can't tell what memory there is.
    register = Device.register
    monkeypatch.setattr(Device, "register", lambda device, args: register(device, tensors))
    launch(compiled, [*pointers(tensors), sizes, stream], async_seed=1)

    left, right = of_a * by_a.repeat_interleave(block, 1), of_b * by_b.repeat_interleave(block, 1)
    error = (out.double() - left @ right.T).abs() / (left.abs() @ right.abs().T)
    assert float(error.max()) < 2**-20
