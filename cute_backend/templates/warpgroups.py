"""The warpgroups that multiply by wgmma: their threads' seats, and their turns under ping-pong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from cute_backend.templates.crew import Meeting
from cute_backend.templates.drain import Position, Turns
from cute_backend.templates.fragments import RegisterSeat
from cute_backend.templates.mainloop import WarpgroupOperands, block_of


@dataclass(frozen=True)
class Turn:
    """The turn of one of two warpgroups to multiply, under ping-pong.

    Both warpgroups walk the same ring of A and B, and each skips the other's stages. A waiting thread knows a
    barrier's phase only by its parity. So a warpgroup may wait for its own fill of a stage only after the
    other warpgroup has consumed the previous fill.
    """

    own: pipeline.NamedBarrier
    other: pipeline.NamedBarrier

    @staticmethod
    def of(first: Meeting, group: Int32) -> Turn:
        """The turn of warpgroup 0 or 1, whose named barrier is `first` or the one after it."""
        own, other = first.barrier + group, first.barrier + 1 - group
        return Turn(pipeline.NamedBarrier(own, first.threads), pipeline.NamedBarrier(other, first.threads))

    def wait(self) -> None:
        """Waits until the other warpgroup has passed the turn on."""
        self.own.arrive_and_wait()

    def pass_on(self) -> None:
        """Lets the other warpgroup go on."""
        self.other.arrive()


@dataclass(frozen=True, kw_only=True)
class Seat(RegisterSeat):
    """The position of a thread among the warpgroups that multiply, and what it multiplies.

    `thread` and `warp` are indices within the warpgroup, `thread_of_all` is the thread's index among those of
    all warpgroups, and `group` is the warpgroup's index. `share` is the part of each tile that the warpgroup
    computes, `ring` the ring of exact loads that it reads, `barrier` the named barrier of its threads, and
    `turn` its turn to multiply. `stores` are the TMA stores of the warp. With `traced_once`, the
    compiler unrolls the loop over visits, of which one is traced.
    """

    operands: WarpgroupOperands
    group: Int32
    thread: Int32
    thread_of_all: Int32
    warp: Int32
    share: Any
    ring: Any
    barrier: pipeline.NamedBarrier
    turn: Turn
    stores: pipeline.PipelineTmaStore
    traced_once: bool

    @cute.jit
    def _unrolled(self, turns: cutlass.Constexpr[Turns], at: Position):
        """Lets the compiler unroll the loop if turns are traced once."""
        if cutlass.const_expr(self.traced_once):
            for i in cutlass.range(turns.count, unroll_full=True):
                at = turns.body(at, i * turns.size)
        else:
            at = RegisterSeat._unrolled(self, turns, at)
        return at

    def first_block(self) -> Seat:
        """The seat of a thread that multiplies only the first block of 64 rows."""
        return replace(self, operands=self.operands.first_block(), acc=block_of(self.acc, 0))
