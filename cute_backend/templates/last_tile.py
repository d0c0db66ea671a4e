"""Reductions of rows that the GEMM itself finishes: the warp with a row's last tile combines the partials.

A warp has whole rows of its tile. It counts its tiles in global memory:

    each warp        writes the partials of its rows -> barrier of the warp -> one lane counts the tile
    the last warp    barrier of the warp -> reads the partials of all tiles -> writes the results

The increment of the counter releases the partials and acquires those of all warps that counted before, at the
scope of the GPU; the barriers of the warp extend both to all of its lanes (PTX ISA, "Memory Consistency
Model"). So the last warp reads what every other one wrote, in whatever order CTAs ran. It combines the
partials in the order of the kernel in `finish.py`, so both give the same bits.

The last increment sets the counter to 0 again. So counters have to be zeroed only once, before their first
use, and no two kernels that run at the same time may share any (`runtime/arguments/counters.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_backend.planning.last_tile import MOST_PARTS
from cute_backend.spec import ProductKind
from cute_backend.templates.results import Held, Result
from cute_backend.templates.tile import Tile

LANES = 32

PARTS_OF_A_WARP = 8
"""Parts of a row that a warp of the kernel in `finish.py` combines before those of several warps are."""

FEW_GROUPS = 1
"""Groups of PARTS_OF_A_WARP parts for which there is shorter code, since most rows have that few."""


def is_counted(counters: cute.Tensor, parts: Int32) -> Boolean:
    """Whether a launch counts the tiles of rows that have this many: it was given counters, and the last tile
    can combine the partials. Otherwise a second kernel finishes the reductions."""
    return (cute.size(counters) > 0) & (parts <= MOST_PARTS)


@cute.jit
def has_last_tile(
    tile: Tile, counters: cute.Tensor, parts: Int32, kind: cutlass.Constexpr[ProductKind]
) -> Boolean:
    """Counts the warp's tile. Returns whether it was the last of the warp's rows; then all lanes may read the
    partials of every tile. All lanes call this after they have written their partials.

    In a dense product tiles begin at multiples of their rows, so each warp has a counter. In products of
    other `kind`s they may begin at any row. Then each row has a counter, and a warp takes that of its first
    row.

    A tile that is wholly beyond the plane has no partials and is not counted.
    """
    last, first = Boolean(False), _first_row(tile, 0)
    if (first < tile.m) & (tile.n0 < tile.n):
        place = first // tile.warp_rows if cutlass.const_expr(kind is ProductKind.DENSE) else first
        counted = Int32(0)
        cute.arch.sync_warp()
        if tile.lane == 0:
            counted = _increment(counters.iterator + place, parts - 1)
        cute.arch.sync_warp()
        last = cute.arch.shuffle_sync(counted, 0) == parts - 1
    return last


@cute.jit
def finish_rows(tile: Tile, results: Sequence[Result], partials: list, outputs: list):
    """Combines the partials of all tiles of the warp's rows, and writes the results.

    `partials` has the tensors (parts, rows) of each result in order, and `outputs` a vector for each.
    """
    if cute.size(partials[0][0], mode=[0]) <= FEW_GROUPS * PARTS_OF_A_WARP:
        _finish(tile, results, partials, outputs, FEW_GROUPS)
    else:
        _finish(tile, results, partials, outputs, MOST_PARTS // PARTS_OF_A_WARP)


@cute.jit
def _finish(
    tile: Tile, results: Sequence[Result], partials: list, outputs: list, groups: cutlass.Constexpr[int]
):
    for strip in cutlass.range_constexpr(tile.strips):
        first = _first_row(tile, strip)
        if first < tile.m:
            row = first + tile.lane % tile.warp_rows
            for i in cutlass.range_constexpr(len(results)):
                whole = _combined(tile, results[i], partials[i], cutlass.min(row, tile.m - 1), groups)
                if (tile.lane < tile.warp_rows) & (row < tile.m):
                    outputs[i][row] = results[i].element(whole[0], Int64(tile.n))


def _first_row(tile: Tile, strip: int) -> Int32:
    """The first row of one of the warp's strips, from the lane that has it. `Tile.warp_row` would keep one
    more register from the start of the tile to its end: 128 x 128 under ping-pong spilled 8 bytes, if planes
    are read by element."""
    return cute.arch.shuffle_sync(tile.raw_row(strip * tile.rows // tile.strips), 0)


def _combined(tile: Tile, result: Result, parts: Sequence[cute.Tensor], row: Int32, groups: int) -> Held:
    """Combines up to `groups` groups of partials of a row. The lanes that share the row each load a part of
    every group, all before the first is combined, so that all loads are in flight at once."""
    total, sharing = cute.size(parts[0], mode=[0]), LANES // tile.warp_rows
    first = tile.lane // tile.warp_rows
    places = [first + place for place in range(0, groups * PARTS_OF_A_WARP, sharing)]
    loaded = [tuple(part[cutlass.min(place, total - 1), row] for part in parts) for place in places]
    held = []
    for place, partial in zip(places, loaded, strict=True):
        held.append(result.identity())
        held[-1].take(0, partial, place < total)
    of_a_group = PARTS_OF_A_WARP // sharing
    wholes = [_by_halves(held[group * of_a_group :][:of_a_group]) for group in range(groups)]
    for whole in wholes:
        whole.across([lanes for lanes in tile.lanes[::-1] if lanes >= tile.warp_rows])
    return _by_halves(wholes)


def _by_halves(held: list[Held]) -> Held:
    """Combines partials as the lanes of a warp do that exchange them: each of the first half with the one of
    the second half in the same place, and so on. Their number is a power of two."""
    while len(held) > 1:
        half = len(held) // 2
        for one, other in zip(held[:half], held[half:], strict=True):
            one.take(0, other[0], Boolean(True))
        held = held[:half]
    return held[0]


@dsl_user_op
def _increment(counter: cute.Pointer, most: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Adds 1 to a counter in global memory, or sets it to 0 if it is `most`, and returns what it was. This
    releases the memory that the thread has written, and acquires what others released by it (PTX ISA,
    atom)."""
    old = nvvm.atomicrmw(
        op=nvvm.AtomicOpKind.INC,
        ptr=counter.to_llvm_ptr(loc=loc, ip=ip),
        a=most.ir_value(loc=loc, ip=ip),
        mem_order=nvvm.MemOrderKind.ACQ_REL,
        syncscope=nvvm.MemScopeKind.GPU,
        loc=loc,
        ip=ip,
    )
    return Int32(old)
