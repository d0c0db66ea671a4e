"""tcgen05.cp in every shape, and tcgen05.mma with scales on every value of the formats that have them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from cute_backend.simulator.simulation_errors import (
    DescriptorError,
    IllegalAccess,
    RaceError,
    SimulationError,
    UnknownOpcode,
)
from support.simulator.ptx_entries import REGISTERS, descriptor, launch, to_shared

MATRIX = 1 << 46
"""The fields of a descriptor without swizzle that every one has; strides are added."""
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)])
"""OCP Microscaling Formats 1.0, table 5."""


def strides(leading: int, stride: int) -> int:
    return MATRIX | (leading >> 4) << 16 | (stride >> 4) << 32


# --- tcgen05.cp ------------------------------------------------------------

COPIES = {
    ("128x256b", ""): lambda row: [row],
    ("128x128b", ""): lambda row: [row],
    ("4x256b", ""): lambda row: [32 * row],
    ("64x128b", ".warpx2::02_13"): lambda row: [row, row + 64],
    ("64x128b", ".warpx2::01_23"): lambda row: [row + row // 32 * 32, row + row // 32 * 32 + 32],
    ("32x128b", ".warpx4"): lambda row: [row, row + 32, row + 64, row + 96],
}
"""The lanes to which each row of a shape goes, in the words of PTX ISA 9.7.16.9.1."""


def copied(shape: str, multicast: str, column: int = 0, **changes: str) -> tuple[np.ndarray, np.ndarray]:
    """A matrix of words (rows, columns) that was copied to zeroed tensor memory, and what it held then: (128,
    16)."""
    rows, width = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 32
    words = np.arange(rows * width, dtype=np.uint32).reshape(rows, width) + 1000
    # Core matrices of 8 rows of 16 bytes: those of the same rows 4096 bytes apart, the next rows 128.
    data = np.zeros((2, 4096 // 16, 4), np.uint32)
    for half in range(width // 4):
        data[half, :rows] = words[:, 4 * half : 4 * half + 4]
    out = np.zeros((128, 16), np.uint32)
    step = changes.get("step", f"tcgen05.cp.cta_group::1.{shape}{multicast} [%r11], %rd4;")
    zero = "mov.b32 %r49, 0;" + "".join(
        f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13+{c}], {{{', '.join(['%r49'] * 8)}}};" for c in (0, 8)
    )
    load = "".join(
        f"""
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{", ".join(f"%r{40 + i}" for i in range(8))}}}, [%r13+{c}];
    tcgen05.wait::ld.sync.aligned;
    st.global.v4.b32 [%rd7+{4 * c}], {{%r40, %r41, %r42, %r43}};
    st.global.v4.b32 [%rd7+{4 * c + 16}], {{%r44, %r45, %r46, %r47}};"""
        for c in (0, 8)
    )
    text = f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 p0, .param .u64 p1) {{
    {REGISTERS}
    .shared .align 1024 .b8 smem[10240];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %warpid; mov.b32 %r2, smem;
    setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd2, [p1];
    @%p0 mbarrier.init.shared.b64 [%r2], 1;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], 32;
    {to_shared("%rd0", 1024, data.nbytes, "A", 128)}
    fence.proxy.async.shared::cta; bar.sync 0;
    ld.shared.b32 %r10, [%r2+16]; add.u32 %r11, %r10, {column};
    mad.lo.u32 %r13, %r1, {32 << 16}, %r10; mad.wide.u32 %rd7, %r0, 64, %rd2;
    {zero} tcgen05.wait::st.sync.aligned; bar.sync 0;
    {descriptor("%rd4", strides(4096, 128), 1024)}
    @%p0 {step}
    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
    {changes.get("wait", "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra W;")}
    {load}
    bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;
    ret;
}}
"""
    launch(text, [data, out], block=128, seed=int(changes.get("seed", "1")))
    return words, out


@pytest.mark.parametrize(("shape", "multicast"), COPIES)
@pytest.mark.parametrize("column", [0, 5])
def test_every_shape_of_a_copy(shape: str, multicast: str, column: int) -> None:
    words, out = copied(shape, multicast, column)
    wanted = np.zeros((128, 16), np.uint32)
    for row, each in enumerate(words):
        for lane in COPIES[shape, multicast](row):
            wanted[lane, column : column + len(each)] = each
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"step": "tcgen05.cp.cta_group::1.32x128b [%r11], %rd4;"}, UnknownOpcode, "multicast"),
        ({"step": "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r11], %rd4;"}, UnknownOpcode, "format"),
        ({"wait": ""}, RaceError, "nothing (that it waited|waits) for"),
    ],
)
def test_faults_of_copies(changes: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        copied("32x128b", ".warpx4", **changes)


def test_a_copy_outside_of_what_is_allocated() -> None:
    with pytest.raises(IllegalAccess, match="columns 30 to 33"):
        copied("32x128b", ".warpx4", 30)


# --- tcgen05.mma with scales ------------------------------------------------------------

A_AT, B_AT, SFA_AT, SFB_AT = 1024, 33 * 1024, 65 * 1024, 69 * 1024
FORMATS = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
COPY = "@%p0 tcgen05.cp.cta_group::1.32x128b.warpx4"


def decoded(codes: np.ndarray, kind: str) -> np.ndarray:
    """Codes as float64, by torch or by the tables of the formats' definition."""
    if kind == "e2m1":
        return E2M1[codes]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "ue8m0": torch.float8_e8m0fnu}[kind]
    return torch.from_numpy(codes.astype(np.uint8)).view(dtype).to(torch.float64).numpy()


@dataclass(frozen=True)
class Scaled:
    """One instruction over K of one instruction: codes of A (128, k) and B (n, k), of scales (128, count) and
    (n, count), which are bytes `a_id` and `b_id` and up of their words."""

    a: np.ndarray
    b: np.ndarray
    of_a: np.ndarray
    of_b: np.ndarray
    kind: str = "mxf8f6f4"
    formats: tuple[str, str] = ("e4m3", "e4m3")
    scale: str = "ue8m0"
    a_id: int = 0
    b_id: int = 0
    size: str = ""
    copies: str = f"{COPY} [%r14], %rd8; {COPY} [%r14+4], %rd9; {COPY} [%r14+8], %rd10;"
    late: str = ""
    bits: int = 0

    @property
    def idesc(self) -> int:
        packed = self.kind != "mxf8f6f4"
        a, b = (1 if packed else FORMATS[each] for each in self.formats)
        return (
            self.b_id << 4
            | a << 7
            | b << 10
            | len(self.b) // 8 << 17
            | (self.scale == "ue8m0") << 23
            | 8 << 24
            | self.a_id << 29
            | self.bits
        )

    def stored(self, codes: np.ndarray, name: str) -> np.ndarray:
        """A matrix in core matrices of 8 rows of 16 bytes, of which two neighbours are 4096 bytes apart."""
        if self.kind != "mxf8f6f4":
            row = codes[:, ::2] | codes[:, 1::2] << 4
        elif name == "e2m1":
            row = np.zeros((len(codes), 2, 16), np.uint8)
            halves = codes.reshape(-1, 2, 16)
            row[:, :, :8] = halves[:, :, ::2] | halves[:, :, 1::2] << 4
            row[:, :, 8:] = 0x77
        else:
            row = codes
        row = row.astype(np.uint8).reshape(len(codes), 2, 16)
        data = np.zeros((2, 256, 16), np.uint8)
        data[0, : len(row)], data[1, : len(row)] = row[:, 0], row[:, 1]
        return data.reshape(-1)

    def words(self, scales: np.ndarray, first: int) -> np.ndarray:
        """Scales as (blocks of 128 rows, 32 lanes, 4 columns, 4 bytes), others being NaN."""
        data = np.full((-(-len(scales) // 128), 32, 4, 4), 0xFF, np.uint8)
        for row, each in enumerate(scales):
            data[row // 128, row % 32, row % 128 // 32, first : first + len(each)] = each
        return np.resize(data, (2, 32, 4, 4)).reshape(-1)

    def text(self) -> str:
        n = len(self.b)
        load = "".join(
            f"""
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{", ".join(f"%r{40 + i}" for i in range(8))}}}, [%r13+{c}];
    tcgen05.wait::ld.sync.aligned;
    st.global.v4.b32 [%rd7+{4 * c}], {{%r40, %r41, %r42, %r43}};
    st.global.v4.b32 [%rd7+{4 * c + 16}], {{%r44, %r45, %r46, %r47}};"""
            for c in range(0, n, 8)
        )
        pointers = ", ".join(f".param .u64 p{i}" for i in range(5))
        given = "".join(f"ld.param.u64 %rd{30 + i}, [p{i}];" for i in range(5))
        brought = "".join(
            to_shared(f"%rd{30 + i}", at, nbytes, f"L{i}", 128)
            for i, (at, nbytes) in enumerate([(A_AT, 8192), (B_AT, 8192), (SFA_AT, 1024), (SFB_AT, 1024)])
        )
        matrices = "".join(
            descriptor(f"%rd{register}", strides(4096, 128), at)
            for register, at in [(4, A_AT), (5, B_AT), (8, SFA_AT), (9, SFB_AT), (10, SFB_AT + 512)]
        )
        return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry kernel({pointers}) {{
    {REGISTERS}
    .shared .align 1024 .b8 smem[81920];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %warpid; mov.b32 %r2, smem;
    setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0;
    {given}
    @%p0 mbarrier.init.shared.b64 [%r2], 1;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], 512;
    {brought}
    fence.proxy.async.shared::cta; bar.sync 0;
    ld.shared.b32 %r10, [%r2+16]; add.u32 %r14, %r10, 256; add.u32 %r15, %r10, 260;
    {matrices}
    mov.b32 %r12, {self.idesc}; setp.ne.b32 %p10, %r0, %r0;
    {self.copies}
    @%p0 tcgen05.mma.cta_group::1.kind::{self.kind}.block_scale{self.size} [%r10], %rd4, %rd5, %r12, [%r14], [%r15], %p10;
    {self.late}
    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
    W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra W;
    mad.lo.u32 %r13, %r1, {32 << 16}, %r10; mad.wide.u32 %rd7, %r0, {4 * n}, %rd34;
    {load}
    bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 512;
    ret;
}}
"""  # noqa: E501

    def run(self, seed: int | None = 1) -> np.ndarray:
        out = np.zeros((128, len(self.b)), np.float32)
        arrays = [
            self.stored(self.a, self.formats[0]),
            self.stored(self.b, self.formats[1]),
            self.words(self.of_a, self.a_id),
            self.words(self.of_b, self.b_id),
            out,
        ]
        launch(self.text(), arrays, block=128, seed=seed)
        return out

    def wanted(self) -> np.ndarray:
        """The sum in float64, which is exact for what the tests give, rounded to fp32 once."""
        scale = "e4m3" if self.scale == "ue4m3" else self.scale
        block = self.a.shape[1] // self.of_a.shape[1]
        left = decoded(self.a, self.formats[0]) * decoded(self.of_a, scale).repeat(block, axis=1)
        right = decoded(self.b, self.formats[1]) * decoded(self.of_b, scale).repeat(block, axis=1)
        with np.errstate(all="ignore"):
            return (left @ right.T).astype(np.float32)


def codes(rows: int, columns: int, of: int, step: int = 1) -> np.ndarray:
    """All codes below `of`, and again, in an order that differs from row to row."""
    return (np.arange(rows * columns).reshape(rows, columns) * step + np.arange(rows)[:, None]) % of


NVFP4 = Scaled(
    codes(128, 64, 16, 5),
    codes(48, 64, 16, 3),
    1 + codes(128, 4, 126, 7),
    1 + codes(48, 4, 126, 11),
    "mxf4nvf4",
    ("e2m1", "e2m1"),
    "ue4m3",
    size=".scale_vec::4X",
)
OF_A, OF_B = 118 + codes(128, 2, 20, 7), 118 + codes(48, 2, 20, 3)
MXFP4 = replace(NVFP4, kind="mxf4", scale="ue8m0", size="", of_a=OF_A, of_b=OF_B)
MXFP8 = Scaled(codes(128, 32, 126, 5), codes(48, 32, 126, 3), OF_A[:, :1], OF_B[:, :1])


@pytest.mark.parametrize("case", [NVFP4, MXFP4, MXFP8], ids=["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("seed", [None, 1])
def test_products_of_each_kind(case: Scaled, seed: int | None) -> None:
    assert np.array_equal(case.run(seed), case.wanted())


@pytest.mark.parametrize("first", [0, 128])
def test_every_pair_of_e2m1_values(first: int) -> None:
    """Row r and column c multiply one pair of codes, the 256 of which are rows and columns of 16 by 16."""
    a, b = np.zeros((128, 64), int), np.zeros((16, 64), int)
    a[:, 0], b[:, 0] = (np.arange(128) + first) % 16, np.arange(16)
    fours = np.full((128, 4), 0x38)
    case = replace(NVFP4, a=a, b=b, of_a=fours, of_b=fours[:16])
    out = case.run()
    assert np.array_equal(out, case.wanted())
    assert {(x, y): out[x, y] for x in range(16) for y in range(16)} == {
        (x, y): np.float32(E2M1[x] * E2M1[y]) for x in range(16) for y in range(16)
    }


@pytest.mark.parametrize("first", [0, 128])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_fp8_value(kind: str, first: int) -> None:
    a, b = np.zeros((128, 32), int), np.zeros((8, 32), int)
    a[:, 7], b[:, 7] = np.arange(first, first + 128), {"e4m3": 0x38, "e5m2": 0x3C}[kind]
    case = replace(
        MXFP8, a=a, b=b, of_a=np.full((128, 1), 128), of_b=np.full((8, 1), 127), formats=(kind, kind)
    )
    wanted = 2 * decoded(np.arange(first, first + 128), kind).astype(np.float32)
    assert np.array_equal(case.run(), np.repeat(wanted[:, None], 8, axis=1), equal_nan=True)


@pytest.mark.parametrize("first", [0, 128])
@pytest.mark.parametrize("side", ["a", "b"])
def test_every_e8m0_scale(side: str, first: int) -> None:
    """2 ** -127 to 2 ** 127, and NaN, of rows of either operand."""
    a, b = np.zeros((128, 32), int), np.zeros((128, 32), int)
    a[:, 3], b[:, 3] = 0x38, 0x38
    some, ones = np.arange(first, first + 128)[:, None], np.full((128, 1), 127)
    of_a, of_b = (some, ones) if side == "a" else (ones, some)
    case = replace(MXFP8, a=a, b=b, of_a=of_a, of_b=of_b)
    values = np.array([np.nan if s == 255 else 2.0 ** (int(s) - 127) for s in some[:, 0]], np.float32)
    wanted = np.repeat(values[:, None], 128, axis=1)
    assert np.array_equal(case.run(), wanted if side == "a" else wanted.T, equal_nan=True)


def test_every_e4m3_scale() -> None:
    """Without its sign, which a scale doesn't have."""
    a, b = np.zeros((128, 64), int), np.zeros((8, 64), int)
    a[:, 33], b[:, 33] = 2, 2
    of_a = np.full((128, 4), 0x38)
    of_a[:, 2] = np.arange(128)
    case = replace(NVFP4, a=a, b=b, of_a=of_a, of_b=np.full((8, 4), 0x38))
    wanted = np.repeat(decoded(np.arange(128), "e4m3").astype(np.float32)[:, None], 8, axis=1)
    assert np.array_equal(case.run(), wanted, equal_nan=True)
    assert np.array_equal(replace(case, of_a=of_a | 0x80).run(), wanted, equal_nan=True)


@pytest.mark.parametrize(("a_id", "b_id"), [(0, 3), (1, 2), (3, 0)])
def test_scale_ids_choose_a_byte(a_id: int, b_id: int) -> None:
    case = replace(MXFP8, a_id=a_id, b_id=b_id)
    assert np.array_equal(case.run(), case.wanted())


def test_scale_ids_choose_a_half() -> None:
    case = replace(MXFP4, a_id=2, b_id=0, size=".block32")
    assert np.array_equal(case.run(), case.wanted())


@pytest.mark.parametrize("n", [8, 128, 232, 256])
def test_sizes_of_n(n: int) -> None:
    case = replace(NVFP4, b=codes(n, 64, 16, 3), of_b=1 + codes(n, 4, 126, 11))
    assert np.array_equal(case.run(), case.wanted())


def test_elements_of_4_bits_beside_those_of_8() -> None:
    """16 of them fill the first 8 of 16 bytes, and what fills the others is not read."""
    case = replace(MXFP8, formats=("e4m3", "e2m1"), b=codes(48, 32, 16, 3))
    assert np.array_equal(case.run(), case.wanted())


def test_two_scales_of_e8m0_by_the_kind_of_nvfp4() -> None:
    case = replace(MXFP4, kind="mxf4nvf4", size=".scale_vec::2X")
    assert np.array_equal(case.run(), case.wanted())


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"copies": ""}, RaceError, "tensor memory lane 0 column 256 .* never written"),
        ({"copies": f"{COPY} [%r14], %rd8;"}, RaceError, "lane 0 column 260 .* never written"),
        ({"copies": f"{COPY} [%r14], %rd8;", "late": f"{COPY} [%r14+4], %rd9;"}, RaceError, "never written"),
        ({"bits": 1 << 29}, DescriptorError, "scale id 1 of A; multiples of 4"),
        ({"scale": "ue8m0", "kind": "mxf4"}, DescriptorError, "kind::mxf4 with scale_vec::4X; it has 2X"),
        ({"size": ""}, DescriptorError, "no size of scales; it has 2X, 4X"),
        ({"size": ".scale_vec::2X"}, DescriptorError, "scales of ue4m3, 2 of a row"),
        ({"bits": 1 << 31}, DescriptorError, "K = 96"),
        ({"bits": 1 << 15}, DescriptorError, "MN-major operands of e2m1x2"),
        ({"bits": 1 << 2}, DescriptorError, "sparsity"),
        ({"bits": 4 << 7}, DescriptorError, "format 5 of A"),
        ({"bits": 16 << 24}, DescriptorError, "M = 384"),
    ],
)
def test_faults(change: dict[str, Any], error: type[Exception], message: str, seed: int | None) -> None:
    with pytest.raises(error) as caught:
        replace(NVFP4, **change).run(seed)
    assert re.search(message, str(caught.value))


def test_scales_of_the_quarter_that_reads_them() -> None:
    """A copy to one quarter of the lanes alone leaves the others without scales."""
    only_first = "@%p0 tcgen05.cp.cta_group::1.64x128b.warpx2::01_23 [%r14], %rd8;"
    with pytest.raises(RaceError, match="never written"):
        replace(NVFP4, copies=only_first).run()


def test_a_product_without_its_scales_is_another_kind() -> None:
    text = NVFP4.text().replace(".block_scale.scale_vec::4X", "")
    with pytest.raises(SimulationError, match="this kind"):
        launch(text, [np.zeros(8192, np.uint8)] * 5, block=128)
