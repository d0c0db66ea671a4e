"""Shared memory of the template on mma.sync: stages of operands, which cp.async or TMA fills, and boxes of
planes, one for each warp."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from cute_backend.spec import Order
from cute_backend.templates.cp_async import SWIZZLED_BYTES, VECTOR_BYTES, Box, Share, Within, fetch_line
from cute_backend.templates.crew import SMEM_ALIGN, WARP
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.rings import swizzled
from cute_backend.templates.tile import Corner

L2_LINE = 128
"""Bytes of a line of L2."""

WARP_ROWS = 16
"""The rows of a warp's box of a plane: those of an instruction's accumulators (PTX ISA, mma.m16n8k16)."""


@dataclass(frozen=True)
class Lines:
    """The part of an operand that is copied to a stage: `rows` rows, and the elements of K from `column` on.
    Rows beyond the stage's last and elements beyond K are left out. A thread's first vector is `place`
    elements from the operand's first (`Stage.place`).

    `rows` is None if the whole stage is known to lie within the operand.
    """

    place: Int64
    rows: Int32 | None
    column: Int32


@dataclass(frozen=True)
class Stage:
    """One stage of an operand: `rows` by `columns` of K, in elements of `dtype`.

    In a K-major stage, a line has 128 bytes of K of a row, and a box has all rows. Otherwise a line has
    neighbouring rows of one k, and a box has all k of these rows. The boxes of a stage are consecutive.
    """

    dtype: type[cutlass.Numeric]
    rows: int
    columns: int
    k_major: bool

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.dtype.width // 8

    @property
    def bytes(self) -> int:
        """The bytes of a stage."""
        return self.rows * self.columns * self.width

    @property
    def line(self) -> int:
        """Elements of a line."""
        return SWIZZLED_BYTES // self.width

    @property
    def box(self) -> Box:
        """The boxes that a stage consists of."""
        return Box(self.rows if self.k_major else self.columns, SWIZZLED_BYTES, self.width)

    def layout(self, stages: int) -> cute.ComposedLayout:
        """The layout of `stages` stages: (rows, columns, stages). TMA and ldmatrix use the same swizzle."""
        along, across = (self.columns, self.rows) if self.k_major else (self.rows, self.columns)
        contiguous: tuple = (self.line, along // self.line), (1, self.line * across)
        if self.k_major and along == self.line:
            contiguous = along, 1  # k tiles are counted by this mode
        modes = (across, self.line), contiguous
        (rows, row_strides), (columns, k_strides) = modes if self.k_major else modes[::-1]
        layout = cute.make_layout(
            (rows, columns, stages), stride=(row_strides, k_strides, self.rows * self.columns)
        )
        return cute.make_composed_layout(cute.make_swizzle(self.box.swizzle_bits, 4, 3), 0, layout)

    def allocate(self, smem: SmemAllocator, stages: int) -> cute.Tensor:
        """Shared memory for `stages` stages."""
        return swizzled(smem, self.dtype, self.layout(stages))

    def place(self, operand: cute.Tensor, row: Int32, column: Int32, batch: Int32, thread: Int32) -> Int64:
        """The place of a thread's first vector of a stage that begins at (row, column) of an operand (rows,
        K), or (rows, K, batch), in elements."""
        along, line = (column, row) if self.k_major else (row, column)
        place = Int64(line) * self._step(operand) + along + self.box.first(self._step(operand), thread)
        if cute.rank(operand) > 2:
            place += Int64(batch) * operand.stride[2]
        return place

    def after(self, operand: cute.Tensor, place: Int64) -> Int64:
        """The place of the same thread's first vector in the next stage along K."""
        return place + (self.columns if self.k_major else self.columns * self._step(operand))

    def bring(self, operand: cute.Tensor, target: cute.Pointer, lines: Lines, share: Share) -> None:
        """Begins to copy a thread's share of `lines` of an operand to the stage that begins at `target`, a
        pointer to bytes."""
        place = cute.assume(lines.place, divby=VECTOR_BYTES // self.width)
        source, step = operand.iterator + place, self._step(operand)
        columns = operand.shape[1] - lines.column
        for first in range(0, self.columns if self.k_major else self.rows, self.line):
            within = None
            if lines.rows is not None and self.k_major:
                within = Within(lines.rows, columns - first)
            elif lines.rows is not None:
                within = Within(columns, lines.rows - first)
            self.box.bring(source + first, step, within, target, share)
            target += self.box.bytes

    def _step(self, operand: cute.Tensor) -> Int64:
        """The distance of two lines of an operand."""
        return Int64(operand.stride[0] if self.k_major else operand.stride[1])

    def is_filled(self, operand: cute.Tensor, rows: Int32, column: Int32) -> Boolean:
        """Whether `rows` rows of an operand, from the element `column` of K on, fill the stage."""
        return (rows >= self.rows) & (operand.shape[1] - column >= self.columns)


@dataclass(frozen=True)
class Planes:
    """Boxes of 16 rows and `columns` columns of a plane (M, N). A warp's part of a subtile is loaded or
    stored as one box."""

    operand: SmemOperand
    columns: int

    @property
    def box(self) -> Box:
        """The layout of one box in shared memory."""
        width = self.operand.dtype.width // 8
        if self.operand.order is Order.ROW:
            return Box(WARP_ROWS, self.columns * width, width)
        return Box(self.columns, WARP_ROWS * width, width)

    def allocate(self, smem: SmemAllocator, count: int) -> cute.Tensor:
        """Shared memory for `count` boxes: (16, columns, count)."""
        by_rows = self.operand.order is Order.ROW
        stride = (self.columns, 1) if by_rows else (1, WARP_ROWS)
        shape = (WARP_ROWS, self.columns, count)
        layout = cute.make_layout(shape, stride=(*stride, WARP_ROWS * self.columns))
        swizzle = cute.make_swizzle(self.box.swizzle_bits, 4, 3)
        return smem.allocate_tensor(self.operand.dtype, layout, SMEM_ALIGN, swizzle)

    def bring(
        self, plane: cute.Tensor, boxes: cute.Tensor, index: Int32, corner: Corner, lane: Int32
    ) -> None:
        """Begins to copy a lane's share of the box at a corner of a plane to shared memory."""
        first, step, within = self._lines(plane, corner)
        mine = first + cute.assume(self.box.first(step, lane), divby=VECTOR_BYTES // self.box.width)
        self.box.bring(mine, step, within, self._at(boxes, index), Share(lane, WARP))

    @cute.jit
    def fetch(self, plane: cute.Tensor, corner: Corner, columns: cutlass.Constexpr[int], lane: Int32):
        """Asks L2 for `columns` columns of the 16 rows at a corner of a plane, whose rows are contiguous.
        Nothing beyond the plane's edge is asked for."""
        width = self.operand.dtype.width // 8
        lines = -(-columns * width // L2_LINE)
        for turn in cutlass.range_constexpr(-(-lines * WARP_ROWS // WARP)):
            line = lane + turn * WARP
            row, column = corner.row + line // lines, corner.column + line % lines * (L2_LINE // width)
            if (line < lines * WARP_ROWS) & (row < corner.end_row) & (column < corner.end_column):
                fetch_line(plane.iterator + (Int64(row) * plane.stride[0] + column))

    def write(
        self, plane: cute.Tensor, boxes: cute.Tensor, index: Int32, corner: Corner, lane: Int32
    ) -> None:
        """Writes a lane's share of a box to a corner of a plane, but nothing beyond the plane's edge."""
        first, step, within = self._lines(plane, corner)
        self.box.write(self._at(boxes, index), first, step, within, Share(lane, WARP))

    def _at(self, boxes: cute.Tensor, index: Int32) -> cute.Pointer:
        """The address of the first byte of a box."""
        offset = cute.assume(index * self.box.bytes, divby=VECTOR_BYTES)
        return cute.recast_ptr(boxes.iterator, dtype=Uint8) + offset

    def _lines(self, plane: cute.Tensor, corner: Corner) -> tuple[cute.Pointer, Int64, Within]:
        """The first element of the box at a corner, the distance between its lines, and how much of it lies
        within the plane."""
        stride_m, stride_n = plane.stride
        place = Int64(corner.row) * stride_m + Int64(corner.column) * stride_n
        first = plane.iterator + cute.assume(place, divby=VECTOR_BYTES // self.box.width)
        rows, columns = corner.end_row - corner.row, corner.end_column - corner.column
        if self.operand.order is Order.ROW:
            return first, stride_m, Within(rows, columns)
        return first, stride_n, Within(columns, rows)
