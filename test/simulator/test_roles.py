"""The words for warps in messages: right from a warp's first instruction on, and never a guess."""

from __future__ import annotations

import re

import pytest

from cute_backend.runtime.compiling.compile import SYMBOL
from cute_backend.simulator.host import HostProgram
from cute_backend.simulator.simulation_errors import Deadlock
from support.simulator.mutants import COOPERATIVE, MASKED, ONE, PAIR, PING_PONG, STAGED, InPtx, Subject, built
from support.simulator.ptx_entries import entry, launch

EARLY = InPtx(r"(?s)\A(.*?)(mov\.u32\s+%r\d+, %tid\.x;)", r"\1bar.sync 9, 992; \2")
"""A barrier that never fills, before any warp has done anything that could tell what it is for."""


def roles_in(error: str) -> dict[tuple[int, str], str]:
    """The word that a deadlock has for each warp, by its number and CTA."""
    lines = re.findall(r"^  (\S* ?)warp (\d+) of (CTA \(\d+, \d+, \d+\)).*PTX line", error, re.M)
    return {(int(number), cta): role.strip() for role, number, cta in lines}


def stuck(subject: Subject) -> dict[tuple[int, str], str]:
    kernel = built(subject.kernel)
    program = HostProgram(EARLY.apply(kernel.ptx), kernel.host_object, SYMBOL)
    with pytest.raises(Deadlock, match=r"bar\.sync 9(.|\n)* threads have arrived") as caught:
        subject.check(program, seed=1)
    return roles_in(str(caught.value))


BLACKWELL = ["epilogue"] * 4 + ["mma", "tma", "staging"]


@pytest.mark.parametrize(
    ("subject", "roles"),
    [
        (ONE, [*BLACKWELL, "tma"]),
        (MASKED, BLACKWELL),
        (COOPERATIVE, ["tma", "tma", "", ""] + ["wgmma"] * 8),
        (PING_PONG, ["tma", "tma", "staging", ""] + ["wgmma"] * 8),
        (STAGED, ["tma", "tma", "staging", ""] + ["wgmma"] * 8),
    ],
    ids=["one", "masked", "cooperative", "ping-pong", "staged"],
)
def test_a_deadlock_before_the_first_load_has_the_right_words(subject, roles):
    assert stuck(subject) == {(warp, "CTA (0, 0, 0)"): role for warp, role in enumerate(roles)}


def test_of_a_pair_only_the_even_cta_multiplies():
    even, odd = [*BLACKWELL, "tma"], ["epilogue"] * 4 + ["", "tma", "staging", "tma"]
    assert stuck(PAIR) == {
        (warp, f"CTA ({cta}, 0, 0)"): role
        for cta, roles in enumerate([even, odd])
        for warp, role in enumerate(roles)
    }


START = "mov.u32 %r0, %tid.x; shr.u32 %r2, %r0, 5; shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;"
LOAD = (
    "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%r9], [%rd0, {%r9}], [%r9];"
)
MULTIPLY = "tcgen05.mma.cta_group::1.kind::f16 [%r9], %rd0, %rd0, %r9, %p9;"
READ = "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r9, [%r9];"
STORE = "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd0, {%r9}], [%r9];"


def words(code: str, block: int) -> list[str]:
    """The words for the warps of a block that waits for ever before `code`."""
    with pytest.raises(Deadlock) as caught:
        launch(entry(f"bar.sync 9, 992; {START} {code}", 0, shared=64), [], block=block)
    return list(roles_in(str(caught.value)).values())


def test_a_warp_that_can_come_to_several_things_has_all_their_names():
    code = f"setp.ne.u32 %p0, %r1, 0; @%p0 bra READ; {LOAD} {MULTIPLY} READ: {READ}"
    assert words(code, block=64) == ["tma+mma+epilogue", "epilogue"]


def test_a_branch_that_the_number_does_not_decide_is_followed_both_ways():
    code = f"ld.shared.b32 %r3, [smem]; setp.ne.u32 %p0, %r3, 0; @%p0 bra END; {MULTIPLY} END:"
    assert words(code, block=64) == ["mma", "mma"]
    # A register with two writers means different things in different places.
    code = f"mov.b32 %r3, 1; mov.b32 %r3, %r2; setp.ne.u32 %p0, %r3, 0; @%p0 bra END; {MULTIPLY} END:"
    assert words(code, block=64) == ["mma", "mma"]


def test_guards_indexed_branches_and_exits():
    assert words(f"setp.eq.u32 %p0, %r1, 1; @%p0 {STORE}", block=64) == ["", "store"]
    assert words(f"setp.eq.u32 %p0, %r1, 1; @!%p0 exit; {MULTIPLY}", block=64) == ["", "mma"]
    code = f"""
    TABLE: .branchtargets A0, A1, A2;
    brx.idx %r1, TABLE;
A0: {MULTIPLY} exit;
A1: {STORE} exit;
A2:
    """
    assert words(code, block=96) == ["mma", "store", ""]


def test_lanes_that_a_block_lacks_come_to_nothing():
    assert words(f"setp.lt.u32 %p0, %r0, 40; @%p0 bra END; {MULTIPLY} END:", block=40) == ["", ""]
    assert words(f"setp.lt.u32 %p0, %r0, 40; @%p0 bra END; {MULTIPLY} END:", block=64) == ["", "mma"]


def test_whoever_brings_from_global_to_shared_memory_is_staging():
    code = "setp.eq.u32 %p0, %r1, 0; @%p0 ld.global.nc.b32 %r3, [%rd0]; st.shared.b32 [smem], %r3;"
    assert words(code, block=64) == ["staging", ""]
