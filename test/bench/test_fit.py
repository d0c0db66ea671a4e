"""`benchmarks/fit.py`: what it writes is the cost model of a GPU."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from cute_backend.planning.targets import h200

ROOT = Path(__file__).parents[2]
TIMINGS = ROOT / "benchmarks" / "results" / "nvidia-h100-2026-11-26-wide-fp8-tiles.csv"


def constants(text: str) -> dict[str, str]:
    """The constants of each tile in the text of a module."""
    found = re.findall(r"^ +(Cut\(.*?\)): TileTime\(([\d., \n]*)\),$", text, re.MULTILINE)
    return {cut: times.strip() for cut, times in found}


def of_memory(text: str) -> list[tuple[str, float]]:
    return [(name, float(us)) for name, us in re.findall(r"^ +(\w+_us)=([\d.e+]+),$", text, re.MULTILINE)]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `fit.py` writes after a few steps, if it fits 128 x 192 under ping-pong alone."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fit = importlib.import_module("fit")
    target = tmp_path / "h200.py"
    monkeypatch.setattr(fit, "STEPS", 3)
    monkeypatch.setattr(fit, "TARGET_FILE", target)
    monkeypatch.chdir(tmp_path)
    pattern = r"128x192.*pingpong"
    monkeypatch.setattr("sys.argv", ["fit.py", str(TIMINGS), "--only", pattern])
    fit.main()
    return target


def test_only_the_tiles_of_a_pattern_are_fitted(written: Path) -> None:
    earlier, later = Path(h200.__file__).read_text(), written.read_text()
    assert of_memory(earlier) == of_memory(later) != []
    before, after = constants(earlier), constants(later)
    assert before.keys() == after.keys() and len(after) > 20
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all("128, 192" in name and "pingpong=True" in name for name in changed)


def test_the_docstring_keeps_the_files_of_earlier_fits(written: Path) -> None:
    written_text, earlier = written.read_text(), h200.__doc__ or ""
    listed = re.findall(r"benchmarks/results/\S+\.csv", earlier)
    assert listed and all(name in written_text for name in listed)
    assert TIMINGS.name in written_text.removeprefix(earlier)
    compile(written_text, written.name, "exec")
