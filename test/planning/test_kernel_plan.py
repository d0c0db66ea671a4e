"""The plan of a kernel: made once, written as JSON, and read back with its contradictions named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cute_backend.planning import Alignment, Arch, Plan, Stages, TileConfig, offered, plan
from cute_backend.planning.rules import suited
from cute_backend.planning.targets import Shape
from cute_backend.spec import DType
from support.epilogues import EPILOGUES
from support.runtime.handmade import make_spec
from support.shipped import epilogue_spec
from support.small_specs import exact, spec_of

ARCHS = (Arch.SM80, Arch.SM90A, Arch.SM100A)
SPEC = make_spec()
TILE = TileConfig(Arch.SM90A, 128, 128)


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(data))
    return read


@pytest.mark.sweep(12)
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.value)
@pytest.mark.parametrize("name", EPILOGUES)
def test_a_plan_is_the_same_after_json(name: str, arch: Arch) -> None:
    if not EPILOGUES[name].runs_on(arch):
        pytest.skip(f"{arch.value} has no kernel for it")
    spec = epilogue_spec(name, True)
    for config in offered(arch, spec):
        for alignment in Alignment:
            made = plan(spec, config, alignment)
            read = Plan.from_dict(through_json(made.to_dict()))
            assert read == made and read.to_dict() == made.to_dict()


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("stages", {"ab": 9, "exact": 1, "row": 0, "store": 1}, r"has stages \{'ab': 9.* give \{'ab': "),
        ("finishes_rows", True, "has finishes_rows True, but .* alignment tma give False"),
        ("placements", [{"exact0": "vector"}], r"has placements \[\{'exact0': 'vector'\}\]"),
        ("arguments", ["a", "b"], r"has arguments \['a', 'b'\], but .*'exact0', 'out0'\]$"),
        ("mainloop", {"module": "m", "name": "N", "arguments": ""}, "has mainloop .* give None"),
    ],
)
def test_a_plan_that_contradicts_its_spec_is_refused(field: str, value: Any, complaint: str) -> None:
    data = through_json(plan(SPEC, TILE, Alignment.TMA).to_dict())
    with pytest.raises(ValueError, match=f"^a plan of tile 128x128_1x1 {complaint}"):
        Plan.from_dict({**data, field: value})


def test_tiles_that_the_rules_make_alike_have_one_plan() -> None:
    """Subtiles of 64 columns have no room beside planes that are read by element."""
    narrow, wide = TILE, TileConfig(Arch.SM90A, 128, 128, subtile_n=64)
    assert plan(SPEC, narrow, Alignment.PLAIN) == plan(SPEC, wide, Alignment.PLAIN)
    assert plan(SPEC, narrow, Alignment.TMA) != plan(SPEC, wide, Alignment.TMA)


def test_sums_in_memory_have_stages_of_two_kernels() -> None:
    parts = plan(SPEC, TileConfig(Arch.SM90A, 128, 128, split_k=6), Alignment.TMA)
    whole = plan(SPEC, TILE, Alignment.TMA)
    assert parts.tile.sums_in_memory and parts.stages.ab > whole.stages.ab
    assert parts.stages.exact >= 2 and parts.stages.store >= 1


def test_what_a_kernel_writes_decides_its_last_arguments() -> None:
    names = [argument.name for argument in plan(SPEC, TILE, Alignment.TMA).arguments]
    assert names == ["a", "b", "scalar0", "rowvec0", "colvec0", "exact0", "out0"]


def test_no_ring_without_operands_has_stages() -> None:
    planned = plan(SPEC, TILE, Alignment.PLAIN)
    assert planned.stages == Stages(planned.stages.ab, row=planned.stages.row)


def test_a_tile_that_visits_do_not_cover_is_refused() -> None:
    """24 of 88 columns would be left out."""
    with pytest.raises(ValueError, match="has 88 columns for visits of 32, which leave 24 out; the columns"):
        Plan.of(spec_of(dtype=DType.BF16), TileConfig(Arch.SM90A, 64, 88), Alignment.TMA)


def test_boxes_that_do_not_cover_the_visits_of_a_tile_are_refused() -> None:
    """Two boxes of two visits would leave one of five visits out."""
    config = TileConfig(Arch.SM90A, 64, 160, box_subtiles=2)
    with pytest.raises(
        ValueError, match="has 5 visits in boxes of 2, which leave 1 out; the visits of a box"
    ):
        Plan.of(spec_of(dtype=DType.BF16), config, Alignment.TMA)


@pytest.mark.parametrize("columns", [44, 88])
def test_no_rule_leaves_a_tile_whose_visits_do_not_cover_it(columns: int) -> None:
    """Subtiles of 88 columns are narrowed beside planes that take shared memory."""
    spec = spec_of(*(exact(f"exact{i}") for i in range(3)), dtype=DType.BF16)
    for config in suited(Arch.SM90A, (Shape(128, 176, 2, subtile_n=columns),), spec):
        assert config.tile_n % config.subtile_n == 0
