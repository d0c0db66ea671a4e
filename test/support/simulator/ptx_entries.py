"""Small PTX entries for the tests of single opcodes: written here as text, run by `run_kernel`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cute_backend.simulator.machine import Launch, run_kernel
from cute_backend.simulator.memory import GlobalMemory
from cute_backend.simulator.report import Report

REGISTERS = """
    .reg .pred %p<32>;
    .reg .b16 %h<64>;
    .reg .b32 %r<512>;
    .reg .b64 %rd<64>;
    .reg .b128 %rq<8>;
"""


def entry(body: str, pointers: int, *, shared: int = 0, extra: str = "", target: str = "sm_100a") -> str:
    """A module with one entry `kernel`: `pointers` 64-bit parameters p0, p1, ..., and `shared` bytes named
    `smem`.
    """
    parameters = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    variable = f".shared .align 1024 .b8 smem[{shared}];" if shared else ""
    return f"""
.version 9.0
.target {target}
.address_size 64
{extra}
.visible .entry kernel({parameters})
{{
    {REGISTERS}
    {variable}
    {body}
    ret;
}}
"""


def to_shared(pointer: str, at: int, nbytes: int, label: str, threads: int) -> str:
    """All threads copy bytes from a global pointer to `smem` + at."""
    return f"""
    mov.b32 %r20, %r0;
{label}: setp.ge.u32 %p8, %r20, {nbytes // 16}; @%p8 bra {label}_END;
    mad.lo.u32 %r21, %r20, 16, %r2; mad.wide.u32 %rd20, %r20, 16, {pointer};
    ld.global.v4.b32 {{%r30, %r31, %r32, %r33}}, [%rd20];
    st.shared.v4.b32 [%r21+{at}], {{%r30, %r31, %r32, %r33}};
    add.u32 %r20, %r20, {threads}; bra {label};
{label}_END:
"""


def descriptor(register: str, value: int, at: int) -> str:
    """The matrix descriptor of the bytes at `smem` + at; `value` has its other fields."""
    return f"""
    add.u32 %r22, %r2, {at}; and.b32 %r22, %r22, 0x3ffff; shr.u32 %r22, %r22, 4; cvt.u64.u32 {register}, %r22;
    or.b64 {register}, {register}, {value};
"""


def launch(
    text: str,
    arrays: Sequence[np.ndarray],
    *,
    block: int | tuple[int, int, int] = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    seed: int | None = None,
    params: Sequence[bytes] = (),
    **options: Any,
) -> Report:
    """Runs `kernel` with the addresses of `arrays` as its parameters, then `params`. Arrays change in
    place.
    """
    memory = GlobalMemory()
    given = []
    for index, array in enumerate(arrays):
        assert array.flags.c_contiguous
        memory.register(array.ctypes.data, array.nbytes, f"array {index}", keep=array)
        given.append(struct.pack("<Q", array.ctypes.data))
    shape = (block, 1, 1) if isinstance(block, int) else block
    smem_bytes, overlaps = options.pop("smem_bytes", 0), options.pop("overlaps", False)
    one = Launch("kernel", grid, shape, cluster, smem_bytes, (*given, *params), overlaps)
    return run_kernel(text, one, memory, async_seed=seed, **options)


_LETTER = {1: "h", 2: "h", 4: "r", 8: "rd"}
BLOCK = 256


def elementwise(code: str, inputs: Sequence[np.ndarray], outputs: Sequence[Any]) -> list[np.ndarray]:
    """Runs `code` for each element. In braces, a, b, c, ... are the registers of inputs, and x, y, ... those
    of outputs.

    Each array has one element per thread; `outputs` are dtypes. Registers have the width of the dtype, or 16
    bits for a byte. `code` may also use %p0 to %p31, and registers of REGISTERS from number 32 on.
    """
    count = len(inputs[0])
    padded = -(-count // BLOCK) * BLOCK
    sources = []
    for array in inputs:
        whole = np.zeros(padded, array.dtype)
        whole[:count] = array
        sources.append(whole)
    results = [np.zeros(padded, dtype) for dtype in outputs]
    names, loads, stores = {}, [], []
    for index, array in enumerate(sources):
        size = array.dtype.itemsize
        name = names["abcdef"[index]] = f"%{_LETTER[size]}{index}"
        loads.append(_address(f"p{index}", size) + f"ld.global.b{8 * size} {name}, [%rd62];")
    for index, array in enumerate(results):
        size = array.dtype.itemsize
        name = names["xyzw"[index]] = f"%{_LETTER[size]}{8 + index}"
        stores.append(_address(f"p{len(sources) + index}", size) + f"st.global.b{8 * size} [%rd62], {name};")
    body = """
    mov.u32 %r500, %ctaid.x; mov.u32 %r501, %ntid.x; mov.u32 %r502, %tid.x;
    mad.lo.s32 %r500, %r500, %r501, %r502;
    """
    text = entry(
        body + "\n".join(loads) + "\n" + code.format(**names) + "\n" + "\n".join(stores),
        len(sources + results),
    )
    launch(text, sources + results, block=BLOCK, grid=(padded // BLOCK, 1, 1))
    return [r[:count] for r in results]


def _address(parameter: str, size: int) -> str:
    return f"ld.param.u64 %rd62, [{parameter}]; mad.wide.u32 %rd62, %r500, {size}, %rd62;\n"


def one(code: str, inputs: Sequence[np.ndarray], output: Any) -> np.ndarray:
    """`elementwise` with one output."""
    return elementwise(code, inputs, [output])[0]
