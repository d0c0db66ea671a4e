"""Mainloops of mma.sync: how a warp's k tiles become its accumulators, and its operands.

The template on mma.sync calls `begin(acc)` when a tile begins, and `step(operands, acc, held, stage, copies)`
for each of its k tiles, where `held` is the result of `begin`. `copies` begin to copy parts of a later k
tile. They are called between the first instructions of the tensor cores, which hide them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_backend.templates.staged import Stage

Copies = Sequence[Callable[[], None]]
"""Copies that are begun while the tensor cores are at work, up to one for each instruction's K."""


@dataclass(frozen=True)
class Fragments:
    """One operand of a thread: its copy by ldmatrix, the thread's part of all stages, and its registers, as
    they are read and as they are multiplied."""

    copy: cute.TiledCopy
    staged: cute.Tensor
    read: cute.Tensor
    multiplied: cute.Tensor

    def load(self, k_block: int, stage: Int32) -> cute.Tensor:
        """Reads the part of a stage along K that one MMA multiplies, and returns its registers."""
        cute.copy(self.copy, self.staged[(None, None, k_block, stage)], self.read[(None, None, k_block)])
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
        """The operands of a thread. If rows are contiguous in shared memory, ldmatrix transposes them."""
        mine = mma.get_slice(thread)
        a_copy, b_copy = (
            make(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not stage.k_major, 4), stage.dtype), mma)
            for make, stage in ((cute.make_tiled_copy_A, a), (cute.make_tiled_copy_B, b))
        )
        a_fragment = mma.make_fragment_A(mine.partition_A(s_a[(None, None, 0)]))
        b_fragment = mma.make_fragment_B(mine.partition_B(s_b[(None, None, 0)]))
        a_mine, b_mine = a_copy.get_slice(thread), b_copy.get_slice(thread)
        return WarpOperands(
            mma,
            Fragments(a_copy, a_mine.partition_S(s_a), a_mine.retile(a_fragment), a_fragment),
            Fragments(b_copy, b_mine.partition_S(s_b), b_mine.retile(b_fragment), b_fragment),
        )

    def multiply(self, acc: cute.Tensor, stage: Int32, copies: Copies) -> None:
        """Adds the products of a stage's k tile."""
        for k_block in range(cute.size(self.a.multiplied, mode=[2])):
            a, b = self.a.load(k_block, stage), self.b.load(k_block, stage)
            cute.gemm(self.mma, acc, a, b, acc)
            for copy in copies[k_block : k_block + 1]:
                copy()


class Sm80Mainloop(Protocol):
    """A mainloop of mma.sync; the module's docstring says when each method is called."""

    def begin(self, acc: cute.Tensor) -> Any: ...

    def step(
        self, operands: WarpOperands, acc: cute.Tensor, held: Any, stage: Int32, copies: Copies
    ) -> None: ...


class Sm80Plain:
    """The tensor cores add up all k tiles."""

    def begin(self, acc: cute.Tensor) -> None:
        acc.fill(0.0)

    def step(
        self, operands: WarpOperands, acc: cute.Tensor, held: None, stage: Int32, copies: Copies
    ) -> None:
        operands.multiply(acc, stage, copies)


class Sm80Promoted:
    """Each k tile's sums are added to the accumulators in fp32, because the tensor cores add up fp8 products
    in fewer bits."""

    def begin(self, acc: cute.Tensor) -> cute.Tensor:
        acc.fill(0.0)
        return cute.make_rmem_tensor(acc.layout, Float32)

    def step(
        self, operands: WarpOperands, acc: cute.Tensor, held: cute.Tensor, stage: Int32, copies: Copies
    ) -> None:
        held.fill(0.0)
        operands.multiply(held, stage, copies)
        for i in range(cute.size(acc)):
            acc[i] = acc[i] + held[i]
