"""The tiles that a kernel is compiled with, one after another, until it spills nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import (
    Alignment,
    Arch,
    Plan,
    Rowvecs,
    Sizes,
    TileConfig,
    choose,
    plan,
    rungs,
    tile_table,
)
from cute_backend.planning.ladder import MAX_LOWER_RUNGS, first_rung, lower_rungs
from cute_backend.planning.registers import leaves_registers
from cute_backend.planning.widths import visit_columns
from cute_backend.spec import DType
from support.shipped import epilogue_spec
from support.small_specs import block_mean, by_element, exact, rowvec, sampling_spec, spec_of

BARE = spec_of(dtype=DType.BF16)
PING_PONG = TileConfig(Arch.SM90A, 128, 192, 2, pingpong=True)


def names(spec, config: TileConfig, alignment: Alignment = Alignment.TMA) -> list[str]:
    return [each.tile.name for each in rungs(plan(spec, config, alignment))]


@pytest.mark.parametrize(
    ("config", "lower"),
    [
        (PING_PONG, ["128x128_2x1_pingpong", "64x64_1x1"]),
        (replace(PING_PONG, tile_n=128), ["128x128_2x1", "64x64_1x1"]),
        (replace(PING_PONG, tile_m=64), ["64x128_2x1_pingpong", "64x64_1x1"]),
        (TileConfig(Arch.SM90A, 256, 128, cluster_n=2), ["128x128_1x2", "64x64_1x1"]),
        (TileConfig(Arch.SM90A, 128, 256, 2), ["128x128_2x1", "64x64_1x1"]),
        (TileConfig(Arch.SM90A, 64, 64, 2), ["64x64_1x1", "64x64_1x1_by16_unrolled"]),
        (TileConfig(Arch.SM90A, 64, 64, split_k=4), ["64x64_1x1", "64x64_1x1_by16_unrolled"]),
        (TileConfig(Arch.SM90A, 64, 64), ["64x64_1x1_by16_unrolled"]),
        (TileConfig(Arch.SM100A, 128, 128), ["128x128_1x1_by16", "128x64_1x1"]),
        (TileConfig(Arch.SM80, 256, 128), ["256x64_1x1", "64x64_1x1"]),
    ],
)
def test_each_step_is_smaller_than_the_one_before(config: TileConfig, lower: list[str]) -> None:
    """The next smaller tile of the same cluster, then the smallest, then narrower visits. In tensor memory,
    accumulators leave registers in every tile, and narrower visits come first."""
    assert names(BARE, config) == [config.name, *lower]
    assert len(lower) <= MAX_LOWER_RUNGS


def test_what_the_models_added_goes_first() -> None:
    """A second warpgroup for the epilogue, and visits that are unrolled for hoisted rowvecs."""
    spec = epilogue_spec("rowwise", True)
    chosen = choose(Arch.SM100A, spec, Sizes(8192, 8192, 4096), 148)
    assert chosen.column_groups == 2 and chosen.unrolled
    simpler = replace(chosen, column_groups=1, unrolled=False)
    assert [each.tile for each in rungs(plan(spec, chosen, Alignment.TMA))][:2] == [chosen, simpler]


def test_visits_that_move_no_plane_have_8_columns_at_least() -> None:
    """TMA's boxes take 16, and eight draws of noise for each element spill in those."""
    config = TileConfig(Arch.SM100A, 128, 64, subtile_n=16)
    assert names(sampling_spec(8), config) == ["128x64_1x1_by16", "128x64_1x1_by8"]
    assert "128x64_1x1_by8" not in names(spec_of(exact("exact0"), dtype=DType.BF16), config)


def test_all_steps_of_long_ops_have_half_the_columns() -> None:
    """A smaller tile has as many draws in a visit of as many columns."""
    spec = sampling_spec(8)
    wide = TileConfig(Arch.SM100A, 128, 128, subtile_n=16)
    assert names(spec, wide) == ["128x128_1x1_by16", "128x128_1x1_by8", "128x64_1x1_by8"]
    split = TileConfig(Arch.SM100A, 128, 64, subtile_n=16, split_k=4)
    assert names(spec, split) == ["128x64_1x1_by16_split4", "128x64_1x1_by8_split4", "128x64_1x1_by8"]


def test_planes_by_element_may_have_visits_of_8_columns() -> None:
    """TMA's boxes need 16."""
    spec = spec_of(by_element("exact0"), dtype=DType.BF16)
    config = TileConfig(Arch.SM100A, 128, 64)
    assert names(spec, config, Alignment.PLAIN) == ["128x64_1x1_by16", "128x64_1x1_by8"]


def test_a_tile_without_registers_by_the_estimate_is_left_out_if_a_smaller_one_has_them() -> None:
    wide = replace(PING_PONG, cluster_m=1, cluster_n=2)
    spec = spec_of(exact("exact0", DType.BF16), dtype=DType.BF16)
    assert first_rung(spec, wide, Alignment.TMA) == wide
    by_elements = first_rung(spec, wide, Alignment.PLAIN)
    assert by_elements.name == "128x128_1x2_pingpong_by16" and leaves_registers(
        by_elements, spec, Alignment.PLAIN
    )
    assert lower_rungs(spec, wide, Alignment.PLAIN)[0] == by_elements
    none = spec_of(*(by_element(f"exact{i}") for i in range(12)), dtype=DType.BF16)
    config = TileConfig(Arch.SM90A, 64, 64, cluster_n=2)
    assert first_rung(none, config, Alignment.TMA) == config, "no smaller one has"


def test_a_step_keeps_what_blocks_of_columns_need() -> None:
    """No smaller tile of the cluster holds 256 columns."""
    spec = block_mean(256)
    (config,) = tile_table(Arch.SM90A, spec)[:1]
    assert config.tile_n == 256
    assert all(each.tile.tile_n % 256 == 0 for each in rungs(plan(spec, config, Alignment.TMA)))


def test_segments_keep_to_tiles_that_serve_them_all() -> None:
    first, second = (replace(BARE.product, name=f"acc{i}", width=512) for i in range(2))
    stores = tuple(replace(BARE.stores[0], name=f"out{i}", value=f"acc{i}") for i in range(2))
    spec = replace(BARE, accumulators=(first, second), stores=stores)
    config = TileConfig(Arch.SM90A, 128, 192, 2)
    assert names(spec, config) == ["128x192_2x1", "128x128_2x1", "64x64_1x1"]


def test_visits_that_spill_in_a_loop_are_unrolled_where_no_tile_is_smaller() -> None:
    config = TileConfig(Arch.SM90A, 64, 128, 2)
    rolled, *_, unrolled = rungs(plan(block_mean(128), config, Alignment.PLAIN))
    assert (rolled.tile.name, unrolled.tile.name) == ("64x128_2x1_by16", "64x128_2x1_by16_unrolled")
    on_mma_sync = plan(block_mean(64), TileConfig(Arch.SM80, 64, 64), Alignment.PLAIN)
    assert on_mma_sync.tile.rolled and not any(each.tile.unrolled for each in rungs(on_mma_sync))


def test_draws_stay_in_a_loop() -> None:
    config = TileConfig(Arch.SM90A, 64, 64, subtile_n=16)
    assert not any(each.tile.unrolled for each in rungs(plan(sampling_spec(1), config, Alignment.PLAIN)))


def test_tiles_of_any_width_have_narrower_ones_below() -> None:
    """Those of the tables have 64 columns or more."""
    below = {
        24: "64x16_1x1_by16_unrolled_transposed",
        32: "64x24_1x1_by24_unrolled_transposed",
        48: "64x32_1x1_transposed",
        64: "64x48_1x1_by24_unrolled_transposed",
        72: "64x64_1x1_transposed",
    }
    for columns, lower in below.items():
        config = TileConfig(Arch.SM90A, 64, columns, subtile_n=visit_columns(columns), transposed=True)
        assert names(BARE, config)[1] == lower
    narrowest = TileConfig(Arch.SM90A, 64, 8, subtile_n=8, transposed=True)
    assert not any("transposed" in name for name in names(BARE, narrowest)[1:])


def test_rowvecs_that_have_to_be_in_registers_leave_the_tile_as_it_is() -> None:
    config = replace(PING_PONG, pingpong=False, tile_n=256, rowvecs=Rowvecs.REGISTER_HOIST)
    spec = spec_of(*(rowvec(f"rowvec{i}") for i in range(4)), dtype=DType.BF16)
    assert first_rung(spec, config, Alignment.PLAIN) == config


@pytest.mark.sweep(14)
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", ["addmm_relu", "row_maxima", "swiglu", "batched", "heads"])
def test_rungs_are_plans_of_tiles_that_run_as_they_are(name: str, arch: Arch) -> None:
    spec = epilogue_spec(name, True)
    accumulators = tuple(replace(acc, a_dtype=DType.BF16, b_dtype=DType.BF16) for acc in spec.accumulators)
    spec = replace(spec, accumulators=accumulators)
    for m, n, k in ((16, 4096, 4096), (4096, 4096, 4096)):
        chosen = choose(arch, spec, Sizes(m, n, k), arch.target.sm_count)
        for alignment in Alignment:
            every = rungs(plan(spec, chosen, alignment))
            assert len(set(every)) == len(every) <= 1 + MAX_LOWER_RUNGS
            for each in every:
                again = plan(spec, each.tile, alignment)
                if each == every[-1] and again.tile.rolled and not each.tile.rolled:
                    again = Plan.of(spec, replace(again.tile, unrolled=True), alignment)
                assert each == Plan.of(spec, each.tile, alignment) == again
                assert each.stages.ab >= each.tile.least_ab_stages
