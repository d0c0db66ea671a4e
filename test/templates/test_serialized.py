"""Products of wgmma that the compiler makes wait for each other, and that ours don't."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, named, plan
from cute_backend.planning.widths import evenly
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Major, Op, Store, WeightGroups
from cute_backend.templates import fragment_tile, tile
from support.compile_once import FOLDER
from support.serialized import has_serialized_products
from support.simulator.exact import op, scaled_pair
from support.verdicts import assert_sound

PRODUCT_OF_BOTH = (
    op("t0", "mul", "acc0", "scale_a"),
    op("t1", "mul", "acc1", "scale_b"),
    op("t2", "sigmoid", "t0"),
    op("t3", "mul", "t2", "t1"),
)

GROUPS = [
    None,
    WeightGroups(128, DType.BF16, DType.BF16, DType.I8, DType.BF16),
    WeightGroups(64, DType.BF16, DType.BF16, DType.I8, DType.BF16),
    WeightGroups(32, DType.BF16, DType.BF16, DType.BF16, DType.BF16),
    WeightGroups(128, DType.F32, DType.F32, DType.I8, DType.F32),
]


def kernel(name: str, alignment: Alignment = Alignment.TMA) -> Kernel:
    product = Accumulator("acc", DType.BF16, DType.BF16, Major.K, Major.K)
    relu = Op("t0", "relu", ("acc",), DType.F32)
    spec = EpilogueSpec((product,), (), (relu,), (Store("out0", "t0", DType.BF16),))
    return Kernel(plan(spec, named(Arch.SM90A, spec, name), alignment))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("name", ["128x128_2x1_pingpong", "128x160_2x1_transposed"])
def test_products_overlap(name: str, alignment: Alignment) -> None:
    assert not has_serialized_products(build(kernel(name, alignment)).cubin)


@pytest.mark.parametrize("columns", [8, 24])
def test_products_overlap_where_visits_have_an_odd_number_of_eights(columns: int) -> None:
    """stmatrix does not serve them."""
    narrow = TileConfig(Arch.SM90A, 64, 72, subtile_n=columns, transposed=True)
    found = kernel("128x160_2x1_transposed").plan
    assert not has_serialized_products(build(Kernel(plan(found.spec, narrow, Alignment.TMA))).cubin)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["64x88x2_1x1_by8_unrolled_transposed", "128x160x2_1x1_transposed"])
def test_products_of_a_transposed_pair_overlap(name: str) -> None:
    spec = scaled_pair()
    found = plan(spec, named(Arch.SM90A, spec, name), Alignment.TMA)
    assert not has_serialized_products(build(Kernel(found)).cubin)


def test_the_compiler_serializes_products_behind_which_bf16_is_stored_by_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the check finds what it is for, and words are what prevents it."""
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(fragment_tile.FragmentSubtile, "_transposes", lambda self, plane: None)
    monkeypatch.setattr(tile, "in_words", lambda fragment: fragment)
    assert has_serialized_products(build(kernel("128x160_2x1_transposed")).cubin)


def converted_pair(stored: DType, groups: WeightGroups | None) -> EpilogueSpec:
    spec = scaled_pair(DType.BF16, stored)
    accumulators = tuple(replace(each, weight_groups=groups) for each in spec.accumulators)
    return replace(spec, accumulators=accumulators, loads=spec.loads[:2], ops=PRODUCT_OF_BOTH)


@pytest.mark.parametrize(
    ("stored", "groups", "widest"),
    [
        (DType.I8, GROUPS[1], 48),
        (DType.U4X2, GROUPS[1], 40),
        (DType.U4X2, GROUPS[3], 24),
    ],
)
def test_the_widest_tile_of_a_pair_in_groups(stored: DType, groups: WeightGroups, widest: int) -> None:
    """The next wider one spills."""
    spec = converted_pair(stored, groups)
    columns = {each.tile_n for m in range(8, 65, 8) for each in evenly(Arch.SM90A, spec, m, 14336, 132)}
    assert max(columns) == widest


@pytest.mark.sweep(4)
@pytest.mark.parametrize("columns", [8, 16, 24, 32, 40, 48, 64, 96, 112, 128])
@pytest.mark.parametrize("stored", [DType.I8, DType.U4X2], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("groups", GROUPS)
def test_products_of_a_converted_pair_overlap(
    columns: int, stored: DType, groups: WeightGroups | None
) -> None:
    """The tiles of a known number of rows and the chosen one, each with a rung that does not spill."""
    spec = converted_pair(stored, groups)
    offered = [each for each in evenly(Arch.SM90A, spec, columns, 14336, 132) if each.tile_n == columns]
    tiles = list({each.tile_m: each for each in offered if not each.sums_in_memory}.values())
    tiles.append(choose(Arch.SM90A, spec, Sizes(columns, 14336, 4096), 132))
    verdicts = assert_sound([plan(spec, tile, Alignment.TMA) for tile in tiles])
    assert all(len(each.spilled) <= 2 for each in verdicts), [each.words for each in verdicts]
