"""Pairs of products that are computed transposed on sm_90a: two accumulators, whose rows lie below each other
in a stage and whose columns are the rows of D.

Small integers and powers of two, so that a kernel has to be right to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.kinds import reductions
from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.planning.widths import evenly, visit_columns
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import Axis, DType, Major, Reduction, Store
from support.shipped import epilogue_spec
from support.simulator.exact import check_in_tile, promoted, scaled_pair

TILES = {"64x8": 1, "64x24": 2, "64x88": 4, "64x136": 1, "64x168": 1, "128x24": 4, "128x88": 2, "128x136": 1}
"""Rows of each product and columns of tiles, and the cluster along N that each is simulated in."""


def tile(name: str, cluster: int | None = None, **options: int) -> TileConfig:
    tile_m, width = map(int, name.split("x"))
    return TileConfig(
        Arch.SM90A,
        tile_m,
        width,
        TILES[name] if cluster is None else cluster,
        subtile_n=visit_columns(width),
        products=2,
        transposed=True,
        **options,
    )


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("m", [1, 7, 24, 88, 130, 257])
def test_edges(name: str, m: int) -> None:
    """The last tiles of rows, of columns and of K are parts of tiles."""
    config = tile(name)
    check_in_tile(scaled_pair(), config, m, (2 * config.cluster_m - 1) * config.tile_m + 8, 200)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x8", "64x88", "64x168", "128x24"])
@pytest.mark.parametrize("m", [24, 257])
def test_ping_pong(name: str, m: int) -> None:
    """Of a tile of 128 x 24, a warpgroup has two blocks of 64 rows of each product."""
    config = tile(name, pingpong=True)
    check_in_tile(scaled_pair(), config, m, 5 * 64 + 8, 200, alignments=(Alignment.TMA,))


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x24", "64x88", "128x136"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.E4M3])
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_clusters_share_the_rows_of_a_tile(name: str, dtype: DType, cluster: int) -> None:
    config = tile(name, cluster)
    check_in_tile(scaled_pair(dtype, dtype), config, 100, (cluster + 1) * config.tile_m + 8, 208)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "split_k", "cluster"),
    [("64x88", 2, 1), ("128x88", 4, 1), ("64x24", 3, 1), ("64x88", 6, 1), ("128x88", 2, 2), ("64x24", 8, 4)],
)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3])
def test_parts_of_k(name: str, split_k: int, cluster: int, dtype: DType) -> None:
    """Parts of both products are added up in a cluster or through memory."""
    config = tile(name, cluster, split_k=split_k)
    assert config.sums_in_memory is (split_k > 4 or cluster > 1)
    check_in_tile(scaled_pair(dtype, dtype), config, 130, 200, 16 * 70)


@pytest.mark.sim
@pytest.mark.parametrize("name", ["64x88", "128x136", "64x24"])
@pytest.mark.parametrize(("m", "n"), [(130, 69), (257, 201)])
@pytest.mark.sweep(2)
def test_planes_by_element(name: str, m: int, n: int) -> None:
    check_in_tile(scaled_pair(), tile(name), m, n, 104)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x88", "128x24"])
@pytest.mark.parametrize(
    ("a_major", "b_major"), [(Major.K, Major.MN), (Major.MN, Major.K), (Major.MN, Major.MN)]
)
def test_operands_contiguous_along_m_and_n(name: str, a_major: Major, b_major: Major) -> None:
    """No tile as wide as the rows has them, but those for any M have: their columns are multiples of 32."""
    config = replace(tile("64x88", 1), tile_m=int(name.split("x")[0]), tile_n=96, subtile_n=32)
    check_in_tile(scaled_pair(a_major=a_major, b_major=b_major), config, 104, 136, 200)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x24", "128x24", "64x8"])
def test_promoted_sums(name: str) -> None:
    check_in_tile(promoted(scaled_pair(DType.E4M3, DType.E4M3)), tile(name, 1), 100, 136, 400)


@pytest.mark.sim
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["64x88", "128x136", "64x24"])
@pytest.mark.parametrize("axis", Axis)
def test_reductions_along_every_axis(name: str, axis: Axis) -> None:
    spec = scaled_pair()
    reduced = Store("out1", "t3", DType.F32, form=Reduction(axis, reductions.named("max")))
    check_in_tile(replace(spec, stores=(*spec.stores, reduced)), tile(name), 130, 200, 104)


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_warps_gives_the_same_bits(seed: int) -> None:
    check_in_tile(scaled_pair(), tile("128x88"), 130, 264, 200, seed=seed)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [16, 100, 257, 600])
def test_no_ping_pong_that_is_offered_spills(m: int) -> None:
    spec = scaled_pair()
    configs = [config for config in evenly(Arch.SM90A, spec, m, 16384, 132) if config.pingpong]
    shapes = {(config.tile_m, config.tile_n): config for config in configs}
    assert shapes and {
        build(Kernel(plan(spec, config, Alignment.TMA))).spill_bytes for config in shapes.values()
    } == {0}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("epilogue", ["swiglu", "swiglu_chunk"])
def test_none_spills(name: str, alignment: Alignment, epilogue: str) -> None:
    planned = plan(epilogue_spec(epilogue, True), tile(name), alignment)
    assert (planned.tile.tile_n, build(Kernel(planned)).spill_bytes) == (tile(name).tile_n, 0)
