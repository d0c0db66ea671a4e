"""The feed of the template on mma.sync: it brings A, B and staged rowvecs to the warps that multiply.

The template calls its feed at each step of a tile, and knows nothing of its copies and barriers:

    open     the pipelines, before the warps take their roles
    begin    the first k tile, and the first rowvecs
    end      after the last tile

In each tile, between `begin` and `end`, it calls these hooks in this order:

    planes_begun        after each of the first subtiles whose exact loads are begun
    stage_rows          the rowvecs of the tile
    wait                each k tile: the stage that has it
    multiply            each k tile: its products, and the position of the one after it
    left_stage          if warps multiply side by side: memory in which they exchange their sums
    rows                the staged rowvecs of the tile, for its visits
    await_first_planes  each of the first subtiles, before its visit
    rows_read           after the visits

The position of the warps among the k tiles is a value of a type that the feed chooses, and so is their
position among the rowvecs.
"""

# ruff: noqa: B027, because some feeds need no code in some hooks.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from cute_backend.templates.crew import WARP, Ring, Role
from cute_backend.templates.rings import Shared
from cute_backend.templates.scheduler import Place
from cute_backend.templates.staged import Stage
from cute_backend.templates.warp_mainloop import Copies

if TYPE_CHECKING:
    from cute_backend.templates.sm80 import Sm80Gemm


@dataclass(frozen=True)
class Sm80Shared(Shared):
    """`Shared`, with the operands in the feed's form, their stages, the scales of A's groups, and the number
    of the thread in the CTA."""

    mma: cute.TiledMma | None
    every_a: tuple
    bs: tuple
    s_a: cute.Tensor
    s_b: cute.Tensor
    thread: Int32
    scales: tuple[cute.Tensor, ...] = ()


class Feed(ABC):
    """The feed of a kernel whose epilogue and stages are known, for the warps of `work`. `roles` are the
    warps that only load, and `rings` the rings that they fill."""

    roles: tuple[Role, ...] = ()
    rings: tuple[Ring, ...] = ()
    leaves_a_stage = False
    """Whether the stage of a tile's last k tile stays unchanged until the warps meet for the next tile's
    first k tile, so that they may use it until then."""

    def __init__(self, gemm: Sm80Gemm, work: Role):
        self.gemm, self.stages, self.work = gemm, gemm.stages, work

    def given(self, operand: cute.Tensor, stage: Stage) -> Any:
        """The kernel's argument for an operand (rows, K), or (rows, K, batch). The host calls this."""
        return operand

    def tensor(self, given: Any) -> cute.Tensor:
        """The operand that `given` was made from, or a tensor of its shape."""
        return given

    def open(self, smem: SmemAllocator) -> tuple[Any, Any]:
        """Makes the pipeline of A and B, and that of rowvecs. All threads call this."""
        return None, None

    @abstractmethod
    def begin(self, shared: Sm80Shared) -> tuple[Any, Any]:
        """The positions of the first k tile and of the first rowvecs."""

    @abstractmethod
    def wait(self, shared: Sm80Shared, at: Any) -> Int32:
        """Waits for a k tile, and returns the stage that has it."""

    @abstractmethod
    def multiply(self, shared: Sm80Shared, at: Any, step: Callable[[Copies], None]) -> Any:
        """Multiplies a k tile by `step(copies)`, where `copies` are those of a later k tile that the warp
        begins at the same time. Returns the position of the k tile after it."""

    def left_stage(self, shared: Sm80Shared, at: Any) -> Int32:
        """The stage of the k tile before the one at `at`. It is called only for a feed that
        `leaves_a_stage`."""
        raise NotImplementedError

    def planes_begun(self) -> None:
        """Called after a warp has begun to copy the exact loads of a subtile, ahead of the tile's
        products."""

    @abstractmethod
    def await_first_planes(self, shared: Sm80Shared, later: int) -> None:
        """Waits until the exact loads of one of the first subtiles, which `planes_begun` announced, are in
        shared memory, as far as the thread itself copies them. Copies for up to `later` further subtiles may
        still be in progress."""

    @cute.jit
    def stage_rows(self, shared: Sm80Shared, place: Place, rows_at: Int32):
        """Stages the rowvecs of a tile in the stage `rows_at`, by the first of the warps that multiply. All
        earlier reads of that stage are done, because the previous tile's k tiles came after them."""
        if shared.thread < WARP:
            self.gemm._stage(shared, self.gemm._row_tile(shared, place, shared.thread), rows_at)

    @abstractmethod
    def rows(self, shared: Sm80Shared, rows_at: Any) -> list[cute.Tensor]:
        """The staged rowvecs of a tile whose products are done."""

    @abstractmethod
    def rows_read(self, shared: Sm80Shared, rows_at: Any) -> Any:
        """The position of the next tile's rowvecs. The warp has read those of this tile."""

    def end(self) -> None:
        """Waits until no copy is in progress."""
