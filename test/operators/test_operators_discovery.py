"""Discovery without a GPU: what is found for which arguments, what filters leave, what is refused and how."""

from __future__ import annotations

import pytest
import torch

from support.operator_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    TARGETS,
    K,
    M,
    N,
    gemm_operands,
    like,
    matrix,
)

ops = pytest.importorskip("cutlass.operators", reason="needs the extra `operators`: nvidia-cutlass-operators")

from cute_backend.operators import (  # noqa: E402
    EpilogueArguments,
    Sm80FusedGemm,
    Sm90FusedGemm,
    Sm100FusedGemm,
    check,
    is_ours,
)
from cute_backend.operators import epilogue_function as converting  # noqa: E402
from cute_backend.planning import Alignment, Arch, Sizes, choose, clustered, plan  # noqa: E402
from cute_backend.spec import Accumulator, DType, Major  # noqa: E402

ARCHES = {"90a": Arch.SM90A, "100a": Arch.SM100A}


def found(args, target, keep=lambda metadata: True):
    return ops.get_operators(args, lambda each: is_ours(each) and keep(each), target_sm=target)


COUNTS = {"90a": 482, "100a": 45, "103a": 45, "80": 36, "86": 20, "89": 16, "120a": 20, "121a": 20}
"""Operators of a bf16 product, by the suffix of their target, in the order of the default. On data center
Blackwell one of them is as wide as its rows, and not among the tiles for any M."""


def gemm(*tensors, accumulator=F32, epilogue=None):
    return ops.GemmArguments(*tensors, accumulator, epilogue)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize(
    ("dtypes", "layout"),
    [
        ((BF16, BF16, BF16), "tnt"),
        ((BF16, BF16, F32), "ntn"),
        ((F16, F16, F16), "ttn"),
        ((E4M3, E4M3, BF16), "tnt"),
        ((E4M3, E5M2, E4M3), "tnn"),
    ],
)
def test_every_tile_and_cluster_is_found_whatever_holds_the_operands(dtypes, layout, where, target):
    args = gemm(*(like(each, where) for each in gemm_operands(*dtypes, layout)))
    operators = found(args, target)
    arch = ARCHES[target]
    spec = operators[0].metadata.kernel.plan.spec
    fast = [each for each in operators if each.metadata.design.fast_accum]

    def as_it_runs(config):
        return plan(spec, config, Alignment.TMA).tile

    chosen = choose(arch, spec, Sizes(M, N, K), arch.target.sm_count)
    able = set(map(as_it_runs, (chosen, *clustered(arch, spec))))
    assert {each.metadata.design.config for each in fast} == able
    assert len({each.metadata.operator_name for each in operators}) == len(operators)
    assert fast[0].metadata.design.config == as_it_runs(chosen)
    assert all(each.supports(args, target) for each in operators)
    assert {type(each) for each in operators} == {Sm90FusedGemm if target == "90a" else Sm100FusedGemm}
    promoted = [each for each in operators if not each.metadata.design.fast_accum]
    assert bool(promoted) is (target == "90a" and dtypes[0].itemsize == 1)


def test_the_counts_of_tiles_are_those_offered():
    counts = {target: len(found(gemm(*gemm_operands()), target)) for target in COUNTS}
    assert counts == COUNTS


def test_a_batch_of_one_is_found_as_its_matrix_is():
    single = [each[None] for each in gemm_operands()]
    names = [each.metadata.operator_name for each in found(gemm(*single), "90a")]
    assert names == [each.metadata.operator_name for each in found(gemm(*gemm_operands()), "90a")]


def test_names_tell_layout_dtypes_tile_and_cluster():
    args = gemm(*gemm_operands(E4M3, E5M2, BF16))
    names = {each.metadata.operator_name for each in found(args, "90a")}
    assert "cute_backend.sm90a_tnt_Ae4m3_Be5m2_outbf16_accf32_tile128x128_cluster2x1_pingpong" in names
    assert "cute_backend.sm90a_tnt_Ae4m3_Be5m2_outbf16_accf32_tile128x128_cluster2x1_promoted" in names
    names = {
        each.metadata.operator_name
        for each in found(
            gemm(*gemm_operands(layout="ntn")), "100a", lambda each: each.design.tile_shape[1] == 256
        )
        if each.metadata.design.use_2cta_mma
    }
    name = "cute_backend.sm100a_ntn_Abf16_Bbf16_outbf16_accf32_tile256x256_cluster2x1_2cta"
    assert names == {name, f"{name}_halves"}


def test_filters_narrow_what_is_found():
    args = gemm(*gemm_operands(E4M3))
    tiles = found(args, "90a", lambda each: each.design.tile_shape[:2] == (128, 256))
    assert {each.metadata.design.cluster_shape for each in tiles} == {(1, 1, 1), (2, 1, 1), (1, 2, 1)}
    assert all(each.metadata.design.tile_shape == (128, 256, 128) for each in tiles)
    pingpong = found(args, "90a", lambda each: each.design.config.pingpong)
    assert pingpong and all(
        each.metadata.operator_name.endswith("pingpong") or each.metadata.design.config.pingpong
        for each in pingpong
    )
    assert found(args, "90a", lambda each: each.design.tile_shape[:2] == (192, 80)) == []
    assert found(args, "90a", lambda each: each.operands.out.dtype.width == 64) == []
    assert len(ops.get_operators(args, is_ours, target_sm="90a", limit=3)) == 3


@pytest.mark.parametrize("target", ["75", "90", "100", "100f", "110a", "120", "120f"])
def test_other_targets_find_none(target):
    assert found(gemm(*gemm_operands()), target) == []


def test_each_target_finds_its_own():
    by_default = ops.get_operators(gemm(*gemm_operands()), is_ours)
    assert [each.metadata.supported_targets for each in by_default] == [
        [ops.TargetSm(target)] for target, count in COUNTS.items() for _ in range(count)
    ]


def test_an_operator_supports_no_target_but_its_own() -> None:
    """Although sm_80 is a portable target by its name."""
    args = gemm(*gemm_operands())
    operator = found(args, "80")[0]
    assert operator.supports(args, "80")
    assert "the operator is for 80, not for 86" in str(operator.supports(args, "86").error)


def test_products_that_an_architecture_does_not_multiply_find_none() -> None:
    """fp8 on Ampere; e4m3 by e5m2 on Ada and RTX Blackwell; results of fp8 on Ampere."""
    fp8, mixed = gemm(*gemm_operands(E4M3)), gemm(*gemm_operands(E4M3, E5M2))
    assert [target for target in COUNTS if not found(fp8, target)] == ["80", "86"]
    assert [target for target in COUNTS if not found(mixed, target)] == ["80", "86", "89", "120a", "121a"]
    assert [target for target in COUNTS if not found(gemm(*gemm_operands(out=E4M3)), target)] == ["80", "86"]
    assert any(not each.metadata.design.fast_accum for each in found(fp8, "89"))


def test_a_product_on_ampere_is_named_by_its_tile_and_its_ctas() -> None:
    """It has no cluster, and compiled for sm_80 it is what torch.compile chooses there."""
    operators = found(gemm(*gemm_operands()), "80")
    assert {type(each) for each in operators} == {Sm80FusedGemm}
    assert {each.metadata.design.cluster_shape for each in operators} == {(1, 1, 1)}
    name = "cute_backend.sm80_tnt_Abf16_Bbf16_outbf16_accf32_tile128x128_cluster1x1_occupancy2"
    assert name in {each.metadata.operator_name for each in operators}
    spec = operators[0].metadata.kernel.plan.spec
    chosen = choose(Arch.SM80, spec, Sizes(M, N, K), Arch.SM80.target.sm_count)
    assert operators[0].metadata.design.config == plan(spec, chosen, Alignment.TMA).tile


@pytest.mark.exhaustive
def test_without_arguments_every_product_is_told_once():
    from cute_backend.operators.kernels import OUT_DTYPES, PRODUCTS

    operators = [
        each for kind in (Sm90FusedGemm, Sm100FusedGemm) for each in kind.generate_operators(lambda _: True)
    ]
    assert len({each.metadata.operator_name for each in operators}) == len(operators)
    told = {
        (
            product.a_dtype,
            product.b_dtype,
            product.a_major,
            product.b_major,
            each.metadata.kernel.plan.spec.stores[0].dtype,
        )
        for each in operators
        for product in (each.metadata.kernel.plan.spec.product,)
    }
    fp8 = [(DType.E4M3, DType.E4M3), (DType.E4M3, DType.E5M2), (DType.E5M2, DType.E4M3)]
    products = [(*pair, Major.K, Major.K) for pair in fp8]
    products += [(half, half, a, b) for half in (DType.BF16, DType.F16) for a in Major for b in Major]
    assert told == {(*product, out) for product in products for out in OUT_DTYPES}
    assert Accumulator("acc", DType.E5M2, DType.E4M3) in PRODUCTS


def test_without_arguments_ampere_multiplies_no_fp8_and_writes_none():
    specs = [each.metadata.kernel.plan.spec for each in Sm80FusedGemm.generate_operators(lambda _: True)]
    assert {spec.product.a_dtype for spec in specs} == {DType.BF16, DType.F16}
    assert not any(store.dtype.is_fp8 for spec in specs for store in spec.stores)


def test_metadata_states_what_operands_must_be():
    aligned = found(gemm(*gemm_operands(E4M3, out=BF16)), "90a")[0].metadata.operands
    assert (aligned.A.dtype.width, aligned.A.stride, aligned.A.divisibility) == (8, (0, 0, 1), 16)
    assert (aligned.B.stride, aligned.B.divisibility) == ((0, 1, 0), 16)
    assert (aligned.out.stride, aligned.out.divisibility) == ((0, 0, 1), 8)
    assert aligned.accumulator_type.width == 32


def test_an_unaligned_result_finds_kernels_that_write_by_element():
    a, b, _ = gemm_operands()
    out = torch.zeros(M, N + 1, dtype=BF16)[:, :N]
    unaligned = found(gemm(a, b, out), "90a")
    assert unaligned
    assert all(each.metadata.operator_name.endswith("_unaligned") for each in unaligned)
    assert all(each.supports(gemm(*gemm_operands())) for each in unaligned)
    aligned = found(gemm(*gemm_operands()), "90a")[0]
    assert "divisible by 8" in str(aligned.supports(gemm(a, b, out)).error)


def test_an_unaligned_operand_of_the_epilogue_finds_them_too():
    def added(accum, residual):
        D = accum + residual
        return D

    a, b, out = gemm_operands()
    shifted = torch.zeros(M * N + 1, dtype=BF16)[1:].view(M, N)
    args = {
        name: gemm(a, b, out, epilogue=EpilogueArguments(added, residual=residual, D=out))
        for name, residual in (("aligned", torch.zeros(M, N, dtype=BF16)), ("shifted", shifted))
    }
    assert found(args["shifted"], "100a")[0].metadata.design.aligned is False
    refusal = found(args["aligned"], "100a")[0].supports(args["shifted"])
    assert "is not a multiple of 16 bytes" in str(refusal.error)


REFUSED = {
    "fp64": (lambda: gemm(*gemm_operands(F64, out=F64), accumulator=F64), "accumulator_type is Float64"),
    "fp32 operands": (lambda: gemm(*gemm_operands(F32)), "supported: bf16 by bf16"),
    "two halves": (lambda: gemm(*gemm_operands(BF16, F16)), "supported: bf16 by bf16"),
    "e5m2 twice": (lambda: gemm(*gemm_operands(E5M2)), "e4m3 by e5m2 in either order"),
    "fp8 along M": (lambda: gemm(*gemm_operands(E4M3, layout="ttt")), "with K contiguous in both"),
    "fp16 sums": (lambda: gemm(*gemm_operands(F16), accumulator=F16), "these kernels add in Float32"),
    "int32 out": (lambda: gemm(*gemm_operands(out=torch.int32)), "out is torch.int32; it may be f32"),
    "a batch": (
        lambda: gemm(*(each[None].expand(2, -1, -1) for each in gemm_operands())),
        "A is a batch of 2; these kernels compute one product per launch",
    ),
    "nothing": (
        lambda: gemm(*(each[:0] if i != 1 else each for i, each in enumerate(gemm_operands()))),
        "is empty",
    ),
    "odd K": (
        lambda: gemm(matrix(M, 100, E4M3), matrix(100, N, E4M3, "n"), torch.zeros(M, N, dtype=BF16)),
        "base and pitch are multiples of 16 bytes",
    ),
    "a shifted A": (
        lambda: gemm(matrix(M, K + 16, BF16)[:, 1 : K + 1], *gemm_operands()[1:]),
        "base and pitch are multiples of 16 bytes",
    ),
    "scaled operands": (
        lambda: gemm(
            *(
                ops.ScaledOperand(
                    each,
                    torch.ones(M * K // 32),
                    ops.ScaleMode.Blockwise1x32,
                    ops.ScaleSwizzleMode.SwizzleNone,
                )
                for each in gemm_operands(E4M3)[:2]
            ),
            gemm_operands()[2],
        ),
        "A is a ScaledOperand; these operators take dense tensors",
    ),
}


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("target", TARGETS)
def test_what_no_kernel_takes_is_refused_in_a_sentence(make, sentence, target):
    args = make()
    assert found(args, target) == []
    assert sentence in str(check(args).error)
    status = found(gemm(*gemm_operands()), target)[0].supports(args, target)
    assert not status and str(status.error)


def test_arguments_of_another_operation_are_refused():
    a, b, out = gemm_operands()
    offsets = torch.tensor([M], dtype=torch.int32)
    grouped = ops.GroupedGemmArguments(a, b[None], out, F32, offsets)
    assert "is not a GEMM" in str(check(grouped).error)
    assert not found(gemm(a, b, out), "90a")[0].supports(grouped)
    assert found(grouped, "90a") == []


def test_the_source_is_that_of_the_operators_own_tile():
    operator = found(gemm(*gemm_operands()), "90a", lambda each: each.design.tile_shape[:2] == (128, 256))[0]
    assert operator.source.startswith('"""out0 = bf16(acc)')
    assert "TileConfig(Arch.SM90A, 128, 256" in operator.source


def test_a_manifest_keeps_and_filters_them():
    manifest = ops.Manifest()
    manifest.add_operators(ops.get_operators(gemm(*gemm_operands()), is_ours))
    assert len(manifest.filter_operators(target_sm="90a")) == COUNTS["90a"]
    assert len(manifest.filter_operators(gemm(*gemm_operands()))) == sum(COUNTS.values())
    assert manifest.filter_operators(gemm(*gemm_operands(E4M3))) == []


def test_performance_controls_are_refused():
    args = gemm(*gemm_operands())
    args.performance = ops.PerformanceControls()
    assert "performance controls" in str(check(args).error)
    assert found(args, "90a") == []


def test_an_epilogue_is_traced_once_for_all_operators(monkeypatch):
    def scaled(accum, scale):
        D = accum * scale
        return D

    calls = []
    convert = converting._convert
    monkeypatch.setattr(converting, "_convert", lambda *given: calls.append(given) or convert(*given))
    for _ in range(2):
        a, b, out = gemm_operands()
        args = gemm(a, b, out, epilogue=EpilogueArguments(scaled, scale=torch.ones(M, 1), D=out))
        assert len(ops.get_operators(args, is_ours)) == sum(COUNTS.values())
    assert len(calls) == 1


def test_tvm_ffi_may_be_off():
    options = ops.GlobalOptions()
    saved = options.save()
    options.use_tvm_ffi = False
    try:
        args = gemm(*gemm_operands(E4M3))
        assert len(found(args, "100a")) == COUNTS["100a"]
        assert found(args, "100a")[0].supports(args)
    finally:
        options.restore(saved)
