"""The 128-byte tensor map (`CUtensorMap`) that a TMA instruction is given, decoded.

NVIDIA does not document the layout; the field positions below were found by compiling TMA descriptors of
every rank, element type and swizzle with CuTe DSL and reading what its host code wrote. Its type codes are
not those of `CUtensorMapDataType`. Only the first 64 bytes carry meaning. The meaning of the fields is in the
PTX ISA, section "Tensor-map", and in the CUDA driver API's cuTensorMapEncodeTiled, whose limits are checked
here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

from cute_backend.simulator.simulation_errors import DescriptorError

BYTES = 64
"""Bytes of a tensor map that carry meaning."""


class ElementType(Enum):
    """Element types that TMA distinguishes; 8-bit floats travel as U8, signed integers as unsigned ones."""

    U8 = ("u8", 1)
    U16 = ("u16", 2)
    U32 = ("u32", 4)
    U64 = ("u64", 8)
    F16 = ("f16", 2)
    F32 = ("f32", 4)
    F64 = ("f64", 8)
    BF16 = ("bf16", 2)
    TF32 = ("tf32", 4)
    """F32 in memory, rounded to tf32 by the load."""

    def __init__(self, label: str, nbytes: int) -> None:
        self.label = label
        self.nbytes = nbytes


class Swizzle(Enum):
    """How a box is permuted in shared memory: the longest innermost row, and the atom that stays together, in
    bytes."""

    NONE = (0, 16)
    B32 = (32, 16)
    B64 = (64, 16)
    B128 = (128, 16)
    B128_ATOM_32B = (128, 32)

    def __init__(self, span: int, atom: int) -> None:
        self.span = span
        self.atom = atom


class Interleave(Enum):
    NONE = 0


class Fill(Enum):
    """The value of an element outside of the tensor; NAN is for floating-point types."""

    ZERO = 0
    NAN = 1


class Packing(Enum):
    """How 4-bit elements, two to a byte, are packed: the bytes that 16 of them occupy in shared memory."""

    NONE = 0
    ALIGN_8B = 8
    ALIGN_16B = 16
    """8 bytes of padding follow every 8."""


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. Dimension 0 is the innermost one, whose stride is one element.

    `sizes`, `box` and `element_strides` hold `rank` values in elements; `strides_bytes` holds `rank` - 1
    values, those of dimensions 1 and up. `box` is the part that one instruction moves. If `packing` says that
    elements have 4 bits, two of them are one element here, a byte.
    """

    address: int
    dtype: ElementType
    rank: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: Interleave
    swizzle: Swizzle
    fill: Fill
    packing: Packing = Packing.NONE

    def coordinates(self, given: tuple[int, ...]) -> tuple[int, ...]:
        """The coordinates of an instruction in elements of this map."""
        if self.packing is Packing.NONE:
            return given
        _require(given[0] % 16 == 0, "a coordinate in elements of 4 bits", given[0], "a multiple of 16")
        return given[0] // 2, *given[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of shared memory of one row of the box, padding included."""
        count = (self.box[0] + self.element_strides[0] - 1) // self.element_strides[0]
        return count * self.dtype.nbytes * (2 if self.packing is Packing.ALIGN_16B else 1)


_TYPES = {
    0: ElementType.U8,
    1: ElementType.U16,
    2: ElementType.U32,
    4: ElementType.U64,
    6: ElementType.F16,
    7: ElementType.F32,
    9: ElementType.F64,
    10: ElementType.BF16,
    11: ElementType.U8,
    12: ElementType.U8,
}
_PACKINGS = {11: Packing.ALIGN_8B, 12: Packing.ALIGN_16B}
_SWIZZLES = {
    (0, 0): Swizzle.NONE,
    (1, 0): Swizzle.B32,
    (2, 0): Swizzle.B64,
    (3, 0): Swizzle.B128,
    (3, 1): Swizzle.B128_ATOM_32B,
}
_TILED_FORMAT = 2
_MAX_RANK = 5


def decode(raw: bytes) -> TensorMap:
    """Decodes a tensor map from its first 64 bytes or more.

    Raises DescriptorError with the name of a field whose value is invalid or not simulated.
    """
    if len(raw) < BYTES:
        raise DescriptorError(f"tensor map: {len(raw)} bytes, {BYTES} needed")
    address, word, *rest = struct.unpack("<QI13I", raw[:BYTES])
    strides16, high_nibbles, sizes_less_1, tail = rest[0:4], rest[4], rest[5:10], rest[10]

    format_ = _bits(word, 0, 3)
    _require(format_ == _TILED_FORMAT, "format", format_, f"{_TILED_FORMAT}: is there a tensor map at all?")
    # Bits 17, 18 (promotion in the L2 cache) and 21 (set for tensors of 128 KiB and more) change no result.
    _require(word >> 22 == 0, "reserved bits 22 to 31 of word 2", word >> 22, "0")
    rank = _bits(word, 4, 6) + 1
    _require(rank <= _MAX_RANK, "rank", rank, "1 to 5")
    code = _bits(word, 7, 10)
    _require(code in _TYPES, "element type", code, f"one of {sorted(_TYPES)}")
    interleave = _bits(word, 11, 12)
    _require(interleave == 0, "interleave", interleave, "0: interleaved layouts are not simulated")
    swizzle = _bits(word, 13, 14), _bits(word, 19, 20)
    _require(swizzle in _SWIZZLES, "swizzle and its atom", swizzle, f"one of {list(_SWIZZLES)}")
    rounds_to_tf32 = _bits(word, 16, 16)
    can_round = _TYPES[code] is ElementType.F32
    _require(can_round or not rounds_to_tf32, "tf32 rounding", 1, "0 for this element type")

    packing = _PACKINGS.get(code, Packing.NONE)
    sizes = [size + 1 for size in sizes_less_1[:rank]]
    box = [size + 1 for size in raw[55 : 55 + rank]]
    if packing is not Packing.NONE:
        for what, values in (("size", sizes), ("box", box)):
            field = f"innermost {what} in elements of 4 bits"
            _require(values[0] % 16 == 0, field, values[0], "a multiple of 16")
            values[0] //= 2
    map_ = TensorMap(
        address=address,
        dtype=ElementType.TF32 if rounds_to_tf32 else _TYPES[code],
        rank=rank,
        sizes=tuple(sizes),
        strides_bytes=tuple(
            (strides16[i] | _bits(high_nibbles, 4 * i, 4 * i + 3) << 32) * 16 for i in range(rank - 1)
        ),
        box=tuple(box),
        element_strides=tuple(_bits(tail, 3 * i, 3 * i + 2) + 1 for i in range(rank)),
        interleave=Interleave(interleave),
        swizzle=_SWIZZLES[swizzle],
        fill=Fill(_bits(word, 15, 15)),
        packing=packing,
    )
    _check_limits(map_)
    return map_


def _check_limits(map_: TensorMap) -> None:
    # The limits of CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B are stricter (cuTensorMapEncodeTiled).
    padded = map_.packing is Packing.ALIGN_16B
    _require(map_.address % 16 == 0, "address", f"{map_.address:#x}", "a multiple of 16")
    _require(not (padded and map_.address % 32), "address", f"{map_.address:#x}", "a multiple of 32")
    _require(not (padded and map_.box[0] != 64), "innermost box size", 2 * map_.box[0], "128")
    row = map_.row_bytes
    span = map_.swizzle.span
    _require(row % 16 == 0, "innermost box size in bytes", row, "a multiple of 16")
    _require(not span or row <= span, "innermost box size in bytes", row, f"at most the swizzle's {span}")


def _bits(word: int, first: int, last: int) -> int:
    return word >> first & (1 << last - first + 1) - 1


def _require(holds: bool, field: str, value: object, accepted: str) -> None:
    if not holds:
        raise DescriptorError(f"tensor map: {field} is {value}, expected {accepted}")
