"""Matrices between shared memory and the registers of a warp: ldmatrix, stmatrix, movmatrix (PTX ISA
9.7.14.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.loads_stores import aligned, cells_of, per_lane, shared_target
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import Instruction, elements_of
from cute_backend.simulator.warp import LANE_IDS

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.warp import Warp

ROW_BYTES = 16


def _count(instruction: Instruction) -> int:
    return next(int(p[1:]) for p in instruction.parts if p in ("x1", "x2", "x4"))


def _to_fragments(rows: np.ndarray) -> np.ndarray:
    """8 rows of 16 bytes as one 32-bit register per lane: lane i has bytes 4 * (i % 4) of row i // 4."""
    return rows.reshape(32, 4).view(np.uint32).reshape(32)


def _transposed(rows: np.ndarray) -> np.ndarray:
    """8 x 8 elements of 16 bits with rows and columns exchanged."""
    elements = np.ascontiguousarray(rows).view(np.uint16).reshape(8, -1)
    return np.ascontiguousarray(elements.T).view(np.uint8).reshape(8, -1)


def _check_form(instruction: Instruction) -> None:
    if instruction.has("m8n8") and instruction.has("b16"):
        return
    if instruction.has("m16n8") and instruction.has("b8") and instruction.has("trans"):
        return
    raise unsupported(instruction, "a shape other than m8n8.b16 and m16n8.trans.b8")


def _rows(w: Warp, address: Any, count: int) -> tuple[Cta, np.ndarray]:
    """(CTA, offsets) of the rows: lane i gives the address of row i % 8 of matrix i // 8."""
    lanes = LANE_IDS[: 8 * count]
    addresses = per_lane(w, address, lanes)
    aligned(addresses, ROW_BYTES)
    ((cta, _, offsets),) = shared_target(w, addresses, "shared::cta", ROW_BYTES)
    w.report.shared(lanes, offsets, ROW_BYTES)
    return cta, offsets


@opcode(
    "ldmatrix", section="9.7.14.5.15", meaning="1, 2 or 4 matrices of 8 x 8 from shared memory", together=True
)
def bind_ldmatrix(binder: Binder, instruction: Instruction) -> Step:
    if not (instruction.has("m8n8") and instruction.has("b16")):
        raise unsupported(instruction, "a shape other than m8n8.b16")
    count, transpose = _count(instruction), instruction.has("trans")
    puts = [binder.put(each, "b32", instruction) for each in elements_of(instruction.operands[0])]
    address = binder.address(instruction.operands[1], instruction)

    def load(w: Warp) -> None:
        cta, offsets = _rows(w, address(w), count)
        cta.shared.shadow.read(cells_of(offsets, ROW_BYTES), w.access(w.name))
        data = cta.shared.gather(offsets, ROW_BYTES).reshape(count, 8, ROW_BYTES)
        w.report.bytes["ld.shared"] += data.size
        for matrix, put in zip(data, puts, strict=False):
            put(w, _to_fragments(_transposed(matrix) if transpose else matrix))

    return load


@opcode(
    "stmatrix",
    section="9.7.14.5.16",
    meaning="1, 2 or 4 matrices of 8 x 8 (b8: 16 x 8) to shared memory",
    together=True,
)
def bind_stmatrix(binder: Binder, instruction: Instruction) -> Step:
    _check_form(instruction)
    count, transpose = _count(instruction), instruction.has("trans")
    bytewise = instruction.has("m16n8")
    address = binder.address(instruction.operands[0], instruction)
    gets = [binder.get(each, "b32", instruction) for each in elements_of(instruction.operands[1])]

    def store(w: Warp) -> None:
        cta, offsets = _rows(w, address(w), count)
        cta.shared.shadow.write(cells_of(offsets, ROW_BYTES), w.access(w.name))
        matrices = []
        for get in gets:
            fragment = np.ascontiguousarray(np.broadcast_to(get(w), 32))
            if bytewise:
                matrices.append(_columns_of_bytes(fragment))
                continue
            rows = fragment.view(np.uint8).reshape(8, ROW_BYTES)
            matrices.append(_transposed(rows) if transpose else rows)
        cta.shared.scatter(offsets, np.concatenate(matrices))
        w.report.bytes["st.shared"] += len(offsets) * ROW_BYTES
        w.report.stored()
        w.cta.cluster.activity += 1

    return store


def _columns_of_bytes(fragment: np.ndarray) -> np.ndarray:
    """m16n8 of b8, transposed: shared row j (of 16 bytes) is column j of the 16 x 8 matrix.

    Lane i holds rows i // 4 and i // 4 + 8 at columns 2 * (i % 4) and 2 * (i % 4) + 1 (PTX ISA 9.7.14.5.16,
    figure of the m16n8 fragment). Bytes 0 and 1 are of the upper row, bytes 2 and 3 of the lower row.
    """
    pieces = fragment.view(np.uint8).reshape(8, 4, 2, 2)
    matrix = np.empty((16, 8), np.uint8)
    matrix[:8] = pieces[:, :, 0, :].reshape(8, 8)
    matrix[8:] = pieces[:, :, 1, :].reshape(8, 8)
    return np.ascontiguousarray(matrix.T)


@opcode(
    "movmatrix", section="9.7.14.5.17", meaning="Transposes an 8 x 8 matrix across the warp", together=True
)
def bind_movmatrix(binder: Binder, instruction: Instruction) -> Step:
    put = binder.put(instruction.operands[0], "b32", instruction)
    get = binder.get(instruction.operands[1], "b32", instruction)

    def move(w: Warp) -> None:
        rows = np.ascontiguousarray(np.broadcast_to(get(w), 32)).view(np.uint8).reshape(8, ROW_BYTES)
        put(w, _to_fragments(_transposed(rows)))

    return move
