"""The agents that wrote and read each cell of shared and tensor memory, and what every agent knows of it.

An agent is a warp, an asynchronous pipe or an mbarrier (on whose phases the completions of TMA loads are
counted). Each agent counts its own events; a vector clock says how far its owner has seen every agent
(Lamport's happens-before; the check per cell is FastTrack's, Flanagan and Freund 2009). Barriers pass clocks
on. An access is a race if its owner's clock doesn't cover the write that it reads, or the reads and the write
that it overwrites. So a missing wait is found under any timing.

A second clock holds what a fence.proxy.async has published: the async proxy may only read or overwrite writes
of the generic proxy that this clock covers (PTX ISA 8.3 "Proxies").

Cells are 4 bytes of shared memory, and one lane and column of tensor memory. Global memory has a shadow of
its own: see global_shadow.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

import numpy as np

from cute_backend.simulator.simulation_errors import MissingProxyFence, RaceError

Cells = Union[np.ndarray, slice, tuple[slice, slice], tuple[np.ndarray, slice]]
IN_FLIGHT = np.iinfo(np.int32).max


class Clock:
    """A vector clock: `seen[a]` events of agent a are known, `published[a]` of them also to the async proxy
    in shared memory. Agents are those of one cluster.

    The other fields are about global memory. Copies share them, so none is changed in place. `tails[a,
    lanes]` is an event beyond `seen[a]`, of a warp whose lanes have not met since. Up to it, the accesses of
    these `lanes` (as bits) are known; those of the other lanes are not. `elsewhere` has the clocks of other
    clusters, by their number. `public` is a clock of the events that a fence.proxy.async has published.
    """

    __slots__ = ("elsewhere", "public", "published", "seen", "tails")

    def __init__(self, size: int) -> None:
        self.seen = np.zeros(size, np.int32)
        self.published = np.zeros(size, np.int32)
        self.tails: dict[tuple[int, int], int] = {}
        self.elsewhere: dict[int, Clock] = {}
        self.public: Clock | None = None

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.seen = self.seen.copy()
        clock.published = self.published.copy()
        clock.tails = self.tails
        clock.elsewhere = self.elsewhere
        clock.public = self.public
        return clock

    def join(self, other: Clock) -> None:
        """Learns what another agent of the same cluster knows."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.published, other.published, out=self.published)
        if other.tails:
            self._join_tails(other.tails)
        if other.elsewhere:
            self._join_elsewhere(other.elsewhere)
        if other.public is not None:
            self.publish_too(other.public)

    def joined(self, other: Clock) -> Clock:
        """A clock with the events of both."""
        clock = self.copy()
        clock.join(other)
        return clock

    def hear(self, other: Clock, home: int, own: int) -> None:
        """Learns what an agent of the cluster `home` knows of global memory. This clock belongs to `own`."""
        news = {**other.elsewhere, home: other._of_home()}
        about_us = news.pop(own, None)
        if about_us is not None:
            self.join(about_us)
        self._join_elsewhere(news)
        if other.public is not None:
            public = Clock(len(self.seen))
            public.hear(other.public, home, own)
            self.publish_too(public)

    def covers(self, agent: int, epoch: int, lanes: int) -> bool:
        """Whether an event of an agent of this cluster is known or, if only some lanes of a warp made it,
        whether the accesses of these `lanes` are."""
        if self.seen[agent] >= epoch:
            return True
        known = 0
        for (other, some), last in self.tails.items():
            if other == agent and last >= epoch:
                known |= some
        return known != 0 and not lanes & ~known

    def publish(self) -> None:
        """Publishes all known events to the async proxy, in shared memory."""
        np.copyto(self.published, self.seen)

    def publish_too(self, public: Clock) -> None:
        """Publishes these events to the async proxy, in global memory."""
        self.public = public if self.public is None else self.public.joined(public)

    def _of_home(self) -> Clock:
        """The part of the clock with the events of its own cluster."""
        clock = self.copy()
        clock.elsewhere, clock.public = {}, None
        return clock

    def _join_tails(self, news: dict[tuple[int, int], int]) -> None:
        merged = dict(self.tails)
        for key, last in news.items():
            merged[key] = max(last, merged.get(key, 0))
        self.tails = {key: last for key, last in merged.items() if last > self.seen[key[0]]}

    def _join_elsewhere(self, news: dict[int, Clock]) -> None:
        merged = dict(self.elsewhere)
        for cluster, clock in news.items():
            mine = merged.get(cluster)
            merged[cluster] = clock if mine is None else mine.joined(clock)
        self.elsewhere = merged


class Agents:
    """The agents of a cluster: numbers and names. `size` bounds their number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.names: list[str] = []
        self.generic: list[bool] = []

    def new(self, name: str, *, generic: bool = False) -> int:
        if len(self.names) == self.size:
            raise RaceError(f"more than {self.size} warps, pipes and barriers in one cluster")
        self.names.append(name)
        self.generic.append(generic)
        return len(self.names) - 1


@dataclass(slots=True)
class Access:
    """One access for the shadow: its agent, the number of its event, and the agent's clock.

    `proxy` is "generic" or "async"; `text` names the access in errors. An epoch of IN_FLIGHT is covered by
    no clock. `issuer` is the warp, as an agent, of asynchronous work.
    """

    agent: int
    epoch: int
    clock: Clock
    proxy: str
    text: str
    issuer: int = -1


class Shadow:
    """The cells of one memory. `describe` names a cell in errors."""

    def __init__(self, cells: int | tuple[int, int], agents: Agents, describe: Callable[[int], str]) -> None:
        self.agents = agents
        self.describe = describe
        self.writer = np.full(cells, -1, np.int16)
        self.epoch = np.zeros(cells, np.int32)
        self.reads: dict[int, np.ndarray] = {}
        self.notes: dict[tuple[int, int], str] = {}

    def read(self, cells: Cells, access: Access) -> None:
        """Checks and records a read of `cells`."""
        writer = self.writer[cells]
        if np.count_nonzero(writer < 0):
            where = self._first(cells, writer < 0)
            raise RaceError(f"{access.text} reads {self.describe(where)}, which was never written")
        epoch = self.epoch[cells]
        if np.count_nonzero(access.clock.seen[writer] < epoch):
            self._raise(cells, access.clock.seen[writer] < epoch, access, "reads")
        self._check_proxy(cells, access, "reads")
        seen = self.reads.get(access.agent)
        if seen is None:
            seen = self.reads[access.agent] = np.zeros(self.writer.shape, np.int32)
        seen[cells] = access.epoch

    def write(self, cells: Cells, access: Access, *, whole: bool = True) -> None:
        """Checks and records a write. `whole` is false if it covers only a part of a cell, whose other bytes
        another agent may write.
        """
        if whole:
            writer = self.writer[cells]
            missed = access.clock.seen[writer] < self.epoch[cells]
            if np.count_nonzero(missed):
                missed &= writer >= 0
                if missed.any():
                    self._raise(cells, missed, access, "overwrites")
        self._check_proxy(cells, access, "overwrites")
        for agent, seen in self.reads.items():
            if agent == access.agent:
                continue
            missed = seen[cells] > access.clock.seen[agent]
            if np.count_nonzero(missed):
                where = self._first(cells, missed)
                raise RaceError(
                    f"{access.text} overwrites {self.describe(where)}, which {self.agents.names[agent]} "
                    f"may still be reading{self._note(agent, int(seen.flat[where]))}: nothing waits for it"
                    + _unmet(agent, access)
                )
        self.writer[cells] = access.agent
        self.epoch[cells] = access.epoch

    def _check_proxy(self, cells: Cells, access: Access, verb: str) -> None:
        """Raises `MissingProxyFence` if the async proxy accesses an unpublished write of the generic
        proxy."""
        if access.proxy != "async":
            return
        writer = self.writer[cells]
        missed = (access.clock.published[writer] < self.epoch[cells]) & (writer >= 0)
        if missed.any():
            missed &= np.array(self.agents.generic)[writer]
        if missed.any():
            where = self._first(cells, missed)
            raise MissingProxyFence(
                f"{access.text} {verb} {self.describe(where)} through the async proxy; {self._who(where)} "
                "wrote it through the generic proxy, and no fence.proxy.async stands between the two"
            )

    def note(self, agent: int, epoch: int, text: str) -> None:
        """Records the instruction of an event, for errors."""
        if len(self.notes) > 20000:
            self.notes.clear()
        self.notes[agent, epoch] = text

    def forget(self, cells: Cells) -> None:
        """Makes the contents undefined, as those of tensor memory that is freed."""
        self.writer[cells] = -1
        self.epoch[cells] = 0
        for seen in self.reads.values():
            seen[cells] = 0

    def _first(self, cells: Cells, mask: np.ndarray) -> int:
        index = np.arange(self.writer.size).reshape(self.writer.shape)[cells]
        return int(index[mask].flat[0])

    def _note(self, agent: int, epoch: int) -> str:
        text = self.notes.get((agent, epoch))
        return f" ({text})" if text else ""

    def _who(self, cell: int) -> str:
        agent = int(self.writer.flat[cell])
        return self.agents.names[agent] + self._note(agent, int(self.epoch.flat[cell]))

    def _raise(self, cells: Cells, mask: np.ndarray, access: Access, verb: str) -> None:
        where = self._first(cells, mask)
        raise RaceError(
            f"{access.text} {verb} {self.describe(where)}, written by {self._who(where)}: nothing that it "
            "waited for says that this write is complete" + _unmet(int(self.writer.flat[where]), access)
        )


def _unmet(agent: int, access: Access) -> str:
    """The addition to a message about two accesses of the same warp."""
    return "; lanes of one warp are ordered by bar.warp.sync" if agent == access.issuer else ""
