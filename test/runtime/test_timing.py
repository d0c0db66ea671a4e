"""A kernel is timed as it is launched: on operands that its compiled host code takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.planning import Alignment, Arch, Plan, TileConfig, plan, tile_table
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.runtime.arguments.random_operands import (
    even_split,
    random_operands,
    random_tensor,
    skewed_split,
)
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.tuning.timing import arguments_of, taken_by
from cute_backend.spec import (
    Accumulator,
    Axis,
    Columns,
    DType,
    EpilogueSpec,
    Order,
    ProductKind,
    Reduction,
    Scaling,
    Store,
    WeightGroups,
)
from support.random_specs import BLOCK, specs
from support.runtime.handmade import make_spec
from support.runtime.layouts import check_layouts


def plans(spec: EpilogueSpec, configs: Iterable[TileConfig]) -> list[Plan]:
    return [plan(spec, config, Alignment.PLAIN) for config in configs]


@settings(max_examples=100, deadline=None)
@given(spec=specs(), m=st.integers(1, 5), n=st.integers(1, 40), k=st.integers(1, 40))
def test_operands_fit_what_a_kernel_is_compiled_for(spec: EpilogueSpec, m: int, n: int, k: int) -> None:
    # Outputs are dense, so their pitch is TMA's only where the sizes are.
    configs = tile_table(Arch.SM90A, spec)
    arguments = arguments_of(plans(spec, configs), 16 * m, 16 * n, k, torch.Generator().manual_seed(0))
    check_layouts(Kernel(plan(spec, configs[0], Alignment.TMA)), arguments)
    dense = spec.reductions or spec.product.is_block_scaled
    for kind in () if dense else (ProductKind.BATCHED, ProductKind.GROUPED):
        accumulators = tuple(replace(acc, kind=kind) for acc in spec.accumulators)
        stores = tuple(replace(store, form=WholePlane(Order.ROW)) for store in spec.stores)
        several = replace(spec, accumulators=accumulators, stores=stores)
        arguments = arguments_of(plans(several, configs), 16 * m, 16 * n, k, torch.Generator().manual_seed(0))
        check_layouts(Kernel(plan(several, configs[0], Alignment.TMA)), arguments)
        if kind is ProductKind.GROUPED:
            assert arguments[1].tolist() == [16 * m], "the one group has all rows"
    columns = BLOCK * n if any(load.blocks for load in spec.loads) else n
    arguments = arguments_of(plans(spec, configs), m, columns, k, torch.Generator().manual_seed(0))
    check_layouts(Kernel(plan(spec, configs[0], Alignment.PLAIN)), arguments)


@pytest.mark.parametrize("a", [Scaling.LINE, Scaling.SQUARE])
@pytest.mark.parametrize("b", [Scaling.LINE, Scaling.SQUARE])
@pytest.mark.parametrize("columns", [(Columns.ALL,), (Columns.EVEN, Columns.ODD)], ids=len)
def test_every_block_gets_a_scale(a: Scaling, b: Scaling, columns: tuple[Columns, ...]) -> None:
    accumulators = tuple(
        Accumulator(
            f"acc{i}", DType.E4M3, DType.E4M3, fast_accum=False, columns=each, a_scaling=a, b_scaling=b
        )
        for i, each in enumerate(columns)
    )
    spec = EpilogueSpec(accumulators, (), (), (Store("out0", "acc0", DType.BF16),))
    generator = torch.Generator().manual_seed(0)
    check_operands(spec, *random_operands(spec, 131, 272, 400, generator))
    configs = tile_table(Arch.SM90A, spec)
    arguments = arguments_of(plans(spec, configs), 144, 272, 400, generator)
    check_layouts(Kernel(plan(spec, configs[0], Alignment.TMA)), arguments)


def test_packed_heads_of_several_products_get_operands() -> None:
    """B of each is (K, heads, columns)."""
    accumulators = tuple(
        Accumulator(f"acc{i}", DType.BF16, DType.BF16, width=256, b_block=64) for i in range(2)
    )
    stores = tuple(Store(f"out{i}", acc.name, DType.BF16) for i, acc in enumerate(accumulators))
    spec = EpilogueSpec(accumulators, (), (), stores)
    generator = torch.Generator().manual_seed(0)
    check_operands(spec, *random_operands(spec, 144, 512, 64, generator))
    configs = tile_table(Arch.SM90A, spec)
    arguments = arguments_of(plans(spec, configs), 144, 512, 64, generator)
    check_layouts(Kernel(plan(spec, configs[0], Alignment.TMA)), arguments)


def test_scales_of_blocks_lie_as_torch_takes_them() -> None:
    accumulator = Accumulator(
        "acc", DType.E4M3, DType.E4M3, fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE
    )
    spec = EpilogueSpec((accumulator,), (), (), (Store("out0", "acc", DType.BF16),))
    lines = replace(spec, accumulators=(replace(accumulator, b_scaling=Scaling.LINE),))
    generator = torch.Generator().manual_seed(0)
    (_, of_a), (_, of_b), _ = random_operands(spec, 132, 272, 400, generator)
    (_, of_b_lines) = random_operands(lines, 132, 272, 400, generator)[1]
    assert (of_a.shape, of_a.stride()) == ((132, 4), (1, 132))
    assert (of_b.shape, of_b.stride()) == ((4, 3), (1, 4))
    assert (of_b_lines.shape, of_b_lines.stride()) == ((4, 272), (272, 1))


def test_scales_of_groups_lie_as_libraries_store_them() -> None:
    groups = WeightGroups(64, DType.BF16, DType.BF16, DType.U8, DType.BF16)
    acc = Accumulator("acc", DType.BF16, DType.U8, weight_groups=groups)
    spec = EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.BF16),))
    given = random_operands(spec, 5, 272, 320, torch.Generator().manual_seed(0))
    check_operands(spec, *given)
    assert [(each.shape, each.stride()) for each in given[1][1:]] == [((5, 272), (1, 5))] * 2


@pytest.mark.parametrize("scaled", [False, True])
def test_groups_are_of_one_size_or_the_first_has_half_of_the_rows(scaled: bool) -> None:
    accumulator = Accumulator("acc", DType.E4M3, DType.E4M3, fast_accum=True, kind=ProductKind.GROUPED)
    if scaled:
        accumulator = replace(accumulator, a_scaling=Scaling.MX, b_scaling=Scaling.MX)
    spec = EpilogueSpec((accumulator,), (), (), (Store("out0", "acc", DType.BF16),))
    a, b, loads = random_operands(spec, 300, 272, 400, torch.Generator().manual_seed(0), groups=7)
    check_operands(spec, a, b, loads)
    assert a[1].tolist() == even_split(300, 7).tolist() == [42, 85, 128, 171, 214, 257, 300]
    assert skewed_split(300, 7).tolist() == [150, 175, 200, 225, 250, 275, 300]
    assert even_split(9, 1).tolist() == skewed_split(9, 1).tolist() == [9]
    if scaled:
        tile = Scaling.MX.tiled(1, 400)
        assert a[2].numel() >= 7 * tile, "a tile for each group"


@given(m=st.integers(1, 300), n=st.integers(1, 300))
def test_partials_of_every_tile_have_room(m: int, n: int) -> None:
    stores = tuple(
        Store(f"{kind.name}_{axis.value}", "acc", dtype, form=Reduction(axis, kind))
        for axis in Axis
        for kind, dtype in ((reductions.ARGMAX, DType.I64), (reductions.LOGSUMEXP, DType.F32))
    )
    spec = EpilogueSpec((Accumulator("acc", DType.BF16, DType.BF16),), (), (), stores)
    configs = tile_table(Arch.SM90A, spec)
    *arguments, room = arguments_of(plans(spec, configs), m, n, 8, torch.Generator().manual_seed(0))
    check_layouts(Kernel(plan(spec, configs[0], Alignment.PLAIN)), [*arguments, room])
    for config in configs:
        rows, columns = -(-n // config.tile_n) * m, -(-m // config.warp_rows) * n
        whole = -(-m // config.cta_rows) * config.tile_warps * -(-n // config.tile_n)
        assert room.numel() >= 16 * (rows + columns) + 20 * whole


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.int8, torch.bool]
)
@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 8), (0, 1)), ((3, 8), (1, 3)), ((), ()), ((40, 1), (7, 9))]
)
def test_a_random_tensor_has_any_layout_and_many_values(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tensor = random_tensor(shape, strides, dtype, torch.Generator().manual_seed(1))
    assert tensor.shape == shape and tensor.stride() == strides and tensor.dtype is dtype
    values = tensor.double()
    assert values.isfinite().all()
    assert len(shape) == 0 or len(values.unique()) > 1


def test_a_kernel_of_whole_k_takes_no_workspace_beside_one_that_leaves_sums() -> None:
    spec = EpilogueSpec(
        (Accumulator("acc", DType.BF16, DType.BF16),), (), (), (Store("out0", "acc", DType.BF16),)
    )
    whole = TileConfig(Arch.SM90A, 128, 192)
    parts = replace(whole, split_k=6)
    arguments = arguments_of(plans(spec, [whole, parts]), 100, 200, 64, torch.Generator().manual_seed(0))
    first, second = (taken_by(each, arguments) for each in plans(spec, (whole, parts)))
    assert [each.shape for each in first] == [(100, 64), (64, 200), (100, 200)]
    assert second == arguments and second[-1].numel() == 6 * 100 * 200 * 4


def test_what_a_user_draws_next_does_not_change() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    spec = make_spec()
    arguments_of(plans(spec, tile_table(Arch.SM90A, spec)), 16, 16, 16, torch.Generator().manual_seed(0))
    assert torch.equal(torch.randn(3), expected)


def test_kernels_that_count_tiles_are_timed_beside_others() -> None:
    """Tiles of the transposed product, and those that leave sums in memory, take no counters."""
    largest = Store("out0", "acc", DType.F32, form=Reduction(Axis.ROW, reductions.MAX))
    spec = EpilogueSpec((Accumulator("acc", DType.BF16, DType.BF16),), (), (), (largest,))
    counting = TileConfig(Arch.SM90A, 128, 64)
    others = replace(counting, transposed=True), TileConfig(Arch.SM90A, 64, 64, split_k=6)
    for configs in ((counting, *others), (*others, counting), others):
        arguments = arguments_of(plans(spec, configs), 200, 300, 64, torch.Generator().manual_seed(0))
        for config in configs:
            kernel = Kernel(plan(spec, config, Alignment.PLAIN))
            check_layouts(kernel, taken := taken_by(kernel.plan, arguments))
            if config is counting:
                assert len(taken[-1]) >= 13 and not taken[-1].any()
