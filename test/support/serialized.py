"""Whether the compiler has made the asynchronous products of wgmma wait for each other.

It does so where it can't prove that nothing else touches the accumulators meanwhile, and says so in no figure
that it reports. The tensor cores are idle then between two products. NVIDIA publishes no encoding of its
machine code; the bits here agree with what `nvdisasm -hex` prints for sm_90a.
"""

from __future__ import annotations

import struct

from cute_backend.runtime.kernels.cubin import sections_of

_PRODUCTS = (0x79F0, 0x79F1, 0x79F3)
"""HGMMA, IGMMA and QGMMA: the low 16 bits of an instruction."""

_WARPGROUP = 0x79C5
_WAITS = 1 << 47
"""WARPGROUP.DEPBAR has this bit, and WARPGROUP.ARRIVE has not."""


def has_serialized_products(cubin: bytes) -> bool:
    """Whether a wait follows each product of a cubin."""
    steps = ""
    for name, code in sections_of(cubin):
        if name.startswith(".text."):
            for low, _high in struct.iter_unpack("<QQ", code):
                if low & 0xFFFF in _PRODUCTS:
                    steps += "P"
                elif low & 0xFFFF == _WARPGROUP and low & _WAITS:
                    steps += "W"
    return "P" in steps and "PP" not in steps
