"""Transposed products: which specs have them, and what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.memory_ops.partials import workspace_bytes
from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, offered, plan, tunable
from cute_backend.planning.cost import cost, work_of
from cute_backend.planning.rules import suited
from cute_backend.planning.targets import Shape
from cute_backend.planning.transposing import Tiled, can_transpose, transposed
from cute_backend.spec import Axis, DType, LoadKind, Major, Order, ProductKind
from support.shipped import traced_spec


def test_a_transposed_spec_has_rows_for_columns() -> None:
    spec = traced_spec("bias_gelu_residual")
    spec = replace(spec, accumulators=(replace(spec.product, b_major=Major.K),))
    flipped = transposed(spec)
    kinds = {LoadKind.ROWVEC: LoadKind.COLVEC, LoadKind.COLVEC: LoadKind.ROWVEC}
    for was, load in zip(spec.loads, flipped.loads, strict=True):
        assert (load.name, load.kind) == (was.name, kinds.get(was.kind, was.kind))
        assert (load.stride_m, load.stride_n) == (was.stride_n, was.stride_m)
    assert {load.kind for load in spec.loads} == {LoadKind.ROWVEC, LoadKind.COLVEC, LoadKind.EXACT}
    assert [store.form.order for store in flipped.stores] == [Order.COLUMN]
    assert transposed(flipped) == spec


def test_majors_change_places() -> None:
    spec = traced_spec("addmm_relu")
    spec = replace(spec, accumulators=(replace(spec.product, a_major=Major.MN, b_major=Major.K),))
    product = transposed(spec).product
    assert (product.a_major, product.b_major) == (Major.K, Major.MN)


def test_rows_are_reduced_as_columns() -> None:
    spec = traced_spec("row_maxima")
    axes = {Axis.ROW: Axis.COLUMN, Axis.COLUMN: Axis.ROW, Axis.ALL: Axis.ALL}
    for axis, other in axes.items():
        stores = [
            replace(store, form=replace(found, axis=axis)) if (found := store.form.reduction) else store
            for store in spec.stores
        ]
        flipped = transposed(replace(spec, stores=tuple(stores)))
        assert [each.axis for each in flipped.reductions.values()] == [other]
    config = TileConfig(Arch.SM90A, 128, 160, transposed=True)
    # A row of 300 elements has 19 pieces of 16, the rows of a warp of the transposed product.
    assert workspace_bytes(plan(spec, config, Alignment.TMA), 100, 300) == 19 * 100 * 4 // 32 * 32 + 32 * (
        19 * 100 * 4 % 32 > 0
    )
    assert any(config.transposed for config in offered(Arch.SM90A, spec))


@pytest.mark.parametrize("name", ["swiglu7", "greedy_token", "batched"])
def test_what_finds_places_or_shares_a_b_has_none(name: str) -> None:
    spec = traced_spec(name)
    assert not can_transpose(spec)
    assert not any(config.transposed for config in tunable(Arch.SM90A, spec))
    with pytest.raises(ValueError, match="has no transposed one"):
        transposed(spec)


def test_groups_of_rows_have_none() -> None:
    spec = traced_spec("bias_gelu_residual")
    assert can_transpose(spec)
    assert not can_transpose(replace(spec, accumulators=(replace(spec.product, kind=ProductKind.GROUPED),)))


def test_a_transposed_tile_is_planned_and_costs_as_what_it_multiplies() -> None:
    spec = traced_spec("bias_gelu_residual")
    config = TileConfig(Arch.SM90A, 128, 160, transposed=True)
    assert Tiled(spec, config).computed == transposed(spec)
    placed = plan(spec, config, Alignment.TMA).placements
    rowvecs = [load.name for load in spec.loads_of(LoadKind.ROWVEC)]
    assert {placed[name].name for name in rowvecs} == {"row_read"}, "one value for each row of a thread"
    # 160 rows are one tile's columns; 8192 columns are 64 tiles.
    work = work_of(Tiled(spec, config), Sizes(160, 8192, 4096), 132)
    assert (work.waves, work.busy) == (1, 64 / 132)


@pytest.mark.parametrize("name", ["swiglu", "swiglu_chunk"])
def test_both_products_of_a_pair_change_places(name: str) -> None:
    spec = traced_spec(name)
    turned = [replace(each, a_major=each.b_major, b_major=each.a_major) for each in spec.accumulators]
    assert list(transposed(spec).accumulators) == turned
    assert transposed(transposed(spec)) == spec


def test_the_rows_of_a_pair_lie_below_each_other() -> None:
    """A tile for 128 columns of one product has 64 of each product of a pair, and as many accumulators."""
    (pair,) = suited(Arch.SM90A, (Shape(128, 88, subtile_n=8, transposed=True),), traced_spec("swiglu_chunk"))
    single = TileConfig(Arch.SM90A, 128, 88, transposed=True)
    assert (pair.tile_m, pair.tile_n, pair.products, pair.pieces) == (64, 88, 2, 1)
    assert (pair.mma_m, pair.mma_n, pair.ab_stage_bytes) == (
        single.mma_m,
        single.mma_n,
        single.ab_stage_bytes,
    )
    assert (pair.warpgroups, pair.thread_accumulators) == (1, 88)
    assert pair.name == "64x88x2_1x1_by8_transposed"
    assert pair.words.startswith("2 accumulators of 64 by 88 of the transposed product, ")


def test_a_pair_of_64_rows_of_the_mma_has_no_tile() -> None:
    """Each product would have 32 rows, and a warpgroup multiplies 64."""
    assert (
        suited(Arch.SM90A, (Shape(64, 88, subtile_n=8, transposed=True),), traced_spec("swiglu_chunk")) == ()
    )


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM80, Arch.SM120A])
def test_weights_that_are_converted_have_transposed_pairs(arch: Arch) -> None:
    """And none whose columns lie side by side, or of less than 64 rows of each weight."""
    spec = traced_spec("swiglu_chunk")
    stored = {"a_dtype": DType.BF16, "b_dtype": DType.I8}
    converted = replace(spec, accumulators=tuple(replace(each, **stored) for each in spec.accumulators))
    shapes = [Shape(128, 32, transposed=True), Shape(64, 32, transposed=True), Shape(128, 64)]
    (pair,) = suited(arch, shapes, converted)
    assert (pair.tile_m, pair.products, pair.converts) == (64, 2, True)
    able = [each.transposed for each in suited(arch, shapes, spec)]
    assert any(able) is (arch is Arch.SM90A), "of weights in 16 bits, mma.sync has them side by side"


def test_a_pair_reads_both_weights_and_costs_as_much() -> None:
    """Both kinds of tile read the same bytes; of 40 rows, one wastes 24 of 64, and the other none."""
    spec = traced_spec("swiglu_chunk")
    flat = TileConfig(Arch.SM90A, 64, 64, products=2)
    upright = replace(flat, tile_n=40, subtile_n=8, transposed=True)
    of_flat, of_upright = (work_of(Tiled(spec, each), Sizes(40, 8192, 4096), 132) for each in (flat, upright))
    assert of_flat.moved == of_upright.moved
    assert of_upright.waves == of_flat.waves == 1 and of_upright.busy == of_flat.busy
    past = work_of(Tiled(spec, upright), Sizes(40, 8192 - 24, 4096), 132).beyond
    assert past == pytest.approx(2 * 24 / 128), "the rows beyond N of both weights"


@pytest.mark.parametrize(
    ("m", "n"), [(7, 2304), (7, 18944), (130, 9216), (130, 18944), (257, 9216), (257, 18944)]
)
def test_few_rows_of_a_pair_take_a_transposed_tile(m: int, n: int) -> None:
    spec = traced_spec("swiglu_chunk")
    dtypes = {"a_dtype": DType.BF16, "b_dtype": DType.BF16}
    spec = replace(spec, accumulators=tuple(replace(each, **dtypes) for each in spec.accumulators))
    chosen = choose(Arch.SM90A, spec, Sizes(m, n, 3584), 132)
    assert chosen.transposed and chosen.products == 2 and chosen.thread_accumulators <= 192
    others = [each for each in offered(Arch.SM90A, spec) if not each.transposed]
    sizes = spec, Sizes(m, n, 3584), 132
    assert cost(chosen, *sizes, careful=True) < min(cost(each, *sizes, careful=True) for each in others)
