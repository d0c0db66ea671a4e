"""Each rule of planning has a say: the case that it is for gets another tile without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Alignment, Arch, Rowvecs, Rung, TileConfig, rules, tile_table
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.mma_scales import MmaScaled
from cute_backend.planning.rules import RULES, Rule, suited
from cute_backend.planning.shared_memory import holds_planes
from cute_backend.planning.stage_scales import NO_SCALES
from cute_backend.planning.subtiles import SUBTILE_RULES
from cute_backend.planning.sum_scales import SumScales
from cute_backend.planning.targets import Shape
from cute_backend.spec import (
    DType,
    EpilogueSpec,
    Major,
    ProductKind,
    Scaling,
)
from support.small_specs import (
    block_mean,
    by_element,
    by_heads,
    exact,
    rotated,
    rotated_first,
    row_maximum,
    rowvec,
    sampling_spec,
    spec_of,
)

PAIR = spec_of(products=2)
BARE = spec_of(dtype=DType.BF16)
CONVERTED = replace(BARE, accumulators=(replace(BARE.product, b_dtype=DType.I8),))
SCALED = {"a_scaling": Scaling.LINE, "b_scaling": Scaling.SQUARE}
BY_BLOCKS = spec_of(fast_accum=False, **SCALED)
PING_PONG = Shape(128, 128, 2, pingpong=True)

CASES: dict[Rule, tuple[Shape, EpilogueSpec, str | None]] = {
    rules.one_mma_for_all_products: (Shape(128, 128), PAIR, "128x64x2_1x1"),
    rules.equal_shares_of_b: (
        Shape(64, 192, 3, pingpong=True),
        spec_of(dtype=DType.BF16, b_major=Major.MN),
        None,
    ),
    rules.operands_of_the_mainloop: (Shape(64, 64), CONVERTED, None),
    rules.whole_blocks_of_b: (Shape(64, 128), spec_of(dtype=DType.BF16, b_block=80), None),
    rules.whole_subtiles: (Shape(128, 128, subtile_n=128), PAIR, None),
    rules.whole_rows_of_the_swizzle: (
        Shape(64, 64),
        spec_of(products=2, dtype=DType.BF16, b_major=Major.MN),
        None,
    ),
    rules.columns_of_an_instruction: (Shape(64, 72, subtile_n=8), spec_of(dtype=DType.I8), None),
    rules.few_draws_in_a_visit: (PING_PONG, sampling_spec(1), "128x128_2x1_by16"),
    rules.narrow_subtiles_by_element: (
        PING_PONG._replace(subtile_n=64),
        spec_of(by_element("exact0", DType.BF16)),
        "128x128_2x1_pingpong",
    ),
    rules.narrow_subtiles_of_groups: (
        PING_PONG._replace(subtile_n=64),
        spec_of(dtype=DType.BF16, kind=ProductKind.GROUPED),
        "128x128_2x1_pingpong",
    ),
    rules.narrow_subtiles_for_stages: (
        PING_PONG._replace(subtile_n=64),
        spec_of(exact("exact0", DType.BF16), exact("exact1", DType.BF16)),
        "128x128_2x1_pingpong",
    ),
    rules.a_multiprocessor_of_its_own: (
        Shape(128, 128, occupancy=2),
        spec_of(*(exact(f"exact{i}", DType.BF16) for i in range(3)), dtype=DType.BF16),
        "128x128_1x1",
    ),
    rules.whole_blocks_of_columns: (PING_PONG, block_mean(96), None),
    rules.first_columns_in_a_visit: (
        PING_PONG._replace(subtile_n=64),
        rotated_first(24, 96),
        "128x128_2x1_pingpong",
    ),
    rules.halves_of_rotated_blocks: (Shape(64, 160), rotated(64), None),
    rules.subtiles_within_heads: (
        PING_PONG._replace(subtile_n=64),
        by_heads(96),
        "128x128_2x1_pingpong",
    ),
    rules.two_warpgroups_for_wide_tiles: (
        Shape(256, 256, 2, ctas=2),
        spec_of(exact("exact0", DType.BF16)),
        "256x256_2x1_2cta_halves",
    ),
    rules.registers_for_sums: (
        Shape(256, 256, 2, ctas=2),
        spec_of(products=2, fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.LINE),
        None,
    ),
}

ARCHS = {
    rules.a_multiprocessor_of_its_own: Arch.SM80,
    rules.two_warpgroups_for_wide_tiles: Arch.SM100A,
    rules.registers_for_sums: Arch.SM100A,
}
"""The architectures of rules that say nothing on sm_90a."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_has_a_say(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, spec, name = CASES[rule]
    arch = ARCHS.get(rule, Arch.SM90A)
    served = suited(arch, [shape], spec)
    assert [config.name for config in served] == ([] if name is None else [name])
    monkeypatch.setattr(rules, "RULES", tuple(each for each in RULES if each is not rule))
    assert suited(arch, [shape], spec) != served


def test_scales_that_the_mma_applies_have_room_in_tensor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(dtype=DType.E2M1X2, a_scaling=Scaling.NV, b_scaling=Scaling.NV)
    assert not suited(Arch.SM100A, [Shape(128, 256)], spec)
    monkeypatch.delattr(MmaScaled, "suited")
    assert suited(Arch.SM100A, [Shape(128, 256)], spec)


@pytest.mark.parametrize("rule", [*RULES, *SUBTILE_RULES])
def test_each_rule_gives_its_reason(rule: object) -> None:
    assert rule.__doc__ and rule.__doc__.rstrip().endswith(".")


def test_what_a_tile_above_the_smallest_needs() -> None:
    wide = spec_of(*(exact(f"exact{i}") for i in range(8)))
    assert [config.name for config in tile_table(Arch.SM90A, wide)] == ["64x128_2x1", "64x64_1x1"]
    assert len(tile_table(Arch.SM100A, wide)) == 4, "their accumulators are not in registers"
    three = spec_of(*(by_element(f"exact{i}") for i in range(3)), dtype=DType.BF16)
    assert len(tile_table(Arch.SM100A, three)) == 4, "subtiles of half the columns leave registers"
    several, two = (spec_of(*(by_element(f"exact{i}") for i in range(n)), dtype=DType.BF16) for n in (5, 2))
    most = [max(each.thread_accumulators for each in tile_table(Arch.SM90A, spec)) for spec in (several, two)]
    assert most == [32, 128], "160 registers take addresses, or 64"


def test_scales_of_blocks_take_shared_memory() -> None:
    config = TileConfig(Arch.SM90A, 128, 128)
    scales = SumScales(Scaling.LINE, Scaling.SQUARE)
    assert mainloop_of(BY_BLOCKS, config.target).scales == scales
    assert scales.counts(config) == (128, 1)
    assert scales.stage_bytes(config) == 4 * (128 + 4), "that of columns begins at a multiple of 16"
    pair = spec_of(products=2, fast_accum=False, a_scaling=Scaling.SQUARE, b_scaling=Scaling.LINE)
    scales = SumScales(Scaling.SQUARE, Scaling.LINE)
    assert scales.counts(suited(Arch.SM90A, [Shape(64, 128)], pair)[0]) == (1, 128)
    full = (*(exact(f"exact{i}") for i in range(10)), exact("exact10", DType.BF16), rowvec("u"), rowvec("v"))
    small, blockwise = TileConfig(Arch.SM90A, 64, 64), spec_of(*full, fast_accum=False, **SCALED)
    assert mainloop_of(spec_of(*full), small.target).scales is NO_SCALES
    assert holds_planes(small, spec_of(*full))
    assert not holds_planes(small, blockwise), "512 bytes are left for 3 stages of 68 scales"


def test_planes_by_element_get_visits_in_a_loop() -> None:
    wide = TileConfig(Arch.SM90A, 128, 128, 2, pingpong=True, subtile_n=64)
    plane, planes = spec_of(exact("exact0", DType.BF16)), spec_of(*(exact(f"exact{i}") for i in range(3)))
    assert Rung.of(plane, wide, Alignment.TMA).tile.subtile_n == 64
    assert Rung.of(planes, wide, Alignment.TMA).tile.subtile_n == 32, "64 columns of all have no room"
    for spec in (plane, planes):
        cut = Rung.of(spec, wide, Alignment.PLAIN).tile
        assert cut.subtile_n == 16 and cut.rolled and replace(cut, subtile_n=64) == wide
    of_blocks = replace(wide, subtile_n=32)
    whole = Rung.of(rotated_first(32, 64), of_blocks, Alignment.PLAIN)
    assert whole.tile.subtile_n == 32, "a visit has them all"
    pair = TileConfig(Arch.SM80, 128, 64, products=2)
    assert Rung.of(PAIR, pair, Alignment.PLAIN).tile.subtile_n == 32, "no loop has two products without TMA"
    nothing = replace(plane, loads=(), ops=(), stores=(row_maximum(),))
    assert Rung.of(nothing, wide, Alignment.PLAIN).tile == Rung.of(nothing, wide, Alignment.TMA).tile
    hoisted = replace(of_blocks, rowvecs=Rowvecs.REGISTER_HOIST)
    assert not Rung.of(plane, hoisted, Alignment.PLAIN).tile.rolled, "a loop can't index registers"


def test_boxes_have_as_long_runs_of_rotated_halves_as_shared_memory_takes_at_once() -> None:
    ours, blackwell = Arch.SM90A, Arch.SM100A
    (config,) = suited(ours, [PING_PONG], rotated(128))
    by_tma, by_element = (Rung.of(rotated(128), config, alignment).tile for alignment in Alignment)
    assert (by_tma.subtile_n, by_tma.box_n, by_element.box_subtiles) == (32, 64, 1)
    assert (by_tma.load_stages, by_tma.store_stages) == (1, 1)
    assert by_tma.stage_elements == 2 * config.stage_elements

    def boxes(spec: EpilogueSpec, tile: TileConfig = config) -> int:
        return Rung.of(spec, tile, Alignment.TMA).tile.box_subtiles

    turned = rotated(128)
    assert boxes(rotated(64)) == 2
    # A subtile has a whole block, or each of its rows is a run.
    assert boxes(rotated(32)) == boxes(spec_of(dtype=DType.BF16)) == boxes(rotated(2)) == 1
    # A half of 40 columns has no two runs of 16.
    assert boxes(rotated(80), replace(config, tile_n=160, subtile_n=16)) == 1
    # The halves of a box of 64 fp32 values are a row of the swizzle each.
    assert boxes(replace(turned, stores=(replace(turned.stores[0], dtype=DType.F32),))) == 2
    (other,) = suited(blackwell, [Shape(128, 128)], turned)
    assert boxes(turned, other) == 1


def test_segments_have_boxes_of_one_size() -> None:
    """Planes of a segment whose columns keep their order have twice as long runs."""
    turned, (config,) = rotated(128), suited(Arch.SM90A, [PING_PONG], rotated(128))
    first, second = (replace(turned.product, name=f"acc{i}", width=256) for i in range(2))

    def beside(dtype: DType) -> EpilogueSpec:
        ops = (replace(turned.ops[0], operands=("acc0",)),)
        other = replace(turned.stores[0], name="out1", value="acc1", dtype=dtype)
        return replace(turned, accumulators=(first, second), ops=ops, stores=(*turned.stores, other))

    assert Rung.of(beside(DType.BF16), config, Alignment.TMA).tile.box_subtiles == 2
    assert Rung.of(beside(DType.F32), config, Alignment.TMA).tile.box_subtiles == 1
