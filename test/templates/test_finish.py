"""The second stage of reductions alone, on the simulated machine, from partials that a test made up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from tempfile import mkdtemp

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Float8E5M2, Float32, Int8, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch import Tensor

from cute_backend import numerics
from cute_backend.memory_ops import device_reduce as reduce
from cute_backend.planning import Arch, TileConfig
from cute_backend.signature import WORKSPACE_ALIGN
from cute_backend.simulator.host import HostProgram
from cute_backend.spec import Axis, DType, Overflow
from cute_backend.templates.finish import THREADS, UNROLL, Finish
from cute_backend.templates.workspace import partials_shape
from support.archs import FIRST
from support.simulator.compiled import host_program

INF, NAN = float("inf"), float("nan")
TORCH = {
    Float32: torch.float32,
    BFloat16: torch.bfloat16,
    Float8E5M2: torch.float8_e5m2,
    Int8: torch.int8,
    Int32: torch.int32,
    Int64: torch.int64,
}
CONFIGS = {arch: TileConfig(arch, 128, 64) for arch in FIRST if arch.target.fp8}


def results(axis: Axis) -> list[reduce.Result]:
    """Of every kind, and every way of storing one."""
    largest = reduce.of_plane(reduce.ARGMAX) if axis is Axis.ALL else reduce.ARGMAX
    return [
        reduce.Result(reduce.SUM, axis, Float32),
        reduce.Result(reduce.MEAN, axis, BFloat16),
        reduce.Result(reduce.MAX, axis, Float32),
        reduce.Result(reduce.MIN, axis, Float8E5M2, saturate=False),
        reduce.Result(reduce.MAX, axis, Float8E5M2),
        reduce.Result(reduce.MAX, axis, Int8),
        reduce.Result(largest, axis, Int64),
        reduce.Result(reduce.LOGSUMEXP, axis, Float32),
    ]


@cute.jit
def finish(
    stage: cutlass.Constexpr,
    outputs: tuple,
    workspace: cute.Tensor,
    m: Int32,
    n: Int32,
    stream: cuda.CUstream,
):
    stage(stage.partials(workspace, m, n), list(outputs), m, n, stream)


@cache
def program(arch: Arch, axis: Axis) -> HostProgram:
    def fake(dtype: type[cutlass.Numeric], align: int | None = None) -> cute.Tensor:
        return make_fake_compact_tensor(dtype, (cute.sym_int(),), stride_order=(0,), assumed_align=align)

    stage = Finish(CONFIGS[arch], *results(axis))
    compiled = cute.compile(
        finish,
        stage,
        tuple(fake(result.dtype, result.dtype.width // 8) for result in stage.results),
        fake(cutlass.Uint8, WORKSPACE_ALIGN),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --keep-ptx --gpu-arch {arch.value} --dump-dir={mkdtemp()}",
    )
    return host_program(compiled)


def sizes_of(axis: Axis, parts: int, extent: int) -> tuple[int, int]:
    """An M and an N with this number of partials, or more for a plane."""
    if axis is Axis.ROW:
        return extent, 64 * parts - 3
    if axis is Axis.COLUMN:
        return 16 * parts - 3 if parts > 1 else 16, extent
    return 128 * parts, 64


def run(arch: Arch, axis: Axis, m: int, n: int, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The stores of partials, each (parts, results), in the order of `results`."""
    extent = parts[0][0].shape[1]
    flat = [part.contiguous().view(torch.uint8).flatten() for result in parts for part in result]
    padded = [torch.nn.functional.pad(part, (0, -len(part) % WORKSPACE_ALIGN), value=0xFF) for part in flat]
    outputs = [torch.full((extent,), 77).to(TORCH[result.dtype]) for result in results(axis)]
    program(arch, axis).launch([tuple(outputs), torch.cat(padded), m, n])
    return outputs


def partials(parts: int, extent: int, wide: bool, seed: int) -> list[list[Tensor]]:
    """Integers, so that sums are exact; ties, NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-40, -4, (parts, extent), generator=generator).float()
    special = values.clone()
    special[parts // 2, extent // 2] = INF
    special[parts - 1, extent // 3] = NAN
    special[0, extent - 1] = -INF
    keys = torch.randint(-9, 3, (parts, extent), generator=generator).float()
    keys[:, 0] = -1e38
    keys[parts - 1, extent // 3] = NAN
    indices = torch.randperm(parts * extent, generator=generator).reshape(parts, extent)
    indices = indices + 2**40 if wide else indices.int()
    totals = torch.rand((parts, extent), generator=generator) + 0.5
    return [[values], [values], [special], [special], [special], [values], [keys, indices], [values, totals]]


def expected(parts: list[list[Tensor]], count: int) -> list[Tensor]:
    (sums,), _, (special,), _, _, (values,), (keys, indices), (tops, totals) = parts
    largest, smallest = special.amax(0), special.amin(0)
    keys = torch.where(keys.isnan(), INF, keys)
    chosen = torch.where(keys == keys.amax(0), indices.long(), 2**63 - 1).amin(0)
    logsumexp = (tops.double() + totals.double().log()).logsumexp(0)
    return [
        sums.sum(0),
        (sums.sum(0) / count).bfloat16(),
        largest,
        numerics.store(smallest, DType.E5M2, Overflow.NONFINITE),
        numerics.store(largest, DType.E5M2),
        values.amax(0).to(torch.int8),
        chosen,
        logsumexp.float(),
    ]


SHAPES = {
    Axis.ROW: [(1, 1), (1002, 4), (127, 3), (THREADS // Axis.ROW.width * UNROLL + 1, 9)],
    Axis.COLUMN: [(1, 8), (67, 9), (THREADS // Axis.COLUMN.width * UNROLL + 1, 1)],
    Axis.ALL: [(1, 1), (67, 1), (THREADS * UNROLL // 4 + 1, 1)],
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("axis", Axis)
def test_every_kind_of_any_number_of_parts(axis: Axis, arch: Arch) -> None:
    """One, fewer than there are threads, more than a step of all of them; results that fill no CTA."""
    for parts, extent in SHAPES[axis]:
        m, n = sizes_of(axis, parts, extent)
        shape = partials_shape(axis, CONFIGS[arch], m, n)
        given = partials(*shape, axis is Axis.ALL, parts)
        count = {Axis.ROW: n, Axis.COLUMN: m, Axis.ALL: m * n}[axis]
        got = run(arch, axis, m, n, given)
        for i, (actual, right) in enumerate(zip(got, expected(given, count), strict=True)):
            message = f"{results(axis)[i]} of {shape}"
            tolerance = 1e-6 if i == 7 else 0.0
            torch.testing.assert_close(
                actual.double(), right.double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=message
            )


def test_zeros_have_an_order() -> None:
    zeros = torch.zeros(5, 4)
    zeros[::2] = -0.0
    given = partials(5, 4, False, 0)
    given[2] = given[3] = [zeros]
    got = run(Arch.SM90A, Axis.ROW, *sizes_of(Axis.ROW, 5, 4), given)
    assert not got[2].signbit().any() and got[3].float().signbit().all()


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    """Sums and logsumexps that round, of one row and of nine."""
    generator = torch.Generator().manual_seed(0)
    given = partials(1002, 9, False, 0)
    given[0] = [torch.randn(1002, 9, generator=generator)]
    given[7] = [torch.randn(1002, 9, generator=generator), given[7][1]]
    m, n = sizes_of(Axis.ROW, 1002, 9)
    together = run(Arch.SM90A, Axis.ROW, m, n, given)
    for row in (0, 5):
        alone = run(
            Arch.SM90A, Axis.ROW, 1, n, [[part[:, row : row + 1] for part in parts] for parts in given]
        )
        for i in (0, 7):
            assert torch.equal(alone[i], together[i][row : row + 1])
    assert together[0].double().sub(given[0][0].double().sum(0)).abs().max() > 0, "nothing was rounded"
