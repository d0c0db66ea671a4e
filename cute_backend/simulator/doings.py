"""The accesses of a warp to global memory, and which of its lanes know of them."""

from __future__ import annotations

import numpy as np

from cute_backend.simulator.shadow import Clock

LANES = 32
ALL_LANES = (1 << LANES) - 1


def bits(mask: np.ndarray) -> int:
    """The lanes of a mask, lane 0 lowest."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


class Doings:
    """The accesses of a warp to global memory, as events of an agent; `clock` is the warp's.

    An event ends where the warp publishes it. `done` is the last event of each lane, and `told` the last that
    other lanes know of; `apart` is whether they may differ.
    """

    __slots__ = ("agent", "apart", "clock", "done", "epoch", "told")

    def __init__(self, agent: int, clock: Clock) -> None:
        self.agent = agent
        self.clock = clock
        self.apart = False
        self.done = np.zeros(LANES, np.int32)
        self.told = np.zeros(LANES, np.int32)
        self.epoch = 1
        clock.seen[agent] = 1

    def touch(self, lanes: np.ndarray) -> int:
        """These lanes do something, in the event returned."""
        self.done[lanes] = self.epoch
        self.apart = True
        return self.epoch

    def tell(self, clock: Clock, lanes: np.ndarray) -> None:
        """Writes into a copy of the warp's clock what these of its lanes know. A new event begins.

        They know what they did themselves, and of the others what was told.
        """
        clock.seen[self.agent] = self.epoch
        if self.apart:
            unknown = (self.done > self.told) & ~lanes
            if unknown.any():
                clock.seen[self.agent] = self.told[unknown].min()
                known = {(self.agent, bits(~unknown)): self.epoch}
                for last in np.unique(self.told[unknown])[1:]:
                    known[self.agent, bits(unknown & (self.told >= last))] = int(last)
                clock.tails = {**clock.tails, **known}
        self.epoch += 1
        self.clock.seen[self.agent] = self.epoch

    def meet(self, clock: Clock) -> None:
        """The warp learns what this clock has of it."""
        np.maximum(self.told, clock.seen[self.agent], out=self.told)
        for (agent, lanes), last in clock.tails.items():
            if agent == self.agent:
                here = np.unpackbits(np.array([lanes], np.uint32).view(np.uint8), bitorder="little") != 0
                self.told[here] = np.maximum(self.told[here], last)
        self.apart = bool((self.done > self.told).any())
