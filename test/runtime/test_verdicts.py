"""The table of what the compiler said of the kernels of shared epilogues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cute_backend.api import ExplainedRegion
from cute_backend.planning import Plan, rungs
from cute_backend.runtime.kernels import verdicts
from cute_backend.runtime.kernels.verdicts import VERDICTS, Verdict, compiler, key_of, shipped_verdict
from support.golden_regions import the_region

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Puts a table with one verdict in the place of the shipped one."""

    def written(plan: Plan, spill_bytes: int, by: str = compiler()) -> None:
        found = {"kernel": "", "registers": 255, "spill_bytes": spill_bytes, "smem_bytes": 1024}
        path = tmp_path / "verdicts.json"
        path.write_text(json.dumps({"compiler": by, "verdicts": {key_of(plan): found}}))
        monkeypatch.setattr(verdicts, "VERDICTS", path)
        verdicts._table.cache_clear()

    yield written
    monkeypatch.undo()
    verdicts._table.cache_clear()


@pytest.fixture
def region() -> ExplainedRegion:
    return the_region("rowwise", "sm_90a")


def test_another_rung_is_shown_in_place_of_one_that_is_known_to_spill(
    region: ExplainedRegion, write: Write
) -> None:
    first = region.first_rung()
    write(first.plan, 24)
    assert shipped_verdict(first.plan) == Verdict(255, 24, 1024)
    assert region.kernel().plan == rungs(first.plan)[1]
    assert region.rung == f"in place of {first.plan.tile.name}, which spills 24 bytes a thread"


def test_a_first_rung_that_spills_nothing_needs_no_words(region: ExplainedRegion, write: Write) -> None:
    write(region.first_rung().plan, 0)
    assert region.kernel() == region.first_rung() and region.rung == ""


def test_no_cache_folder_is_made_to_look_for_a_verdict(
    region: ExplainedRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(folder))
    assert region.kernel() == region.first_rung() and not folder.exists()


def test_verdicts_of_another_compiler_do_not_count(region: ExplainedRegion, write: Write) -> None:
    write(region.first_rung().plan, 24, by="nvidia-cutlass-dsl 0.1")
    assert shipped_verdict(region.first_rung().plan) is None
    assert region.kernel() == region.first_rung()


def test_the_shipped_table_has_the_kernels_of_golden_modules() -> None:
    """`make verdicts` writes it anew."""
    shipped_for = json.loads(VERDICTS.read_text())["compiler"]
    if shipped_for != compiler():
        pytest.skip(f"it is of {shipped_for}")
    assert shipped_verdict(the_region("rowwise", "sm_90a").first_rung().plan) is not None
