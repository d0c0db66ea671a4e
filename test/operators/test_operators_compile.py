"""Operators compiled without a GPU, and their kernels, with the real host code, on the simulated machine."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from support.operator_cases import (
    BF16,
    E4M3,
    F32,
    TARGETS,
    K,
    M,
    N,
    gemm_operands,
    like,
    replayed,
    simulated,
    without_a_gpu,
)

ops = pytest.importorskip("cutlass.operators", reason="needs the extra `operators`: nvidia-cutlass-operators")

from cute_backend.operators import EpilogueArguments, is_ours  # noqa: E402
from cute_backend.runtime.compiling.rungs import spill_bytes  # noqa: E402

SIM = pytest.mark.sim

EXAMPLES = Path(__file__).parents[2] / "examples"


def gated(accum, scale, gate, alpha):
    raw = accum * scale
    D = silu(raw) * gate * alpha  # noqa: F821
    peaks = max(raw, dim=[1])
    total = sum(raw)
    return D, raw, peaks, total


def results():
    """The tensors that `gated` writes; reductions hold something already."""
    return {
        "D": torch.zeros(M, N).to(E4M3),
        "raw": torch.zeros(N, M, dtype=BF16).t(),
        "peaks": torch.full((M, 1), 2.0),
        "total": torch.full((1,), 8.0),
    }


def inputs():
    generator = torch.Generator().manual_seed(7)
    return {
        "scale": torch.rand(M, 1, generator=generator) / 16,
        "gate": torch.randn(M, N, generator=generator).to(BF16),
        "alpha": 0.5,
    }


@pytest.mark.parametrize("target", TARGETS)
def test_an_operator_compiles_from_tensors_without_values(target):
    tensors = [like(each, "fake") for each in gemm_operands(E4M3)]
    held = {
        name: like(each, "fake") if each is not None else 0.5 for name, each in _tensors_of(inputs()).items()
    }
    written = {name: like(each, "fake") for name, each in results().items()}
    args = ops.GemmArguments(*tensors, F32, EpilogueArguments(gated, **held, **written))
    operator = ops.get_operators(args, is_ours, target_sm=target)[0]
    artifact = operator.compile(args, target)
    assert artifact.operator_obj is operator and artifact.compiled_for == ops.TargetSm(target)
    assert callable(artifact.compiled_obj)
    assert spill_bytes(operator.metadata.kernel) == 0
    assert operator.compile(args).compiled_obj is artifact.compiled_obj


def _tensors_of(named):
    return {name: each if isinstance(each, torch.Tensor) else None for name, each in named.items()}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", [*TARGETS, *(pytest.param(each, marks=SIM) for each in ("89", "120a"))])
def test_a_simulated_operator_gives_what_its_epilogue_says(target, monkeypatch):
    without_a_gpu(monkeypatch, simulated)
    a, b, out = gemm_operands(E4M3)
    given, written = inputs(), results()
    args = ops.GemmArguments(a, b, out, F32, EpilogueArguments(gated, **given, **written))
    operator = ops.get_operators(args, is_ours, target_sm=target)[0]
    operator.run(args)
    raw = a.float() @ b.float() * given["scale"]
    expected = (F.silu(raw) * given["gate"].float() * 0.5).clamp(-448, 448)
    torch.testing.assert_close(written["raw"], raw.to(BF16), rtol=2**-7, atol=0)
    torch.testing.assert_close(written["D"].float(), expected, rtol=2**-3, atol=2**-9)
    torch.testing.assert_close(written["peaks"], raw.amax(1, keepdim=True).clamp(min=2.0))
    torch.testing.assert_close(written["total"], 8 + raw.sum()[None], rtol=1e-4, atol=1e-2)
    assert 0 < (written["peaks"] == 2.0).sum() < M


def test_tensors_on_a_cpu_are_not_run():
    args = ops.GemmArguments(*gemm_operands(), F32)
    operator = ops.get_operators(args, is_ours, target_sm="100a")[0]
    artifact = ops.CompiledArtifact(None, operator, ops.TargetSm("100a"))
    with pytest.raises(ValueError, match="A is on cpu; kernels run on a GPU"):
        operator.run(args, artifact)


def test_tensors_of_the_dsl_on_a_cpu_are_not_run():
    options = ops.GlobalOptions()
    saved = options.save()
    options.use_tvm_ffi = False
    try:
        args = ops.GemmArguments(*gemm_operands(), F32)
        operator = ops.get_operators(args, is_ours, target_sm="100a")[0]
        artifact = ops.CompiledArtifact(None, operator, ops.TargetSm("100a"))
        with pytest.raises(ValueError, match="A is not on a GPU"):
            operator.run(args, artifact)
    finally:
        options.restore(saved)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_tensors_of_the_dsl_are_launched_from_their_addresses(dtype, monkeypatch):
    from cutlass.cute.runtime import from_dlpack

    from cute_backend.operators import kernels, tensor_arguments
    from cute_backend.simulator.host import device_tensor

    def memory_at(address, size):
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    values_of = kernels.values_of
    without_a_gpu(monkeypatch, replayed)
    monkeypatch.setattr(kernels, "values_of", values_of)
    monkeypatch.setattr(tensor_arguments, "bytes_at", memory_at)
    a, b, out = gemm_operands(dtype, layout="tnn")
    wide = torch.zeros(N, M + 64, dtype=BF16)[:, :M].t()
    for result in (out, wide):
        tensors = (from_dlpack(device_tensor(each), assumed_align=16) for each in (a, b, result))
        args = ops.GemmArguments(*tensors, F32)
        ops.get_operators(args, is_ours, target_sm="100a")[0].run(args)
        assert torch.equal(result, (a.float() @ b.float()).to(BF16))


@pytest.fixture(scope="module")
def example():
    """The example's module, whose operator is registered once for all tests."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("operators_fp64_gemm")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("tile", [(32, 32), (16, 16)])
def test_the_examples_kernel_multiplies(example, arch, tile, tmp_path):
    """On the simulator, on sizes that no tile divides."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    from support.simulator.compiled import launch

    a, b = (torch.randint(-9, 10, shape).double() for shape in ((2, 20, 12), (2, 12, 40)))
    out = torch.full((2, 20, 40), torch.nan, dtype=torch.float64)
    args = ops.GemmArguments(a, b, out, torch.float64)
    stand_ins = [each.tensor.compile_time_tensor for each in (args.A, args.B, args.out)]
    compiled = cute.compile(
        example.Fp64GemmKernel(tile),
        *stand_ins,
        make_fake_stream(),
        options=f"--enable-tvm-ffi --keep-ptx --gpu-arch {arch} --dump-dir={tmp_path}",
    )
    launch(compiled, [a, b, out, 0])
    assert torch.equal(out, a @ b)


def test_the_example_refuses_what_it_does_not_take(example):
    def doubles(*shape):
        return torch.zeros(*shape, dtype=torch.float64)

    args = ops.GemmArguments(doubles(1, M, K), doubles(1, K, N), doubles(1, M, N), torch.float64)
    operator = ops.get_operators(args, example.is_fp64_gemm)[0]
    assert operator.supports(args, "80") and not operator.supports(args, "75")
    for other, sentence in (
        (ops.GemmArguments(doubles(M, K), doubles(K, N), doubles(M, N), torch.float64), "has 2 modes"),
        (
            ops.GemmArguments(
                doubles(1, M, 2 * K)[..., :K], doubles(1, K, N), doubles(1, M, N), torch.float64
            ),
            "has gaps",
        ),
        (ops.GemmArguments(*gemm_operands(), F32), "Expected element type Float64"),
    ):
        assert sentence in str(operator.supports(other).error)
        assert ops.get_operators(other, example.is_fp64_gemm) == []
    transposed = ops.GemmArguments(doubles(1, K, M).mT, doubles(1, N, K).mT, doubles(1, M, N), torch.float64)
    names = [each.metadata.operator_name for each in ops.get_operators(transposed, example.is_fp64_gemm)]
    assert names == ["examples.fp64_gemm_nnt_tile32x32", "examples.fp64_gemm_nnt_tile16x16"]
    assert len(ops.get_operators(None, example.is_fp64_gemm, target_sm="80")) == 16
