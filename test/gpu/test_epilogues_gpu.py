"""Every shared epilogue on a real GPU: through torch.compile against float64, then each kernel that its
region could ever be given, in every configuration and alignment, against the replay."""

from __future__ import annotations

import pytest
import torch
from epilogues import EPILOGUES, Epilogue, Problem
from reference import TOLERANCE, as_tuple, in_float64, relative_error
from torch import Tensor

from cute_backend.fx_walk.collect import collect
from cute_backend.memory_ops import Variant
from cute_backend.replay import replay
from cute_backend.runtime.build import obtain
from cute_backend.runtime.device import device_at, max_active_clusters
from cute_backend.runtime.kernel import Kernel
from cute_backend.runtime.operands import TORCH_DTYPES
from cute_backend.spec import DType, EpilogueSpec, LoadKind, Major, Stride
from cute_backend.templates.config import table

pytestmark = pytest.mark.gpu

SHAPES = [
    (256, 256, 256),
    (2, 128, 128),
    (200, 336, 144),
    (130, 272, 1024),
    (1000, 1040, 528),
    (4096, 512, 64),
]
"""(M, N, K): whole tiles; few rows; edges in both directions; few and many k tiles; many tiles a CTA."""


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
    assert counters["regions"] == len(SHAPES[:5]), dict(counters)
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


def operands_of(
    spec: EpilogueSpec, m: int, n: int, k: int, *, aligned: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    (acc,) = spec.accumulators
    problem = Problem(m, n, k, device="cuda")
    a = problem.operand(m, k, dtype=TORCH_DTYPES[acc.a_dtype], generator=generator)
    b = problem.operand(n, k, dtype=TORCH_DTYPES[acc.b_dtype], generator=generator).t()
    assert acc.a_major is Major.K and acc.b_major is Major.K
    loads = []
    for load in spec.loads:
        if load.kind is LoadKind.EXACT:
            column_major = load.stride_n is not Stride.ONE
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
    columns = any(load.kind is LoadKind.EXACT and load.stride_n is not Stride.ONE for load in spec.loads)
    for m, n, k in SHAPES:
        m = -(-m // 16) * 16 if columns else m  # the pitch of a transposed plane
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
                        failures.append(
                            f"{kernel.config.name} {kernel.variant.value} ({m}, {n}, {k}): {error:.2e}"
                        )
    assert not failures, "\n".join(failures)
