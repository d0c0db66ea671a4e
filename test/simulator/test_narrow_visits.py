"""Tiles of sm_90a whose columns are multiples of 16 and not of 32: unrolled visits of 16 columns, with planes
that TMA moves.

Small integers and powers of two, so that a kernel has to be right to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.kinds.results import WholePlane
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import Alignment, Arch, TileConfig, offered, plan, tile_table, tunable
from cute_backend.planning.rung import Rung
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import DType, EpilogueSpec, LoadKind, Major, Order
from support.heavy import HEAVY
from support.shipped import epilogue_spec, heavy_spec
from support.simulator.exact import check_exact, machine, scaled_residual
from support.simulator.pairs import TWO, check, difference

WIDTHS = (80, 112, 144, 176, 208, 240)
PAIRED = (80, 112)


def narrow(spec: EpilogueSpec) -> list[TileConfig]:
    """The tiles with visits of 16 columns that tuning tries for a spec, one of each number of columns."""
    configs = [config for config in tunable(Arch.SM90A, spec) if config.subtile_n == 16]
    return list({config.tile_n: config for config in configs if config.split_k == 1}.values())


def in_tile(spec: EpilogueSpec, columns: int) -> TileConfig:
    (config,) = (config for config in narrow(spec) if config.tile_n == columns)
    return config


@pytest.fixture(scope="module")
def pair() -> EpilogueSpec:
    """The difference of two products beside a residual."""
    spec = difference(TWO)
    return replace(spec, stores=spec.stores[:1])


def test_they_are_offered_where_sizes_are_known(pair: EpilogueSpec) -> None:
    for spec, columns in ((scaled_residual(), WIDTHS), (pair, PAIRED)):
        assert sorted(config.tile_n for config in narrow(spec)) == list(columns)
        known = {config.tile_n for config in offered(Arch.SM90A, spec) if config.subtile_n == 16}
        assert known == set(columns)
        assert not any(config.subtile_n == 16 for config in tile_table(Arch.SM90A, spec))


def test_visits_are_unrolled_where_tma_moves_planes() -> None:
    spec = scaled_residual()
    config = in_tile(spec, 112)
    by_tma, by_element = (Rung.of(spec, config, alignment).tile for alignment in Alignment)
    assert not by_tma.rolled and plan(spec, config, Alignment.TMA).placements["exact0"].name == "tma"
    assert by_element.rolled and plan(spec, config, Alignment.PLAIN).placements["exact0"].name == "vector"


def test_wider_subtiles_take_the_place_of_narrow_ones() -> None:
    configs = [config for config in tunable(Arch.SM90A, scaled_residual()) if config.tile_n == 224]
    assert {config.subtile_n for config in configs} == {32}


def test_lanes_behind_the_last_column_have_room_for_what_they_stage() -> None:
    """A warp stages 32 columns at a time: 128 of a tile of 112."""
    spec = scaled_residual()
    config = in_tile(spec, 112)
    assert config.staged_n == 128 and replace(config, tile_n=96).staged_n == 96
    assert "cute.ceil_div(tile.tile_n, 32)" in emit(plan(spec, config, Alignment.PLAIN))


@pytest.mark.sim
@pytest.mark.sweep
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("m", [1, 100, 301])
def test_a_residual_at_edges(columns: int, m: int) -> None:
    spec = scaled_residual()
    check_exact(spec, (m, 2 * columns + 24, 208), machine(in_tile(spec, columns)))


@pytest.mark.sim
@pytest.mark.sweep
@pytest.mark.parametrize("columns", PAIRED)
@pytest.mark.parametrize(("m", "n"), [(1, 136), (301, 264), (133, 69)])
def test_a_pair_at_edges(pair: EpilogueSpec, columns: int, m: int, n: int) -> None:
    """A plane of 69 columns is written by element."""
    check(pair, in_tile(pair, columns), m, n, 208)


@pytest.mark.sim
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [DType.E4M3, DType.F32, DType.F16])
@pytest.mark.parametrize("order", [Order.ROW, Order.COLUMN])
def test_planes_of_every_size_and_order(dtype: DType, order: Order) -> None:
    spec = scaled_residual(DType.BF16, DType.BF16)
    assert spec.loads_of(LoadKind.EXACT)
    spec = replace(spec, stores=(replace(spec.stores[0], dtype=dtype, form=WholePlane(order)),))
    check_exact(spec, (136, 272, 104), machine(in_tile(spec, 112)))


@pytest.mark.sim
@pytest.mark.sweep
@pytest.mark.parametrize("columns", WIDTHS)
def test_b_along_n(columns: int) -> None:
    spec = scaled_residual(DType.F16, DType.F16, Major.K, Major.MN)
    check_exact(spec, (136, 2 * columns + 24, 104), machine(in_tile(spec, columns)))


@pytest.mark.sim
@pytest.mark.parametrize(("arch", "tile_m"), [(Arch.SM100A, 128), (Arch.SM90A, 64)])
def test_8_columns_of_planes_by_element(arch: Arch, tile_m: int) -> None:
    config = TileConfig(arch, tile_m, 64, subtile_n=8)
    assert plan(scaled_residual(), config, Alignment.PLAIN).tile.subtile_n == 8
    check_exact(scaled_residual(), (70, 69, 104), machine(config))


NAMES = ("bias_gelu_residual", "addmm_relu", "silu_mul_quant", "row_maxima", "sums", "swiglu_chunk")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", [*NAMES, *HEAVY])
def test_none_spills(name: str, columns: int, alignment: Alignment) -> None:
    spec = heavy_spec(name) if name in HEAVY else epilogue_spec(name, True)
    configs = [config for config in narrow(spec) if config.tile_n == columns]
    if not configs:
        pytest.skip("its reductions or its pair leave no such tile")
    assert [build(Kernel(plan(spec, config, alignment))).spill_bytes for config in configs] == [0]
