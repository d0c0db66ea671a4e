"""A compiled kernel, with its resources."""

from __future__ import annotations

import json
from base64 import b85decode, b85encode
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Built:
    """A compiled kernel, with the kernel that finishes its reductions, if it has any.

    `source` is the text of the module, `ptx` the PTX and `cubin` the machine code of all its kernels.
    `registers` is the number of 32-bit registers of a thread, `spill_bytes` the bytes of local memory that a
    thread spills to or indexes at run time, and `smem_bytes` the shared memory of a CTA, static and dynamic.
    If there are two kernels, each figure is the larger of both.
    """

    source: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    registers: int
    spill_bytes: int
    smem_bytes: int
    host_object: bytes = field(repr=False)
    """An ELF relocatable: the host code and, as data, the cubin."""

    def to_json(self) -> str:
        """All fields as text, bytes in base 85."""

        def plain(value: Any) -> Any:
            return b85encode(value).decode() if isinstance(value, bytes) else value

        return json.dumps({each.name: plain(getattr(self, each.name)) for each in fields(self)})

    @staticmethod
    def from_json(text: str) -> Built:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return Built(**values | {name: b85decode(values[name]) for name in ("cubin", "host_object")})
