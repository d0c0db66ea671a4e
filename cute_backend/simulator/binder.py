"""Operands as functions of a warp, for the binders of opcodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cute_backend.simulator.isa  # noqa: F401  (fills the opcode table)
from cute_backend.simulator.opcodes import unsupported
from cute_backend.simulator.simulation_errors import PtxSyntaxError
from cute_backend.simulator.syntax import (
    FILE_BYTES,
    TYPE_BYTES,
    Address,
    Entry,
    FloatBits,
    Immediate,
    Instruction,
    Not,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from cute_backend.simulator.warp import Warp

Get = Callable[[Warp], Any]
Put = Callable[[Warp, Any], None]

# PTX type -> the view of the register file that holds it raw.
VIEWS = {
    "pred": "pred", "b16": "u16", "u16": "u16", "s16": "s16", "f16": "f16", "bf16": "u16", "b32": "u32",
    "u32": "u32", "s32": "s32", "f32": "f32", "f16x2": "u32", "bf16x2": "u32", "b64": "u64", "u64": "u64",
    "s64": "s64", "f64": "f64", "f32x2": "u64", "b128": "u128",
}  # fmt: skip
NARROW = {"b8": np.uint8, "u8": np.uint8, "s8": np.int8}
DTYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f32x2": np.uint64,
}  # fmt: skip
FILE_VIEWS = {"p": "pred", "h": "u16", "w": "u32", "d": "u64", "q": "u128"}
SIGNED_VIEWS = {"h": "s16", "w": "s32", "d": "s64"}
WIDENING = frozenset(("ld", "ldu", "st", "cvt"))
"""Opcodes whose registers may be wider than their type (PTX ISA 9.4.1)."""

_GETTERS: dict[str, Callable[[int], Get]] = {
    "pred": lambda i: lambda w: w.pred[i],
    "u16": lambda i: lambda w: w.u16[i],
    "s16": lambda i: lambda w: w.s16[i],
    "f16": lambda i: lambda w: w.f16[i],
    "u32": lambda i: lambda w: w.u32[i],
    "s32": lambda i: lambda w: w.s32[i],
    "f32": lambda i: lambda w: w.f32[i],
    "u64": lambda i: lambda w: w.u64[i],
    "s64": lambda i: lambda w: w.s64[i],
    "f64": lambda i: lambda w: w.f64[i],
    "u128": lambda i: lambda w: w.u128[i],
}


def _putter(view: str, slot: int) -> Put:
    def put(w: Warp, value: Any) -> None:
        if w.full:
            getattr(w, view)[slot][...] = value
        else:
            np.copyto(getattr(w, view)[slot], value, where=w.mask, casting="unsafe")

    def put_wide(w: Warp, value: Any) -> None:
        np.copyto(w.u128[slot], value, where=w.mask[:, None])

    def put_u32(w: Warp, value: Any) -> None:
        if w.full:
            w.u32[slot][...] = value
        else:
            np.copyto(w.u32[slot], value, where=w.mask, casting="unsafe")

    return {"u128": put_wide, "u32": put_u32}.get(view, put)


class Binder:
    """The context of binders: operand access by type, addresses of variables, the launch's sizes."""

    def __init__(self, entry: Entry, symbols: dict[str, tuple[str, int]], parameters: np.ndarray) -> None:
        self.entry = entry
        self.symbols = symbols
        self.parameters = parameters

    # --- values ------------------------------------------------------------------------------------------
    def get(self, operand: Operand, kind: str, instruction: Instruction) -> Get:
        """A function that returns the operand as a vector of 32 lanes (or one scalar for all) of PTX type
        `kind`.
        """
        if isinstance(operand, Register):
            if TYPE_BYTES[kind] == FILE_BYTES[operand.file] and kind not in NARROW:
                return _GETTERS[VIEWS[kind]](operand.slot)
            if operand.file == "p" or kind == "pred":
                raise self._mismatch(operand, kind, instruction)
            if TYPE_BYTES[kind] < FILE_BYTES[operand.file] and instruction.parts[0] in WIDENING:
                return self._narrow(operand, kind)
            raise self._mismatch(operand, kind, instruction)
        if isinstance(operand, Immediate):
            constant = self.constant(operand, kind, instruction)
            return lambda w: constant
        if isinstance(operand, Special):
            return self._special(operand, kind)
        if isinstance(operand, Symbol):
            return self.symbol(operand, kind, instruction)
        if isinstance(operand, Not):
            slot = operand.register.slot
            return lambda w: ~w.pred[slot]
        if isinstance(operand, Sink):
            zero: Any = np.zeros((), DTYPES[kind])[()]
            return lambda w: zero
        raise unsupported(instruction, f"an operand {operand!r} of type {kind}")

    def _narrow(self, operand: Register, kind: str) -> Get:
        view, slot, dtype = FILE_VIEWS[operand.file], operand.slot, DTYPES[kind]
        if operand.file == "q":
            return lambda w: w.u128[slot][:, 0].astype(dtype)
        unsigned = np.dtype(dtype).newbyteorder("=")
        raw = np.dtype(f"u{unsigned.itemsize}")
        return lambda w: getattr(w, view)[slot].astype(raw).view(dtype)

    def _special(self, operand: Special, kind: str) -> Get:
        name, dtype = operand.name, DTYPES[kind]
        if name in ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"):
            return lambda w: dtype(w.cta.cluster.engine.now)
        if name == "%dynamic_smem_size":
            return lambda w: dtype(w.special["%dynamic_smem_size"])

        def read(w: Warp) -> Any:
            value = w.special.get(name)
            if value is None:
                raise PtxSyntaxError(f"the special register {name} is not modelled")
            return np.asarray(value).astype(dtype)

        return read

    def _mismatch(self, operand: Register, kind: str, instruction: Instruction) -> PtxSyntaxError:
        return PtxSyntaxError(
            f"PTX line {instruction.line}: {operand.name} has {8 * FILE_BYTES[operand.file]} bits, "
            f"{instruction.opcode} wants {kind}"
        )

    def constant(self, operand: Immediate, kind: str, instruction: Instruction) -> Any:
        """A literal as a numpy scalar of `kind`, with its exact bits."""
        dtype = np.dtype(DTYPES[kind])
        value = operand.value
        if kind == "pred":
            return np.bool_(value)
        if isinstance(operand, FloatBits):
            if dtype.itemsize == operand.nbytes:
                return np.array(operand.bits, f"u{operand.nbytes}").view(dtype)[()]
            if dtype.kind == "f":
                return dtype.type(value)
            raise PtxSyntaxError(
                f"PTX line {instruction.line}: a {operand.nbytes}-byte float literal as {kind}"
            )
        if dtype.kind == "f":
            return dtype.type(value)
        assert isinstance(value, int)
        bits = value % (1 << (8 * dtype.itemsize))
        return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]

    def symbol(self, operand: Symbol, kind: str, instruction: Instruction) -> Get:
        """The address of a variable in its own state space. For .global variables it is the generic
        address."""
        found = self.symbols.get(operand.name)
        if found is None:
            raise PtxSyntaxError(f"PTX line {instruction.line}: {operand.name} is not declared")
        space, address = found
        dtype = DTYPES[kind]
        address += operand.offset
        if space == "shared":
            return lambda w: dtype(w.cta.shared_base + address)
        constant: Any = np.array(address, np.uint64).astype(dtype)[()]
        return lambda w: constant

    # --- destinations ------------------------------------------------------------------------------------
    def put(self, operand: Operand, kind: str, instruction: Instruction) -> Put:
        """A function that writes a vector of `kind` to the destination, for active lanes only.

        A destination wider than `kind` is extended: with the sign for signed kinds, with zeros otherwise.
        """
        if isinstance(operand, Sink):
            return lambda w, value: None
        if isinstance(operand, Vector):
            return self._put_parts(operand, kind, instruction)
        if not isinstance(operand, Register):
            raise unsupported(instruction, f"a destination {operand!r}")
        if kind == "pred" or operand.file == "p":
            if kind != "pred" or operand.file != "p":
                raise self._mismatch(operand, kind, instruction)
            return _putter("pred", operand.slot)
        if TYPE_BYTES[kind] == FILE_BYTES[operand.file] and kind not in NARROW:
            return _putter(VIEWS[kind], operand.slot)
        if TYPE_BYTES[kind] > FILE_BYTES[operand.file] or instruction.parts[0] not in WIDENING:
            raise self._mismatch(operand, kind, instruction)
        if operand.file == "q":
            raise self._mismatch(operand, kind, instruction)
        dtype = np.dtype(DTYPES[kind])
        if dtype.kind == "i":
            return _putter(SIGNED_VIEWS[operand.file], operand.slot)
        plain = _putter(FILE_VIEWS[operand.file], operand.slot)
        if dtype.kind == "f":
            raw = f"u{dtype.itemsize}"
            return lambda w, value: plain(w, np.asarray(value, dtype).view(raw))
        return plain

    def _put_parts(self, operand: Vector, kind: str, instruction: Instruction) -> Put:
        """Unpacking: `mov.b64 {lo, hi}, d`."""
        width = TYPE_BYTES[kind] // len(operand.elements)
        part = f"b{8 * width}"
        puts = [self.put(e, part, instruction) for e in operand.elements]
        if kind == "b128":

            def put_wide(w: Warp, value: Any) -> None:
                raw = np.ascontiguousarray(np.broadcast_to(value, (32, 2))).view(f"u{width}")
                for i, put in enumerate(puts):
                    put(w, raw[:, i])

            return put_wide
        if len(puts) == 2 and width == 4:
            low, high = puts

            def put_two(w: Warp, value: Any) -> None:
                low(w, value & np.uint64(0xFFFFFFFF))
                high(w, value >> np.uint64(32))

            return put_two

        def put_parts(w: Warp, value: Any) -> None:
            for i, put in enumerate(puts):
                put(w, (value >> value.dtype.type(8 * width * i)) & value.dtype.type((1 << 8 * width) - 1))

        return put_parts

    # --- addresses ---------------------------------------------------------------------------------------
    def address(self, operand: Operand, instruction: Instruction) -> Get:
        """The address `[base + offset]` as uint64, one per lane or one scalar."""
        if not isinstance(operand, Address):
            raise unsupported(instruction, f"{operand!r} as an address")
        base = operand.base
        if isinstance(base, Symbol):
            return self.symbol(Symbol(base.name, base.offset + operand.offset), "u64", instruction)
        if isinstance(base, Immediate):
            constant = np.uint64(int(base.value) + operand.offset)
            return lambda w: constant
        slot, offset = base.slot, operand.offset
        if base.file == "d":
            if offset == 0:
                return lambda w: w.u64[slot]
            wide = np.array(offset, np.int64).view(np.uint64)[()]
            return lambda w: w.u64[slot] + wide
        if offset == 0:
            return lambda w: w.u32[slot].astype(np.uint64)
        narrow = np.array(offset, np.int32).view(np.uint32)[()]
        return lambda w: (w.u32[slot] + narrow).astype(np.uint64)
