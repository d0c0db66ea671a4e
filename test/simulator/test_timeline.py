"""The timeline shows every warp and pipe of the first CTA, and nothing of the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cute_backend.errors import UsageError
from cute_backend.simulator.report import Recorder
from cute_backend.simulator.timeline import check, draw

FIRST, SECOND = "CTA (0, 0, 0)", "CTA (1, 0, 0)"


def recorded() -> Recorder:
    recorder = Recorder()
    recorder.waits.append((f"warp 10 of {FIRST}", "mma", 7, "mbarrier.try_wait", 5, 50))
    recorder.waits.append((f"warp 2 of {FIRST}", "epilogue", 9, "bar.sync 1", 10, 20))
    recorder.waits.append((f"warp 2 of {FIRST}", "epilogue", 9, "bar.sync 1", 30, 40))
    recorder.waits.append((f"warp 3 of {SECOND}", "tma", 9, "bar.sync 1", 1, 2))
    recorder.exits.append((f"warp 10 of {FIRST}", "mma", 60))
    recorder.exits.append((f"warp 3 of {SECOND}", "tma", 70))
    recorder.exits.append((f"warp 2 of {FIRST}", "epilogue", 45))
    recorder.exits.append((f"warp 0 of {FIRST}", "other", 1))
    recorder.operations.append((f"TMA load of {FIRST}", "cp.async.bulk.tensor", 3, 60))
    recorder.operations.append((f"wgmma of warp 2 of {FIRST}", "wgmma.mma_async", 3, 9))
    recorder.operations.append((f"wgmma of warp 10 of {FIRST}", "wgmma.mma_async", 4, 9))
    recorder.operations.append((f"TMA store of {SECOND}", "cp.async.bulk.tensor", 3, 60))
    return recorder


def test_rows_are_the_first_ctas_warps_and_pipes_in_order(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    draw(recorded(), path, "a title")
    picture = path.read_text()
    rows = [
        "warp 0: other",
        "warp 2: epilogue",
        "warp 10: mma",
        "TMA load, in progress",
        "wgmma, in progress",
    ]
    places = [picture.index(f"<!-- {row} -->") for row in rows]
    assert places == sorted(places)
    assert "a title" in picture
    assert "warp 3" not in picture and "TMA store" not in picture


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timeline.nosuch", r"is written as \.\w+, .*\.png.*, not as timeline\.nosuch"),
        ("timeline", "not as timeline"),
        ("nowhere/timeline.png", "the folder of the timeline, .*nowhere, does not exist"),
        (".", "not as"),
    ],
)
def test_what_can_not_be_drawn_is_one_sentence_before_the_work(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        check(tmp_path / name)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(UsageError, match=r"a timeline needs matplotlib, .* pip install matplotlib"):
        check(tmp_path / "timeline.png")
