"""Faults planted in kernels of the template on mma.sync."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32
from cutlass._mlir.dialects.cute_nvgpu import MmaAtomSM80Type
from cutlass.cute.atom import Trait, make_atom
from cutlass.cute.core import _pack_shape

from cute_backend.simulator.simulation_errors import IllegalAccess, RaceError
from cute_backend.templates.stored_values import _signed
from cute_backend.templates.warp_instructions import MmaI8Op
from cute_backend.templates.warp_mainloop import MMA_K_BYTES
from support.simulator.mutants import (
    ADA,
    CONVERTING_BESIDE_TMA,
    CONVERTING_BY_WARPS,
    FED_BY_TMA,
    FEW_K_TILES,
    GROUPS_BESIDE_TMA,
    GROUPS_BY_WARPS,
    GROUPS_BY_WARPS_IN_PARTS,
    HALF_BOXES,
    INT8_BY_WARPS,
    MANY_SUBTILES,
    NIBBLES_BESIDE_TMA,
    NIBBLES_BY_WARPS,
    PAIR_BESIDE_TMA,
    PAIR_BY_WARPS,
    ROWS_BESIDE_TMA,
    SHARED,
    STILL_READ,
    STILL_WRITTEN,
    SUMS_BY_TMA,
    SUMS_IN_MEMORY,
    TWO_CTAS,
    TWO_CTAS_IN_PARTS,
    UNFINISHED,
    UNWRITTEN,
    WARPS,
    WHOLE_K_TILES,
    Mutant,
    WrongNumbers,
)
from support.simulator.mutants_sm90 import exchanged, zeros_of_the_next
from support.simulator.planting import Call, Wrong, as_written, changed, early, instead, threads, without


def _copy_a_first(call: Call) -> Any:
    """Begins to copy A before the warps meet over the k tile."""
    call.self._bring_a(call.shared, call.at.ahead)
    return call()


def _begin_one_more(call: Call) -> Any:
    """Begins to copy a k tile more than there are stages free."""
    at, rows_at = call()
    of_all = call.shared, at.ahead
    call.self._bring_a(*of_all)
    call.self._bring_b(*of_all)
    return replace(at, ahead=call.self._after_it(*of_all)), rows_at


def _release_at_once(call: Call) -> Any:
    """Releases planes before they are read."""
    loads, release = call()
    release()
    return loads, lambda: None


def _count_slices(call: Call) -> Any:
    """Adds the place of a slice of K to an address, whose swizzle takes an exclusive or."""
    base, step = call.stage * call.self.stage.bytes, call.k_block * MMA_K_BYTES
    return call(self=replace(call.self, first=((call.self.first + base + step) ^ step) - base))


def _load_over(call: Call) -> Any:
    """Loads the scales and zeros of a later k tile to the registers of those that are taken next."""
    with as_written():
        call.self.advance(call.count + 1)
    return call()


def _take_columns_in_order(call: Call) -> Any:
    """Leaves out that lanes 1 and 2 of four have the odd vectors of a half."""
    lane = cute.arch.lane_idx() % 4
    return call(self=changed(call.self, first_b=call.self.first_b ^ ((lane ^ lane >> 1) & 1) << 5))


def _take_halves_in_order(call: Call) -> Any:
    """Leaves out that lanes 1 and 3 of four multiply the second half of a vector first."""
    lane = cute.arch.lane_idx() % 4
    return call(self=changed(call.self, first_b=call.self.first_b ^ (lane & 1) << 5))


def _of_the_first_vector(call: Call) -> Any:
    """The group of the even vector of a lane's two."""
    return call(index=call.index & ~1)


def _add_one_less(call: Call) -> Any:
    """Adds up all parts but the last."""
    return call(self=changed(call.self, parts=call.self.parts - 1))


def _whole_turns(call: Call) -> int:
    """Counts only turns in which all threads have a vector."""
    return int(call.self.lines // call.self._step(call.threads))


def _clear_first(call: Call) -> None:
    """Forgets the sums of earlier k tiles."""
    call.acc.fill(0.0)
    call()


class _Unsigned(MmaI8Op):
    """The instruction that the DSL's type of int8, which has no sign, stands for."""

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **kwargs: Any) -> Trait:
        shape = _pack_shape(self.shape_mnk, loc=loc, ip=ip)
        kind = MmaAtomSM80Type.get(shape.type.attribute, Int8.mlir_type, Int8.mlir_type, Int32.mlir_type)
        return Trait(make_atom(kind, loc=loc, ip=ip))


MUTANTS = [
    # Warps that copy by cp.async: the ring of operands, rowvecs, and the planes of a warp.
    Mutant(
        "copies of a k tile not waited for",
        WARPS,
        without("arch.cp_async_wait_group", inside="warp_copies.WarpCopies.wait"),
        RaceError,
        UNFINISHED.format(SHARED) + r"(.|\n)*ldmatrix",
    ),
    Mutant(
        "a k tile more under way than there are stages for",
        WARPS,
        instead(
            "arch.cp_async_wait_group", lambda call: call(n=call.n + 1), inside="warp_copies.WarpCopies.wait"
        ),
        RaceError,
        UNFINISHED.format(SHARED) + r"(.|\n)*ldmatrix",
    ),
    Mutant(
        "warps do not meet over a k tile",
        WARPS,
        without("arch.sync_threads", inside="warp_copies.WarpCopies.wait"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "a stage copied to while others multiply it",
        WARPS,
        (
            *without("warp_copies.WarpCopies._bring_a", inside="warp_copies.WarpCopies.multiply"),
            *instead("warp_copies.WarpCopies.wait", _copy_a_first),
        ),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "a stage too many begun with",
        WARPS,
        instead("warp_copies.WarpCopies.begin", _begin_one_more),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "stage of the ring not advanced",
        WARPS,
        instead("warp_copies.WarpCopies.multiply", lambda call: replace(call(), stage=call.at.stage)),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "sums exchanged through a stage that others still multiply",
        WARPS,
        without("arch.sync_threads", outside=("warp_copies.WarpCopies.wait",)),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "sums of the warp beside not waited for",
        WARPS,
        without("NamedBarrier.arrive_and_wait", inside="warp_columns.exchange_sums", call=1),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "sums of the next block given before those of this one are taken",
        MANY_SUBTILES,
        without("NamedBarrier.arrive_and_wait", inside="warp_columns.exchange_sums", call=2),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "sums of the warp's own rows given away",
        WARPS,
        instead(
            "cutlass.select_",
            lambda call: call(if_value=call.else_value, else_value=call.if_value),
            inside="warp_columns.exchange_sums",
            before="NamedBarrier.arrive_and_wait",
        ),
        WrongNumbers,
    ),
    Mutant(
        "planes of a short product not waited for",
        FEW_K_TILES,
        without("arch.cp_async_wait_group", inside="warp_copies.WarpCopies.await_first_planes"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "planes of a later subtile not waited for",
        MANY_SUBTILES,
        instead(
            "arch.cp_async_wait_group",
            lambda call: call(n=call.n + 1),
            outside=tuple(f"warp_copies.WarpCopies.{hook}" for hook in ("wait", "await_first_planes", "end")),
        ),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "planes replaced before they are read",
        MANY_SUBTILES,
        instead("sm80.Sm80Gemm._loaded", _release_at_once),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "rows of a fragment of mma.sync confused",
        FEW_K_TILES,
        instead("fragment_tile.FragmentSubtile.row_of", lambda call: call(e=2 * (call.e % 2))),
        WrongNumbers,
    ),
    Mutant(
        "sums begin with those of the tile before",
        WARPS,
        without("warp_mainloop.Sm80Plain.begin"),
        WrongNumbers,
    ),
    Mutant(
        "the last k tile copied as if it were the one before",
        TWO_CTAS_IN_PARTS,
        instead("staged.Stage.is_filled", lambda call: call(column=call.column - call.self.columns)),
        WrongNumbers,
    ),
    Mutant(
        "the last rows copied as if they filled a stage",
        TWO_CTAS,
        instead(
            "staged.Stage.is_filled",
            lambda call: call(rows=cutlass.select_(call.rows > 0, Int32(call.self.rows), Int32(0))),
        ),
        IllegalAccess,
        r"cp\.async",
    ),
    Mutant(
        "columns of B not looked at before a k tile is copied whole",
        TWO_CTAS,
        instead("staged.Stage.is_filled", lambda call: Boolean(True), call=2),
        IllegalAccess,
        r"cp\.async",
    ),
    Mutant(
        "k tiles that follow the last one of a tile",
        WHOLE_K_TILES,
        instead(
            "warp_copies.WarpCopies._end",
            lambda call: Int32(-1),
            inside="warp_copies.WarpCopies.multiply",
            outside=("warp_copies.WarpCopies._after_it",),
        ),
        WrongNumbers,
    ),
    Mutant(
        "slices of K counted ahead of the swizzle",
        TWO_CTAS,
        instead("warp_mainloop.Fragments.load", _count_slices),
        RaceError,
        UNFINISHED.format(SHARED) + r"(.|\n)*ldmatrix",
    ),
    # Warps that TMA feeds: the ring of operands, rowvecs, and the first planes of a tile.
    Mutant(
        "a k tile by TMA not waited for",
        FED_BY_TMA,
        without("ab.consumer_wait"),
        RaceError,
        UNWRITTEN.format(SHARED) + "|" + UNFINISHED.format(SHARED),
    ),
    Mutant(
        "a stage handed back to TMA before it is multiplied",
        FED_BY_TMA,
        early("ab.consumer_release", "ab.consumer_wait"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "TMA does not wait for a free stage",
        FED_BY_TMA,
        instead("ab.producer_acquire", lambda call: call(try_acquire_token=Boolean(True))),
        RaceError,
        r"cp\.async\.bulk\.tensor.*overwrites shared 0x",
    ),
    Mutant(
        "a stage that one warp hands back for all",
        FED_BY_TMA,
        instead("ab.create", lambda call: call(consumer_group=threads(1))),
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "bytes of B not waited for",
        FED_BY_TMA,
        instead("ab.create", lambda call: call(tx_count=call.tx_count // 2)),  # A and B have equally many
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "barriers used before all know them",
        FED_BY_TMA,
        without("pipeline.pipeline_init_wait"),
        RaceError,
        "no barrier between the two makes the initialisation visible",
    ),
    Mutant(
        "planes beside TMA not waited for",
        FED_BY_TMA,
        instead("tma_feed.TmaFeed.await_first_planes", lambda call: call(later=call.later + 1)),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "planes beside TMA without a group of their own",
        FED_BY_TMA,
        without("tma_feed.TmaFeed.planes_begun"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "rowvecs that a separate warp stages not waited for",
        ROWS_BESIDE_TMA,
        without("row.consumer_wait"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "rowvecs handed back unread",
        ROWS_BESIDE_TMA,
        early("row.consumer_release", "row.consumer_wait"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "B is read at the columns of another tile",
        FED_BY_TMA,
        instead(
            "scheduler.TileSchedule.place",
            lambda call: replace(place := call(), column=place.row),
            inside="tma_feed.TmaFeed._load",
        ),
        WrongNumbers,
    ),
    # Parts of K, whose sums a second kernel adds up.
    Mutant(
        "every part is the first",
        SUMS_IN_MEMORY,
        instead("work_items.WorkItems.begin_k", lambda call: call(batch=0 * call.batch)),
        WrongNumbers,
    ),
    Mutant(
        "every part begins a k tile late",
        SUMS_BY_TMA,
        instead("work_items.WorkItems.begin_k", lambda call: call() + 1),
        WrongNumbers,
    ),
    Mutant(
        "the last part is not added",
        SUMS_IN_MEMORY,
        instead("split_sums.SumGemm._add_up", _add_one_less),
        WrongNumbers,
    ),
    Mutant(
        "sums of the row before",
        SUMS_IN_MEMORY,
        instead("split_sums._pair_at", lambda call: call(row=cutlass.max(call.row - 1, 0))),
        WrongNumbers,
    ),
    Mutant(
        "rowvecs not waited for behind sums",
        SUMS_IN_MEMORY,
        without("arch.sync_threads", inside="split_sums.StoredSums.rows"),
        RaceError,
        "shared 0x",
    ),
    # Boxes of planes that have vectors for some lanes alone.
    Mutant(
        "lanes beyond the last line of a box copy, too",
        HALF_BOXES,
        instead("cp_async.Box._is_whole", lambda call: True, inside="cp_async.Box.bring"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "a turn of some lanes left out",
        HALF_BOXES,
        instead("cp_async.Box._turns", _whole_turns, inside="cp_async.Box.write"),
        WrongNumbers,
    ),
    # Operands of int8.
    Mutant(
        "int8 multiplied as uint8",
        INT8_BY_WARPS,
        instead("warp_instructions.instruction", lambda call: _Unsigned(call.shape)),
        WrongNumbers,
    ),
    # Values that are converted on their way to the MMA.
    Mutant(
        "values of K of B without A's permutation",
        CONVERTING_BY_WARPS,
        instead("warp_converted.ConvertedOperands.columns", _take_columns_in_order),
        WrongNumbers,
    ),
    Mutant(
        "stored values of the other half of a k tile",
        CONVERTING_BESIDE_TMA,
        instead("warp_converted.ConvertedOperands.rows", lambda call: call(step=call.step ^ 1)),
        WrongNumbers,
    ),
    Mutant(
        "e4m3 converted by bits without signs",
        CONVERTING_BY_WARPS,
        instead("stored_values._e4m3_bits", lambda call: call(pair=call.pair & 0x7F7F)),
        WrongNumbers,
    ),
    Mutant(
        "stored values read before TMA has brought them",
        CONVERTING_BESIDE_TMA,
        without("ab.consumer_wait", inside="tma_feed.TmaFeed.wait"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "stage handed back while other lanes read stored values",
        CONVERTING_BESIDE_TMA,
        without("arch.sync_warp", inside="tma_feed.TmaFeed.multiply"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    # Weights in groups of K.
    Mutant(
        "values of K of a group without A's permutation",
        GROUPS_BY_WARPS,
        instead("warp_converted.ConvertedOperands.columns", _take_columns_in_order),
        WrongNumbers,
    ),
    Mutant(
        "a zero of another group, by warps",
        GROUPS_BY_WARPS,
        instead("weight_groups.GroupVectors.of_group", zeros_of_the_next),
        WrongNumbers,
    ),
    Mutant(
        "groups' scales of the next column, by warps",
        GROUPS_BESIDE_TMA,
        instead("weight_groups.KGroup.weights", lambda call: call(row=call.row ^ 1)),
        WrongNumbers,
    ),
    Mutant(
        "all lanes take the first group of a k tile",
        GROUPS_BESIDE_TMA,
        instead("weight_groups.HeldGroups.group", lambda call: call(index=0)),
        WrongNumbers,
    ),
    Mutant(
        "scales and zeros overwritten before they are taken",
        GROUPS_BY_WARPS,
        (
            *without("weight_groups.HeldGroups.advance", inside="warp_converted.Sm80Converted._groups"),
            Wrong("weight_groups.HeldGroups.group", _load_over),
        ),
        WrongNumbers,
    ),
    Mutant(
        "the scales and zeros of a chunk after it has ended, by warps",
        GROUPS_BY_WARPS,
        without("weight_groups.HeldGroups.advance", inside="warp_converted.Sm80Converted._groups"),
        WrongNumbers,
    ),
    Mutant(
        "scales and zeros of columns and groups beyond the last, by warps",
        GROUPS_BESIDE_TMA,
        instead("weight_groups._loaded", lambda call: call(wanted=Boolean(True))),
        IllegalAccess,
    ),
    Mutant(
        "groups of the first part of K, by warps",
        GROUPS_BY_WARPS_IN_PARTS,
        instead("warp_converted.Sm80Converted.begin", lambda call: call(k_tile=Int32(0))),
        WrongNumbers,
    ),
    Mutant(
        "groups of the first tile's columns",
        GROUPS_BY_WARPS,
        instead("warp_converted.Sm80Converted.begin", lambda call: call(row=Int32(0))),
        WrongNumbers,
    ),
    Mutant(
        "unsigned values taken for signed ones, by warps",
        GROUPS_BY_WARPS,
        instead("stored_values.Integers.converted", lambda call: _signed(call.pair, call.to)),
        WrongNumbers,
    ),
    # Two values in a byte.
    Mutant(
        "nibbles exchanged, by warps",
        NIBBLES_BY_WARPS,
        instead("stored_values.Nibbles._apart", exchanged),
        WrongNumbers,
    ),
    Mutant(
        "the same half of a vector of B in all lanes",
        NIBBLES_BESIDE_TMA,
        instead("warp_converted.ConvertedOperands.columns", _take_halves_in_order),
        WrongNumbers,
    ),
    Mutant(
        "both vectors of a lane have the group of the first",
        NIBBLES_BY_WARPS,
        instead("weight_groups.HeldGroups.group", _of_the_first_vector),
        WrongNumbers,
    ),
    Mutant(
        "the first four groups of a chunk alone",
        NIBBLES_BESIDE_TMA,
        instead("weight_groups.GroupVectors.of_group", lambda call: call(group=call.group & ~4)),
        WrongNumbers,
    ),
    # Pairs of weights that are converted.
    Mutant(
        "the second weight converted with the first one's scales and zeros, by warps",
        PAIR_BY_WARPS,
        instead("weight_groups.GroupVectors._of_row", lambda call: call(r=call.r % 2)),
        WrongNumbers,
    ),
    Mutant(
        "the second weight of the first k tile copied to the place of the first",
        PAIR_BY_WARPS,
        instead(
            "staged.Stage.bring",
            lambda call: call(target=call.target + -call.self.bytes),
            inside="warp_copies.WarpCopies._bring_a",
            call=2,
        ),
        RaceError,
    ),
    Mutant(
        "both weights loaded to the place of the first",
        PAIR_BESIDE_TMA,
        instead("tma_feed._source", lambda call: call(index=0)),
        RaceError,
        STILL_WRITTEN.format(SHARED),
    ),
    Mutant(
        "sums of a k tile begin with those of the one before",
        ADA,
        without("Tensor.fill", inside="warp_mainloop.Sm80Promoted.step"),
        WrongNumbers,
    ),
    Mutant(
        "sums of the last k tile alone",
        ADA,
        instead("warp_mainloop.Sm80Promoted.step", _clear_first),
        WrongNumbers,
    ),
]
