"""tcgen05 and wgmma: every kind, layout and shape on exact integers; tensor memory; what goes wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cute_backend.simulator.simulation_errors import (
    DescriptorError,
    IllegalAccess,
    MissingProxyFence,
    RaceError,
    ResourceError,
    SimulationError,
    UnknownOpcode,
)
from support.simulator.operands import Stored, raw_elements, small_integers, stored
from support.simulator.ptx_entries import REGISTERS, descriptor, launch, to_shared

SEEDS = [None, 1, 2, 3]
DEPTH = {"e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "f16": 16, "bf16": 16, "tf32": 8}
KIND = {
    "e4m3": "f8f6f4",
    "e5m2": "f8f6f4",
    "s8": "i8",
    "u8": "i8",
    "f16": "f16",
    "bf16": "f16",
    "tf32": "tf32",
}
FORMAT = {"e4m3": 0, "e5m2": 1, "f16": 0, "bf16": 1, "u8": 0, "s8": 1, "tf32": 2}
A_AT, B_AT = 1024, 33 * 1024


# --- tcgen05 ------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One tcgen05 product; the text pieces are what the tests of errors change."""

    m: int = 128
    n: int = 64
    a: str = "e4m3"
    b: str = "e4m3"
    span: int = 128
    a_mn: bool = False
    b_mn: bool = False
    d: str = "f32"
    negate: int = 0
    steps: int = 1
    fence: str = "fence.proxy.async.shared::cta;"
    sync: str = "bar.sync 0;"
    wait: str = "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra W;"
    commit: str = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"
    dealloc: str = "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 256;"
    elect: str = "@%p0 "
    columns: int = 256
    column: int = 0
    lane_step: int = 32
    disabled: str = ""

    @property
    def idesc(self) -> int:
        result = {"f16": 0, "f32": 1, "s32": 2}[self.d]
        return (
            result << 4
            | FORMAT[self.a] << 7
            | FORMAT[self.b] << 10
            | self.negate << 13
            | self.a_mn << 15
            | self.b_mn << 16
            | self.n // 8 << 17
            | self.m // 16 << 24
        )

    def text(self, a: Stored, b: Stored) -> str:
        """Four warps load A and B, one thread multiplies, all store D (128 lanes, n columns) to p2."""
        kind = KIND[self.a]
        mma = f"""
    {self.elect}tcgen05.mma.cta_group::1.kind::{kind} [%r11], %rd4, %rd5, %r12, {self.disabled}%p10;
    setp.eq.b32 %p10, %r0, %r0;"""
        load = "".join(
            f"""
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{", ".join(f"%r{40 + i}" for i in range(8))}}}, [%r13+{c}];
    tcgen05.wait::ld.sync.aligned;
    st.global.v4.b32 [%rd7+{4 * c}], {{%r40, %r41, %r42, %r43}};
    st.global.v4.b32 [%rd7+{4 * c + 16}], {{%r44, %r45, %r46, %r47}};"""
            for c in range(0, self.n, 8)
        )
        return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 p0, .param .u64 p1, .param .u64 p2) {{
    {REGISTERS}
    .shared .align 1024 .b8 smem[81920];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %warpid; mov.b32 %r2, smem;
    setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2];
    @%p0 mbarrier.init.shared.b64 [%r2], 1;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], {self.columns};
    {to_shared("%rd0", A_AT, a.data.nbytes, "A", 128)} {to_shared("%rd1", B_AT, b.data.nbytes, "B", 128)}
    {self.fence} {self.sync}
    ld.shared.b32 %r10, [%r2+16]; add.u32 %r11, %r10, {self.column};
    {descriptor("%rd4", a.descriptor("sm_100a"), A_AT)} {descriptor("%rd5", b.descriptor("sm_100a"), B_AT)}
    mov.b32 %r12, {self.idesc}; setp.ne.b32 %p10, %r0, %r0;
    {mma * self.steps}
    {self.elect}{self.commit}
    {self.wait}
    mad.lo.u32 %r13, %r1, {self.lane_step << 16}, %r11; mad.wide.u32 %rd7, %r0, {4 * self.n}, %rd2;
    {load}
    {self.dealloc}
    ret;
}}
"""

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        k = DEPTH[self.a]
        return small_integers(self.m, k, self.a, 1), small_integers(self.n, k, self.b, 2)

    def run(self, seed: int | None = None) -> np.ndarray:
        a, b = self.operands()
        stored_a, stored_b = stored(a, self.a, self.span, self.a_mn), stored(b, self.b, self.span, self.b_mn)
        out = np.zeros((128, self.n), np.uint32)
        launch(self.text(stored_a, stored_b), [stored_a.data, stored_b.data, out], block=128, seed=seed)
        return out

    def rows(self, out: np.ndarray) -> np.ndarray:
        """D from the lanes: row i of M = 64 is in lane i % 16 of quarter i // 16."""
        values = {"f32": out.view(np.float32), "s32": out.view(np.int32)}.get(self.d)
        if values is None:
            values = (out & 0xFFFF).astype(np.uint16).view(np.float16)
        if self.m == 128:
            return values
        return values.reshape(4, 32, self.n)[:, :16].reshape(64, self.n)

    def wanted(self) -> np.ndarray:
        a, b = self.operands()
        sign = (-1 if self.negate & 1 else 1) * (-1 if self.negate & 2 else 1)
        return self.steps * sign * (a @ b.T)


@pytest.mark.parametrize("kind", DEPTH)
def test_kinds(kind: str) -> None:
    d = "s32" if kind in ("s8", "u8") else "f32"
    case = Case(a=kind, b=kind, d=d, span=32, steps=2)
    assert np.array_equal(case.rows(case.run()), case.wanted())


@pytest.mark.parametrize("kinds", [("e4m3", "e5m2"), ("u8", "s8"), ("bf16", "f16")])
def test_mixed_operands(kinds: tuple[str, str]) -> None:
    case = Case(a=kinds[0], b=kinds[1], d="s32" if kinds[0] == "u8" else "f32", span=32)
    assert np.array_equal(case.rows(case.run()), case.wanted())


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
@pytest.mark.parametrize("majors", [(False, False), (True, False), (False, True), (True, True)])
def test_layouts(span: int, kind: str, majors: tuple[bool, bool]) -> None:
    case = Case(a=kind, b=kind, span=span, a_mn=majors[0], b_mn=majors[1], n=128)
    assert np.array_equal(case.rows(case.run()), case.wanted())


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("n", [8, 48, 256])
def test_shapes(m: int, n: int) -> None:
    case = Case(m=m, n=n, span=32, columns=256)
    assert np.array_equal(
        case.rows(case.run()) if m == 128 else case.rows(_with_all_lanes(case)), case.wanted()
    )


def _with_all_lanes(case: Case) -> np.ndarray:
    """M = 64 writes 64 lanes; the others are read too, so they are zeroed first."""
    zero = ", ".join(["%r49"] * 8)
    stores = "".join(
        f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13+{c}], {{{zero}}};" for c in range(0, case.n, 8)
    )
    prepare = f"""ld.shared.b32 %r10, [%r2+16]; mad.lo.u32 %r13, %r1, {32 << 16}, %r10; mov.b32 %r49, 0;
    {stores}
    tcgen05.wait::st.sync.aligned; bar.sync 0;"""
    return replace(case, sync="bar.sync 0;" + prepare).run()


@pytest.mark.parametrize("negate", [1, 2, 3])
def test_negation(negate: int) -> None:
    case = Case(negate=negate)
    assert np.array_equal(case.rows(case.run()), case.wanted())


def test_f16_accumulators_and_an_offset_in_columns() -> None:
    case = Case(a="f16", b="f16", d="f16", span=32, column=64)
    assert np.array_equal(case.rows(case.run()), case.wanted())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_bits_for_every_seed(seed: int | None) -> None:
    case = Case(steps=3)
    assert np.array_equal(case.run(seed), case.run(None))
    assert np.array_equal(case.rows(case.run(seed)), case.wanted())


def test_disabled_lanes_keep_their_values() -> None:
    case = Case(steps=1, disabled="{%r50, %r51, %r52, %r53}, ")
    zero = ", ".join(["%r49"] * 8)
    stores = "".join(
        f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13+{c}], {{{zero}}};" for c in range(0, case.n, 8)
    )
    prepare = f"""bar.sync 0;
    ld.shared.b32 %r10, [%r2+16]; mad.lo.u32 %r13, %r1, {32 << 16}, %r10; mov.b32 %r49, 7;
    {stores} tcgen05.wait::st.sync.aligned; bar.sync 0;
    mov.b32 %r50, 0; mov.b32 %r51, 0xf; mov.b32 %r52, 0; mov.b32 %r53, 0x80000000;"""
    out = replace(case, sync=prepare).run()
    kept = [32, 33, 34, 35, 127]
    assert (out[kept] == 7).all()
    rest = np.setdiff1d(np.arange(128), kept)
    assert np.array_equal(case.rows(out)[rest], case.wanted()[rest])


# --- what goes wrong in tcgen05 ------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fence": ""}, MissingProxyFence, "no fence.proxy.async"),
        ({"sync": ""}, RaceError, ""),
        ({"wait": ""}, RaceError, "the tcgen05 pipe|never written"),
        (
            {"wait": "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 1; @!%p9 bra W;"},
            RaceError,
            "tcgen05 pipe|never written",
        ),
        ({"dealloc": ""}, ResourceError, "exits with tensor memory allocated"),
        (
            {"dealloc": "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 256;"},
            (RaceError, IllegalAccess),
            "tcgen05.dealloc|allocated are none",
        ),
        ({"elect": ""}, SimulationError, "one thread must issue it"),
        ({"column": 208}, IllegalAccess, "columns 208 to 271.*allocated are 0 to 255"),
        ({"lane_step": 0}, IllegalAccess, "may touch lanes (32|64|96) to"),
        ({"columns": 100}, ResourceError, "powers of two from 32"),
        ({"m": 96}, DescriptorError, "M = 96"),
    ],
)
def test_faults(change: dict[str, Any], error: Any, message: str, seed: int | None) -> None:
    with pytest.raises(error) as caught:
        replace(Case(), **change).run(seed)
    assert re.search(message, str(caught.value))


def test_accumulating_on_memory_that_was_never_written() -> None:
    case = Case()
    a, b = case.operands()
    stored_a, stored_b = stored(a, "e4m3", 128, False), stored(b, "e4m3", 128, False)
    text = case.text(stored_a, stored_b).replace("setp.ne.b32 %p10, %r0, %r0", "setp.eq.b32 %p10, %r0, %r0")
    with pytest.raises(RaceError, match=r"tensor memory lane 0 column 0 .* never written"):
        launch(text, [stored_a.data, stored_b.data, np.zeros((128, 64), np.uint32)], block=128)


@pytest.mark.parametrize(
    ("bits", "message"), [(7 << 7, "format 7 of A"), (3 << 4, "format 3 of D"), (1 << 2, "sparsity")]
)
def test_instruction_descriptors_are_decoded_not_assumed(bits: int, message: str) -> None:
    case = Case()
    a, b = (stored(v, "e4m3", 128, False) for v in case.operands())
    text = case.text(a, b).replace(f"mov.b32 %r12, {case.idesc};", f"mov.b32 %r12, {case.idesc | bits};")
    with pytest.raises(DescriptorError, match=message):
        launch(text, [a.data, b.data, np.zeros((128, 64), np.uint32)], block=128)


def test_a_matrix_descriptor_without_its_constant() -> None:
    case = Case()
    a, b = (stored(v, "e4m3", 128, False) for v in case.operands())
    text = case.text(a, b).replace(str(a.descriptor("sm_100a")), str(a.descriptor("sm_100a") & ~(1 << 46)))
    with pytest.raises(DescriptorError, match="bits 46 to 48"):
        launch(text, [a.data, b.data, np.zeros((128, 64), np.uint32)], block=128)


# --- tensor memory ------------------------------------------------------------

SHAPE_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}


def cell(shape: str, thread: int, register: int) -> tuple[int, int]:
    """Lane and column of a register, from the figures of PTX ISA 9.7.16.8 in words.

    16x256b: 4 threads share a lane, each has 2 neighbouring columns; the second pair is 8 lanes on.
    16x128b: 4 threads share a lane, one column each; the second register is 8 lanes on.
    16x64b: 2 threads share a lane, and the next 2 the lane 8 further on.
    """
    per = SHAPE_REGISTERS[shape]
    repeat, r = divmod(register, per)
    quad, place = divmod(thread, 4)
    if shape == "32x32b":
        return thread, repeat
    if shape == "16x256b":
        return quad + 8 * (r // 2), 8 * repeat + 2 * place + r % 2
    if shape == "16x128b":
        return quad + 8 * r, 4 * repeat + place
    return quad + 8 * (place // 2), 2 * repeat + place % 2


@pytest.mark.parametrize("shape", SHAPE_REGISTERS)
@pytest.mark.parametrize("repeat", [1, 4, 16])
@pytest.mark.parametrize("lane", [0, 16])
def test_shapes_of_tensor_memory_access(shape: str, repeat: int, lane: int) -> None:
    if shape == "32x32b":
        lane = 0
    count = SHAPE_REGISTERS[shape] * repeat
    registers = ", ".join(f"%r{100 + i}" for i in range(count))
    out = np.zeros((32, count), np.uint32)
    fill = "".join(
        f"mul.lo.u32 %r50, %r0, 1000; add.u32 %r50, %r50, {c};"
        f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10+{c}], {{%r50}};"
        for c in range(128)
    )
    stores = "".join(f"st.global.b32 [%rd7+{4 * i}], %r{100 + i};" for i in range(count))
    body = f"""{fill} tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{registers}}}, [%r10+{lane << 16}];
    mad.wide.u32 %rd7, %r0, {4 * count}, %rd0; {stores}"""
    launch(_with_tensor_memory(body), [out])
    wanted = [
        [1000 * (lane + cell(shape, t, r)[0]) + cell(shape, t, r)[1] for r in range(count)] for t in range(32)
    ]
    assert out.tolist() == wanted


@pytest.mark.parametrize("shape", ["16x64b", "16x128b", "16x256b"])
def test_stores_are_the_reverse_of_loads(shape: str) -> None:
    count = 4 * SHAPE_REGISTERS[shape]
    registers = ", ".join(f"%r{100 + i}" for i in range(count))
    again = ", ".join(f"%r{200 + i}" for i in range(count))
    out = np.zeros((32, count), np.uint32)
    fill = "".join(f"mad.lo.u32 %r{100 + i}, %r0, 77, {i};" for i in range(count))
    stores = "".join(f"st.global.b32 [%rd7+{4 * i}], %r{200 + i};" for i in range(count))
    body = f"""{fill} tcgen05.st.sync.aligned.{shape}.x4.b32 [%r10], {{{registers}}};
    tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.{shape}.x4.b32 {{{again}}}, [%r10];
    mad.wide.u32 %rd7, %r0, {4 * count}, %rd0; {stores}"""
    launch(_with_tensor_memory(body), [out])
    assert out.tolist() == [[77 * t + i for i in range(count)] for t in range(32)]


def _with_tensor_memory(
    body: str, dealloc: str = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 128;"
) -> str:
    return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 p0) {{
    {REGISTERS}
    .shared .align 1024 .b8 smem[64];
    mov.u32 %r0, %tid.x; mov.b32 %r2, smem; ld.param.u64 %rd0, [p0];
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 128; bar.warp.sync -1;
    ld.shared.b32 %r10, [%r2];
    {body}
    {dealloc}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("body", "dealloc", "error", "message"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r10];", None, RaceError, "never written"),
        (
            "tcgen05.ld.sync.aligned.32x32b.x32.b32 {"
            + ", ".join(f"%r{i}" for i in range(20, 52))
            + "}, [%r10+104];",
            None,
            IllegalAccess,
            "columns 104 to 135",
        ),
        (
            "",
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;",
            ResourceError,
            "allocated are 128 at 0",
        ),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], 128;",
            None,
            ResourceError,
            "relinquish",
        ),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%r20};"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r10];",
            None,
            RaceError,
            r"reads .* written by a tcgen05\.st of warp 0",
        ),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",
            None,
            ResourceError,
            r"cta_group::1 \(PTX line \d+\) and \.cta_group::2 \(PTX line \d+\) in one kernel",
        ),
        ("tcgen05.shift.cta_group::1.down [%r10];", None, UnknownOpcode, "tcgen05.shift"),
    ],
)
def test_tensor_memory_faults(body: str, dealloc: str | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        launch(_with_tensor_memory(body, *([dealloc] if dealloc else [])), [np.zeros(32, np.uint32)])


HAND_OVER = """
    mov.u32 %r1, %warpid; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64
    [%r2+8], 32; @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64; bar.sync 0;
    ld.shared.b32 %r10, [%r2]; @!%p1 bra FREE; mov.b32 %r20, 3; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10],
    {%r20}; tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r21}, [%r10]; USE
    mbarrier.arrive.shared.b64 _, [%r2+8];
    add.u32 %r22, %r21, 1; bra END;
FREE: mbarrier.try_wait.parity.shared.b64 %p9, [%r2+8], 0; @!%p9 bra FREE;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
END:
"""


@pytest.mark.parametrize("use", ["tcgen05.wait::ld.sync.aligned;", "add.u32 %r23, %r21, 1;", ""])
def test_columns_are_handed_on_after_a_wait_or_a_use_of_what_was_loaded(use: str) -> None:
    text = _with_tensor_memory("", "").split("tcgen05.alloc")[0] + HAND_OVER.replace("USE", use) + "ret;\n}\n"
    if use:
        launch(text, [np.zeros(32, np.uint32)], block=64)
    else:
        with pytest.raises(RaceError, match=r"a tcgen05\.ld of warp 0 .* may still be reading"):
            launch(text, [np.zeros(32, np.uint32)], block=64)


# --- wgmma ------------------------------------------------------------


@dataclass(frozen=True)
class Warpgroup:
    """One wgmma product of a warpgroup, A in shared memory or registers."""

    n: int = 32
    a: str = "e4m3"
    b: str = "e4m3"
    d: str = "f32"
    span: int = 128
    a_mn: bool = False
    b_mn: bool = False
    signs: tuple[int, int] = (1, 1)
    from_registers: bool = False
    steps: int = 1
    fence: str = "wgmma.fence.sync.aligned;"
    proxy: str = "fence.proxy.async.shared::cta;"
    wait: str = "wgmma.wait_group.sync.aligned 0;"
    commit: str = "wgmma.commit_group.sync.aligned;"
    between: str = ""

    @property
    def registers(self) -> int:
        return self.n // (4 if self.d == "f16" else 2)

    def text(self, a: Stored, b: Stored) -> str:
        k = DEPTH[self.a]
        names = ", ".join(f"%r{100 + i}" for i in range(self.registers))
        tail = "" if self.d == "s32" else f", {self.signs[0]}, {self.signs[1]}"
        if self.a in ("f16", "bf16"):
            tail += f", {int(self.b_mn)}" if self.from_registers else f", {int(self.a_mn)}, {int(self.b_mn)}"
        source = "{%r60, %r61, %r62, %r63}" if self.from_registers else "%rd4"
        mma = f"""
    wgmma.mma_async.sync.aligned.m64n{self.n}k{k}.{self.d}.{self.a}.{self.b}
        {{{names}}}, {source}, %rd5, %p10{tail};
    setp.eq.b32 %p10, %r0, %r0;"""
        stores = "".join(f"st.global.b32 [%rd7+{4 * i}], %r{100 + i};" for i in range(self.registers))
        fragments = "mad.wide.u32 %rd8, %r0, 16, %rd3; ld.global.v4.b32 {%r60, %r61, %r62, %r63}, [%rd8];"
        return f"""
.version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3) {{
    {REGISTERS}
    .shared .align 1024 .b8 smem[81920];
    mov.u32 %r0, %tid.x; mov.b32 %r2, smem;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2]; ld.param.u64 %rd3, [p3];
    {to_shared("%rd0", A_AT, a.data.nbytes, "A", 128)} {to_shared("%rd1", B_AT, b.data.nbytes, "B", 128)}
    {self.proxy} bar.sync 0;
    {descriptor("%rd4", a.descriptor("sm_90a"), A_AT)} {descriptor("%rd5", b.descriptor("sm_90a"), B_AT)}
    {fragments if self.from_registers else ""}
    setp.ne.b32 %p10, %r0, %r0;
    {self.fence}
    {self.between.join([mma] * self.steps)}
    {self.commit} {self.wait}
    mad.wide.u32 %rd7, %r0, {4 * self.registers}, %rd2; {stores}
    ret;
}}
"""

    def run(self, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """D as (64, n), and what it should be."""
        k = DEPTH[self.a]
        a, b = small_integers(64, k, self.a, 1), small_integers(self.n, k, self.b, 2)
        stored_a, stored_b = stored(a, self.a, self.span, self.a_mn), stored(b, self.b, self.span, self.b_mn)
        out = np.zeros((128, self.registers), np.uint32)
        fragments = a_fragments(a, self.a)
        memory = [stored_a.data, stored_b.data, out, fragments]
        launch(self.text(stored_a, stored_b), memory, block=128, seed=seed)
        return self.matrix(out), self.steps * self.signs[0] * self.signs[1] * (a @ b.T)

    def matrix(self, out: np.ndarray) -> np.ndarray:
        """D from its registers: thread t of a warp has row t / 4 and columns 2 (t % 4), + 1; then the row 8
        below.
        """
        kind = {"f32": np.float32, "s32": np.int32, "f16": np.float16}[self.d]
        elements = out.view(kind).reshape(128, -1)
        d = np.zeros((64, self.n), kind)
        for thread in range(128):
            for i in range(elements.shape[1]):
                row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 4 // 2)
                d[row, i // 4 * 8 + 2 * (thread % 4) + i % 2] = elements[thread, i]
        return d


def a_fragments(a: np.ndarray, kind: str) -> np.ndarray:
    """A's four registers per thread: (row t / 4, first half of K), (row + 8), then the second half of K."""
    raw = raw_elements(a, kind).reshape(64, -1)
    out = np.zeros((128, 16), np.uint8)
    for thread in range(128):
        for r in range(4):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (r % 2)
            at = 16 * (r // 2) + 4 * (thread % 4)
            out[thread, 4 * r : 4 * r + 4] = raw[row, at : at + 4]
    return out


@pytest.mark.parametrize("kind", DEPTH)
@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("seed", [None, 1])
def test_wgmma_kinds(kind: str, from_registers: bool, seed: int | None) -> None:
    case = Warpgroup(
        a=kind,
        b=kind,
        d="s32" if kind in ("s8", "u8") else "f32",
        span=32,
        steps=2,
        from_registers=from_registers,
    )
    got, wanted = case.run(seed)
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("majors", [(False, False), (True, False), (False, True), (True, True)])
def test_wgmma_layouts(span: int, majors: tuple[bool, bool]) -> None:
    got, wanted = Warpgroup(a="bf16", b="bf16", span=span, a_mn=majors[0], b_mn=majors[1], n=64).run()
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize("n", [8, 24, 128, 256])
def test_wgmma_widths(n: int) -> None:
    got, wanted = Warpgroup(n=n).run()
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize(
    "case",
    [
        Warpgroup(signs=(-1, 1)),
        Warpgroup(a="f16", b="f16", d="f16", span=32),
        Warpgroup(a="e4m3", b="e5m2"),
        Warpgroup(a="e4m3", b="e4m3", d="f16"),
    ],
)
def test_wgmma_signs_and_results(case: Warpgroup) -> None:
    got, wanted = case.run()
    assert np.array_equal(got, wanted)


WAITED = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
TOUCHED = WAITED + "add.f32 %r60, %r100, %r100;"


def test_accumulators_may_be_read_between_products_with_a_fence_after() -> None:
    got, wanted = Warpgroup(steps=2, between=TOUCHED + "wgmma.fence.sync.aligned;").run()
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fence": ""}, RaceError, "no wgmma.fence before it"),
        ({"proxy": ""}, MissingProxyFence, "no fence.proxy.async"),
        ({"wait": ""}, RaceError, "that it has not waited for"),
        ({"wait": "wgmma.wait_group.sync.aligned 1;"}, RaceError, "that it has not waited for"),
        ({"commit": ""}, RaceError, "that it has not waited for"),
        ({"steps": 2, "between": TOUCHED}, RaceError, "touched since its last wgmma.fence"),
        (
            {"steps": 2, "between": WAITED + "add.u32 %r61, %r61, 1;", "from_registers": True},
            RaceError,
            "touched since its last wgmma.fence",
        ),
        (
            {"wait": "add.u32 %r61, %r61, 1; wgmma.wait_group.sync.aligned 0;", "from_registers": True},
            RaceError,
            "that it has not waited for",
        ),
    ],
)
def test_wgmma_faults(change: dict[str, Any], error: type[Exception], message: str, seed: int | None) -> None:
    with pytest.raises(error, match=message):
        replace(Warpgroup(), **change).run(seed)
