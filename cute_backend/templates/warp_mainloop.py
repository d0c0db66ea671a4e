"""Mainloops of mma.sync: how a warp's k tiles become its accumulators, and its operands.

The template on mma.sync calls `operands` once, `begin(operands, acc, scales, row, k_tile)` when a tile
begins, and `step(operands, acc, held, count, stage, copies)` for each of its k tiles, where `operands` and
`held` are the results of these. `scales` are those of the operands, in memory. The tile's first row of A is
`row`, and its first k tile is `k_tile`, after which `count` others come before that of a step. `copies` begin
to copy parts of a later k tile. They are called between the first instructions of the tensor cores, which
hide them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_backend.templates.cp_async import VECTOR_BYTES
from cute_backend.templates.opaque import opaque
from cute_backend.templates.staged import Stage

MMA_K_BYTES = 32
"""K of an instruction: 16 elements of 16 bits or 32 of fp8 (PTX ISA, mma.m16n8k16 and mma.m16n8k32)."""

Copies = Sequence[Callable[[], None]]
"""Copies that are begun while the tensor cores are at work, up to one for each instruction's K."""


@dataclass(frozen=True)
class Fragments:
    """One operand of a thread: its copy by ldmatrix, the thread's part of all stages, and its registers, as
    they are read and as they are multiplied. If the stages are K-major, `first` is the address in shared
    memory of what the thread reads first of the first stage."""

    copy: cute.TiledCopy
    stage: Stage
    staged: cute.Tensor
    read: cute.Tensor
    multiplied: cute.Tensor
    first: Int32 | None

    @staticmethod
    def of(
        copy: cute.TiledCopy, stage: Stage, shared: cute.Tensor, fragment: cute.Tensor, thread: Int32
    ) -> Fragments:
        """The fragments of a thread that reads the stages in `shared` into `fragment`."""
        mine = copy.get_slice(thread)
        staged = mine.partition_S(shared)
        first = None
        if stage.k_major:
            # Otherwise the place would be computed again for each k tile, ahead of the first product.
            place = Int32(staged.iterator.toint())
            first = opaque(place ^ (place >> 7 & (1 << stage.box.swizzle_bits) - 1) << 4)
        return Fragments(copy, stage, staged, mine.retile(fragment), fragment, first)

    def load(self, k_block: int, stage: Int32) -> cute.Tensor:
        """Reads the part of a stage along K that one MMA multiplies, and returns its registers."""
        source = self.staged[(None, None, k_block, stage)]
        if self.first is not None:
            # All k of a row are in one line, and k_block changes bits that the vector's place in a slice
            # leaves 0. So one instruction counts slices, where the swizzle of an address takes three.
            place = self.first + stage * self.stage.bytes ^ k_block * MMA_K_BYTES
            start = cute.make_ptr(source.element_type, place, AddressSpace.smem, assumed_align=VECTOR_BYTES)
            source = cute.make_tensor(start, source.layout)
        cute.copy(self.copy, source, self.read[(None, None, k_block)])
        return self.multiplied[(None, None, k_block)]


@dataclass(frozen=True)
class WarpOperands:
    """The operands that a thread multiplies."""

    mma: cute.TiledMma
    a: Fragments
    b: Fragments

    @staticmethod
    def of(
        mma: cute.TiledMma, a: Stage, b: Stage, s_a: cute.Tensor, s_b: cute.Tensor, thread: Int32
    ) -> WarpOperands:
        """The operands of a thread. If rows are contiguous in shared memory, ldmatrix transposes them. It
        reads 16 rows of A at once, and as many of B if `mma` takes these together."""
        mine = mma.get_slice(thread)
        b_rows = mma.get_tile_size(1)
        a_copy, b_copy = (
            make(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not stage.k_major, matrices), stage.dtype), mma)
            for make, stage, matrices in (
                (cute.make_tiled_copy_A, a, 4),
                (cute.make_tiled_copy_B, b, 4 if b_rows % 16 == 0 else 2),
            )
        )
        a_fragment = mma.make_fragment_A(mine.partition_A(s_a[(None, None, 0)]))
        b_fragment = mma.make_fragment_B(mine.partition_B(s_b[(None, None, 0)]))
        return WarpOperands(
            mma,
            Fragments.of(a_copy, a, s_a, a_fragment, thread),
            Fragments.of(b_copy, b, s_b, b_fragment, thread),
        )

    def multiply(self, acc: cute.Tensor, stage: Int32, copies: Copies) -> None:
        """Adds the products of a stage's k tile."""
        for k_block in range(cute.size(self.a.multiplied, mode=[2])):
            a, b = self.a.load(k_block, stage), self.b.load(k_block, stage)
            cute.gemm(self.mma, acc, a, b, acc)
            for copy in copies[k_block : k_block + 1]:
                copy()


class Sm80Mainloop(Protocol):
    """A mainloop of mma.sync; the module's docstring says when each method is called.

    `operands` returns what a thread of the CTA multiplies of the stages in `s_a` and `s_b`, in the form that
    `step` takes."""

    def operands(
        self, mma: cute.TiledMma, a: Stage, b: Stage, s_a: cute.Tensor, s_b: cute.Tensor, thread: Int32
    ) -> Any: ...

    def begin(
        self, operands: Any, acc: cute.Tensor, scales: Sequence[cute.Tensor], row: Int32, k_tile: Int32
    ) -> Any: ...

    def step(
        self, operands: Any, acc: cute.Tensor, held: Any, count: Int32, stage: Int32, copies: Copies
    ) -> None: ...


class Sm80Plain:
    """The tensor cores add up all k tiles."""

    operands = staticmethod(WarpOperands.of)

    def begin(
        self,
        operands: WarpOperands,
        acc: cute.Tensor,
        scales: Sequence[cute.Tensor],
        row: Int32,
        k_tile: Int32,
    ) -> None:
        acc.fill(0)

    def step(
        self,
        operands: WarpOperands,
        acc: cute.Tensor,
        held: None,
        count: Int32,
        stage: Int32,
        copies: Copies,
    ) -> None:
        operands.multiply(acc, stage, copies)


class Sm80Promoted:
    """Each k tile's sums are added to the accumulators in fp32, because the tensor cores add up fp8 products
    in fewer bits."""

    operands = staticmethod(WarpOperands.of)

    def begin(
        self,
        operands: WarpOperands,
        acc: cute.Tensor,
        scales: Sequence[cute.Tensor],
        row: Int32,
        k_tile: Int32,
    ) -> cute.Tensor:
        acc.fill(0.0)
        return cute.make_rmem_tensor(acc.layout, Float32)

    def step(
        self,
        operands: WarpOperands,
        acc: cute.Tensor,
        held: cute.Tensor,
        count: Int32,
        stage: Int32,
        copies: Copies,
    ) -> None:
        held.fill(0.0)
        operands.multiply(held, stage, copies)
        for i in range(cute.size(acc)):
            acc[i] = acc[i] + held[i]
