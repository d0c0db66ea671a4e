"""Reductions of a value on the plane: over rows, columns or everything, or over blocks of columns.

Most are the end of a region: the result is complete only when the kernel has ended, so no node of the same
region can read it. Blocks of columns that a tile holds whole are reduced in the tile, and read again
(`block_reductions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.static import (
    RESULT_DTYPES,
    Size,
    describe,
    fake,
    first_argument,
    known,
    on_plane,
    product,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.members.block_reductions import frame_of_blocks, lower_blocks, unfit_blocks
from cute_backend.fx_walk.members.spelled_reductions import Found, feeds, read_reduction
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member, Search
from cute_backend.fx_walk.region.reduced import Reduced
from cute_backend.fx_walk.region.value import Plane, Value
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.held import check_places
from cute_backend.fx_walk.values.lower import is_pointwise, lower_cast
from cute_backend.spec import BATCH_ROWS, Axis, DType, Operand, ProductKind, Reduction


def find(nodes: Iterable[fx.Node]) -> Iterator[Member]:
    """The reductions of a graph."""
    for node in nodes:
        if (found := read_reduction(node)) is not None:
            yield Reducing(node, found.inner, found)
        elif is_reduction(node):
            yield Unknown(node, ())


@dataclass(frozen=True)
class Reducing(Member):
    """A reduction that a kernel could do."""

    found: Found
    joins_late = True

    def joins(self, draft: Draft) -> bool:
        return self.found.source in draft.values

    def is_whole(self, draft: Draft) -> bool:
        if not self.found.is_of_blocks_alone:
            return True
        return self.found.source in draft.frames and frame_of_blocks(self.found, draft) is not None

    def join(self, search: Search, draft: Draft) -> Value:
        found, anchor = self.found, draft.first
        source = draft.frames[found.source]
        if source.part is not None:
            raise Refused(Reason.REDUCED_PART, target=target_name(found.head), part=source.part)
        frame = frame_of_blocks(found, draft)
        if frame is None:
            if source.joins:
                axes, shape = describe(found.dims), describe(fake(found.source).shape)
                raise Refused(Reason.REDUCED_AXES, target=target_name(found.head), axes=axes, shape=shape)
            if found.is_of_blocks_alone:
                _refuse_unknown(found.head, anchor.m, anchor.n)
            _refuse_rounds(found, search.heads, anchor.m, anchor.n)
        value = draft.read(found.source, found.head)
        if frame is None:
            check_places(draft.chain)
            return _reduced(found, draft.chain, value, source)
        if found.head in search.taken_back:
            raise search.taken_back[found.head]
        result = lower_blocks(found, draft.chain, value, frame.block, anchor.m)
        draft.frames[found.head] = frame
        return Plane(result)

    def unfit(self, draft: Draft) -> Refused | None:
        return unfit_blocks(draft.chain)


@dataclass(frozen=True)
class Unknown(Member):
    """A reduction that kernels do not compute, such as `all`."""

    def joins(self, draft: Draft) -> bool:
        return True

    def join(self, search: Search, draft: Draft) -> Value:
        _refuse_unknown(self.head, draft.first.m, draft.first.n)


def _reduced(found: Found, chain: Chain, value: Operand, frame: Frame) -> Reduced:
    """A reduction of `value`, which is the chain's value of `found.source` and has `frame`.

    Raises Refused if it covers a part of M that is not the rows of a batch, or the rows of several products,
    or has a dtype that no kernel reduces.
    """
    rows = _batch_rows(found, frame)
    axis = Axis.COLUMN if rows else _axis(found, frame)
    if not axis.keeps_rows and any(acc.kind is not ProductKind.DENSE for acc in chain.accumulators):
        raise Refused(Reason.BATCHED, target=target_name(found.head))
    if found.dtype is not None:
        value = lower_cast(chain, value, supported_dtype(found.head, found.dtype))
    own = chain.dtype(value)
    if own is DType.I32:
        what = "a reduction of int32, and kernels reduce fp32 alone"
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=found.head, dtype=what)
    result = fake(found.head).dtype
    if RESULT_DTYPES.get(result) not in found.kind.stored_as(own):
        supported_dtype(found.head, result)
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=found.head, dtype=f"an integer {found.kind.name}")
    assert isinstance(value, str)
    return Reduced(value, Reduction(axis, found.kind, rows))


def _refuse_unknown(node: fx.Node, m: Size, n: Size) -> NoReturn:
    """Raises Refused for a reduction that kernels do not compute."""
    back = feeds(node, lambda user: is_pointwise(user) and _on_plane(user, m, n))
    if back is not None:
        raise Refused(Reason.FEEDBACK, reduction=node, into=back)
    raise Refused(Reason.REDUCTION, target=target_name(node))


def _refuse_rounds(found: Found, steps: Collection[fx.Node], m: Size, n: Size) -> None:
    """Raises Refused for a reduction whose result another reduction of the plane needs, as in softmax.

    Inductor does both in one kernel that holds a row, and gains nothing if the first is already done. `steps`
    of a reduction that a kernel does as a whole are excepted.
    """

    def reduces(user: fx.Node) -> bool:
        return is_reduction(user) and user not in steps and _on_plane(first_argument(user), m, n)

    back = feeds(found.head, reduces)
    if back is not None:
        raise Refused(Reason.FEEDBACK, reduction=found.head, into=back)


def _on_plane(value: Any, m: Size, n: Size) -> bool:
    tensor = tensor_of(value) if isinstance(value, fx.Node) else None
    return tensor is not None and on_plane(tensor.shape, m, n)


def _batch_rows(found: Found, frame: Frame) -> int:
    """The rows of a batch, if a reduction is over the last axes of M and over no others that have several
    elements; 0 otherwise, and if partials of columns would span two batches."""
    shape = fake(found.source).shape
    gone = [axis for axis in found.dims if not known(shape[axis] == 1)]
    last = list(frame.m_axes[len(frame.m_axes) - len(gone) :])
    rows = product(shape[axis] for axis in gone)
    is_part = gone == last and 0 < len(gone) < len(frame.m_axes)
    if not is_part or frame.block > 1 or not frame.is_in_order or found.kind.is_place:
        return 0
    return rows if isinstance(rows, int) and rows % BATCH_ROWS == 0 else 0


def _axis(found: Found, frame: Frame) -> Axis:
    """The axis of a reduction over `found.dims`. Axes of size 1 count only if no other axis decides.

    The kernel writes the remaining axes, and counts an index, in the order of the product.
    """
    axis, shape = _over(found, frame), describe(fake(found.source).shape)
    if frame.block > 1:
        raise _refused(found, f"{shape}, which has one element for each {frame.block} columns")
    of_axes = (of(frame.m_axes, frame.n_axes) for of in (axis.kept, axis.reduced))
    left, gone = (list(dict.fromkeys(each for axes in of_both for each in axes)) for of_both in of_axes)
    if left != sorted(left) or (found.kind.is_place and gone != sorted(gone)):
        raise _refused(found, f"{shape}, whose axes were moved")
    return axis


def _over(found: Found, frame: Frame) -> Axis:
    shape = fake(found.source).shape
    columns = set(frame.n_axes) or {len(shape) - 1} - set(frame.m_axes)
    rows = {axis for axis in range(len(shape)) if axis not in columns}
    long, leading, trailing = set(frame.m_axes), rows & set(found.dims), columns & set(found.dims)
    over_m = bool(leading) and long <= leading
    if trailing == columns:
        if not leading or not long & leading:
            return Axis.ROW
        if over_m:
            return Axis.ALL
    elif over_m and not trailing:
        return Axis.COLUMN
    raise _refused(found, describe(shape))


def _refused(found: Found, shape: str) -> Refused:
    return Refused(
        Reason.REDUCED_AXES, target=target_name(found.head), axes=describe(found.dims), shape=shape
    )
