"""The operands that an epilogue loads, and their strides over the (M, N) plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from cute_backend.dtypes import DType
from cute_backend.kinds.axes import Call, Dim, Extent, Order, Stride, plane
from cute_backend.kinds.loads import LoadKind
from cute_backend.kinds.tables import Blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Load:
    """An epilogue operand, by role.

    The tensor given at launch has shape (M, N) for an exact load, (N,) for a rowvec, (M,) for a colvec,
    (G, N) for a groupvec and one element for a scalar, with the strides classed here. Of a groupvec with a
    `stride_n` of ZERO, which is a number for each group, the column at index 0 is read.

    If the operand has no single stride along M, as (B, 1, N) over a plane (B * S, N), `stride_m` is OTHER,
    and `m_modes` has the class of every mode of M, outermost first: ZERO or OTHER. In place of M the tensor
    has an axis for each mode, here (B, S, N), whose sizes multiply to M; along an axis of class ZERO the
    elements at index 0 are read.

    If it has no single stride along N, as a vector (b,) for all blocks, or (S, b) over a plane (S, N / b, b),
    `stride_n` is OTHER and `blocks` has the classes. The tensor then has the axes (N / b, b) in place of N;
    along an axis of class ZERO the elements at index 0 are read.
    """

    name: str
    kind: LoadKind
    dtype: DType
    stride_m: Stride
    stride_n: Stride
    m_modes: tuple[Stride, ...] = ()
    blocks: Union[Blocks, None] = None

    @property
    def is_split(self) -> bool:
        """Whether M or N is several axes of its tensor. Such a plane is read by element, unless it is a
        table."""
        return bool(self.m_modes) or self.blocks is not None

    @property
    def in_runs(self) -> bool:
        """Whether the columns of a block are contiguous in memory."""
        return self.blocks is not None and self.blocks.inner is Stride.ONE

    @property
    def is_table(self) -> bool:
        """Whether the load is a table (S, b) that TMA can bring boxes of (`Blocks.is_table`). The cosines of
        rotary embeddings are such a table for heads and batches."""
        blocks, of_rows = self.blocks, self.m_modes or (self.stride_m,)
        return self.kind.is_plane and blocks is not None and blocks.is_table(of_rows, self.dtype.bits)

    def dims(self, width: int = 0) -> tuple[Dim, ...]:
        """The axes of its tensor, in a segment of `width` columns if there are segments."""
        if self.order is not None:
            return plane((Extent.M, Extent.N), self.order is Order.ROW, width)
        groups = (Dim(Extent.GROUPS, self.stride_m),)
        m = tuple(Dim(Extent.MODE, mode) for mode in self.m_modes) or (Dim(Extent.M, self.stride_m),)
        n = (Dim(Extent.N, self.stride_n, width=width),) if self.blocks is None else self.blocks.dims(width)
        return groups * self.kind.by_group + m * self.kind.by_row + n * self.kind.by_column

    def calls(self, in_boxes: bool) -> tuple[Call, ...]:
        """The calls by which a kernel views its axes as M and N. `in_boxes` says that TMA brings a table."""
        if in_boxes:
            return (("table", ()),)
        modes: tuple[Call, ...] = (("collapse_m", (len(self.m_modes),)),) if self.m_modes else ()
        return modes if self.blocks is None else (*modes, *self.blocks.calls())

    def over_plane(self, tensor: Tensor) -> Tensor:
        """Its tensor in a shape that broadcasts over (M, N), with a row for each M if it has groups."""
        if self.m_modes:
            first = tuple(slice(1) if mode is Stride.ZERO else slice(None) for mode in self.m_modes)
            tensor = tensor[first].expand(tensor.shape).flatten(0, len(self.m_modes) - 1)
        return self.kind.over_plane(tensor if self.blocks is None else self.blocks.reference(tensor))

    def words(self) -> str:
        """Its strides along an M or N that is several axes, in the header of a generated module."""
        modes = ", ".join(mode.value for mode in self.m_modes)
        text = f", strides ({modes}) along M" if modes else ""
        return text if self.blocks is None else text + self.blocks.words()

    @property
    def smem_words(self) -> str:
        """The arguments, after name and dtype, of its `SmemOperand` (`templates/epilogue.py`)."""
        return ", Order.COLUMN" if self.order is Order.COLUMN else ", repeats=True" if self.is_table else ""

    @property
    def order(self) -> Union[Order, None]:
        """The memory order of an exact load; None if neither of its strides is known to be 1, or M or N
        is several modes, and for every other kind."""
        if not self.kind.is_plane or self.is_split:
            return None
        if self.stride_n is Stride.ONE:
            return Order.ROW
        return Order.COLUMN if self.stride_m is Stride.ONE else None
