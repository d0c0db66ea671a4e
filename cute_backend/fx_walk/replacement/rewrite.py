"""Replaces regions by calls of the one op, in place.

A region of shape (..., N) becomes

    results = cute_backend.gemm_epilogue([a, offsets of groups], [each b], [load views...], spec, constraints)
    out0 = results[0]                   # (M, N)
    out0.reshape(...)                   # where the graph had leading axes

at the place of the region's last node that computes. Every new node has a fake value in `meta["val"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V
from torch.fx.node import map_arg

from cute_backend.fx_walk.graph import new_calls
from cute_backend.fx_walk.graph.sizes import SymbolicSizes
from cute_backend.fx_walk.graph.static import fake, product, same_sizes
from cute_backend.fx_walk.products.scaling_recipes import VectorView
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.replacement.product_times import can_be_rated
from cute_backend.fx_walk.values.classify import ColumnSlice, LoadView
from cute_backend.fx_walk.values.lower import is_reshape
from cute_backend.planning import Constraints
from cute_backend.runtime.calls.op import gemm_epilogue, gemm_epilogue_into
from cute_backend.spec import Scaling

aten = torch.ops.aten


def rewrite(graph: fx.Graph, regions: Sequence[Region]) -> None:
    """Replaces each region by one call of the op, and erases nodes that nothing needs any more."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    sizes = SymbolicSizes(graph, [node for region in regions for node in region.nodes])
    replaced: dict[fx.Node, fx.Node] = {}
    for region in regions:
        last = max((node for node in region.nodes if not is_reshape(node)), key=order.__getitem__)
        with graph.inserting_before(last):
            _insert(graph, region, sizes, replaced)
    for region in regions:
        for node in sorted(region.nodes, key=order.__getitem__, reverse=True):
            if not node.users:
                graph.erase_node(node)
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    graph.lint()


def _insert(graph: fx.Graph, region: Region, sizes: SymbolicSizes, replaced: dict[fx.Node, fx.Node]) -> None:
    """Adds the call of one region. `replaced` maps outputs of finished regions to the nodes that replace
    them."""
    call = partial(new_calls.call, graph, region.products[-1])

    def sliced(node: fx.Node, axis: int, columns: ColumnSlice | None) -> fx.Node:
        if columns is None:
            return node
        bounds = (sizes.argument(bound) for bound in (columns.start, columns.end, columns.step))
        return call(aten.slice.Tensor, node, axis, *bounds)

    def scales(of: VectorView, k_axis: int) -> fx.Node:
        node = replaced.get(of.node, of.node)
        if of.tiled:
            # The scales of groups of B stay (groups, scales).
            flat = k_axis == 1 or not region.spec.product.kind.has_offsets
            node = call(aten.reshape.default, node, [-1]) if flat and fake(of.node).dim() != 1 else node
            return sliced(node, 0 if flat else 1, of.columns)
        if of.transposed:
            node = call(aten.permute.default, node, [1, 0])
        if of.padded:
            node = call(
                aten.slice.Tensor, node, k_axis, 0, sizes.argument(Scaling.SQUARE.blocks(region.first.k))
            )
        return sliced(node, 1, of.columns)

    def multiplied(node: fx.Node) -> fx.Node:
        axes = list(range(fake(node).dim()))
        node = replaced.get(node, node)
        return call(aten.permute.default, node, [*axes[:-2], axes[-1], axes[-2]]) if is_transposed else node

    is_transposed, (a, *offsets) = region.first.transposed, region.a_nodes
    bs = [sliced(multiplied(node), fake(node).dim() - 1, columns) for node, columns in region.b_views]
    loads = []
    for view in region.views:
        node = replaced.get(view.node, view.node)
        if view.pieces is not None:
            node = call(aten.reshape.default, node, [sizes.argument(view.pieces), -1])
        if view.columns is not None:
            ((axis,),) = view.n_axes
            node = sliced(node, axis, view.columns)
        node = _canonical(call, view, node, sizes)
        if view.kind.by_group and not view.n_axes:
            node = call(aten.unsqueeze.default, node, 1)
            node = call(aten.expand.default, node, [-1, sizes.argument(region.first.n)])
        loads.append(node)
    operands = [
        [
            multiplied(a),
            *(replaced.get(node, node) for node in offsets),
            *(scales(each, 1) for each in region.first.a_vectors),
        ],
        [*bs, *(scales(each, 0) for each in region.b_vectors)],
        loads,
    ]
    inside = set(region.nodes)
    planes = _planes(call, region, operands)
    for node, index in region.outputs.items():
        if node in region.caches:
            region.caches[node].nodes[-1].replace_all_uses_with(planes[index])
            continue
        frame, shape = region.frames.get(node), fake(node).shape
        order = list(range(len(shape)) if frame is None else frame.order(len(shape)))
        if frame is not None and region.spec.results[index][0].form.moves_axes:
            order = frame.memory_order(len(shape))
        output, ordered = planes[index], [shape[axis] for axis in order]
        if not same_sizes(ordered, fake(output).shape):
            output = call(aten.reshape.default, output, [sizes.argument(size) for size in ordered])
        if order != sorted(order):
            output = call(aten.permute.default, output, [order.index(axis) for axis in range(len(order))])
        # Inductor finds views by the storages of fakes, also in nodes that stay unchanged.
        output.meta["val"] = fake(node)
        replaced[node] = output
        node.replace_all_uses_with(output, delete_user_cb=lambda user: user not in inside)


def _planes(call: Callable[..., fx.Node], region: Region, operands: list[Any]) -> list[fx.Node]:
    """The results of a region's op. `operands` are A, B and the loads."""
    spec = region.spec
    if region.caches:
        return _planes_into(call, region, operands)
    results = call(gemm_epilogue, *operands, spec.to_json(), Constraints.from_config().text)
    if not V.aot_compilation and not can_be_rated(results.meta["val"][0].dtype):
        results.graph.erase_node(results)
        return _planes_into(call, region, operands)
    return [call(getitem, results, index) for index in range(len(spec.results))]


def _planes_into(call: Callable[..., fx.Node], region: Region, operands: list[Any]) -> list[fx.Node]:
    """The results of a region's op that writes to given tensors, such as caches. Of the graph's inputs they
    are new values, from a call that is functional (`cache_writes.py`)."""
    a, b, loads = operands
    caches = {region.outputs[node]: write.cache for node, write in region.caches.items()}
    values = map_arg([*operands, region.spec.to_json()], lambda source: source.meta["val"])
    with fake(a[0]).fake_mode:  # type: ignore[attr-defined]
        results = gemm_epilogue(*values)
    bases = []
    for index, result in enumerate(results):
        sizes, strides = list(result.shape), list(result.stride())
        how = {"dtype": result.dtype, "device": result.device}
        bases.append(caches.get(index) or call(aten.empty_strided.default, sizes, strides, **how))
    given = {f"_results_{index}_base_index": index for index in range(len(bases))}
    written = call(
        auto_functionalized_v2,
        gemm_epilogue_into,
        a=a,
        b=b,
        loads=loads,
        spec=region.spec.to_json(),
        constraints=Constraints.from_config().text,
        **given,
        _results_length=len(bases),
        _all_bases=bases,
    )
    return [call(getitem, written, 1 + index) for index in range(len(bases))]  # the op itself returns None


def _canonical(call: Callable[..., fx.Node], view: LoadView, node: fx.Node, sizes: SymbolicSizes) -> fx.Node:
    """The load as the op takes it: (M, N), (N,), (M,) or 0-d with the strides of its class, or with an axis
    for each mode of M and of N."""
    kept = [axis for axis in (*view.m_axes, *chain(*view.n_axes)) if axis >= 0]
    for axis in reversed(range(fake(node).dim())):
        if axis not in kept:
            node = call(aten.select.int, node, axis, 0)
    if kept != sorted(kept):
        node = call(aten.permute.default, node, [sorted(kept).index(axis) for axis in kept])
    rows, shape = sum(axis >= 0 for axis in view.m_axes), fake(node).shape
    own = iter(shape[:rows])
    m_sizes: list[Any] = [1 if axis < 0 else sizes.argument(next(own)) for axis in view.m_axes]
    if rows > 1 and not view.modes:
        m_sizes = [-1]
    groups = list(_groups(view.n_axes))
    n_sizes = [sizes.argument(product(shape[rows + at] for at in group)) for group in groups]
    if len(m_sizes) != rows or any(len(group) != 1 for group in groups):
        node = call(aten.reshape.default, node, [*m_sizes, *n_sizes])
    if view.modes or view.n_modes:
        m_extents = [sizes.argument(mode.extent) for mode in view.modes] or [-1] * len(m_sizes)
        n_extents = [sizes.argument(mode.extent) for mode in view.n_modes] or [-1] * len(n_sizes)
        node = call(aten.expand.default, node, [*m_extents, *n_extents])
    return node


def _groups(n_axes: tuple[tuple[int, ...], ...]) -> Iterator[range]:
    """The positions of the axes of each group, counted over all groups."""
    start = 0
    for group in n_axes:
        yield range(start, start + len(group))
        start += len(group)
