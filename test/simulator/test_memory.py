"""Loads, stores, atomics and copies in every state space, and the accesses that are errors."""

from __future__ import annotations

import numpy as np
import pytest

from cute_backend.simulator.memory import GlobalMemory
from cute_backend.simulator.simulation_errors import IllegalAccess, RaceError
from support.simulator.ptx_entries import elementwise, entry, launch, one

ADDRESS = """
    mov.u32 %r0, %tid.x; mov.u32 %r500, %ctaid.x; mov.u32 %r501, %ntid.x; mad.lo.u32 %r500, %r500, %r501, %r0;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
"""


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("space", ["global", "generic", "shared", "local"])
def test_vectors_of_every_width_through_every_space(space: str, width: int, vector: int) -> None:
    if width * vector > 128:
        vector = 2
    nbytes = width * vector // 8
    source = words(32 * nbytes // 4 + 1)[: 32 * nbytes // 4]
    target = np.zeros_like(source)
    letter = {8: "h", 16: "h", 32: "r", 64: "rd"}[width]
    registers = ", ".join(f"%{letter}{32 + i}" for i in range(vector))
    registers = f"{{{registers}}}" if vector > 1 else registers
    suffix = (f".v{vector}" if vector > 1 else "") + f".b{width}"
    through = {
        "global": "",
        "generic": "",
        "shared": f"""
            mov.b32 %r9, smem; mad.lo.u32 %r9, %r0, {nbytes}, %r9; st.shared{suffix} [%r9], {registers};
            mov.b64 %rd40, 0; ld.shared{suffix} {registers}, [%r9];""",
        "local": f"""
            mov.b64 %rd41, depot; add.u64 %rd41, %rd41, 32; st.local{suffix} [%rd41], {registers};
            cvta.local.u64 %rd42, %rd41; ld{suffix} {registers}, [%rd42];""",
    }[space]
    here = ".global" if space != "generic" else ""
    body = f""".local .align 16 .b8 depot[64];
    {ADDRESS} mul.wide.u32 %rd2, %r0, {nbytes}; add.s64 %rd0, %rd0, %rd2; add.s64 %rd1, %rd1, %rd2;
    ld{here}{suffix} {registers}, [%rd0]; {through} st{here}{suffix} [%rd1], {registers};"""
    launch(entry(body, 2, shared=1024), [source, target])
    assert np.array_equal(source, target)


def test_loads_extend_by_sign_or_zero() -> None:
    a = np.arange(256, dtype=np.uint32)
    out = [np.zeros(256, np.uint32) for _ in range(4)]
    body = f"""{ADDRESS} mad.wide.u32 %rd0, %r0, 4, %rd0;
    ld.global.s8 %r1, [%rd0]; ld.global.u8 %r2, [%rd0]; ld.global.s8 %h1, [%rd0]; cvt.u32.u16 %r3, %h1;
    ld.global.nc.L1::no_allocate.L2::128B.b8 %r4, [%rd0];
    mad.wide.u32 %rd1, %r0, 4, %rd1; st.global.b32 [%rd1], %r1;
    """ + "".join(
        f"ld.param.u64 %rd3, [p{i}]; mad.wide.u32 %rd3, %r0, 4, %rd3; st.global.b32 [%rd3], %r{i};"
        for i in (2, 3, 4)
    )
    launch(entry(body, 5), [a, *out], block=256)
    signed = a.astype(np.uint8).view(np.int8)
    assert np.array_equal(out[0], signed.astype(np.int32).view(np.uint32))
    assert np.array_equal(out[1], a)
    assert np.array_equal(out[2], signed.astype(np.int16).view(np.uint16).astype(np.uint32))
    assert np.array_equal(out[3], a)


def test_stores_narrow() -> None:
    a = words(256)
    got = one("cvt.u16.u32 {x}, {a}; st.global.b8 [%rd62], {a};", [a], np.uint16)
    assert np.array_equal(got, a.astype(np.uint16))


def test_parameters_and_module_variables() -> None:
    out = np.zeros(4, np.uint32)
    text = entry(
        """
        ld.param.u64 %rd0, [p0]; mov.u64 %rd1, p0; ld.param.v2.b32 {%r1, %r2}, [p0]; mov.b64 %rd2, {%r1, %r2};
        sub.u64 %rd3, %rd0, %rd2; cvt.u32.u64 %r3, %rd3; st.global.b32 [%rd0], %r3;
        mov.u64 %rd4, table; ld.global.b32 %r4, [table+8]; st.global.b32 [%rd0+4], %r4;
        ld.const.b32 %r5, [limits+4]; st.global.b32 [%rd0+8], %r5;
        cvta.param.u64 %rd5, %rd1; ld.b32 %r6, [%rd5]; st.global.b32 [%rd0+12], %r6;
        """,
        1,
        extra=".global .align 4 .b32 table[4] = {1, 2, 30, 4};\n.const .align 4 .u32 limits[2] = {7, 0x10};",
    )
    launch(text, [out], block=1)
    assert out[:3].tolist() == [0, 30, 16]
    assert out[3] == out.ctypes.data & 0xFFFFFFFF


# --- atomics ------------------------------------------------------------


def reduced(code: str, target: np.ndarray, values: np.ndarray) -> np.ndarray:
    """256 threads with one value each update one target."""
    body = f"""{ADDRESS} mad.wide.u32 %rd0, %r0, {values.itemsize}, %rd0;
    ld.global.b{8 * values.itemsize} {"%r1" if values.itemsize == 4 else "%rd5"}, [%rd0]; {code}"""
    launch(entry(body, 2), [values, target], block=256)
    return target


def test_integer_reductions() -> None:
    values = np.random.default_rng(0).integers(-1000, 1000, 256).astype(np.int32)
    for name, wanted in (("add.s32", values.sum()), ("min.s32", values.min()), ("max.s32", values.max())):
        assert reduced(f"red.global.{name} [%rd1], %r1;", np.zeros(1, np.int32), values)[0] == wanted
    bits = words(256)
    for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        start = np.array([0xFFFFFFFF if name == "and" else 0], np.uint32)
        assert reduced(f"red.global.{name}.b32 [%rd1], %r1;", start.copy(), bits)[0] == function.reduce(bits)
    wide = np.random.default_rng(1).integers(0, 1 << 62, 256, dtype=np.uint64)
    assert reduced("atom.global.add.u64 %rd6, [%rd1], %rd5;", np.zeros(1, np.uint64), wide)[0] == wide.sum()


def test_float_reductions() -> None:
    values = np.random.default_rng(0).integers(-50, 50, 256).astype(np.float32)
    assert (
        reduced("red.relaxed.gpu.global.add.f32 [%rd1], %r1;", np.zeros(1, np.float32), values)[0]
        == values.sum()
    )
    pairs = np.random.default_rng(1).integers(-4, 5, (256, 2)).astype(np.float16)
    target = np.zeros(2, np.float16)
    reduced("red.global.add.noftz.f16x2 [%rd1], %r1;", target, pairs.view(np.uint32).reshape(-1))
    assert np.array_equal(target, pairs.astype(np.float32).sum(0))


def test_vector_reduction() -> None:
    target = np.zeros(4, np.float32)
    body = f"""{ADDRESS} cvt.rn.f32.u32 %r1, %r0; mov.b32 %r2, 0f3F800000;
    red.global.add.v4.f32 [%rd1], {{%r1, %r2, %r1, %r2}};"""
    launch(entry(body, 2), [np.zeros(1), target], block=64)
    assert target.tolist() == [2016, 64, 2016, 64]


def test_atomics_return_the_old_value_in_shared_memory() -> None:
    out = np.zeros(64, np.uint32)
    body = f"""{ADDRESS} mov.b32 %r9, smem; setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.b32 [%r9], 0; bar.sync 0;
    atom.shared.inc.u32 %r1, [%r9], 9; mad.wide.u32 %rd1, %r0, 4, %rd1; st.global.b32 [%rd1], %r1;"""
    launch(entry(body, 2, shared=16), [np.zeros(1), out], block=64)
    assert sorted(out.tolist()) == sorted(i % 10 for i in range(64))


def test_compare_and_swap_builds_a_lock_free_maximum() -> None:
    values = words(256, 3)
    code = """
    ld.relaxed.gpu.global.b32 %r2, [%rd1];
    AGAIN: max.u32 %r3, %r1, %r2; atom.global.cas.b32 %r4, [%rd1], %r2, %r3; setp.eq.u32 %p0, %r4, %r2;
    mov.b32 %r2, %r4; @!%p0 bra AGAIN;"""
    assert reduced(code, np.zeros(1, np.uint32), values)[0] == values.max()


# --- cp.async ------------------------------------------------------------

COPY = f"""{ADDRESS} mad.wide.u32 %rd0, %r0, 16, %rd0; mad.wide.u32 %rd1, %r0, 16, %rd1;
    mov.b32 %r9, smem; mad.lo.u32 %r9, %r0, 16, %r9;
    setp.lt.u32 %p0, %r0, 20; selp.u32 %r8, 16, 4, %p0;
    cp.async.cg.shared.global [%r9], [%rd0], 16, %r8; cp.async.commit_group;
    WAIT
    ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r9]; st.global.v4.b32 [%rd1], {{%r1, %r2, %r3, %r4}};"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_copies_arrive_once_waited_for(seed: int | None) -> None:
    source, target = words(128), np.zeros(128, np.uint32)
    launch(entry(COPY.replace("WAIT", "cp.async.wait_group 0;"), 2, shared=1024), [source, target], seed=seed)
    wanted = source.reshape(32, 4).copy()
    wanted[20:, 1:] = 0
    assert np.array_equal(target.reshape(32, 4), wanted)


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 1;"])
def test_copies_that_nobody_waited_for_may_not_be_read(wait: str) -> None:
    with pytest.raises(RaceError, match=r"cp\.async"):
        launch(entry(COPY.replace("WAIT", wait), 2, shared=1024), [words(128), np.zeros(128, np.uint32)])


# --- errors ------------------------------------------------------------


def test_an_access_outside_names_instruction_address_and_owner() -> None:
    source, target = words(32), np.zeros(32, np.uint32)
    with pytest.raises(IllegalAccess) as caught:
        launch(entry(f"{ADDRESS} ld.global.b32 %r1, [%rd0+{4 * 32}];", 2), [source, target])
    message = str(caught.value)
    assert f"{source.ctypes.data + 128:#x}" in message
    assert "4 bytes past the end of array 0" in message
    assert "ld.global.b32 %r1, [%rd0+128]" in message


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+4];", "not a multiple of 16"),
        ("mov.b32 %r9, smem; ld.shared.b32 %r1, [%r9+2];", "not a multiple of 4"),
        ("mov.b32 %r9, smem; st.shared.b32 [%r9+4096], %r1;", "shared access"),
        ("mov.b32 %r9, 0; st.shared.b32 [%r9], %r1;", "shared access"),
        ("mov.b64 %rd9, 0; ld.global.b32 %r1, [%rd9];", "before the start of"),
        ("mov.b32 %r9, 0x5000400; ld.shared::cluster.b32 %r1, [%r9];", "the cluster has 1 CTAs"),
        ("mov.b64 %rd9, 0x700000000000000; ld.b32 %r1, [%rd9];", "no state space"),
    ],
)
def test_illegal_accesses(code: str, error: str) -> None:
    source = np.zeros(36, np.uint32)
    start = -source.ctypes.data % 16 // 4
    aligned = source[start : start + 32]
    with pytest.raises(IllegalAccess, match=error):
        launch(entry(f"{ADDRESS} {code}", 2, shared=64), [aligned, aligned.copy()])


def test_reading_what_was_never_written() -> None:
    with pytest.raises(RaceError, match="never written"):
        launch(entry("mov.b32 %r9, smem; ld.shared.b32 %r1, [%r9];", 0, shared=64), [])


def test_registered_memory() -> None:
    memory, array = GlobalMemory(), np.arange(64, dtype=np.uint8)
    address = array.ctypes.data
    memory.register(address, 64, "the array")
    assert memory.read(address + 8, 4).tolist() == [8, 9, 10, 11]
    memory.write(address, np.array([1.5], np.float32))
    assert array[:4].view(np.float32)[0] == 1.5
    with pytest.raises(IllegalAccess, match="1 bytes past the end of the array"):
        memory.read(address + 61, 4)
    memory.unregister(address)
    with pytest.raises(IllegalAccess, match="no memory is registered"):
        memory.read(address, 1)
    with pytest.raises(KeyError):
        memory.unregister(address)


def test_inactive_lanes_neither_load_nor_store() -> None:
    a = words(64)
    code = """
    mov.b32 {x}, 1; mov.u32 %r40, %laneid; setp.lt.u32 %p0, %r40, 9;
    mov.b64 %rd40, 0; @%p0 mov.b64 %rd40, %rd62; @%p0 ld.global.b32 {x}, [%rd40];
    """
    (got,) = elementwise(code, [a], [np.uint32])
    assert np.array_equal(got, np.where(np.arange(64) % 32 < 9, a, 1))
