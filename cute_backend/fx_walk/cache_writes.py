"""Results that a region writes to a cache of keys or values itself, in place of a copy after it.

Models with a static cache write keys and values (B, H, S, D) to some rows of a cache (B, H, L, D), by
`index_copy_`, by an assignment to `cache[:, :, positions]` or by one to a slice. In a post-grad graph this is
an `index_put` or a `slice_scatter`. Attention reads its result, which a `copy_` at the end stores in the
graph's input. The region gives the same result: the rewritten graph has it from an op that writes to its
arguments, made functional by torch's `auto_functionalized_v2`. Inductor's own pass then decides whether the
op writes to the input or to a copy of it. It writes to the input if nothing else in the graph reads or writes
that, which is asked here too, since with a copy there would be no gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import fx

from cute_backend import config
from cute_backend.fx_walk.classify import LoadView, Mode
from cute_backend.fx_walk.frame import Frame
from cute_backend.fx_walk.region import CacheWrite, Region
from cute_backend.fx_walk.static import arguments, fake, known, product, target_name, tensor_of
from cute_backend.spec import (
    HEAD_COLUMNS,
    Cache,
    DType,
    Load,
    LoadKind,
    Order,
    ProductKind,
    Store,
    Stride,
)

_INTEGERS = {torch.int32: DType.I32, torch.int64: DType.I64}

MOST_ROWS = 256
"""The most rows of a plane that are written to a cache. They are written by element, which saves a launch but
takes longer than TMA and a copy do for many rows: q, k and v of a Llama 8B layer with rotary embeddings take
22.9, 22.4 and 22.1 us for 1, 16 and 64 tokens, and 25.4, 25.7 and 25.3 if a kernel of Inductor's copies, but
165.1 us and 158.2 for 2,048 (H100, benchmarks/qkv.py). Between these, both times are about even at 660."""

_VIEWS = ("aten.reshape.default", "aten.permute.default")

_MOST_ELEMENTS = 2**31
"""Elements of a cache: kernels number them in 32 bits."""


def write_to_caches(regions: Sequence[Region]) -> list[Region]:
    """The regions, with results in caches where they can be there."""
    owned = {node for region in regions for node in region.nodes}
    return [_written(region, owned) for region in regions]


def _written(region: Region, owned: set[fx.Node]) -> Region:
    if not isinstance(region.first.m, int) or region.first.m > MOST_ROWS:
        return region
    for node, index in region.outputs.items():
        (store, *parts) = region.spec.results[index]
        alone = list(region.outputs.values()).count(index) == 1 and not parts
        if not (alone and _is_plain(store) and region.spec.product.kind is ProductKind.DENSE):
            continue
        found = _Found.of(region, node, owned)
        if found is not None and len(region.spec.loads) < config.max_loads:
            region = _with(region, node, store, found)
    return region


def _is_plain(store: Store) -> bool:
    return not (store.reduce or store.block or store.part) and store.order is Order.ROW


@dataclass(frozen=True)
class _Found:
    """A write of a region's result to a cache: its `node`, the cache, S, and the position of each row or, if
    these follow each other, that of the first one. `target` is the slice of the cache that is written, if the
    graph has one."""

    node: fx.Node
    cache: fx.Node
    rows: int
    at: fx.Node | int
    follows: bool
    target: fx.Node | None = None

    @staticmethod
    def of(region: Region, value: fx.Node, owned: set[fx.Node]) -> _Found | None:
        """The write of a result `value`; None if there is none, or if it is used in any other way."""
        seen, frame = _seen(region, value)
        if len(seen.users) != 1 or not set(seen.users).isdisjoint(region.nodes):
            return None
        (write,) = seen.users
        found = _of_positions(write, seen) or _of_slice(write, seen)
        if found is None or not _is_cache(found, seen) or not _is_whole(region, seen, frame):
            return None
        if isinstance(found.at, fx.Node) and (
            fake(found.at).device != region.first.device or _depends(found.at, owned)
        ):
            return None
        return found


def _seen(region: Region, value: fx.Node) -> tuple[fx.Node, Frame | None]:
    """A result as its only user sees it, through reshapes and permutations, and the frame of that view."""
    m, shape = region.first.m, fake(value).shape
    n = product(shape) // m
    frame = region.frames.get(value) or Frame.of(shape, m, n)
    while frame is not None and len(value.users) == 1:
        (user,) = value.users
        if user.op != "call_function" or target_name(user) not in _VIEWS:
            break
        value, frame = user, frame.reshaped(user, m, n)
    return value, frame


def _of_positions(write: fx.Node, value: fx.Node) -> _Found | None:
    """A write by `index_put` with indices of the rows."""
    if write.op != "call_function" or target_name(write) != "aten.index_put.default":
        return None
    args = arguments(write)
    indices, cache = list(args["indices"]), args["self"]
    if args["values"] is not value or args["accumulate"] or len(indices) != 3 or indices[:2] != [None, None]:
        return None
    positions = tensor_of(indices[2])
    rows = fake(value).shape[2] if fake(value).dim() == 4 else None
    if positions is None or positions.dtype not in _INTEGERS or positions.dim() != 1:
        return None
    if not isinstance(rows, int) or not known(positions.shape[0] == rows) or not isinstance(cache, fx.Node):
        return None
    first = _first_of_range(indices[2], rows)
    if first is None and rows == 1:
        first = indices[2]
    return _Found(write, cache, rows, indices[2] if first is None else first, first is not None)


def _first_of_range(positions: fx.Node, rows: int) -> fx.Node | None:
    """The tensor of one element to which `arange(rows)` is added; None if positions are anything else."""
    if positions.op != "call_function" or target_name(positions) != "aten.add.Tensor":
        return None
    args = arguments(positions)
    left, right = args["self"], args["other"]
    if args["alpha"] != 1:
        return None
    for counted, first in ((left, right), (right, left)):
        if not (isinstance(counted, fx.Node) and _counts(counted, rows)):
            continue
        tensor = tensor_of(first)
        if tensor is not None and tensor.dtype in _INTEGERS and known(tensor.numel() == 1):
            return first
    return None


def _counts(node: fx.Node, rows: int) -> bool:
    """Whether a node is the numbers from 0 on."""
    if node.op != "call_function" or target_name(node) != "prims.iota.default":
        return False
    args = arguments(node)
    return (args["length"], args["start"], args["step"]) == (rows, 0, 1)


def _of_slice(write: fx.Node, value: fx.Node) -> _Found | None:
    """A write of rows that follow each other from a known one on, by `slice_scatter`. A program that assigns
    to a slice copies to it first, as `copy` of the slice, of which only the shape counts."""
    source, target = value, None
    if write.op == "call_function" and target_name(write) == "aten.copy.default" and len(write.users) == 1:
        args = arguments(write)
        target = args["self"]
        if args["src"] is not value or fake(target).shape != fake(value).shape or len(target.users) != 1:
            return None
        source, (write,) = write, write.users
    if write.op != "call_function" or target_name(write) != "aten.slice_scatter.default":
        return None
    args = arguments(write)
    cache, start, rows = args["self"], args["start"] or 0, fake(value).shape[2:3]
    if args["src"] is not source or args["step"] != 1 or fake(cache).dim() != 4 or args["dim"] % 4 != 2:
        return None
    if not (isinstance(start, int) and len(rows) == 1 and isinstance(rows[0], int)):
        return None
    length = fake(cache).shape[2]
    if not isinstance(length, int):
        return None
    start = max(start + length if start < 0 else start, 0)
    return _Found(write, cache, rows[0], start, True, target) if start + rows[0] <= length else None


def _is_cache(found: _Found, value: fx.Node) -> bool:
    """Whether the written tensor is an input of the graph that nothing else reads, contiguous, and the result
    is stored in it at the end of the graph."""
    cache, tensor, rows = found.cache, fake(found.cache), fake(value)
    others = [user for user in cache.users if user not in (found.node, found.target)]
    if cache.op != "placeholder" or len(others) != 1 or target_name(others[0]) != "aten.copy_.default":
        return False
    copied = arguments(others[0])
    if copied["self"] is not cache or copied["src"] is not found.node or others[0].users:
        return False
    sizes = (*tensor.shape, *rows.shape)
    if tensor.dim() != 4 or rows.dim() != 4 or not all(isinstance(size, int) for size in sizes):
        return False
    batches, heads, length, columns = tensor.shape
    return (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.dtype == rows.dtype
        and tuple(rows.shape) == (batches, heads, found.rows, columns)
        and found.rows <= length
        and tensor.numel() < _MOST_ELEMENTS
        and columns % HEAD_COLUMNS == 0
        and tensor.device == rows.device
    )


def _is_whole(region: Region, value: fx.Node, frame: Frame | None) -> bool:
    """Whether a result (B, H, S, D) with this frame is the plane (B * S, H * D)."""
    shape = fake(value).shape
    place = Frame(_long(shape, 0, 2), _long(shape, 1, 3))
    return frame == place and known(shape[0] * shape[2] == region.first.m)


def _long(shape: Sequence[Any], *axes: int) -> tuple[int, ...]:
    return tuple(axis for axis in axes if shape[axis] != 1)


def _depends(node: fx.Node, owned: set[fx.Node]) -> bool:
    """Whether a node depends on any region."""
    stack, visited = [node], set[fx.Node]()
    while stack:
        each = stack.pop()
        if each in owned:
            return True
        if each not in visited:
            visited.add(each)
            stack += each.all_input_nodes
    return False


def _with(region: Region, value: fx.Node, store: Store, found: _Found) -> Region:
    """The region with a result in a cache."""
    batches, _, length, columns = fake(found.cache).shape
    spec, loads, views = region.spec, region.spec.loads, region.views
    if isinstance(found.at, int):
        at: int | str = found.at
    else:
        view = _view(found.at, found, batches)
        known_as = [load.name for load, each in zip(loads, views, strict=True) if each == view]
        at = known_as[0] if known_as else _free(region, "first" if found.follows else "positions")
        if not known_as:
            modes = tuple(mode.stride for mode in view.modes)
            loads = (*loads, Load(at, view.kind, view.dtype, view.stride_m, view.stride_n, modes))
            views = (*views, view)
    cache = Cache(length, found.rows, columns, at)
    stores = tuple(replace(each, heads=None, cache=cache) if each is store else each for each in spec.stores)
    spec = replace(spec, loads=loads, stores=stores)
    nodes = (*([] if found.target is None else found.target.users), found.node)
    return replace(
        region, spec=spec, views=views, caches={**region.caches, value: CacheWrite(nodes, found.cache)}
    )


def _view(at: fx.Node, found: _Found, batches: int) -> LoadView:
    """The position of the first row, or those of the rows of each batch, as an operand."""
    tensor = fake(at)
    dtype = _INTEGERS[tensor.dtype]
    if found.follows:
        return LoadView(at, LoadKind.SCALAR, dtype, Stride.ZERO, Stride.ZERO, (), ())
    if batches == 1:
        stride = Stride.ONE if known(tensor.stride(0) == 1) else Stride.OTHER
        return LoadView(at, LoadKind.COLVEC, dtype, stride, Stride.ZERO, (0,), ())
    modes = (Mode.of(Stride.ZERO, batches), Mode.of(Stride.OTHER, found.rows))
    return LoadView(at, LoadKind.COLVEC, dtype, Stride.OTHER, Stride.ZERO, (-1, 0), (), modes=modes)


def _free(region: Region, base: str) -> str:
    """A name that no value of a region has."""
    taken = {*region.spec.dtypes, *(store.name for store in region.spec.stores)}
    return next(name for number in count() if (name := f"{base}{number}") not in taken)
