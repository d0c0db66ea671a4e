"""Tiles of transposed products as wide as even shares of a known M."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cute_backend.errors import UsageError
from cute_backend.kinds import reductions
from cute_backend.planning import (
    BUCKETS,
    Alignment,
    Arch,
    Sizes,
    TileConfig,
    bucket_of,
    covering,
    named,
    offered,
    plan,
    untuned,
)
from cute_backend.planning.cost import cost, time_of
from cute_backend.planning.rules import suited
from cute_backend.planning.search import candidates, choose, for_rows, serves
from cute_backend.planning.targets import Shape
from cute_backend.planning.widths import LARGEST_M, evenly, visit_columns, widths
from cute_backend.runtime.kernels.reach import MAX_KERNELS, Problem, config_for, reachable_kernels
from cute_backend.spec import Accumulator, Axis, DType, EpilogueSpec, Major, Op, Reduction, Scaling, Store
from support.golden_regions import the_region
from support.shipped import epilogue_spec
from support.small_specs import exact, spec_of

RELU = EpilogueSpec(
    (Accumulator("acc", DType.BF16, DType.BF16, Major.K, Major.K),),
    (),
    (Op("t0", "relu", ("acc",), DType.F32),),
    (Store("out0", "t0", DType.BF16),),
)


PAIR = epilogue_spec("swiglu_chunk", True)


def of_relu(m: int, n: int = 2304, sm_count: int = 132) -> tuple[TileConfig, ...]:
    return evenly(Arch.SM90A, RELU, m, n, sm_count)


@pytest.mark.parametrize(
    ("m", "most", "shares"),
    [
        (257, 256, (136, 88, 72)),
        (257, 192, (136, 88, 72)),
        (130, 256, (136, 72)),
        (7, 256, (8,)),
        (256, 256, (256, 128, 88)),
        (64, 256, (64,)),
        (1000, 192, (168, 144, 128)),
    ],
)
def test_widths_are_even_shares(m: int, most: int, shares: tuple[int, ...]) -> None:
    assert widths(m, most) == shares


def test_tiles_of_any_m_waste_few_rows() -> None:
    """All shares together are less than 8 rows each more than M."""
    for m in (*range(1, 200, 7), *range(200, LARGEST_M + 1, 61)):
        for config in of_relu(m):
            shares = -(-m // config.tile_n)
            assert 0 <= shares * config.tile_n - m < 8 * shares
            assert config.transposed and config.thread_accumulators <= 192 and config.tile_n <= 256
            config.check_visits()


def test_tiles_of_a_pair_have_as_many_accumulators_for_both_products() -> None:
    for m in (1, 7, 88, 130, 192, 257, 600):
        every = evenly(Arch.SM90A, PAIR, m, 2304, 132)
        assert {config.tile_m for config in every} == {64, 128}
        for config in every:
            assert config.products == 2 and config.thread_accumulators == config.tile_n <= 192
            assert config.pingpong is False or config.tile_m == 64


@pytest.mark.parametrize(
    ("width", "columns"), [(8, 8), (88, 8), (72, 24), (80, 16), (96, 32), (136, 8), (256, 32)]
)
def test_visits_cover_a_width(width: int, columns: int) -> None:
    assert visit_columns(width) == columns


def test_clusters_and_parts_are_of_what_there_is() -> None:
    every = of_relu(257)
    assert {config.cluster_m for config in every} == {1, 2, 4}
    assert max(config.cluster_m for config in of_relu(257, n=100)) == 2, "two tiles of 64 columns of D"
    for config in every:
        ctas = -(-257 // config.tile_n) * -(-2304 // config.tile_m)
        assert config.split_k == 1 or ctas * config.split_k <= 132
    assert any(config.split_k > 1 and config.sums_in_memory and config.multicasts for config in every)
    assert not any(config.pingpong for config in of_relu(257, n=1024))
    many = of_relu(257, n=16384)
    assert any(config.pingpong for config in many), "more tiles than multiprocessors"
    residual = spec_of(exact("exact0"), dtype=DType.BF16)
    beside = evenly(Arch.SM90A, residual, 257, 16384, 132)
    tall = [
        {each.tile_n for each in found if each.pingpong and each.mma_m == 128} for found in (many, beside)
    ]
    assert tall == [{72, 88}, {72}], "34 visits take too many registers, and 22 that read a plane"


def test_257_rows_are_three_tiles_of_88() -> None:
    """cuBLAS takes 64 x 88 in clusters of four for 257 x 2304 x 9216 in fp16, in 27 us; the fastest of the
    tiles for any M took 34 (H200)."""
    chosen = choose(Arch.SM90A, RELU, Sizes(257, 2304, 9216), 132)
    assert (chosen.tile_m, chosen.tile_n, chosen.transposed) == (64, 88, True)
    assert chosen.words.startswith("64 by 88 of the transposed product, clusters of ")


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        ((47, 17920, 9344), "192x48_2x1_by24_unrolled"),
        ((7, 12288, 4096), "192x8_1x1_by8_split2_unrolled"),
        ((47, 11008, 4096), "192x48_1x1_by24_split2_unrolled"),
    ],
)
def test_192_columns_of_d_serve_few_rows(problem: tuple[int, int, int], tile: str) -> None:
    """17920 columns of D are 94 tiles of 192, in clusters of two for most of 132 multiprocessors. A warpgroup
    has three blocks of 64 rows. The last two take 27.6 us in place of 31.8, and 28.0 in place of 31.3
    (H200)."""
    chosen = choose(Arch.SM90A, RELU, Sizes(*problem), 132)
    assert chosen.name == f"{tile}_transposed"
    assert (chosen.warpgroups, chosen.blocks, chosen.row_warps) == (1, 3, 4)
    assert chosen.thread_accumulators == 3 * chosen.tile_n // 2


def test_192_columns_of_d_serve_no_more_than_64_rows() -> None:
    """With 96 to 500 rows, such tiles took 1.02 to 1.31 times as long as others (H200)."""
    for m in (1, 40, 64):
        (width,) = {config.tile_n for config in of_relu(m) if config.tile_m == 192}
        assert width == -(-m // 8) * 8
    assert not any(config.tile_m == 192 for m in (65, 130, 1000) for config in of_relu(m))


def test_only_an_m_that_varies_is_rounded_up() -> None:
    problem = Problem(RELU, 257, 2304, 9216)
    known = config_for(problem, Alignment.TMA, Arch.SM90A, 132)
    varying = config_for(replace(problem, varies=True), Alignment.TMA, Arch.SM90A, 132)
    assert known.tile_n == 88 and known not in offered(Arch.SM90A, RELU)
    assert varying == choose(Arch.SM90A, RELU, Sizes(bucket_of(257), 2304, 9216), 132) != known


def test_a_region_of_known_m_needs_the_kernel_for_that_m_alone() -> None:
    problem = Problem(RELU, 257, 2304, 9216)
    (kernel,) = reachable_kernels(problem, Arch.SM90A, 132)
    assert kernel.plan == plan(RELU, config_for(problem, Alignment.TMA, Arch.SM90A, 132), Alignment.TMA)
    assert kernel.plan.tile.tile_n == 88
    varying = reachable_kernels(replace(problem, m=None), Arch.SM90A, 132)
    assert 5 < len(varying) <= MAX_KERNELS
    of_any_m = {config.name for config in offered(Arch.SM90A, RELU)}
    assert {kernel.plan.tile.name for kernel in varying} - of_any_m, "few even shares of buckets"


def test_a_few_tiles_cover_all_buckets() -> None:
    """Each one lowers the predicted times of all M the most."""
    sizes = 2304, 9216, 132
    chosen = {m: untuned(Arch.SM90A, RELU, Sizes(m, 2304, 9216), 132) for m in BUCKETS}
    assert len(set(chosen.values())) > 8

    def total(there: Sequence[TileConfig]) -> float:
        every = [Sizes(m, 2304, 9216) for m in BUCKETS]
        times = ([cost(each, RELU, known, 132, careful=True) for each in there] for known in every)
        return sum(math.log(min(each)) for each in times)

    kept = covering(chosen, RELU, *sizes, 8)
    assert len(set(kept)) == 8 and set(kept) < set(chosen.values())
    common = [each for each, _ in Counter(chosen.values()).most_common(8)]
    assert total(kept) < total(common) - 0.5
    for count in (1, 4):
        assert covering(chosen, RELU, *sizes, count) == kept[:count]
        left = [each for each in set(chosen.values()) if each not in kept[:count]]
        assert total(kept[: count + 1]) == min(total([*kept[:count], each]) for each in left)
    assert covering(chosen, RELU, *sizes, 99) == list(dict.fromkeys(chosen.values()))


def test_tuning_tries_widths() -> None:
    tried = candidates(Arch.SM90A, RELU, Sizes(257, 2304, 9216), 132)
    assert len({config.tile_n for config in tried if config.tile_n in (136, 88, 72)}) >= 2


@pytest.mark.parametrize(
    "name",
    [
        "64x88_4x1_by8_unrolled_transposed",
        "128x136_1x1_by8_split2_unrolled_transposed",
        "192x48_2x1_by24_unrolled_transposed",
    ],
)
def test_a_tile_of_any_width_can_be_named(name: str) -> None:
    assert named(Arch.SM90A, RELU, name).name == name


@pytest.mark.parametrize(
    "name", ["64x88x2_4x1_by8_unrolled_transposed", "128x24x2_2x1_by24_unrolled_transposed"]
)
def test_a_tile_of_a_pair_can_be_named(name: str) -> None:
    assert named(Arch.SM90A, PAIR, name).name == name
    with pytest.raises(UsageError, match=r"config\.tile is"):
        named(Arch.SM90A, PAIR, name.replace("64x", "256x").replace("128x", "256x").replace("x2_", "_"))


@pytest.mark.parametrize(
    "name",
    [
        "64x84_1x1_transposed",
        "512x88_1x1_by8_unrolled_transposed",
        "64x264_1x1_by24_unrolled_transposed",
        "192x72_1x1_by24_unrolled_transposed",
    ],
)
def test_no_other_width_can_be_named(name: str) -> None:
    with pytest.raises(UsageError, match=r"config\.tile is"):
        named(Arch.SM90A, RELU, name)


def _with(**facts: object) -> EpilogueSpec:
    return replace(RELU, accumulators=(replace(RELU.product, **facts),))


ROWS = Store("out1", "t0", DType.F32, form=Reduction(Axis.ROW, reductions.named("max")))
COLUMNS = replace(ROWS, form=Reduction(Axis.COLUMN, reductions.named("max")))


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM80, Arch.SM89, Arch.SM120A, Arch.SM100A])
@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        (replace(RELU, stores=(*RELU.stores, COLUMNS)), True),
        (replace(RELU, stores=(*RELU.stores, ROWS)), False),
        (_with(a_major=Major.MN), False),
        (_with(b_major=Major.MN), False),
        (
            _with(
                a_dtype=DType.E4M3,
                b_dtype=DType.E4M3,
                fast_accum=False,
                a_scaling=Scaling.LINE,
                b_scaling=Scaling.SQUARE,
            ),
            False,
        ),
        (the_region("rotary", "sm_90a").spec, False),
        (PAIR, True),
        (epilogue_spec("swiglu", True), False),
        (epilogue_spec("swiglu7", True), False),
        (epilogue_spec("batched", True), False),
    ],
    ids=[
        "columns",
        "rows",
        "A along M",
        "B along N",
        "block scales",
        "rope",
        "pair",
        "rows of a pair",
        "even and odd columns",
        "batched",
    ],
)
def test_what_has_no_such_tile_takes_those_for_any_m(spec: EpilogueSpec, taken: bool, arch: Arch) -> None:
    """Only wgmma has two accumulators below each other. No tile of mma.sync serves rope."""
    taken = taken and (arch is Arch.SM90A or len(spec.accumulators) == 1)
    sm_count = arch.target.sm_count
    if not serves(arch, spec):
        assert not taken and evenly(arch, spec, 257, 2304, sm_count) == ()
        return
    found = for_rows(arch, spec, 257, 2304, sm_count)
    assert (found != offered(arch, spec)) is taken
    chosen = choose(arch, spec, Sizes(257, 2304, 9216), sm_count)
    whole = replace(chosen, shallow=False, unrolled=False, column_groups=1)
    assert whole in [replace(each, unrolled=False, column_groups=1) for each in found]


OTHERS = [arch for arch in Arch if arch is not Arch.SM90A]


@pytest.mark.parametrize("arch", OTHERS)
def test_other_architectures_have_multiples_of_a_step(arch: Arch) -> None:
    """No cluster without TMA, and no more accumulators in registers than any epilogue leaves. Only tcgen05
    has no multiples of 8."""
    in_registers = arch.target.accumulators.in_registers
    step = 8 if in_registers else 16
    rows, clusters = ({64, 128}, {1}) if in_registers else ({128}, {1, 2})
    for m in (1, 7, 16, 40, 130, 257, 600, LARGEST_M):
        every = evenly(arch, RELU, m, 4096, arch.target.sm_count)
        assert {config.tile_m for config in every} <= rows and {
            config.cluster_m for config in every
        } <= clusters
        for config in every:
            shares = -(-m // config.tile_n)
            assert config.tile_n % step == 0 and 0 <= shares * config.tile_n - m < step * shares
            assert config.transposed and not config.pingpong and config.occupancy == 1
            assert not in_registers or config.thread_accumulators <= 96
            config.check_visits()
    found = {config.tile_m: config.tile_n for config in evenly(arch, RELU, 257, 4096, 108)}
    assert found.keys() == rows and min(found.values()) >= 48


@pytest.mark.parametrize("arch", [arch for arch in OTHERS if not arch.target.accumulators.in_registers])
@pytest.mark.parametrize("columns", [8, 24, 40])
def test_an_instruction_of_tcgen05_has_16_columns(arch: Arch, columns: int) -> None:
    """For 128 rows, tcgen05.mma has no other numbers."""
    shape = Shape(128, columns, subtile_n=8, transposed=True)
    assert suited(arch, (shape,), RELU) == ()
    (wide,) = suited(arch, (shape._replace(tile_n=columns + 8, subtile_n=16),), RELU)
    assert wide.tile_n == columns + 8
    with pytest.raises(UsageError, match=r"config\.tile is"):
        named(arch, RELU, f"128x{columns}_1x1_by8_unrolled_transposed")


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        (Arch.SM80, "64x48_1x1_by24_split4_unrolled_transposed"),
        (Arch.SM89, "64x40_1x1_by8_unrolled_transposed"),
        (Arch.SM120A, "128x96_1x1_transposed"),
        (Arch.SM100A, "128x144_2x1_by16_transposed"),
    ],
)
def test_a_multiple_of_the_step_can_be_named(arch: Arch, name: str) -> None:
    assert named(arch, RELU, name).name == name


@pytest.mark.parametrize("arch", OTHERS)
def test_rows_of_few_shares_are_chosen_where_tiles_would_be_half_empty(arch: Arch) -> None:
    """130 rows waste a third of three tiles of 64, and 14 of 144. On tcgen05 two shares have 80 columns."""
    chosen = choose(arch, RELU, Sizes(130, 12288, 3072), arch.target.sm_count)
    able = (72, 136) if arch.target.accumulators.in_registers else (80, 144)
    assert chosen.transposed and chosen.tile_n in able


@pytest.mark.parametrize("arch", OTHERS)
def test_a_gain_within_the_error_is_not_taken(arch: Arch) -> None:
    """The constants of tiles that nothing was timed on say nothing of narrow visits."""
    error = arch.target.tiles.even.error
    for config in evenly(arch, RELU, 130, 12288, 108):
        assert time_of(arch, config.cut).error == error > 0
        plain, careful = (
            cost(config, RELU, Sizes(130, 12288, 4096), 4, careful=each) for each in (False, True)
        )
        assert careful == pytest.approx((1 + error) * plain, rel=0.01), (
            "few multiprocessors take all the time"
        )
    assert all(time_of(arch, each.cut).error == 0 for each in offered(arch, RELU))


def test_more_rows_take_the_tiles_for_any_m() -> None:
    assert of_relu(LARGEST_M) and of_relu(LARGEST_M + 1) == ()


@pytest.mark.parametrize("name", ["bias_gelu_residual", "addmm_relu", "rowwise", "swiglu_chunk"])
def test_every_tile_leaves_room_for_its_stages(name: str) -> None:
    """A part of K whose sums go through the shared memory of a cluster has less of it for A and B."""
    spec = epilogue_spec(name, True)
    for m in (16, 88, 130, 144, 208, 257, 640):
        for config in for_rows(Arch.SM90A, spec, m, 2304, 132):
            for alignment in Alignment:
                planned = plan(spec, config, alignment)
                assert planned.stages.ab >= planned.tile.least_ab_stages, (m, config.name, alignment)


def test_parts_of_many_rows_leave_room_for_the_stages_of_two_values_in_a_byte() -> None:
    """A k tile of 256 values of a weight is 128 bytes, and of 160 rows of activations 80 KiB: two stages."""
    spec = _with(a_dtype=DType.BF16, b_dtype=DType.I4X2, a_major=Major.K, b_major=Major.K)
    for m in (256, 600, 1000):
        chosen = choose(Arch.SM90A, spec, Sizes(m, 136, 4096), 132)
        every = (chosen, *candidates(Arch.SM90A, spec, Sizes(m, 136, 4096), 132))
        assert any(config.sums_in_memory for config in every)
        for config in every:
            planned = plan(spec, config, Alignment.TMA)
            assert planned.stages.ab >= planned.tile.least_ab_stages, (m, config.name)
