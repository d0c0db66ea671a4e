"""A pytest plugin that divides sweeps: `make test` runs a part of each, `make test-exhaustive` the rest.

Of the cases of a test that is marked `sweep`, as few are kept as have every value of every parameter at least
once; the others get the mark `exhaustive`. A single case gets it by `pytest.param(..., marks=...)`.
"""

from __future__ import annotations

from collections import Counter, defaultdict

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


Value = tuple[int, str]
"""Which parametrization of a test, and the id of one of its values."""


def values_of(case: pytest.Item) -> frozenset[Value]:
    return frozenset(enumerate(case.callspec._idlist))  # type: ignore[attr-defined]


def covering(cases: list[frozenset[Value]]) -> set[int]:
    """The places of few cases that have all values: each time, one with the most new ones, and of those the
    first whose others were used least."""
    missing = frozenset[Value]().union(*cases)
    used: Counter[Value] = Counter()
    kept: set[int] = set()
    while missing:
        best = max(
            range(len(cases)), key=lambda i: (len(cases[i] & missing), -sum(used[v] for v in cases[i]))
        )
        kept.add(best)
        used.update(cases[best])
        missing -= cases[best]
    return kept
