"""Scales of blocks in tiles of 128 rows by 4, as the next product's MMA reads them: `to_blocked` in graphs.

A program pads the scales of a quantised plane, (M, N / 32) of E8M0, with zeros to whole tiles, and reorders
them by views, permutations and copies. The walker follows these ops with five factors: tiles of rows, four
groups of rows in each, 32 rows in each group, tiles of scales, and four scales in each. The scales are in
tiles once the factors are in the order of the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.static import Size, arguments, fake, known, product, target_name, tensor_of
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member, Search
from cute_backend.fx_walk.region.value import E8M0, StoredValue
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.lower import filling, is_pointwise
from cute_backend.kinds.results import Form, ordered
from cute_backend.spec import SCALE_TILE, Order, Scaling, padded


@dataclass(frozen=True)
class Tiled(StoredValue):
    """The value `value` of the chain at the first column of every block of `block` columns, in tiles of
    scales."""

    block: int
    orders = (Order.TILED,)

    def admits(self, reader: fx.Node, is_inner: bool) -> bool:
        return False  # an op on padded scales is not on the plane

    def can_store(self, dtype: torch.dtype) -> bool:
        return dtype is E8M0

    def elements(self, m: int, n: int, block: int) -> int:
        return m * n // self.block

    def form(self, order: Order, block: int) -> Form:
        return ordered(order, self.block)


@dataclass(frozen=True)
class Tiling(Member):
    """A contiguous tensor `head` that has the scales of `source`, (M, N / b), in tiles. `inner` lists the
    nodes between the two, in order; nothing else reads them."""

    source: fx.Node

    def joins(self, draft: Draft) -> bool:
        return self.source in draft.values

    def join(self, search: Search, draft: Draft) -> Tiled:
        frame = draft.frames[self.source]
        _check_tiled(draft.chain, frame, self.head)
        return Tiled(str(draft.read(self.source, self.head)), frame.block)


@dataclass(frozen=True)
class _Factor:
    """A part of an axis of the scales. `place` is its position among the factors of the tiled layout."""

    place: int
    size: Size


def find(nodes: Iterable[fx.Node]) -> Iterator[Member]:
    """Yields the scales in tiles of a graph."""
    for node in nodes:
        if _is_scale(node):
            found = (_followed(node, user) for user in node.users)
            yield from (tiling for tiling in found if tiling is not None)


def _check_tiled(chain: Chain, frame: Frame, head: fx.Node) -> None:
    """Raises Refused unless a kernel can write these scales: they must belong to blocks of 32 columns, and
    the target's MMA must read them."""
    target = chain.target
    if target is not None and Scaling.MX not in target.scalings:
        raise Refused(Reason.NOT_POINTWISE, target=target_name(head))
    if frame.block != Scaling.MX.facts.k or not frame.is_in_order or frame.joins:
        raise Refused(Reason.NOT_POINTWISE, target=target_name(head))


def _is_scale(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype is E8M0 and is_pointwise(node)


def _followed(source: fx.Node, reader: fx.Node) -> Tiling | None:
    """Returns the tiling of a plane of scales that `reader` leads to. Returns None if the scales end in
    another order, or if something else reads a node between."""
    node, inner = source, list[fx.Node]()
    axes = _factors(fake(source).shape)
    while axes is None or not (_is_in_tiles(axes) and fake(node).is_contiguous()):
        users = [reader] if node is source else list(node.users)
        if len(users) != 1 or users[0].op != "call_function":
            return None
        (user,) = users
        if axes is not None and not _copies(user, node):
            axes = _moved(user, axes)
            if axes is None:
                return None
        elif axes is None and _leads_to_tiles(user, node):
            axes = _factors(fake(user).shape)
        elif axes is None:
            return None
        node = user
        inner.append(node)
    return Tiling(node, tuple(inner[:-1]), source)


def _is_reshape(node: fx.Node) -> bool:
    return node.op == "call_function" and target_name(node) in ("aten.reshape.default", "aten.view.default")


def _factors(shape: Sequence[Size]) -> list[list[_Factor]] | None:
    """Returns the factors of each axis of scales in whole tiles; None for other shapes."""
    if len(shape) != 2:
        return None
    rows, scales = shape
    height, width = SCALE_TILE
    if not (known(rows % height == 0) and known(scales % width == 0)):
        return None
    return [
        [_Factor(0, rows // height), _Factor(3, 4), _Factor(2, height // 4)],
        [_Factor(1, scales // width), _Factor(4, width)],
    ]


def _is_in_tiles(axes: list[list[_Factor]]) -> bool:
    """Whether the factors are in their places. A factor of size 1 may be anywhere."""
    places = [factor.place for axis in axes for factor in axis if not known(factor.size == 1)]
    return places == sorted(places)


def _joins_rows(user: fx.Node, source: fx.Node) -> bool:
    """Whether a view makes one axis of all but the last."""
    shape = fake(user).shape
    return _is_reshape(user) and len(shape) == 2 and known(shape[-1] == fake(source).shape[-1])


def _drops_axis(user: fx.Node, source: fx.Node) -> bool:
    """Whether a view drops a last axis of size 1."""
    shape, of = fake(user).shape, fake(source).shape
    if not (_is_reshape(user) or target_name(user) in ("aten.squeeze.dim", "aten.squeeze.dims")):
        return False
    same = all(known(size == had) for size, had in zip(shape, of[:-1], strict=False))
    return len(shape) == len(of) - 1 and known(of[-1] == 1) and same


def _leads_to_tiles(user: fx.Node, source: fx.Node) -> bool:
    """Whether a tensor has the scales of `source` in rows, with or without zeros behind them."""
    keeps = (_copies, _pads, _joins_rows, _drops_axis)
    return any(leads(user, source) for leads in keeps)


def _copies(user: fx.Node, source: fx.Node) -> bool:
    """Whether `source` overwrites a tensor of its shape and dtype, as in an assignment to a slice."""
    if target_name(user) != "aten.copy.default" or arguments(user)["src"] is not source:
        return False
    to, of = fake(user), fake(source)
    same = to.dtype is of.dtype and to.dim() == of.dim()
    return same and all(known(size == had) for size, had in zip(to.shape, of.shape, strict=True))


def _pads(user: fx.Node, source: fx.Node) -> bool:
    """Whether a tensor begins with the rows and scales of `source`, and pads an axis to whole tiles with
    zeros."""
    shape, of = fake(user).shape, fake(source).shape
    if len(shape) != 2 or len(of) != 2:
        return False
    pairs = zip(shape, padded(*of), of, strict=True)
    if not all(known(size == want) or known(size == had) for size, want, had in pairs):
        return False
    args = arguments(user)
    if target_name(user) == "aten.constant_pad_nd.default":
        return args["value"] in (0, None) and args["pad"][::2] == [0] * (len(args["pad"]) // 2)
    if target_name(user) != "aten.slice_scatter.default" or args["src"] is not source:
        return False
    base = args["self"]
    while base.op == "call_function" and target_name(base) == "aten.slice.Tensor":
        base = arguments(base)["self"]
    return filling(base) == 0 and args["start"] in (0, None) and args["step"] == 1


def _moved(user: fx.Node, axes: list[list[_Factor]]) -> list[list[_Factor]] | None:
    """Returns the factors of each axis after a view, a permutation or a copy. Returns None for other ops, and
    if a factor is split."""
    name, shape = target_name(user), fake(user).shape
    if name == "aten.permute.default":
        return [axes[axis] for axis in arguments(user)["dims"]]
    if name == "aten.transpose.int":
        moved, args = list(axes), arguments(user)
        first, second = args["dim0"], args["dim1"]
        moved[first], moved[second] = moved[second], moved[first]
        return moved
    if name == "aten.clone.default":
        return axes
    if not _is_reshape(user):
        return None
    rest = [factor for axis in axes for factor in axis]
    regrouped = []
    for size in shape:
        group: list[_Factor] = []
        while not known(product(factor.size for factor in group) == size):
            if not rest:
                return None
            group.append(rest.pop(0))
        regrouped.append(group)
    if any(not known(factor.size == 1) for factor in rest):
        return None
    if rest:
        regrouped[-1] += rest
    return regrouped
