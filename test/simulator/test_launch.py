"""Clusters that wait for later ones, or take over their work; progress and the report."""

from __future__ import annotations

import numpy as np
import pytest

from cute_backend.simulator import turns
from cute_backend.simulator.machine import RESIDENT_CLUSTERS
from cute_backend.simulator.opcodes import TABLE
from cute_backend.simulator.report import Recorder
from cute_backend.simulator.simulation_errors import Deadlock, Runaway
from support.simulator.ptx_entries import entry, launch

SEEDS = [None, 1, 2, 3]

STAND_IN = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r4, %cluster_ctarank; mov.b32 %r2, smem;
    ld.param.u64 %rd0, [p0]; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r4, 0; and.pred %p2, %p0, %p1;
    @%p0 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.b32 %r5, 0;
WORK:
    mad.wide.u32 %rd1, %r1, 4, %rd0; @%p0 red.global.add.u32 [%rd1], 1;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
    barrier.cluster.arrive; barrier.cluster.wait;
    add.u32 %r6, %r2, 16;
    @%p2 CANCEL [%r6], [%r2];
WAIT: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], %r5; @!%p9 bra WAIT;
    ld.shared.b128 %rq0, [%r2+16]; fence.proxy.async.shared::cta;
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %rq0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r8, %r9, _}, %rq0;
    add.u32 %r1, %r1, %r4; xor.b32 %r5, %r5, 1;
    @%p3 bra WORK;
    barrier.cluster.arrive; barrier.cluster.wait;
"""

CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_stand_in_for_those_that_have_not_started(seed: int | None) -> None:
    out = np.zeros(40, np.uint32)
    text = STAND_IN.replace("CANCEL", CANCEL + ".multicast::cluster::all.b128")
    report = launch(entry(text, 1, shared=64), [out], grid=(40, 1, 1), cluster=(2, 1, 1), seed=seed)
    assert out.tolist() == [1] * 40
    assert sum(role.warps for role in report.roles.values()) < 40


def test_a_grid_wide_barrier_finds_all_its_clusters_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "IDLE_LIMIT", 10_000)  # no warp of this kernel computes for long
    monkeypatch.setattr(turns, "SPIN_LIMIT", 2_000)
    arrivals = np.zeros(1, np.uint32)
    code = """
    mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; ld.param.u64 %rd0, [p0];
    @%p0 red.release.gpu.global.add.u32 [%rd0], 1;
SPIN: ld.acquire.gpu.global.b32 %r1, [%rd0]; setp.lt.u32 %p1, %r1, COUNT; @%p1 bra SPIN;
    """
    launch(entry(code.replace("COUNT", "6"), 1), [arrivals], grid=(6, 1, 1))
    assert arrivals[0] == 6 > RESIDENT_CLUSTERS
    with pytest.raises(Deadlock, match="spins without effect"):
        launch(entry(code.replace("COUNT", "7"), 1), [np.zeros(1, np.uint32)], grid=(3, 1, 1))


def test_progress_and_report() -> None:
    seen: list[tuple[int, ...]] = []
    recorder = Recorder()
    out = np.zeros(64, np.uint32)
    code = """
    mov.u32 %r0, %tid.x; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 4, %rd0;
    setp.lt.u32 %p0, %r0, 32; @%p0 bra END; st.relaxed.gpu.global.b32 [%rd0], 1;
END: bar.sync 0;
    """
    report = launch(
        entry(code, 1), [out], block=64, grid=(5, 1, 1), progress=lambda *p: seen.append(p), observer=recorder
    )
    assert [told[:2] for told in seen] == [(i, 5) for i in range(1, 6)]
    (role,) = report.roles.values()
    assert (role.role, role.warps) == ("other", 10)
    # Per CTA: 7 for both warps (bar.sync and ret included), the store for one of them.
    assert report.instructions == role.instructions == 5 * (2 * 7 + 1)
    assert role.opcodes["st.relaxed.gpu.global.b32"] == 5
    assert role.bytes == {"st.global": 5 * 32 * 4}
    assert role.waits["bar.sync"] == len(recorder.waits) == 5
    assert all(start <= end and text == "bar.sync 0" for *_, text, start, end in recorder.waits)


def test_every_row_of_the_table_names_its_section_and_meaning() -> None:
    assert len(TABLE) > 120
    for name, row in TABLE.items():
        assert row.section.startswith("9."), name
        assert row.meaning, name


def test_a_loop_without_an_end_is_stopped() -> None:
    out = np.zeros(1, np.uint32)
    # It goes on doing things that another warp could wait for: no deadlock.
    code = "ld.param.u64 %rd0, [p0]; AGAIN: st.global.b32 [%rd0], 1; bra AGAIN;"
    with pytest.raises(Runaway, match=r"where 5000 are more than enough(.|\n)*warp 0 of CTA(.|\n)* runs$"):
        launch(entry(code, 1), [out], most_instructions=5000)
    launch(entry("ld.param.u64 %rd0, [p0]; st.global.b32 [%rd0], 1;", 1), [out], most_instructions=5000)
