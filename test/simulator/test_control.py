"""Divergence, loops, indexed branches, exchange between lanes, and what is said about unknown and broken
PTX.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from cute_backend.simulator.simulation_errors import (
    Deadlock,
    PtxSyntaxError,
    RaceError,
    ResourceError,
    SimulationError,
    Trap,
    UnknownOpcode,
)
from support.simulator.ptx_entries import entry, launch, one

LANES = np.arange(32, dtype=np.uint32)


def lanes(code: str, count: int = 1) -> list[np.ndarray]:
    """Runs one warp: %r0 is the lane, %r1.. are stored."""
    out = [np.zeros(32, np.uint32) for _ in range(count)]
    stores = "".join(
        f"ld.param.u64 %rd60, [p{i}]; mul.wide.u32 %rd61, %r0, 4; add.s64 %rd60, %rd60, %rd61;"
        f"st.global.b32 [%rd60], %r{i + 1};\n"
        for i in range(count)
    )
    launch(entry(f"mov.u32 %r0, %laneid;\n{code}\n{stores}", count), out)
    return out


def test_lanes_take_both_sides_and_meet_again() -> None:
    a = np.arange(512, dtype=np.int32) - 200
    code = """
    setp.lt.s32 %p0, {a}, 0;
    @%p0 bra NEGATIVE;
    and.b32 %r40, {a}, 1; setp.eq.s32 %p1, %r40, 0;
    @!%p1 bra ODD;
    mul.lo.s32 {x}, {a}, 3; bra.uni JOIN;
ODD:
    mul.lo.s32 {x}, {a}, 5; bra JOIN;
NEGATIVE:
    neg.s32 {x}, {a};
JOIN:
    add.s32 {x}, {x}, 1;
    """
    got = one(code, [a], np.int32)
    assert np.array_equal(got, np.where(a < 0, -a, np.where(a % 2 == 0, 3 * a, 5 * a)) + 1)


def test_loop_with_a_trip_count_per_lane() -> None:
    a = np.random.default_rng(0).integers(0, 60, 256).astype(np.uint32)
    code = """
    mov.b32 {x}, 0; mov.b32 %r40, 0;
LOOP:
    setp.ge.u32 %p0, %r40, {a};
    @%p0 bra DONE;
    add.u32 {x}, {x}, %r40; add.u32 %r40, %r40, 1;
    bra LOOP;
DONE:
    """
    assert np.array_equal(one(code, [a], np.uint32), a * (a - 1) // 2)


def test_collatz_diverges_and_ends() -> None:
    a = np.arange(1, 257, dtype=np.uint32)
    code = """
    mov.b32 {x}, 0; mov.b32 %r40, {a};
NEXT:
    setp.eq.u32 %p0, %r40, 1; @%p0 bra DONE;
    add.u32 {x}, {x}, 1; and.b32 %r41, %r40, 1; setp.eq.u32 %p1, %r41, 0;
    @%p1 shr.u32 %r40, %r40, 1; @%p1 bra NEXT;
    mad.lo.u32 %r40, %r40, 3, 1; bra NEXT;
DONE:
    """

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert one(code, [a], np.uint32).tolist() == [steps(int(n)) for n in a]


def test_indexed_branch() -> None:
    a = np.random.default_rng(1).integers(0, 3, 256).astype(np.uint32)
    code = """
    TABLE: .branchtargets A0, A1, A2;
    brx.idx {a}, TABLE;
A0: mov.b32 {x}, 10; bra END;
A1: mov.b32 {x}, 11; bra END;
A2: mov.b32 {x}, 12;
END:
    """
    assert np.array_equal(one(code, [a], np.uint32), a + 10)


def test_lanes_that_leave_early_are_not_waited_for() -> None:
    out = np.zeros(32, np.uint32)
    code = """
    mov.u32 %r0, %laneid; setp.ge.u32 %p0, %r0, 20; @%p0 exit;
    activemask.b32 %r1; vote.sync.ballot.b32 %r2, 1, 0xfffff; bar.warp.sync 0xffffffff;
    ld.param.u64 %rd0, [p0]; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd0, %rd0, %rd1; and.b32 %r1, %r1, %r2;
    st.global.b32 [%rd0], %r1;
    """
    launch(entry(code, 1), [out])
    assert out.tolist() == [0xFFFFF] * 20 + [0] * 12


def test_a_producer_lane_and_consumer_lanes_of_one_warp_make_progress() -> None:
    # Lanes that spin must not keep the lane that they wait for from running.
    out = np.zeros(1, np.uint32)
    code = """
    mov.u32 %r0, %laneid; ld.param.u64 %rd0, [p0]; setp.eq.u32 %p0, %r0, 31;
    mov.b32 %r9, smem; setp.eq.u32 %p3, %r0, 0; @%p3 mbarrier.init.shared.b64 [%r9], 1; bar.warp.sync -1;
    @%p0 bra PRODUCE;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r9], 0;
    @!%p1 bra WAIT;
    bra END;
PRODUCE:
    mov.b32 %r1, 7; st.global.b32 [%rd0], %r1; mbarrier.arrive.shared.b64 _, [%r9];
END:
    """
    launch(entry(code, 1, shared=64), [out])
    assert out[0] == 7


# --- exchange between lanes ------------------------------------------------------------


def test_shuffles() -> None:
    (up, down, fly, idx) = lanes(
        """
        mul.lo.u32 %r9, %r0, 100;
        shfl.sync.up.b32 %r1, %r9, 3, 0, -1; shfl.sync.down.b32 %r2|%p0, %r9, 5, 31, -1;
        shfl.sync.bfly.b32 %r3, %r9, 6, 31, -1; shfl.sync.idx.b32 %r4, %r9, 9, 0x181f, -1;
        @!%p0 add.u32 %r2, %r2, 1;
        """,
        4,
    )
    assert np.array_equal(up, np.where(LANES >= 3, LANES - 3, LANES) * 100)
    assert np.array_equal(down, np.where(LANES + 5 < 32, (LANES + 5) * 100, LANES * 100 + 1))
    assert np.array_equal(fly, (LANES ^ 6) * 100)
    # The control's upper field 0x18 cuts the warp into segments of eight lanes.
    assert np.array_equal(idx, (LANES // 8 * 8 + 1) * 100)


def test_segmented_shuffles() -> None:
    up, down = lanes(
        "shfl.sync.up.b32 %r1, %r0, 1, 0x1800, -1; shfl.sync.down.b32 %r2, %r0, 1, 0x181f, -1;", 2
    )
    assert np.array_equal(up, np.where(LANES % 8 >= 1, LANES - 1, LANES))
    assert np.array_equal(down, np.where(LANES % 8 < 7, LANES + 1, LANES))


def test_votes_match_and_election() -> None:
    ballot, flags, match, elected = lanes(
        """
        setp.lt.u32 %p0, %r0, 5; vote.sync.ballot.b32 %r1, %p0, -1;
        vote.sync.any.pred %p1, %p0, -1; vote.sync.all.pred %p2, %p0, -1; setp.ne.u32 %p3, 0, 0;
        @%p0 vote.sync.uni.pred %p3, %p0, 0x1f;
        selp.u32 %r2, 1, 0, %p1; @%p2 add.u32 %r2, %r2, 2; @%p3 add.u32 %r2, %r2, 4;
        and.b32 %r9, %r0, 3; match.any.sync.b32 %r3, %r9, -1;
        elect.sync %r10|%p4, -1; selp.u32 %r4, 1, 0, %p4;
        """,
        4,
    )
    assert ballot.tolist() == [0b11111] * 32
    assert flags.tolist() == [1 + 4] * 5 + [1] * 27
    assert match.tolist() == [0x11111111 << lane % 4 for lane in range(32)]
    assert elected.tolist() == [1] + [0] * 31


@pytest.mark.parametrize(
    "code",
    [
        "elect.sync %r9|%p1, 0xfffffffe;",
        "bar.warp.sync 0xfffffffe;",
        "shfl.sync.idx.b32 %r9, %r0, 1, 31, 0xfffe;",
    ],
)
def test_lanes_that_a_membermask_leaves_out(code: str) -> None:
    with pytest.raises(SimulationError, match=r"sync\S* in lanes \[0.* membermask 0xf+e leaves out"):
        lanes(f"{code} mov.b32 %r1, 0;")


REGISTERS = """
    mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 128; @%p0 bra GIVE;
    setmaxnreg.inc.sync.aligned.u32 {more}; bra END;
GIVE: setmaxnreg.dec.sync.aligned.u32 {less};
END:
"""


def register_pool(more: int, less: int, directives: str = ".reqntid 384, 1, 1\n.minnctapersm 1\n") -> None:
    """A warpgroup gives registers and two take some: of 168 a thread, if the directives are those."""
    text = entry(REGISTERS.format(more=more, less=less), 0, target="sm_90a").replace(
        ")\n{", f")\n{directives}{{"
    )
    launch(text, [], block=384, seed=1)


def test_registers_go_from_warpgroup_to_warpgroup() -> None:
    register_pool(232, 40)
    register_pool(256, 24, directives="")  # what ptxas ignores
    with pytest.raises(
        Deadlock, match="waits for 240 registers per thread, 2304 more for the warp; the pool of"
    ):
        register_pool(240, 40)
    with pytest.raises(Deadlock, match="224 registers per thread"):
        register_pool(224, 80)
    with pytest.raises(ResourceError, match=r"inc\S* 100: multiples of 8"):
        register_pool(100, 40)
    with pytest.raises(ResourceError, match=r"inc\S* 64, but a thread of warp \d+ .* has 168"):
        register_pool(64, 200)


def test_election_among_the_members_that_are_there() -> None:
    (elected,) = lanes(
        """
        mov.b32 %r1, 0; setp.lt.u32 %p0, %r0, 7; @%p0 bra END;
        elect.sync %r9|%p1, 0xffffff80; selp.u32 %r1, 1, 0, %p1;
        END:
        """
    )
    assert elected.tolist() == [0] * 7 + [1] + [0] * 24


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("add.u32", sum(range(32))), ("max.s32", 31), ("min.u32", 0), ("xor.b32", 0), ("or.b32", 31)],
)
def test_redux(name: str, wanted: int) -> None:
    (got,) = lanes(f"redux.sync.{name} %r1, %r0, -1;")
    assert got.tolist() == [wanted] * 32


def test_special_registers() -> None:
    out = np.zeros(2 * 2 * 64, np.uint32)
    code = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %nctaid.x;
    mov.u32 %r4, %ntid.x; mov.u32 %r5, %cluster_ctarank; mov.u32 %r6, %clusterid.x; mov.u32 %r7, %warpid;
    mad.lo.u32 %r8, %r1, %r4, %r0; mad.lo.u32 %r9, %r2, 64, %r8;
    mad.lo.u32 %r10, %r5, 10, %r6; mad.lo.u32 %r10, %r7, 100, %r10; mad.lo.u32 %r10, %r3, 1000, %r10;
    ld.param.u64 %rd0, [p0]; mul.wide.u32 %rd1, %r9, 4; add.s64 %rd0, %rd0, %rd1; st.global.b32 [%rd0], %r10;
    """
    launch(entry(code, 1), [out], block=(16, 4, 1), grid=(4, 1, 1), cluster=(2, 1, 1))
    wanted = [4000 + 100 * (t // 32) + 10 * (cta % 2) + cta // 2 for cta in range(4) for t in range(64)]
    assert out.tolist() == wanted


# --- what goes wrong ------------------------------------------------------------


def test_an_unknown_opcode_names_itself_and_where_to_add_it() -> None:
    with pytest.raises(UnknownOpcode, match=r"frobnicate\.f32.*PTX line.*simulator/isa"):
        launch(entry("frobnicate.f32 %r0, %r1;", 0), [])


def test_an_unknown_form_of_a_known_opcode_names_its_binder() -> None:
    with pytest.raises(UnknownOpcode, match=r"tcgen05\.mma.*bind_mma"):
        launch(entry("tcgen05.mma.ws.cta_group::1.kind::f16 [%r0], %rd0, %rd1, %r1, %p0;", 0), [])


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("add.s32 %r0, %nosuch, 1;", "not declared|not modelled"),
        ("add.s32 %rd0, %r1, 1;", "64 bits.*s32"),
        ("bra NOWHERE;", "target"),
        ("mov.b32 %r0, nothing;", "not declared"),
    ],
)
def test_broken_ptx_names_the_line(code: str, error: str) -> None:
    with pytest.raises((PtxSyntaxError, UnknownOpcode), match=error):
        launch(entry(code, 0), [])


def test_trap_names_warp_and_line() -> None:
    with pytest.raises(Trap) as caught:
        launch(entry("mov.u32 %r0, %ctaid.x; setp.eq.u32 %p0, %r0, 1;\n @%p0 trap;", 0), [], grid=(2, 1, 1))
    assert "CTA (1, 0, 0)" in str(caught.value) and "trap" in str(caught.value)


def test_errors_name_the_line_of_the_source_where_the_ptx_has_it() -> None:
    text = entry(".loc 3 17 5\n mov.b32 %r0, 1;\n .loc 3 21 9\n trap;", 0)
    text += '\n.file 3 "/some/where/kernel.py"\n'
    with pytest.raises(Trap, match=r"PTX line \d+ \(kernel\.py:21\): trap"):
        launch(text, [])


def test_launches_that_cannot_be() -> None:
    text = entry("", 0)
    with pytest.raises(ResourceError, match="2048 threads"):
        launch(text, [], block=2048)
    with pytest.raises(ResourceError, match="multiple of the cluster"):
        launch(text, [], grid=(3, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(ResourceError, match="bytes of shared memory"):
        launch(text, [], smem_bytes=300_000)
    with pytest.raises(SimulationError, match="declares 1"):
        launch(entry("", 1), [])


def test_a_spin_without_effect_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="spins without effect"):
        launch(entry("FOREVER: bra FOREVER;", 0), [])


@pytest.mark.parametrize(("last", "ends"), [("st.release.gpu.global.b32 [%rd0], 1;", True), ("", False)])
def test_a_spin_for_one_that_computes_long_is_none(last: str, ends: bool) -> None:
    """Until that one, too, has nothing more to do."""
    code = f"""
    mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; ld.param.u64 %rd0, [p0]; mov.u32 %r2, 0;
    @%p0 bra SPIN;
COMPUTE: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 40000; @%p1 bra COMPUTE;
    {last}
SPIN: ld.acquire.gpu.global.b32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN;
    """
    flag = np.zeros(1, np.uint32)
    with nullcontext() if ends else pytest.raises(Deadlock, match="spins without effect"):
        launch(entry(code, 1), [flag], block=64)
    assert flag[0] == ends


def test_lanes_that_never_come_are_named() -> None:
    code = """
    mov.u32 %r0, %laneid; setp.lt.u32 %p0, %r0, 3;
    @%p0 bra SELF;
    shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;
    ret;
SELF:
    shfl.sync.idx.b32 %r2, %r0, 0, 31, -1;
    """
    with pytest.raises(Deadlock, match=r"lanes \[0, 1, 2\]"):
        launch(entry(code, 0), [])


@pytest.mark.parametrize("access", ["st.global.b32 [%rd0], 7;", "ld.global.b32 %r0, [%rd0];"])
def test_nothing_global_is_touched_while_earlier_kernels_may_run(access: str) -> None:
    memory = np.zeros(1, np.uint32)
    address = "ld.param.u64 %rd0, [p0];"
    with pytest.raises(RaceError, match=r"before griddepcontrol\.wait"):
        launch(entry(f"{address} griddepcontrol.launch_dependents; {access}", 1), [memory], overlaps=True)
    assert memory[0] == 0
    launch(entry(f"{address} griddepcontrol.wait; st.global.b32 [%rd0], 7;", 1), [memory], overlaps=True)
    assert memory[0] == 7


@pytest.mark.parametrize("seed", range(1, 9))
def test_lanes_that_end_leave_others_waiting(seed: int) -> None:
    """Whichever lanes of a warp come to the barrier last."""
    code = """mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 9; @%p0 bra FEW; barrier.sync 1, 64; ret;
    FEW: barrier.sync 1, 64;"""
    launch(entry(code, 0), [], block=64, seed=seed)
