"""Programs whose gate and up are two slices of the columns of one product, or every other column."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from cute_backend.fx_walk.region.region import Region
from support.fx_walk.synthetic import Graph, aten, walk

M, N, K = 64, 48, 32


def the_region(graph: fx.Graph) -> Region:
    (region,), rejections = walk(graph)
    assert not rejections
    return region


def halves(made: Graph, y: fx.Node, n: int = N) -> list[fx.Node]:
    return [made.call(aten.slice.Tensor, y, 1, *bounds) for bounds in ((0, n // 2), (n // 2, n))]


def neighbours(made: Graph, y: fx.Node, n: int = N) -> list[fx.Node]:
    return [made.call(aten.slice.Tensor, y, 1, first, n, 2) for first in (0, 1)]


Cut = Callable[[Graph, fx.Node], list[fx.Node]]


CUTS = pytest.mark.parametrize("cut", [halves, neighbours])
