"""The resources of an SM that a compiled kernel needs, read from its cubin.

The figures are in the ELF section `.nv.info`, a list of attributes (u8 format, u8 attribute, u16 size, then
the payload if the format has one). NVIDIA publishes no specification of it; the attributes used here agree
with what `cuobjdump --dump-resource-usage` prints.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SIZED_PAYLOAD = 0x04
_FRAME_SIZE = 0x11
_REGISTER_COUNT = 0x2F

_SYSTEM_SECTION = ".nv.shared.reserved.0"
_SYSTEM_SMEM = 1024
"""Bytes of shared memory that the system keeps for each CTA from compute capability 9.0 on, beside the 227
KiB that a CTA can have (CUDA C++ Programming Guide, compute capability 9.0). The assembler makes a section
for them and counts them in the kernel's own too."""


@dataclass(frozen=True)
class Resources:
    """The registers of a thread, the bytes of its stack frame in local memory, and the static shared memory
    of a CTA.

    The frame holds spilled registers and arrays that are indexed at run time: 0 means neither exists. The
    shared memory that the system keeps is not counted.
    """

    registers: int
    frame_bytes: int
    static_smem_bytes: int


def resources(cubin: bytes) -> Resources:
    """The largest figures of all kernels in `cubin`. Raises ValueError if it is not a cubin."""
    try:
        sections = dict(sections_of(cubin))
    except (struct.error, IndexError) as error:
        raise ValueError(f"the cubin is cut short: {error}") from error
    if ".nv.info" not in sections:
        raise ValueError("the cubin has no section .nv.info")
    figures: dict[int, list[int]] = {_REGISTER_COUNT: [], _FRAME_SIZE: [0]}
    for attribute, payload in _attributes(sections[".nv.info"]):
        if attribute in figures:
            _symbol, figure = struct.unpack("<II", payload)
            figures[attribute].append(figure)
    if not figures[_REGISTER_COUNT]:
        raise ValueError("the cubin's .nv.info names no register count")
    shared = [len(data) for name, data in sections.items() if re.match(r"\.nv\.shared\.(?!reserved)", name)]
    static = max(shared, default=0)
    if static and _SYSTEM_SECTION in sections:
        static -= _SYSTEM_SMEM
    return Resources(max(figures[_REGISTER_COUNT]), max(figures[_FRAME_SIZE]), static)


def sections_of(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section of a 64-bit little-endian ELF file; absent bits read as zeros."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("a cubin is a 64-bit little-endian ELF file; this is not")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _flags, _address, offset, size in headers:
        start = names + name
        no_bits = kind == 8
        content = bytes(size) if no_bits else elf[offset : offset + size]
        yield elf[start : elf.index(b"\0", start)].decode(), content


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset < len(info):
        layout, attribute, value = struct.unpack_from("<BBH", info, offset)
        size = value if layout == _SIZED_PAYLOAD else 0
        yield attribute, info[offset + 4 : offset + 4 + size]
        offset += 4 + size
