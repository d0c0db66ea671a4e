"""The regions of a graph that read results of other regions, directly or through ops left to Inductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from operator import getitem

from torch import fx

from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.values.lower import is_reshape


def sources(regions: Sequence[Region]) -> list[dict[int, int]]:
    """For each region of a graph, the indices of the regions whose results it reads, and the number of ops
    outside of regions between the two, not counting views."""
    if not regions:
        return []
    written = {node: index for index, region in enumerate(regions) for node in region.outputs}
    order = {node: place for place, node in enumerate(regions[0].first.node.graph.nodes)}
    return [_sources(region, written, order) for region in regions]


def in_order(regions: Sequence[Region]) -> list[Region]:
    """The regions of a graph, each behind those whose results it reads, and otherwise as they come."""
    read = sources(regions)
    readers: list[list[int]] = [[] for _ in regions]
    for index, of_region in enumerate(read):
        for source in of_region:
            readers[source].append(index)
    waits = [len(of_region) for of_region in read]
    ready = [index for index, count in enumerate(waits) if not count]  # in order, so it is a heap
    placed = []
    while ready:
        index = heappop(ready)
        placed.append(regions[index])
        for reader in readers[index]:
            waits[reader] -= 1
            if not waits[reader]:
                heappush(ready, reader)
    assert len(placed) == len(regions), "regions read each other in a cycle"
    return placed


def _sources(region: Region, written: Mapping[fx.Node, int], order: Mapping[fx.Node, int]) -> dict[int, int]:
    operands = {node for product in region.products for node in product.all_input_nodes}
    operands.update(region.load_nodes)
    before = _before(operands, written)
    origins: dict[fx.Node, set[int]] = {}
    found: dict[int, int] = {}
    for node in sorted(before, key=order.__getitem__):
        if node in written:
            origins[node] = {written[node]}
            continue
        origins[node] = set().union(*(origins[each] for each in node.all_input_nodes))
        for index in origins[node] if _computes(node) else ():
            found[index] = found.get(index, 0) + 1
    read = set[int]().union(*(origins[node] for node in operands))
    return {index: found.get(index, 0) for index in sorted(read)}


def _before(ends: set[fx.Node], written: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The nodes that values are computed from, back to the results of regions."""
    found: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [] if node in written else node.all_input_nodes
    return found


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not (is_view(node) or is_reshape(node) or node.target is getitem)
