"""A pytest plugin that divides sweeps: `make test` runs a part of each, `make test-exhaustive` the rest.

For a test that is marked `sweep`, few cases are kept, in which every value of every parameter occurs at least
once. For `sweep(3)`, at most three of these are kept, which are far apart in the table. The others get the
mark `exhaustive`. A single case gets this mark by `pytest.param(..., marks=...)`, and does not count in a
sweep. Which case `sweep(1)` keeps depends on the test's name: if each test had its first one, all would run
on one architecture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import pytest

EXHAUSTIVE = pytest.mark.exhaustive

Each = TypeVar("Each")


def in_parts(count: int) -> pytest.MarkDecorator:
    """Gives a test a parameter `part`, a slice that takes every `count`-th of what it goes through, so that a
    sweep can keep some of that."""
    parts = [slice(i, None, count) for i in range(count)]
    return pytest.mark.parametrize("part", parts, ids=[f"{i}-of-{count}" for i in range(count)])


def of_part(items: Iterable[Each], part: slice) -> list[Each]:
    """The items of a part. A part beyond the last item has one that another part has, too, so that no case
    is empty, whichever of its parts a sweep keeps."""
    found = list(items)
    return found[part] or [found[part.start % len(found)]]


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("exhaustive"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for name, cases in sweeps.items():
        [most] = cases[0].get_closest_marker("sweep").args or [None]
        start = crc32(name.encode()) % len(cases) if most == 1 else 0
        kept = covering([values_of(case) for case in cases], most, start)
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker(EXHAUSTIVE)


Value = tuple[int, str]
"""The number of a parametrization of a test, and the id of one of its values."""


def values_of(case: pytest.Item) -> frozenset[Value]:
    return frozenset(enumerate(case.callspec._idlist))  # type: ignore[attr-defined]


def covering(cases: Sequence[frozenset[Any]], most: int | None = None, start: int = 0) -> set[int]:
    """The indices of few cases that together have all values, or of the first `most` of these. Each step
    keeps the case that has the most new values. Among equals it prefers the case whose other values were used
    least, then the one that is farthest from all that are kept, and then the next one from `start` on."""
    values = frozenset[Any]().union(*cases)
    used: Counter[Any] = Counter()
    kept: set[int] = set()

    def gain(i: int) -> tuple[int, int, int]:
        new = sum(value not in used for value in cases[i])
        return new, -sum(used[value] for value in cases[i]), min((abs(i - j) for j in kept), default=0)

    while used.keys() < values and (most is None or len(kept) < most):
        best = max((*range(start, len(cases)), *range(start)), key=gain)
        kept.add(best)
        used.update(cases[best])
    return kept
