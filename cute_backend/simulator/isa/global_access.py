"""Accesses of a warp's threads to global memory: the checks, and the clocks that they receive and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.global_shadow import Event, Lanes, Release
from cute_backend.simulator.lane_accesses import ALL_LANES, LANES
from cute_backend.simulator.scopes import Order

if TYPE_CHECKING:
    from cute_backend.simulator.memory import Piece
    from cute_backend.simulator.warp import Warp


def load_global(w: Warp, addresses: np.ndarray, lanes: np.ndarray, nbytes: int, order: Order) -> np.ndarray:
    """Bytes (lanes, nbytes) at an address of each of these lanes."""
    pieces = w.global_memory.pieces(addresses, nbytes)
    shadow = w.cta.cluster.global_shadow
    if not order.updates:  # the write of an update checks both
        for piece in pieces:
            shadow.read(piece.place, _event(w, piece, lanes, nbytes, order, writes=False), w.global_clock())
    if order.strong:
        w.observe(shadow.observe(_elements(addresses, nbytes, order), order, w.cta.id), order)
    if len(pieces) == 1:
        return pieces[0].read(nbytes)
    out = np.empty((len(addresses), nbytes), np.uint8)
    for piece in pieces:
        out[piece.here] = piece.read(nbytes)
    return out


def store_global(w: Warp, addresses: np.ndarray, lanes: np.ndarray, data: np.ndarray, order: Order) -> None:
    """Writes bytes (lanes, nbytes) at an address of each of these lanes."""
    nbytes = data.shape[1]
    pieces = w.global_memory.pieces(addresses, nbytes)
    shadow = w.cta.cluster.global_shadow
    for piece in pieces:
        shadow.write(piece.place, _event(w, piece, lanes, nbytes, order, writes=True), w.global_clock())
        piece.write(data[piece.here])
    if order.scope is None:
        return
    if order.releases:
        releases = [Release(w.cta.id, order.scope, w.release())]
    else:
        releases = [
            Release(w.cta.id, scope, clock) for scope, clock in w.fences.items() if scope <= order.scope
        ]
    shadow.record_releases(_elements(addresses, nbytes, order), order, releases)


def _event(w: Warp, piece: Piece, lanes: np.ndarray, nbytes: int, order: Order, *, writes: bool) -> Event:
    text = w.program.entry.instructions[w.pc].text
    footprint, epoch = Lanes(piece.offsets, nbytes), w.lane_accesses.touch(lanes[piece.here])
    all_lanes = len(piece.offsets) == LANES
    bits = ALL_LANES if all_lanes else int(np.bitwise_or.reduce(np.left_shift(1, lanes[piece.here])))
    return Event(
        w.cta.id, w.lane_accesses.agent, epoch, bits, "generic", writes, order, w.name, text, footprint
    )


def _elements(addresses: np.ndarray, nbytes: int, order: Order) -> np.ndarray:
    """The address of every element of the accesses."""
    if nbytes == order.size:
        return addresses
    return (addresses[:, None] + np.arange(0, nbytes, order.size, dtype=np.uint64)).reshape(-1)
