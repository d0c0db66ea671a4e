"""Boxes that threads copy between global memory and shared memory by vectors of 16 bytes.

From sm_80 on, threads can copy by cp.async, without TMA. Bytes beyond a tensor arrive as zeros, so every size
is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, Uint64
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

VECTOR_BYTES = 16
"""Bytes of one copy: the most that cp.async moves, and the only size that bypasses L1 (PTX ISA, cp.async)."""
SWIZZLED_BYTES = 128
"""Bytes of a line in which the widest swizzle permutes vectors."""

_WORDS: dict[int, type[cutlass.Numeric]] = {1: Uint8, 2: Uint16, 4: Uint32, 8: Uint64}
"""The unsigned type by which elements are copied, by their size in bytes."""


@dsl_user_op
def copy_vector(
    source: cute.Pointer, target: cute.Pointer, nbytes: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Copies the first `nbytes` of 16 bytes of global memory to shared memory, and zeros the rest. The copy
    joins the thread's open group of copies. With 0 bytes nothing is read, so the source may be any
    address."""
    nvvm.cp_async_shared_global(
        target.to_llvm_ptr(loc=loc, ip=ip),
        source.to_llvm_ptr(loc=loc, ip=ip),
        VECTOR_BYTES,
        nvvm.LoadCacheModifierKind.CG,
        cp_size=nbytes.ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def fetch_line(source: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """Asks L2 for the line that holds an address of global memory (PTX ISA, prefetch)."""
    llvm.inline_asm(
        None,
        [source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "prefetch.global.L2 [$0];",
        "l",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )


@dataclass(frozen=True)
class Within:
    """How much of a box lies within the tensor: `lines` of it, and `elements` of each line. Both may be more
    than the box has, or negative."""

    lines: Int32
    elements: Int32


@dataclass(frozen=True)
class Share:
    """The share of a box that belongs to one of `threads` threads."""

    thread: Int32
    threads: int


@dataclass(frozen=True)
class Box:
    """The layout of a box of a tensor in shared memory: `lines` of `line_bytes`, of elements of `width`
    bytes.

    A line is contiguous in global memory. Lines follow each other, and their vectors are swizzled, so
    that neither vectors along a line nor those of neighbouring lines share banks. In shared memory,
    a box begins at a multiple of its size in bytes or, if it is larger than 1024 bytes, at a multiple of
    1024.
    """

    lines: int
    line_bytes: int
    width: int

    @property
    def bytes(self) -> int:
        """The bytes of the box."""
        return self.lines * self.line_bytes

    @property
    def swizzle_bits(self) -> int:
        """The number of bits of a vector's place in its line that the swizzle changes. It is the first
        argument of `cute.make_swizzle`; the others are 4, since a vector has 2**4 bytes, and 3,
        since a line of 128 bytes has 2**3 vectors."""
        return (min(self.line_bytes, SWIZZLED_BYTES) // VECTOR_BYTES).bit_length() - 1

    def first(self, line_stride: Int64, thread: Int32) -> Int64:
        """The distance of a thread's first vector from the first element of the box in a tensor, in
        elements."""
        line, place = self._first(thread)
        return Int64(line) * line_stride + place * (VECTOR_BYTES // self.width)

    def bring(
        self,
        source: cute.Pointer,
        line_stride: Int64,
        within: Within | None,
        target: cute.Pointer,
        share: Share,
    ) -> None:
        """Begins to copy a thread's share of a box. With `within` None all of the box lies within the tensor,
        and a vector takes fewer instructions.

        `source` points to the thread's first vector (`first`), and `target` to the box's place in shared
        memory. Two lines of the tensor are `line_stride` elements apart. The number of threads is a multiple
        of the vectors of a line. In the last turn, threads beyond the last line of the box copy nothing.
        """
        line, place = self._first(share.thread)
        inside = Int32(VECTOR_BYTES)
        if within is not None:
            left = within.elements * self.width - place * VECTOR_BYTES
            inside = Int32(cutlass.min(cutlass.max(left, 0), VECTOR_BYTES))
        step = Int64(line_stride) * self._step(share.threads)
        for turn in range(self._turns(share.threads)):
            away = turn * self._step(share.threads)
            nbytes, offset = inside, self._offset_after(line, place, away)
            if within is not None:
                nbytes = cutlass.select_(line + away < within.lines, inside, Int32(0))
                offset = self._offset(line + away, place)
            if self._is_whole(turn, share.threads):
                copy_vector(source, target + offset, nbytes)
            else:
                self._copy_line(source, target + offset, nbytes, line + away)
            source += step  # one after the other: a register for each distance would be kept

    @cute.jit
    def _copy_line(self, source: cute.Pointer, target: cute.Pointer, nbytes: Int32, line: Int32):
        """Copies a vector if the box has its line."""
        if line < self.lines:
            copy_vector(source, target, nbytes)

    @cute.jit
    def write(
        self,
        source: cute.Pointer,
        target: cute.Pointer,
        line_stride: Int64,
        within: Within,
        share: Share,
    ):
        """Writes a box to the tensor, but nothing beyond the tensor's edge, even if a line ends within a
        vector. Arguments are those of `bring`, with `source` and `target` exchanged."""
        word, count = _WORDS[self.width], VECTOR_BYTES // self.width
        words = cute.recast_ptr(target, dtype=word)
        line, place = self._first(share.thread)
        for turn in cutlass.range_constexpr(self._turns(share.threads)):
            this, lines = line + turn * self._step(share.threads), within.lines
            if cutlass.const_expr(not self._is_whole(turn, share.threads)):
                lines = cutlass.select_(this < self.lines, lines, Int32(0))
                this = cutlass.min(this, self.lines - 1)
            vector = cute.make_rmem_tensor(count, word)
            offset = cute.assume(self._offset(this, place), divby=VECTOR_BYTES)
            aligned = cute.recast_ptr(source + offset, dtype=word)
            cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(count)), vector)
            first = Int64(this) * line_stride + place * count
            left = within.elements - place * count
            if (this < lines) & (left >= count):
                whole = cute.make_tensor(words + cute.assume(first, divby=count), cute.make_layout(count))
                cute.autovec_copy(vector, whole)
            elif this < lines:
                part = cute.make_tensor(words + first, cute.make_layout(count))
                for i in cutlass.range_constexpr(count - 1):
                    if i < left:
                        part[i] = vector[i]

    @property
    def _per_line(self) -> int:
        """Vectors of a line."""
        return self.line_bytes // VECTOR_BYTES

    def _first(self, thread: Int32) -> tuple[Int32, Int32]:
        """The line of a thread's first vector, and its place in the line. Consecutive threads have the
        vectors of one line, and then those of the next lines."""
        return thread // self._per_line, thread % self._per_line

    def _step(self, threads: int) -> int:
        """The number of lines from one vector of a thread to its next one, which has the same place in its
        line."""
        return threads // self._per_line

    def _turns(self, threads: int) -> int:
        """The number of vectors of a thread, or of one that has the most of them."""
        return -(-self.lines // self._step(threads))

    def _is_whole(self, turn: int, threads: int) -> bool:
        """Whether all threads have a vector in a turn."""
        return (turn + 1) * self._step(threads) <= self.lines

    def _offset(self, line: Int32, place: Int32) -> Int32:
        """The offset of a vector in the box, in bytes."""
        offset = line * self.line_bytes + place * VECTOR_BYTES
        return offset ^ ((offset >> 7 & (1 << self.swizzle_bits) - 1) << 4)

    def _offset_after(self, line: Int32, place: Int32, lines: int) -> Int32:
        """The offset of the vector that is `lines` lines after one. The swizzle permutes both alike if these
        lines are a multiple of its period."""
        if lines * self.line_bytes % (SWIZZLED_BYTES << self.swizzle_bits):
            return self._offset(line + lines, place)
        return self._offset(line, place) + lines * self.line_bytes
