"""Two stored values as two numbers of 16 or of 32 bits, without rounding: integers of 8 and of 4 bits, and
fp8. Each format is one object, which takes a pair of neighbours along K from the low bits of a register."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass import BFloat16, Float16, Int32, Numeric

from cute_backend.kinds.scales import has_integers
from cute_backend.kinds.stored import STORED
from cute_backend.spec import DType
from cute_backend.templates import packed
from cute_backend.templates.instructions import assembled

MAGIC = 0x4B400000
"""The bits of 1.5 * 2**23 in fp32. Its last bit counts ones, so an integer added to these bits adds as much
to the number, as long as that stays between 2**23 and 2**24."""

_OF_BYTE = (1, 1 << 8)
"""The bytes by which dp4a multiplies those of a pair, to leave one of them."""


@dataclass(frozen=True)
class StoredPairs:
    """Pairs of stored values of one format, each in the low bits of a register.

    An integer zero may be subtracted from integers as they are made numbers, by an operand that says it:
    `start` for numbers of fp32, and for those of 16 bits `packed_start`, if the format `subtracts_packed`
    such zeros.
    """

    dtype: DType

    @property
    def bytes(self) -> int:
        """Bytes of a pair."""
        return 2

    def in_thread(self, rows: Int32) -> StoredPairs:
        """The format in a thread that has its constants in registers. `rows` is a number that only a launch
        knows, and that is not negative."""
        return self

    def of_word(self, word: Int32, index: int) -> Int32:
        """The pair with a number in a word of them, as the other methods take it."""
        return word >> 16 * index

    def converted(self, pair: Int32, to: type[Numeric]) -> Int32:
        """A pair as two numbers of 16 bits."""
        raise NotImplementedError

    def numbers(self, pair: Int32, start: Int32 | None = None) -> list[Int32]:
        """A pair as two numbers of fp32, less the zero of `start`, if that is given."""
        return unpack(self.converted(pair, Float16), Float16)

    def start(self, zero: Int32) -> Int32:
        """The operand by which `numbers` subtracts an integer zero, of no more than 22 bits."""
        raise NotImplementedError

    def subtracts_packed(self, of: DType, to: type[Numeric]) -> bool:
        """Whether `less` subtracts all integer zeros of dtype `of`."""
        return False

    def packed_start(self, zero: Int32, of: DType, to: type[Numeric]) -> Int32:
        """The operand by which `less` subtracts an integer zero of dtype `of`."""
        raise NotImplementedError

    def less(self, pair: Int32, start: Int32, of: DType, to: type[Numeric]) -> Int32:
        """A pair less the zero of `start`, as two numbers of 16 bits."""
        raise NotImplementedError


class Integers(StoredPairs):
    """Integers of 8 bits.

    dp4a adds a byte to the bits of `MAGIC`: no mask takes it out of the pair, nothing extends its sign, and a
    zero z is subtracted for nothing. The number is MAGIC + x - z, of which the last addition leaves x - z
    exactly.
    """

    def numbers(self, pair: Int32, start: Int32 | None = None) -> list[Int32]:
        sign, first = "s32" if self.dtype is DType.I8 else "u32", MAGIC if start is None else start
        sums = (assembled(f"dp4a.{sign}.s32 $0, $1, $2, $3;", pair, byte, first) for byte in _OF_BYTE)
        return [assembled("add.rn.f32 $0, $1, 0fCB400000;", each) for each in sums]

    def start(self, zero: Int32) -> Int32:
        return MAGIC - zero

    def converted(self, pair: Int32, to: type[Numeric]) -> Int32:
        if self.dtype is DType.I8:
            return _signed(pair, to)
        if to is not BFloat16:
            # 1024 + x in fp16, less 1024.
            words = _prmt(pair, 0x64646464, 0x4140)
            return assembled("sub.rn.f16x2 $0, $1, $2;", words, 0x64006400)
        low, high = self.numbers(pair)
        return pack(low, high, BFloat16)


def _signed(pair: Int32, to: type[Numeric]) -> Int32:
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


@dataclass(frozen=True)
class Float8(StoredPairs):
    """fp8. `by_bits` is for GPUs without conversions of it."""

    by_bits: bool = False

    def converted(self, pair: Int32, to: type[Numeric]) -> Int32:
        if self.dtype is DType.E5M2:
            halves = _prmt(pair, 0, 0x1404)  # the bits of fp16 begin with those of e5m2
        else:
            instruction = "{ .reg .b16 low; mov.b32 {low, _}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }"
            halves = _e4m3_bits(pair) if self.by_bits else assembled(instruction, pair)
        if to is not BFloat16:
            return halves
        low, high = unpack(halves, Float16)
        return pack(low, high, BFloat16)


def _e4m3_bits(pair: Int32) -> Int32:
    """Two e4m3 as two fp16, whose exponents are larger by 8 than the same bits say: 15 is the bias of one,
    7 that of the other. The largest magnitude is NaN; it alone has a carry, which completes NaN's
    exponent."""
    words = _prmt(pair, 0, 0x1404)
    magnitude = words >> 1 & 0x3F803F80
    nan = magnitude + 0x00800080 & 0x40004000
    signed = magnitude | nan | words & 0x80008000 - (1 << 32)
    return assembled("mul.rn.f16x2 $0, $1, $2;", signed, 0x5C005C00)


@dataclass(frozen=True)
class Nibbles(StoredPairs):
    """Integers of 4 bits, of which a byte has a pair. All other bits of its register are 0.

    A value is x = n - offset for the nibble n. In 16 bits, n is put behind the bits of a `_Large` number L,
    which makes L + n, or with all bits of n inverted and a sign -(L + 15 - n). One subtraction then leaves
    x - z. The former serves zeros with signs, and the latter the others: what is subtracted has to be a
    number of 16 bits, too. In fp32, n is put behind the bits of `MAGIC`.
    """

    mask: Int32 | int = 0x000F000F
    """The place of both nibbles. An instruction has room for one constant, and the number is one."""

    def in_thread(self, rows: Int32) -> StoredPairs:
        # The assembler would move a constant to a register once for each instruction, even behind `opaque`.
        return replace(self, mask=self.mask | rows >> 31)

    @property
    def bytes(self) -> int:
        return 1

    @property
    def offset(self) -> int:
        """The nibble of 0."""
        return STORED[self.dtype].offset

    def of_word(self, word: Int32, index: int) -> Int32:
        return word >> 8 * index & 0xFF

    def converted(self, pair: Int32, to: type[Numeric]) -> Int32:
        large = _LARGE[to]
        return packed.sub(large.before(self._apart(pair)), _twice(large.bits + self.offset), to)

    def numbers(self, pair: Int32, start: Int32 | None = None) -> list[Int32]:
        first = MAGIC + self.offset if start is None else start
        both = pair & 15 | MAGIC, (pair >> 4) + MAGIC
        return [assembled("sub.rn.f32 $0, $1, $2;", each, first) for each in both]

    def start(self, zero: Int32) -> Int32:
        return MAGIC + self.offset + zero

    def subtracts_packed(self, of: DType, to: type[Numeric]) -> bool:
        zeros = STORED[of].integers
        assert zeros is not None
        return has_integers(_LARGE[to].dtype, max(abs(self._beside(of, to) + zero) for zero in zeros))

    def packed_start(self, zero: Int32, of: DType, to: type[Numeric]) -> Int32:
        number = assembled("cvt.rn.f32.s32 $0, $1;", zero + self._beside(of, to))
        return pack(number, number, to)

    def less(self, pair: Int32, start: Int32, of: DType, to: type[Numeric]) -> Int32:
        return packed.sub(_LARGE[to].before(self._apart(pair), is_inverted=_is_positive(of)), start, to)

    def _apart(self, pair: Int32) -> Int32:
        """The nibbles of a byte, each in 16 bits of its own: the product has one in bits 0 to 3 and the other
        in bits 16 to 19, and more in others."""
        return assembled("mul.lo.s32 $0, $1, 4097;", pair) & self.mask

    def _beside(self, of: DType, to: type[Numeric]) -> int:
        """The number that `less` subtracts beside a zero of dtype `of`."""
        number = _LARGE[to].number
        return self.offset + (-number - 15 if _is_positive(of) else number)


@dataclass(frozen=True)
class _Large:
    """A number of 16 bits whose last bit counts ones."""

    dtype: DType
    number: int
    bits: int

    def before(self, nibbles: Int32, *, is_inverted: bool = False) -> Int32:
        """Two such numbers with nibbles in their last bits, or with those inverted, and a sign."""
        return nibbles ^ _twice(self.bits + 0x800F) if is_inverted else nibbles | _twice(self.bits)


_LARGE = {BFloat16: _Large(DType.BF16, 128, 0x4300), Float16: _Large(DType.F16, 1024, 0x6400)}


def _is_positive(zeros: DType) -> bool:
    """Whether no zero of a dtype has a sign."""
    return zeros is DType.U8


def _twice(bits: int) -> int:
    """A pair of equal numbers of 16 bits, as a signed integer."""
    pair = bits << 16 | bits
    return pair - (pair >> 31 << 32)


def stored_pairs(dtype: DType, *, by_bits: bool = False) -> StoredPairs:
    """The pairs of a format. `by_bits` is for GPUs without conversions of fp8. Raises ValueError if no class
    has the format."""
    if dtype.is_fp8:
        return Float8(dtype, by_bits)
    if dtype in (DType.I8, DType.U8):
        return Integers(dtype)
    if dtype in (DType.U4X2, DType.I4X2):
        return Nibbles(dtype)
    raise ValueError(f"no class of templates/stored_values.py makes numbers of {dtype.value}")


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
