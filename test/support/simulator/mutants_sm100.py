"""Faults planted in kernels of the Blackwell template."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int16
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cutlass_dsl import if_generate

from cute_backend.planning.stage_scales import NO_SCALES
from cute_backend.simulator.simulation_errors import (
    BarrierError,
    Deadlock,
    IllegalAccess,
    MissingProxyFence,
    RaceError,
    ResourceError,
    SimulationError,
)
from cute_backend.templates.rings import producer_state
from support.simulator.effects import RELEASED_UNREAD, first_b, has_not, one_part_less, places_alone
from support.simulator.mutants import (
    BLACKWELL_BLOCKS,
    BLACKWELL_COLUMN_GROUPS,
    BLACKWELL_GROUPS,
    BLACKWELL_HEADS,
    BLACKWELL_K_GROUPS,
    BLACKWELL_K_GROUPS_FP8,
    BLACKWELL_K_TAILS,
    BLACKWELL_KEEPS,
    BLACKWELL_LINES,
    BLACKWELL_PARTS,
    BLACKWELL_PASSES,
    BLACKWELL_ROTATING,
    BLACKWELL_SEGMENTS,
    HALVES,
    MASKED,
    MULTICAST,
    MX_GROUPS,
    MXFP4,
    MXFP8,
    NVFP4,
    ONE,
    PAIR,
    PAIRS_OF_K_TAILS,
    SHARED,
    STILL_READ,
    STILL_WRITTEN,
    SWIZZLE_128,
    TMEM,
    UNFINISHED,
    UNWRITTEN,
    WRITES_SCALES,
    InPtx,
    Mutant,
    WrongNumbers,
)
from support.simulator.planting import (
    Call,
    Wrong,
    as_written,
    changed,
    early,
    instead,
    late,
    threads,
    without,
)


def _one_k_tile_before(call: Call) -> Any:
    return [(stages, cute.domain_offset((0, -1), boxes)) for stages, boxes in call()]


def _release_elected(call: Call) -> None:
    """Releases a stage as soon as it is there, by one arrival of each warp."""
    call()
    with as_written():
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            call.self.consumer_release(call.state)


def _release_last(call: Call) -> Any:
    """Releases the stage in which the sums of a tile were left."""
    state, scale_state = call()
    with cute.arch.elect_one():
        call.ring.consumer_release(state)
    return state, scale_state


def _add_at_once(call: Call) -> Any:
    """Adds the first products to what is there."""
    call.mma.set(tcgen05.Field.ACCUMULATE, True)
    return call.mma


def _commit_to_operands() -> tuple[Wrong, ...]:
    """A tile's products are committed to a barrier of the operands."""
    operands: list[Any] = []

    def remember(call: Call) -> None:
        operands.append(call.self)
        call()

    def commit(call: Call) -> None:
        operands[-1].consumer_release(call.state)

    return (*instead("ab.consumer_release", remember), *instead("acc.producer_commit", commit))


def _by_one_warpgroup(call: Call) -> None:
    """Only the first warpgroup arrives."""
    if_generate(cute.arch.warp_idx() < 4, lambda: call() or [])


def _publish_first(call: Call) -> None:
    with as_written():
        cute.arch.fence_proxy("async.shared", space="cta")
    call()


def _more_rows(call: Call) -> Any:
    """Maps of planes that have 128 rows more."""

    def taller(plane: cute.Tensor) -> cute.Tensor:
        m, n = plane.shape
        return cute.make_tensor(plane.iterator, cute.make_layout((m + 128, n), stride=plane.stride))

    return call(planes={name: taller(plane) for name, plane in call.planes.items()})


def _stores(call: Call) -> bool:
    """Whether boxes are those of planes that are stored."""
    return isinstance(call.self.op, cpasync.CopyBulkTensorTileS2GOp)


def _rows_after_the_group(call: Call) -> None:
    """Stores as if the group had 128 rows more."""
    place = call.work.place
    call(work=replace(call.work, place=replace(place, end=place.end + 128)))


def _in_other_stage(call: Call) -> Any:
    """Reads the accumulators of the other of two stages."""
    sums = call.self.sums
    return call(self=replace(call.self, sums=changed(sums, _index=1 - sums.index)))


def _subtiles(columns: int, call: Call) -> int:
    """The number of subtiles that have `columns` columns."""
    return columns // int(call.config.subtile_n)


def _one_row_more(call: Call) -> Any:
    row, column, _ = call()
    return row, column, (row <= call.self.tile.m) & (column < call.self.tile.n)


MUTANTS = [
    # Blocks that are reduced in passes.
    Mutant(
        "every block has the results of the tile's first one on Blackwell",
        BLACKWELL_PASSES,
        instead("drain.Reduce.run", lambda call: call(first=0)),
        WrongNumbers,
    ),
    Mutant(
        "accumulators released after the first block on Blackwell",
        BLACKWELL_PASSES,
        instead(
            "tensor_memory.TensorMemorySeat.release",
            lambda call: call(visit=call.visit + call.self.visits // 2),  # of two blocks
        ),
        RaceError,
        UNFINISHED.format(TMEM),
    ),
    # Values that are kept.
    Mutant(
        "kept values not written back",
        BLACKWELL_KEEPS,
        without(
            "cute.copy", after="arch.fence_view_async_tmem_load", before="arch.fence_view_async_tmem_store"
        ),
        WrongNumbers,
    ),
    Mutant(
        "kept values read before they are written",
        BLACKWELL_KEEPS,
        without("arch.fence_view_async_tmem_store"),
        RaceError,
        UNFINISHED.format(TMEM),
    ),
    Mutant(
        "planes ahead of passes not waited for",
        BLACKWELL_KEEPS,
        without("exact.consumer_wait", before="arch.fence_view_async_tmem_store"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    # Columns in segments.
    Mutant(
        "a tile runs the epilogue of the segment before it on Blackwell",
        BLACKWELL_SEGMENTS,
        instead("segments.ColumnSegment.has", has_not, inside="sm100.Sm100Gemm._visit_tiles"),
        IllegalAccess,
        "only loads may begin before 0",
    ),
    Mutant(
        "a tile is counted from the plane's first column on Blackwell",
        BLACKWELL_SEGMENTS,
        instead(
            "segments.ColumnSegment.within", lambda call: call.place, inside="sm100.Sm100Gemm._visit_tiles"
        ),
        WrongNumbers,
    ),
    Mutant(
        "every segment loads the first B on Blackwell",
        BLACKWELL_SEGMENTS,
        instead("batch.operands", first_b),
        WrongNumbers,
    ),
    Mutant(
        "a segment without planes expects those of another on Blackwell",
        BLACKWELL_SEGMENTS,
        instead("segments.make_exacts", lambda call: call()[:1] * len(call.epilogues)),
        Deadlock,
    ),
    Mutant(
        "a tile without planes keeps its stage of them on Blackwell",
        BLACKWELL_SEGMENTS,
        without("epilogue.release_planes", when=lambda call: call.loads.sync_object_full.tx_count == 0),
        Deadlock,
    ),
    # Halves of rotated blocks.
    Mutant(
        "second halves that are not negated",
        BLACKWELL_ROTATING,
        instead("tile.Subtile.rotate_half", places_alone),
        WrongNumbers,
    ),
    # Operands: the load warp, the MMA warp, and the cluster.
    Mutant(
        "operands not waited for",
        ONE,
        without("ab.consumer_wait"),
        RaceError,
        r"tcgen05\.mma.*" + UNFINISHED.format(SHARED),
    ),
    Mutant(
        "operand stage not waited for",
        ONE,
        instead("ab.producer_acquire", lambda call: call(try_acquire_token=Boolean(True))),
        BarrierError,
        "arrival.* more than it expects",
    ),
    Mutant(
        "operand stage released before its products",
        ONE,
        early("ab.consumer_release", "ab.consumer_wait"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "half of the bytes expected",
        ONE,
        instead("ab.create", lambda call: call(tx_count=call.tx_count // 2)),
        Deadlock,
        "mma warp(.|\n)*1 of 1 arrivals.* bytes",
    ),
    Mutant(
        "half of a pair's bytes expected",
        PAIR,
        instead("ab.create", lambda call: call(tx_count=call.tx_count // 2)),
        RaceError,
        r"tcgen05\.mma.*reads shared",
    ),
    Mutant(
        "sixteen bytes too many expected",
        ONE,
        instead("ab.create", lambda call: call(tx_count=call.tx_count + 16)),
        Deadlock,
        r"mma warp(.|\n)*1 of 1 arrivals, 16 bytes",
    ),
    Mutant(
        "A multicast to the CTAs that share B",
        MULTICAST,
        instead(
            "cpasync.create_tma_multicast_mask",
            lambda call: call(mcast_mode=1),
            outside=("ab.create", "acc.create"),
            when=lambda call: call.mcast_mode == 2,
        ),
        RaceError,
        r"multicast.*" + STILL_WRITTEN.format(SHARED),
    ),
    Mutant(
        "one reader of a stage not counted",
        MULTICAST,
        instead("ab.create", lambda call: call(consumer_group=threads(call.consumer_group.size - 1))),
        RaceError,
        "overwrites shared",
    ),
    Mutant(
        "barriers not made known to the cluster",
        MULTICAST,
        without("arch.mbarrier_init_fence"),
        RaceError,
        "no barrier between the two makes the initialisation visible",
    ),
    Mutant(
        "two pipelines share a barrier",
        ONE,
        instead("acc.create", lambda call: call(barrier_storage=call.barrier_storage - 1)),
        BarrierError,
        r"mbarrier\.init of the mbarrier at .* which warp 0 .* has initialised",
    ),
    Mutant(
        "CTA leaves while others signal it",
        MULTICAST,
        without("ab.producer_tail"),
        IllegalAccess,
        "mbarrier at .*, all of whose warps have exited",
    ),
    Mutant(
        "a wait that gives up is taken for one that succeeds",
        ONE,
        instead("ab.consumer_wait", lambda call: call.self.consumer_try_wait(call.state)),
        RaceError,
        r"tcgen05\.mma.*reads shared",
    ),
    # Scales of blocks.
    Mutant(
        "scales of the k tile before",
        MXFP8,
        instead("mma_scaled.Sm100MmaScaled.boxes", _one_k_tile_before),
        WrongNumbers,
    ),
    Mutant(
        "scales of the other half of a tile's columns",
        MXFP8,
        instead("mma_scaled.Sm100MmaScaled.of_tile", lambda call: call(column=0 * call.column)),
        WrongNumbers,
    ),
    Mutant(
        "scales of the other half of a word",
        MXFP4,
        instead(
            "Tensor.__getitem__",
            lambda call: call(crd=(None, None, call.crd[2] ^ 1)),
            inside="mma_scaled.Sm100MmaScaled.step",
            when=lambda call: len(call.crd) == 3,
        ),
        WrongNumbers,
    ),
    Mutant(
        "scales copied after their products",
        NVFP4,
        late("mma_scaled.ScaleCopy.run", "mma_scaled.Sm100MmaScaled.step"),
        RaceError,
        UNWRITTEN.format(TMEM),
    ),
    Mutant(
        "a stage of scales released before they are copied",
        MXFP8,
        early("ab.consumer_release", "ab.consumer_wait"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "the bytes of scales not expected",
        MXFP8,
        instead("ab.create", lambda call: call(tx_count=MXFP8.config.ab_stage_bytes)),
        Deadlock,  # the bytes that were not expected leave those of the next phase short
        "waits for parity",
    ),
    Mutant(
        "scales of B where those of A are",
        NVFP4,
        instead("MmaScales.a_columns", lambda call: 0, inside="mma_scaled.Sm100MmaScaled.scale_operands"),
        WrongNumbers,
    ),
    Mutant(
        "scales in columns that are not allocated",
        MXFP4,
        instead(
            "TmemAllocator.allocate", lambda call: call(num_columns=NO_SCALES.tmem_columns(MXFP4.config))
        ),
        IllegalAccess,
        "tensor memory columns",
    ),
    Mutant(
        "scales of one CTA for both of a pair",
        NVFP4,
        instead(
            "mma_scaled.Sm100MmaScaled.boxes", lambda call: call(tile=(call.tile[0] // 2 * 2, call.tile[1]))
        ),
        WrongNumbers,
    ),
    # Scales that are written in tiles.
    Mutant(
        "rows behind the last without scales",
        WRITES_SCALES,
        instead(
            "warpgroup_planes.WarpgroupPlanes._visit_rows",
            lambda call: call(sweep=replace(call.sweep, pads_rows=False)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "scales of rows that are none",
        WRITES_SCALES,
        instead("device_scales.store_scale", lambda call: call(m=call.m + 8)),
        WrongNumbers,
    ),
    Mutant(
        "scales behind those of a row not padded",
        WRITES_SCALES,
        instead("device_scales.store_scale", lambda call: call(n=call.n + 32)),
        WrongNumbers,
    ),
    Mutant(
        "the scales of the neighbouring row",
        WRITES_SCALES,
        instead("device_scales.store_scale", lambda call: call(row=call.row ^ 1)),
        WrongNumbers,
    ),
    # Sums of k tiles that are scaled in registers.
    Mutant(
        "scales of the block of K before",
        BLACKWELL_BLOCKS,
        instead("block_scales.ScaleStages.bring_tile", lambda call: call(k=cutlass.max(call.k - 1, 0))),
        WrongNumbers,
    ),
    Mutant(
        "sums of a k tile not waited for",
        BLACKWELL_BLOCKS,
        without("acc.consumer_wait"),
        RaceError,
        "reads " + TMEM,
    ),
    Mutant(
        "sums of a k tile released before they are read",
        BLACKWELL_BLOCKS,
        (
            *without("acc.consumer_release", inside="partial_sums.PartialSums.add_up"),
            *instead("acc.consumer_wait", _release_elected),
        ),
        RaceError,
        STILL_READ.format(TMEM),
    ),
    Mutant(
        "sums of the last k tile released before the epilogue has read them",
        BLACKWELL_BLOCKS,
        instead("partial_sums.PartialSums.add_up", _release_last),
        RaceError,
        TMEM,
    ),
    Mutant(
        "sums of one half of the columns released for both",
        BLACKWELL_LINES,
        instead("acc.create", lambda call: call(consumer_group=threads(call.consumer_group.size // 2))),
        RaceError,
        TMEM,
    ),
    Mutant(
        "sums read before they were left",
        BLACKWELL_BLOCKS,
        without("arch.fence_view_async_tmem_store"),
        RaceError,
        TMEM,
    ),
    Mutant(
        "scales of a k tile not waited for",
        BLACKWELL_LINES,
        without("scales.consumer_wait"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "scales of a k tile released before they are read",
        BLACKWELL_LINES,
        (*without("partial_sums.ScaleRing.release"), *instead("scales.consumer_wait", _release_elected)),
        RaceError,
        SHARED,
    ),
    Mutant(
        "a stage of scales not waited for by the load warp",
        BLACKWELL_BLOCKS,
        without("scales.producer_acquire"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "scales of the other half of the columns",
        BLACKWELL_LINES,
        instead(
            "partial_sums.PartialSums._column_scales",
            lambda call: call(self=replace(call.self, group=1 - call.self.group)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "scales of a pair's first CTA for both",
        BLACKWELL_LINES,
        instead(
            "block_scales.ScaleStages.bring_tile",
            lambda call: call(origin=(call.origin[0] // 256 * 256, call.origin[1])),  # rows of a pair
        ),
        WrongNumbers,
    ),
    # Groups of rows.
    Mutant(
        "a neighbour's rows written",
        BLACKWELL_GROUPS,
        instead("tma_gemm.TmaGemm._store", _rows_after_the_group),
        WrongNumbers,
    ),
    Mutant(
        "the bias of the next group",
        BLACKWELL_GROUPS,
        instead(
            "gemm.Gemm._stage",
            lambda call: call(tile=changed(call.tile, group=cutlass.min(call.tile.group + 1, 22))),
        ),
        WrongNumbers,
    ),
    Mutant(
        "a row of the next group written among the last of a group",
        BLACKWELL_COLUMN_GROUPS,
        instead("tma_gemm.TmaGemm._store_rows", lambda call: call(count=call.count + 1)),
        IllegalAccess,
        "past the end of argument",
    ),
    Mutant(
        "planes by columns written whole where a group ends",
        BLACKWELL_COLUMN_GROUPS,
        instead("tma_gemm.TmaGemm._store", _rows_after_the_group),
        RaceError,
        "writes in the same kernel",
    ),
    Mutant(
        "scales of rows in groups that follow each other without padding",
        MX_GROUPS,
        instead(
            "mma_scaled.Sm100MmaScaled.boxes",
            lambda call: call(place=replace(call.place, first_tile=call.place.first // 128)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "scales of the next group's columns",
        MX_GROUPS,
        instead(
            "mma_scaled.Sm100MmaScaled.boxes",
            lambda call: call(place=replace(call.place, batch=(call.place.batch + 1) % 4)),
        ),
        WrongNumbers,
    ),
    Mutant(
        "a k tile in fp8 that ends in the next group on Blackwell",
        BLACKWELL_K_GROUPS_FP8,
        instead("batch.of_k_tile", lambda call: call(place=replace(call.place, end_k=call.place.end_k + 16))),
        WrongNumbers,
    ),
    Mutant(
        "a tail of K not handed to Blackwell's tensor cores",
        BLACKWELL_K_TAILS,
        without("arch.fence_proxy", inside="tails.Tails.clear"),
        MissingProxyFence,
        r"through the async proxy; .* wrote it through the generic proxy",
    ),
    Mutant(
        "a tail of K not cleared in the second CTA of a pair",
        PAIRS_OF_K_TAILS,
        (*without("tails.Tails._clear", call=3), *without("tails.Tails._clear", call=4)),
        WrongNumbers,
    ),
    Mutant(
        "a tail of K cleared in the first CTA of a pair alone, for both",
        PAIRS_OF_K_TAILS,
        instead("tails.Tails._of_cta", lambda call: call(cta=0)),
        WrongNumbers,
    ),
    Mutant(
        "a tail of K in the second CTA of a pair not acquired",
        PAIRS_OF_K_TAILS,
        without("arch.mbarrier_wait", inside="tails.Tails.clear"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "scales of the next group's columns, of K in groups",
        BLACKWELL_K_GROUPS_FP8,
        instead(
            "gemm.Gemm._stage", lambda call: call(tile=changed(call.tile, group=(call.tile.group + 1) % 4))
        ),
        WrongNumbers,
    ),
    Mutant(
        "a k tile that ends in the next group on Blackwell",
        BLACKWELL_K_GROUPS,
        instead("batch.of_k_tile", lambda call: call(place=replace(call.place, end_k=call.place.end_k + 1))),
        WrongNumbers,
    ),
    # Parts of K.
    Mutant(
        "parts of K from the first k tile on",
        BLACKWELL_PARTS,
        instead("work_items.WorkItems.__init__", lambda call: call(first_k=0 * call.first_k)),
        WrongNumbers,
    ),
    Mutant(
        "sums of tensor memory not waited for",
        BLACKWELL_PARTS,
        without("split_k.Sums.wait"),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "sums of a part of one other not waited for",
        BLACKWELL_PARTS,
        instead("split_k.Sums.init", one_part_less),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "sums of the first visit for all",
        BLACKWELL_PARTS,
        instead("split_k.Sums.add", lambda call: call(visit=0)),
        WrongNumbers,
    ),
    Mutant(
        "CTA of a part leaves while its sums are read",
        BLACKWELL_PARTS,
        without("arch.mbarrier_wait", inside="split_k.Sums.hand_over"),
        IllegalAccess,
        "all of whose warps have exited",
    ),
    Mutant(
        "CTAs of parts never let go",
        BLACKWELL_PARTS,
        without("split_k.Sums.release"),
        Deadlock,
        "0 of 4 arrivals",
    ),
    # The stream.
    Mutant(
        "earlier kernels not waited for",
        ONE,
        without("overlap.await_earlier_kernels"),
        RaceError,
        r"before griddepcontrol\.wait",
    ),
    # Products.
    Mutant(
        "accumulator not waited for by the MMA warp", ONE, without("acc.producer_acquire"), RaceError, TMEM
    ),
    Mutant(
        "MMA warp begins in the wrong phase",
        ONE,
        instead(
            "rings.consumer_state",
            lambda call: producer_state(call.stages),
            before="acc.producer_acquire",
            call=2,
        ),
        Deadlock,
        "mma warp(.|\\n)*waits for parity 1 of .* phase 1 .* 0 of 4 arrivals",
    ),
    Mutant(
        "sums begin with what was there",
        ONE,
        instead("mainloop.Sm100Plain.begin", _add_at_once),
        RaceError,
        r"tcgen05\.mma.*" + UNWRITTEN.format(TMEM),
    ),
    Mutant(
        "accumulator committed to the operands' barrier",
        ONE,
        _commit_to_operands(),
        Deadlock,
        "epilogue warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "products committed to the next stage's barrier",
        ONE,
        instead(
            "ab.consumer_release", lambda call: call(state=changed(call.state, _index=call.state.index + 1))
        ),
        Deadlock,
        "tma warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "swizzle of 64 bytes for one of 128",
        ONE,
        InPtx(str(SWIZZLE_128), str(SWIZZLE_128 ^ 6 << 61)),
        WrongNumbers,
    ),
    Mutant(
        "every eighth row half as far on",
        ONE,
        InPtx(str(SWIZZLE_128), str(SWIZZLE_128 - (32 << 32))),
        WrongNumbers,
    ),
    Mutant(
        "lanes that no instruction has set disabled",
        ONE,
        InPtx(r"mov\.b64\s+\{(%r\d+, %r\d+)\}, %rd\d+;(?=[^{]*tcgen05\.mma[^{]*\{%r\d+, %r\d+, \1\})", ""),
        WrongNumbers,
    ),
    Mutant(
        "a pair's accumulator committed to one CTA",
        PAIR,
        instead("acc.full.arrive_tcgen05mma", lambda call: call(mask=Int16(1))),
        Deadlock,
        r"epilogue warp \d of CTA \(1, 0, 0\)(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "tensor memory of a pair handled by one CTA",
        PAIR,
        InPtx(r"relinquish_alloc_permit\.cta_group::2", "relinquish_alloc_permit.cta_group::1"),
        ResourceError,
        r"cta_group::1 .* and \.cta_group::2 .* in one kernel",
    ),
    # Tensor memory.
    Mutant(
        "address of tensor memory not waited for",
        ONE,
        without("TmemAllocator.wait_for_alloc", call=1),
        RaceError,
        "mma warp",
    ),
    Mutant(
        "tensor memory for one stage of two",
        ONE,
        instead("TmemAllocator.allocate", lambda call: call(num_columns=ONE.config.mma_n)),
        IllegalAccess,
        "tensor memory columns 64 to 127 .* allocated are 0 to 63",
    ),
    Mutant(
        "tensor memory not freed",
        ONE,
        without("TmemAllocator.free"),
        ResourceError,
        "exits with tensor memory allocated",
    ),
    Mutant(
        "tensor memory freed before all have read",
        MASKED,
        without(
            "NamedBarrier.arrive_and_wait",
            before="TmemAllocator.free",
            outside=("TmemAllocator.wait_for_alloc",),
        ),
        RaceError,
        r"tcgen05\.dealloc.*" + STILL_READ.format(TMEM),
    ),
    Mutant(
        "tensor memory read a column further",
        ONE,
        instead(
            "cute.copy",
            lambda call: call(src=cute.make_tensor(call.src.iterator + 1, call.src.layout)),
            after="acc.consumer_wait",
        ),
        RaceError,
        TMEM,
    ),
    Mutant(
        "loads from tensor memory not waited for",
        ONE,
        without("arch.fence_view_async_tmem_load"),
        RaceError,
        r"tcgen05\.mma.* overwrites tensor memory.*a tcgen05\.ld of warp \d .*may still be reading",
    ),
    # The accumulators' way to the epilogue.
    Mutant(
        "barriers not awaited at the start",
        ONE,
        without("pipeline.pipeline_init_wait"),
        RaceError,
        "no barrier between the two makes the initialisation visible",
    ),
    Mutant(
        "accumulator not waited for by the epilogue",
        ONE,
        without("acc.consumer_wait"),
        RaceError,
        UNWRITTEN.format(TMEM),
    ),
    Mutant(
        "accumulator released after its first subtile",
        ONE,
        instead(
            "tensor_memory.TensorMemorySeat.release",
            lambda call: call(visit=call.visit + call.self.visits - 1),
        ),
        RaceError,
        TMEM,
    ),
    Mutant(
        "accumulator stage not handed over at the start",
        ONE,
        without("acc.consumer_release", before="acc.consumer_wait", call=2),
        Deadlock,
        "mma warp(.|\n)*0 of 4 arrivals",
    ),
    Mutant(
        "one arrival too many expected",
        ONE,
        instead("acc.create", lambda call: call(consumer_group=threads(5))),
        Deadlock,
        "mma warp(.|\n)*4 of 5 arrivals",
    ),
    Mutant(
        "arrivals of one CTA of a pair expected",
        PAIR,
        instead("acc.create", lambda call: call(consumer_group=threads(call.consumer_group.size // 2))),
        Deadlock,
        r"mma warp(.|\n)*of 4 arrivals",
    ),
    Mutant(
        "accumulator of the other stage",
        ONE,
        instead("tensor_memory.TensorMemorySeat.begin", _in_other_stage),
        RaceError,
        TMEM,
    ),
    Mutant(
        "accumulator of the other subtile",
        ONE,
        instead(
            "tensor_memory.piece_of",
            lambda call: call(subtile=_subtiles(call.config.tile_n, call) - 1 - call.subtile),
        ),
        WrongNumbers,
    ),
    Mutant(
        "accumulator handed over by every lane",
        ONE,
        instead("arch.elect_one", lambda call: nullcontext(), after="acc.consumer_wait"),
        Deadlock,
        "epilogue warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "accumulator of another warp's rows",
        ONE,
        instead("cute.TiledCopy.get_slice", lambda call: call(thr_idx=(call.thr_idx + 32) % 128)),
        IllegalAccess,
        r"warp \d of .* may touch lanes",
    ),
    Mutant(
        "half of a warp waited for",
        ONE,
        instead("arch.sync_warp", lambda call: call(mask=0xFFFF)),
        SimulationError,
        "in lanes .*16.* which its membermask 0xffff leaves out",
    ),
    # Two warpgroups of the epilogue.
    Mutant(
        "accumulators of the other half",
        HALVES,
        instead(
            "tensor_memory.piece_of",
            lambda call: call(
                subtile=(call.subtile + _subtiles(call.config.group_n, call))
                % _subtiles(call.config.tile_n, call)
            ),
        ),
        WrongNumbers,
    ),
    Mutant(
        "columns of the halves swapped",
        HALVES,
        instead(
            "tensor_memory.subtile_of", lambda call: call(group=1 - call.group), inside="drain.Visit.run"
        ),
        WrongNumbers,
    ),
    Mutant(
        "rowvec of the other half",
        HALVES,
        instead("cute.local_tile", lambda call: call(coord=(1 - call.coord[0],)), after="row.consumer_wait"),
        WrongNumbers,
    ),
    Mutant(
        "lanes counted over both warpgroups",
        HALVES,
        instead("tensor_memory.Thread.__init__", lambda call: call(thread=call.group * 128 + call.thread)),
        IllegalAccess,
        "may touch lanes",
    ),
    Mutant(
        "arrivals of one warpgroup expected",
        HALVES,
        instead("acc.create", lambda call: call(consumer_group=threads(call.consumer_group.size // 2))),
        Deadlock,
        "epilogue warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "accumulator handed over by one warpgroup",
        HALVES,
        instead("acc.consumer_release", _by_one_warpgroup, after="acc.consumer_wait"),
        Deadlock,
        "mma warp(.|\n)*4 of 8 arrivals",
    ),
    Mutant(
        "one output buffer for both warpgroups",
        HALVES,
        (
            *instead(
                "tma_gemm.TmaGemm._plane",
                lambda call: call(part=0),
                inside="warpgroup_planes.WarpgroupPlanes._stores",
            ),
            *instead(
                "tma_gemm.TmaGemm._plane",
                lambda call: call(part=0),
                inside="warpgroup_planes.WarpgroupPlanes._leave",
            ),
        ),
        RaceError,
        "overwrites shared",
    ),
    Mutant(
        "one buffer for the exact loads of both",
        HALVES,
        instead("tma_gemm.TmaGemm._plane", lambda call: call(part=0), inside="tma_gemm.TmaGemm._load_boxes"),
        RaceError,
        "overwrites shared",
    ),
    Mutant(
        "exact loads of one half",
        HALVES,
        without("cute.copy", after="exact.producer_acquire"),
        Deadlock,
        r"epilogue warp(.|\n)*1 of 1 arrivals, \d+ bytes",
    ),
    Mutant(
        "rowvec stage released by one warpgroup",
        HALVES,
        instead("row.create", lambda call: call(consumer_group=threads(call.consumer_group.size // 2))),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "one named barrier for both warpgroups",
        HALVES,
        instead("tensor_memory.Thread.__init__", lambda call: call(barrier=pipeline.NamedBarrier(1, 128))),
        RaceError,
        r"cp\.async\.bulk\.tensor.*reads shared",
    ),
    Mutant(
        "tensor memory freed before the other warpgroup has read",
        HALVES,
        instead(
            "NamedBarrier.arrive_and_wait",
            lambda call: call(self=pipeline.NamedBarrier(1 + cute.arch.warp_idx() // 4, 128)),
            when=lambda call: call.self.num_threads == 256,  # the last meeting
        ),
        RaceError,
        r"tcgen05\.dealloc.*" + STILL_READ.format(TMEM),
    ),
    Mutant(
        "more registers taken than were given up",
        HALVES,
        instead("arch.setmaxregister_increase", lambda call: call(reg_count=240)),
        Deadlock,
        r"epilogue warp (.|\n)*240 registers per thread, .* more for the warp; the pool of CTA",
    ),
    # The epilogue's operands.
    Mutant("rowvec not waited for", ONE, without("row.consumer_wait"), RaceError, UNFINISHED.format(SHARED)),
    Mutant("rowvec stage not waited for", ONE, without("row.producer_acquire"), RaceError, SHARED),
    Mutant(
        "rowvec stage released early",
        ONE,
        early("row.consumer_release", "row.consumer_wait"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "an arrival too many expected of the staging warp",
        ONE,
        instead("row.create", lambda call: call(producer_group=threads(33))),
        Deadlock,
        "epilogue warp(.|\n)*32 of 33 arrivals",
    ),
    Mutant(
        "exact load not waited for", ONE, without("exact.consumer_wait"), RaceError, UNFINISHED.format(SHARED)
    ),
    Mutant(
        "exact stage released before it is read",
        ONE,
        RELEASED_UNREAD,
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "exact stage released before all lanes have read it",
        ONE,
        without("arch.sync_warp", inside="epilogue.release_planes"),
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "exact stage released by three warps of four",
        ONE,
        instead("exact.create", lambda call: call(consumer_group=threads(3))),
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "exact load of the first subtile always",
        ONE,
        instead(
            "rings.partition_box",
            lambda call: call(coord=(call.coord[0], call.coord[1] // 2 * 2)),
            after="exact.producer_acquire",
        ),
        WrongNumbers,
        "columns 32 to 191",
    ),
    Mutant(
        "row scale read by columns",
        ONE,
        instead("tile.Tile.row", lambda call: call.self.clamp_column(call.self.thread)),
        WrongNumbers,
    ),
    Mutant(
        "rows beyond M read",
        ONE,
        instead("tile.Tile.row", lambda call: call.self.raw_row(call.r)),
        IllegalAccess,
        "past the end of argument 2",
    ),
    # Outputs.
    Mutant(
        "output not published to TMA",
        ONE,
        without("arch.fence_proxy", outside=("epilogue.release_planes",)),
        MissingProxyFence,
        r"cp\.async\.bulk\.tensor.* wrote it through the generic proxy",
    ),
    Mutant(
        "output published to TMA before it is written",
        ONE,
        (
            *without("arch.fence_proxy", outside=("epilogue.release_planes",)),
            *instead("tile.Subtile.copy_to", _publish_first),
        ),
        MissingProxyFence,
        r"cp\.async\.bulk\.tensor.* wrote it through the generic proxy",
    ),
    Mutant(
        "output map with rows that are not there",
        ONE,
        instead("segments.Boxes.maps", _more_rows, when=_stores),
        IllegalAccess,
        "past the end of argument 5",
    ),
    Mutant(
        "output stored before all have written",
        ONE,
        without("NamedBarrier.arrive_and_wait", after="arch.fence_proxy"),
        RaceError,
        r"cp\.async\.bulk\.tensor.*reads shared",
    ),
    Mutant(
        "output plane not waited for",
        ONE,
        without("store.producer_acquire"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "output plane not advanced",
        ONE,
        without("PipelineState.advance", after="store.producer_commit"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "shared memory given up under a store",
        ONE,
        without("store.producer_tail"),
        IllegalAccess,
        "while this store still reads its shared memory",
    ),
    Mutant(
        "masked store without its bound",
        MASKED,
        instead("tile.Subtile.target", lambda call: (*call()[:2], Boolean(True))),
        IllegalAccess,
        "past the end of argument 5",
    ),
    Mutant(
        "masked store one row too high",
        MASKED,
        instead("tile.Subtile.target", _one_row_more),
        IllegalAccess,
        "past the end of argument 5",
    ),
    Mutant(
        "rows of one batch alone",
        BLACKWELL_HEADS,
        instead("cute.ceil_div", lambda call: 0, inside="tma_gemm.TmaGemm._store_heads"),
        WrongNumbers,
    ),
    Mutant(
        "columns beyond the last head",
        BLACKWELL_HEADS,
        instead(
            "cute.size",
            lambda call: 1 << 30,
            inside="tma_gemm.TmaGemm._store_heads",
            when=lambda call: call.mode == [1],
        ),
        MissingProxyFence,
        "overwrites byte",
    ),
]
