"""The end of a region: the set of stores with which the fewest bytes are read and written.

This module knows nothing of graphs. Each `BoundaryValue` of a region could be stored. If a value is needed
outside of the kernel and is not stored, the `consumers` that need it compute it again from stored values. The
bytes are those that the kernel loads and stores and that its consumers read and write. A launch that some
choices have and others don't counts as LAUNCH_BYTES; a second kernel that finishes a region's reductions is
such a launch. Reductions that rows' last tiles finish take no launch, but time, which counts as
LAST_TILE_BYTES.

The set of stores decides everything else, so the search is over sets of stores: branch and bound, from the
region's last value to its first. Once all values after one are decided, it is known which consumers need that
one, and what the decided ones cost. A minimum cut bounds the cost of the others from below: on every path
from a product to what a consumer needs lies a value that is written once, and read by that consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cute_backend.planning import LAST_TILE_RESULTS

LAUNCH_BYTES = 5 << 20
"""The cost of a launch in bytes: one more kernel in a CUDA graph took 1.0 to 1.4 microseconds on an H200, in
which a copy moves 4.0 to 5.7 MiB (benchmarks/launches.py)."""

LAST_TILE_BYTES = 2 * LAUNCH_BYTES // 3
"""The cost of reductions that rows' last tiles finish. Beside a product with a residual, a mean square took
1.1 to 2.0 microseconds in this way for planes of up to 2048 x 2048, and 1.7 to 2.6 with a second kernel
(benchmarks/findings.md, one H100)."""

ROW_HELD = 8 << 10
"""The bytes of the longest row that a kernel was found to read a second time without cost. Inductor keeps
rows of up to 1024 elements in registers, and asks L1 to keep longer ones. Between two products, a kernel that
computes the mean square of rows of 2 to 8 KiB itself was 0.4 to 9.2 microseconds faster than one that gets it
from the product's kernel, whatever finished it there, for 64, 2048 and 8192 rows alike. For maxima of 28 KiB
it was 13 and 21 microseconds slower for 2048 and 8192 rows (benchmarks/findings.md, one H100). No
length between was measured."""

MAX_CANDIDATES = 40
"""The most values that a region could store for which a search is made."""

_MAX_WORK = 200_000
"""The limit of a search's decisions, times the number of values, beyond which the search is given up."""


@dataclass(frozen=True)
class BoundaryValue:
    """A value of a region. Values are identified by their places in the order, and sets of them are bit
    masks.

    `size` is in bytes. `sources` are the values that it is computed from, and `loads` the operands, by their
    places among those of the region. `storable` is whether the kernel can write it, and `planes` the number
    of stores that this takes. A value with a `product` has to be in the kernel. `home` is the consumer that
    computes the value once for all consumers, if it is a reduction or has to be `in_memory`; otherwise each
    consumer that needs the value computes it. A reduction may be `followed` by work on its result alone; its
    home does that work as well, and otherwise it is a launch. A home that uses the result of a reduction
    together with the reduction's input reads `again` bytes of that input a second time, 0 if it holds the
    rows. A value that `finishes` is work on a reduction's result alone, which the kernel does when it
    finishes the reduction. With either of these, `apart` is whether this takes a second kernel; if not, rows'
    last tiles finish up to LAST_TILE_RESULTS results. `bits` is the size of one element of all `planes`
    together.
    """

    size: int
    sources: int = 0
    loads: int = 0
    storable: bool = True
    product: bool = False
    reduces: bool = False
    finishes: bool = False
    apart: bool = True
    in_memory: bool = False
    home: int = 0
    followed: bool = False
    again: int = 0
    planes: int = 1
    bits: int = 0

    @property
    def is_reduced(self) -> bool:
        """Whether a store of the value is one of a reduction."""
        return self.reduces or self.finishes

    @property
    def has_home(self) -> bool:
        return self.reduces or self.in_memory


@dataclass(frozen=True)
class Limits:
    """The room of one kernel.

    It writes at most `results` results, and at most `results - reductions` of them are planes. It reads at
    most `loads` planes, or more if one element of each plane that it reads or writes takes at most `bits`
    bits in all.
    """

    loads: int
    results: int
    reductions: int = 0
    bits: int = 0

    def holds(self, choices: Choices, stores: int, loaded: int) -> bool:
        """Whether a kernel has room for the values `stores` and the loads `loaded`."""
        results = choices.planes(stores)
        if results > self.results or results - choices.reduced(stores) > self.results - self.reductions:
            return False
        return loaded.bit_count() <= self.loads or choices.bits(stores, loaded) <= self.bits

    def is_tight(self, choices: Choices, stores: int) -> bool:
        """Whether a kernel that stores these values may lack room for another result, or for the loads of all
        that is needed outside."""
        return (
            choices.planes(stores) >= self.results - self.reductions
            or choices.loads_of(choices.outside).bit_count() > self.loads
        )


@dataclass(frozen=True)
class Choices:
    """The values of a region in order, and the bytes of each load. For each kernel that follows the region,
    `consumers` has the values and `loaded` the loads that it reads in every choice. A kernel that reads no
    value runs only if it is the home of one. `load_bits` are the bits of an element of each load."""

    values: tuple[BoundaryValue, ...]
    loads: tuple[int, ...]
    consumers: tuple[int, ...]
    loaded: tuple[int, ...]
    load_bits: tuple[int, ...] = ()

    @property
    def outside(self) -> int:
        """The values that are needed outside of the kernel, whatever the choice is."""
        found = 0
        for reads in self.consumers:
            found |= reads
        for place, value in enumerate(self.values):
            found |= value.in_memory << place
        return found

    def planes(self, stores: int) -> int:
        """The number of results that a kernel writes for these values."""
        return sum(self.values[place].planes for place in members(stores))

    def reduced(self, stores: int) -> int:
        """The number of reductions among them."""
        return sum(self.values[place].is_reduced for place in members(stores))

    def finish_bytes(self, stores: int) -> int:
        """The cost of finishing the reductions among these values, if a kernel stores them."""
        reduced = [self.values[place] for place in members(stores) if self.values[place].is_reduced]
        if not reduced:
            return 0
        is_many = sum(value.planes for value in reduced) > LAST_TILE_RESULTS
        return LAUNCH_BYTES if is_many or any(value.apart for value in reduced) else LAST_TILE_BYTES

    def bits(self, stores: int, loaded: int) -> int:
        """The bits of one element of all planes that a kernel writes and reads."""
        read = sum(self.load_bits[place] for place in members(loaded))
        return read + sum(self.values[place].bits for place in members(stores))

    def loads_of(self, stores: int) -> int:
        """The loads that a kernel reads to compute these values."""
        loaded = 0
        for place in members(computed_for(self.values, stores)):
            loaded |= self.values[place].loads
        return loaded


@dataclass(frozen=True)
class Boundary:
    """A choice: the mask of the values that are stored, and whether it is known that no other choice has
    fewer bytes."""

    stores: int
    is_best: bool


@lru_cache(maxsize=256)
def cheapest_stores(choices: Choices, room: Limits) -> Boundary | None:
    """The stores with which the fewest bytes cross the boundary, of those that one kernel has room for; None
    if there is no such set.

    Among equal sets, the one that leaves the most to the kernel is taken. If the search would be too long, as
    many values as possible are stored, from the last to the first. Equal layers ask the same question, so
    answers are cached.
    """
    values, outside = choices.values, choices.outside
    ends = [values[place] for place in members(outside)]
    is_simple = room.holds(choices, outside, choices.loads_of(outside)) and all(
        value.storable and not value.followed for value in ends
    )
    if is_simple and not any(choices.consumers):
        return Boundary(outside, is_best=True)  # another kernel would be one more launch
    candidates = _candidates(choices)
    search = _Search(choices, candidates, room)
    if candidates.bit_count() <= MAX_CANDIDATES:
        search.descend(len(values), _State(choices.consumers, outside, choices.loaded))
        is_whole = search.work <= _MAX_WORK
        if search.best is not None:
            return Boundary(search.best.stores, is_whole)
        if is_whole:
            return None
    stores = _as_late_as_possible(choices, candidates, room)
    return None if stores is None else Boundary(stores, is_best=False)


def members(mask: int) -> Iterator[int]:
    """The places of a mask's bits, from the last to the first."""
    while mask:
        place = mask.bit_length() - 1
        yield place
        mask ^= 1 << place


def computed_for(values: Sequence[BoundaryValue], wanted: int) -> int:
    """Some values and all that they are computed from."""
    found = wanted
    for place in reversed(range(wanted.bit_length())):
        if found >> place & 1:
            found |= values[place].sources
    return found


def _candidates(choices: Choices) -> int:
    """The values that are worth storing. Two kinds are not: a value that is computed from a single narrower
    value, and a value that serves only to compute another one that is at most as wide. This holds if that
    computation loads no plane, and if the other value takes at most as many planes. So one value stands for a
    chain of ops."""
    values, found, outside = choices.values, 0, choices.outside
    users = [0] * len(values)
    for place, value in enumerate(values):
        for each in members(value.sources):
            users[each] |= 1 << place
    for place, value in enumerate(values):
        keep = value.storable
        is_bound = value.has_home or value.product or value.finishes
        if keep and not is_bound and not value.loads and _is_one(value.sources):
            source = values[value.sources.bit_length() - 1]
            keep = not source.storable or source.size >= value.size or source.planes > value.planes
        if keep and not outside >> place & 1 and _is_one(users[place]):
            only = values[users[place].bit_length() - 1]
            follows = only.storable and not only.reduces and not only.loads and _is_one(only.sources)
            keep = not (follows and only.size <= value.size and only.planes <= value.planes)
        found |= keep << place
    return found


def _is_one(mask: int) -> bool:
    return mask.bit_count() == 1


@dataclass(frozen=True)
class _State:
    """The decisions about the values after a place, and their cost.

    `needs` are the values that each consumer needs, decided or not, `wanted` all that are needed outside, and
    `read` the loads that each consumer reads for what it computes. `inside` is what the kernel computes,
    `loaded` what it loads for that. `launched` are consumers that run for the region's values alone.
    """

    needs: tuple[int, ...]
    wanted: int
    read: tuple[int, ...]
    stores: int = 0
    inside: int = 0
    loaded: int = 0
    launched: int = 0
    size: int = 0


class _Search:
    def __init__(self, choices: Choices, candidates: int, room: Limits) -> None:
        self.choices, self.candidates, self.room = choices, candidates, room
        self.best: _State | None = None
        self.work = 0
        self.cuts: dict[int, int] = {0: 0}

    def descend(self, count: int, state: _State) -> None:
        """Decides on the first `count` values, the last of them first, given the decisions on all after
        them."""
        while undecided := state.wanted & (1 << count) - 1:
            place = undecided.bit_length() - 1
            if self.candidates >> place & 1:
                self.work += len(self.choices.values)
                if self.work > _MAX_WORK:
                    return
                least = state.size + self._least(state, place)
                if not self._may_be_better(least, state.inside | (2 << place) - 1):
                    return
                stored = self._stored(state, place)
                if self.room.holds(self.choices, stored.stores, stored.loaded):
                    self.descend(place, stored)
            if self.choices.values[place].product:
                return
            state, count = self._left_out(state, place), place
        if self._may_be_better(state.size, state.inside):
            self.best = state

    def _may_be_better(self, size: int, inside: int) -> bool:
        """Whether a choice of at least this many bytes, with at most this much in the kernel, may be better
        than the best so far."""
        if self.best is None or size != self.best.size:
            return self.best is None or size < self.best.size
        return inside.bit_count() > self.best.inside.bit_count()

    def _least(self, state: _State, place: int) -> int:
        """A lower bound of the bytes for undecided values: one write, and one read by each consumer."""
        low = (2 << place) - 1
        return sum(self._cut(wanted & low) for wanted in (state.wanted, *state.needs))

    def _cut(self, wanted: int) -> int:
        if wanted not in self.cuts:
            self.cuts[wanted] = minimum_cut(self.choices.values, self.candidates, wanted)
        return self.cuts[wanted]

    def _stored(self, state: _State, place: int) -> _State:
        """The state once the kernel stores a value, which every consumer that needs it reads."""
        value = self.choices.values[place]
        inside = state.inside | computed_for(self.choices.values, 1 << place)
        loaded = state.loaded
        for each in members(inside & ~state.inside):
            loaded |= self.choices.values[each].loads
        readers = sum(needs >> place & 1 for needs in state.needs)
        size = state.size + value.size * (1 + readers) + self._bytes(loaded & ~state.loaded)
        stores = state.stores | 1 << place
        size += self.choices.finish_bytes(stores) - self.choices.finish_bytes(state.stores)
        size += LAUNCH_BYTES * value.followed
        return replace(
            state,
            stores=stores,
            inside=inside,
            loaded=loaded,
            size=size,
        )

    def _left_out(self, state: _State, place: int) -> _State:
        """The state once a value is computed by each consumer that needs it, or for all by its home."""
        value, size, launched = self.choices.values[place], state.size, state.launched
        needs, read = list(state.needs), list(state.read)
        computing = [index for index, need in enumerate(needs) if need >> place & 1]
        if value.has_home:
            readers = sum(index != value.home for index in computing)
            size += value.size * (readers + (readers > 0 or value.in_memory))
            size += value.again * (value.home in computing)
            computing = [value.home]
            if not (self.choices.consumers[value.home] or launched >> value.home & 1):
                launched |= 1 << value.home
                size += LAUNCH_BYTES
        for index in computing:
            needs[index] |= value.sources
            size += self._bytes(value.loads & ~read[index])
            read[index] |= value.loads
        wanted = state.wanted | value.sources
        return replace(
            state, needs=tuple(needs), read=tuple(read), wanted=wanted, launched=launched, size=size
        )

    def _bytes(self, loads: int) -> int:
        return sum(self.choices.loads[place] for place in members(loads))


def _as_late_as_possible(choices: Choices, candidates: int, room: Limits) -> int | None:
    """Stores from the last value on, with room for the products; None if a product can't be stored."""
    values = choices.values
    wanted, stores = choices.outside, 0
    products = sum(value.product << place for place, value in enumerate(values))
    for place in reversed(range(len(values))):
        if not wanted >> place & 1:
            continue
        value = values[place]
        with_products = stores | products | 1 << place
        has_room = value.storable and (
            value.product or room.holds(choices, with_products, choices.loads_of(with_products))
        )
        if has_room and (value.product or candidates >> place & 1):
            stores |= 1 << place
        elif value.product:
            return None
        else:
            wanted |= value.sources
    return stores if room.holds(choices, stores, choices.loads_of(stores)) else None


_ENDLESS = 1 << 62


def minimum_cut(values: Sequence[BoundaryValue], candidates: int, wanted: int) -> int:
    """The bytes of a minimum cut: values, each a candidate or written by its home, of which one lies on every
    path from a product to a wanted value. _ENDLESS or more if some path has no such value. The cut is found
    as a maximum flow by augmenting paths; each value has an entry and an exit, and its bytes are the capacity
    between the two.
    """
    room: dict[int, dict[int, int]] = {}

    def add(start: int, end: int, size: int) -> None:
        room.setdefault(start, {})[end] = size
        room.setdefault(end, {}).setdefault(start, 0)

    source, sink = -1, -2
    for place in members(computed_for(values, wanted)):
        value, entry, leave = values[place], 2 * place, 2 * place + 1
        is_read = candidates >> place & 1 or value.has_home
        add(entry, leave, value.size if is_read else _ENDLESS)
        if value.product:
            add(source, entry, _ENDLESS)
        if wanted >> place & 1:
            add(leave, sink, _ENDLESS)
        for each in members(value.sources):
            add(2 * each + 1, entry, _ENDLESS)
    total = 0
    while total < _ENDLESS and (way := _way(room, source, sink)):
        least = min(room[start][end] for start, end in way)
        for start, end in way:
            room[start][end] -= least
            room[end][start] += least
        total += least
    return total


def _way(room: dict[int, dict[int, int]], source: int, sink: int) -> list[tuple[int, int]]:
    """The edges of a shortest path with capacity left; empty if there is none."""
    before = {source: source}
    queue = deque([source])
    while queue and sink not in before:
        start = queue.popleft()
        for end, size in room.get(start, {}).items():
            if size and end not in before:
                before[end] = start
                queue.append(end)
    way = []
    while sink != source and sink in before:
        way.append((before[sink], sink))
        sink = before[sink]
    return way
