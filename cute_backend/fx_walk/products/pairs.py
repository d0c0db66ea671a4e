"""Pairs of accumulators: two products of one A, or two slices of one product's columns.

Slices are found by their coefficients. Column j of a view of the plane is the plane's column start + step *
j. Start and step follow from the view's strides and offset, however the program spells it (chunk, split,
slices, a view and a select). Two halves make a pair, and so do even and odd columns, whose step is 2.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from cute_backend.fx_walk.graph.mutation import is_view, root
from cute_backend.fx_walk.graph.static import (
    Size,
    collapsed_stride,
    fake,
    known,
    product,
    tensor_of,
)
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.refusals.reasons import user_label
from cute_backend.fx_walk.values.classify import ColumnSlice
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape
from cute_backend.signature import TMA_ALIGN
from cute_backend.spec import Accumulator, Columns


def column_slice(node: fx.Node, m: Size) -> ColumnSlice | None:
    """The columns that a view takes from all rows of a dense row-major plane. The columns of either are its
    last axis, or several axes that are one mode, like the even columns of heads.

    None if it views anything else.
    """
    tensor, plane = tensor_of(node), fake(root(node))
    if tensor is None or tensor.dtype is not plane.dtype or tensor.is_neg():
        return None
    taken, whole = _modes(tensor, m), _modes(plane, m)
    if taken is None or whole is None or not known(whole.step == 1):
        return None
    if not known(m == 1) and not (known(whole.rows == whole.count) and known(taken.rows == whole.count)):
        return None
    return ColumnSlice(tensor.storage_offset() - plane.storage_offset(), taken.step, taken.count)


@dataclass(frozen=True)
class _Modes:
    """The stride of a tensor's rows, and the stride and the number of its columns."""

    rows: Size
    step: Size
    count: Size


def _modes(tensor: torch.Tensor, m: Size) -> _Modes | None:
    """A tensor as `m` rows of columns. None if no axis divides the two, or if either is not one mode. One
    column has the stride of its axis, which says nothing."""
    for start in reversed(range(tensor.dim())):
        if known(product(tensor.shape[:start]) == m):
            rows, step = (
                collapsed_stride(tensor.shape[part], tensor.stride()[part])
                for part in (slice(start), slice(start, None))
            )
            return None if rows is None or step is None else _Modes(rows, step, product(tensor.shape[start:]))
    return None


def slices_of(anchor: Anchor, owned: Container[fx.Node]) -> tuple[ColumnSlice, ColumnSlice] | None:
    """The two slices that make a pair, among those that the work after a product takes from its columns.

    Work that is `owned` by other regions, and work that depends on it, is left out. Halves of a B that is
    contiguous along N form a pair only if TMA can read the second half. Of a weight that is converted, each
    product needs rows of its own.
    """
    half = anchor.n // 2
    if anchor.transposed or anchor.accumulator.b_block or not known(2 * half == anchor.n):
        return None
    taken = [
        columns
        for node in _after(anchor.node, owned)
        if (columns := column_slice(node, anchor.m)) is not None
    ]
    pairs = []
    if not anchor.accumulator.is_converted:
        pairs.append((ColumnSlice(0, 2, half), ColumnSlice(1, 2, half)))
    b = fake(anchor.b)
    if not known(half * b.stride(-1) * b.element_size() % TMA_ALIGN != 0):
        pairs.append((ColumnSlice(0, 1, half), ColumnSlice(half, 1, half)))
    for pair in pairs:
        if any(map(anchor.splits_blocks, pair)):
            continue
        if all(any(same_slice(columns, wanted) for columns in taken) for wanted in pair):
            return pair
    return None


def same_slice(left: ColumnSlice, right: ColumnSlice) -> bool:
    """Whether two slices are proven to be the same columns."""
    if not (known(left.start == right.start) and known(left.count == right.count)):
        return False
    return known(left.count == 1) or known(left.step == right.step)


def _after(node: fx.Node, owned: Container[fx.Node]) -> Iterator[fx.Node]:
    """The views of a product, of its views, and of pointwise work on them."""
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user not in seen and user not in owned and (is_pointwise(user) or is_view(user)):
                seen.add(user)
                stack.append(user)
                if is_view(user):
                    yield user


def of_slices(anchor: Anchor, slices: tuple[ColumnSlice, ColumnSlice]) -> tuple[Anchor, ...]:
    """A product as two products, each with one slice of its columns."""
    halves = known(slices[0].step == 1)
    places = (Columns.ALL, Columns.ALL) if halves else (Columns.EVEN, Columns.ODD)
    return tuple(
        anchor.of_slice(columns, replace(anchor.accumulator, columns=each))
        for columns, each in zip(slices, places, strict=True)
    )


def named(anchors: tuple[Anchor, ...]) -> tuple[Accumulator, ...]:
    """The accumulators of a region: `acc`, or `acc0` and `acc1`."""
    if len(anchors) == 1:
        return (anchors[0].accumulator,)
    return tuple(replace(anchor.accumulator, name=f"acc{i}") for i, anchor in enumerate(anchors))


def meet(left: fx.Node, right: fx.Node, owned: Container[fx.Node]) -> bool:
    """Whether an op reads both products, directly or through pointwise work."""
    return not set(reach(left, owned)).isdisjoint(reach(right, owned))


def reach(node: fx.Node, owned: Container[fx.Node]) -> Iterator[fx.Node]:
    """The nodes that depend on a node through pointwise ops and reshapes only, none of which is `owned`.

    Regions are found from the last to the first, so in a chain of layers this is the work of one layer.
    """
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user not in seen and user not in owned and (is_pointwise(user) or is_reshape(user)):
                seen.add(user)
                stack.append(user)
                yield user


def unlike(first: Anchor, second: Anchor) -> str | None:
    """The reason why one MMA can't compute two products; None if it can."""
    if first.accumulator.b_block or second.accumulator.b_block:
        return "columns are packed head by head"
    if first.a is not second.a:
        return f"that one multiplies {user_label(second.a)} and this one {user_label(first.a)}"
    if first.a_vectors != second.a_vectors:
        return "their A have different scales"
    if first.offsets is not second.offsets:
        return "their groups of rows have different offsets"
    if first.transposed is not second.transposed:
        return "one has rows in groups, and the other columns"
    if (first.columns is None) is not (second.columns is None):
        return "the columns of one are divided into two parts"
    if (why := other_format(first.accumulator, second.accumulator)) is not None:
        return why
    if first.accumulator != second.accumulator:
        return "their operands differ in dtype or layout, or their sums in how they are accumulated"
    if not known(first.n == second.n):
        return f"they have {first.n} and {second.n} columns"
    return None


def other_format(first: Accumulator, second: Accumulator) -> str | None:
    """The reason why one kernel can't multiply by two weights: their formats differ. None if they don't."""
    pairs = zip(_format(first), _format(second), strict=False)
    differing = [facts for facts in pairs if len(set(facts)) > 1]
    if not differing:
        return None
    these, those = (" with ".join(facts) for facts in zip(*differing, strict=True))
    return f"one kernel takes weights of one format, not {these} beside {those}"


def _format(product: Accumulator) -> Iterator[str]:
    """The format of a weight, then those of its scales and zeros of groups of K."""
    groups, dtype = product.weight_groups, product.b_dtype.value
    if groups is None:
        yield dtype
        return
    yield f"{dtype}{groups.of_values}"
    yield f"scales of {groups.scale.value} in {groups.product.value}"
    zero, difference = groups.zero, groups.difference
    yield "no zeros" if zero is None or difference is None else f"zeros of {zero.value} in {difference.value}"
