"""A target's facts: what contradicts is refused where it is written, and what follows from them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from cute_backend.planning import (
    Alignment,
    Arch,
    Plan,
    Sizes,
    Target,
    TileConfig,
    offered,
    plan,
    tile_table,
    tunable,
    unserved,
)
from cute_backend.planning.cost import UNTIMED_ERROR, cost, time_of
from cute_backend.planning.targets import Accumulators, Demand, Shape, Tiles, sm80, sm89, sm90a, sm100a
from cute_backend.spec import DType, ProductKind, WeightGroups
from cute_backend.templates.epilogue import Template
from support.small_specs import exact, rowvec, spec_of

HOPPER, BLACKWELL, AMPERE, ADA = sm90a.TARGET, sm100a.TARGET, sm80.TARGET, sm89.TARGET
SIXTEEN_BITS = frozenset((DType.BF16, DType.F16))


@pytest.mark.parametrize(
    ("target", "changes", "told"),
    [
        (HOPPER, {"capability": (10, 0)}, r"target sm_90a: compute capability 10\.0 is that of sm_100"),
        (HOPPER, {"name": "sm_9"}, r"target sm_9: compute capability 9\.0 is that of sm_90"),
        (HOPPER, {"template": "sm90.Sm90Gemm"}, "the template is 'sm90.Sm90Gemm'; it is named as 'module:Cl"),
        (HOPPER, {"sm_count": 0}, "H200 has 0 multiprocessors"),
        (HOPPER, {"accumulators": Accumulators(16, 4, True)}, "16 times 4 is no multiple of 128"),
        (HOPPER, {"epilogue_registers": 256}, "a thread has 256 registers; it can have up to 255"),
        (HOPPER, {"smem_bytes": 228 * 1024}, "a CTA has 233472 bytes of shared memory; none has more"),
        (HOPPER, {"least_ab_stages": 1}, "A and B have 1 stages; one is copied while one is multiplied"),
        (HOPPER, {"promotes": False}, "promotes is False, fp8 is True and 3 tiles are for promoted sums"),
        (HOPPER, {"operands": SIXTEEN_BITS}, "promotes is True, fp8 is False and 3 tiles"),
        (BLACKWELL, {"promotes": True}, "promotes is True, fp8 is True and 0 tiles"),
        (
            BLACKWELL,
            {"planes_by_tma": False},
            "tile 256 x 256 is in clusters of 2 x 1, which need TMA",
        ),
    ],
)
def test_facts_that_contradict_are_refused(target: Target, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(target, **changes)


@pytest.mark.parametrize(
    ("target", "shapes", "told"),
    [
        (HOPPER, (), "it ships no tile"),
        (HOPPER, (Shape(64, 64), Shape(128, 128)), "planes has tiles of .4096, 16384. elements; .* largest"),
        (HOPPER, (Shape(128, 128),) * 6, "it takes up to 5"),
        (HOPPER, (Shape(96, 64),), "tile 96 x 64 gives each of 1 CTAs 96 rows; it takes blocks of 64"),
        (BLACKWELL, (Shape(128, 128, 2, ctas=2),), "gives each of 2 CTAs 64 rows; it takes blocks of 128"),
        (BLACKWELL, (Shape(256, 128, ctas=2),), "has 2 CTAs in clusters 1 high"),
        (
            BLACKWELL,
            (Shape(128, 128, subtile_n=8),),
            "subtiles of 8 columns; its columns have subtiles of 16, ",
        ),
        (HOPPER, (Shape(128, 272, subtile_n=16),), "272 columns; an MMA has at most 256"),
        (HOPPER, (Shape(128, 80),), "subtiles of 32 columns; its columns have subtiles of 8, 16, 40"),
        (BLACKWELL, (Shape(128, 128, pingpong=True),), "is ping-pong, but tensor memory"),
    ],
)
def test_tiles_that_a_target_can_not_have_are_refused(
    target: Target, shapes: tuple[Shape, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        replace(target, tiles=Tiles({**target.tiles.shipped, Demand.PLANES: shapes}))


def test_ping_pong_takes_accumulators_in_registers() -> None:
    with pytest.raises(ValueError, match="128x128_1x1_pingpong of sm_100a is ping-pong, which takes accumul"):
        TileConfig(Arch.SM100A, 128, 128, pingpong=True)


@pytest.mark.parametrize("arch", Arch)
def test_a_template_has_the_face_of_one(arch: Arch) -> None:
    module, name = arch.target.template.split(":")
    template = getattr(import_module(module), name)
    for method in ("__init__", "__call__"):
        expected = list(inspect.signature(getattr(Template, method)).parameters)
        found = inspect.signature(getattr(template, method)).parameters
        assert list(found)[: len(expected)] == expected
        assert all(each.default is not each.empty for each in list(found.values())[len(expected) :])


@pytest.mark.parametrize("arch", Arch)
def test_targets_are_found_by_name_and_by_capability(arch: Arch) -> None:
    assert Arch.of_name(arch.value) is Arch.of_capability(arch.target.capability) is arch
    assert Arch.of_name("sm_75") is None and Arch.of_capability((7, 5)) is None
    assert arch.target.name in Arch.listed("or")


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A])
def test_without_tma_planes_come_by_cp_async(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tuple(
        shape._replace(tile_m=shape.tile_m // shape.ctas, cluster_m=1, cluster_n=1, ctas=1, pingpong=False)
        for shape in arch.target.tiles.shipped[Demand.PLANES]
    )
    bare = replace(arch.target, planes_by_tma=False, promotes=False, tiles=Tiles({Demand.PLANES: alone}))
    spec = spec_of(exact("exact0"), rowvec("rowvec0"))
    aligned = plan(spec, offered(arch, spec)[-1], Alignment.TMA)
    assert aligned.placements["exact0"].name == "tma" and aligned.shared_stores == ("out0",)
    monkeypatch.setattr(arch, "target", bare)
    for config in tile_table(arch, spec):  # `offered` keeps what it returned before
        placed = Plan.of(spec, config, Alignment.TMA)
        assert placed.placements["exact0"].name == "cp_async" and placed.shared_stores == ("out0",)
        assert placed.placements["rowvec0"].name in ("register_hoist", "smem_staged")
        placed = Plan.of(spec, config, Alignment.PLAIN)
        assert placed.placements["exact0"].name == "vector" and placed.shared_stores == ()


def test_without_tma_no_tile_is_ping_pong() -> None:
    tiles = Tiles({Demand.PLANES: (Shape(64, 64, pingpong=True),)})
    with pytest.raises(
        ValueError, match="tile 64 x 64 is ping-pong, and ping-pong needs a target that moves planes by TMA"
    ):
        replace(AMPERE, tiles=tiles)


def test_what_came_with_a_capability() -> None:
    assert [arch.target.pdl for arch in Arch] == [arch.target.stmatrix for arch in Arch]
    assert {arch for arch in Arch if not arch.target.pdl} == {Arch.SM80, Arch.SM86, Arch.SM89}


def test_a_warpgroup_has_as_many_blocks_as_its_target_says() -> None:
    """Two of mma.sync's, whose warps so read less of B for each product; one of wgmma's."""
    assert [TileConfig(Arch.SM80, rows, 64).sharing for rows in (64, 128, 256)] == [1, 1, 2]
    assert [TileConfig(Arch.SM90A, rows, 64).sharing for rows in (64, 128)] == [1, 2]


def test_a_spec_is_served_where_its_dtypes_are() -> None:
    fp8, bf16 = spec_of(), spec_of(dtype=DType.BF16)
    quantised = replace(bf16, stores=(replace(bf16.stores[0], dtype=DType.E4M3),))
    assert [unserved(spec, HOPPER) for spec in (fp8, bf16, quantised)] == [None] * 3
    assert unserved(bf16, AMPERE) is None
    assert unserved(fp8, AMPERE) == (
        "no MMA of sm_80 multiplies e4m3 by e4m3, as acc does; supported: bf16, f16, i8"
    )
    assert unserved(quantised, AMPERE) == "sm_80 has no conversions of e4m3, which out0 is"
    assert unserved(fp8, ADA) is None and unserved(quantised, ADA) is None
    mixed = replace(fp8, accumulators=(replace(fp8.product, a_dtype=DType.E5M2),))
    assert unserved(mixed, HOPPER) is None
    assert unserved(mixed, ADA) == (
        "no MMA of sm_89 multiplies e5m2 by e4m3, as acc does; supported: bf16, e4m3, f16, i8"
    )
    weights = replace(bf16, accumulators=(replace(bf16.product, b_dtype=DType.E4M3),))
    assert unserved(weights, HOPPER) is None and unserved(weights, AMPERE) is None
    scaled = WeightGroups(64, DType.BF16, DType.BF16)
    weights = replace(bf16, accumulators=(replace(bf16.product, b_dtype=DType.I8, weight_groups=scaled),))
    assert unserved(weights, HOPPER) is None
    assert unserved(weights, AMPERE) is None
    wanted = "no mainloop of sm_100a converts i8 to bf16, as acc has it"
    assert unserved(weights, BLACKWELL) == wanted
    int8 = spec_of(dtype=DType.I8)
    assert [arch.value for arch in Arch if unserved(int8, arch.target)] == ["sm_103a"]
    groups = replace(bf16, accumulators=(replace(bf16.product, kind=ProductKind.GROUPED),))
    assert unserved(groups, HOPPER) is None
    assert unserved(groups, AMPERE) == "sm_80 has no kernel for rows in groups, which acc is of"


def test_a_device_has_one_target() -> None:
    """`Arch.of_capability` finds the first; a row with a name that is there already is an alias."""
    assert len({arch.target.capability for arch in Arch}) == len(Arch.__members__)


def test_a_tile_of_a_new_width_takes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offered with its neighbour's time, and tuned in every cluster."""
    spec = spec_of(exact("of_a_new_width"), rowvec("rowvec0"))  # `offered` keeps what it returns for a spec
    tiles = replace(HOPPER.tiles, further=(*HOPPER.tiles.further, Shape(128, 48, 2, subtile_n=16)))
    monkeypatch.setattr(Arch.SM90A, "target", replace(HOPPER, tiles=tiles))
    able = {config.name: config for config in offered(Arch.SM90A, spec)}
    new = able["128x48_2x1_by16"]
    assert cost(new, spec, Sizes(128, 48, 4096), 132) < cost(
        new, spec, Sizes(128, 48, 4096), 132, careful=True
    )
    assert time_of(Arch.SM90A, new.cut).error > UNTIMED_ERROR
    tried = {config.name for config in tunable(Arch.SM90A, spec)}
    assert {"128x48_1x1_by16", "128x48_2x1_by16", "128x48_1x2_by16", "128x48_1x1_by16_split4"} <= tried
    plan(spec, new, Alignment.TMA)
