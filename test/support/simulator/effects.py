"""The wrong calls of planted faults, in kernels of several templates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass.cute as cute

from cute_backend.templates.epilogue import release_planes
from support.simulator.planting import Call, instead, without


def has_not(call: Call) -> Any:
    """A tile lies in the other segment of two."""
    return (call.place.column < call.self.first) | (call.place.column >= call.self.end)


def first_b(call: Call) -> Any:
    """The first B in the place of all."""
    a, bs = call()
    return a, bs[:1] * len(bs)


def first_beside(call: Call) -> Any:
    """The first segment's scales and zeros in the place of all."""
    scales, count = call.given.scales, len(call.self.segments)
    return call(given=replace(call.given, scales=[scales[i - i % count] for i in range(len(scales))]))


def one_part_less(call: Call) -> Any:
    """The sums of one part fewer are waited for."""
    filled = call.ring.filled
    return call(ring=replace(call.ring, filled=replace(filled, ctas=filled.ctas - 1)))


def signs_of(call: Call) -> Any:
    """-1 for an element that a rotation negates, and 1 for others."""
    ones = cute.make_rmem_tensor_like(call.values)
    ones.fill(1.0)
    return call(values=ones)


def signs_alone(call: Call) -> Any:
    """Elements that a rotation negates but does not exchange."""
    rotated = signs_of(call)
    for e in range(cute.size(rotated)):
        rotated[e] = rotated[e] * call.values[e]
    return rotated


def places_alone(call: Call) -> Any:
    """Elements that a rotation exchanges but does not negate."""
    signs, rotated = signs_of(call), call(values=call.values)
    for e in range(cute.size(rotated)):
        rotated[e] = rotated[e] * signs[e]
    return rotated


def _release(call: Call) -> None:
    call()
    release_planes(call.self, call.state)


RELEASED_UNREAD = (*without("epilogue.release_planes"), *instead("exact.consumer_wait", _release))
"""Planes are handed back to TMA as soon as they are there."""
