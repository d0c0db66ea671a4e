"""The tensor core of a warp since sm_80: mma.sync (PTX ISA 9.7.14.5), synchronous and on registers.

Lane i of a warp has row i // 4 of each 8 rows of A, and column i // 4 of each 8 columns of B. It has the
(i % 4)-th 32 bits of every 128 of this row or column: two elements of 16 bits, or four of 8. D has the layout
of C; lane i has its rows i // 4 and i // 4 + 8, and its columns 2 * (i % 4) and 2 * (i % 4) + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.wgmma import a_from_registers
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import Instruction, Operand, Vector
from cute_backend.simulator.tensor_cores import WIDTHS, accumulate, values
from cute_backend.simulator.warp import LANE_IDS

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

_ROW, _PAIR = LANE_IDS // 4, LANE_IDS % 4


def _d_places() -> np.ndarray:
    """The place, in D (16, 8), of each element of four registers by 32 lanes."""
    return np.stack([(_ROW + 8 * (index // 2)) * 8 + 2 * _PAIR + index % 2 for index in range(4)])


_D_PLACES = _d_places()
_C_PLACES = np.argsort(_D_PLACES.reshape(-1)).reshape(16, 8)
"""The place, among four registers by 32 lanes, of each element of C."""

_TYPES = {
    "m16n8k16": {("bf16", "bf16", "f32"), ("f16", "f16", "f32")},
    "m16n8k32": {
        *((a, b, "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
        *((a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")),
    },
}
"""The supported shapes, and the types of A, of B and of the sums of each."""


def _elements(operand: Operand) -> tuple[Any, ...]:
    assert isinstance(operand, Vector)
    return operand.elements


def _b_from_registers(w: Warp, gets: list[Any], kind: str) -> np.ndarray:
    """B of a warp, as (8 columns, K), from two registers per lane."""
    raw = np.empty((8, 8), np.uint32)
    for index, get in enumerate(gets):
        raw[_ROW, _PAIR + 4 * index] = get(w)
    return values(raw.view(np.uint8), kind)


@opcode("mma.sync", section="9.7.14.5.14", meaning="D = A * B + C of a warp, in registers", together=True)
def bind_mma(binder: Binder, instruction: Instruction) -> Step:
    shape = next((part for part in instruction.parts if part in _TYPES), None)
    if shape is None or instruction.has("sp") or instruction.has("block_scale"):
        raise unsupported(instruction, f"a form other than {' and '.join(_TYPES)} without scales")
    d_kind, a_kind, b_kind, c_kind = instruction.parts[-4:]
    if (a_kind, b_kind, d_kind) not in _TYPES[shape] or c_kind != d_kind:
        raise unsupported(instruction, f"types {d_kind}.{a_kind}.{b_kind}.{c_kind}")
    if not (instruction.has("row") and instruction.has("col")):
        raise unsupported(instruction, "a layout other than row.col")
    d, a, b, c = map(_elements, instruction.operands)
    if (len(d), len(a), len(b), len(c)) != (4, 4, 2, 4):
        raise unsupported(instruction, f"{len(d)}, {len(a)}, {len(b)} and {len(c)} registers")
    puts = [binder.put(element, "b32", instruction) for element in d]
    a_gets, b_gets = ([binder.get(each, "b32", instruction) for each in part] for part in (a, b))
    c_gets = [binder.get(element, "b32", instruction) for element in c]
    saturate = instruction.has("satfinite")
    operand_bytes = (16 + 8) * int(shape.removeprefix("m16n8k")) * WIDTHS[a_kind]

    def mma(w: Warp) -> None:
        sums = np.empty((4, 32), np.uint32)
        for index, get in enumerate(c_gets):
            sums[index] = get(w)
        left, right = a_from_registers(w, a_gets, a_kind), _b_from_registers(w, b_gets, b_kind)
        result = accumulate(sums.take(_C_PLACES), left, right, d_kind, saturate).take(_D_PLACES)
        for put, row in zip(puts, result, strict=True):
            put(w, row)
        w.report.bytes["MMA operands"] += operand_bytes
        w.report.accumulator_ready()

    return mma
