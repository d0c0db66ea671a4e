"""Faults planted in kernels of the Hopper template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import warpgroup

from cute_backend.planning import TILE_K_BYTES
from cute_backend.simulator.simulation_errors import (
    BarrierError,
    Deadlock,
    IllegalAccess,
    MissingProxyFence,
    RaceError,
    SimulationError,
)
from cute_backend.templates.crew import WARPS
from cute_backend.templates.epilogue import release_planes
from cute_backend.templates.overlap import await_earlier_kernels
from cute_backend.templates.rings import in_ring, named_barrier
from cute_backend.templates.stored_values import MAGIC, _signed
from cute_backend.templates.warpgroups import Turn
from support.simulator.effects import (
    RELEASED_UNREAD,
    first_b,
    first_beside,
    has_not,
    one_part_less,
    signs_alone,
)
from support.simulator.mutants import (
    BLOCK_SCALED,
    COLUMN_SCALED,
    CONVERTING,
    CONVERTING_GROUPS,
    CONVERTING_INTEGERS,
    CONVERTING_PAIR,
    COOPERATIVE,
    FEW_ROWS,
    GROUPS,
    GROUPS_IN_PARTS,
    HALF_BLOCKS,
    HOPPER_MULTICAST,
    INT8_BY_WGMMA,
    INT8_IN_PARTS,
    K_GROUPS,
    K_GROUPS_FP8,
    K_TAILS,
    KEEPS,
    NIBBLES,
    NIBBLES_LESS_UNSIGNED,
    PAIR_IN_GROUPS,
    PARTS,
    PASSES,
    PIECES,
    PING_PONG,
    PING_PONG_GROUPS,
    PROMOTED,
    REDUCING,
    REDUCING_ROWS,
    REPEATING,
    ROTATING,
    ROTATING_FIRST,
    ROTATING_IN_PARTS,
    ROTATING_NEIGHBOURS,
    ROTATING_TABLE,
    SCALED_PARTS,
    SEGMENTS,
    SEGMENTS_IN_GROUPS,
    SHARED,
    STACKED,
    STAGED,
    STILL_READ,
    STILL_WRITTEN,
    STORED_TWICE,
    SUMS_BY_WGMMA,
    UNFINISHED,
    UNMET,
    UNWRITTEN,
    InPtx,
    Mutant,
    WrongNumbers,
)
from support.simulator.planting import (
    Call,
    Effect,
    Wrong,
    as_written,
    changed,
    instead,
    late,
    threads,
    without,
)


def _of_first_block() -> Effect:
    """Blocks have the results of the tile's first one."""
    found: list[Any] = []

    def effect(call: Call) -> Any:
        if call.first == 0:
            found[:] = call()
        return found[0], call.at

    return effect


def _one_later(call: Call) -> Any:
    """Begins groups but the first a row late."""
    first, end = call()
    first += cutlass.select_(call.group > 0, Int32(1), Int32(0))
    return first, cutlass.max(first, end)


def _whole_k_tile(call: Call) -> Any:
    """Ends a group where the k tile ends."""
    end = call.place.first_k + (call.k_tile + 1) * call.tensor.shape[1]
    return call(place=replace(call.place, end_k=end))


def _step_by_one(call: Call) -> Any:
    """Steps by one of K in the mode that moves boxes."""
    cut = call()
    stride, along, _ = cut.stride
    return cute.make_tensor(cut.iterator, cute.make_layout(cut.shape, stride=(stride, along, along)))


def _await_afterwards(call: Call) -> None:
    call()
    await_earlier_kernels()


def _fence_first(call: Call) -> Any:
    with as_written():
        warpgroup.fence()
    return call()


def _meet_first(call: Call) -> Any:
    with as_written():
        cute.arch.sync_warp()
    return call()


def _release_early(call: Call) -> None:
    call()
    call.self.reads_stages_late = False


def _release_after_first(call: Call) -> Any:
    """Releases a box after its first subtile instead of its last."""
    loads, _ = call()
    _, part, _ = call.self._box(call.work, call.visit)
    if part > 0:
        return loads, lambda: None
    stage = in_ring(call.at.exact, call.work.seat.ring)
    return loads, partial(release_planes, call.work.shared.exact_pipeline, stage)


def _whole_blocks(call: Call) -> Any:
    """Counts the scales of lines from the first block that they lie in, by blocks."""
    lines = call.lines
    first = lines.first // lines.lines * lines.lines
    return call(lines=replace(lines, first=first, width=lines.lines))


def _in_order(call: Call) -> Any:
    """The columns of a box as they lie in it, instead of in the order of subtiles."""
    rows, columns = call.box.shape
    return cute.composition(call.box, tuple(map(cute.make_layout, (cute.size(rows), cute.size(columns)))))


def _is_plane(call: Call) -> bool:
    """Whether one of several planes in shared memory is taken."""
    return isinstance(call.crd, tuple) and len(call.crd) == 3 and call.crd[:2] == (None, None)


def _wait_for_less(wait: int) -> tuple[Wrong, ...]:
    """One group of wgmmas more may be in flight after one of the waits of promoted sums."""
    return instead(
        "warpgroup.wait_group",
        lambda call: call(group=call.group + 1),
        inside="mainloop.Sm90Promoted.step",
        call=wait,
    )


def _stored_in(other: Callable[[Int32], Int32]) -> tuple[Wrong, ...]:
    """Outputs are written to other planes in shared memory than those of a warp, and stored from there."""
    return instead("warp_planes.WarpPlanes._output_plane", lambda call: other(call()))


def of_the_first_product(call: Call) -> Any:
    """The pairs of the first product's blocks of rows, for those of all products."""
    pairs, products = call(), call.self.products
    return pairs[: len(pairs) // products] * products


def zeros_of_the_next(call: Call) -> Any:
    """The scales of a group, and the zeros of the next one."""
    scales = len(call.chunk) // 2
    return call()[:scales] + call(group=call.group + 1)[scales:]


def exchanged(call: Call) -> Any:
    """The nibbles of a byte with their neighbours' numbers."""
    return call(pair=(call.pair >> 4 | call.pair << 4) & 0xFF)


def _round_sums(call: Call) -> None:
    """Rounds the sums of a thread to fp32."""
    call()
    for i in range(cute.size(call.acc)):
        call.acc[i] = Int32(Float32(call.acc[i]))


MUTANTS = [
    # Blocks that are reduced in passes.
    Mutant(
        "a pass without the last subtile of a block",
        PASSES,
        instead("epilogue.BlockSubtiles.__init__", lambda call: call(subtiles=call.subtiles - 1)),
        WrongNumbers,
    ),
    Mutant(
        "two of four lanes exchange what they found of a row",
        PASSES,
        instead("fragment_tile.FragmentTile.row_lanes", lambda call: (1,)),
        WrongNumbers,
    ),
    Mutant(
        "visits of a block read the results of the tile's first block",
        PASSES,
        instead("drain.Reduce.run", _of_first_block()),
        WrongNumbers,
    ),
    # Values that are kept.
    Mutant(
        "passes and visits begin with accumulators in place of the kept value",
        KEEPS,
        without("fragments.RegisterSeat.write"),
        WrongNumbers,
    ),
    Mutant(
        "planes of visits come in the stages of those ahead of passes",
        KEEPS,
        instead("gemm.Gemm.rounds", lambda call: call()[:1] * len(call())),
        RaceError,
        SHARED,
    ),
    # Columns in segments.
    Mutant(
        "a tile runs the epilogue of the segment before it",
        SEGMENTS,
        instead("segments.ColumnSegment.has", has_not, inside="sm90.Sm90Gemm._consume"),
        IllegalAccess,
        "only loads may begin before 0",
    ),
    Mutant(
        "a tile is counted from the plane's first column",
        SEGMENTS,
        instead("segments.ColumnSegment.within", lambda call: call.place, inside="sm90.Sm90Gemm._consume"),
        WrongNumbers,
    ),
    Mutant("every segment loads the first B", SEGMENTS, instead("batch.operands", first_b), WrongNumbers),
    Mutant(
        "a segment without planes expects those of another",
        SEGMENTS,
        instead("segments.make_exacts", lambda call: call()[:1] * len(call.epilogues)),
        Deadlock,
    ),
    Mutant(
        "a tile without planes keeps its stage of them",
        SEGMENTS,
        without("epilogue.release_planes", when=lambda call: call.loads.sync_object_full.tx_count == 0),
        Deadlock,
    ),
    # Rows in segments, of weights that are converted.
    Mutant(
        "each segment loads the weight of the other",
        SEGMENTS_IN_GROUPS,
        instead("gemm.Gemm.parts_of_a", lambda call: call()[::-1]),
        WrongNumbers,
    ),
    Mutant(
        "every segment has the first one's scales and zeros",
        SEGMENTS_IN_GROUPS,
        instead("tma_gemm.TmaGemm._epilogue_state", first_beside),
        WrongNumbers,
    ),
    Mutant(
        "rows are counted from the first segment's first",
        SEGMENTS_IN_GROUPS,
        instead(
            "segments.RowSegment.within",
            lambda call: replace(call.place, end=call.self.width),
            inside="sm90.Sm90Gemm._consume",
        ),
        WrongNumbers,
    ),
    Mutant(
        "a segment ends with the last one",
        SEGMENTS_IN_GROUPS,
        instead(
            "segments.RowSegment.within",
            lambda call: replace(call(), end=call.place.end),
            inside="sm90.Sm90Gemm._consume",
        ),
        IllegalAccess,
    ),
    # Split-K through memory.
    Mutant(
        "every part of K is the first",
        SUMS_BY_WGMMA,
        instead(
            "scheduler.BatchSchedule.place",
            lambda call: replace(place := call(), batch=0 * place.batch),
            before="ab.producer_acquire",
        ),
        WrongNumbers,
    ),
    Mutant(
        "a part has the rows of A that its sums have",
        SUMS_BY_WGMMA,
        instead(
            "batch.from_first",
            lambda call: call(place=replace(call.place, first=call.place.batch * call.place.end)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "sums are added up before the kernel of the parts has ended",
        SUMS_BY_WGMMA,
        without("overlap.await_earlier_kernels", inside="split_sums.SumGemm.__call__"),
        RaceError,
        "griddepcontrol",
    ),
    # Operands of int8.
    Mutant(
        "int8 multiplied by wgmma as uint8",
        INT8_BY_WGMMA,
        InPtx(r"(wgmma\S*\.s32)\.s8\.s8", r"\1.u8.u8"),
        WrongNumbers,
    ),
    Mutant(
        "sums of int8 rounded to fp32 on their way",
        INT8_IN_PARTS,
        instead("split_k.Sums.reduce", _round_sums),
        WrongNumbers,
    ),
    # Values that are converted on their way to the MMA.
    Mutant(
        "the first part of a k tile overwritten while it is multiplied",
        CONVERTING,
        without("warpgroup.wait_group", inside="converted.Sm90Converted.step", call=1),
        RaceError,
        r"touches registers of a wgmma\.mma_async that it has not waited for",
    ),
    Mutant(
        "the second part of a k tile overwritten while it is multiplied",
        CONVERTING,
        without("warpgroup.wait_group", inside="converted.Sm90Converted.step", call=2),
        RaceError,
    ),
    Mutant(
        "stage released while other lanes read stored values",
        CONVERTING,
        without("arch.sync_warp", inside="converted._release"),
        RaceError,
        r"overwrites shared (.|\n)* may still be reading",
    ),
    Mutant(
        "sums of every other MMA left out",
        CONVERTING,
        without("converted._add", inside="converted.Sm90Converted.end"),
        WrongNumbers,
    ),
    Mutant(
        "stored values of the next 16 of K",
        CONVERTING,
        instead("converted.StoredTile.load", lambda call: call(k_block=call.k_block ^ 1)),
        WrongNumbers,
    ),
    Mutant(
        "stored values taken without their signs",
        CONVERTING,
        instead("stored_values._signed", lambda call: call(pair=call.pair & 0x7F7F)),
        WrongNumbers,
    ),
    Mutant(
        "scales of the next column",
        CONVERTING,
        instead("fragment_tile.FragmentSubtile.row_of", lambda call: call() ^ 1),
        WrongNumbers,
    ),
    # Weights in groups of K.
    Mutant(
        "weights overwritten while they are multiplied",
        CONVERTING_GROUPS,
        without("warpgroup.wait_group", inside="converted.Sm90Converted.step"),
        RaceError,
        r"touches registers of a wgmma\.mma_async that it has not waited for",
    ),
    Mutant(
        "a zero of another group",
        CONVERTING_GROUPS,
        instead("weight_groups.GroupVectors.of_group", zeros_of_the_next),
        WrongNumbers,
    ),
    Mutant(
        "groups' scales of the next column",
        CONVERTING_GROUPS,
        instead("weight_groups.KGroup.weights", lambda call: call(row=call.row ^ 1)),
        WrongNumbers,
    ),
    Mutant(
        "the scales and zeros of a chunk after it has ended",
        CONVERTING_GROUPS,
        without("weight_groups.HeldGroups.advance", inside="converted.Sm90Converted.step"),
        WrongNumbers,
    ),
    Mutant(
        "scales and zeros of columns and groups beyond the last",
        CONVERTING_GROUPS,
        instead("weight_groups._loaded", lambda call: call(wanted=cutlass.Boolean(True))),
        IllegalAccess,
    ),
    Mutant(
        "groups of the first part of K",
        GROUPS_IN_PARTS,
        instead("converted.StoredTile.at", lambda call: call(k_tile=Int32(0))),
        WrongNumbers,
    ),
    Mutant(
        "unsigned values taken for signed ones",
        CONVERTING_GROUPS,
        instead("stored_values.Integers.converted", lambda call: _signed(call.pair, call.to)),
        WrongNumbers,
    ),
    Mutant(
        "integer zeros added",
        CONVERTING_INTEGERS,
        instead("stored_values.Integers.numbers", lambda call: call(start=MAGIC - (call.start - MAGIC))),
        WrongNumbers,
    ),
    Mutant(
        "stored values exchanged with their neighbours",
        CONVERTING_INTEGERS,
        instead("stored_values.Integers.numbers", lambda call: call()[::-1]),
        WrongNumbers,
    ),
    Mutant(
        "the scales and zeros of the k tile before",
        CONVERTING_INTEGERS,
        without("weight_groups.HeldGroups._begin", inside="weight_groups.HeldGroups.advance"),
        WrongNumbers,
    ),
    # Two values in a byte.
    Mutant(
        "nibbles exchanged",
        NIBBLES,
        instead("stored_values.Nibbles._apart", exchanged),
        WrongNumbers,
    ),
    Mutant(
        "a zero of another group of nibbles",
        NIBBLES,
        instead("weight_groups.GroupVectors.of_group", zeros_of_the_next),
        WrongNumbers,
    ),
    Mutant(
        "nibbles' scales of the next column",
        NIBBLES,
        instead("weight_groups.KGroup.weights", lambda call: call(row=call.row ^ 1)),
        WrongNumbers,
    ),
    Mutant(
        "nibbles of the next 16 of K",
        NIBBLES,
        instead("converted.StoredTile.load", lambda call: call(k_block=call.k_block ^ 1)),
        WrongNumbers,
    ),
    Mutant(
        "zeros without signs subtracted from nibbles that are not inverted",
        NIBBLES_LESS_UNSIGNED,
        instead("stored_values._Large.before", lambda call: call(is_inverted=False)),
        WrongNumbers,
    ),
    Mutant(
        "a k tile of nibbles has the groups of its first half",
        NIBBLES_LESS_UNSIGNED,
        without("weight_groups.HeldGroups.advance", inside="converted.Sm90Converted._further_parts"),
        WrongNumbers,
    ),
    # Split-K over a cluster.
    Mutant(
        "sums not waited for",
        PARTS,
        without("arch.mbarrier_wait", inside="split_k.Sums.wait"),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "one part not waited for",
        PARTS,
        instead("split_k.Sums.init", one_part_less),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "a warp arrives before all its lanes have written their sums",
        PARTS,
        without("arch.sync_warp", inside="split_k.Sums.hand_over"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "CTA leaves while its sums are read",
        PARTS,
        without("arch.mbarrier_wait", inside="split_k.Sums.hand_over"),
        IllegalAccess,
        "all of whose warps have exited",
    ),
    Mutant(
        "one part is read and let go for all",
        PARTS,
        instead("arch.map_dsmem_ptr", lambda call: call(cta_rank_in_cluster=1), inside="split_k.Sums.reduce"),
        IllegalAccess,
        "all of whose warps have exited",
    ),
    Mutant(
        "every part from the first k tile on",
        PARTS,
        instead("work_items.WorkItems.__init__", lambda call: call(first_k=0 * call.first_k)),
        WrongNumbers,
    ),
    Mutant(
        "every part has an epilogue",
        PARTS,
        instead("work_items.WorkItems.__init__", lambda call: call(epilogue=call.first)),
        Deadlock,
        "waits",
    ),
    # Groups of rows.
    Mutant("a group from its second row on", GROUPS, instead("scheduler.bounds", _one_later), WrongNumbers),
    Mutant(
        "the B of the next group",
        GROUPS,
        instead(
            "scheduler.GroupSchedule.place",
            lambda call: replace(place := call(), batch=cutlass.min(place.batch + 1, 22)),  # the last
        ),
        WrongNumbers,
    ),
    Mutant(
        "the first 64 rows of a group multiplied alone",
        PING_PONG_GROUPS,
        instead(
            "sm90.Sm90Gemm._multiply",
            lambda call: call(seat=call.seat.first_block()),
            call=1,
        ),
        WrongNumbers,
    ),
    Mutant(
        "rows of a group that has none not cleared",
        GROUPS,
        without("cute.autovec_copy", before="pipeline.pipeline_init_arrive"),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    # Groups of K.
    Mutant(
        "a k tile that ends in the next group",
        K_GROUPS,
        instead("batch.of_k_tile", lambda call: call(place=replace(call.place, end_k=call.place.end_k + 1))),
        WrongNumbers,
    ),
    Mutant(
        "a k tile not cut where its group ends",
        K_GROUPS,
        instead("batch.of_k_tile", _whole_k_tile),
        WrongNumbers,
    ),
    Mutant(
        "an index that steps by one of K, along which fp8 is contiguous",
        K_GROUPS_FP8,
        instead("batch.cut_along_k", _step_by_one),
        WrongNumbers,
    ),
    Mutant("a tail of K not cleared in B", K_TAILS, without("tails.Tails._clear", call=2), WrongNumbers),
    Mutant("a tail of K not cleared in A", K_TAILS, without("tails.Tails._clear", call=1), WrongNumbers),
    Mutant(
        "a tail of K cleared from one byte on too early",
        K_TAILS,
        instead("tails.Tails.clear", lambda call: call(place=replace(call.place, tail=call.place.tail - 1))),
        WrongNumbers,
    ),
    Mutant(
        "a tail of K cleared where it would lie without a swizzle",
        K_TAILS,
        instead(
            "Tensor.__getitem__",
            lambda call: call(crd=(None, call.crd[1] | 7)),  # the last 16 bytes of a line
            inside="tails.Tails._clear",
            when=lambda call: isinstance(call.crd, tuple),
        ),
        WrongNumbers,
    ),
    Mutant(
        "a tail of K not handed to the tensor cores",
        K_TAILS,
        without("arch.fence_proxy", inside="tails.Tails.clear"),
        MissingProxyFence,
        r"through the async proxy; .* wrote it through the generic proxy",
    ),
    Mutant(
        "a tail of K not waited for",
        K_TAILS,
        without("arch.mbarrier_wait", inside="tails.Tails.clear"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "a tail of K handed over before all lanes have cleared it",
        K_TAILS,
        without("arch.sync_warp", inside="tails.Tails.clear"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "every tail of K waited for in the first phase of its barrier",
        replace(K_TAILS, problem=(136, 776, 240)),
        instead("tails.Tails.clear", lambda call: (call(), call.phases)[1]),
        RaceError,
        SHARED,
    ),
    Mutant(
        "the k tiles of its own group skipped for those of the other warpgroup's",
        K_GROUPS,
        instead(
            "work_items.WorkItems.k_tiles_at", lambda call: call(item=call.item + call.self.step), call=2
        ),
        Deadlock,
    ),
    # The stream.
    Mutant(
        "earlier kernels not waited for on Hopper",
        COOPERATIVE,
        without("overlap.await_earlier_kernels"),
        RaceError,
        r"before griddepcontrol\.wait",
    ),
    Mutant(
        "earlier kernels waited for after partials are read",
        REDUCING,
        (
            *without("overlap.await_earlier_kernels", inside="finish.Finish.__call__"),
            *instead(
                "device_reduce.Partials.across", _await_afterwards, inside="finish.Finish._combine", call=1
            ),
        ),
        RaceError,
        r"before griddepcontrol\.wait",
    ),
    # Global memory.
    Mutant(
        "a tile of two clusters",
        replace(FEW_ROWS, clusters=2),
        instead(
            "work_items.WorkItems.__init__",
            lambda call: call(first=0 * call.first, epilogue=0 * call.epilogue),
        ),
        RaceError,
        STORED_TWICE,
    ),
    Mutant(
        "partials read before the kernel that leaves them has ended",
        REDUCING,
        without("overlap.await_earlier_kernels", inside="finish.Finish.__call__"),
        RaceError,
        r"before griddepcontrol\.wait",
    ),
    # The second stage of reductions.
    Mutant(
        "partials of other warps not waited for",
        REDUCING,
        without("arch.sync_threads", inside="finish.Finish._combine"),
        RaceError,
        UNWRITTEN.format(SHARED) + "|" + UNFINISHED.format(SHARED),
    ),
    Mutant(
        "partials of other lanes not taken",
        REDUCING,
        without("device_reduce.Partials.across", inside="finish.Finish._combine", call=1),
        WrongNumbers,
    ),
    # Rows that their last tile finishes.
    Mutant(
        "a lane counts the tile before others have written their partials",
        REDUCING_ROWS,
        without("arch.sync_warp", inside="last_tile.has_last_tile", call=1),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "lanes read partials that only the lane that counts has acquired",
        REDUCING_ROWS,
        without("arch.sync_warp", inside="last_tile.has_last_tile", call=2),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "a tile is counted without a release and an acquire",
        REDUCING_ROWS,
        instead(
            "nvvm.atomicrmw",
            lambda call: call(mem_order=nvvm.MemOrderKind.RELAXED),
            inside="last_tile.has_last_tile",
        ),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "a tile is counted without an acquire",
        REDUCING_ROWS,
        instead(
            "nvvm.atomicrmw",
            lambda call: call(mem_order=nvvm.MemOrderKind.RELEASE),
            inside="last_tile.has_last_tile",
        ),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "a tile is counted without a release",
        REDUCING_ROWS,
        instead(
            "nvvm.atomicrmw",
            lambda call: call(mem_order=nvvm.MemOrderKind.ACQUIRE),
            inside="last_tile.has_last_tile",
        ),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "a tile is counted for its CTA alone",
        REDUCING_ROWS,
        instead(
            "nvvm.atomicrmw",
            lambda call: call(syncscope=nvvm.MemScopeKind.CTA),
            inside="last_tile.has_last_tile",
        ),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "the last tile but one finishes the rows",
        REDUCING_ROWS,
        instead(
            "arch.shuffle_sync",
            lambda call: call() + 1,
            inside="last_tile.has_last_tile",
            outside=("last_tile._first_row",),
        ),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "counters are not set to 0 again",
        REDUCING_ROWS,
        instead("last_tile._increment", lambda call: call(most=call.most + 1)),
        SimulationError,
        "counters of tiles are not 0",
    ),
    Mutant(
        "a tile beyond the last column is counted",
        REDUCING_ROWS,
        instead("last_tile.has_last_tile", lambda call: call(tile=changed(call.tile, n0=Int32(0)))),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "two warps count in one place",
        REDUCING_ROWS,
        instead("last_tile.has_last_tile", lambda call: call(tile=changed(call.tile, warp_rows=32))),
        RaceError,
        "no barrier, and no release and acquire",
    ),
    Mutant(
        "partials of the lane that shares a row are not taken",
        REDUCING_ROWS,
        instead("last_tile.finish_rows", lambda call: call(tile=changed(call.tile, lanes=(1, 2, 4, 8)))),
        WrongNumbers,
    ),
    # Hopper.
    Mutant(
        "more registers asked for than there are",
        COOPERATIVE,
        instead("arch.setmaxregister_increase", lambda call: call(reg_count=240)),
        Deadlock,
        r"wgmma warp (.|\n)*240 registers per thread, .* more for the warp; the pool of CTA",
    ),
    Mutant(
        "accumulator registers fenced for the first tile only",
        COOPERATIVE,
        (*without("warpgroup.fence"), *instead("mainloop.WarpgroupOperands.__init__", _fence_first)),
        RaceError,
        r"registers that it has touched since its last wgmma\.fence",
    ),
    Mutant(
        "one named barrier for both turns",
        PING_PONG,
        instead(
            "warpgroups.Turn.of", lambda call: Turn(named_barrier(call.first), named_barrier(call.first))
        ),
        RaceError,
        SHARED,
    ),
    Mutant(
        "rows of the other warpgroup's tile",
        PING_PONG,
        without("PipelineState.advance", inside="sm90.Sm90Gemm._consume", call=2),
        Deadlock,
        r"staging warp(.|\n)*0 of 128 arrivals",
    ),
    Mutant(
        "staged rows not waited for",
        STAGED,
        without("row.consumer_wait"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "multicast to a CTA that is not there",
        HOPPER_MULTICAST,
        instead("cute.make_layout_image_mask", lambda call: cutlass.Int16(7)),
        IllegalAccess,
        "multicast mask 0x7 in a cluster of 2 CTAs",
    ),
    Mutant(
        "accumulator registers not fenced",
        COOPERATIVE,
        without("warpgroup.fence"),
        RaceError,
        r"no wgmma\.fence before it",
    ),
    Mutant(
        "last products not waited for",
        COOPERATIVE,
        without("warpgroup.wait_group", inside="mainloop.Sm90Plain.end"),
        RaceError,
        r"touches registers of a wgmma\.mma_async that it has not waited for",
    ),
    Mutant(
        "operand stage released under its products",
        COOPERATIVE,
        instead(
            "warpgroup.wait_group", lambda call: call(group=call.group + 1), inside="mainloop.Sm90Plain.step"
        ),
        RaceError,
        r"cp\.async\.bulk\.tensor.*wgmma of .* may still be reading",
    ),
    Mutant(
        "wgmma's operands not waited for",
        COOPERATIVE,
        without("ab.consumer_wait"),
        RaceError,
        r"wgmma\.mma_async.*" + UNFINISHED.format(SHARED),
    ),
    Mutant(
        "sums in registers begin with what was there",
        COOPERATIVE,
        instead(
            "mainloop.WarpgroupOperands.multiply",
            lambda call: call(anew=False),
            inside="mainloop.Sm90Plain.begin",
        ),
        WrongNumbers,
    ),
    Mutant(
        "every product overwrites the sums",
        COOPERATIVE,
        instead(
            "mainloop.WarpgroupOperands.multiply",
            lambda call: call(anew=True),
            inside="mainloop.Sm90Plain.step",
        ),
        WrongNumbers,
    ),
    Mutant(
        "promoted sums begin with those of the last k tile",
        PROMOTED,
        instead(
            "mainloop.WarpgroupOperands.multiply",
            lambda call: call(anew=False),
            inside="mainloop.Sm90Promoted.step",
        ),
        WrongNumbers,
    ),
    Mutant(
        "sums promoted before they are there",
        PROMOTED,
        (*_wait_for_less(1), *_wait_for_less(2)),  # those of a step of two k tiles
        RaceError,
        r"touches registers of a wgmma\.mma_async that it has not waited for",
    ),
    Mutant(
        "sums of the last of an odd number of k tiles not waited for",
        PROMOTED,
        _wait_for_less(3),
        RaceError,
        r"touches registers of a wgmma\.mma_async that it has not waited for",
    ),
    # Scales of blocks.
    Mutant(
        "scales that the stage's barrier does not count",
        BLOCK_SCALED,
        instead("ab.create", lambda call: call(producer_group=threads(1))),
        BarrierError,
        r"1 arrival\(s\) more than it expects",
    ),
    Mutant(
        "a stage released before its scales of columns are read",
        COLUMN_SCALED,
        instead("block_scaled.Sm90BlockScaled.__init__", _release_early),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "a stage released before all lanes have read its scales",
        BLOCK_SCALED,
        without("arch.sync_warp", inside="mainloop.WarpgroupOperands.release"),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "the scales of another stage",
        BLOCK_SCALED,
        instead(
            "block_scaled.Sm90BlockScaled.scales",
            lambda call: call(state=changed(call.state, _index=Int32(0))),
        ),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "scales of the rows below",
        COLUMN_SCALED,
        instead(
            "block_scaled.KTileScales.__init__",
            lambda call: call(rows=[call.rows[r ^ 1] for r in range(len(call.rows))]),
        ),
        WrongNumbers,
    ),
    Mutant(
        "scales of the neighbouring column",
        COLUMN_SCALED,
        instead("block_scaled.KTileScales.pair", lambda call: call()[::-1]),
        WrongNumbers,
    ),
    Mutant(
        "the columns of the first piece for both",
        PIECES,
        instead(
            "mainloop.WarpgroupOperands.multiply",
            lambda call: call(self=replace(call.self, b=call.self.b[:1] * 2)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "scales of the first piece for both",
        PIECES,
        instead("block_scaled.KTileScales.pair", lambda call: call(group=call.group % 16)),  # 8 columns each
        WrongNumbers,
    ),
    Mutant(
        "scales copied to a stage before it is empty",
        BLOCK_SCALED,
        without("ab.empty.wait", outside=("ab.producer_acquire", "ab.producer_tail")),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED) + "|" + STILL_WRITTEN.format(SHARED),
    ),
    Mutant(
        "scales announced before they are there",
        BLOCK_SCALED,
        instead("ab.full.arrive_cp_async_mbarrier", lambda call: call.self.arrive_mbarrier(call.index)),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "scales of the next block of K",
        BLOCK_SCALED,
        instead("block_scales.ScaleStages.bring_tile", lambda call: call(k=(call.k + 1) % 10)),  # of ten
        WrongNumbers,
    ),
    Mutant(
        "scales of the first part of K in all",
        SCALED_PARTS,
        instead("block_scales.ScaleStages.bring_tile", lambda call: call(k=call.k % 2)),  # a part has two
        WrongNumbers,
    ),
    Mutant(
        "parts of K beyond the last block",
        SCALED_PARTS,
        instead("work_items.WorkItems.__init__", lambda call: call(k_tiles=Int32(2))),  # as other parts have
        IllegalAccess,
    ),
    Mutant(
        "scales of the first columns for all",
        BLOCK_SCALED,
        instead(
            "block_scales.ScaleStages.bring_tile",
            lambda call: call(origin=(call.origin[0], 0 * call.origin[1])),
        ),
        WrongNumbers,
    ),
    Mutant(
        "scales of columns that begin within a block counted as blocks",
        HALF_BLOCKS,
        instead(
            "block_scales.bring",
            _whole_blocks,
        ),
        WrongNumbers,
    ),
    Mutant(
        "halves that are not exchanged",
        ROTATING,
        instead("tile.Subtile.rotate_half", signs_alone),
        WrongNumbers,
    ),
    Mutant(
        "rows of a table that don't repeat",
        REPEATING,
        instead("rings.partition_box", lambda call: call(repeats=False), when=lambda call: call.repeats),
        WrongNumbers,
    ),
    Mutant(
        "neighbours that are not exchanged",
        ROTATING_NEIGHBOURS,
        instead("tile.Subtile.rotate_pairs", signs_alone),
        WrongNumbers,
    ),
    Mutant(
        "every part of a head is rotated",
        ROTATING_IN_PARTS,
        instead(
            "tile.Subtile.rotate_first",
            lambda call: call(self=changed(call.self, _offset=0 - call.self.tile.n0)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "a column is exchanged with one of the same lane",
        ROTATING_FIRST,
        instead(
            "arch.shuffle_sync", lambda call: call.value, inside="fragment_tile.FragmentSubtile._neighbour"
        ),
        WrongNumbers,
    ),
    Mutant(
        "lanes beyond the fourth are not in the next eight columns",
        ROTATING_FIRST,
        instead(
            "cutlass.select_", lambda call: call.else_value, inside="fragment_tile.FragmentSubtile._neighbour"
        ),
        WrongNumbers,
    ),
    Mutant(
        "columns behind the first ones are rotated",
        ROTATING_FIRST,
        instead(
            "tile.Subtile._place",
            lambda call: cutlass.min(Int32(call()), 19),  # the last that is rotated
            inside="tile.Subtile.rotate_first",
        ),
        WrongNumbers,
    ),
    Mutant(
        "halves of B that are not in pairs",
        ROTATING,
        instead("epilogue.pair_halves", lambda call: call.tensor, when=lambda call: call.width == 16),
        WrongNumbers,
    ),
    Mutant(
        "boxes of two subtiles handed back before the second is read",
        ROTATING_TABLE,
        instead("warp_planes.WarpPlanes._loaded", _release_after_first),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "boxes of two subtiles stored before the second is written",
        ROTATING,
        late(
            "fragment_tile.FragmentSubtile.copy_to",
            "store.producer_commit",
            when=lambda call: call.self._step % 2 == 1,
        ),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "columns of a box in the order of the box",
        ROTATING,
        instead("epilogue.in_subtiles", _in_order),
        WrongNumbers,
    ),
    Mutant(
        "turns not taken",
        PING_PONG,
        (*without("warpgroups.Turn.wait"), *without("warpgroups.Turn.pass_on")),
        RaceError,
        r"wgmma\.mma_async.*" + UNFINISHED.format(SHARED),
    ),
    Mutant(
        "the other warpgroup's operands not skipped",
        PING_PONG,
        instead("work_items.WorkItems.k_tiles_at", lambda call: Int32(0), call=2),
        Deadlock,
        "wgmma warp(.|\\n)*128 of 256 threads have arrived",
    ),
    # Rows beyond the last, which are multiplied but not loaded.
    Mutant(
        "rows that are not loaded not cleared",
        FEW_ROWS,
        without("cute.autovec_copy", before="pipeline.pipeline_init_arrive"),
        RaceError,
        r"wgmma.*" + UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "cleared rows not published to TMA",
        FEW_ROWS,
        without("arch.fence_proxy", before="pipeline.pipeline_init_arrive"),
        MissingProxyFence,
        r"overwrites shared.* through the async proxy; .* wrote it through the generic proxy",
    ),
    Mutant(
        "more expected than is loaded of few rows",
        FEW_ROWS,
        instead("arch.mbarrier_expect_tx", lambda call: call(bytes=call.bytes + 2048)),  # those of a box
        Deadlock,
        "1 of 1 arrivals, 2048 bytes",
    ),
    Mutant(
        "a box of rows too few",
        FEW_ROWS,
        (
            *instead(
                "few_rows.FurtherBoxes.bring",
                lambda call: call(self=replace(call.self, count=call.self.count - 1)),
            ),
            *instead("arch.mbarrier_expect_tx", lambda call: call(bytes=call.bytes + 2048)),  # those of a box
        ),
        Deadlock,
        "1 of 1 arrivals, 2048 bytes",
    ),
    Mutant(
        "wgmma's output not published to TMA",
        PING_PONG,
        without("arch.fence_proxy", after="fragment_tile.FragmentSubtile.copy_to"),
        MissingProxyFence,
        r"cp\.async\.bulk\.tensor.* wrote it through the generic proxy",
    ),
    Mutant(
        "output stored before all lanes of a warp have written",
        PING_PONG,
        without(
            "arch.sync_warp",
            after="fragment_tile.FragmentSubtile.copy_to",
            outside=("epilogue.release_planes",),
        ),
        RaceError,
        UNMET,
    ),
    Mutant(
        "output stored by lanes that met before they wrote",
        COOPERATIVE,
        (
            *without(
                "arch.sync_warp",
                after="fragment_tile.FragmentSubtile.copy_to",
                outside=("epilogue.release_planes",),
            ),
            *instead("fragment_tile.FragmentSubtile.copy_to", _meet_first),
        ),
        RaceError,
        UNMET,
    ),
    Mutant(
        "output plane of a warp not waited for",
        PING_PONG,
        without("store.producer_acquire"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "a store more in flight than there are planes",
        PING_PONG,
        instead("store.create", lambda call: call(num_stages=call.num_stages + 1)),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "shared memory given up under a warp's store",
        COOPERATIVE,
        without("store.producer_tail"),
        IllegalAccess,
        "while this store still reads its shared memory",
    ),
    Mutant(
        "one output plane for all warps of a warpgroup",
        COOPERATIVE,
        _stored_in(lambda plane: plane // WARPS * WARPS),
        RaceError,
        r"overwrites shared.*, written by warp \d",
    ),
    Mutant(
        "one output plane for both warpgroups",
        COOPERATIVE,
        _stored_in(lambda plane: plane // (2 * WARPS) * (2 * WARPS) + plane % WARPS),
        RaceError,
        "overwrites shared",
    ),
    Mutant(
        "rows of a warpgroup's first warp stored by all",
        PING_PONG,
        instead(
            "tma_gemm.TmaGemm._store",
            lambda call: call(coord=(call.coord[0] // WARPS * WARPS, call.coord[1])),
        ),
        RaceError,
        STORED_TWICE,
    ),
    Mutant(
        "planes handed back before they are read",
        PING_PONG,
        RELEASED_UNREAD,
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "planes handed back before all lanes have read them",
        PING_PONG,
        without("arch.sync_warp", inside="epilogue.release_planes"),
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "planes not handed back",
        PING_PONG,
        without("epilogue.release_planes"),
        Deadlock,
        "tma warp(.|\\n)*0 of 4 arrivals",
    ),
    Mutant(
        "planes not waited for",
        PING_PONG,
        without("exact.consumer_wait"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "barriers of the other warpgroup's planes",
        PING_PONG,
        instead(
            "exact.consumer_wait",
            lambda call: call(
                state=changed(call.state, _index=call.state.index % (call.self.num_stages // 2))
            ),
        ),
        Deadlock,
        r"wgmma warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "planes of the other warpgroup's tile",
        PING_PONG,
        instead(
            "Tensor.__getitem__",
            lambda call: call(crd=(None, None, call.crd[2] % (cute.size(call.self, mode=[2]) // 2))),
            after="exact.consumer_wait",
            when=_is_plane,
        ),
        RaceError,
        SHARED,
    ),
    Mutant(
        "planes of the other half of a tile",
        COOPERATIVE,
        instead(
            "Tensor.__getitem__",
            lambda call: call(crd=(None, None, call.crd[2] // 2 * 2)),
            after="exact.consumer_wait",
            when=_is_plane,
        ),
        WrongNumbers,
        "rows 64 to",
    ),
    Mutant(
        "matrices stored transposed",
        PING_PONG,
        InPtx(r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.shared", r"\1.trans.shared"),
        WrongNumbers,
    ),
    Mutant(
        "a short group of tile rows walked as a full one",
        PING_PONG,
        instead(
            "scheduler.TileSchedule.cluster_coord",
            lambda call: call(self=replace(call.self, grid_m=call.self.grid_m + call.self.raster_m)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "output plane of a warp not advanced",
        PING_PONG,
        _stored_in(lambda plane: plane % (2 * WARPS)),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "rows of a fragment confused",
        PING_PONG,
        instead("fragment_tile.FragmentSubtile.row_of", lambda call: call(e=2 * (call.e % 2))),
        WrongNumbers,
    ),
    Mutant(
        "readers in one CTA of two counted",
        HOPPER_MULTICAST,
        instead("ab.create", lambda call: call(consumer_group=threads(call.consumer_group.size // 2))),
        RaceError,
        r"cp\.async\.bulk\.tensor.*overwrites shared",
    ),
    # Pairs that are transposed.
    Mutant(
        "rows of both weights loaded to the place of one",
        STACKED,
        instead("sm90.Sm90Gemm._rows_of", lambda call: call(product=0)),
        RaceError,
        STILL_WRITTEN.format(SHARED),
    ),
    Mutant(
        "rows of one weight of two waited for",
        STACKED,
        instead("ab.create", lambda call: call(tx_count=call.tx_count - 128 * TILE_K_BYTES)),
        Deadlock,
        "bytes",
    ),
    Mutant(
        "a weight multiplied twice",
        STACKED,
        instead("fragment_tile.FragmentSubtile.accumulators", lambda call: call(index=0)),
        WrongNumbers,
    ),
    Mutant(
        "blocks of rows of two products taken by turns",
        STACKED,
        instead(
            "fragment_tile.FragmentSubtile.accumulators",
            lambda call: call(self=changed(call.self, _block=call.index), index=call.self._block),
        ),
        WrongNumbers,
    ),
    # Pairs of weights that are converted.
    Mutant(
        "both products of the first one's stored values",
        CONVERTING_PAIR,
        instead("converted.StoredTile.load", of_the_first_product),
        WrongNumbers,
    ),
    Mutant(
        "the second weight converted with the first one's scales and zeros",
        PAIR_IN_GROUPS,
        instead("weight_groups.GroupVectors._of_row", lambda call: call(r=call.r % 2)),
        WrongNumbers,
    ),
    Mutant(
        "the second weight's scales of the rows beyond the first one's",
        PAIR_IN_GROUPS,
        instead("weight_groups.GroupVectors._of_row", lambda call: call(self=changed(call.self, products=1))),
        WrongNumbers,
    ),
    Mutant(
        "B multicast to one CTA of two",
        HOPPER_MULTICAST,
        instead("cute.make_layout_image_mask", lambda call: cutlass.Int16(1)),
        Deadlock,
        "wgmma warp(.|\n)* bytes",
    ),
]
