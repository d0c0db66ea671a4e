"""Where two warpgroups share the epilogue of a tile on Blackwell: half of its columns each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, plan, tunable
from cute_backend.planning.epilogue_time import epilogue_cycles, epilogue_instructions, mma_cycles
from cute_backend.planning.halving import LEAST_AB_STAGES, can_halve, halving
from cute_backend.planning.registers import hoist_budget
from cute_backend.planning.rules import suited
from cute_backend.planning.shared_memory import ab_stages
from cute_backend.planning.targets import Shape
from cute_backend.spec import DType
from support.shipped import epilogue_spec, sampling_spec
from support.small_specs import exact, spec_of

TILE = TileConfig(Arch.SM100A, 128, 128)
WIDE = TileConfig(Arch.SM100A, 256, 256, 2, ctas=2)
ROWWISE, LONG = epilogue_spec("rowwise", True), epilogue_spec("bias_gelu_residual", True)


def test_a_second_warpgroup_comes_where_the_mma_would_not_hide_one() -> None:
    hidden = next(k for k in range(128, 8192, 128) if halving(TILE, LONG, k).column_groups == 1)
    one, two = epilogue_cycles(TILE, LONG), epilogue_cycles(replace(TILE, column_groups=2), LONG)
    assert mma_cycles(TILE, LONG, hidden - 128) <= one < mma_cycles(TILE, LONG, hidden)
    # 128 elements of a thread, the ops, a bf16 plane that is read and one that is written.
    assert two == 128 * (4.5 + len(LONG.ops) + 2) == one / 2


def test_short_chains_keep_one() -> None:
    assert halving(TILE, ROWWISE, 1024) == TILE
    chosen = choose(Arch.SM100A, ROWWISE, Sizes(4096, 4096, 1024), Arch.SM100A.target.sm_count)
    assert chosen.column_groups == 1 and chosen.unrolled


def test_draws_count_as_what_they_take() -> None:
    sampled = sampling_spec("one")
    drawn = epilogue_instructions(TILE, sampled)
    assert drawn == 128 * (4.5 + len(sampled.ops) - 1 + 27)
    assert halving(TILE, sampled, 2048).column_groups == 2


def test_a_thread_has_128_columns_at_most() -> None:
    for spec in (ROWWISE, LONG, sampling_spec("four")):
        [wide] = suited(Arch.SM100A, [Shape(256, 256, 2, ctas=2)], spec)
        assert (wide.column_groups, wide.thread_columns, wide.thread_rows) == (2, 128, 1)
        assert wide.name == f"256x256_2x1_2cta{'_by16' * (wide.subtile_n == 16)}_halves"
        assert "a warpgroup for the epilogue of each half" in wide.words


def test_two_have_registers_for_hoisted_rowvecs_of_wide_tiles() -> None:
    halves = replace(WIDE, column_groups=2, unrolled=True)
    assert hoist_budget(ROWWISE, replace(WIDE, unrolled=True), Alignment.TMA) < 256
    assert hoist_budget(ROWWISE, halves, Alignment.TMA) >= 128
    assert plan(ROWWISE, halves, Alignment.TMA).placements["scale_b"].name == "register_hoist"


def test_one_warpgroup_stays_where_planes_of_two_would_take_stages_from_a_and_b() -> None:
    one, three = (spec_of(*(exact(f"exact{i}", DType.F32) for i in range(count))) for count in (1, 3))
    assert can_halve(TILE, one) and not can_halve(TILE, three)
    assert ab_stages(replace(TILE, column_groups=2), three) < LEAST_AB_STAGES < ab_stages(TILE, one)


def test_halves_are_whole_subtiles() -> None:
    assert not can_halve(replace(TILE, tile_n=64, subtile_n=64), ROWWISE)
    assert not can_halve(TileConfig(Arch.SM90A, 128, 128), ROWWISE)
    with pytest.raises(ValueError, match="64 columns for 2 warpgroups, in subtiles of 64; one has them all"):
        TileConfig(Arch.SM100A, 128, 64, subtile_n=64, column_groups=2)
    with pytest.raises(ValueError, match="128 columns for 3 warpgroups"):
        replace(TILE, column_groups=3)
    with pytest.raises(
        ValueError, match="sm_90a has its columns in 2 groups, but warpgroups share a tile by its"
    ):
        TileConfig(Arch.SM90A, 128, 128, column_groups=2)


def test_tuning_tries_both() -> None:
    tried = tunable(Arch.SM100A, ROWWISE)
    for config in (TILE, WIDE):
        assert {
            config,
            replace(config, column_groups=2),
            replace(config, column_groups=2, unrolled=True),
        } <= {*tried}


def test_plain_values_keep_the_field() -> None:
    halves = replace(WIDE, column_groups=2)
    assert TileConfig.from_dict(halves.to_dict()) == halves
    old = {name: value for name, value in WIDE.to_dict().items() if name != "column_groups"}
    assert TileConfig.from_dict(old) == WIDE
