"""Transposed products: which specs have them, and what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.fx_walk.collect import collect
from cute_backend.memory_ops.partials import workspace_bytes
from cute_backend.planning import Alignment, Arch, TileConfig, offered, plan, tunable
from cute_backend.planning.cost import work_of
from cute_backend.planning.transposing import can_transpose, multiplied, transposed
from cute_backend.spec import Axis, EpilogueSpec, LoadKind, Major, Order, ProductKind
from support.epilogues import EPILOGUES, Problem


def spec_of(name: str) -> EpilogueSpec:
    epilogue = EPILOGUES[name]
    (report,) = collect(epilogue.fn, epilogue.inputs(Problem(256, 256, 256)))
    return report.regions[0].spec


def test_a_transposed_spec_has_rows_for_columns() -> None:
    spec = spec_of("bias_gelu_residual")
    spec = replace(spec, accumulators=(replace(spec.product, b_major=Major.K),))
    flipped = transposed(spec)
    kinds = {LoadKind.ROWVEC: LoadKind.COLVEC, LoadKind.COLVEC: LoadKind.ROWVEC}
    for was, load in zip(spec.loads, flipped.loads, strict=True):
        assert (load.name, load.kind) == (was.name, kinds.get(was.kind, was.kind))
        assert (load.stride_m, load.stride_n) == (was.stride_n, was.stride_m)
    assert {load.kind for load in spec.loads} == {LoadKind.ROWVEC, LoadKind.COLVEC, LoadKind.EXACT}
    assert [store.order for store in flipped.stores] == [Order.COLUMN]
    assert transposed(flipped) == spec


def test_majors_change_places() -> None:
    spec = spec_of("addmm_relu")
    spec = replace(spec, accumulators=(replace(spec.product, a_major=Major.MN, b_major=Major.K),))
    product = transposed(spec).product
    assert (product.a_major, product.b_major) == (Major.K, Major.MN)


def test_rows_are_reduced_as_columns() -> None:
    spec = spec_of("row_maxima")
    axes = {Axis.ROW: Axis.COLUMN, Axis.COLUMN: Axis.ROW, Axis.ALL: Axis.ALL}
    for axis, other in axes.items():
        stores = [
            store if store.reduce is None else replace(store, reduce=replace(store.reduce, axis=axis))
            for store in spec.stores
        ]
        flipped = transposed(replace(spec, stores=tuple(stores)))
        assert [store.reduce.axis for store in flipped.reductions if store.reduce] == [other]
    config = TileConfig(Arch.SM90A, 128, 160, transposed=True)
    # A row of 300 elements has 19 pieces of 16, the rows of a warp of the transposed product.
    assert workspace_bytes(plan(spec, config, Alignment.TMA), 100, 300) == 19 * 100 * 4 // 32 * 32 + 32 * (
        19 * 100 * 4 % 32 > 0
    )
    assert any(config.transposed for config in offered(Arch.SM90A, spec))


@pytest.mark.parametrize("name", ["swiglu", "greedy_token", "batched"])
def test_what_finds_places_or_has_more_than_one_product_has_none(name: str) -> None:
    spec = spec_of(name)
    assert not can_transpose(spec)
    assert not any(config.transposed for config in tunable(Arch.SM90A, spec))
    with pytest.raises(ValueError, match="has no transposed one"):
        transposed(spec)


def test_groups_of_rows_have_none() -> None:
    spec = spec_of("bias_gelu_residual")
    assert can_transpose(spec)
    assert not can_transpose(replace(spec, accumulators=(replace(spec.product, kind=ProductKind.GROUPED),)))


def test_a_transposed_tile_is_planned_and_costs_as_what_it_multiplies() -> None:
    spec = spec_of("bias_gelu_residual")
    config = TileConfig(Arch.SM90A, 128, 160, transposed=True)
    assert multiplied(spec, config) == transposed(spec)
    placed = plan(spec, config, Alignment.TMA).placements
    rowvecs = [load.name for load in spec.loads_of(LoadKind.ROWVEC)]
    assert {placed[name].name for name in rowvecs} == {"row_read"}, "one value for each row of a thread"
    # 160 rows are one tile's columns; 8192 columns are 64 tiles.
    work = work_of(config, spec, 160, 8192, 4096, 132)
    assert (work.waves, work.busy) == (1, 64 / 132)


def test_pairs_have_no_transposed_tile() -> None:
    with pytest.raises(ValueError, match="is transposed, of 2 products"):
        TileConfig(Arch.SM90A, 128, 64, products=2, transposed=True)
