"""Refusals of the Blackwell template; its results are simulated elsewhere."""

from __future__ import annotations

import cutlass
import pytest

from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.spec import ProductKind
from cute_backend.templates.drain import Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.sm100 import Sm100Gemm
from support.bare_epilogue import Bare, stages_for


class Wide(Bare):
    loads = tuple(f"exact{i}" for i in range(4))
    shared_loads = tuple(SmemOperand(name, cutlass.Float32) for name in loads)
    sweeps = (Visit(planes=loads),)


@pytest.mark.parametrize(
    "config",
    [
        TileConfig(Arch.SM100A, 64, 128),
        TileConfig(Arch.SM100A, 256, 128, 2),
        TileConfig(Arch.SM100A, 128, 128, 2, ctas=2),
    ],
    ids=lambda config: config.name,
)
def test_a_cta_has_128_rows(config: TileConfig) -> None:
    with pytest.raises(ValueError, match=rf"{config.cta_rows} rows .* it takes 128 rows"):
        Sm100Gemm(Bare(), config, stages_for(Bare(), config))


def test_the_ctas_of_an_mma_lie_in_one_cluster() -> None:
    with pytest.raises(ValueError, match="2 CTAs 128 rows in clusters 3 high"):
        Sm100Gemm(Bare(), TileConfig(Arch.SM100A, 256, 128, 3, ctas=2), Stages(3, store=2))


def test_the_epilogue_leaves_room_for_the_operands() -> None:
    config = TileConfig(Arch.SM100A, 128, 256)
    assert Sm100Gemm(Bare(), config, stages_for(Bare(), config)).stages.ab >= 3
    with pytest.raises(ValueError, match="has 1 stages of A and B, which take 3"):
        Sm100Gemm(Wide(), config, stages_for(Wide(), config))


@pytest.mark.parametrize("kind", ProductKind)
def test_two_warpgroups_leave_the_other_warps_72_registers(kind: ProductKind) -> None:
    config = TileConfig(Arch.SM100A, 128, 128, column_groups=2)
    assert Sm100Gemm(Bare(), config, stages_for(Bare(), config), kind=kind).crew.registers == (216, 216, 72)


def test_no_warp_without_a_job() -> None:
    config = TileConfig(Arch.SM100A, 128, 64)
    assert Sm100Gemm(Bare(), config, stages_for(Bare(), config)).threads == 6 * 32
    assert Sm100Gemm(Wide(), config, stages_for(Wide(), config)).threads == 7 * 32
