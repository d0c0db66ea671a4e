"""Tiles of the transposed product on sm_90a of any multiple of 8 rows of D: their edges, clusters, split-K,
planes and reductions.

Small integers and powers of two, so that a kernel has to be right to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.planning.widths import evenly
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import Axis, DType, Major, Order, Reduction, Store
from support.shipped import epilogue_spec
from support.simulator.exact import check_in_tile, scaled_residual

TILES = {
    "64x8": (8, 1),
    "64x24": (24, 2),
    "64x40": (8, 4),
    "64x56": (8, 2),
    "64x72": (24, 1),
    "64x88": (8, 4),
    "64x256": (32, 1),
    "128x88": (8, 4),
    "128x136": (8, 2),
    "128x168": (24, 1),
    "192x8": (8, 4),
    "192x48": (24, 2),
    "192x64": (32, 1),
    "256x8": (8, 2),
    "256x88": (8, 1),
    "256x104": (8, 4),
}
"""The columns of a visit of each tile, and the cluster along N that it is simulated in."""


def tile(name: str, split_k: int = 1, cluster: int | None = None) -> TileConfig:
    tile_m, width = map(int, name.split("x"))
    visit, usual = TILES[name]
    return TileConfig(
        Arch.SM90A,
        tile_m,
        width,
        usual if cluster is None else cluster,
        subtile_n=visit,
        split_k=split_k,
        transposed=True,
    )


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("m", [1, 7, 88, 130, 257])
def test_edges(name: str, m: int) -> None:
    """The last tiles of rows, of columns and of K are parts of tiles."""
    config = tile(name)
    n = (2 * config.cluster_m - 1) * config.tile_m + 8 if config.tile_m == 64 else config.tile_m + 72
    check_in_tile(scaled_residual(DType.BF16, DType.BF16), config, m, n, 200)


@pytest.mark.sim
@pytest.mark.parametrize("name", ["64x8", "64x88", "128x168"])
def test_ping_pong(name: str) -> None:
    """More stages of 64 x 8 would fit in shared memory than its barriers have room for."""
    config = replace(tile(name), pingpong=True)
    assert plan(scaled_residual(), config, Alignment.TMA).stages.ab <= 16
    spec, n = scaled_residual(DType.BF16, DType.BF16), 5 * config.tile_m + 8
    check_in_tile(spec, config, 100, n, 200, alignments=(Alignment.TMA,))


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [16, 100, 257, 600])
def test_no_ping_pong_that_is_offered_spills(m: int) -> None:
    spec = scaled_residual(DType.BF16, DType.BF16)
    configs = [config for config in evenly(Arch.SM90A, spec, m, 16384, 132) if config.pingpong]
    shapes = {(config.tile_m, config.tile_n): config for config in configs}
    assert shapes and {
        build(Kernel(plan(spec, config, Alignment.TMA))).spill_bytes for config in shapes.values()
    } == {0}


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x88", "128x136", "192x48", "256x104"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.E4M3])
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_clusters_share_the_rows_of_a_tile(name: str, dtype: DType, cluster: int) -> None:
    """Each of four CTAs brings 22 of 88 rows, in boxes that begin inside the pattern of a swizzle."""
    config = tile(name, cluster=cluster)
    check_in_tile(scaled_residual(dtype, dtype), config, 100, (cluster + 1) * config.tile_m + 8, 208)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "split_k", "cluster"),
    [
        *(("64x88", 2, 1), ("128x136", 4, 1), ("64x24", 3, 1), ("64x88", 6, 1), ("128x88", 2, 2)),
        *(("64x24", 8, 4), ("192x48", 3, 1), ("192x8", 6, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3])
def test_parts_of_k(name: str, split_k: int, cluster: int, dtype: DType) -> None:
    """Parts are added up in a cluster or through memory, for which visits have whole 16 columns."""
    config = tile(name, split_k, cluster)
    assert config.sums_in_memory is (split_k > 4 or cluster > 1)
    assert not config.sums_in_memory or config.summing.subtile_n == 16
    check_in_tile(scaled_residual(dtype, dtype), config, 130, 200, 16 * 70)


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_warps_gives_the_same_bits(seed: int) -> None:
    check_in_tile(scaled_residual(DType.BF16, DType.BF16), tile("64x40"), 130, 264, 200, seed=seed)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x88", "128x168", "64x24", "192x48"])
@pytest.mark.parametrize("dtype", [DType.E4M3, DType.F32, DType.F16])
@pytest.mark.parametrize("order", [Order.ROW, Order.COLUMN])
def test_planes_of_every_size_and_order(name: str, dtype: DType, order: Order) -> None:
    """TMA does not move 8 or 24 columns of fp8 that lie side by side."""
    spec = scaled_residual(DType.BF16, DType.BF16)
    spec = replace(spec, stores=(replace(spec.stores[0], dtype=dtype, form=WholePlane(order)),))
    assert bool(plan(spec, tile(name), Alignment.TMA).shared_stores) is (order is Order.ROW or dtype.bits > 8)
    check_in_tile(spec, tile(name), 144, 208, 104)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x88", "128x136", "64x24", "192x48"])
@pytest.mark.parametrize(("m", "n"), [(130, 69), (257, 201)])
def test_planes_by_element(name: str, m: int, n: int) -> None:
    check_in_tile(scaled_residual(DType.BF16, DType.BF16), tile(name), m, n, 104)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x88", "128x136", "192x48", "256x104", "64x24"])
@pytest.mark.parametrize("axis", Axis)
@pytest.mark.parametrize("kind", ["max", "sum"])
def test_reductions_along_every_axis(name: str, axis: Axis, kind: str) -> None:
    spec = scaled_residual(DType.BF16, DType.BF16)
    reduced = Store("out1", "t2", DType.F32, form=Reduction(axis, reductions.named(kind)))
    spec = replace(spec, stores=(*spec.stores, reduced))
    check_in_tile(spec, tile(name), 130, 200, 104)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    "epilogue", ["bias_gelu_residual", "addmm_relu", "row_maxima", "sums", "two_outputs"]
)
def test_none_spills(name: str, alignment: Alignment, epilogue: str) -> None:
    spec = epilogue_spec(epilogue, True)
    spec = replace(
        spec, accumulators=tuple(replace(acc, a_major=Major.K, b_major=Major.K) for acc in spec.accumulators)
    )
    planned = plan(spec, tile(name), alignment)
    assert (planned.tile.tile_n, build(Kernel(planned)).spill_bytes) == (tile(name).tile_n, 0)
