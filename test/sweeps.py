"""A pytest plugin that divides sweeps: `make test` runs a part of each, `make test-exhaustive` the rest.

Of the cases of a test that is marked `sweep`, as few are kept as have every value of every parameter at least
once; the others get the mark `exhaustive`. A single case gets it by `pytest.param(..., marks=...)`.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

EXHAUSTIVE = pytest.mark.exhaustive


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        kept = covering([values_of(case) for case in cases])
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker(EXHAUSTIVE)


def values_of(case: pytest.Item) -> frozenset[tuple[str, int]]:
    """Every parameter of a case, with the place of its value among that parameter's values."""
    return frozenset(case.callspec.indices.items())  # type: ignore[attr-defined]


def covering(cases: list[frozenset[tuple[str, int]]]) -> set[int]:
    """The places of few cases that have all values: each time, the first with the most new ones."""
    missing = frozenset().union(*cases)
    kept: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(cases[i] & missing))
        kept.add(best)
        missing -= cases[best]
    return kept
