"""Operators on a real GPU: every dtype, layout and tile, epilogues, streams, graphs, TVM-FFI on and off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from support.reference import TOLERANCE, relative_error

ops = pytest.importorskip("cutlass.operators", reason="needs the extra `operators`: nvidia-cutlass-operators")

from cute_backend.operators import EpilogueArguments, check, is_ours  # noqa: E402
from cute_backend.runtime.compiling.build import obtain  # noqa: E402

pytestmark = pytest.mark.gpu

E4M3, E5M2, BF16, F16, F32 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
)

M, N, K = 528, 400, 336


@pytest.fixture(params=[True, False], ids=["tvm-ffi", "plain"])
def tvm_ffi(request):
    """TVM-FFI on and off: without it, arguments hold the DSL's tensors."""
    options = ops.GlobalOptions()
    saved = options.save()
    options.use_tvm_ffi = request.param
    yield request.param
    options.restore(saved)


def matrix(rows, columns, dtype, order="t"):
    """Small integers, so that every product is exact."""
    shape = (rows, columns) if order == "t" else (columns, rows)
    values = torch.randint(-3, 4, shape, device="cuda").to(dtype)
    return values if order == "t" else values.t()


def target():
    major, minor = torch.cuda.get_device_capability()
    return f"{10 * major + minor}a"


def found(args, keep=lambda metadata: True):
    check(args).raise_on_error()
    return ops.get_operators(args, lambda each: is_ours(each) and keep(each), target_sm=target())


def tolerance(dtype):
    return 0.1 if dtype is E5M2 else TOLERANCE[dtype]


def assert_near(actual, expected):
    assert actual.dtype is expected.dtype and actual.shape == expected.shape
    error = relative_error(actual, expected)
    assert error < tolerance(actual.dtype), f"{actual.dtype}: {error:.2e}"


def skip_where_fp8_has_no_dlpack(tvm_ffi, dtype):
    if not tvm_ffi and dtype in (E4M3, E5M2):
        try:
            torch.zeros(1, dtype=dtype, device="cuda").__dlpack__()
        except (BufferError, RuntimeError) as error:
            pytest.skip(f"without TVM-FFI arguments go through DLPack, and this torch says: {error}")


def exact(a, b):
    return (a.double() @ b.double()).float()


def narrowed(value, dtype):
    if dtype in (E4M3, E5M2):
        value = value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return value.to(dtype)


PRODUCTS = [
    *[(E4M3, E4M3, "tn"), (E4M3, E5M2, "tn"), (E5M2, E4M3, "tn")],
    *[(half, half, layout) for half in (BF16, F16) for layout in ("tt", "tn", "nt", "nn")],
]


def run_each(cases):
    """Runs every (name, operator, arguments, result, expected), their kernels built side by side."""
    cases = list(cases)
    obtain(operator.metadata.kernel for _, operator, *_ in cases)
    failures = []
    for name, operator, args, result, expected in cases:
        if result.dtype not in (E4M3, E5M2):
            result.fill_(torch.nan)
        operator.run(args)
        error = relative_error(result, expected)
        if not error < tolerance(result.dtype):
            failures.append(f"{name} {operator.metadata.operator_name}: {error:.2e}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("products", [PRODUCTS[:3], PRODUCTS[3:]], ids=["fp8", "half"])
def test_every_product(products, tvm_ffi):
    def cases():
        for a_dtype, b_dtype, layout in products:
            skip_where_fp8_has_no_dlpack(tvm_ffi, a_dtype)
            a, b = matrix(M, K, a_dtype, layout[0]), matrix(K, N, b_dtype, layout[1])
            out = torch.empty(M, N, dtype=BF16, device="cuda")
            args = ops.GemmArguments(a, b, out, F32)
            yield layout, found(args)[0], args, out, exact(a, b).to(BF16)

    run_each(cases())


@pytest.mark.parametrize("aligned", [True, False])
def test_every_result(aligned):
    a, b = matrix(M, K, BF16), matrix(K, N, BF16)

    def cases():
        for dtype in (F32, BF16, F16, E4M3, E5M2):
            for order in ("row", "column"):
                rows, columns = (M, N) if order == "row" else (N, M)
                memory = torch.zeros(rows, columns + (0 if aligned else 1), device="cuda").to(dtype)
                out = memory[:, :columns] if order == "row" else memory[:, :columns].t()
                args = ops.GemmArguments(a, b, out, F32)
                operator = found(args)[0]
                assert operator.metadata.design.aligned is aligned
                yield f"{dtype} {order}", operator, args, out, narrowed(exact(a, b), dtype)

    run_each(cases())


def test_every_tile_and_schedule():
    a, b = matrix(M, K, E4M3), matrix(K, N, E4M3, "n")
    out = torch.empty(M, N, dtype=BF16, device="cuda")
    args = ops.GemmArguments(a, b, out, F32)
    shapes = {}
    for operator in found(args):
        config = operator.metadata.design.config
        kind = (config.tile_m, config.tile_n, config.ctas, config.pingpong, config.subtile_n)
        shapes.setdefault((*kind, operator.metadata.design.fast_accum), operator)
    expected = exact(a, b).to(BF16)
    run_each(("", operator, args, out, expected) for operator in shapes.values())


def gated(accum, scale, bias, gate, alpha):
    raw = accum * scale + bias
    D = silu(raw) * gate * alpha  # noqa: F821
    peaks = max(raw, dim=[1])
    total = sum(raw)
    return D, raw, peaks, total


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "layout", "d_dtype"),
    [
        (E4M3, E4M3, "tn", E4M3),
        (E4M3, E5M2, "tn", E5M2),
        (E5M2, E4M3, "tn", BF16),
        (BF16, BF16, "tt", F32),
        (F16, F16, "nn", E4M3),
    ],
)
def test_an_epilogue_with_vectors_planes_and_reductions(a_dtype, b_dtype, layout, d_dtype, tvm_ffi):
    skip_where_fp8_has_no_dlpack(tvm_ffi, a_dtype)
    skip_where_fp8_has_no_dlpack(tvm_ffi, d_dtype)
    a, b = matrix(M, K, a_dtype, layout[0]), matrix(K, N, b_dtype, layout[1])
    given = {
        "scale": torch.rand(M, 1, device="cuda") / 16,
        "bias": torch.randn(N, device="cuda").to(BF16),
        "gate": torch.randn(M, N, device="cuda").to(BF16),
        "alpha": 0.5,
    }
    written = {
        "D": torch.zeros(M, N, device="cuda").to(d_dtype),
        "raw": torch.zeros(N, M, dtype=BF16, device="cuda").t(),
        "peaks": torch.full((M, 1), 2.0, device="cuda"),
        "total": torch.full((1,), 8.0, device="cuda"),
    }
    args = ops.GemmArguments(a, b, written["D"], F32, EpilogueArguments(gated, **given, **written))
    operator = found(args)[0]
    need = operator.get_workspace_size(args)
    room = torch.empty(need.size_bytes, dtype=torch.uint8, device="cuda")
    for workspace in (None, ops.workspace.Workspace(room), ops.workspace.Workspace(room.data_ptr())):
        written["total"].fill_(8)
        operator.run(args, workspace=workspace)
        raw = exact(a, b) * given["scale"] + given["bias"].float()
        assert_near(written["D"], narrowed(F.silu(raw) * given["gate"].float() * 0.5, d_dtype))
        assert_near(written["raw"], raw.to(BF16))
        assert_near(written["peaks"], raw.amax(1, keepdim=True).clamp(min=2))
        torch.testing.assert_close(written["total"], 8 + raw.sum()[None], rtol=1e-4, atol=0.1)


def test_reductions_over_every_axis_and_of_every_kind():
    def told(accum):
        x = accum / 64
        least = min(x, dim=[0])
        where = x.argmax(-1)
        mass = x.logsumexp(-1)
        mean = x.mean(0)
        return least, where, mass, mean

    a, b = matrix(M, K, BF16), matrix(K, N, BF16)
    written = {
        "least": torch.full((1, N), -1.0, device="cuda"),
        "where": torch.zeros(M, dtype=torch.int64, device="cuda"),
        "mass": torch.zeros(M, dtype=BF16, device="cuda"),
        "mean": torch.zeros(N, device="cuda"),
    }
    out = torch.zeros(M, N, dtype=BF16, device="cuda")
    args = ops.GemmArguments(a, b, out, F32, EpilogueArguments(told, **written))
    found(args)[0].run(args)
    x = exact(a, b) / 64
    assert_near(written["least"], x.amin(0, keepdim=True).clamp(max=-1))
    assert torch.equal(written["where"], x.argmax(-1))
    assert_near(written["mass"], x.logsumexp(-1).to(BF16))
    torch.testing.assert_close(written["mean"], x.mean(0), rtol=1e-4, atol=1e-4)
    assert not out.any()


@pytest.mark.parametrize("kind", [ops.EpilogueArguments, EpilogueArguments])
def test_numbers_and_sizes_may_change_from_run_to_run(kind):
    def scaled(accum, alpha, bias):
        D = gelu(accum * alpha) + bias  # noqa: F821
        return D

    artifact = operator = None
    for rows, alpha in ((M, 0.25), (M, -0.5), (48, 0.125)):
        a, b = matrix(rows, K, BF16), matrix(K, N, BF16)
        bias, D = torch.randn(N, device="cuda"), torch.empty(rows, N, dtype=BF16, device="cuda")
        args = ops.GemmArguments(a, b, D, F32, kind(scaled, alpha=alpha, bias=bias, D=D))
        operator = operator or found(args)[0]
        artifact = artifact or operator.compile(args)
        operator.run(args, artifact)
        assert_near(D, (F.gelu(exact(a, b) * alpha) + bias).to(BF16))


def test_a_kernel_found_with_fake_tensors_runs_on_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def operands():
        return (
            torch.ones(M, K, dtype=BF16, device="cuda"),
            torch.ones(K, N, dtype=BF16, device="cuda"),
            torch.zeros(M, N, dtype=BF16, device="cuda"),
        )

    with FakeTensorMode():
        fakes = operands()
    args = ops.GemmArguments(*fakes, F32)
    operator = found(args)[0]
    artifact = operator.compile(args)
    real = operands()
    operator.run(ops.GemmArguments(*real, F32), artifact)
    assert torch.equal(real[2], torch.full_like(real[2], K))


@pytest.mark.parametrize("spelling", ["torch", "driver"])
def test_the_given_stream_is_used(spelling):
    """The kernel's operands are written on that stream, behind work that takes long."""
    import cuda.bindings.driver as cuda

    a, b = matrix(M, K, BF16), matrix(K, N, BF16)
    late, out = torch.zeros_like(a), torch.zeros(M, N, dtype=BF16, device="cuda")
    args = ops.GemmArguments(late, b, out, F32)
    operator = found(args)[0]
    artifact = operator.compile(args)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(a)
    operator.run(args, artifact, stream=side if spelling == "torch" else cuda.CUstream(side.cuda_stream))
    side.synchronize()
    assert_near(out, exact(a, b).to(BF16))


def test_a_graph_captures_a_run_with_reductions_and_numbers():
    def told(accum, alpha):
        D = accum * alpha
        total = sum(D)
        return D, total

    a, b = matrix(M, K, BF16), matrix(K, N, BF16)
    D, total = torch.empty(M, N, device="cuda"), torch.zeros(1, device="cuda")
    args = ops.GemmArguments(a, b, D, F32, EpilogueArguments(told, alpha=0.5, D=D, total=total))
    operator = found(args)[0]
    artifact = operator.compile(args)
    graph = torch.cuda.CUDAGraph()
    operator.run(args, artifact, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        operator.run(args, artifact, stream=torch.cuda.current_stream(), assume_supported_args=True)
    total.zero_()
    a.copy_(matrix(M, K, BF16))
    for _ in range(2):
        graph.replay()
    assert_near(D, exact(a, b) * 0.5)
    torch.testing.assert_close(total, exact(a, b).sum()[None], rtol=1e-4, atol=0.1)


def test_the_examples_kernel_gives_the_product(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    sys.modules.pop("operators_fp64_gemm", None)
    import operators_fp64_gemm

    operators_fp64_gemm.main()
    told = capsys.readouterr().out
    assert told.count("gives A @ B") == 2
