"""The estimate of the registers of an epilogue thread."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, plan
from cute_backend.planning.budget import MARGIN, MARGIN_OF_TENSOR_MEMORY
from cute_backend.planning.converting import CONVERTED, PAIR_IN_GROUPS
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.promoting import Promoted
from cute_backend.planning.registers import (
    COPYING,
    READING,
    WRITING,
    Registers,
    hoist_budget,
    holds_values,
    leaves_registers,
    spare_registers,
)
from cute_backend.planning.sum_scales import SumsInRegisters
from cute_backend.spec import DType, EpilogueSpec, Op, ProductKind, Scaling, Store, WeightGroups
from support.small_specs import block_mean, block_softmax, by_element, exact, row_maximum, rowvec, spec_of

HOPPER, BLACKWELL = TileConfig(Arch.SM90A, 128, 128), TileConfig(Arch.SM100A, 128, 128)
LINES = {"a_scaling": Scaling.LINE, "b_scaling": Scaling.LINE}


def test_scales_and_zeros_of_a_weight_are_counted_and_take_time() -> None:
    """Of two rows of each 64: of a chunk of groups, of the next one, of the groups of half a k tile, and
    their addresses."""
    small = WeightGroups(32, DType.BF16, DType.BF16)
    wide = WeightGroups(128, DType.F32, DType.F32, DType.I8, DType.BF16)
    tile = TileConfig(Arch.SM90A, 64, 64, transposed=True, converts=True)
    plain, of_small, of_wide = (mainloop_of(_converted(each), tile.target) for each in (None, small, wide))
    assert plain.registers(tile) == CONVERTED
    assert of_small.registers(tile) == CONVERTED + 2 * (1 + 1 + 2 + 2)
    assert of_wide.registers(tile) == CONVERTED + 2 * 2 * (1 + 1 + 1 + 2)
    pair, tall = replace(tile, products=2), replace(tile, tile_m=256)
    assert plain.registers(pair) == CONVERTED, "half as much of K at a time"
    assert of_small.registers(pair) == CONVERTED + PAIR_IN_GROUPS + 2 * 2 * (1 + 1 + 2 + 2)
    few = replace(tile, tile_n=8, subtile_n=8)
    assert plain.registers(few) == CONVERTED + few.thread_accumulators, "a second set"
    assert of_small.registers(tall) == 2 * of_small.registers(tile), "two blocks of one"
    assert plain.microseconds(pair) == 2 * plain.microseconds(tile)
    times = [each.microseconds(tile) for each in (plain, of_small, of_wide)]
    assert times == sorted(times) and times[0] < times[1] < times[2]


def test_two_warpgroups_compute_groups_in_fp32_where_they_take_less_time() -> None:
    """16 x 6144 x 4096 of int8 in groups took 18.0 us in 128 x 16 with two parts of K, 21.1 in 64 x 16."""
    groups = WeightGroups(128, DType.F32, DType.F32, DType.I8, DType.BF16)
    assert choose(Arch.SM90A, _converted(groups), Sizes(16, 6144, 4096), 132).sharing == 2


def _converted(groups: WeightGroups | None) -> EpilogueSpec:
    spec = spec_of(dtype=DType.BF16)
    return replace(spec, accumulators=(replace(spec.product, b_dtype=DType.I8, weight_groups=groups),))


def test_what_a_thread_has_of_a_visit_is_counted() -> None:
    """16 elements of each plane in subtiles of 32 columns on Hopper, and 32 on Blackwell."""
    bare = spec_of(exact("exact0"), rowvec("rowvec0"), dtype=DType.BF16)
    assert Registers.of(bare, HOPPER, Alignment.TMA) == Registers(64, sums=0, fragments=0, steps=0, copying=0)
    assert Registers.of(bare, HOPPER, Alignment.PLAIN).fragments == 2 * 16, "addresses"
    assert Registers.of(bare, replace(HOPPER, subtile_n=16), Alignment.PLAIN).fragments == 2 * 8
    split = spec_of(by_element("exact0"), dtype=DType.BF16)
    assert Registers.of(split, HOPPER, Alignment.TMA).fragments == 2 * 16
    saved = replace(bare, stores=(*bare.stores, replace(bare.stores[0], name="out1")))
    assert Registers.of(saved, HOPPER, Alignment.TMA).fragments == 2 * 16, "a second plane"
    reduced = replace(bare, stores=(*bare.stores, row_maximum()))
    assert Registers.of(reduced, HOPPER, Alignment.TMA).fragments == 16
    alone = replace(bare, stores=(row_maximum(),))
    assert Registers.of(alone, HOPPER, Alignment.TMA).fragments == 0
    assert Registers.of(saved, BLACKWELL, Alignment.TMA) == Registers(32, 0, fragments=64, steps=0, copying=0)
    assert Registers.of(bare, TileConfig(Arch.SM80, 128, 64), Alignment.TMA).copying == COPYING


def test_addresses_of_narrow_visits_are_counted_under_ping_pong() -> None:
    """Those of 22 visits of 8 columns, and none of 7 of 24, nor by element, where visits are a loop's."""
    tile = TileConfig(Arch.SM90A, 128, 88, subtile_n=8, pingpong=True, unrolled=True)
    bare, residual = spec_of(dtype=DType.BF16), spec_of(exact("exact0"), dtype=DType.BF16)
    assert Registers.of(bare, tile, Alignment.TMA).visits == 22 * WRITING
    assert Registers.of(residual, tile, Alignment.TMA).visits == 22 * (WRITING + READING)
    assert leaves_registers(tile, bare) and not leaves_registers(tile, residual)
    assert not leaves_registers(replace(tile, tile_n=136), bare), "34 visits"
    for config in (replace(tile, pingpong=False), replace(tile, tile_m=64, tile_n=168, subtile_n=24)):
        assert Registers.of(residual, config, Alignment.TMA).visits == 0
    assert Registers.of(residual, replace(tile, unrolled=False), Alignment.PLAIN).visits == 0


def test_steps_of_all_functions_but_the_first_are_counted() -> None:
    """16 elements in subtiles of 32 columns. Passes count as a function, and tensor memory has waits between
    visits. A tile that has no registers for them may serve a spec that no other tile serves."""
    one, softmax = spec_of(dtype=DType.BF16), block_softmax(64)
    chain = tuple(Op(f"t{i}", "exp", (f"t{i - 1}" if i else "acc",), DType.F32) for i in range(3))
    for ops, steps in ((chain[:1], 0), (chain[:2], 16), (chain, 32)):
        spec = replace(one, ops=ops, stores=(replace(one.stores[0], value=ops[-1].name),))
        assert Registers.of(spec, HOPPER, Alignment.TMA).steps == steps
        assert Registers.of(spec, BLACKWELL, Alignment.TMA).steps == 0
    assert Registers.of(softmax, HOPPER, Alignment.TMA).steps == 16
    full = replace(HOPPER, tile_n=192, pingpong=True)
    assert not leaves_registers(full, softmax) and holds_values(full, softmax)


def test_sums_and_visits_take_registers_one_after_the_other() -> None:
    spec = spec_of(by_element("exact0"), by_element("exact1"), fast_accum=False)
    kept = Registers.of(spec, HOPPER, Alignment.TMA)
    assert (kept.accumulators, kept.sums, kept.fragments) == (64, 128, 64)
    assert kept.total == 64 + 128
    assert spare_registers(spec, HOPPER, Alignment.TMA) == 232 - MARGIN - 192 == 0


def test_promoted_sums_have_as_many_sets_and_pieces_as_registers_take() -> None:
    by_tensor, by_blocks = spec_of(fast_accum=False), spec_of(fast_accum=False, **LINES)
    wide = replace(HOPPER, tile_n=192)
    of_tensor, of_blocks = Promoted(by_tensor, HOPPER.target), SumsInRegisters(by_blocks, HOPPER.target)
    assert [of_tensor.registers(each) for each in (HOPPER, wide)] == [2 * 64, 2 * 96]
    assert [of_blocks.sets(each) for each in (HOPPER, wide)] == [2, 1]
    assert leaves_registers(HOPPER, by_tensor) and not leaves_registers(wide, by_tensor)
    widest, tall = replace(HOPPER, tile_n=256), replace(HOPPER, tile_m=256)
    assert [of_blocks.pieces(each) for each in (HOPPER, wide, widest, tall)] == [1, 1, 2, 2]
    assert all(leaves_registers(each, by_blocks) for each in (wide, widest, tall))
    squares = spec_of(fast_accum=False, a_scaling=Scaling.SQUARE, b_scaling=Scaling.SQUARE)
    assert replace(of_blocks, spec=squares).pieces(tall) == 1 and not leaves_registers(tall, squares)
    ada = TileConfig(Arch.SM89, 64, 128)
    assert Promoted(by_tensor, ada.target).registers(ada) == ada.thread_accumulators, "one set"
    assert mainloop_of(spec_of(), HOPPER.target).registers(HOPPER) == 0


@pytest.mark.parametrize(("columns", "fits"), [(128, True), (256, False)])
def test_scaled_sums_from_tensor_memory_take_registers(columns: int, fits: bool) -> None:
    spec = spec_of(fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE)
    config = replace(BLACKWELL, tile_n=columns)
    assert Registers.of(spec, config, Alignment.TMA).sums == columns
    assert leaves_registers(config, spec) is fits
    assert leaves_registers(replace(config, column_groups=2), spec)


def test_rowvecs_are_hoisted_as_far_as_registers_go() -> None:
    spec = spec_of(exact("exact0"), rowvec("rowvec0"))
    assert hoist_budget(spec, HOPPER, Alignment.TMA) == 232 - MARGIN - 64
    assert plan(spec, HOPPER, Alignment.TMA).placements["rowvec0"].name == "register_hoist"
    assert hoist_budget(spec, replace(HOPPER, pingpong=True), Alignment.TMA) == 0
    assert hoist_budget(spec, replace(HOPPER, subtile_n=16), Alignment.PLAIN) == 0, "visits are a loop's"
    assert hoist_budget(spec, replace(HOPPER, tile_n=512), Alignment.TMA) == 0
    unrolled = replace(BLACKWELL, unrolled=True)
    assert hoist_budget(spec, unrolled, Alignment.TMA) == 255 - MARGIN_OF_TENSOR_MEMORY - 32
    assert hoist_budget(spec, replace(unrolled, column_groups=2), Alignment.TMA) == 216 - 56 - 32


def test_warps_that_find_groups_leave_the_epilogue_fewer() -> None:
    spec = spec_of(rowvec("rowvec0"), rowvec("rowvec1"), dtype=DType.BF16, kind=ProductKind.GROUPED)
    assert spare_registers(spec, HOPPER, Alignment.TMA) == 216 - MARGIN - 64
    one = spec_of(rowvec("rowvec0"), dtype=DType.BF16, kind=ProductKind.GROUPED)
    assert spare_registers(one, HOPPER, Alignment.TMA) == 232 - MARGIN - 64


def test_a_tile_fits_if_each_of_its_segments_does() -> None:
    wide = replace(HOPPER, tile_n=256)
    assert leaves_registers(wide, block_mean(64))
    one = spec_of(dtype=DType.BF16)
    first, second = (replace(one.product, name=f"acc{i}", width=512) for i in range(2))
    many = tuple(Store(f"out{i}", "acc1", DType.BF16) for i in range(1, 5))
    both = replace(one, accumulators=(first, second), stores=(replace(one.stores[0], value="acc0"), *many))
    few = replace(both, stores=both.stores[:2])
    assert leaves_registers(wide, few) and not leaves_registers(wide, both)
