"""Regions of one A that share a launch: each becomes a segment of the columns of one kernel.

Products of one A whose results are never combined, such as the projections to queries, keys and values, take
a launch each, and each of them may have too few tiles to fill a GPU. Their regions are found like any others.
They share a launch if one place in the graph has the operands of all, no write in place lies between them,
one tile serves all of them, and the cost model predicts a gain. A product without work after it, which
would be left to Inductor, joins them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from statistics import mean

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.ends.boundary import LAUNCH_BYTES
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.pairs import other_format
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, program_name
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.search.exposed_gathers import exposed_gather
from cute_backend.fx_walk.search.predictions import CONVERTED_ROWS, planned_for, predicted
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.fx_walk.values.classify import LoadView
from cute_backend.planning import MAX_SEGMENTS, Arch, named
from cute_backend.signature import TMA_ALIGN
from cute_backend.spec import (
    Accumulator,
    Columns,
    EpilogueSpec,
    Load,
    Op,
    ProductKind,
    Store,
    Stride,
)

_ROWS = (64, 2048)
"""Two numbers of rows that one graph may serve, in decoding and for a prompt. If M is symbolic, or if the
choice must not depend on it, one launch has to pay in the mean of both."""

_TORCH = 0.93
"""The time of a product in torch divided by the predicted time of our kernel. With this value, one launch of
q, k and v of Llama 8B is predicted to gain nothing in bf16 at 2,048 tokens, as was measured: 137.1 us, and
136.6 us in torch (H200, benchmarks/qkv.py)."""


def sharing(
    walk: Walk, regions: Sequence[Region], bare: Callable[[fx.Node], Region | None], a: fx.Node | None = None
) -> list[Region]:
    """The regions in any order, with each group of regions that share a launch joined into one. `bare`
    returns the region of a product without work after it. Only products of `a` are asked about, if it is
    given."""
    products_of = walk.of_one_a if a is None else {a: walk.of_one_a[a]}
    found = _Sharing(walk).regions(regions, bare, products_of) if config.shared_launches else regions
    return [_explained(walk, region) for region in found]


def _explained(walk: Walk, region: Region) -> Region:
    """A region with the reason why it is no pair with another product, or of halves of its own, if that was
    decided before launches were considered. It is more than what launches say of two that depend on each
    other."""
    others = [other for other in walk.of_one_a.get(region.first.a, ()) if other.node not in region.products]
    for other in others:
        for node in region.products:
            if (why := walk.unpaired.get(frozenset((node, other.node)))) is not None:
                return replace(region, unshared=_unshared(other.node, why))
    if len(region.anchors) == 1 and (why := walk.unpaired.get(frozenset(region.products))) is not None:
        return replace(region, unshared=f"makes no pair of its halves, because {why}")
    for other in others if not region.unshared else ():
        if (why := exposed_gather(walk, (region.first, other))) is not None:
            return replace(region, unshared=_unshared(other.node, why))
    return region


class _Sharing:
    """The search for regions that share a launch. If some could but don't, a region's `unshared` or the
    refusal of a product without work after it has the reason."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.done: dict[fx.Node, Region] = {}
        """The regions that are settled, by their nodes."""

    def regions(
        self,
        regions: Sequence[Region],
        bare: Callable[[fx.Node], Region | None],
        products_of: Mapping[fx.Node, Sequence[Anchor]],
    ) -> list[Region]:
        """Does the work of `sharing`, for the products of each A."""
        walk, kept, of_one_a = self.walk, [], dict[fx.Node, list[Region]]()
        for region in regions:
            if _is_segment(region, walk):
                of_one_a.setdefault(region.first.a, []).append(region)
            else:
                kept.append(region)
        for a, anchors in products_of.items():
            found = of_one_a.get(a, [])
            products = [anchor.node for anchor in anchors if _is_left(walk, anchor.node)]
            if len(found) + len(products) < 2:
                kept += found
                continue
            alone = [each for each in map(bare, products) if each is not None]
            used = set[fx.Node]()
            for region in self._shared([*found, *(each for each in alone if _is_segment(each, walk))]):
                if len(region.anchors) > 1 or region.products[0] not in products:
                    kept.append(region)
                    used.update(region.nodes)
                elif region.unshared:
                    (node,) = region.products
                    walk.rejections[node] = Refused(Reason.UNSHARED, why=region.unshared).rejection(node)
            for node in (node for region in alone for node in region.nodes):
                if node not in used:
                    del walk.owner[node]
        return kept

    def _shared(self, regions: list[Region]) -> Iterator[Region]:
        """The regions of one A, of which those are joined that can share a launch with a gain."""
        left = sorted(regions, key=lambda region: self.walk.order[region.products[-1]])
        bars: dict[fx.Node, str] = {}
        while left:
            group = [left.pop(0)]
            for other in list(left):
                if (bar := self._bar(group, other)) is None:
                    group.append(other)
                    left.remove(other)
                else:
                    bars[other.products[0]] = _unshared(group[0].products[0], bar)
                    bars.setdefault(group[0].products[0], _unshared(other.products[0], bar))
            for region in self._settled(group, bars):
                self.done |= dict.fromkeys(region.nodes, region)
                self.walk.span(region.nodes, _inputs(region))
                yield region

    def _settled(self, group: Sequence[Region], bars: Mapping[fx.Node, str]) -> list[Region]:
        """A group as one region if that pays; otherwise each of its regions, with the reason."""
        if len(group) == 1:
            return [replace(group[0], unshared=bars.get(group[0].products[0], ""))]
        joined = _joined(self.walk, group)
        if (loss := _loss(self.walk, group, joined)) is None:
            return [joined]
        first, second, *_ = group
        others = [second if each is first else first for each in group]
        return [
            replace(each, unshared=_unshared(other.products[0], loss))
            for each, other in zip(group, others, strict=True)
        ]

    def _bar(self, group: Sequence[Region], other: Region) -> str | None:
        """The reason why a region can't join others in one launch, or None if it can."""
        walk, every = self.walk, [*group, other]
        if len(group) == MAX_SEGMENTS:
            return f"at most {MAX_SEGMENTS} products can"
        first = group[0].spec
        alike = replace(other.spec.product, b_block=first.product.b_block) == first.product
        if not alike or other.spec.precision is not first.precision:
            differs = other_format(first.product, other.spec.product)
            return differs or "the products differ in dtypes, layouts or mode of accumulation"
        positions = [walk.order[node] for region in every for node in region.nodes]
        mutation = walk.mutations.first(min(positions) - 1, max(positions) + 1)
        if mutation is not None:
            return f"{program_name(mutation.node)} writes in place between them"
        # Before dependences: a pair that is left apart has one, since one region reads the other's plane.
        why = exposed_gather(walk, [anchor for region in every for anchor in region.anchors])
        if why is not None:
            return why
        if any(self._depends(each, other) or self._depends(other, each) for each in group):
            return "one depends on the other"
        return None

    def _depends(self, region: Region, on: Region) -> bool:
        """Whether an operand of a region depends on another one. Every kernel counts as one node."""
        walk, nodes = self.walk, set(on.nodes)
        first = walk.stretches.bound(walk.order[on.products[0]])
        stack, visited = list(_inputs(region)), set()
        while stack:
            node = stack.pop()
            if node in nodes:
                return True
            if node in visited or walk.order[node] < first:
                continue
            visited.add(node)
            if node in self.done:
                stack += _inputs(self.done[node])
            else:
                owner = walk.owner.get(node)
                stack += node.all_input_nodes if owner is None else owner.inputs
        return False


def _unshared(other: fx.Node, why: str) -> str:
    return f"shares no launch with {other.name}, because {why}"


def _is_left(walk: Walk, node: fx.Node) -> bool:
    """Whether a product is left to Inductor because nothing after it can be fused."""
    rejection = walk.rejections.get(node)
    return node not in walk.owner and rejection is not None and rejection.reason is Reason.NOTHING_TO_FUSE


def _is_segment(region: Region, walk: Walk) -> bool:
    """Whether a region may be a segment of columns: of one dense product, whose planes TMA writes. If a
    kernel converts its weight, the segment has rows of the transposed product."""
    product, spec = region.spec.product, region.spec
    return (
        planned_for(walk, region).segment_tile_n > 0
        and len(region.anchors) == 1
        and product.kind is ProductKind.DENSE
        and product.columns is Columns.ALL
        and not product.is_block_scaled
        and all(store.form.in_segments and store.dtype.values == 1 for store in spec.stores)
        and isinstance(region.first.n, int)
        and isinstance(region.first.k, int)
        and all(region.first.n * store.dtype.bits // 8 % TMA_ALIGN == 0 for store in spec.stores)
    )


def _inputs(region: Region) -> list[fx.Node]:
    return [*region.a_nodes, *(node for node, _ in region.b_views), *region.load_nodes]


def _loss(walk: Walk, group: Sequence[Region], joined: Region) -> str | None:
    """The reason why one launch is not faster than several by the cost model, or None if it is faster."""
    target = planned_for(walk, joined)
    arch, launch_us = Arch.of_name(target.name), LAUNCH_BYTES / target.timing.bytes_per_us
    assert arch is not None
    rows, k = joined.first.m, int(joined.first.k)

    def time(region: Region, m: int) -> float:
        return launch_us + predicted(arch, region.spec, m, int(region.problem[1]), k)

    def apart(m: int) -> float:
        left = [_TORCH if region.products[0] in walk.rejections else 1.0 for region in group]
        return sum(share * time(region, m) for region, share in zip(group, left, strict=True))

    # Without a shared launch, Inductor does the work of members that need one.
    is_needed = any(region.needs_shared_launch for region in group)
    try:
        if config.tile is not None:
            named(arch, joined.spec, config.tile)
        several = CONVERTED_ROWS if joined.spec.product.is_converted else _ROWS
        sizes = [rows] if isinstance(rows, int) and not config.batch_invariant else several
        if is_needed:
            ratio = mean(
                _of_tiles(joined, m) * time(joined, m) / _rotated_after(group, joined, m, arch) for m in sizes
            )
        else:
            ratio = mean(time(joined, m) / apart(m) for m in sizes)
    except ValueError as error:  # no tile serves all of them
        return str(error)
    if ratio < 1:
        return None
    other = "with rotations by Inductor" if is_needed else "launches of their own"
    return f"by the cost model it would take {ratio:.3f} times as long as {other}"


_FEW_ROWS = 128
_OF_WHOLE_VISITS = {True: 0.97, False: 1.2}
"""The times of kernels whose visits are whole heads, relative to a kernel without work after its products and
one of Inductor's, divided by the predicted ratio: for at most `_FEW_ROWS` rows, and for more. These are the
geometric means of 10 problems each: Phi-2, Pythia 2.8B and H2O-Danube 1.8B, 1 to 2,048 tokens, bf16 and
fp8 (H100, benchmarks/qkv.py)."""


_OF_PACKED_HEADS = {True: 1.0, False: 1.1}
"""The same for heads that are packed in one B, in other visits: GPT-NeoX-20B, 1 to 2,048 tokens."""


def _of_tiles(joined: Region, m: int) -> float:
    """The factor by which the predicted time of a kernel that rotates is corrected."""
    few = m <= _FEW_ROWS
    if not joined.spec.narrow_visits:
        return 1.0  # both halves of a head are in the same thread, in any tile
    if joined.spec.whole_columns > 1:
        return _OF_WHOLE_VISITS[few]
    return _OF_PACKED_HEADS[few] if joined.spec.product.b_block else 1.0


def _rotated_after(group: Sequence[Region], joined: Region, m: int, arch: Arch) -> float:
    """The predicted time of the products without work after them, in one launch or in a launch for each, and
    of a kernel of Inductor's that reads and writes the products that `joined` rotates. If blocks are reduced,
    as in norms by head, the kernel does so without rotations, too, in the same tiles.

    torch's products are taken to be as fast: in bf16, they took 0.93 to 1.16 times as long as predicted for
    one launch of ours, 1.03 times in the geometric mean (15 problems of 512 to 8,192 tokens, H100,
    benchmarks/findings.md).
    """
    spec, timing = joined.spec, arch.target.timing
    dtype, k = spec.stores[0].dtype, int(joined.first.k)
    rotated = sum(
        acc.width
        for acc, segment in zip(spec.accumulators, spec.segments, strict=True)
        if segment.moves_columns
    )
    moved = LAUNCH_BYTES + 2 * m * rotated * dtype.bits // 8

    def unrotated(region: Region) -> float:
        accumulators, alone = region.spec.accumulators, region.spec
        if not alone.pass_columns:
            stores = tuple(Store(f"out{i}", acc.name, dtype) for i, acc in enumerate(accumulators))
            alone = EpilogueSpec(accumulators, (), (), stores, alone.precision)
        return LAUNCH_BYTES / timing.bytes_per_us + predicted(arch, alone, m, int(region.problem[1]), k)

    return min(unrotated(joined), sum(map(unrotated, group))) + moved / timing.bytes_per_us


def _joined(walk: Walk, group: Sequence[Region]) -> Region:
    """Makes one region of several. Values get different names, and equal loads of several regions are one
    load."""
    merge = _Merge()
    for region in group:
        merge.add(region)
    first = group[0].spec
    spec = EpilogueSpec(
        tuple(merge.accumulators),
        tuple(merge.loads),
        tuple(merge.ops),
        tuple(merge.stores),
        first.precision,
    )
    anchors = tuple(anchor for region in group for anchor in region.anchors)
    nodes = sorted((node for region in group for node in region.nodes), key=walk.order.__getitem__)
    frames = {node: frame for region in group for node, frame in region.frames.items()}
    return Region(anchors, tuple(nodes), spec, tuple(merge.views), merge.outputs, frames, merge.origins)


class _Merge:
    """The values of several regions in one spec, with new names."""

    def __init__(self) -> None:
        self.accumulators: list[Accumulator] = []
        self.loads: list[Load] = []
        self.views: list[LoadView] = []
        self.ops: list[Op] = []
        self.stores: list[Store] = []
        self.outputs: dict[fx.Node, int] = {}
        self.origins: dict[str, fx.Node] = {}
        self._shared: dict[LoadView, str] = {}
        self._taken: set[str] = set()

    def add(self, region: Region) -> None:
        spec = region.spec
        (acc,) = spec.accumulators
        names = {acc.name: self._named("acc")}
        self.accumulators.append(replace(acc, name=names[acc.name], width=int(region.first.n)))
        for load, view in zip(spec.loads, region.views, strict=True):
            names[load.name] = self._load(load, view)
        for op in spec.ops:
            names[op.name] = self._named("t")
            operands = tuple(names.get(each, each) if isinstance(each, str) else each for each in op.operands)
            self.ops.append(replace(op, name=names[op.name], operands=operands))
        results = len(self.stores)
        for store in spec.stores:
            self.stores.append(replace(store, name=self._named("out"), value=names[store.value]))
        self.outputs |= {node: results + result for node, result in region.outputs.items()}
        self.origins |= {names[name]: node for name, node in region.origins.items()}

    def _load(self, load: Load, view: LoadView) -> str:
        """The name of a load. A load without columns is shared with another region that reads it in the same
        way."""
        if load.stride_n is Stride.ZERO and view in self._shared:
            return self._shared[view]
        name = load.name if load.stride_n is Stride.ZERO and load.name not in self._taken else None
        name = name or self._named(re.sub(r"\d+$", "", load.name))
        self._taken.add(name)
        self._shared[view] = name
        self.loads.append(replace(load, name=name))
        self.views.append(view)
        return name

    def _named(self, base: str) -> str:
        """A name that no value has: the base with the next number."""
        name = next(name for number in count() if (name := f"{base}{number}") not in self._taken)
        self._taken.add(name)
        return name
