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

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.static import PLACES, arguments, fake, known, product, target_name, tensor_of
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, Rejection, user_label
from cute_backend.fx_walk.region.region import CacheWrite, Region
from cute_backend.fx_walk.values.classify import LoadView, Mode
from cute_backend.kinds.results import HEAD_COLUMNS, Cache
from cute_backend.spec import (
    Load,
    LoadKind,
    ProductKind,
    Store,
    Stride,
)

MOST_ROWS = 256
"""The most rows of a plane that are written to a cache. They are written by element, which saves a launch but
takes longer than TMA and a copy do for many rows: q, k and v of a Llama 8B layer with rotary embeddings take
22.9, 22.4 and 22.1 us for 1, 16 and 64 tokens, and 25.4, 25.7 and 25.3 if a kernel of Inductor's copies, but
165.1 us and 158.2 for 2,048 (H100, benchmarks/qkv.py). Between these, both times are about even at 660."""

_VIEWS = ("aten.reshape.default", "aten.permute.default")
_PUT = "aten.index_put.default"
_COPY = "aten.copy.default"
_STORE = "aten.copy_.default"
_WRITES = (_PUT, "aten.slice_scatter.default")

_MOST_ELEMENTS = 2**31
"""Elements of a cache: kernels number them in 32 bits."""


def write_to_caches(regions: Sequence[Region], barred: str = "") -> tuple[list[Region], list[Rejection]]:
    """Returns the regions, with results in caches where they can be there, and a rejection for every write to
    a cache that stays with Inductor. `barred` is why all of them do, or is empty."""
    owned = {node for region in regions for node in region.nodes}
    written, rejections = [], []
    for region in regions:
        for value in region.outputs:
            write = _write_of(value)
            if write is None:
                continue
            try:
                if barred:
                    raise _left(write, barred)
                region = _into_cache(region, value, write, owned)
            except Refused as refused:
                rejections.append(refused.rejection(write))
        written.append(region)
    return written, rejections


def _write_of(value: fx.Node) -> fx.Node | None:
    """The node that writes a value, or a view of it, to rows of a tensor that is stored in an input of the
    graph; None if there is none."""
    stack = list(value.users)
    while stack:
        node = stack.pop()
        if node.op != "call_function":
            continue
        name = target_name(node)
        if name in _WRITES and _stored(root(arguments(node)["self"])):
            return node
        if name in (*_VIEWS, _COPY):
            stack += node.users
    return None


def _stored(cache: fx.Node) -> list[fx.Node]:
    """The nodes that store a value in an input of the graph."""
    if cache.op != "placeholder":
        return []
    users = (user for user in cache.users if user.op == "call_function")
    return [user for user in users if target_name(user) == _STORE and arguments(user)["self"] is cache]


def _left(write: fx.Node, why: str) -> Refused:
    cache = user_label(root(arguments(write)["self"]))
    return Refused(Reason.CACHE, target=target_name(write), cache=cache, why=why)


def _into_cache(region: Region, value: fx.Node, write: fx.Node, owned: set[fx.Node]) -> Region:
    """The region with a result in a cache. Raises Refused if the result can't be there."""
    index = region.outputs[value]
    (store, *parts) = region.spec.results[index]
    rows = region.first.m
    if not isinstance(rows, int) or rows > MOST_ROWS:
        number = (
            f"{rows} rows" if isinstance(rows, int) else "a number of rows that is known only at run time"
        )
        raise _left(write, f"the product has {number}; a kernel writes at most {MOST_ROWS}")
    if region.spec.product.kind is not ProductKind.DENSE or parts or not store.is_whole:
        raise _left(write, "the result is not the plane of a single dense product")
    seen, frame = _seen(region, value)
    alone = list(region.outputs.values()).count(index) == 1 and len(seen.users) == 1
    if not alone or not set(seen.users).isdisjoint(region.nodes):
        raise _left(write, "the result is used in another way, too")
    found = _of_positions(write, seen) if target_name(write) == _PUT else _of_slice(write, seen)
    _check_cache(found, seen)
    _check_result(region, found, seen, frame)
    if isinstance(found.at, fx.Node):
        if fake(found.at).device != region.first.device:
            places = fake(found.at).device, region.first.device
            raise _left(write, "its positions are on {} and the product on {}".format(*places))
        if _depends(found.at, owned):
            raise _left(write, "its positions are computed from the result of a kernel")
    if len(region.spec.loads) >= config.max_loads:
        raise _left(write, f"the kernel reads {config.max_loads} operands already")
    return _with(region, value, store, found)


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


def _of_positions(write: fx.Node, value: fx.Node) -> _Found:
    """A write by `index_put` with indices of the rows."""
    args = arguments(write)
    indices, cache = list(args["indices"]), args["self"]
    if args["accumulate"]:
        raise _left(write, "it adds to the cache")
    positions = tensor_of(indices[2]) if len(indices) == 3 and indices[:2] == [None, None] else None
    rows = fake(value).shape[2] if fake(value).dim() == 4 else None
    if positions is None or positions.dim() != 1 or positions.dtype not in PLACES:
        raise _left(write, "it does not write to positions (S,) of int32 or int64 of a cache (B, H, L, D)")
    if not isinstance(rows, int) or not known(positions.shape[0] == rows):
        raise _left(write, f"{positions.shape[0]} positions are not shown to be those of {rows} rows")
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
        if tensor is not None and tensor.dtype in PLACES and known(tensor.numel() == 1):
            return first
    return None


def _counts(node: fx.Node, rows: int) -> bool:
    """Whether a node is the numbers from 0 on."""
    if node.op != "call_function" or target_name(node) != "prims.iota.default":
        return False
    args = arguments(node)
    return (args["length"], args["start"], args["step"]) == (rows, 0, 1)


def _of_slice(write: fx.Node, value: fx.Node) -> _Found:
    """A write of rows that follow each other from a known one on, by `slice_scatter`. A program that assigns
    to a slice copies to it first, as `copy` of the slice, of which only the shape counts."""
    args, target = arguments(write), None
    if args["src"] is not value:
        copied = args["src"]
        target = arguments(copied)["self"] if target_name(copied) == _COPY else copied
        lone = len(target.users) == len(copied.users) == 1
        if value not in copied.all_input_nodes or not lone or fake(target).shape != fake(value).shape:
            raise _left(write, "the result is not assigned to the slice as it is")
    cache, start, rows = args["self"], args["start"] or 0, fake(value).shape[2:3]
    if args["step"] != 1 or fake(cache).dim() != 4 or args["dim"] % 4 != 2:
        raise _left(write, "it does not write to neighbouring positions of a cache (B, H, L, D)")
    length = fake(cache).shape[2]
    if not all(isinstance(size, int) for size in (start, length, *rows)):
        raise _left(write, "the slice is known only at run time")
    start = max(start + length if start < 0 else start, 0)
    if start + rows[0] > length:
        raise _left(write, f"positions {start} to {start + rows[0]} are not in a cache of {length}")
    return _Found(write, cache, rows[0], start, True, target)


def _check_cache(found: _Found, value: fx.Node) -> None:
    """Requires that the written tensor is a whole input of the graph that nothing else reads, contiguous, and
    that the result is stored in it at the end of the graph."""
    write, cache, tensor = found.node, found.cache, fake(found.cache)
    if cache.op != "placeholder":
        raise _left(write, "it writes to a view or to an earlier result; a kernel writes to a whole input")
    if not all(isinstance(size, int) for size in (*tensor.shape, *fake(value).shape)):
        raise _left(write, "a size of the cache or of the result is known only at run time")
    if not tensor.is_contiguous() or tensor.storage_offset() != 0 or tensor.numel() >= _MOST_ELEMENTS:
        strides = tuple(tensor.stride())
        raise _left(
            write,
            f"the cache has shape {tuple(tensor.shape)} and strides {strides}; a kernel writes to one that "
            f"is contiguous, with fewer than {_MOST_ELEMENTS} elements",
        )
    others = [user for user in cache.users if user not in (write, found.target)]
    stores = _stored(cache)
    if others != stores or len(stores) != 1 or arguments(stores[0])["src"] is not write or stores[0].users:
        raise _left(write, "the cache is read before, or written again")


def _check_result(region: Region, found: _Found, value: fx.Node, frame: Frame | None) -> None:
    """Requires that a result (B, H, S, D) is the whole plane (B * S, H * D), and fits the cache."""
    tensor, rows = fake(found.cache), fake(value)
    shape = rows.shape
    if tensor.dtype != rows.dtype or tensor.device != rows.device:
        raise _left(
            found.node,
            f"the cache is {tensor.dtype} on {tensor.device} and the result {rows.dtype} on {rows.device}",
        )
    batches, heads, length, columns = tensor.shape
    place = Frame(_long(shape, 0, 2), _long(shape, 1, 3))
    whole = frame == place and known(shape[0] * shape[2] == region.first.m)
    fits = tuple(shape) == (batches, heads, found.rows, columns) and found.rows <= length
    if not (whole and fits and columns % HEAD_COLUMNS == 0):
        raise _left(
            found.node,
            f"the result {tuple(shape)} is not the product's plane by heads (B, H, S, D) of this cache "
            f"{tuple(tensor.shape)}, with a multiple of {HEAD_COLUMNS} for D",
        )


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
    stores = tuple(replace(each, form=cache) if each is store else each for each in spec.stores)
    spec = replace(spec, loads=loads, stores=stores)
    nodes = (*([] if found.target is None else found.target.users), found.node)
    return replace(
        region, spec=spec, views=views, caches={**region.caches, value: CacheWrite(nodes, found.cache)}
    )


def _view(at: fx.Node, found: _Found, batches: int) -> LoadView:
    """The position of the first row, or those of the rows of each batch, as an operand."""
    tensor = fake(at)
    dtype = PLACES[tensor.dtype]
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
