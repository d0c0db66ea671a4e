"""Two stored values of 8 bits as two numbers of 16 or of 32 bits, without rounding: integers, and fp8."""

from __future__ import annotations

from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Int8, Int32, Numeric, Uint8

from cute_backend.templates.instructions import assembled

INTEGERS = (Int8, Uint8)

MAGIC = 0x4B400000
"""The bits of 1.5 * 2**23 in fp32. Its last bit counts ones, so an integer added to these bits adds as much
to the number, as long as that stays between 2**23 and 2**24."""

_OF_BYTE = (1, 1 << 8)
"""The bytes by which dp4a multiplies those of a pair, to leave one of them."""


def numbers(
    pair: Int32, stored: type[Numeric], start: Int32 | int = MAGIC, by_bits: bool = False
) -> list[Int32]:
    """Two stored values, in the low 16 bits of a register, as two of fp32. Integers are less the integer z,
    of no more than 22 bits, if `start` is `MAGIC` - z. `by_bits` is as for `converted`.

    dp4a adds a byte to the bits of `MAGIC`: no mask takes it out of the pair, nothing extends its sign, and z
    is subtracted for nothing. The number is MAGIC + x - z, of which the last addition leaves x - z exactly.
    """
    if stored in INTEGERS:
        sign = "s32" if stored is Int8 else "u32"
        sums = (assembled(f"dp4a.{sign}.s32 $0, $1, $2, $3;", pair, byte, start) for byte in _OF_BYTE)
        return [assembled("add.rn.f32 $0, $1, 0fCB400000;", each) for each in sums]
    return unpack(converted(pair, stored, Float16, by_bits), Float16)


def converted(pair: Int32, stored: type[Numeric], to: type[Numeric], by_bits: bool = False) -> Int32:
    """Two stored values, in the low 16 bits of a register, as two of 16 bits. No rounding takes place.
    `by_bits` is for GPUs without conversions of fp8."""
    if stored is Int8:
        return _integers(pair, to)
    if stored is Uint8:
        return _unsigned(pair, to)
    if stored is Float8E5M2:
        halves = _prmt(pair, 0, 0x1404)  # the bits of fp16 begin with those of e5m2
    else:
        assert stored is Float8E4M3FN
        instruction = "{ .reg .b16 low; mov.b32 {low, _}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }"
        halves = _e4m3_bits(pair) if by_bits else assembled(instruction, pair)
    if to is not BFloat16:
        return halves
    low, high = unpack(halves, Float16)
    return pack(low, high, BFloat16)


def _integers(pair: Int32, to: type[Numeric]) -> Int32:
    """Two int8 as two of 16 bits, by bits that make numbers of 8 bits the last ones of a larger number."""
    if to is not BFloat16:
        # 1024 + (x + 128) in fp16, less 1152.
        words = _prmt(pair ^ 0x8080, 0x64646464, 0x4140)
        return assembled("sub.rn.f16x2 $0, $1, $2;", words, 0x64806480)
    # The low 7 bits behind the exponent of 128, less 128, or 256 if the sign has made the exponent that.
    words = _prmt(pair, 0x43434343, 0x4140)
    return assembled(
        "fma.rn.bf16x2 $0, $1, $2, $3;", words & ~0x007F007F, 0xBF80BF80 - (1 << 32), words & ~0x00800080
    )


def _e4m3_bits(pair: Int32) -> Int32:
    """Two e4m3 as two fp16, whose exponents are larger by 8 than the same bits say: 15 is the bias of one,
    7 that of the other. The largest magnitude is NaN; it alone has a carry, which completes NaN's
    exponent."""
    words = _prmt(pair, 0, 0x1404)
    magnitude = words >> 1 & 0x3F803F80
    nan = magnitude + 0x00800080 & 0x40004000
    signed = magnitude | nan | words & 0x80008000 - (1 << 32)
    return assembled("mul.rn.f16x2 $0, $1, $2;", signed, 0x5C005C00)


def _unsigned(pair: Int32, to: type[Numeric]) -> Int32:
    """Two uint8 as two of 16 bits."""
    if to is not BFloat16:
        # 1024 + x in fp16, less 1024.
        words = _prmt(pair, 0x64646464, 0x4140)
        return assembled("sub.rn.f16x2 $0, $1, $2;", words, 0x64006400)
    low, high = numbers(pair, Uint8)
    return pack(low, high, BFloat16)


def _prmt(low: Int32, high: int, selector: int) -> Int32:
    """The bytes of two registers that the digits of `selector` name, the last one first (PTX ISA, prmt)."""
    return assembled("prmt.b32 $0, $1, $2, $3;", low, high, selector)


def pack(low: Int32, high: Int32, to: type[Numeric]) -> Int32:
    """Two numbers of fp32, each rounded to 16 bits."""
    return assembled(f"cvt.rn.{NAMES[to]}x2.f32 $0, $1, $2;", high, low)


def unpack(pair: Int32, of: type[Numeric]) -> list[Int32]:
    """Two numbers of 16 bits as two of fp32."""
    if of is BFloat16:
        return [assembled("shl.b32 $0, $1, 16;", pair), assembled("and.b32 $0, $1, 0xffff0000;", pair)]
    return [
        assembled(f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {half}; }}", pair)
        for half in ("low", "high")
    ]


NAMES = {BFloat16: "bf16", Float16: "f16"}
"""The names of the types of 16 bits in instructions."""
