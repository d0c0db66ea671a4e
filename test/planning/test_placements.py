"""How loads are placed: by the table's order, while there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Alignment, Arch, Plan, TileConfig, placing, plan
from cute_backend.planning.placements import PLACEMENTS, ByElement, Carrier, planes, vectors
from cute_backend.planning.placements.placement import takes_nothing
from cute_backend.spec import LoadKind
from support.small_specs import by_element, colvec, exact, rowvec, spec_of


@pytest.mark.parametrize("kind", LoadKind)
@pytest.mark.parametrize("alignment", Alignment)
def test_the_last_placement_of_a_kind_takes_any_load(kind: LoadKind, alignment: Alignment) -> None:
    load = {"exact": by_element, "rowvec": rowvec, "colvec": colvec}.get(kind.value, colvec)("any0")
    *_, last = (placement for placement in PLACEMENTS if placement.kind is kind)
    for arch in Arch:
        need = last.takes(load, TileConfig(arch, 128, 128), alignment)
        assert need is not None and need.registers == need.smem_bytes == 0


def test_a_placement_is_read_in_one_way() -> None:
    with pytest.raises(ValueError, match="placement tma is read by ring and visit; it takes one of"):
        replace(planes.TMA, visit=planes.VECTOR.visit)
    with pytest.raises(ValueError, match="placement tma is read by nothing"):
        replace(planes.TMA, ring=None)


def test_a_placement_reads_by_what_the_method_has() -> None:
    by_rows = ByElement("tile.rows", "r", "tile.row(r)")
    with pytest.raises(ValueError, match="uses tile in visit, whose expressions have sub and the slot r"):
        replace(planes.VECTOR, visit=by_rows)
    with pytest.raises(ValueError, match="row_read uses e and sub in begin, whose expressions have tile"):
        replace(vectors.ROW_READ, begin=ByElement("tile.rows", "r", "sub.row(e)"))


def test_none_stands_behind_a_placement_that_takes_any_load() -> None:
    for kind in LoadKind:
        *others, _ = (placement for placement in PLACEMENTS if placement.kind is kind)
        assert not [placement.name for placement in others if placement.takes is takes_nothing]


def test_names_are_of_one_placement_each() -> None:
    assert len({placement.name for placement in PLACEMENTS}) == len(PLACEMENTS)


def test_planes_take_shared_memory_in_their_order() -> None:
    spec = spec_of(*(exact(f"exact{i}") for i in range(8)))
    placed = plan(spec, TileConfig(Arch.SM90A, 128, 128), Alignment.TMA)
    names = [placed.placements[load.name].name for load in spec.loads]
    assert names == sorted(names), "tma before vector"
    assert set(names) == {"tma", "vector"} and placed.shared_stores == ("out0",)
    assert [load.name for load in placed.segments[0].in_ring(Carrier.PLANE, spec)] == [
        load.name for load, name in zip(spec.loads, names, strict=True) if name == "tma"
    ]


def test_the_order_of_the_table_is_that_of_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, config = spec_of(rowvec("rowvec0")), TileConfig(Arch.SM90A, 128, 128)
    assert Plan.of(spec, config, Alignment.TMA).placements["rowvec0"] is vectors.REGISTER_HOIST
    monkeypatch.setattr(placing, "PLACEMENTS", (vectors.SMEM_STAGED, vectors.REGISTER_HOIST))
    assert Plan.of(spec, config, Alignment.TMA).placements["rowvec0"] is vectors.SMEM_STAGED
    monkeypatch.setattr(placing, "PLACEMENTS", ())
    with pytest.raises(ValueError, match="no placement takes rowvec0, a rowvec of f32; the last one"):
        Plan.of(spec, config, Alignment.TMA)
