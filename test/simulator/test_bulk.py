"""TMA: boxes of 1 to 5 dimensions, swizzles, multicast, bounds, stores, reductions, groups, and what goes
wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_backend.simulator.simulation_errors import (
    BarrierError,
    Deadlock,
    DescriptorError,
    IllegalAccess,
    MissingProxyFence,
    RaceError,
)
from support.simulator.ptx_entries import REGISTERS, launch
from support.simulator.tensor_maps import tensor_map

SEEDS = [None, 1, 2, 3]
BUFFER = 4096
"""Where the box lies in shared memory, from the start of `smem`."""


def module(body: str, pointers: int, maps: int, shared: int = 65536) -> str:
    parameters = [f".param .u64 p{i}" for i in range(pointers)]
    parameters += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry kernel({", ".join(parameters)}) {{
    {REGISTERS}
    .shared .align 1024 .b8 smem[{shared}];
    mov.u32 %r0, %tid.x; mov.b32 %r2, smem; add.u32 %r3, %r2, {BUFFER}; mov.u32 %r4, %cluster_ctarank;
    ld.param.u64 %rd0, [p0]; setp.eq.u32 %p0, %r0, 0;
    {body}
    ret;
}}
"""


def vector(coordinates: Any) -> str:
    return "{" + ", ".join(str(c) for c in reversed(coordinates)) + "}"


INIT = "@%p0 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra W;"
LOAD = "cp.async.bulk.tensor.{n}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"


def dump(nbytes: int) -> str:
    """Copies the box as it lies in shared memory to p0."""
    return f"""
    mov.b32 %r20, %r0;
COPY:
    setp.ge.u32 %p8, %r20, {nbytes // 16}; @%p8 bra COPIED;
    mad.lo.u32 %r21, %r20, 16, %r3; mad.wide.u32 %rd20, %r20, 16, %rd0;
    ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r21]; st.global.v4.b32 [%rd20], {{%r30, %r31, %r32, %r33}};
    add.u32 %r20, %r20, 32; bra COPY;
COPIED:
    """


def load(
    array: np.ndarray,
    box: tuple[int, ...],
    coordinates: tuple[int, ...],
    *,
    seed: int | None = None,
    wait: str = WAIT,
    expect: int | None = None,
    whole: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """One TMA load of a box, and its raw bytes in shared memory."""
    nbytes = int(np.prod(box)) * array.itemsize
    out = np.zeros(nbytes, np.uint8)
    body = f"""{INIT}
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {nbytes if expect is None else expect};
    @%p0 {LOAD.format(n=len(box))} [%r3], [map0, {vector(coordinates)}], [%r2];
    {wait} {dump(nbytes)}"""
    raw = tensor_map(array, box, **options)
    launch(module(body, 2, 1), [out, whole if whole is not None else array], params=[raw], seed=seed)
    return out


def unswizzled(data: np.ndarray, span: int) -> np.ndarray:
    """Undoes the swizzle by its definition on addresses, byte by byte; the buffer is 1024-aligned."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    addresses = np.arange(len(data))
    return data[addresses ^ (((addresses >> 7) & mask) << 4)]


def filled(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 251 + 1).astype(dtype).reshape(shape)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_every_rank(rank: int, seed: int | None) -> None:
    shape, box, at = (3, 4, 5, 6, 32)[-rank:], (2, 2, 3, 2, 16)[-rank:], (1, 1, 2, 3, 8)[-rank:]
    array = filled(shape, np.uint16)
    got = load(array, box, at, seed=seed, kind="u16").view(np.uint16).reshape(box)
    assert np.array_equal(got, array[tuple(slice(a, a + b) for a, b in zip(at, box, strict=True))])


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("kind", ["u8", "bf16", "f32"])
def test_swizzles(span: int, kind: str) -> None:
    dtype = {"u8": np.uint8, "bf16": np.uint16, "f32": np.float32}[kind]
    columns = (span or 64) // np.dtype(dtype).itemsize
    array = filled((40, 2 * columns), dtype)
    data = load(array, (32, columns), (5, columns // 2), kind=kind, swizzle=span)
    got = unswizzled(data, span).view(dtype).reshape(32, columns)
    assert np.array_equal(got, array[5:37, columns // 2 : columns // 2 + columns])
    if span:
        assert not np.array_equal(data, unswizzled(data, span))


def test_elements_outside_are_filled_and_still_counted() -> None:
    array = filled((20, 32), np.float32)
    got = load(array, (16, 16), (10, 24), kind="f32").view(np.float32).reshape(16, 16)
    wanted = np.zeros((16, 16), np.float32)
    wanted[:10, :8] = array[10:, 24:]
    assert np.array_equal(got, wanted)
    before = load(array, (16, 16), (-6, -4), kind="f32").view(np.float32).reshape(16, 16)
    assert (
        np.array_equal(before[6:, 4:], array[:10, :12]) and not before[:6].any() and not before[:, :4].any()
    )
    nothing = load(array, (16, 16), (50, 0), kind="f32", nan=True).view(np.float32)
    assert np.isnan(nothing).all()


@pytest.mark.parametrize("column", [-3, 5])
def test_a_load_begins_at_a_multiple_of_16_bytes(column: int) -> None:
    with pytest.raises(IllegalAccess, match=r"along contiguous memory; expected a multiple of 16"):
        load(filled((20, 32), np.float32), (16, 16), (0, column), kind="f32")


def test_a_strided_view_is_read_through_its_strides() -> None:
    whole = filled((32, 3, 64), np.uint16)
    got = load(whole[:, 1, :], (8, 32), (4, 16), whole=whole, kind="u16").view(np.uint16).reshape(8, 32)
    assert np.array_equal(got, whole[4:12, 1, 16:48])


# --- what goes wrong in loads ------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_before_the_wait_is_an_error_that_names_both_sides(seed: int | None) -> None:
    with pytest.raises(RaceError) as caught:
        load(filled((16, 32), np.uint16), (8, 16), (0, 0), seed=seed, wait="", kind="u16")
    message = str(caught.value)
    assert "ld.shared.v4.b32" in message and "a TMA load counted on the mbarrier" in message


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_that_nobody_expected_are_told(seed: int | None) -> None:
    with pytest.raises(Deadlock, match="128 bytes have landed that it did not expect"):
        load(filled((16, 32), np.uint16), (8, 16), (0, 0), seed=seed, expect=128, kind="u16")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_that_ends_before_all_its_bytes_is_a_race(seed: int | None) -> None:
    # Two loads, but the bytes of one are expected: whichever lands last, its data were not waited for.
    array, out = filled((16, 32), np.uint16), np.zeros(512, np.uint8)
    one = f"@%p0 {LOAD.format(n=2)} [%r3+{{}}], [map0, {{{{0, 0}}}}], [%r2];"
    body = f"""{INIT} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    {one.format(0)} {one.format(256)} {WAIT} {dump(512)}"""
    with pytest.raises(RaceError, match="a TMA load counted on the mbarrier"):
        launch(module(body, 2, 1), [out, array], seed=seed, params=[tensor_map(array, (8, 16), kind="u16")])


@pytest.mark.parametrize("seed", SEEDS)
def test_waiting_for_too_many_bytes_is_a_deadlock(seed: int | None) -> None:
    with pytest.raises(Deadlock, match="128 bytes of transactions outstanding"):
        load(filled((16, 32), np.uint16), (8, 16), (0, 0), seed=seed, expect=256 + 128, kind="u16")


def test_a_map_that_reaches_outside_its_tensor() -> None:
    array = filled((16, 32), np.uint16)
    liar = np.lib.stride_tricks.as_strided(array, (4096, 32), array.strides)
    with pytest.raises(IllegalAccess, match=r"bytes (before|past) the \w+ of array \d"):
        body = f"{INIT} @%p0 {LOAD.format(n=2)} [%r3], [map0, {{0, 3000}}], [%r2]; {WAIT}"
        launch(module(body, 2, 1), [np.zeros(1), array], params=[tensor_map(liar, (8, 16), kind="u16")])


@pytest.mark.parametrize(
    ("operands", "error"),
    [
        ("[%r3+16], [map0, {0, 0}], [%r2]", (IllegalAccess, "multiples of 128")),
        ("[%r3], [map0, {0, 0}], [%r2+8]", (BarrierError, "no mbarrier was initialised")),
        ("[%r3+61440], [map0, {0, 0}], [%r2]", (IllegalAccess, "shared access")),
        ("[%r3], [map0+64, {0, 0}], [%r2]", (DescriptorError, "format")),
    ],
)
def test_loads_with_wrong_operands(operands: str, error: tuple[type[Exception], str]) -> None:
    array = filled((16, 32), np.uint16)
    raw = tensor_map(array, (8, 16), kind="u16")
    with pytest.raises(error[0], match=error[1]):
        launch(
            module(f"{INIT} @%p0 {LOAD.format(n=2)} {operands};", 2, 1), [np.zeros(1), array], params=[raw]
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("released", [True, False])
def test_a_buffer_is_refilled_only_once_its_readers_let_go(released: bool, seed: int | None) -> None:
    # Warp 1 reads the first filling; warp 0 fills anew, with or without waiting for warp 1's arrival.
    array, out = filled((16, 32), np.uint16), np.zeros(256, np.uint8)
    fill = f"""@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    @%p0 {LOAD.format(n=2)} [%r3], [map0, {{0, 0}}], [%r2];"""
    release = "V: mbarrier.try_wait.parity.shared.b64 %p9, [%r2+8], 0; @!%p9 bra V;" if released else ""
    last = "U: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 1; @!%p9 bra U;"
    body = f"""@%p0 mbarrier.init.shared.b64 [%r2+8], 32; {INIT} {fill} {WAIT}
    setp.lt.u32 %p5, %r0, 32; @%p5 bra PRODUCER;
    sub.u32 %r0, %r0, 32; {dump(256)} mbarrier.arrive.shared.b64 _, [%r2+8]; bra END;
PRODUCER: {release} {fill} {last}
END: bar.sync 0;"""
    text, maps = module(body, 2, 1), [tensor_map(array, (8, 16), kind="u16")]
    if released:
        launch(text, [out, array], block=64, seed=seed, params=maps)
        assert np.array_equal(out.view(np.uint16).reshape(8, 16), array[:8, :16])
    else:
        with pytest.raises(RaceError):
            launch(text, [out, array], block=64, seed=seed, params=maps)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("meet", ["bar.warp.sync -1;", "shfl.sync.idx.b32 %r40, %r0, 0, 31, -1;", ""])
def test_one_lane_lets_go_of_a_buffer_for_a_warp_that_has_met(meet: str, seed: int | None) -> None:
    array, out = filled((16, 32), np.uint16), np.zeros(256, np.uint8)
    fill = f"""@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    @%p0 {LOAD.format(n=2)} [%r3], [map0, {{0, 0}}], [%r2];"""
    body = f"""@%p0 mbarrier.init.shared.b64 [%r2+8], 1; {INIT} {fill} {WAIT}
    setp.lt.u32 %p5, %r0, 32; @%p5 bra PRODUCER;
    sub.u32 %r0, %r0, 32; setp.eq.u32 %p0, %r0, 5; {dump(256)} {meet}
    @%p0 mbarrier.arrive.shared.b64 _, [%r2+8]; bra END;
PRODUCER: V: mbarrier.try_wait.parity.shared.b64 %p9, [%r2+8], 0; @!%p9 bra V; {fill}
    U: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 1; @!%p9 bra U;
END: bar.sync 0;"""
    text, maps = module(body, 2, 1), [tensor_map(array, (8, 16), kind="u16")]
    if meet.startswith("bar"):
        launch(text, [out, array], block=64, seed=seed, params=maps)
        assert np.array_equal(out.view(np.uint16).reshape(8, 16), array[:8, :16])
    else:
        with pytest.raises(RaceError, match=r"overwrites shared .* warp 1 of .* may still be reading"):
            launch(text, [out, array], block=64, seed=seed, params=maps)


# --- multicast ------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast_fills_the_same_place_in_each_cta(seed: int | None) -> None:
    array, out = filled((16, 64), np.uint16), np.zeros(4 * 512, np.uint8)
    each = LOAD.format(n=2).replace("shared::cta", "shared::cluster") + ".multicast::cluster"
    # Rank 0 sends the upper half to ranks 0, 1, 3; rank 2 the lower half to all four.
    body = f"""{INIT}
    setp.eq.u32 %p1, %r4, 2; selp.u32 %r5, 256, 512, %p1;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r5;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.b16 %h1, 0xb; mov.b16 %h2, 0xf; setp.eq.u32 %p2, %r4, 0;
    and.pred %p3, %p0, %p2; and.pred %p4, %p0, %p1;
    @%p3 {each} [%r3], [map0, {{0, 0}}], [%r2], %h1;
    @%p4 {each} [%r3+256], [map0, {{16, 8}}], [%r2], %h2;
    {WAIT} @!%p1 bra BOTH;
    add.u32 %r6, %r3, 256; mad.wide.u32 %rd0, %r4, 512, %rd0; mov.b32 %r3, %r6; add.s64 %rd0, %rd0, 256;
    setp.lt.u32 %p6, %r0, 16; @!%p6 bra END; mad.lo.u32 %r21, %r0, 16, %r3; mad.wide.u32 %rd20, %r0, 16, %rd0;
    ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r21]; st.global.v4.b32 [%rd20], {{%r30, %r31, %r32, %r33}};
    bra END;
BOTH:
    mad.wide.u32 %rd0, %r4, 512, %rd0; {dump(512)}
END:
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    launch(
        module(body, 2, 1),
        [out, array],
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
        seed=seed,
        params=[tensor_map(array, (8, 16), kind="u16")],
    )
    got = out.view(np.uint16).reshape(4, 2, 8, 16)
    for rank in range(4):
        assert np.array_equal(got[rank, 1], array[8:, 16:32])
        assert np.array_equal(got[rank, 0], array[:8, :16] if rank != 2 else 0 * array[:8, :16])


# --- stores and reductions ------------------------------------------------------------

FILL = """
    mov.b32 %r20, %r0;
FILL: setp.ge.u32 %p8, %r20, {words}; @%p8 bra FILLED;
    mad.lo.u32 %r21, %r20, 4, %r3; mad.wide.u32 %rd20, %r20, 4, %rd0; ld.global.b32 %r22, [%rd20];
    st.shared.b32 [%r21], %r22; add.u32 %r20, %r20, 32; bra FILL;
FILLED:
"""
STORE = "cp{reduce}.async.bulk.tensor.2d.global.shared::cta{op}.tile.bulk_group [map0, {at}], [%r3];"
COMMIT = "cp.async.bulk.commit_group;"


def store(
    source: np.ndarray,
    target: np.ndarray,
    box: tuple[int, int],
    at: tuple[int, int],
    *,
    kind: str,
    swizzle: int = 0,
    fence: str = "fence.proxy.async.shared::cta;",
    wait: str = "cp.async.bulk.wait_group 0;",
    reduce: str = "",
    guard: str = "@%p0 ",
    seed: int | None = None,
    meet: str = "bar.sync 0;",
    after: str = "",
) -> None:
    """Fills shared memory with `source` and stores it as a box of `target`."""
    op = STORE.format(reduce=".reduce" if reduce else "", op=f".{reduce}" if reduce else "", at=vector(at))
    words = source.nbytes // 4
    body = f"{FILL.format(words=words)} {fence} {meet} {guard}{op} {COMMIT} {wait} {after}"
    launch(
        module(body, 2, 1),
        [source, target],
        seed=seed,
        params=[tensor_map(target, box, kind=kind, swizzle=swizzle)],
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("guard", ["@%p0 ", ""])
@pytest.mark.parametrize("span", [0, 64])
def test_stores_clip_at_the_bounds(span: int, guard: str, seed: int | None) -> None:
    source, target = filled((16, 32), np.uint16), np.zeros((20, 48), np.uint16)
    raw = np.ascontiguousarray(unswizzled(source.view(np.uint8).reshape(-1), span).view(np.uint32))
    store(raw, target, (16, 32), (10, 24), kind="u16", swizzle=span, guard=guard, seed=seed)
    wanted = np.zeros_like(target)
    wanted[10:, 24:] = source[:10, :24]
    assert np.array_equal(target, wanted)


def test_a_store_begins_at_a_multiple_of_16_bytes() -> None:
    source, target = np.zeros((16, 32), np.uint16), np.zeros((20, 48), np.uint16)
    with pytest.raises(IllegalAccess, match=r"begins 2 bytes along contiguous memory; expected a multiple"):
        store(source.view(np.uint32), target, (16, 32), (0, 1), kind="u16")


def test_a_store_does_not_begin_before_the_tensor() -> None:
    source, target = np.zeros((16, 32), np.uint32), np.zeros((20, 48), np.uint32)
    with pytest.raises(IllegalAccess, match=r"a store to a box at \(24, -5\); only loads may begin before 0"):
        store(source, target, (16, 32), (-5, 24), kind="u32")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_needs_its_proxy_fence(seed: int | None) -> None:
    with pytest.raises(MissingProxyFence, match=r"no fence\.proxy\.async stands"):
        store(
            filled((8, 32), np.uint32),
            np.zeros((8, 32), np.uint32),
            (8, 32),
            (0, 0),
            kind="u32",
            fence="",
            seed=seed,
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("guard", ["@%p0 ", ""])
@pytest.mark.parametrize("meet", ["bar.warp.sync -1;", "shfl.sync.idx.b32 %r40, %r0, 0, 31, -1;", ""])
def test_a_store_needs_the_lanes_that_wrote_to_have_met(meet: str, guard: str, seed: int | None) -> None:
    source, target = filled((8, 32), np.uint32), np.zeros((8, 32), np.uint32)
    options = {"kind": "u32", "guard": guard, "meet": meet, "seed": seed}
    if meet.startswith("bar"):
        store(source, target, (8, 32), (0, 0), **options)
        assert np.array_equal(source, target)
    else:
        with pytest.raises(
            RaceError,
            match=r"reads shared .* written by warp 0 .* lanes of one warp are ordered by bar\.warp\.sync",
        ):
            store(source, target, (8, 32), (0, 0), **options)


@pytest.mark.parametrize(("writer", "fails"), [("%p0", False), ("%p1", True)])
def test_a_lane_stores_what_it_wrote_itself(writer: str, fails: bool) -> None:
    out = np.zeros(4, np.uint32)
    body = f"""setp.eq.u32 %p1, %r0, 1; @{writer} st.shared.v4.b32 [%r3], {{7, 8, 9, 10}};
    @{writer} fence.proxy.async.shared::cta;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r3], 16; {COMMIT}
    cp.async.bulk.wait_group 0;"""
    if fails:
        with pytest.raises(RaceError, match=r"lanes of one warp are ordered by bar\.warp\.sync"):
            launch(module(body, 1, 0), [out])
    else:
        launch(module(body, 1, 0), [out])
        assert out.tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("wait", "fails"),
    [("", True), ("cp.async.bulk.wait_group.read 1;", True), ("cp.async.bulk.wait_group.read 0;", False)],
)
def test_the_source_of_a_store_is_busy_until_it_is_read(wait: str, fails: bool, seed: int | None) -> None:
    source, target = filled((8, 32), np.uint32), np.zeros((8, 32), np.uint32)
    after = "mad.lo.u32 %r21, %r0, 4, %r3; st.shared.b32 [%r21], 0; cp.async.bulk.wait_group 0;"
    if fails:
        with pytest.raises(RaceError, match=r"may still be reading.*cp\.async\.bulk\.tensor"):
            store(source, target, (8, 32), (0, 0), kind="u32", wait=wait, after=after, seed=seed)
    else:
        store(source, target, (8, 32), (0, 0), kind="u32", wait=wait, after=after, seed=seed)
        assert np.array_equal(source, target)


def test_a_wait_by_a_thread_that_issued_nothing_orders_nothing() -> None:
    source, target = filled((8, 32), np.uint32), np.zeros((8, 32), np.uint32)
    wait = "setp.eq.u32 %p7, %r0, 1; @%p7 cp.async.bulk.wait_group.read 0; bar.warp.sync -1;"
    after = "mad.lo.u32 %r21, %r0, 4, %r3; st.shared.b32 [%r21], 0;"
    with pytest.raises(RaceError):
        store(source, target, (8, 32), (0, 0), kind="u32", wait=wait, after=after)


def test_leaving_while_a_store_reads() -> None:
    with pytest.raises(IllegalAccess, match="have exited while this store still reads"):
        store(filled((8, 32), np.uint32), np.zeros((8, 32), np.uint32), (8, 32), (0, 0), kind="u32", wait="")


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("u32", np.uint32), ("f16", np.float16)])
@pytest.mark.parametrize("name", ["add", "min", "max"])
def test_reductions_into_global_memory(kind: str, dtype: Any, name: str) -> None:
    source = filled((8, 32), dtype)
    target = np.full((10, 32), 100, dtype)
    store(source, target, (8, 32), (4, 0), kind=kind, reduce=name)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
    assert np.array_equal(target[4:], function(source[:6], dtype(100)))
    assert (target[:4] == 100).all()


# --- plain bulk copies ------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_bytes_in_and_out(seed: int | None) -> None:
    source, target = filled((512,), np.uint8), np.zeros(1024, np.uint8)
    body = f"""{INIT} ld.param.u64 %rd1, [p1];
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], 512, [%r2];
    {WAIT}
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 512; {COMMIT}
    @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1+512], [%r3], 256; {COMMIT}
    cp.async.bulk.wait_group 0;"""
    launch(module(body, 2, 0), [source, target], seed=seed)
    assert np.array_equal(target[:512], source)
    assert np.array_equal(target[512:768], source[:256])


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_to_shared_memory_of_another_cta(seed: int | None) -> None:
    out = np.zeros(32, np.uint32)
    body = f"""{INIT} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
    mad.lo.u32 %r9, %r0, 4, %r3; add.u32 %r10, %r0, 7; st.shared.b32 [%r9], %r10;
    fence.proxy.async.shared::cta;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r11, %r3, 1; mapa.shared::cluster.u32 %r12, %r2, 1; setp.eq.u32 %p1, %r4, 0;
    and.pred %p2, %p0, %p1;
    add.u32 %r11, %r11, 1024;
    @%p2 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r11], [%r3], 128, [%r12];
    @%p1 bra END;
    {WAIT}
    ld.shared.b32 %r13, [%r9+1024]; mad.wide.u32 %rd1, %r0, 4, %rd0; st.global.b32 [%rd1], %r13;
END: barrier.cluster.arrive; barrier.cluster.wait;"""
    launch(module(body, 1, 0), [out], grid=(2, 1, 1), cluster=(2, 1, 1), seed=seed)
    assert out.tolist() == [i + 7 for i in range(32)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fence", ["fence.proxy.async.shared::cta;", ""])
def test_a_load_over_ordinary_stores_needs_the_proxy_fence_too(fence: str, seed: int | None) -> None:
    code = f"""
    @%p0 mbarrier.init.shared.b64 [%r2], 1; mad.lo.u32 %r5, %r0, 4, %r2; st.shared.b32 [%r5+128], %r0;
    {fence} bar.sync 0; @!%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+128], [%rd0], 128, [%r2];
WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra WAIT;
    ld.shared.b32 %r6, [%r5+128]; mad.wide.u32 %rd1, %r0, 4, %rd0; st.global.b32 [%rd1+128], %r6;
    """
    array = filled((2, 32), np.uint32)
    first = array[0].copy()
    if fence:
        launch(module(code, 1, 0), [array], seed=seed)
        assert np.array_equal(array[1], first)
    else:
        with pytest.raises(
            MissingProxyFence, match=r"overwrites shared .* warp 0 .* through the generic proxy"
        ):
            launch(module(code, 1, 0), [array], seed=seed)
