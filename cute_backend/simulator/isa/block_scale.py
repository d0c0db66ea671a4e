"""Scales of tcgen05.mma with .block_scale: the scales of each kind, and their places (PTX ISA 9.7.16.10.7).

The scales of row r of A are bytes of one word, in lane r % 32 of the column r // 32 columns after the
address: one byte for 32 of K (.scale_vec::1X), two adjacent bytes (2X), or all four (4X). The scales of row r
of B, which is a column of the product, are placed alike. Each quarter of the lanes reads a copy of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.formats import TABLES
from cute_backend.simulator.simulation_errors import DescriptorError, IllegalAccess

if TYPE_CHECKING:
    from cute_backend.simulator.cta import TensorMemory
    from cute_backend.simulator.shadow import Access

UE8M0, UE4M3 = 1, 0
QUARTERS = 4


@dataclass(frozen=True)
class ScaledKind:
    """A kind with scales (PTX ISA tables 46, 47 and 55): the formats of elements by their codes, K of one
    instruction, and the formats of scales by the number of scales in a row."""

    elements: dict[int, str]
    k: int
    scales: dict[int, tuple[int, ...]]
    default: int | None
    """The number of scales in a row if the instruction doesn't give it."""


KINDS = {
    "kind::mxf8f6f4": ScaledKind(
        {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}, 32, {1: (UE8M0,)}, 1
    ),
    "kind::mxf4": ScaledKind({1: "e2m1x2"}, 64, {2: (UE8M0,)}, 2),
    "kind::mxf4nvf4": ScaledKind({1: "e2m1x2"}, 64, {2: (UE8M0,), 4: (UE8M0, UE4M3)}, None),
}


def scales_of_a_row(kind: str, parts: tuple[str, ...]) -> int:
    """The number of scales of each row in one instruction. Raises `DescriptorError` if the kind doesn't have
    it.

    .block32 and .block16 are other names of the sizes (PTX ISA 9.7.16.10.7.1).
    """
    scaled = KINDS[kind]
    named = [p for p in parts if p.startswith("scale_vec::") or p in ("block16", "block32")]
    count = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4}.get(
        named[0] if named else "", 1 if kind == "kind::mxf8f6f4" else 2 if named else scaled.default
    )
    if count not in scaled.scales:
        accepted = ", ".join(f"{each}X" for each in scaled.scales)
        raise DescriptorError(f".{kind} with {'.'.join(named) or 'no size of scales'}; it has {accepted}")
    return count


@dataclass(frozen=True)
class Scales:
    """The scales of one instruction, as its descriptor describes them: a row has `count` scales of the format
    `code`, which begin at byte `a_byte` of a word for A and at byte `b_byte` for B."""

    count: int
    code: int
    a_byte: int
    b_byte: int

    @staticmethod
    def decode(raw: int, kind: str, count: int) -> Scales:
        code, a_byte, b_byte = (raw >> 23) & 1, (raw >> 29) & 3, (raw >> 4) & 3
        where = f"instruction descriptor {raw:#010x} of .{kind}"
        if code not in KINDS[kind].scales[count]:
            raise DescriptorError(f"{where}: scales of {'ue8m0' if code else 'ue4m3'}, {count} of a row")
        for name, byte in (("A", a_byte), ("B", b_byte)):
            if byte % count:
                raise DescriptorError(
                    f"{where}: scale id {byte} of {name}; multiples of {count} are defined for {count}X"
                )
        return Scales(count, code, a_byte, b_byte)

    def values(self, raw: np.ndarray) -> np.ndarray:
        """Bytes as float64. The sign bit of an E4M3 scale is ignored (PTX ISA 5.2.3, ue4m3)."""
        if self.code == UE4M3:
            return TABLES["e4m3"][raw & 0x7F].astype(np.float64)
        return np.where(raw == 0xFF, np.nan, np.ldexp(1.0, raw.astype(np.int64) - 127))

    def of_rows(self, tmem: TensorMemory, address: int, byte: int, rows: int) -> np.ndarray:
        """The scales of `rows` rows that each quarter of the lanes has: (quarters, rows, count), float64."""
        block = tmem.cells[scale_cells(address, rows)]
        words = np.ascontiguousarray(block).reshape(QUARTERS, 32, -1).transpose(0, 2, 1)
        raw = np.ascontiguousarray(words).reshape(QUARTERS, -1)[:, :rows].copy()
        return self.values(raw.view(np.uint8).reshape(QUARTERS, rows, 4)[..., byte : byte + self.count])

    def read(self, tmem: TensorMemory, address: int, rows: int, access: Access) -> None:
        """Checks and records that an instruction reads the scales of `rows` rows."""
        lanes, columns = scale_cells(address, rows)
        tmem.check(columns.start, columns.stop - columns.start)
        tmem.shadow.read((lanes, columns), access)


def scale_cells(address: int, rows: int) -> tuple[slice, slice]:
    """The cells of the scales of `rows` rows. The highest two bits of an address repeat the scale id."""
    lane, column = (address >> 16) & 0x3FFF, address & 0xFFFF
    if lane:
        raise IllegalAccess(f"scales at lane {lane} of tensor memory; they must begin at lane 0")
    return slice(0, 32 * QUARTERS), slice(column, column + -(-rows // 32))


def by_blocks(elements: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The products of elements (rows, k) with the scales (rows, count) of their blocks of k."""
    return elements * np.repeat(scales, elements.shape[1] // scales.shape[1], axis=1)
