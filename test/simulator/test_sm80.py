"""The template on mma.sync, run on the simulated machine: exact arithmetic, so right to the bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cutlass
import pytest
import torch

from cute_backend.errors import UsageError
from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import Alignment, Arch, Stages, TileConfig, plan
from cute_backend.planning.naming import PARTS
from cute_backend.planning.tiles import CTA_SMEM_BYTES
from cute_backend.presentation.terminal import launch_table, to_text
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.source import text_of
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import (
    Axis,
    DType,
    EpilogueSpec,
    Major,
    Order,
    ProductKind,
    Reduction,
    Scaling,
    Store,
    Stride,
)
from cute_backend.templates.crew import WARP
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm80 import Sm80Gemm
from cute_backend.templates.split_sums import SplitGemm, SumGemm
from cute_backend.templates.staged import L2_LINE
from support.bare_epilogue import Bare, stages_for
from support.simulator import pairs
from support.simulator.exact import (
    RESIDUAL,
    batched,
    batches,
    check_exact,
    machine,
    operands,
    promoted,
    scaled_residual,
    sm80,
    wrong,
)

FEEDS = pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM120A], ids=["cp.async", "TMA"])


@pytest.mark.sweep(2)
@FEEDS
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (128, 128), (256, 128)], ids=str)
def test_edges_in_every_direction(shape: tuple[int, int], alignment: Alignment, arch: Arch) -> None:
    if arch is Arch.SM120A and shape == (256, 128):
        pytest.skip("it has no room for planes there")
    config = TileConfig(arch, *shape)
    problem = (config.tile_m + 40, config.tile_n + 24, 208)  # k: three tiles and a part of one
    if alignment is Alignment.PLAIN:
        problem = (config.tile_m + 3, config.tile_n + 5, 160)
    launch = check_exact(scaled_residual(DType.BF16, DType.BF16), problem, machine(config))
    assert launch.kernel.plan.alignment is alignment


@pytest.mark.sweep(1)
@pytest.mark.parametrize("k", [64, 200])
def test_two_stages_where_shared_memory_is_small(k: int) -> None:
    """One k tile, which is copied ahead of the first of the next tile, and several."""
    config = TileConfig(Arch.SM86, 128, 128)
    assert check_exact(scaled_residual(DType.BF16, DType.BF16), (168, 152, k), machine(config))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("a_major", Major, ids=lambda major: f"A along {major.value}")
@pytest.mark.parametrize("b_major", Major, ids=lambda major: f"B along {major.value}")
@FEEDS
def test_operands_along_either_mode(arch: Arch, a_major: Major, b_major: Major, dtype: DType) -> None:
    """Of two tiles each way, of two boxes of 64 rows or columns where these are contiguous."""
    spec = scaled_residual(dtype, dtype, a_major, b_major)
    check_exact(spec, (136, 72, 72), machine(TileConfig(arch, 128, 64)))
    check_exact(spec, (72, 136, 72), machine(TileConfig(arch, 64, 128)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("problem", [(1, 16, 8), (1, 136, 1000), (64, 8, 64), (3, 72, 400)], ids=str)
def test_very_few_rows_or_columns(problem: tuple[int, int, int]) -> None:
    """K down to one vector: fewer k tiles than stages, under which the first planes come."""
    check_exact(scaled_residual(DType.BF16, DType.BF16), problem, machine(sm80(64, 64)))


@pytest.mark.sweep(1)
@FEEDS
def test_sizes_that_end_within_a_vector(arch: Arch) -> None:
    """Rows of A and B, and of the plane, are longer than K and N say, so their starts are aligned."""
    spec, (m, n, k) = scaled_residual(DType.BF16, DType.BF16), (70, 77, 101)
    [a], [b], [scale_a, scale_b, plane] = operands(spec, m, 80, 104)
    given = [a[:, :k]], [b[:k, :n]], [scale_a, scale_b[:n], plane[:, :n]]
    outputs, _ = run_region(spec, *given, machine(TileConfig(arch, 64, 64)))
    for actual, expected in zip(outputs, replay(spec, *given), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)


def test_planes_by_columns() -> None:
    spec = scaled_residual(DType.BF16, DType.BF16)
    turned = replace(RESIDUAL, stride_m=Stride.ONE, stride_n=Stride.OTHER)
    by_columns = WholePlane(Order.COLUMN)
    stores = (Store("out0", "t2", DType.BF16, by_columns), Store("out1", "t2", DType.F32, by_columns))
    spec = replace(spec, loads=(*spec.loads[:2], turned), stores=stores)
    a, b, (scale_a, scale_b, plane) = operands(spec, 136, 72, 64)
    given = a, b, [scale_a, scale_b, plane.t().contiguous().t()]
    outputs, launch = run_region(spec, *given, machine(sm80(64, 64)))
    assert launch.kernel.plan.alignment is Alignment.TMA
    for actual, expected in zip(outputs, replay(spec, *given), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)


@pytest.mark.sweep(1)
@FEEDS
def test_batches(arch: Arch) -> None:
    """With planes, a value of each batch, and the largest of each row."""
    spec = batched(Major.K, Major.MN)
    a, b, loads = batches(spec, 3, 72, 72, 80)
    outputs, _ = run_region(spec, a, b, loads, machine(TileConfig(arch, 64, 64)))
    for actual, expected in zip(outputs, replay(spec, a, b, loads), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", [pairs.TWO, pairs.NEIGHBOURS], ids=["two", "neighbours"])
@FEEDS
def test_pairs_of_products(arch: Arch, columns: tuple) -> None:
    """Which share A, with reductions over rows and over columns."""
    config = TileConfig(arch, 64, 64, products=2)
    spec = pairs.difference(columns, DType.BF16)
    pairs.check(spec, replace(config, b_columns=spec.b_columns), 104, 88, 208)


def test_outputs_have_one_stage() -> None:
    """A warp takes them from there itself before it goes on; the rest of the memory is A's and B's."""
    stages = stages_for(Bare(), sm80(128, 128))
    assert (stages.ab, stages.exact, stages.row, stages.store) == (4, 0, 0, 1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("problem", [(136, 136, 200), (1, 16, 8)], ids=str)
def test_two_ctas_share_a_multiprocessor(problem: tuple[int, int, int]) -> None:
    """Each has half of its shared memory, in which A and B have two stages."""
    config = sm80(128, 128, occupancy=2)
    whole = config.target.smem_bytes + CTA_SMEM_BYTES
    assert 2 * (config.smem_bytes + CTA_SMEM_BYTES) == whole and config.least_ab_stages == 2
    check_exact(scaled_residual(DType.BF16, DType.BF16), problem, machine(config))


def test_planes_are_asked_for_before_the_products() -> None:
    """The lines of a warp's 32 rows, a lane's share each time, if not all visits' copies begin that early."""
    lines = 32 * 128 * RESIDUAL.dtype.bits // 8 // L2_LINE
    spec = scaled_residual(DType.BF16, DType.BF16)
    for config, shares in ((sm80(128, 128, occupancy=2), lines // WARP), (sm80(64, 64), 0)):
        before, _ = build(Kernel(plan(spec, config, Alignment.TMA))).ptx.split("mma.sync", 1)
        assert before.count("prefetch.global.L2") == shares


@pytest.mark.sweep(1)
@pytest.mark.parametrize("a_major", Major, ids=lambda major: f"A along {major.value}")
@pytest.mark.parametrize("b_major", Major, ids=lambda major: f"B along {major.value}")
@pytest.mark.parametrize(
    "problem",
    [
        (136, 136, 208),
        (128, 128, 192),
        (72, 128, 192),
        (128, 72, 192),
        (128, 128, 208),
        (128, 128, 64),
        (128, 128, 40),
        (72, 72, 64),
    ],
    ids=str,
)
def test_k_tiles_inside_the_operands_and_at_their_edges(
    problem: tuple[int, int, int], b_major: Major, a_major: Major
) -> None:
    """Which two CTAs of a multiprocessor copy by different code: sizes that are multiples of a tile's, each
    size that is not, K of one k tile, and less."""
    spec = scaled_residual(DType.BF16, DType.BF16, a_major, b_major)
    check_exact(spec, problem, machine(sm80(64, 64, occupancy=2)))


def test_the_k_loop_has_two_bodies_only_where_ctas_share_a_multiprocessor() -> None:
    spec = scaled_residual(DType.BF16, DType.BF16)
    kernels = [Kernel(plan(spec, sm80(64, 64, occupancy=ctas), Alignment.TMA)) for ctas in (1, 2)]
    one, two = (build(kernel).ptx.count("mma.sync") for kernel in kernels)
    assert two == 2 * one


@pytest.mark.exhaustive
@FEEDS
@pytest.mark.parametrize("shape", [(64, 64), (128, 128)], ids=str)
def test_nothing_is_loaded_between_the_last_product_and_the_first_store(
    shape: tuple[int, int], arch: Arch
) -> None:
    """From global memory, by a load that a warp waits for. Planes were copied before, and rowvecs read."""
    spec = scaled_residual(DType.BF16, DType.BF16)
    _, tail = build(Kernel(plan(spec, TileConfig(arch, *shape), Alignment.TMA))).ptx.rsplit("mma.sync", 1)
    head, _ = tail.split("st.global", 1)
    assert "st.shared" in head or "stmatrix" in head
    assert "ld.global" not in head


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", [64, 128, 200])
def test_batches_where_two_ctas_share_a_multiprocessor(k: int) -> None:
    """Of rows that end within a tile, behind which the next product of the batch begins."""
    spec = batched(Major.K, Major.MN)
    a, b, loads = batches(spec, 3, 72, 136, k)
    outputs, _ = run_region(spec, a, b, loads, machine(sm80(64, 64, occupancy=2)))
    for actual, expected in zip(outputs, replay(spec, a, b, loads), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [pairs.TWO, pairs.NEIGHBOURS], ids=["two", "neighbours"])
@pytest.mark.parametrize("problem", [(128, 128, 128), (104, 88, 208)], ids=str)
def test_pairs_of_products_where_two_ctas_share_a_multiprocessor(
    problem: tuple[int, int, int], columns: tuple
) -> None:
    spec = pairs.difference(columns, DType.BF16)
    config = sm80(64, 64, products=2, occupancy=2)
    pairs.check(spec, replace(config, b_columns=spec.b_columns), *problem)


def test_ctas_that_leave_no_registers_to_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="has registers for the accumulators of 256 threads: at most 1 CTAs"):
        sm80(256, 128, occupancy=2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize(
    ("fast", "shape"), [(True, (64, 64)), (True, (128, 128)), (False, (64, 64)), (False, (64, 128))], ids=str
)
def test_fp8_on_ada(fast: bool, shape: tuple[int, int], alignment: Alignment) -> None:
    spec = scaled_residual() if fast else promoted(scaled_residual())
    config = TileConfig(Arch.SM89, *shape)
    n = config.tile_n + (24 if alignment is Alignment.TMA else 5)
    problem = (config.tile_m + 8, n, 304)  # k: two tiles and a part of one
    launch = check_exact(spec, problem, machine(config))
    assert launch.kernel.plan.alignment is alignment
    assert ("Sm80Promoted()" in text_of(launch.kernel)) is not fast


def test_planes_and_reductions_with_the_instructions_of_rtx_blackwell() -> None:
    """stmatrix to the boxes of planes, and a kernel that finishes reductions by programmatic launch."""
    row_max = Store("out1", "t2", DType.F32, form=Reduction(Axis.ROW, reductions.MAX))
    spec = scaled_residual()
    spec = replace(spec, stores=(*spec.stores, row_max))
    launch = check_exact(spec, (72, 136, 304), machine(TileConfig(Arch.SM120A, 64, 64)))
    assert launch.kernel.arch is Arch.SM120A


def test_e5m2_and_blocks_with_scales_are_refused_by_name_on_ada() -> None:
    ada = TileConfig(Arch.SM89, 64, 64)
    spec = scaled_residual(DType.E5M2)
    refused = r"^no MMA of sm_89 multiplies e5m2 by e4m3, as acc does; supported: bf16, e4m3, f16, i8$"
    with pytest.raises(UsageError, match=refused):
        run_region(spec, *operands(spec, 16, 16, 16), machine(ada))
    spec = promoted(scaled_residual())
    blocks = replace(spec.product, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE)
    with pytest.raises(
        ValueError, match="no mainloop of sm_89 scales blocks of 1x128 by 128x128, as acc has them"
    ):
        emit(plan(EpilogueSpec((blocks,), (), (), (Store("out0", "acc", DType.BF16),)), ada, Alignment.TMA))


def test_fp8_is_refused_by_name() -> None:
    spec = scaled_residual()
    with pytest.raises(
        UsageError, match=r"^no MMA of sm_80 multiplies e4m3 by e4m3, as acc does; supported: bf16, f16, i8$"
    ):
        run_region(spec, *operands(spec, 16, 16, 16), machine(sm80(64, 64)))
    spec = scaled_residual(DType.BF16, DType.BF16)
    spec = replace(spec, stores=(replace(spec.stores[0], dtype=DType.E4M3),))
    with pytest.raises(UsageError, match=r"^sm_80 has no conversions of e4m3, which out0 is$"):
        run_region(spec, *operands(spec, 16, 16, 16), machine(sm80(64, 64)))


def test_tiles_that_need_tma_are_refused() -> None:
    with pytest.raises(ValueError, match="has ping-pong or a cluster of 2 CTAs; warps that multiply by "):
        Sm80Gemm(Any, sm80(64, 64, cluster_m=2), Stages(4))


def test_columns_of_batches_are_refused() -> None:
    """Rows of a batch begin at any multiple of M, which copies of 16 bytes may not."""
    loads = (SmemOperand("exact0", cutlass.BFloat16, Order.COLUMN),)
    with pytest.raises(ValueError, match="exact0 of a batched product has columns in memory, where a batch"):
        Sm80Gemm(SimpleNamespace(shared_loads=loads), sm80(64, 64), Stages(4), kind=ProductKind.BATCHED)


@pytest.mark.sweep(1)
@FEEDS
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_sums_of_parts_of_k_through_memory(parts: int, alignment: Alignment, arch: Arch) -> None:
    """Of 7 k tiles, the last one not full: with 4 parts one k tile is missing, with 8 a whole part."""
    config = TileConfig(arch, 64, 64, split_k=parts)
    problem = (72, 136, 7 * 64 - 24) if alignment is Alignment.TMA else (67, 71, 7 * 64 - 24)
    launch = check_exact(scaled_residual(DType.BF16, DType.BF16), problem, machine(config))
    assert launch.kernel.plan.alignment is alignment
    shown = to_text(launch_table(launch))
    assert (
        "kernel that multiplies the parts of K: grid" in shown and "kernel that adds them up: grid" in shown
    )
    assert PARTS in launch.report.entry and PARTS not in launch.summing.entry


@pytest.mark.exhaustive
def test_sums_of_parts_in_large_tiles_and_along_other_modes() -> None:
    spec = scaled_residual(DType.F16, DType.F16, Major.MN, Major.MN)
    check_exact(spec, (72, 136, 200), machine(sm80(128, 128, split_k=2, occupancy=2)))
    ada = TileConfig(Arch.SM89, 64, 64, split_k=4)
    check_exact(promoted(scaled_residual()), (1, 72, 1040), machine(ada))


def test_sums_that_no_tile_leaves_in_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="tile 64x64_1x1 leaves no sums in memory for a second kernel"):
        SplitGemm(Sm80Gemm, SimpleNamespace(), sm80(64, 64), Stages(4))


def test_tables_beside_sums_in_memory_are_refused() -> None:
    """Warps copy boxes of a plane, and know nothing of rows that repeat."""
    loads = (SmemOperand("exact0", cutlass.BFloat16, repeats=True),)
    with pytest.raises(ValueError, match="the tables exact0 are loaded by TMA, but warps copy"):
        SumGemm(SimpleNamespace(shared_loads=loads), sm80(64, 64), Stages(0), 2)
