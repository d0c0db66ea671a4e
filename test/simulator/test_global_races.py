"""Races through global memory: what orders the CTAs of a launch, and every fault that has to be found."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from cute_backend.simulator.simulation_errors import MissingProxyFence, RaceError
from support.simulator.ptx_entries import entry, launch

SEEDS = [None, *range(1, 9)]
THREADS = 64

ADDRESSES = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2];
    mad.wide.u32 %rd3, %r0, 4, %rd0; mad.wide.u32 %rd4, %r0, 4, %rd2; add.u32 %r2, %r0, 100;
"""


def pass_on(write: str, read: str) -> str:
    """CTA 0 leaves 64 words in p0 and a flag in p1; CTA 1 copies them to p2."""
    return f"""{ADDRESSES}
    @!%p1 bra READER;
    {write}
    ret;
READER:
    {read}
    {"" if "st.global" in read else "ld.global.b32 %r3, [%rd3]; st.global.b32 [%rd4], %r3;"}"""


def run(code: str, seed: int | None, *, ctas: int = 2, cluster: int = 1, shared: int = 0) -> np.ndarray:
    data, flag, out = np.zeros(THREADS, np.uint32), np.zeros(4, np.uint32), np.zeros(THREADS, np.uint32)
    launch(
        entry(code, 3, shared=shared),
        [data, flag, out],
        block=THREADS,
        grid=(ctas, 1, 1),
        cluster=(cluster, 1, 1),
        seed=seed,
    )
    return out


DATA = "st.global.b32 [%rd3], %r2;"
SPIN = "@!%p0 bra READY; SPIN: {load} setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN; {then} READY: bar.sync 0;"

WRITERS = {
    "release": f"{DATA} bar.sync 0; @%p0 st.release.gpu.global.b32 [%rd1], 1;",
    "fence": f"{DATA} bar.sync 0; @%p0 fence.acq_rel.gpu; @%p0 st.relaxed.gpu.global.b32 [%rd1], 1;",
    "system": f"{DATA} bar.sync 0; @%p0 fence.sc.sys; @%p0 st.relaxed.sys.global.b32 [%rd1], 1;",
    "volatile": f"{DATA} bar.sync 0; @%p0 membar.gl; @%p0 st.volatile.global.b32 [%rd1], 1;",
    "red": f"{DATA} bar.sync 0; @%p0 red.release.gpu.global.add.u32 [%rd1], 1;",
    "fence, red": f"{DATA} bar.sync 0; @%p0 fence.acq_rel.gpu; @%p0 red.global.add.u32 [%rd1], 1;",
    "atom": f"{DATA} bar.sync 0; @%p0 atom.acq_rel.gpu.global.exch.b32 %r5, [%rd1], 1;",
    "release, then more": f"""{DATA} bar.sync 0; @%p0 st.release.gpu.global.b32 [%rd1], 1;
        @%p0 red.global.add.u32 [%rd1], 1;""",
}
READERS = {
    "acquire": SPIN.format(load="ld.acquire.gpu.global.b32 %r4, [%rd1];", then=""),
    "fence": SPIN.format(load="ld.relaxed.gpu.global.b32 %r4, [%rd1];", then="fence.acq_rel.gpu;"),
    "volatile": SPIN.format(load="ld.volatile.global.b32 %r4, [%rd1];", then="membar.gl;"),
    "atom": SPIN.format(load="atom.acquire.gpu.global.or.b32 %r4, [%rd1], 0;", then=""),
    "every thread": "SPIN: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN;",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_flag_hands_data_to_another_cta(writer: str, reader: str) -> None:
    for seed in SEEDS[:3]:
        out = run(pass_on(WRITERS[writer], READERS[reader]), seed)
        assert out.tolist() == list(range(100, 100 + THREADS))


EACH_WARP = """mov.u32 %r6, %laneid; setp.eq.u32 %p4, %r6, 0; @!%p4 bra MEET;
    SPIN: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN;
    MEET: bar.warp.sync -1;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_acquires_for_the_others_if_they_meet_it(seed: int | None) -> None:
    out = run(pass_on(WRITERS["release"], EACH_WARP), seed)
    assert out.tolist() == list(range(100, 100 + THREADS))
    with pytest.raises(RaceError, match=r"reads byte .* of array 0, which .*" + RACE):
        run(pass_on(WRITERS["release"], EACH_WARP.replace("bar.warp.sync -1;", "")), seed)
    alone = "MEET: @%p4 ld.global.b32 %r3, [%rd3]; @%p4 st.global.b32 [%rd4], %r3;"
    out = run(pass_on(WRITERS["release"], EACH_WARP.replace("MEET: bar.warp.sync -1;", alone)), seed)
    assert out[::32].tolist() == [100, 132]


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_acquire_one_after_another_all_know(seed: int | None) -> None:
    """Each of two halves of a warp waits for the flag in a loop of its own."""
    halves = """mov.u32 %r6, %laneid; setp.lt.u32 %p4, %r6, 16; @!%p4 bra UPPER;
    SPIN: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN; bra MEET;
    UPPER: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra UPPER; MEET:"""
    for writer in ("release", "release, then more"):
        out = run(pass_on(WRITERS[writer], halves), seed)
        assert out.tolist() == list(range(100, 100 + THREADS))
    with pytest.raises(RaceError, match="of array 0"):
        unheard = halves.replace("UPPER: ld.acquire", "UPPER: ld.relaxed")
        run(pass_on(WRITERS["release"], unheard), seed)


RACE = "in the same kernel .*no release and acquire"


@dataclass(frozen=True)
class Fault:
    write: str = WRITERS["release"]
    read: str = READERS["acquire"]
    message: str = r"(reads|overwrites) byte .* of array 0, which .*" + RACE


def fenced(scope: str) -> str:
    return WRITERS["fence"].replace("fence.acq_rel.gpu", f"fence.acq_rel.{scope}")


FAULTS = {
    "flag before data": Fault(f"@%p0 st.release.gpu.global.b32 [%rd1], 1; {DATA}"),
    "only its own data released": Fault(f"{DATA} @%p0 st.release.gpu.global.b32 [%rd1], 1;"),
    "a flag without a release": Fault(f"{DATA} bar.sync 0; @%p0 st.relaxed.gpu.global.b32 [%rd1], 1;"),
    "an update without a release": Fault(f"{DATA} bar.sync 0; @%p0 red.global.add.u32 [%rd1], 1;"),
    "fence before data": Fault(
        f"@%p0 fence.acq_rel.gpu; {DATA} bar.sync 0; @%p0 st.relaxed.gpu.global.b32 [%rd1], 1;"
    ),
    "fence after the flag": Fault(
        f"{DATA} bar.sync 0; @%p0 st.relaxed.gpu.global.b32 [%rd1], 1; @%p0 fence.acq_rel.gpu;"
    ),
    "fence of the CTA": Fault(fenced("cta")),
    "fence of the cluster": Fault(fenced("cluster")),
    "a flag for the CTA": Fault(
        WRITERS["release"].replace(".gpu", ".cta"), message=r"of array 1, which .*" + RACE
    ),
    "missing acquire": Fault(read=READERS["acquire"].replace("acquire", "relaxed")),
    "acquire of the CTA": Fault(
        read=READERS["acquire"].replace("acquire.gpu", "acquire.cta"), message="of array 1, which .*" + RACE
    ),
    "fence before the flag is read": Fault(
        read="fence.acq_rel.gpu; " + READERS["acquire"].replace("acquire", "relaxed")
    ),
    "fence of the CTA after the flag": Fault(
        read=READERS["fence"].replace("fence.acq_rel.gpu", "membar.cta")
    ),
    "a flag read like data": Fault(
        read=READERS["acquire"].replace("ld.acquire.gpu", "ld"), message="of array 1, which .*" + RACE
    ),
    "a flag written like data": Fault(
        f"{DATA} bar.sync 0; @%p0 fence.acq_rel.gpu; @%p0 st.global.b32 [%rd1], 1;",
        message="of array 1, which .*" + RACE,
    ),
    "half of a flag": Fault(
        read=READERS["acquire"].replace("global.b32 %r4", "global.u16 %r4"),
        message="of array 1, which .*" + RACE,
    ),
    "other warps don't wait for the flag": Fault(read=READERS["acquire"].replace("bar.sync 0;", "")),
    "no flag": Fault(read="bar.sync 0;"),
    "written over what is read": Fault(f"bar.sync 0; {DATA}", "bar.sync 0;"),
    "through the cache of what never changes": Fault(
        read=READERS["acquire"] + "ld.global.nc.b32 %r3, [%rd3]; st.global.b32 [%rd4], %r3;",
        message=r"of array 0, which .* writes in the same kernel .*ld\.global\.nc",
    ),
    "a flag overwritten like data": Fault(
        f"{WRITERS['release']} @%p0 st.global.b32 [%rd1], 2;", message="of array 1, which .*" + RACE
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_are_found_under_every_seed(name: str, seed: int | None) -> None:
    fault = FAULTS[name]
    with pytest.raises(RaceError, match=fault.message):
        run(pass_on(fault.write, fault.read), seed)


ALONE = """ld.global.b32 %r6, [%rd4]; @%p0 st.global.b32 [%rd3], %r2; {fence}
    @%p0 st.release.gpu.global.b32 [%rd1], 1;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_knows_what_it_did_itself(seed: int | None) -> None:
    """Whatever the other lanes of its warp have done that it knows nothing of."""
    read = f"{READERS['acquire']} ld.global.b32 %r3, [%rd0]; @%p0 st.global.b32 [%rd3+128], %r3;"
    run(pass_on(ALONE.format(fence=""), read), seed)
    fetch = READERS["acquire"] + re.sub("(ld.shared|st.global)", r"@%p0 \1", FETCH.replace("256", "16"))
    run(started(pass_on(ALONE.format(fence="@%p0 fence.proxy.async;"), fetch)), seed, shared=1024)
    more = ALONE.format(fence="").replace("@%p0 st.global", "st.global")
    with pytest.raises(RaceError, match="array 0"):
        run(pass_on(more, read.replace("[%rd0]", "[%rd0+4]")), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_come_to_a_barrier_apart_tell_all_that_they_did(seed: int | None) -> None:
    apart = f"""{DATA} setp.lt.u32 %p5, %r0, 9; @%p5 bra FEW; st.global.b32 [%rd3], %r2; barrier.sync 1, 64;
        bra TOLD; FEW: st.global.b32 [%rd3], %r2; barrier.sync 1, 64; TOLD:
        @%p0 st.release.gpu.global.b32 [%rd1], 1;"""
    assert run(pass_on(apart, READERS["acquire"]), seed).tolist() == list(range(100, 100 + THREADS))
    with pytest.raises(RaceError, match="array 0"):
        run(pass_on(apart.replace("barrier.sync 1, 64;", ""), READERS["acquire"]), seed)


# --- neighbours, updates, clusters ------------------------------------------------------------

NEIGHBOURS = """ld.param.u64 %rd0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r2, %r0, 2, %r1; mad.wide.u32 %rd3, %r2, {size}, %rd0;
    cvt.u16.u32 %h0, %r2; st.global.b{bits} [%rd3], %h0; ld.global.b{bits} %h0, [%rd3];"""


@pytest.mark.parametrize("size", [1, 2])
def test_neighbours_are_two_ctas(size: int) -> None:
    code = NEIGHBOURS.format(size=size, bits=8 * size)
    out = np.zeros(128, f"u{size}")
    launch(entry(code, 1), [out], block=64, grid=(2, 1, 1), seed=1)
    assert out.tolist() == list(range(128))
    with pytest.raises(RaceError, match=rf"overwrites byte 0x{size:x} of array 0, which .* writes"):
        launch(entry(code.replace("%r0, 2, %r1;", "%r1, 1, %r0;"), 1), [out], block=64, grid=(2, 1, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_one_address_is_written_by_two(seed: int | None) -> None:
    same = "ld.param.u64 %rd2, [p2]; mov.u32 %r1, %ctaid.x; st.{how}global.b32 [%rd2], %r1;"
    with pytest.raises(RaceError, match=r"overwrites byte 0x0 of array 2, which .* writes"):
        run(same.format(how=""), seed)
    run(same.format(how="relaxed.gpu."), seed)
    with pytest.raises(RaceError, match="array 2"):
        run(same.format(how="relaxed.cta."), seed)


def test_updates_of_two_ctas_meet_and_stores_do_not_meet_them() -> None:
    update = "ld.param.u64 %rd2, [p2]; mov.u32 %r1, %ctaid.x; red.global.add.u32 [%rd2], 1;"
    assert run(update, 1, ctas=5)[0] == 5 * THREADS
    for other in (
        "st.global.b32 [%rd2], 1;",
        "ld.global.b32 %r2, [%rd2];",
        "red.cta.global.add.u32 [%rd2], 1;",
    ):
        code = f"{update} setp.eq.u32 %p1, %r1, 3; @%p1 {other}"
        with pytest.raises(RaceError, match="array 2"):
            run(code, 1, ctas=5)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_does_not_hide_the_store_before_it(seed: int | None) -> None:
    """CTA 0 stores and CTA 1 updates after it; CTA 2 waits for the update, which orders it after neither."""
    code = f"""{ADDRESSES}
    setp.eq.u32 %p3, %r1, 2; @%p1 bra FIRST; @%p3 bra LAST;
    MIDDLE: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra MIDDLE;
    @%p0 red.relaxed.gpu.global.add.u32 [%rd2], 1; @%p0 st.relaxed.gpu.global.b32 [%rd1+4], 1; ret;
    FIRST: @%p0 st.global.b32 [%rd2], 7; @%p0 st.release.gpu.global.b32 [%rd1], 1; ret;
    LAST: ld.relaxed.gpu.global.b32 %r4, [%rd1+4]; setp.eq.u32 %p2, %r4, 0; @%p2 bra LAST;
    @%p0 red.relaxed.gpu.global.add.u32 [%rd2], 1;"""
    with pytest.raises(RaceError, match=r"array 2, which warp 0 of CTA .0, 0, 0. writes"):
        run(code, seed, ctas=3)
    assert run(code.replace("st.global.b32 [%rd2]", "st.relaxed.gpu.global.b32 [%rd2]"), seed, ctas=3)[0] == 9


CHAIN = f"""{ADDRESSES}
    setp.eq.u32 %p3, %r1, 2; @%p1 bra FIRST; @%p3 bra LAST;
MIDDLE: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra MIDDLE;
    bar.sync 0; @%p0 st.release.gpu.global.b32 [%rd1+4], 1; ret;
FIRST: {WRITERS["release"]} ret;
LAST: ld.acquire.gpu.global.b32 %r4, [%rd1+4]; setp.eq.u32 %p2, %r4, 0; @%p2 bra LAST;
    ld.global.b32 %r3, [%rd3]; st.global.b32 [%rd4], %r3;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_cta_learned_it_hands_on(seed: int | None) -> None:
    assert run(CHAIN, seed, ctas=3).tolist() == list(range(100, 100 + THREADS))
    for broken in (
        CHAIN.replace("MIDDLE: ld.acquire", "MIDDLE: ld.relaxed"),
        CHAIN.replace(
            "bar.sync 0; @%p0 st.release.gpu.global.b32 [%rd1+4]", "@%p0 st.relaxed.gpu.global.b32 [%rd1+4]"
        ),
    ):
        with pytest.raises(RaceError, match="array 0"):
            run(broken, seed, ctas=3)


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_of_a_cluster_order_global_memory(seed: int | None) -> None:
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    code = pass_on(f"{DATA} {meet}", meet)
    assert run(code, seed, cluster=2).tolist() == list(range(100, 100 + THREADS))
    with pytest.raises(RaceError, match="array 0"):
        run(code.replace(".arrive;", ".arrive.relaxed;"), seed, cluster=2)


# --- the last CTA to come, and the next launch ------------------------------------------------------------

LAST = f"""{ADDRESSES} mov.b32 %r9, smem;
    mad.lo.u32 %r5, %r1, {THREADS}, %r0; mad.wide.u32 %rd5, %r5, 4, %rd0; st.global.b32 [%rd5], %r5;
    bar.sync 0;
    @%p0 fence.acq_rel.gpu; @%p0 atom.relaxed.gpu.global.add.u32 %r6, [%rd1], 1; @%p0 fence.acq_rel.gpu;
    @%p0 st.shared.b32 [%r9], %r6;
    bar.sync 0; ld.shared.b32 %r6, [%r9]; setp.lt.u32 %p2, %r6, 3; @%p2 ret;
    mov.b32 %r7, 0; mov.b32 %r8, 0;
SUM: mad.wide.u32 %rd6, %r8, {4 * THREADS}, %rd3; ld.global.b32 %r5, [%rd6]; add.u32 %r7, %r7, %r5;
    add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 4; @%p3 bra SUM;
    st.global.b32 [%rd4], %r7;
    @%p0 st.relaxed.gpu.global.b32 [%rd1], 0;"""


def sum_twice(code: str, seed: int | None) -> None:
    """Two launches one after the other on the same memory: four CTAs leave sums, the last adds them up."""
    counter, out = np.zeros(1, np.uint32), np.zeros(THREADS, np.uint32)
    for _ in range(2):
        partials = np.full(4 * THREADS, 7, np.uint32)
        launch(entry(code, 3, shared=16), [partials, counter, out], block=THREADS, grid=(4, 1, 1), seed=seed)
        assert np.array_equal(out, partials.reshape(4, THREADS).sum(0))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_cta_finds_what_all_have_left(seed: int | None) -> None:
    sum_twice(LAST, seed)


@pytest.mark.parametrize(
    "edit",
    [
        ("@%p0 st.relaxed.gpu.global.b32 [%rd1], 0;", ""),
        ("@%p0 fence.acq_rel.gpu; @%p0 atom", "@%p0 atom"),
        ("[%rd1], 1; @%p0 fence.acq_rel.gpu;", "[%rd1], 1;"),
        ("bar.sync 0;\n    @%p0 fence", "@%p0 fence"),
        ("bar.sync 0; ld.shared.b32 %r6, [%r9];", "ld.shared.b32 %r6, [%r9];"),
    ],
    ids=[
        "counter not reset for the next launch",
        "no release",
        "no acquire",
        "others not waited for",
        "no wait",
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_the_last_cta_are_found(edit: tuple[str, str], seed: int | None) -> None:
    assert LAST.count(edit[0]) == 1
    with pytest.raises(RaceError):
        sum_twice(LAST.replace(*edit), seed)


# --- the async proxy ------------------------------------------------------------

MBARRIER = "@%p0 mbarrier.init.shared.b64 [%r9], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
FETCH = """@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 256;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%rd0], 256, [%r9];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0; @!%p9 bra WAIT;
    mad.lo.u32 %r11, %r0, 4, %r10; ld.shared.b32 %r3, [%r11]; st.global.b32 [%rd4], %r3;"""
SEND = """mad.lo.u32 %r11, %r0, 4, %r10; st.shared.b32 [%r11], %r2; fence.proxy.async.shared::cta; bar.sync 0;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r10], 256; @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group 0; @%p0 st.release.gpu.global.b32 [%rd1], 1;"""
PUBLISHED = f"{DATA} fence.proxy.async.global; bar.sync 0; @%p0 st.release.gpu.global.b32 [%rd1], 1;"
START = f"mov.b32 %r9, smem; add.u32 %r10, %r9, 256; {MBARRIER}"


def started(code: str) -> str:
    return code.replace(ADDRESSES, ADDRESSES + START)


def by_copies(write: str, read: str, seed: int | None) -> np.ndarray:
    return run(started(pass_on(write, read)), seed, shared=1024)


ACQUIRE = READERS["acquire"]
COPIES = {
    "fetched": (PUBLISHED, ACQUIRE + FETCH),
    "fetched, all published": (PUBLISHED.replace("async.global", "async"), ACQUIRE + FETCH),
    "published by the reader": (WRITERS["release"], ACQUIRE + "fence.proxy.async.global;" + FETCH),
    "sent": (SEND, ACQUIRE + "ld.global.b32 %r3, [%rd3]; st.global.b32 [%rd4], %r3;"),
    "sent and fetched": (SEND, ACQUIRE + FETCH),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_copies_hand_data_to_another_cta(name: str, seed: int | None) -> None:
    assert by_copies(*COPIES[name], seed).tolist() == list(range(100, 100 + THREADS))


SENT = "@%p0 cp.async.bulk.wait_group 0; @%p0 st.release.gpu.global.b32 [%rd1], 1;"
SENT_AFTER = "@%p0 st.release.gpu.global.b32 [%rd1], 1; @%p0 cp.async.bulk.wait_group 0;"
COPY_FAULTS = {
    "not published": ("fetched", "fence.proxy.async.global;", "", MissingProxyFence),
    "published in shared memory": ("fetched", "async.global", "async.shared::cta", MissingProxyFence),
    "published before it is written": (
        "fetched", f"{DATA} fence.proxy.async.global;", f"fence.proxy.async.global; {DATA}", MissingProxyFence
    ),
    "published by the reader too early": (
        "published by the reader",
        ACQUIRE + "fence.proxy.async.global;",
        "fence.proxy.async.global;" + ACQUIRE,
        MissingProxyFence,
    ),
    "fetched without a flag": ("fetched", ACQUIRE, "bar.sync 0;", RaceError),
    "sent, and not waited for": ("sent", SENT, SENT_AFTER, RaceError),
    "sent, and waited for its reading": ("sent", "wait_group 0", "wait_group.read 0", RaceError),
    "sent without a flag": ("sent", ACQUIRE, "bar.sync 0;", RaceError),
}  # fmt: skip


@pytest.mark.parametrize("name", COPY_FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_copies_are_found(name: str, seed: int | None) -> None:
    subject, old, new, error = COPY_FAULTS[name]
    write, read = COPIES[subject]
    assert (write + read).count(old) == 1
    with pytest.raises(RaceError, match="array 0") as caught:
        by_copies(write.replace(old, new), read.replace(old, new), seed)
    assert type(caught.value) is error


GIVEN_UP = f"""{START} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 256;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%rd0], 256, [%r9];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0; @!%p9 bra WAIT;
    {DATA} bar.sync 0; LATE: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0; @!%p9 bra LATE;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_fetched_is_overwritten_afterwards(seed: int | None) -> None:
    run(ADDRESSES + GIVEN_UP, seed, ctas=1, shared=1024)
    with pytest.raises(RaceError, match=r"array 0, which .* in the same kernel"):
        run(ADDRESSES + re.sub("WAIT: .*", "", GIVEN_UP), seed, ctas=1, shared=1024)


# --- kernels ahead in the stream ------------------------------------------------------------


def test_who_meets_a_warp_that_waited_for_earlier_kernels_may_touch_memory() -> None:
    code = f"""{ADDRESSES} setp.lt.u32 %p4, %r0, 32; @!%p4 bra MEET; griddepcontrol.wait;
MEET: bar.sync 0; {DATA}"""
    arrays = [np.zeros(THREADS, np.uint32) for _ in range(3)]
    launch(entry(code, 3), arrays, block=THREADS, overlaps=True)
    assert arrays[0].tolist() == list(range(100, 100 + THREADS))
    for late in (
        code.replace("bar.sync 0;", ""),
        code.replace("bar.sync 0;", "ld.global.b32 %r3, [%rd3]; bar.sync 0;"),
    ):
        with pytest.raises(RaceError, match=r"before griddepcontrol\.wait"):
            launch(entry(late, 3), arrays, block=THREADS, overlaps=True)
