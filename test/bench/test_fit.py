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
    found = re.findall(r"^ +(Cut\(.*?\)): TileTime\(([\w=., \n]*)\),$", text, re.MULTILINE)
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


def test_tiles_that_were_timed_in_one_wave_take_longer_in_several(written: Path) -> None:
    """A cluster of four was timed in one wave, and 256 x 160 in few of several."""
    limited = {cut for cut, time in h200.H200.tiles.items() if time.in_waves > 1}
    rates = {
        cut: time.in_waves * (time.k + time.busy) / (cut.mma_m * cut.mma_n)
        for cut, time in h200.H200.tiles.items()
    }
    least = min(rate for cut, rate in rates.items() if cut not in limited)
    assert any(cut.cluster_m * cut.cluster_n == 4 for cut in limited)
    assert all(abs(rates[cut] / least - 1) < 0.02 for cut in limited)
    earlier, later = constants(Path(h200.__file__).read_text()), constants(written.read_text())
    assert {cut for cut in earlier if "in_waves" in earlier[cut]} == {
        cut for cut in later if "in_waves" in later[cut]
    }


def test_errors_are_written_without_other_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fit = importlib.import_module("fit")
    files = [TIMINGS.name]
    text = fit.sources(files, 40, None, True)
    assert text.count(fit.ERRORS) == 1 and text.endswith(
        f"{fit.ERRORS}\nbenchmarks/results/{TIMINGS.name},\n40 problems. {fit.LAST}"
    )
    with monkeypatch.context() as written:
        written.setattr(fit.h200, "__doc__", f"{text}\n")
        assert fit.sources(files, 40, None, True) == text, "in place of those before"
    monkeypatch.setattr(fit, "TARGET_FILE", tmp_path / "h200.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fit.py", str(TIMINGS), "--errors"])
    fit.main()
    earlier, later = (constants(path.read_text()) for path in (Path(h200.__file__), tmp_path / "h200.py"))
    assert earlier.keys() == later.keys()
    assert {cut: time.split(", ")[:5] for cut, time in earlier.items()} == {
        cut: time.split(", ")[:5] for cut, time in later.items()
    }
    assert earlier != later
