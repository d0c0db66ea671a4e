"""Shared memory to tensor memory: tcgen05.cp (PTX ISA 9.7.16.9.1).

One thread issues it. It runs in the pipe of tcgen05.mma, in the order in which both were issued, so no wait
is needed between them (PTX ISA 9.7.16.6.2). With .cta_group::2 each CTA of the pair copies from its own
shared memory to its own tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.isa.common import scalar, scalar_address
from cute_backend.simulator.layouts import decode_descriptor
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.simulation_errors import IllegalAccess, SimulationError
from cute_backend.simulator.syntax import Instruction
from cute_backend.simulator.tensor_cores import plan

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp


@dataclass(frozen=True)
class CopyShape:
    """The rows of the matrix in shared memory, the 32-bit columns of each, and the `lanes` (copies, rows)
    that each row is copied to."""

    rows: int
    columns: int
    lanes: np.ndarray


def _blocks(*of_quarter: int) -> np.ndarray:
    """The lanes (copies, rows) if quarter q of the lanes gets the block `of_quarter[q]` of 32 rows."""
    blocks = max(of_quarter) + 1
    quarters = [[q for q, block in enumerate(of_quarter) if block == b] for b in range(blocks)]
    lanes = np.array(quarters)[:, :, None] * 32 + np.arange(32)
    return lanes.transpose(1, 0, 2).reshape(len(quarters[0]), -1)


SHAPES = {
    ("128x256b", ""): CopyShape(128, 8, np.arange(128)[None]),
    ("128x128b", ""): CopyShape(128, 4, np.arange(128)[None]),
    ("4x256b", ""): CopyShape(4, 8, 32 * np.arange(4)[None]),
    ("64x128b", "warpx2::02_13"): CopyShape(64, 4, _blocks(0, 1, 0, 1)),
    ("64x128b", "warpx2::01_23"): CopyShape(64, 4, _blocks(0, 0, 1, 1)),
    ("32x128b", "warpx4"): CopyShape(32, 4, _blocks(0, 0, 0, 0)),
}


@opcode("tcgen05.cp", section="9.7.16.9.1", meaning="Shared memory to tensor memory, asynchronous")
def bind_cp(binder: Binder, instruction: Instruction) -> Step:
    name = next((p for p in instruction.parts if "x" in p and p.endswith("b")), "")
    multicast = next((p for p in instruction.parts if p.startswith("warpx")), "")
    if (name, multicast) not in SHAPES or any("16_p" in p for p in instruction.parts):
        raise unsupported(instruction, "this shape, multicast or format")
    shape = SHAPES[name, multicast]
    ctas = 2 if instruction.has("cta_group::2") else 1
    address = scalar_address(binder, instruction.operands[0], instruction)
    matrix = scalar(binder, instruction.operands[1], "b64", instruction)
    text = instruction.text

    def copy(w: Warp) -> None:
        if int(w.mask.sum()) != 1:
            raise SimulationError(
                f"tcgen05.cp by {int(w.mask.sum())} lanes of {w.name}; one thread must issue it"
            )
        cta, cluster = w.cta, w.cta.cluster
        pair = [cta] if ctas == 1 else [cluster.ctas[cta.rank & ~1], cluster.ctas[cta.rank | 1]]
        lane, column = (address(w) >> 16) & 0x3FFF, address(w) & 0xFFFF
        if lane + int(shape.lanes.max()) >= 128:
            raise IllegalAccess(f"tcgen05.cp.{name} to lane {lane}")
        lanes, columns = lane + shape.lanes, slice(column, column + shape.columns)
        source = plan(decode_descriptor(matrix(w), True), shape.rows, 4 * shape.columns, 1, False)
        cta.mma_epoch += 1
        access = w.issue(cta.mma_agent, cta.mma_epoch, text)
        access.clock.seen[cta.mma_agent] = cta.mma_epoch
        for member in pair:
            member.shared.check(source.low, source.high)
            member.shared.shadow.read(source.cells, access)
            member.tmem.check(column, shape.columns)
            member.tmem.shadow.write((lanes.reshape(-1), columns), access)
            member.shared.shadow.note(cta.mma_agent, cta.mma_epoch, text)

        def complete() -> None:
            for member in pair:
                assert source.units is not None
                raw = np.ascontiguousarray(member.shared.units[source.units].reshape(shape.rows, -1))
                for part in lanes:
                    member.tmem.cells[part, columns] = raw.view(np.uint32)

        w.report.bytes["tcgen05.cp"] += ctas * shape.rows * shape.columns * 4
        cta.pipes["MMA"].issue(text, complete)

    return copy
