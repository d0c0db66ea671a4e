"""Every shared epilogue on a real GPU: through torch.compile against float64, then each kernel that its region
could ever be given, in every configuration and alignment, against the replay."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from epilogues import EPILOGUES, Epilogue, Problem
from torch import Tensor

from cute_backend.fx_walk.collect import collect
from cute_backend.memory_ops import Variant
from cute_backend.replay import replay
from cute_backend.runtime.build import obtain
from cute_backend.runtime.device import device_at, max_active_clusters
from cute_backend.runtime.kernel import Kernel
from cute_backend.runtime.operands import TORCH_DTYPES
from cute_backend.spec import DType, EpilogueSpec, LoadKind, Major
from cute_backend.templates.config import table

pytestmark = pytest.mark.gpu

SHAPES = [(256, 256, 256), (2, 128, 128), (200, 336, 144), (130, 272, 1024), (1000, 1040, 528), (4096, 512, 64)]
"""(M, N, K): whole tiles; one row of tiles; edges in both directions; few and many k tiles; many tiles a CTA."""

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 4e-6, torch.float8_e4m3fn: 5e-2}
"""By which a result may differ from its reference, relative in norm: a unit in the last place of its dtype."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """NaN where an element was not written: outputs are poisoned with NaN."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def _scaled_mm_f64(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, **_) -> Tensor:
    product = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    return product if bias is None else product + bias.double()


def _addmm_f64(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return bias.double() + a.double() @ b.double()


def in_float64(epilogue: Epilogue, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The program with its products in float64, whose dtype all that follows then takes on."""
    with patch("torch._scaled_mm", _scaled_mm_f64), patch("torch.addmm", _addmm_f64):
        return as_tuple(epilogue.fn(*inputs))


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def poison(m: int, n: int) -> None:
    """Leave NaN in the memory that outputs of these sizes are about to get."""
    for itemsize in (1, 2, 4):
        torch.empty(m * n * itemsize, device="cuda", dtype=torch.uint8).fill_(0xFF)


@pytest.mark.parametrize("name", EPILOGUES)
def test_compiled_program_is_right(name: str, fresh_compiler: None) -> None:
    epilogue = EPILOGUES[name]
    compiled = torch.compile(epilogue.fn, backend="cute", dynamic=False)
    for seed, (m, n, k) in enumerate(SHAPES[:5]):
        m = n if epilogue.square else m
        inputs = epilogue.inputs(Problem(m, n, k, device="cuda", seed=seed))
        expected = in_float64(epilogue, inputs)
        poison(m, n)
        for actual, right in zip(as_tuple(compiled(*inputs)), expected, strict=True):
            assert relative_error(actual, right) < TOLERANCE[actual.dtype], (m, n, k)
    counters = torch._dynamo.utils.counters["cute_backend"]
    assert counters["regions"] == len(SHAPES[:5])
    assert not counters["replayed"] and not counters["builds_failed"]


def region_of(epilogue: Epilogue) -> EpilogueSpec:
    (report,) = collect(epilogue.fn, epilogue.inputs(Problem(256, 256, 256)))
    (region,) = report.regions
    return region.spec


def values(shape: tuple[int, ...], dtype: DType, generator: torch.Generator, *, aligned: bool) -> Tensor:
    """Random values; not aligned, they begin one element past a boundary and rows are one element apart."""
    random = torch.randn(shape, generator=generator, device="cuda").to(TORCH_DTYPES[dtype])
    if aligned:
        return random
    *rows, columns = shape
    buffer = random.new_empty(torch.Size(rows).numel() * (columns + 1) + 1)
    strides = (columns + 1, 1) if rows else (1,)
    return buffer[1:].as_strided(shape, strides).copy_(random)


def operands_of(spec: EpilogueSpec, m: int, n: int, k: int, *, aligned: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    (acc,) = spec.accumulators
    a = values((m, k), acc.a_dtype, generator, aligned=True)
    b = values((n, k), acc.b_dtype, generator, aligned=True).t()
    assert acc.a_major is Major.K and acc.b_major is Major.K
    loads = []
    for load in spec.loads:
        if load.kind is LoadKind.EXACT:
            column_major = load.stride_m.value == "1"
            plane = values((n, m) if column_major else (m, n), load.dtype, generator, aligned=aligned)
            loads.append(plane.t() if column_major else plane)
        else:
            size = {LoadKind.SCALAR: 1, LoadKind.ROWVEC: n, LoadKind.COLVEC: m}[load.kind]
            loads.append(values((size,), load.dtype, generator, aligned=True))
    return a, b, loads


@pytest.mark.parametrize("name", EPILOGUES)
def test_every_kernel_of_a_region_is_right(name: str) -> None:
    spec = region_of(EPILOGUES[name])
    device = device_at(0)
    kernels = [Kernel(spec, config, variant) for config in table(device.arch, spec) for variant in Variant]
    outcomes = obtain(kernels)
    failures = []
    for m, n, k in SHAPES:
        for aligned in (True, False):
            a, b, loads = operands_of(spec, m, n, k, aligned=aligned)
            expected = replay(spec, [a], [b], loads, accumulate=torch.float64)
            generator = torch.Generator("cuda")
            for kernel in kernels:
                if aligned is not (kernel.variant is Variant.TMA):
                    continue
                outputs = [values((m, n), store.dtype, generator, aligned=aligned) for store in spec.stores]
                for output in outputs:
                    output.fill_(float("nan"))
                clusters = max_active_clusters(0, kernel.config.cluster_size)
                outcomes[kernel](a, b, *loads, *outputs, clusters)
                for actual, right in zip(outputs, expected, strict=True):
                    error = relative_error(actual, right)
                    if not error < TOLERANCE[actual.dtype]:
                        failures.append(f"{kernel.config.name} {kernel.variant.value} ({m}, {n}, {k}): {error:.2e}")
    assert not failures, "\n".join(failures)

