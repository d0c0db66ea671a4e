"""Resolves arguments of a region's members to values of its chain: numbers, values of other members, or
loads.

The kernel also does work on operands alone if that costs no memory traffic: a cast to a wider dtype, any cast
between floats of a vector that is in memory, or one op of numbers and a vector that all heads share, which
would be a launch by itself, and ops of the plane's own shape whose results nothing else needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import fake, first_argument, known, tensor_of
from cute_backend.fx_walk.products.group_rows import group_vectors
from cute_backend.fx_walk.products.questions import (
    is_cast_of_stored,
    is_free_cast,
    is_stored,
    is_work_on_stored,
)
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.search.dependences import cycle, depends, reduction_before
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.fx_walk.values.classify import LoadView, classify, supported_dtype
from cute_backend.fx_walk.values.lower import constant, is_pointwise, lower, lower_cast
from cute_backend.fx_walk.values.numbers import number
from cute_backend.spec import LoadKind, Operand

_MAX_OPERAND_WORK = 16
"""The longest sequence of ops on operands alone that a region includes. The value before them is a load."""


@dataclass(frozen=True)
class Reader:
    """A node whose arguments become values of the chain."""

    node: fx.Node
    member: fx.Node
    """The node itself, or the member that needs its result. Operands are broadcast to the member's plane."""
    side: int | None = None
    """The anchor of a pair whose slice of columns is read, if the member has a product's whole plane."""
    depth: int = 0
    """The length of the sequence of ops on operands alone, up to this node."""

    def behind(self, node: fx.Node) -> Reader:
        """The reader of the arguments of `node`, an operand of this one that the kernel computes."""
        return replace(self, node=node, depth=self.depth + 1)


def resolve(walk: Walk, draft: Draft, argument: Any, reader: Reader) -> Operand:
    """An argument of a reader as a value of the chain: a number, a member's value, or a load.

    Raises Refused if it can't be one.
    """
    node, side = reader.node, reader.side
    if not isinstance(argument, fx.Node):
        return number(argument)
    if argument in draft.values:
        return draft.read(argument, node, side)
    if is_stored(argument):
        argument = walk.firsts.get(argument, argument)  # a program may take a part of a table several times
    frame = draft.frames.get(reader.member)
    if (argument, side, frame) in draft.work:
        return draft.work[argument, side, frame]
    if tensor_of(argument) is None:
        raise Refused(Reason.SYMBOLIC_SCALAR, value=argument)
    filled = constant(argument)
    if filled is not None:
        return filled
    if reader.depth < _MAX_OPERAND_WORK and is_free_cast(argument):
        return _cast(walk, draft, argument, reader)
    if depends(walk, draft, argument):
        reduction = reduction_before(walk, draft, argument)
        if reduction is not None:
            raise Refused(Reason.FEEDBACK, reduction=reduction, into=node)
        raise cycle(walk, draft, argument)
    shape, device = fake(reader.member).shape, draft.first.device
    view = group_vectors(argument, shape, frame, draft.first)
    view = view or classify(argument, shape, device, frame)
    if not view.kind.is_plane and reader.depth < _MAX_OPERAND_WORK and is_cast_of_stored(argument):
        return _cast(walk, draft, argument, reader)
    columns = None if side is None else draft.anchors[side].columns
    view = view if columns is None else view.of_slice(columns)
    is_work = reader.depth < _MAX_OPERAND_WORK and view not in draft.chain.views
    is_cheap = argument in walk.redone or (_of_heads(view) and is_work_on_stored(argument))
    if is_work and (is_cheap or _is_for_the_region_alone(walk, draft, argument, node)):
        mark = draft.chain.mark()
        try:
            with draft.chain.lowering(argument):
                value = lower(
                    argument, draft.chain, lambda inner: resolve(walk, draft, inner, reader.behind(argument))
                )
        except Refused:
            draft.rollback(mark)
        else:
            draft.work[argument, side, frame] = value
            return value
    return draft.chain.load(view)


def _of_heads(view: LoadView) -> bool:
    """Whether an operand is a vector that blocks of columns share, as the weights of a norm by head."""
    return view.kind is LoadKind.ROWVEC and view.blocks is not None


def _cast(walk: Walk, draft: Draft, cast: fx.Node, reader: Reader) -> Operand:
    """The value of an operand that is a cast, which the kernel does itself."""
    source = resolve(walk, draft, first_argument(cast), replace(reader, depth=reader.depth + 1))
    return lower_cast(draft.chain, source, supported_dtype(user_label(cast), fake(cast).dtype))


def _is_for_the_region_alone(walk: Walk, draft: Draft, node: fx.Node, reader: fx.Node) -> bool:
    """Whether an operand is work of the reader's own shape, whose result nothing outside needs.

    Its other readers are members, or are likely to become members, or are such work themselves. So a value
    that a derivative reads several times is computed here, and is not written once for each way of reading
    it.
    """
    plane = fake(reader).shape
    if not _is_operand_work(walk, node, plane):
        return False
    stack, seen = [node], {node, reader}
    while stack:
        for user in stack.pop().users:
            if user in seen or user in draft.values:
                continue
            if user in draft.expected and user not in walk.owner:
                continue
            if not _is_operand_work(walk, user, plane):
                return False
            seen.add(user)
            stack.append(user)
    return True


def _is_operand_work(walk: Walk, node: fx.Node, plane: torch.Size) -> bool:
    """Whether a node is pointwise work of this shape on values in memory, or on such work.

    Work that follows from another product is left to that product's region, and work on values that
    Inductor computes where they are read, such as random numbers, to Inductor.
    """
    if node.op != "call_function" or not is_pointwise(node) or node in walk.owner:
        return False
    result = tensor_of(node)
    if result is None or node in walk.after_products or len(result.shape) != len(plane):
        return False
    if not all(is_pointwise(source) or is_stored(source) for source in node.all_input_nodes):
        return False
    return all(known(a == b) for a, b in zip(result.shape, plane, strict=True))
