"""The accesses of a warp to global memory, and the lanes that know of them and of those of other clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.shadow import Clock

if TYPE_CHECKING:
    from cute_backend.simulator.global_shadow import Release

LANES = 32
ALL_LANES = (1 << LANES) - 1


def bits(mask: np.ndarray) -> int:
    """The lanes of a mask, lane 0 lowest."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


class LaneAccesses:
    """The accesses of a warp to global memory, as events of an agent. `clock` is the clock of the warp.

    An event ends when the warp publishes it. `done` holds the last event of each lane, and `published` the
    last event of each lane that the other lanes know of. `apart` is true if the two may differ.
    """

    __slots__ = ("agent", "apart", "clock", "done", "epoch", "published")

    def __init__(self, agent: int, clock: Clock) -> None:
        self.agent = agent
        self.clock = clock
        self.apart = False
        self.done = np.zeros(LANES, np.int32)
        self.published = np.zeros(LANES, np.int32)
        self.epoch = 1
        clock.seen[agent] = 1

    def touch(self, lanes: np.ndarray) -> int:
        """Records an access of these lanes. Returns its event."""
        self.done[lanes] = self.epoch
        self.apart = True
        return self.epoch

    def publish(self, clock: Clock, lanes: np.ndarray) -> None:
        """Writes the events that these lanes know into a copy of the warp's clock. A new event begins.

        The lanes know their own accesses, and those of other lanes that were published.
        """
        clock.seen[self.agent] = self.epoch
        if self.apart:
            unknown = (self.done > self.published) & ~lanes
            if unknown.any():
                clock.seen[self.agent] = self.published[unknown].min()
                known = {(self.agent, bits(~unknown)): self.epoch}
                for last in np.unique(self.published[unknown])[1:]:
                    known[self.agent, bits(unknown & (self.published >= last))] = int(last)
                clock.tails = {**clock.tails, **known}
        self.epoch += 1
        self.clock.seen[self.agent] = self.epoch

    def meet(self, clock: Clock) -> None:
        """The warp learns the events of its own lanes that this clock knows."""
        np.maximum(self.published, clock.seen[self.agent], out=self.published)
        for (agent, lanes), last in clock.tails.items():
            if agent == self.agent:
                here = np.unpackbits(np.array([lanes], np.uint32).view(np.uint8), bitorder="little") != 0
                self.published[here] = np.maximum(self.published[here], last)
        self.apart = bool((self.done > self.published).any())


class LaneReleases:
    """The releases of other clusters that some lanes of a warp have acquired while others had not."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[tuple[Release, int]] = []

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, release: Release, lanes: int) -> None:
        """These lanes acquire a release, and with it the earlier ones that it includes."""
        known = lanes
        for i, (earlier, some) in enumerate(self._known):
            if release.includes(earlier):
                self._known[i] = earlier, some | lanes
            if earlier is release:
                known |= some
        self._known = [(earlier, some) for earlier, some in self._known if earlier is not release]
        self._known.append((release, known))

    def of_all(self, lanes: int) -> list[Release]:
        """The releases that every one of these lanes has acquired."""
        return [release for release, some in self._known if not lanes & ~some]

    def of_any(self, lanes: int) -> list[Release]:
        """The releases that some of these lanes have acquired."""
        return [release for release, some in self._known if lanes & some]

    def forget(self, clock: Clock) -> None:
        """Forgets the releases that a clock has, which all lanes know."""
        self._known = [
            (release, some)
            for release, some in self._known
            if (home := clock.elsewhere.get(release.cta.cluster)) is None
            or bool((release.clock.seen > home.seen).any())
        ]
