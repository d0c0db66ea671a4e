"""Integer arithmetic, logic, bit fields, comparison and selection against Python's own integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from support.simulator.ptx_entries import elementwise, one

DTYPES = {
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
}
KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")


def samples(kind: str, seed: int, count: int = 500) -> np.ndarray:
    """Random values of all magnitudes, and the edges."""
    dtype = np.dtype(DTYPES[kind])
    bits = 8 * dtype.itemsize
    random = np.random.default_rng(seed)
    wide = random.integers(0, 1 << 63, count, dtype=np.uint64) * 2 + random.integers(
        0, 2, count, dtype=np.uint64
    )
    raw = wide >> random.integers(64 - bits, 64, count).astype(np.uint64)
    edges = np.array([0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 3], np.uint64)
    mixed = np.concatenate([raw, edges, np.roll(edges, seed)]).astype(f"u{dtype.itemsize}").view(dtype)
    return random.permutation(mixed)


def wrap(value: int, dtype: type) -> int:
    bits = 8 * np.dtype(dtype).itemsize
    value %= 1 << bits
    return value - (1 << bits) if np.dtype(dtype).kind == "i" and value >> (bits - 1) else value


def check(code: str, kinds: str, result: str, function: Callable[..., int]) -> None:
    """Runs `code` on samples and compares with `function` on Python ints, wrapped to the result's type."""
    inputs = [samples(k, seed) for seed, k in enumerate(kinds.split())]
    got = one(code, inputs, DTYPES[result])
    wanted = [
        wrap(int(function(*(int(v) for v in row))), DTYPES[result]) for row in zip(*inputs, strict=True)
    ]
    assert got.tolist() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_products(kind: str) -> None:
    for name, function in (("add", int.__add__), ("sub", int.__sub__)):
        check(f"{name}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, function)
    bits = 8 * np.dtype(DTYPES[kind]).itemsize
    check(f"mul.lo.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, int.__mul__)
    check(f"mul.hi.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, lambda a, b: (a * b) >> bits)
    check(
        f"mad.lo.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} {kind}", kind, lambda a, b, c: a * b + c
    )
    check(
        f"mad.hi.{kind} {{x}}, {{a}}, {{b}}, {{c}};",
        f"{kind} {kind} {kind}",
        kind,
        lambda a, b, c: ((a * b) >> bits) + c,
    )


@pytest.mark.parametrize(("kind", "wide"), [("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")])
def test_wide_products(kind: str, wide: str) -> None:
    check(f"mul.wide.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", wide, int.__mul__)
    check(
        f"mad.wide.{kind} {{x}}, {{a}}, {{b}}, {{c}};",
        f"{kind} {kind} {wide}",
        wide,
        lambda a, b, c: a * b + c,
    )


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


@pytest.mark.parametrize("kind", KINDS)
def test_quotients(kind: str) -> None:
    nonzero = f"setp.eq.{kind} %p0, {{b}}, 0; selp.{'b' + kind[1:]} {{b}}, 7, {{b}}, %p0;"
    check(
        f"{nonzero} div.{kind} {{x}}, {{a}}, {{b}};",
        f"{kind} {kind}",
        kind,
        lambda a, b: truncated(a, b or 7),
    )
    check(
        f"{nonzero} rem.{kind} {{x}}, {{a}}, {{b}};",
        f"{kind} {kind}",
        kind,
        lambda a, b: a - truncated(a, b or 7) * (b or 7),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_and_signs(kind: str) -> None:
    check(f"min.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, min)
    check(f"max.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, max)
    check(
        f"sad.{kind} {{x}}, {{a}}, {{b}}, {{c}};",
        f"{kind} {kind} {kind}",
        kind,
        lambda a, b, c: c + abs(a - b),
    )
    if kind.startswith("s"):
        check(f"abs.{kind} {{x}}, {{a}};", kind, kind, abs)
        check(f"neg.{kind} {{x}}, {{a}};", kind, kind, lambda a: -a)


def test_saturated_sums() -> None:
    clip = lambda v: max(-(1 << 31), min((1 << 31) - 1, v))  # noqa: E731
    check("add.sat.s32 {x}, {a}, {b};", "s32 s32", "s32", lambda a, b: clip(a + b))
    check("sub.sat.s32 {x}, {a}, {b};", "s32 s32", "s32", lambda a, b: clip(a - b))


@pytest.mark.parametrize("name", ["add", "min", "max"])
@pytest.mark.parametrize("kind", ["u16", "s16"])
def test_packed_halves(name: str, kind: str) -> None:
    a, b = (samples("b32", seed) for seed in (3, 4))
    got = one(f"{name}.{kind}x2 {{x}}, {{a}}, {{b}};", [a, b], np.uint32)
    x, y = a.view(DTYPES[kind]), b.view(DTYPES[kind])
    wanted = {"add": lambda: x + y, "min": lambda: np.minimum(x, y), "max": lambda: np.maximum(x, y)}[name]()
    assert np.array_equal(got.view(DTYPES[kind]), wanted)


def test_carry_chains_make_128_bit_arithmetic() -> None:
    a, b, c, d = (samples("u64", seed) for seed in range(4))
    low, high = elementwise(
        "add.cc.u64 {x}, {a}, {c}; addc.u64 {y}, {b}, {d};", [a, b, c, d], [np.uint64, np.uint64]
    )
    both = lambda lo, hi: [int(x) | int(y) << 64 for x, y in zip(lo, hi, strict=True)]  # noqa: E731
    modulus = 1 << 128
    assert both(low, high) == [(x + y) % modulus for x, y in zip(both(a, b), both(c, d), strict=True)]
    low, high = elementwise(
        "sub.cc.u64 {x}, {a}, {c}; subc.u64 {y}, {b}, {d};", [a, b, c, d], [np.uint64, np.uint64]
    )
    assert both(low, high) == [(x - y) % modulus for x, y in zip(both(a, b), both(c, d), strict=True)]
    low, high = elementwise(
        "mad.lo.cc.u64 {x}, {a}, {c}, {b}; madc.hi.u64 {y}, {a}, {c}, {d};",
        [a, b, c, d],
        [np.uint64, np.uint64],
    )
    wanted = [
        (int(x) * int(z) + (int(y) | int(w) << 64)) % modulus for x, y, z, w in zip(a, b, c, d, strict=True)
    ]
    assert both(low, high) == wanted


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic_and_shifts(kind: str) -> None:
    bits = int(kind[1:])
    check(f"and.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, int.__and__)
    check(f"or.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, int.__or__)
    check(f"xor.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind, int.__xor__)
    check(f"not.{kind} {{x}}, {{a}};", kind, kind, int.__invert__)
    check(f"cnot.{kind} {{x}}, {{a}};", kind, kind, lambda a: int(a == 0))
    amounts = np.arange(514, dtype=np.uint32) % 70
    values = samples(kind, 1)
    for name, function in (("shl.b", lambda a, n: a << n), ("shr.u", lambda a, n: a >> n)):
        got = one(f"{name}{bits} {{x}}, {{a}}, {{b}};", [values, amounts], DTYPES[kind])
        rows = zip(values, amounts, strict=True)
        assert got.tolist() == [wrap(function(int(a), int(n)), DTYPES[kind]) for a, n in rows]
    signed = values.view(DTYPES["s" + kind[1:]])
    got = one(f"shr.s{bits} {{x}}, {{a}}, {{b}};", [signed, amounts], signed.dtype.type)
    assert got.tolist() == [int(a) >> int(n) for a, n in zip(signed, amounts, strict=True)]


@pytest.mark.parametrize("table", [0x80, 0x96, 0xE8, 0xCA, 0x01, 0x1B])
def test_lop3_is_its_truth_table(table: int) -> None:
    def bits(a: int, b: int, c: int) -> int:
        rows = (((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) for i in range(32))
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    check(f"lop3.b32 {{x}}, {{a}}, {{b}}, {{c}}, {table};", "b32 b32 b32", "b32", bits)


def test_funnel_shifts() -> None:
    pair = lambda a, b: (b << 32) | a  # noqa: E731
    check(
        "shf.l.wrap.b32 {x}, {a}, {b}, {c};",
        "b32 b32 b32",
        "b32",
        lambda a, b, c: pair(a, b) << (c & 31) >> 32,
    )
    check("shf.r.wrap.b32 {x}, {a}, {b}, {c};", "b32 b32 b32", "b32", lambda a, b, c: pair(a, b) >> (c & 31))
    check(
        "shf.l.clamp.b32 {x}, {a}, {b}, {c};",
        "b32 b32 b32",
        "b32",
        lambda a, b, c: pair(a, b) << min(c, 32) >> 32,
    )
    check(
        "shf.r.clamp.b32 {x}, {a}, {b}, {c};", "b32 b32 b32", "b32", lambda a, b, c: pair(a, b) >> min(c, 32)
    )


def test_byte_permutation() -> None:
    def permute(a: int, b: int, c: int) -> int:
        source = (a | b << 32).to_bytes(8, "little")
        picked = []
        for i in range(4):
            selector = c >> 4 * i & 15
            byte = source[selector & 7]
            picked.append((0xFF if byte & 0x80 else 0) if selector & 8 else byte)
        return int.from_bytes(bytes(picked), "little")

    check("prmt.b32 {x}, {a}, {b}, {c};", "b32 b32 b32", "b32", permute)
    byte = lambda a, i: a >> 8 * i & 0xFF  # noqa: E731
    check(
        "prmt.b32.rc8 {x}, {a}, {b}, {c};", "b32 b32 b32", "b32", lambda a, b, c: byte(a, c & 3) * 0x01010101
    )
    check(
        "prmt.b32.f4e {x}, {a}, {b}, {c};",
        "b32 b32 b32",
        "b32",
        lambda a, b, c: (a | b << 32) >> 8 * (c & 3) & 0xFFFFFFFF,
    )


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bit_counts(kind: str) -> None:
    bits = int(kind[1:])
    check(f"popc.{kind} {{x}}, {{a}};", kind, "u32", lambda a: bin(a).count("1"))
    check(f"clz.{kind} {{x}}, {{a}};", kind, "u32", lambda a: bits - a.bit_length())
    check(f"brev.{kind} {{x}}, {{a}};", kind, kind, lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    check(f"bfind.u{bits} {{x}}, {{a}};", f"u{bits}", "u32", lambda a: a.bit_length() - 1)
    check(f"bfind.s{bits} {{x}}, {{a}};", f"s{bits}", "u32", lambda a: (a if a >= 0 else ~a).bit_length() - 1)
    check(
        f"bfind.shiftamt.u{bits} {{x}}, {{a}};",
        f"u{bits}",
        "u32",
        lambda a: bits - a.bit_length() if a else -1,
    )


def test_bit_fields() -> None:
    def unsigned(a: int, start: int, length: int) -> int:
        return (a >> start) & ((1 << length) - 1)

    def signed(a: int, start: int, length: int) -> int:
        if length == 0:
            return 0
        field = [(a >> min(start + i, 31)) & 1 for i in range(length)]
        return wrap(sum(bit << i for i, bit in enumerate(field)) - (field[-1] << length), np.int32)

    values = samples("b32", 5)
    starts = np.arange(514, dtype=np.uint32) % 37
    lengths = np.arange(514, dtype=np.uint32) % 34
    rows = list(zip(values.tolist(), starts.tolist(), lengths.tolist(), strict=True))
    got = one("bfe.u32 {x}, {a}, {b}, {c};", [values, starts, lengths], np.uint32)
    assert got.tolist() == [unsigned(*row) for row in rows]
    got = one("bfe.s32 {x}, {a}, {b}, {c};", [values.view(np.int32), starts, lengths], np.int32)
    assert got.tolist() == [wrap(signed(*row), np.int32) for row in rows]
    got = one("bfi.b32 {x}, {d}, {a}, {b}, {c};", [values, starts, lengths, samples("b32", 6)], np.uint32)
    masks = [((1 << n) - 1 << s) & 0xFFFFFFFF for _, s, n in rows]
    inserted = zip(samples("b32", 6).tolist(), rows, masks, strict=True)
    assert got.tolist() == [(a & ~m) | (f << s & m) for f, (a, s, _), m in inserted]


def test_dot_products_of_bytes() -> None:
    def parts(v: int, signed: bool) -> list[int]:
        return (
            list(v.to_bytes(4, "little"))
            if not signed
            else [b - 256 * (b > 127) for b in v.to_bytes(4, "little")]
        )

    check(
        "dp4a.u32.s32 {x}, {a}, {b}, {c};",
        "b32 b32 b32",
        "b32",
        lambda a, b, c: c + sum(x * y for x, y in zip(parts(a, False), parts(b, True), strict=True)),
    )


UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.parametrize("kind", KINDS)
def test_comparisons(kind: str) -> None:
    import operator

    for name in ("eq", "ne", "lt", "le", "gt", "ge", *(UNSIGNED_NAMES if kind.startswith("u") else ())):
        function = getattr(operator, UNSIGNED_NAMES.get(name, name))
        check(
            f"setp.{name}.{kind} %p0, {{a}}, {{b}}; selp.u32 {{x}}, 1, 0, %p0;",
            f"{kind} {kind}",
            "u32",
            function,
        )
    check(f"set.lt.u32.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", "u32", lambda a, b: -(a < b))


def test_comparison_combined_with_a_predicate() -> None:
    a, b, c = (samples("s32", seed) for seed in range(3))
    code = "setp.gt.s32 %p2, {c}, 0; setp.lt.and.s32 %p0|%p1, {a}, {b}, %p2;"
    x, y = elementwise(code + "selp.u32 {x}, 1, 0, %p0; selp.u32 {y}, 1, 0, %p1;", [a, b, c], [np.uint32] * 2)
    assert np.array_equal(x, (a < b) & (c > 0))
    assert np.array_equal(y, ~(a < b) & (c > 0))
    (z,) = elementwise(
        "setp.gt.s32 %p2, {c}, 0; setp.lt.xor.s32 %p0, {a}, {b}, !%p2; selp.u32 {x}, 1, 0, %p0;",
        [a, b, c],
        [np.uint32],
    )
    assert np.array_equal(z, (a < b) ^ ~(c > 0))


def test_selection() -> None:
    check("slct.s32.s32 {x}, {a}, {b}, {c};", "s32 s32 s32", "s32", lambda a, b, c: a if c >= 0 else b)
    check("slct.u64.s32 {x}, {a}, {b}, {c};", "u64 u64 s32", "u64", lambda a, b, c: a if c >= 0 else b)


def test_predicate_logic_under_guards() -> None:
    a, b = samples("s32", 1), samples("s32", 2)
    code = """
    setp.lt.s32 %p0, {a}, {b}; setp.lt.s32 %p1, {a}, 0;
    and.pred %p2, %p0, %p1; xor.pred %p3, %p0, %p1; not.pred %p4, %p3; or.pred %p5, %p2, %p4;
    mov.b32 {x}, 5; @%p5 add.s32 {x}, {x}, {a}; @!%p5 sub.s32 {x}, {x}, {b};
    """
    got = one(code, [a, b], np.int32)
    p, q = a < b, a < 0
    assert np.array_equal(got, np.where((p & q) | ~(p ^ q), 5 + a, 5 - b))


def test_packing_and_unpacking_moves() -> None:
    a, b = samples("b32", 1), samples("b32", 2)
    code = """
    mov.b64 %rd32, {{{a}, {b}}}; mov.b64 {{%r40, %r41}}, %rd32; mov.b64 {{_, %r42}}, %rd32;
    mov.b32 {{%h40, %h41}}, {a}; mov.b32 %r43, {{%h41, %h40}};
    mov.b128 %rq0, {{%rd32, %rd32}}; mov.b128 {{%rd33, %rd34}}, %rq0;
    mov.b64 {x}, %rd34; xor.b32 %r44, %r40, %r42; xor.b32 {y}, %r44, %r43; mov.b32 {z}, %r41;
    """
    x, y, z = elementwise(code, [a, b], [np.uint64, np.uint32, np.uint32])
    assert np.array_equal(x, a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32))
    assert np.array_equal(y, a ^ b ^ ((a << np.uint32(16)) | (a >> np.uint32(16))))
    assert np.array_equal(z, b)
