"""A target's facts: what contradicts is refused where it is written, and what follows from them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from specs import exact, rowvec, spec_of

from cute_backend.memory_ops.emit import emit
from cute_backend.planning import Arch, Target, TileConfig, Variant, offered, plan
from cute_backend.planning.targets import Accumulators, Shape, sm90a, sm100a
from cute_backend.spec import DType
from cute_backend.templates.epilogue import Template

HOPPER, BLACKWELL = sm90a.TARGET, sm100a.TARGET
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
        (HOPPER, {"promotes": False}, "promotes is False, fp8 is True and 3 tiles are for promoted sums"),
        (HOPPER, {"operands": SIXTEEN_BITS}, "promotes is True, fp8 is False and 3 tiles"),
        (BLACKWELL, {"promotes": True}, "promotes is True, fp8 is True and 0 tiles"),
        (
            BLACKWELL,
            {"tma": False},
            r"clusters \(\(2, 1\), .* and parts of K \(\) need TMA",
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
        (HOPPER, (Shape(64, 64), Shape(128, 128)), "shipped has tiles of .4096, 16384. elements; .* largest"),
        (HOPPER, (Shape(128, 128),) * 6, "it takes up to 5"),
        (HOPPER, (Shape(96, 64),), "tile 96 x 64 gives each of 1 CTAs 96 rows; it takes blocks of 64"),
        (BLACKWELL, (Shape(128, 128, 2, ctas=2),), "gives each of 2 CTAs 64 rows; it takes blocks of 128"),
        (BLACKWELL, (Shape(256, 128, ctas=2),), "has 2 CTAs in clusters 1 high"),
        (
            BLACKWELL,
            (Shape(128, 128, subtile_n=8),),
            "subtiles of 8 columns; they divide it, and",
        ),
        (HOPPER, (Shape(128, 80),), "subtiles of 32 columns; they divide it"),
        (BLACKWELL, (Shape(128, 128, pingpong=True),), "is ping-pong, but tensor memory"),
    ],
)
def test_tiles_that_a_target_can_not_have_are_refused(
    target: Target, shapes: tuple[Shape, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        replace(target, tiles=replace(target.tiles, shipped=shapes))


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


@pytest.mark.parametrize("arch", Arch)
def test_without_tma_planes_are_read_and_written_by_element(
    arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = arch.target.tiles
    alone = tuple(
        shape._replace(tile_m=shape.tile_m // shape.ctas, cluster_m=1, cluster_n=1, ctas=1)
        for shape in tiles.shipped
    )
    tables = replace(
        tiles, shipped=alone, reduced=(), promoted=(), sized=(), tried=alone, clusters=((1, 1),), splits=()
    )
    bare = replace(arch.target, tma=False, promotes=False, tiles=tables)
    spec = spec_of(exact("exact0"), rowvec("rowvec0"))
    aligned = plan(spec, offered(arch, spec)[-1], Variant.TMA)
    assert aligned.placements["exact0"].name == "tma" and aligned.shared_stores == ("out0",)
    monkeypatch.setattr(arch, "target", bare)
    for config in offered(arch, spec):
        placed = plan(spec, config, Variant.TMA)
        assert placed.placements["exact0"].name == "vector" and placed.shared_stores == ()
        assert placed.placements["rowvec0"].name in ("register_hoist", "smem_staged")
        assert "TMA" not in emit(spec, config, Variant.TMA).split('"""')[2]


def test_a_device_has_one_target() -> None:
    """`Arch.of_capability` finds the first; a row with a name that is there already is an alias."""
    assert len({arch.target.capability for arch in Arch}) == len(Arch.__members__)
