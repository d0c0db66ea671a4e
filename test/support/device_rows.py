"""One kernel with every row of the op table, one with every conversion, and their cases.

`rows_module` and `conversions_module` are texts of CuTe DSL modules: device code must live in a file. Both
kernels write 32 bits for each (case, sample), so that results are compared as bits whatever their type.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_backend import numerics
from cute_backend.memory_ops.emit import CUTE_TYPES
from cute_backend.ops import CAST, OPS, OperandRule, cast_expression, result_dtype
from cute_backend.spec import VALUE_DTYPES, DType, Overflow
from support.op_samples import operands

REGISTERS = (DType.F32, DType.I32, DType.BOOL)
THREADS = 128
FRAGMENT = 8
"""Elements that a thread converts at once."""

_BITS = {DType.F32: "{}.bitcast(Int32)", DType.I32: "{}", DType.BOOL: "math.to_i32({})"}
_LETTER = {DType.F32: "f", DType.I32: "i", DType.BOOL: "b"}


@dataclass(frozen=True)
class RowCase:
    """A row, or a cast, on operands of given register dtypes."""

    name: str
    registers: tuple[DType, ...]
    result: DType
    expression: str
    reference: Callable[..., Tensor]

    def names(self) -> list[str]:
        """Its operands among f0, f1, i0, i1, b0, b1."""
        return [
            f"{_LETTER[register]}{self.registers[:index].count(register) % 2}"
            for index, register in enumerate(self.registers)
        ]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(register.value for register in self.registers)})"


def row_cases() -> list[RowCase]:
    """Every row on every register dtype that it has an expression for, and every cast under both overflow
    rules."""
    cases = []
    for row in OPS.values():
        for register in REGISTERS:
            text = row.expression(register)
            if text is None:
                continue
            registers = (register,) * row.arity
            if row.operands is OperandRule.WHERE:
                registers = (DType.BOOL, register, register)
            case = RowCase(row.name, registers, result_dtype(row, registers), text, row.reference)
            cases.append(case)
    for source in REGISTERS:
        for target in VALUE_DTYPES:
            for overflow in Overflow:
                if overflow is Overflow.NONFINITE and not target.is_fp8:
                    continue
                text = cast_expression("{0}", source, target, overflow)
                name = f"{CAST.name} {target.value} {overflow.value}"
                reference = _cast_reference(target, overflow)
                cases.append(RowCase(name, (source,), target.register, text, reference))
    return cases


def _cast_reference(target: DType, overflow: Overflow) -> Callable[[Tensor], Tensor]:
    return lambda value: numerics.cast(value, target, overflow)


def row_inputs(count: int) -> dict[str, Tensor]:
    """The samples f0, f1, i0, i1, b0 and b1: pairs of special values, then random ones, `count` in all."""
    inputs = {}
    for register in REGISTERS:
        pair = operands((register, register), count)
        for index, tensor in enumerate(pair):
            inputs[f"{_LETTER[register]}{index}"] = tensor[:count]
    return inputs


def rows_module(cases: Sequence[RowCase]) -> str:
    """A module whose `launch(f0, f1, i0, i1, b0, b1, out, stream)` fills out (cases, samples)."""
    lines = []
    for index, case in enumerate(cases):
        lines.append(f"        value{index} = {case.expression.format(*case.names())}")
        lines.append(f"        out[{index}, t] = {_BITS[case.result].format(f'value{index}')}")
    body = "\n".join(lines)
    return f"""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from cute_backend.memory_ops import device_math as math
from cute_backend.memory_ops import device_noise as noise


@cute.kernel
def rows(
    f0s: cute.Tensor, f1s: cute.Tensor, i0s: cute.Tensor, i1s: cute.Tensor,
    b0s: cute.Tensor, b1s: cute.Tensor, out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    t = block * {THREADS} + thread
    if t < cute.size(f0s):
        f0, f1, i0, i1 = f0s[t], f1s[t], i0s[t], i1s[t]
        b0, b1 = math.to_bool(Int32(b0s[t])), math.to_bool(Int32(b1s[t]))
{body}


@cute.jit
def launch(
    f0: cute.Tensor, f1: cute.Tensor, i0: cute.Tensor, i1: cute.Tensor, b0: cute.Tensor, b1: cute.Tensor,
    out: cute.Tensor, stream: cuda.CUstream,
):
    blocks = cute.ceil_div(cute.size(f0), {THREADS})
    rows(f0, f1, i0, i1, b0, b1, out).launch(grid=(blocks, 1, 1), block=({THREADS}, 1, 1), stream=stream)
"""


@dataclass(frozen=True)
class Narrowing:
    """A fragment of register values stored as a dtype."""

    source: DType
    target: DType
    overflow: Overflow

    def __str__(self) -> str:
        return f"narrow {self.source.value} to {self.target.value} ({self.overflow.value})"

    def lines(self, index: int) -> list[str]:
        element = "Boolean" if self.target is DType.BOOL else CUTE_TYPES[self.target]
        rule = "" if self.overflow is Overflow.SATURATE else ", saturate=False"
        holder = {8: "Uint8", 16: "Uint16", 32: "Int32"}[self.target.bits]
        return [
            f"narrowed = math.narrow({_LETTER[self.source]}, {element}{rule})",
            f"codes = cute.recast_tensor(narrowed, {holder})",
            f"for e in cutlass.range_constexpr({FRAGMENT}):",
            f"    out[{index}, first + e] = Int32(codes[e])",
        ]

    def expected(self, inputs: dict[str, Tensor]) -> Tensor:
        return numerics.store(inputs[_LETTER[self.source]], self.target, self.overflow)

    def decode(self, bits: Tensor) -> Tensor:
        holder = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[self.target.bits]
        return bits.to(holder).view(numerics.TORCH_DTYPES[self.target])


@dataclass(frozen=True)
class Widening:
    """A fragment in its dtype of memory, converted to its register dtype."""

    source: DType

    def __str__(self) -> str:
        return f"widen {self.source.value}"

    def lines(self, index: int) -> list[str]:
        codes = "bytes" if self.source.bits == 8 else "halves"
        register = {DType.F32: "Float32", DType.I32: "Int32", DType.BOOL: "Boolean"}[self.source.register]
        value = _BITS[self.source.register].format("widened[e]")
        return [
            f"widened = math.widen(cute.recast_tensor({codes}, {CUTE_TYPES[self.source]}), {register})",
            f"for e in cutlass.range_constexpr({FRAGMENT}):",
            f"    out[{index}, first + e] = {value}",
        ]

    def expected(self, inputs: dict[str, Tensor]) -> Tensor:
        codes = inputs["bytes" if self.source.bits == 8 else "halves"]
        stored = codes != 0 if self.source is DType.BOOL else codes.view(numerics.TORCH_DTYPES[self.source])
        return numerics.widen(stored, self.source)

    def decode(self, bits: Tensor) -> Tensor:
        if self.source.register is DType.F32:
            return bits.view(torch.float32)
        return bits.to(numerics.TORCH_DTYPES[self.source.register])


Conversion = Narrowing | Widening


def conversions() -> list[Conversion]:
    """Every store of every register dtype, under both overflow rules, and every load that is not 32 bits."""
    narrowings = [
        Narrowing(source, target, overflow)
        for source in REGISTERS
        for target in VALUE_DTYPES
        for overflow in Overflow
        if overflow is Overflow.SATURATE or target.is_fp8
    ]
    return [*narrowings, *(Widening(source) for source in VALUE_DTYPES if source.bits < 32)]


def conversion_inputs(count: int) -> dict[str, Tensor]:
    """`count` (a multiple of FRAGMENT) samples: f, i, b, and codes of 8 and of 16 bits."""
    inputs = {_LETTER[register]: operands((register, register), count)[0][:count] for register in REGISTERS}
    codes = torch.arange(count, dtype=torch.int32)
    # The codes are multiples of an odd number, so that even few samples have all kinds of exponents and
    # signs.
    return {**inputs, "bytes": (codes & 255).to(torch.uint8), "halves": (codes * 24019).to(torch.int16)}


def conversions_module(cases: Sequence[Conversion]) -> str:
    """A module whose `launch(f, i, b, bytes, halves, out, stream)` fills out (cases, samples)."""
    body = "\n".join(f"        {line}" for index, case in enumerate(cases) for line in case.lines(index))
    return f"""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16, Boolean, Float8E4M3FN, Float8E5M2, Float16, Float32, Int8, Int16, Int32, Uint8, Uint16
)

from cute_backend.memory_ops import device_math as math


def fragment(tensor, first, dtype):
    values = cute.make_rmem_tensor({FRAGMENT}, dtype)
    for e in range({FRAGMENT}):
        values[e] = tensor[first + e]
    return values


@cute.kernel
def convert(
    fs: cute.Tensor, is_: cute.Tensor, bs: cute.Tensor, bytes_: cute.Tensor, halves_: cute.Tensor,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    first = (block * {THREADS} + thread) * {FRAGMENT}
    if first < cute.size(fs):
        f, i = fragment(fs, first, Float32), fragment(is_, first, Int32)
        b = math.widen(fragment(bs, first, Uint8), Boolean)
        bytes, halves = fragment(bytes_, first, Uint8), fragment(halves_, first, Int16)
{body}


@cute.jit
def launch(
    f: cute.Tensor, i: cute.Tensor, b: cute.Tensor, bytes: cute.Tensor, halves: cute.Tensor, out: cute.Tensor,
    stream: cuda.CUstream,
):
    blocks = cute.ceil_div(cute.size(f), {THREADS * FRAGMENT})
    convert(f, i, b, bytes, halves, out).launch(grid=(blocks, 1, 1), block=({THREADS}, 1, 1), stream=stream)
"""


def compiled(text: str, inputs: dict[str, Tensor], folder: Path, arch: str) -> Any:
    """The module's `launch`, compiled through TVM-FFI for any number of samples."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    types = {
        torch.float32: cutlass.Float32,
        torch.int32: cutlass.Int32,
        torch.int16: cutlass.Int16,
        torch.uint8: cutlass.Uint8,
        torch.bool: cutlass.Uint8,
    }
    path = folder / f"module_{arch}.py"
    path.write_text(text)
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    samples, cases = cute.sym_int(), cute.sym_int()
    fakes = [make_fake_compact_tensor(types[tensor.dtype], (samples,)) for tensor in inputs.values()]
    out = make_fake_compact_tensor(cutlass.Int32, (cases, samples), stride_order=(1, 0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--gpu-arch {arch} --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir={folder}"
    return cute.compile(module.launch, *fakes, out, stream, options=options)


def as_arguments(inputs: dict[str, Tensor], out: Tensor) -> list[Tensor]:
    """The arguments of the compiled function: bools as bytes."""
    return [
        tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        for tensor in (*inputs.values(), out)
    ]
