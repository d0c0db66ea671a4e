"""Tensor maps: fields by hand, and what real host code writes for every element type, rank and swizzle."""

from __future__ import annotations

import struct
from dataclasses import replace

import cutlass
import pytest
import torch

from cute_backend.simulator.simulation_errors import DescriptorError
from cute_backend.simulator.tensormap import (
    ElementType,
    Fill,
    Interleave,
    Packing,
    Swizzle,
    TensorMap,
    decode,
)
from support.simulator import host_kernels
from support.simulator.compiled import host_program

BY_HAND = TensorMap(
    address=0x7F00_1234_5670,
    dtype=ElementType.F16,
    rank=3,
    sizes=(200, 70, 1 << 32),
    strides_bytes=(400, 16 * (5 << 32)),
    box=(64, 32, 256),
    element_strides=(1, 2, 8),
    interleave=Interleave.NONE,
    swizzle=Swizzle.B128_ATOM_32B,
    fill=Fill.NAN,
)


def encode(*, word: int = 0, address: int = BY_HAND.address, box0: int = 64, size0: int = 200) -> bytes:
    """BY_HAND written field by field; `word` is flipped into the word that holds the small fields."""
    small = 2 | 2 << 4 | 6 << 7 | 3 << 13 | 1 << 15 | 2 << 17 | 1 << 19
    raw = struct.pack("<QI", address, small ^ word)
    raw += struct.pack("<4II", 25, 0, 0, 0, 5 << 4)
    raw += struct.pack("<5I", size0 - 1, 69, 0xFFFF_FFFF, 0, 0)
    raw += struct.pack("<I", 0 | 1 << 3 | 7 << 6)[:3] + bytes([box0 - 1, 31, 255, 0, 0])
    return raw.ljust(64, b"\0") + bytes(64)


def test_every_field_by_hand():
    assert decode(encode()) == BY_HAND
    assert decode(encode()[:64]) == BY_HAND  # the rest means nothing
    assert decode(encode(word=3 << 17 | 1 << 21)) == BY_HAND  # hints


def test_two_elements_of_4_bits_are_a_byte():
    """What NVIDIA's host code writes for Float4E2M1FN: CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B, and _ALIGN16B
    where operands of 8 bits are beside it."""
    packed = decode(encode(word=(6 ^ 11) << 7, size0=256, box0=128))
    assert (packed.dtype, packed.packing, packed.sizes[0], packed.box[0], packed.row_bytes) == (
        ElementType.U8, Packing.ALIGN_8B, 128, 64, 64,
    )  # fmt: skip
    padded = decode(encode(word=(6 ^ 12) << 7, size0=256, box0=128, address=0x1000))
    assert (padded.packing, padded.box[0], padded.row_bytes) == (Packing.ALIGN_16B, 64, 128)
    assert padded.coordinates((32, 5, 6)) == (16, 5, 6)
    with pytest.raises(DescriptorError, match="a coordinate in elements of 4 bits is 33"):
        padded.coordinates((33, 5, 6))


@pytest.mark.parametrize("raw, field", [
    (encode()[:63], "63 bytes"),
    (bytes(128), "format is 0"),
    (encode(word=1 << 22), "reserved bits"),
    (encode(word=(2 ^ 5) << 4), "rank is 6"),
    (encode(word=(6 ^ 13) << 7), "element type is 13"),
    (encode(word=(6 ^ 11) << 7), "innermost size in elements of 4 bits is 200"),
    (encode(word=(6 ^ 12) << 7, size0=256, box0=64, address=0x1000), "box size is 64, expected 128"),
    (encode(word=(6 ^ 12) << 7, size0=256, box0=128), "address is .*, expected a multiple of 32"),
    (encode(word=1 << 11), "interleave is 1"),
    (encode(word=(3 ^ 1) << 13), r"swizzle and its atom is \(1, 1\)"),
    (encode(word=1 << 16), "tf32 rounding"),
    (encode(address=0x1008), "address is 0x1008"),
    (encode(box0=60), "innermost box size in bytes is 120, expected a multiple of 16"),
    (encode(box0=72), "innermost box size in bytes is 144, expected at most the swizzle's 128"),
])  # fmt: skip
def test_a_malformed_map_is_refused_by_its_field(raw, field):
    with pytest.raises(DescriptorError, match=field):
        decode(raw)


ELEMENTS = [
    (cutlass.Uint8, torch.uint8, ElementType.U8),
    (cutlass.Int8, torch.int8, ElementType.U8),
    (cutlass.Float8E4M3FN, torch.float8_e4m3fn, ElementType.U8),
    (cutlass.Float8E5M2, torch.float8_e5m2, ElementType.U8),
    (cutlass.Uint16, torch.uint16, ElementType.U16),
    (cutlass.Int32, torch.int32, ElementType.U32),
    (cutlass.Int64, torch.int64, ElementType.U64),
    (cutlass.Float16, torch.float16, ElementType.F16),
    (cutlass.BFloat16, torch.bfloat16, ElementType.BF16),
    (cutlass.Float32, torch.float32, ElementType.F32),
    (cutlass.Float64, torch.float64, ElementType.F64),
]
SWIZZLES = [
    ((1, 4, 3), Swizzle.B32),
    ((2, 4, 3), Swizzle.B64),
    ((3, 4, 3), Swizzle.B128),
    ((2, 5, 2), Swizzle.B128_ATOM_32B),
]


def described(sources, tensors, boxes, options) -> list[TensorMap]:
    """The maps that real host code builds for `tensors`."""
    compiled = host_kernels.compile_tvm_ffi(
        host_kernels.describe, tuple(sources), tuple(boxes), options=options
    )
    maps: list[TensorMap] = []
    host_program(compiled).run(
        (tuple(tensors),), lambda launch, memory: maps.append(decode(launch.params[0]))
    )
    return maps


def plain_map(tensor: torch.Tensor, dtype: ElementType, box: tuple[int, ...]) -> TensorMap:
    return TensorMap(
        address=tensor.data_ptr(),
        dtype=dtype,
        rank=tensor.dim(),
        sizes=tuple(reversed(tensor.shape)),
        strides_bytes=tuple(s * tensor.element_size() for s in reversed(tensor.stride()[:-1])),
        box=tuple(reversed(box)),
        element_strides=(1,) * tensor.dim(),
        interleave=Interleave.NONE,
        swizzle=Swizzle.NONE,
        fill=Fill.ZERO,
    )


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_maps_of_real_host_code(arch, tmp_path):
    sources, tensors, boxes, expected = [], [], [], []

    def case(source_dtype, tensor, element, box, *, swizzle=None, internal=None, kind=Swizzle.NONE):
        sources.append(host_kernels.fake_row_major(source_dtype, tensor.dim()))
        tensors.append(tensor)
        boxes.append((box, swizzle, internal))
        expected.append(replace(plain_map(tensor, element, box), swizzle=kind))

    for source_dtype, dtype, element in ELEMENTS:
        case(source_dtype, torch.empty(24, 48, dtype=dtype), element, (8, 32 // dtype.itemsize))
    wide = torch.empty(24, 80)
    case(cutlass.Float32, wide[:, 4:70], ElementType.TF32, (8, 16), internal=cutlass.TFloat32)
    for swizzle, kind in SWIZZLES:
        half = torch.empty(24, 80, dtype=torch.bfloat16)
        case(cutlass.BFloat16, half, ElementType.BF16, (8, kind.span // 2), swizzle=swizzle, kind=kind)
    case(cutlass.Float32, torch.empty(512, 128), ElementType.F32, (8, 32))  # 128 KiB and more sets a hint
    for rank in (1, 3, 4, 5):
        shape, box = (3, 5, 7, 9, 48)[5 - rank :], (1, 2, 3, 4, 64)[5 - rank :]
        case(cutlass.BFloat16, torch.empty(shape, dtype=torch.bfloat16), ElementType.BF16, box)

    options = f"--keep-ptx --gpu-arch {arch} --dump-dir={tmp_path}"
    assert described(sources, tensors, boxes, options) == expected
