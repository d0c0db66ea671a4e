"""The order of regions by whose results they read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cute_backend.fx_walk.region.flow import in_order, sources
from cute_backend.fx_walk.region.region import Region
from support.fx_walk.synthetic import Graph, aten, walk

SIZE = 32


def chain(layers: int) -> list[Region]:
    """The regions of a chain of products. No kernel takes the op between two products."""
    made = Graph()
    x = made.input("x", (SIZE, SIZE))
    for layer in range(layers):
        y = made.call(aten.relu.default, made.call(aten.mm.default, x, made.input(f"w{layer}", (SIZE, SIZE))))
        x = made.call(aten.cumsum.default, y, 1)
    regions, _ = walk(made.output(x))
    assert len(regions) == layers
    return regions


def test_a_region_comes_behind_those_that_it_reads() -> None:
    regions = chain(4)
    assert sources(regions) == [{}, {0: 1}, {1: 1}, {2: 1}]
    assert in_order(regions[::-1]) == regions


def test_regions_that_read_none_of_each_other_stay_as_they_come() -> None:
    made = Graph()
    results = [made.call(aten.relu.default, made.mm(name=str(index))) for index in range(3)]
    both = made.call(aten.relu.default, made.call(aten.mm.default, results[0], made.input("w", (48, 8))))
    regions, _ = walk(made.output(*results, both))
    first, second, third, last = regions
    assert in_order([last, third, first, second]) == [third, first, last, second]


def test_no_regions_are_in_order() -> None:
    assert in_order([]) == []


def steps(work: Callable[[], Any]) -> int:
    """The calls of Python and C functions in some work, and the resumptions of generators."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_the_order_is_found_in_linear_time() -> None:
    few, many = (chain(layers)[::-1] for layers in (25, 100))
    fewer, more = steps(lambda: in_order(few)), steps(lambda: in_order(many))
    assert more < 4.5 * fewer
