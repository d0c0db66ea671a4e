"""The lines that a run prints of the processor time of its folders."""

from __future__ import annotations

from pathlib import Path

from support.cpu_times import BUDGETS, LIMIT, by_folder

TESTS = Path(__file__).parent


def test_a_folder_that_takes_more_than_its_budget_is_marked() -> None:
    """Of a folder all tests count, also those of a parameter with `::` and `/` in its name."""
    minute = {
        "test/ops/test_a.py::one": 60,
        "test/ops/test_b.py::two[x::y/z]": 120,
        "elsewhere/test_c.py::t": 6,
    }
    assert list(by_folder(minute)) == [
        "    0.1        min  elsewhere",
        "    3.0 of  0.2 min  test/ops over",
    ]
    assert list(by_folder({"test/ops/test_a.py::one": 11.0})) == ["    0.2 of  0.2 min  test/ops"]


def test_every_folder_of_make_test_has_a_budget() -> None:
    folders = {path.parent for path in TESTS.rglob("test_*.py")} - {TESTS / "gpu"}
    assert BUDGETS.keys() == {folder.relative_to(TESTS.parent).as_posix() for folder in folders}


def test_budgets_are_within_the_limit() -> None:
    assert sum(BUDGETS.values()) <= LIMIT
