"""Named barriers, mbarriers, cluster barriers: what they order, what they count, what is said when they
stand.
"""

from __future__ import annotations

import numpy as np
import pytest

from cute_backend.simulator.simulation_errors import BarrierError, Deadlock, IllegalAccess, RaceError
from support.simulator.ptx_entries import entry, launch

SEEDS = [None, 1, 2, 3]

START = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %warpid; mov.b32 %r2, smem; mov.u32 %r3, %cluster_ctarank;
    ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd1, %r0, 4, %rd0;
    setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0;
"""


def run(code: str, out: np.ndarray, seed: int | None = None, block: int = 64, **options: object) -> None:
    launch(entry(START + code, 1, shared=8192), [out], block=block, seed=seed, **options)


# --- named barriers ------------------------------------------------------------

REVERSE = """
    mad.lo.u32 %r9, %r0, 4, %r2; st.shared.b32 [%r9+1024], %r0;
    {barrier}
    sub.u32 %r10, 63, %r0; mad.lo.u32 %r9, %r10, 4, %r2; ld.shared.b32 %r11, [%r9+1024];
    st.global.b32 [%rd1], %r11;
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.cta.sync.aligned 3, 64;", "barrier.sync 1, 64;"])
def test_a_barrier_hands_shared_memory_on(barrier: str, seed: int | None) -> None:
    out = np.zeros(64, np.uint32)
    run(REVERSE.format(barrier=barrier), out, seed)
    assert out.tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize("barrier", ["", "bar.warp.sync -1;", "bar.sync 1, 32;"])
@pytest.mark.parametrize("seed", SEEDS)
def test_without_it_the_read_is_a_race_whatever_the_timing(barrier: str, seed: int | None) -> None:
    code = barrier if "32" not in barrier else "add.u32 %r20, %r1, 1; bar.sync %r20, 32;"
    with pytest.raises(RaceError) as caught:
        run(REVERSE.format(barrier=code), np.zeros(64, np.uint32), seed)
    message = str(caught.value)
    assert "never written" in message or (
        "written by warp" in message and "warp" in message.split("reads")[0]
    )


def test_overwriting_what_others_still_read_is_a_race() -> None:
    code = REVERSE.format(barrier="bar.sync 0;") + "mad.lo.u32 %r9, %r0, 4, %r2; st.shared.b32 [%r9+1024], 0;"
    with pytest.raises(RaceError, match=r"may still be reading|, written by warp"):
        run(code, np.zeros(64, np.uint32))


@pytest.mark.parametrize("seed", SEEDS)
def test_arrive_and_sync_make_a_producer_and_a_consumer(seed: int | None) -> None:
    out = np.zeros(64, np.uint32)
    code = """
    @!%p1 bra CONSUMER;
    mad.lo.u32 %r9, %r0, 4, %r2; st.shared.b32 [%r9+1024], 5; bar.arrive 2, 64; bra END;
CONSUMER:
    bar.sync 2, 64; mad.lo.u32 %r9, %r0, 4, %r2; ld.shared.b32 %r4, [%r9+896]; st.global.b32 [%rd1], %r4;
END:
    """
    run(code, out, seed)
    assert out.tolist() == [0] * 32 + [5] * 32


def test_reductions_over_a_barrier() -> None:
    out = np.zeros(64, np.uint32)
    code = """
    setp.lt.u32 %p3, %r0, 40; bar.red.popc.u32 %r4, 1, 64, %p3; bar.red.and.pred %p4, 1, 64, %p3;
    bar.red.or.pred %p5, 1, %p3; @%p4 add.u32 %r4, %r4, 100; @%p5 add.u32 %r4, %r4, 1000;
    st.global.b32 [%rd1], %r4;
    """
    run(code, out)
    assert out.tolist() == [1040] * 64


def test_counts_that_do_not_fit() -> None:
    with pytest.raises(BarrierError, match=r"expects 64 threads.*expected 96"):
        run("selp.u32 %r4, 96, 64, %p1; bar.sync 1, %r4;", np.zeros(64, np.uint32))
    with pytest.raises(BarrierError, match="multiples of 32"):
        run("bar.sync 1, 40;", np.zeros(64, np.uint32))


def test_a_barrier_that_stands_is_told_by_warp_line_and_counts() -> None:
    with pytest.raises(Deadlock) as caught:
        run("@%p1 bra END;\nbar.sync 3, 64;\nEND:", np.zeros(64, np.uint32))
    message = str(caught.value)
    assert "warp 1 of CTA (0, 0, 0), PTX line" in message
    assert "barrier 3 of CTA (0, 0, 0): 32 of 64 threads have arrived" in message


# --- mbarriers ------------------------------------------------------------

INIT = "@%p0 mbarrier.init.shared.b64 [%r2], {count}; bar.sync 0;"
WAIT = """
{label}: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], {parity}; @!%p9 bra {label};
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_alternate(seed: int | None) -> None:
    out = np.zeros(64, np.uint32)
    # Ten rounds: warp 0 writes, all wait; warp 1 reads; a barrier keeps the next write behind the reads.
    code = (
        INIT.format(count=32)
        + """
    mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0;
ROUND:
    @!%p1 bra WAIT;
    mad.lo.u32 %r9, %r0, 4, %r2; st.shared.b32 [%r9+1024], %r5; mbarrier.arrive.shared.b64 %rd9, [%r2];
WAIT: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], %r6; @!%p9 bra WAIT;
    @%p1 bra NEXT;
    mad.lo.u32 %r9, %r0, 4, %r2; ld.shared.b32 %r10, [%r9+896]; add.u32 %r7, %r7, %r10;
NEXT:
    bar.sync 1; xor.b32 %r6, %r6, 1; add.u32 %r5, %r5, 1; setp.lt.u32 %p8, %r5, 10; @%p8 bra ROUND;
    st.global.b32 [%rd1], %r7;
    """
    )
    run(code, out, seed)
    assert out.tolist() == [0] * 32 + [45] * 32


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_for_the_wrong_phase_is_a_race(seed: int | None) -> None:
    code = (
        INIT.format(count=1)
        + "@%p0 st.shared.b32 [%r2+64], 3; @%p0 mbarrier.arrive.shared.b64 _, [%r2];"
        + WAIT.format(label="W", parity=1)
        + "@!%p1 ld.shared.b32 %r4, [%r2+64];"
    )
    with pytest.raises(RaceError):
        run(code, np.zeros(64, np.uint32), seed)


def test_tokens_and_test_wait() -> None:
    out = np.zeros(64, np.uint32)
    code = (
        INIT.format(count=64)
        + """
    mbarrier.arrive.shared.b64 %rd9, [%r2];
SPIN: mbarrier.test_wait.shared.b64 %p9, [%r2], %rd9; @!%p9 bra SPIN;
    st.global.b32 [%rd1], 1;
    """
    )
    run(code, out)
    assert out.tolist() == [1] * 64


def test_transactions_hold_a_phase_open() -> None:
    code = (
        INIT.format(count=1)
        + """
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 48;
    @%p0 mbarrier.complete_tx.shared::cta.relaxed.cluster.b64 [%r2], 32;
    """
        + WAIT.format(label="W", parity=0)
    )
    with pytest.raises(Deadlock) as caught:
        run(code, np.zeros(64, np.uint32))
    assert "phase 0 (parity 0) has 1 of 1 arrivals, 16 bytes of transactions outstanding" in str(caught.value)


def test_arrivals_that_lack_and_arrivals_too_many() -> None:
    lacking = (
        INIT.format(count=3) + "@%p0 mbarrier.arrive.shared.b64 _, [%r2];" + WAIT.format(label="W", parity=0)
    )
    with pytest.raises(Deadlock, match=r"parity 0 of the mbarrier at shared .* has 1 of 3 arrivals"):
        run(lacking, np.zeros(64, np.uint32))
    with pytest.raises(BarrierError, match="more than it expects"):
        run(INIT.format(count=3) + "@%p0 mbarrier.arrive.shared.b64 _, [%r2], 4;", np.zeros(64, np.uint32))


def test_arrive_drop_expects_one_less() -> None:
    code = (
        INIT.format(count=2)
        + """
    @%p0 mbarrier.arrive_drop.shared.b64 _, [%r2]; @%p0 mbarrier.arrive.shared.b64 _, [%r2];
    """
        + WAIT.format(label="A", parity=0)
        + """
    bar.sync 0; @%p0 mbarrier.arrive.shared.b64 _, [%r2];
    """
        + WAIT.format(label="B", parity=1)
    )
    run(code, np.zeros(64, np.uint32))


def test_a_barrier_must_be_initialised_and_known_to_be() -> None:
    with pytest.raises(BarrierError, match="no mbarrier was initialised"):
        run("mbarrier.arrive.shared.b64 _, [%r2];", np.zeros(64, np.uint32))
    code = INIT.format(count=64).replace("bar.sync 0;", "") + "mbarrier.arrive.shared.b64 _, [%r2];"
    with pytest.raises((RaceError, BarrierError), match="initialised"):
        run(code, np.zeros(64, np.uint32))


def test_an_mbarrier_is_initialised_once() -> None:
    again = INIT.format(count=1) + "{} @%p0 mbarrier.init.shared.b64 [%r2], 1;"
    with pytest.raises(
        BarrierError, match=r"which warp 0 .* has initialised; mbarrier\.inval must come first"
    ):
        run(again.format(""), np.zeros(64, np.uint32))
    run(again.format("@%p0 mbarrier.inval.shared.b64 [%r2];"), np.zeros(64, np.uint32))


def test_an_mbarrier_is_not_ordinary_memory_until_invalidated() -> None:
    with pytest.raises(RaceError, match="an mbarrier object"):
        run(INIT.format(count=1) + "ld.shared.b32 %r4, [%r2];", np.zeros(64, np.uint32))
    run(
        INIT.format(count=1) + "@%p0 mbarrier.inval.shared.b64 [%r2]; @%p0 st.shared.b32 [%r2], 1;",
        np.zeros(64, np.uint32),
    )


# --- clusters ------------------------------------------------------------

PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
SWAP = """
    mad.lo.u32 %r9, %r0, 4, %r2; mad.lo.u32 %r10, %r3, 1000, %r0; st.shared.b32 [%r9+1024], %r10;
    {arrive} {wait}
    xor.b32 %r11, %r3, 1; mapa.shared::cluster.u32 %r12, %r9, %r11; ld.shared::cluster.b32 %r13, [%r12+1024];
    mad.wide.u32 %rd1, %r3, 256, %rd1; st.global.b32 [%rd1], %r13;
    barrier.cluster.arrive; barrier.cluster.wait;
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "arrive",
    [
        "barrier.cluster.arrive.release.aligned;",
        "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;",
    ],
)
def test_distributed_shared_memory_across_a_cluster_barrier(arrive: str, seed: int | None) -> None:
    out = np.zeros(128, np.uint32)
    run(SWAP.format(arrive=arrive, wait="barrier.cluster.wait.acquire.aligned;"), out, seed, **PAIR)
    assert out.tolist() == [1000 + i for i in range(64)] + list(range(64))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("arrive", "wait"), [("", ""), ("barrier.cluster.arrive.relaxed;", "barrier.cluster.wait;")]
)
def test_a_relaxed_arrival_orders_nothing(arrive: str, wait: str, seed: int | None) -> None:
    with pytest.raises(RaceError):
        run(SWAP.format(arrive=arrive, wait=wait), np.zeros(128, np.uint32), seed, **PAIR)


def test_a_cta_must_not_leave_while_others_read_its_memory() -> None:
    code = (
        SWAP.format(arrive="barrier.cluster.arrive;", wait="barrier.cluster.wait;")
        .replace(
            "xor.b32",
            "setp.eq.u32 %p7, %r3, 1; @%p7 bra END; mov.b32 %r20, 0;\nPAUSE: add.u32 %r20, %r20, 1;"
            "setp.lt.u32 %p8, %r20, 2000; @%p8 bra PAUSE; xor.b32",
        )
        .rsplit("barrier.cluster.arrive", 1)[0]
        + "END:"
    )
    with pytest.raises(IllegalAccess, match="all of whose warps have exited"):
        run(code, np.zeros(128, np.uint32), **PAIR)


REMOTE = """
    @%p0 mbarrier.init.shared.b64 [%r2], 2; {fence}
    barrier.cluster.arrive{relaxed}; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r9, %r2, 0;
    @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];
    setp.eq.u32 %p7, %r3, 1; @%p7 bra END;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p9, [%r2], 0; @!%p9 bra WAIT;
    st.global.b32 [%rd1], 9;
END:
    barrier.cluster.arrive; barrier.cluster.wait;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_remote_arrivals(seed: int | None) -> None:
    out = np.zeros(64, np.uint32)
    run(REMOTE.format(fence="fence.mbarrier_init.release.cluster;", relaxed=".relaxed"), out, seed, **PAIR)
    assert out.tolist() == [9] * 64


def test_remote_arrivals_need_the_initialisation_fence() -> None:
    with pytest.raises(RaceError, match="initialised: no barrier"):
        run(REMOTE.format(fence="", relaxed=".relaxed"), np.zeros(64, np.uint32), **PAIR)


def test_another_ctas_barrier_can_not_be_waited_for() -> None:
    code = REMOTE.format(fence="", relaxed="").replace(
        "shared::cta.b64 %p9, [%r2]", "shared::cta.b64 %p9, [%r9+0]"
    )
    code = code.replace("mapa.shared::cluster.u32 %r9, %r2, 0", "mapa.shared::cluster.u32 %r9, %r2, 1")
    with pytest.raises(IllegalAccess, match="another CTA's"):
        run(code, np.zeros(64, np.uint32), **PAIR)


def test_arriving_twice_at_the_cluster_barrier() -> None:
    with pytest.raises(BarrierError, match="arrives twice"):
        run(
            "setp.eq.u32 %p7, %r3, 0; @%p7 barrier.cluster.arrive; barrier.cluster.arrive;",
            np.zeros(64, np.uint32),
            **PAIR,
        )
