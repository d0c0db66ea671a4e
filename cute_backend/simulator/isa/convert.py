"""cvt: between integers, floats and the 8-bit and tf32 formats, scalar and packed (PTX ISA 9.7.9.21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.formats import F32, decode, encode, flush, round_to
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import TYPE_BYTES, Instruction

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

INTEGER_ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip
FLOAT_ROUNDINGS = ("rn", "rna", "rz", "rm", "rp")
PACKED = {"f16x2": ("f16", 2), "bf16x2": ("bf16", 2), "e4m3x2": ("e4m3", 2), "e5m2x2": ("e5m2", 2),
          "e2m1x2": ("e2m1", 2), "e2m3x2": ("e2m3", 2), "e3m2x2": ("e3m2", 2), "e4m3x4": ("e4m3", 4),
          "e5m2x4": ("e5m2", 4)}  # fmt: skip
NAMES = frozenset(TYPE_BYTES) | frozenset(PACKED) | {"tf32"}


@opcode("cvt", section="9.7.9.21", meaning="Conversion between types")
def bind_cvt(binder: Binder, instruction: Instruction) -> Step:
    kinds = [p for p in instruction.parts[1:] if p in NAMES]
    if instruction.has("pack"):
        return _bind_pack(binder, instruction)
    if len(kinds) != 2:
        raise unsupported(instruction, f"types {kinds}")
    target, source = kinds
    if target in PACKED:
        return _bind_to_packed(binder, instruction, target, source)
    if target == "tf32":
        mode = mode_of(instruction)
        sat, relu = instruction.has("satfinite"), instruction.has("relu")
        put = binder.put(instruction.operands[0], "b32", instruction)
        get = binder.get(instruction.operands[1], "f32", instruction)
        return lambda w: put(w, encode(_relu(get(w), relu), "tf32", mode, sat))
    if source in PACKED:
        raise unsupported(instruction, f"types {kinds}")
    if _is_float(target) and _is_float(source):
        return _bind_float(binder, instruction, target, source)
    if _is_float(target):
        return _bind_to_float(binder, instruction, target, source)
    if _is_float(source):
        return _bind_to_integer(binder, instruction, target, source)
    return _bind_integer(binder, instruction, target, source)


def _is_float(kind: str) -> bool:
    return "f" in kind


def mode_of(instruction: Instruction) -> str:
    return next((p for p in instruction.parts if p in FLOAT_ROUNDINGS), "rn")


def _relu(x: Any, relu: bool) -> Any:
    return np.where((x > 0) | np.isnan(x), x, x.dtype.type(0)) if relu else x


def _values(raw: Any, kind: str) -> Any:
    """Register contents of a scalar float type as float32 or float64."""
    if kind in ("f32", "f64"):
        return np.asarray(raw)
    if kind == "f16":
        return np.asarray(raw).astype(np.float32)
    return decode(np.asarray(raw), kind)


def _rounded(x: Any, target: str, mode: str, finite: bool = False) -> Any:
    """float32 or float64 rounded to a scalar float type, as its register's putter takes it."""
    if target == "f64":
        return x.astype(np.float64)
    if target == "f32":
        return x if x.dtype == np.float32 else round_to(x, F32, mode).astype(np.float32)
    encoded = encode(x, target, mode, finite)
    return encoded.view(np.float16) if target == "f16" else encoded


def _bind_float(binder: Binder, instruction: Instruction, target: str, source: str) -> Step:
    mode = mode_of(instruction)
    integral = next((INTEGER_ROUNDINGS[p] for p in instruction.parts if p in INTEGER_ROUNDINGS), None)
    ftz, sat, relu, finite = (instruction.has(m) for m in ("ftz", "sat", "relu", "satfinite"))
    put = binder.put(instruction.operands[0], target, instruction)
    get = binder.get(instruction.operands[1], source, instruction)
    if (target, source) in (("f32", "f16"), ("f32", "bf16")) and not (sat or relu or integral):
        return lambda w: put(w, _values(get(w), source))

    def convert(w: Warp) -> None:
        x = _values(get(w), source)
        if ftz and source == "f32":
            x = flush(x)
        if integral is not None:
            x = integral(x)
        x = _relu(x, relu)
        if sat:
            x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))
        result = _rounded(x, target, mode, finite)
        put(w, flush(result) if ftz and target == "f32" else result)

    return convert


def _bind_to_float(binder: Binder, instruction: Instruction, target: str, source: str) -> Step:
    mode = mode_of(instruction)
    sat = instruction.has("sat")
    put = binder.put(instruction.operands[0], target, instruction)
    get = binder.get(instruction.operands[1], source, instruction)
    wide = TYPE_BYTES[source] == 8

    def convert(w: Warp) -> None:
        raw = np.asarray(get(w))
        if wide and target == "f32" and mode == "rn":
            x: Any = raw.astype(np.float32)
        elif wide and target != "f64":
            x = _odd_from_integer(raw)
        else:
            x = raw.astype(np.float64)
        if sat:
            x = np.clip(x, 0, 1)
        put(w, _rounded(x, target, mode))

    return convert


def _odd_from_integer(raw: Any) -> Any:
    """64-bit integers as float64 rounded to odd, so that a second rounding is harmless."""
    kept = raw & ~raw.dtype.type(0x3FF)
    sticky = (raw != kept).astype(raw.dtype) << raw.dtype.type(10)
    large = np.abs(raw.astype(np.float64)) >= 2.0**53
    return np.where(large, (kept | sticky).astype(np.float64), raw.astype(np.float64))


def limits(kind: str) -> tuple[int, int]:
    bits = 8 * TYPE_BYTES[kind]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind.startswith("s") else (0, (1 << bits) - 1)


def _bind_to_integer(binder: Binder, instruction: Instruction, target: str, source: str) -> Step:
    integral = next((INTEGER_ROUNDINGS[p] for p in instruction.parts if p in INTEGER_ROUNDINGS), np.trunc)
    ftz = instruction.has("ftz")
    low, high = limits(target)
    put = binder.put(instruction.operands[0], target, instruction)
    get = binder.get(instruction.operands[1], source, instruction)
    # NaN: 0 in at most 32 bits from at most f32, else only the highest bit (as seen on sm_90).
    nan = 0 if TYPE_BYTES[target] < 8 and source != "f64" else (1 << (8 * TYPE_BYTES[target] - 1))
    dtype = np.dtype(f"{'i' if low else 'u'}{TYPE_BYTES[target]}")
    unsigned_nan = np.array(nan, f"u{TYPE_BYTES[target]}").view(dtype)

    def convert(w: Warp) -> None:
        x = _values(get(w), source)
        if ftz and source == "f32":
            x = flush(x)
        x = integral(x.astype(np.float64))
        inside = (x >= float(low)) & (x < float(high + 1)) & ~np.isnan(x)
        result = np.where(inside, x, 0.0).astype(dtype)
        result = np.where(x < float(low), dtype.type(low), result)
        result = np.where(x >= float(high + 1), dtype.type(high), result)
        put(w, np.where(np.isnan(x), unsigned_nan, result))

    return convert


def _bind_integer(binder: Binder, instruction: Instruction, target: str, source: str) -> Step:
    sat = instruction.has("sat")
    low, high = limits(target)
    put = binder.put(instruction.operands[0], target, instruction)
    get = binder.get(instruction.operands[1], source, instruction)
    dtype = np.dtype(f"{'i' if low else 'u'}{TYPE_BYTES[target]}")
    source_low, source_high = limits(source)

    def convert(w: Warp) -> None:
        x = np.asarray(get(w))
        if sat:
            x = np.clip(x, max(low, source_low), min(high, source_high))
        put(w, x.astype(dtype))

    return convert


def _bind_to_packed(binder: Binder, instruction: Instruction, target: str, source: str) -> Step:
    name, count = PACKED[target]
    mode = mode_of(instruction)
    relu = instruction.has("relu")
    # The 8-bit and narrower formats always saturate (the syntax demands .satfinite); see 9.7.9.21.
    finite = instruction.has("satfinite")
    four_bit = name == "e2m1"
    width = 8 if four_bit else {"f16": 32, "bf16": 32}.get(name, 8 * count)
    put = binder.put(instruction.operands[0], f"b{width}", instruction)
    dtype = np.dtype(f"u{width // 8}").type
    bits = {"f16": 16, "bf16": 16, "e2m1": 4}.get(name, 8)
    if instruction.has("rs"):
        raise unsupported(instruction, "stochastic rounding")
    if source == "f32":
        if count == 2:
            upper, lower = (binder.get(o, "f32", instruction) for o in instruction.operands[1:3])

            def from_pair(w: Warp) -> None:
                pair = np.empty((2, 32), np.float32)
                pair[0], pair[1] = lower(w), upper(w)
                low, high = encode(_relu(pair, relu), name, mode, finite).astype(dtype)
                put(w, low | (high << dtype(bits)))

            return from_pair
        raise unsupported(instruction, f"{count} elements")
    get = binder.get(instruction.operands[1], f"b{_packed_width(source)}", instruction)
    source_name = PACKED[source][0]

    def from_packed(w: Warp) -> None:
        raw = np.atleast_1d(get(w))
        parts = _elements(raw, source_name)
        total = dtype(0)
        for i, part in enumerate(parts):
            x = _relu(decode(part, source_name), relu)
            total = total | (encode(x, name, mode, finite).astype(dtype) << dtype(bits * i))
        put(w, total)

    return from_packed


def _packed_width(kind: str) -> int:
    name, count = PACKED[kind]
    return {"f16": 32, "bf16": 32, "e2m1": 8}.get(name, 8 * count)


def _elements(raw: Any, name: str) -> list[Any]:
    if name in ("f16", "bf16"):
        return [(raw & np.uint32(0xFFFF)).astype(np.uint16), (raw >> np.uint32(16)).astype(np.uint16)]
    if name == "e2m1":
        return [raw & np.uint8(0xF), raw >> np.uint8(4)]
    return [(raw & raw.dtype.type(0xFF)).astype(np.uint8), (raw >> raw.dtype.type(8)).astype(np.uint8)]


def _bind_pack(binder: Binder, instruction: Instruction) -> Step:
    """cvt.pack.sat: two integers saturated and packed. If there is a c, it is shifted to make room for
    them."""
    kinds = [
        p for p in instruction.parts if p in ("u2", "s2", "u4", "s4", "u8", "s8", "u16", "s16", "s32", "b32")
    ]
    narrow = kinds[0]
    bits = int(narrow[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if narrow[0] == "s" else (0, (1 << bits) - 1)
    put = binder.put(instruction.operands[0], "b32", instruction)
    a, b = (binder.get(o, "s32", instruction) for o in instruction.operands[1:3])
    rest = binder.get(instruction.operands[3], "b32", instruction) if len(instruction.operands) > 3 else None
    mask = np.uint32((1 << bits) - 1)

    def convert(w: Warp) -> None:
        upper = np.clip(a(w), low, high).astype(np.uint32) & mask
        lower = np.clip(b(w), low, high).astype(np.uint32) & mask
        total = lower | (upper << np.uint32(bits))
        if rest is not None:
            total = total | (rest(w) << np.uint32(2 * bits))
        put(w, total)

    return convert
