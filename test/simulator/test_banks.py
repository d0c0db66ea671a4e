"""Bank conflicts: how they are counted, and that warps which multiply by themselves have none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cute_backend.kinds.results import WholePlane
from cute_backend.planning import Arch, TileConfig
from cute_backend.simulator.banks import wavefronts
from cute_backend.simulator.report import Recorder
from cute_backend.spec import DType, EpilogueSpec, Major, Order, Store
from support.simulator.exact import check_exact, machine, scaled_residual

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("nbytes", "offsets", "took", "least"),
    [
        (4, LANES * 4, 1, 1),
        (4, LANES * 0, 1, 1),  # one word for all
        (4, LANES * 8, 2, 1),
        (4, LANES * 128, 32, 1),
        (2, LANES * 2, 1, 1),  # two lanes a word
        (8, LANES * 8, 2, 2),
        (8, LANES * 16, 4, 2),
        (16, LANES * 16, 4, 4),
        (16, LANES * 128, 32, 4),
        (16, LANES * 128 + LANES % 8 * 16, 4, 4),  # swizzled
        (16, LANES * 128 + LANES // 2 % 4 * 32, 8, 4),  # by pairs
    ],
)
def test_wavefronts_are_counted(nbytes: int, offsets: np.ndarray, took: int, least: int) -> None:
    assert wavefronts(LANES, offsets, nbytes) == (took, least)


def test_lanes_that_are_served_apart_have_no_conflict() -> None:
    assert wavefronts(np.array([0, 8]), np.array([0, 128]), 16) == (2, 2)
    assert wavefronts(np.array([0, 1]), np.array([0, 128]), 16) == (2, 1)


def of_tiles(config: TileConfig, spec: EpilogueSpec, k: int = 72) -> tuple[Counter[str], Counter[str]]:
    """Of two tiles of rows, by instruction: wavefronts, and those of conflicts."""
    problem = (config.tile_m + 16, config.tile_n, k)
    roles = check_exact(spec, problem, replace(machine(config), observer=Recorder())).report.roles.values()
    needed = sum((role.wavefronts for role in roles), Counter())
    of_operands = {"cp", "ld"} if config.converts else {"cp", "ldmatrix", "ld"}
    assert {opcode.split(".")[0] for opcode in needed} >= of_operands
    return needed, sum((role.conflicts for role in roles), Counter())


BY_WARPS = [(Arch.SM80, DType.BF16), (Arch.SM89, DType.E4M3), (Arch.SM120A, DType.BF16)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("arch", "dtype"), BY_WARPS, ids=[arch.value for arch, _ in BY_WARPS])
@pytest.mark.parametrize("major", Major, ids=lambda major: f"along {major.value}")
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 128)], ids=str)
def test_operands_and_planes_have_no_conflict(
    shape: tuple[int, int], major: Major, arch: Arch, dtype: DType
) -> None:
    if dtype is DType.E4M3 and major is Major.MN:
        pytest.skip("fp8 is contiguous along K")
    _, conflicts = of_tiles(TileConfig(arch, *shape), scaled_residual(dtype, dtype, major, major), 144)
    assert not +conflicts


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM120A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("stored", [DType.I8, DType.U4X2], ids=lambda dtype: dtype.value)
def test_operands_that_are_converted_have_no_conflict(stored: DType, arch: Arch) -> None:
    tile = TileConfig(arch, 64, 32, transposed=True, converts=True, packing=stored.values)
    _, conflicts = of_tiles(tile, scaled_residual(DType.BF16, stored), 144 * stored.values)
    assert not +conflicts


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM120A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("order", [Order.ROW, Order.COLUMN], ids=lambda order: order.value)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.U8], ids=lambda dtype: dtype.value)
def test_planes_have_conflicts_where_fp32_is_stored_alone(dtype: DType, order: Order, arch: Arch) -> None:
    """Half a warp stores to four rows, of which two meet in the same banks: two wavefronts for one. In planes
    by columns each element is stored by itself, which also takes two. Sums that warps exchange are stored by
    vectors of 16 bytes, without conflicts."""
    fp32 = "st.shared.v2.b32" if order is Order.ROW else "st.shared.b32"
    spec = scaled_residual(DType.BF16, DType.BF16)
    spec = replace(spec, stores=(Store("out0", "t2", dtype, WholePlane(order)),))
    needed, conflicts = of_tiles(TileConfig(arch, 64, 64), spec)
    stored = Counter({fp32: needed[fp32]})
    assert +conflicts == (stored if dtype is DType.F32 else Counter())
