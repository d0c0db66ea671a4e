"""mma.sync, and the copies and matrices that bring its operands: every form against arithmetic of its own,
and what goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_backend.simulator.report import Recorder
from cute_backend.simulator.simulation_errors import IllegalAccess, RaceError, UnknownOpcode
from support.simulator.ptx_entries import entry, launch

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
}
RANGES = {"s8": (-128, 128), "u8": (0, 256), "s32": (-(2**29), 2**29)}
"""The values that are drawn of integers; of other types they are -4 to 4."""
SEEDS = [None, 1, 2, 3]


def raw(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as the bytes of a type, by torch's conversion."""
    return torch.from_numpy(values).to(TORCH[kind]).view(torch.uint8).numpy()


def product(kinds: str, k: int, **changes: str) -> tuple[np.ndarray, np.ndarray]:
    """D as a warp computes it, whose lanes fetch each element by the formulas of the ISA's tables, and
    A @ B + C."""
    a_kind, b_kind = kinds.split(".")
    generator = np.random.default_rng(k)
    sums, sum_type = ("s32", np.int32) if a_kind in ("s8", "u8") else ("f32", np.float32)
    a, b, c = (
        generator.integers(*RANGES.get(kind, (-4, 5)), shape)
        for kind, shape in [(a_kind, (16, k)), (b_kind, (k, 8)), (sums, (16, 8))]
    )
    each = k // 8  # elements of a register
    lanes = np.arange(32)
    group, member = lanes // 4, lanes % 4
    a_raw, b_raw = raw(a, a_kind).reshape(16, k, -1), raw(b, b_kind).reshape(k, 8, -1)
    # Element i of A: rows by bit 1 of the register, columns by its half and the element in it.
    of_a = [
        a_raw[group + 8 * (i // each % 2), member * each + i % each + k // 2 * (i // (2 * each))]
        for i in range(4 * each)
    ]
    of_b = [b_raw[member * each + i % each + k // 2 * (i // each), group] for i in range(2 * each)]
    of_c = [c[group + 8 * (i // 2), 2 * member + i % 2].astype(sum_type) for i in range(4)]
    packed = [np.ascontiguousarray(np.stack(each, 1)).reshape(32, -1) for each in (of_a, of_b, of_c)]
    out = np.full((32, 4), -1, sum_type)
    clamped = ".satfinite" if "satfinite" in changes else ""
    instruction = f"mma.sync.aligned.m16n8k{k}.row.col{clamped}.{sums}.{kinds}.{sums}"
    body = f"""
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2]; ld.param.u64 %rd3, [p3];
    mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 16, %rd0; mad.wide.u32 %rd1, %r0, 8, %rd1;
    mad.wide.u32 %rd2, %r0, 16, %rd2; mad.wide.u32 %rd3, %r0, 16, %rd3;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd0];
    ld.global.v2.b32 {{%r14, %r15}}, [%rd1];
    ld.global.v4.b32 {{%r16, %r17, %r18, %r19}}, [%rd2];
    {changes.get("instruction", instruction)} {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}},
        {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
    st.global.v4.b32 [%rd3], {{%r20, %r21, %r22, %r23}};"""
    launch(entry(body, 4, target="sm_89"), [*packed, out])
    d = np.empty((16, 8), sum_type)
    for i in range(4):
        d[group + 8 * (i // 2), 2 * member + i % 2] = out[:, i]
    return d, a @ b + c


CASES = [("bf16.bf16", 16), ("f16.f16", 16)]
CASES += [(f"{a}.{b}", 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
CASES += [(f"{a}.{b}", 32) for a in ("s8", "u8") for b in ("s8", "u8")]


@pytest.mark.parametrize(("kinds", "k"), CASES)
def test_mma_sync_of_every_form(kinds, k):
    d, expected = product(kinds, k)
    assert np.array_equal(d, expected)


def test_sums_of_integers_wrap_or_are_clamped(monkeypatch):
    """Without .satfinite sums wrap (PTX ISA, mma)."""
    limits = np.iinfo(np.int32)
    monkeypatch.setitem(RANGES, "s32", (limits.max - 1000, limits.max))
    d, expected = product("u8.u8", 32)
    assert np.array_equal(d, expected.astype(np.int32)) and (expected > limits.max).all()
    d, expected = product("u8.u8", 32, satfinite="")
    assert np.array_equal(d, np.minimum(expected, limits.max))


@pytest.mark.parametrize(
    "instruction",
    [
        "mma.sync.aligned.m16n8k32.row.col.f32.s8.s8.f32",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.e4m3.s32",
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.e4m3.e4m3.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32",
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    ],
)
def test_other_forms_are_refused(instruction):
    with pytest.raises(UnknownOpcode):
        product("bf16.bf16", 16, instruction=instruction)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    out = np.zeros((32, count, 2), np.uint16)
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    stores = " ".join(f"st.global.b32 [%rd1+{4 * i}], %r{10 + i};" for i in range(count))
    body = f"""
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; mov.u32 %r0, %tid.x; mov.b32 %r2, smem;
    mad.lo.u32 %r2, %r0, 16, %r2; mad.wide.u32 %rd0, %r0, 16, %rd0; mad.wide.u32 %rd1, %r0, {4 * count}, %rd1;
    setp.lt.u32 %p0, %r0, {8 * count};
    @%p0 ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd0];
    @%p0 st.shared.v4.b32 [%r2], {{%r20, %r21, %r22, %r23}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r2];
    {stores}"""
    launch(entry(body, 2, shared=512, target="sm_80"), [matrices, out])
    lane = np.arange(32)
    for i in range(count):
        for half in range(2):
            row, column = lane // 4, 2 * (lane % 4) + half
            expected = matrices[i, column, row] if trans else matrices[i, row, column]
            assert np.array_equal(out[:, i, half], expected)


COPY = "cp.async.cg.shared.global [%r3], [%rd0], 16"


def copied(
    middle: str, *, stages: int = 4, size: str = "", copy: str = COPY, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """`stages` groups of one copy for each of 64 threads, `middle`, then all words of all stages by their
    neighbours in the other warp; what came, what was sent."""
    sent = np.random.default_rng(7).integers(1, 2**31, (stages, 64, 4), np.uint32)
    out = np.zeros_like(sent)
    groups = "".join(
        f"{copy}{size}; cp.async.commit_group; add.u32 %r3, %r3, 1024; add.u64 %rd0, %rd0, 1024;\n"
        for _ in range(stages)
    )
    reads = "".join(
        f"""ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r4+{1024 * i}];
        st.global.v4.b32 [%rd1+{1024 * i}], {{%r10, %r11, %r12, %r13}};"""
        for i in range(stages)
    )
    body = f"""
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; mov.u32 %r0, %tid.x; mov.b32 %r2, smem;
    mad.wide.u32 %rd0, %r0, 16, %rd0; mad.lo.u32 %r3, %r0, 16, %r2; xor.b32 %r1, %r0, 32;
    mad.wide.u32 %rd1, %r1, 16, %rd1; mad.lo.u32 %r4, %r1, 16, %r2; and.b32 %r5, %r0, 15;
    {groups} {middle} {reads}"""
    text = entry(body, 2, shared=1024 * stages, target="sm_80")
    launch(text, [sent, out], block=64, **options)
    return out, sent


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_copies_arrive_by_their_wait(seed):
    out, sent = copied("cp.async.wait_group 0; bar.sync 0;", seed=seed)
    assert np.array_equal(out, sent)
    out, sent = copied("cp.async.wait_all; bar.sync 0;", seed=seed)
    assert np.array_equal(out, sent)


def test_the_source_size_fills_with_zeros():
    out, sent = copied("cp.async.wait_group 0; bar.sync 0;", size=", %r5")
    sizes = np.arange(64) % 16
    kept = np.arange(16) < sizes[:, None]
    expected = np.where(kept, sent.view(np.uint8).reshape(-1, 64, 16), 0)
    assert np.array_equal(out.view(np.uint8).reshape(-1, 64, 16), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("middle", "message"),
    [
        ("cp.async.wait_group 1; bar.sync 0;", "written by cp.async"),  # the last group may be in flight
        ("bar.sync 0;", "written by cp.async"),
        ("cp.async.wait_group 0;", "written by cp.async"),  # each waits for its own copies
        ("bar.sync 0; cp.async.wait_group 0;", "written by cp.async"),  # the wrong way round
        ("cp.async.wait_group 4; bar.sync 0;", "written by cp.async"),
    ],
)
def test_a_wait_that_is_too_weak_is_a_race(middle, message, seed):
    with pytest.raises(RaceError, match=message):
        copied(middle, seed=seed)


AGAIN = """ld.shared.b32 %r20, [%r4]; {sync} mad.lo.u32 %r3, %r0, 16, %r2;
    cp.async.cg.shared.global [%r3], [%rd2], 16; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;"""


def test_a_stage_is_overwritten_once_all_have_read_it():
    first = "sub.u64 %rd2, %rd0, 4096; cp.async.wait_group 0; bar.sync 0;"
    out, sent = copied(first + AGAIN.format(sync="bar.sync 0;"))
    assert np.array_equal(out, sent)
    with pytest.raises(RaceError, match=r"may still be reading|written by cp\.async"):
        copied(first + AGAIN.format(sync=""))


def test_a_stage_is_not_overwritten_before_its_copies_have_come():
    first = "sub.u64 %rd2, %rd0, 4096;"
    early = "mad.lo.u32 %r3, %r0, 16, %r2; st.shared.b32 [%r3], 0; cp.async.wait_group 0; bar.sync 0;"
    with pytest.raises(RaceError, match="overwrites"):
        copied(first + early)


def test_copies_finish_in_any_order():
    orders = []
    for seed in (1, 2, 3):
        seen = Recorder()
        copied("cp.async.wait_group 0; bar.sync 0;", stages=8, seed=seed, observer=seen)
        issued = [issued for _, _, issued, _ in seen.operations]
        assert len(issued) == 16
        orders.append(issued == sorted(issued))
    assert not all(orders)


def test_copies_are_aligned():
    with pytest.raises(IllegalAccess, match="multiple of 16"):
        copied("", copy="cp.async.cg.shared.global [%r3+4], [%rd0], 16")
