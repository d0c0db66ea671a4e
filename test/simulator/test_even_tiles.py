"""Tiles of the transposed product of any multiple of 8 rows of D, on mma.sync, and of 16, on tcgen05: their
edges, split-K, planes and reductions.

Small integers and powers of two, so that a kernel has to be right to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.planning.widths import evenly, visit_columns
from cute_backend.spec import Axis, DType, Major, Order, Reduction, Store
from support.shipped import epilogue_spec
from support.simulator.exact import check_in_tile, scaled_residual
from support.verdicts import assert_sound

BF16 = DType.BF16

BY_WARPS = (
    *(f"64x{width}" for width in (8, 16, 24, 48, 88, 144, 192)),
    *(f"128x{width}" for width in (8, 40, 80, 96)),
)
"""Tiles of mma.sync."""

BY_TCGEN05 = ("128x16", "128x48", "128x80", "128x144", "128x208", "128x256")
"""Tiles of tcgen05, of which one MMA has all 128 rows."""

TILES = (
    *((Arch.SM80, name) for name in BY_WARPS),
    *((Arch.SM120A, name) for name in BY_WARPS[2::3]),
    *((Arch.SM100A, name) for name in BY_TCGEN05),
)
FEW = (
    *((Arch.SM80, name) for name in ("64x48", "64x24")),
    (Arch.SM120A, "128x80"),
    *((Arch.SM100A, name) for name in ("128x48", "128x144")),
)


def tile(arch: Arch, name: str, cluster: int = 1, **options: int) -> TileConfig:
    tile_m, width = map(int, name.split("x"))
    columns = visit_columns(width, arch.target.tiles.even.step)
    return TileConfig(arch, tile_m, width, cluster, subtile_n=columns, transposed=True, **options)


@pytest.mark.sim
@pytest.mark.sweep(3)
@pytest.mark.parametrize(("arch", "name"), TILES)
@pytest.mark.parametrize("m", [1, 7, 48, 130, 257])
def test_edges(arch: Arch, name: str, m: int) -> None:
    """The last tiles of rows, of columns and of K are parts of tiles."""
    config = tile(arch, name)
    check_in_tile(scaled_residual(BF16, BF16), config, m, config.tile_m + 72, 200)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("arch", "name", "options"),
    [
        (Arch.SM80, "64x48", {"split_k": 4}),
        (Arch.SM120A, "128x80", {"split_k": 2}),
        (Arch.SM100A, "128x48", {"split_k": 4}),
        (Arch.SM100A, "128x80", {"split_k": 2}),
        (Arch.SM100A, "128x48", {"cluster": 2}),
        (Arch.SM100A, "128x144", {"cluster": 2}),
    ],
)
def test_parts_of_k_and_clusters(arch: Arch, name: str, options: dict[str, int]) -> None:
    """Parts are added up in a cluster or, on mma.sync, through memory. Clusters share the rows of a tile."""
    config = tile(arch, name, **options)
    assert config.sums_in_memory is (config.split_k > 1 and not arch.target.clusters)
    check_in_tile(scaled_residual(BF16, BF16), config, 130, 2 * config.tile_m + 8, 16 * 70)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("arch", "name"), [(Arch.SM89, "64x16"), *FEW[2:]])
@pytest.mark.parametrize("dtype", [DType.E4M3, DType.F32, DType.F16])
@pytest.mark.parametrize("order", [Order.ROW, Order.COLUMN])
def test_planes_of_every_size_and_order(arch: Arch, name: str, dtype: DType, order: Order) -> None:
    """A warp copies 16 columns of fp8 by half of its lanes alone."""
    spec = scaled_residual(BF16, BF16)
    spec = replace(spec, stores=(replace(spec.stores[0], dtype=dtype, form=WholePlane(order)),))
    config = tile(arch, name)
    assert plan(spec, config, Alignment.TMA).shared_stores
    check_in_tile(spec, config, 144, 208, 104)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("arch", "name"), FEW)
@pytest.mark.parametrize(("m", "n"), [(130, 69), (257, 201)])
def test_planes_by_element(arch: Arch, name: str, m: int, n: int) -> None:
    check_in_tile(scaled_residual(BF16, BF16), tile(arch, name), m, n, 104)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("arch", "name"), FEW)
@pytest.mark.parametrize("axis", Axis)
def test_reductions_along_every_axis(arch: Arch, name: str, axis: Axis) -> None:
    spec = scaled_residual(BF16, BF16)
    reduced = Store("out1", "t2", DType.F32, form=Reduction(axis, reductions.named("max")))
    check_in_tile(replace(spec, stores=(*spec.stores, reduced)), tile(arch, name), 130, 200, 104)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [(Arch.SM80, DType.I8), (Arch.SM89, DType.E4M3), (Arch.SM100A, DType.E4M3), (Arch.SM100A, DType.I8)],
)
def test_operands_of_8_bits(arch: Arch, dtype: DType) -> None:
    spec = scaled_residual(dtype, dtype)
    check_in_tile(spec, tile(arch, "128x48"), 130, 208, 208)


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sweep(2)
def test_any_order_of_warps_gives_the_same_bits(seed: int) -> None:
    arch, name = FEW[seed]
    check_in_tile(scaled_residual(BF16, BF16), tile(arch, name), 130, 136, 200, seed=seed)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", [arch for arch in Arch if arch is not Arch.SM90A])
@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("epilogue", ["bias_gelu_residual", "addmm_relu"])
@pytest.mark.parametrize("m", [16, 130, 257, 600])
def test_the_widest_that_are_offered_have_a_sound_rung(
    arch: Arch, alignment: Alignment, epilogue: str, m: int
) -> None:
    spec = epilogue_spec(epilogue, True)
    dtype = spec.product.a_dtype if arch.target.fp8 else BF16
    product = replace(spec.product, a_dtype=dtype, b_dtype=dtype, a_major=Major.K, b_major=Major.K)
    spec = replace(spec, accumulators=(product,))
    offered = evenly(arch, spec, m, 4096, arch.target.sm_count)
    widest = {config.tile_m: config for config in reversed(offered) if config.split_k == 1}
    plans = [plan(spec, config, alignment) for config in widest.values()]
    assert [planned.tile.tile_n for planned in plans] == [config.tile_n for config in widest.values()] != []
    assert_sound(plans)
