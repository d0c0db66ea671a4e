"""Memories: the host's, seen as global memory, and a CTA's shared and local memory.

Generic addresses: global memory keeps the host's addresses (below 2**47); shared, local and parameter memory
have windows above them (PTX ISA 5.1 "State spaces", `cvta`).
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass

import numpy as np

from cute_backend.simulator.simulation_errors import IllegalAccess

SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
WINDOW_MASK = 0xFF << 56
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1


@dataclass
class Range:
    """A registered piece of host memory. `view` has its bytes; `keep` is an object that owns them."""

    address: int
    nbytes: int
    owner: str
    view: np.ndarray
    keep: object = None

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True)
class Piece:
    """The accesses of some lanes of a warp to one range. `here` are their positions among the active
    lanes."""

    place: Range
    here: slice | np.ndarray
    offsets: np.ndarray

    def read(self, nbytes: int) -> np.ndarray:
        """Bytes (lanes, nbytes)."""
        return self.place.view[self.offsets[:, None] + np.arange(nbytes)]

    def write(self, data: np.ndarray) -> None:
        """Writes bytes (lanes, nbytes); where lanes collide, the highest lane wins."""
        self.place.view[self.offsets[:, None] + np.arange(data.shape[1])] = data


def _offsets(addresses: np.ndarray, place: Range) -> np.ndarray:
    return (addresses - np.uint64(place.address)).astype(np.int64)


class GlobalMemory:
    """Host memory that kernels may touch: registered ranges, and nothing else."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._starts: list[int] = []
        self._last: Range | None = None

    def register(self, address: int, nbytes: int, owner: str, *, keep: object = None) -> None:
        """Lets kernels access `nbytes` bytes at the host address `address`; `owner` names them in errors."""
        if nbytes <= 0:
            return
        view = np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)
        self._last = None
        at = bisect.bisect(self._starts, address)
        self._starts.insert(at, address)
        self._ranges.insert(at, Range(address, nbytes, owner, view, keep))

    def unregister(self, address: int) -> None:
        """Removes the ranges that begin at `address`. Raises KeyError if there is none."""
        kept = [r for r in self._ranges if r.address != address]
        if len(kept) == len(self._ranges):
            raise KeyError(f"nothing is registered at {address:#x}")
        self._ranges = kept
        self._starts = [r.address for r in kept]
        self._last = None

    def find(self, address: int, nbytes: int) -> Range:
        """The range that holds all `nbytes` bytes at `address`. Raises `IllegalAccess`."""
        last = self._last
        if last is not None and last.address <= address and address + nbytes <= last.end:
            return last
        at = bisect.bisect(self._starts, address)
        for candidate in reversed(self._ranges[:at]):
            if address + nbytes <= candidate.end:
                self._last = candidate
                return candidate
        raise IllegalAccess(
            f"global access of {nbytes} bytes at {address:#x}: {self._nearest(address, nbytes)}"
        )

    def _nearest(self, address: int, nbytes: int) -> str:
        if not self._ranges:
            return "no memory is registered"

        def distance(r: Range) -> int:
            return max(r.address - address, address + nbytes - r.end, 0)

        nearest = min(self._ranges, key=distance)
        if address < nearest.address:
            place = f"{nearest.address - address} bytes before the start"
        else:
            place = f"{address + nbytes - nearest.end} bytes past the end"
        return f"{place} of {nearest.owner} ({nearest.nbytes} bytes at {nearest.address:#x})"

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of `nbytes` bytes, as uint8."""
        return self.view(address, nbytes).copy()

    def write(self, address: int, data: np.ndarray | bytes) -> None:
        """Writes bytes (or the bytes of an array)."""
        raw = (
            np.frombuffer(data, np.uint8)
            if isinstance(data, bytes)
            else np.ascontiguousarray(data).view(np.uint8)
        )
        self.view(address, raw.size)[:] = raw.reshape(-1)

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes themselves, writable."""
        found = self.find(address, nbytes)
        start = address - found.address
        return found.view[start : start + nbytes]

    def pieces(self, addresses: np.ndarray, nbytes: int) -> list[Piece]:
        """The accesses of lanes to `nbytes` bytes at an address each, by the ranges that hold them."""
        low, high = int(addresses.min()), int(addresses.max())
        try:
            places = [self.find(low, high - low + nbytes)]
        except IllegalAccess:
            of_lane = [self.find(int(address), nbytes) for address in addresses]
            places = list({place.address: place for place in of_lane}.values())
        if len(places) == 1:
            return [Piece(places[0], slice(None), _offsets(addresses, places[0]))]
        lanes = [[i for i, found in enumerate(of_lane) if found.address == place.address] for place in places]
        return [
            Piece(place, np.array(here), _offsets(addresses[here], place))
            for place, here in zip(places, lanes, strict=True)
        ]


class LocalMemory:
    """Per-lane memory of one warp: `data` are its bytes, (nbytes, 32)."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def gather(self, lanes: np.ndarray, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        self._check(offsets, nbytes)
        return self.data[offsets[:, None] + np.arange(nbytes), lanes[:, None]]

    def scatter(self, lanes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> None:
        self._check(offsets, data.shape[1])
        self.data[offsets[:, None] + np.arange(data.shape[1]), lanes[:, None]] = data

    def _check(self, offsets: np.ndarray, nbytes: int) -> None:
        if int(offsets.min()) < 0 or int(offsets.max()) + nbytes > len(self.data):
            bad = int(offsets.max())
            raise IllegalAccess(
                f"local access of {nbytes} bytes at {bad:#x}: the frame has {len(self.data)} bytes"
            )
