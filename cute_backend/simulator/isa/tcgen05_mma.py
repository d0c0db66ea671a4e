"""Matrix products on tensor memory: tcgen05.mma and its commits (PTX ISA 9.7.16.4, 9.7.16.10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cute_backend.simulator.isa import block_scale
from cute_backend.simulator.isa.barrier import in_cluster, use_mbarrier
from cute_backend.simulator.isa.common import scalar, scalar_address
from cute_backend.simulator.layouts import decode_descriptor
from cute_backend.simulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.simulation_errors import DescriptorError, IllegalAccess, SimulationError
from cute_backend.simulator.syntax import Address, Immediate, Instruction, Vector
from cute_backend.simulator.tensor_cores import PADDED, WIDTHS, accumulate, collect, plan, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.warp import Warp

FORMATS = {
    "kind::f16": {0: "f16", 1: "bf16"},
    "kind::tf32": {2: "tf32"},
    "kind::f8f6f4": {0: "e4m3", 1: "e5m2"},
    "kind::i8": {0: "u8", 1: "s8"},
    **{kind: scaled.elements for kind, scaled in block_scale.KINDS.items()},
}
DEPTHS = {"kind::f16": 16, "kind::tf32": 8, "kind::f8f6f4": 32, "kind::i8": 32,
          **{kind: scaled.k for kind, scaled in block_scale.KINDS.items()}}  # fmt: skip
RESULTS = {"kind::i8": {2: "s32"}, "kind::tf32": {1: "f32"}, "kind::f16": {0: "f16", 1: "f32"},
           "kind::f8f6f4": {0: "f16", 1: "f32"}}  # fmt: skip


@dataclass(frozen=True)
class MmaShape:
    """An instruction descriptor, decoded (PTX ISA 9.7.16.4.2)."""

    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool
    scales: block_scale.Scales | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of shared memory of one row of A, or of B, over K."""
        return self.k // 2 if self.a == "e2m1x2" else self.k * WIDTHS.get(self.a, 1)


def decode_instruction_descriptor(raw: int, kind: str, ctas: int, scales: int = 0) -> MmaShape:
    """Decodes the descriptor of an instruction with `scales` scales of a row, 0 for a kind without scales.

    Raises `DescriptorError` for formats and sizes that the kind doesn't have.
    """
    a, b, d = (raw >> 7) & 7, (raw >> 10) & 7, (raw >> 4) & 3
    formats = FORMATS[kind]
    # The sums of a kind with scales are fp32, and its descriptor has a scale id in place of their format.
    results = {d: "f32"} if scales else RESULTS[kind]
    where = f"instruction descriptor {raw:#010x} of .{kind}"
    for name, code in (("A", a), ("B", b)):
        if code not in formats:
            raise DescriptorError(f"{where}: format {code} of {name}; {formats} are supported")
    if d not in results:
        raise DescriptorError(f"{where}: format {d} of D; {results} are defined")
    if (raw >> 2) & 1:
        raise DescriptorError(f"{where}: sparsity is not supported")
    if scales and raw >> 31:
        raise DescriptorError(f"{where}: K = 96 is not supported")
    m, n = ((raw >> 24) & 0x1F) << 4, ((raw >> 17) & 0x3F) << 3
    # With scales, 128 rows over two CTAs are defined too; no kernel here uses them.
    sizes = {1: (128,), 2: (256,)}[ctas] if scales else {1: (64, 128), 2: (128, 256)}[ctas]
    # PTX ISA 9.7.16.2.1, with the widest sizes of its latest version.
    step = 8 * ctas
    if m not in sizes or n % step or not step <= n <= 256:
        raise DescriptorError(
            f"{where}: M = {m}, N = {n} with {ctas} CTA(s); M may be {sizes}, N multiples of {step} up to 256"
        )
    negate_a, negate_b, a_mn, b_mn, saturate = (bool((raw >> bit) & 1) for bit in (13, 14, 15, 16, 3))
    if scales and (a_mn or b_mn) and {formats[a], formats[b]} & {"e2m1x2", *PADDED}:
        raise DescriptorError(
            f"{where}: MN-major operands of {formats[a]} and {formats[b]}, which must be K-major"
        )
    decoded = block_scale.Scales.decode(raw, kind, scales) if scales else None
    kinds = formats[a], formats[b], results[d]
    return MmaShape(m, n, DEPTHS[kind], *kinds, negate_a, negate_b, a_mn, b_mn, saturate, decoded)


def d_blocks(shape: MmaShape, ctas: int, lane: int, column: int) -> list[tuple[Any, slice, slice]]:
    """The blocks of D in one CTA's tensor memory (PTX ISA 9.7.16.10.5, data path layouts)."""
    n = shape.n
    rows = shape.m // ctas
    if rows == 128:
        return [(slice(0, 128), slice(column, column + n), slice(0, n))]
    if ctas == 2:
        half = n // 2
        columns = slice(column, column + half)
        return [(slice(0, 64), columns, slice(0, half)), (slice(64, 128), columns, slice(half, n))]
    lanes = lane + np.arange(64) // 16 * 32 + np.arange(64) % 16
    return [(lanes, slice(column, column + n), slice(0, n))]


class MmaOperands(NamedTuple):
    """The operands of a tcgen05.mma, as functions of a warp; `scale` is the power of two that divides D."""

    d_address: Callable[[Warp], int]
    a: Callable[[Warp], int]
    """The address of A in tensor memory, or its descriptor."""
    b: Callable[[Warp], int]
    descriptor: Callable[[Warp], int]
    scales: list[Callable[[Warp], int]]
    """The addresses of the scales of A and of B, if there are any."""
    disabled: list[Callable[[Warp], int]]
    """The words of disable-output-lane."""
    adds: Callable[[Warp], int]
    scale: int


def _operands(binder: Binder, instruction: Instruction) -> MmaOperands:
    operands = list(instruction.operands)
    a = (
        scalar_address(binder, operands[1], instruction)
        if isinstance(operands[1], Address)
        else scalar(binder, operands[1], "b64", instruction)
    )
    rest, scales, disabled = operands[4:], [], []
    if instruction.has("block_scale"):
        scales = [scalar_address(binder, each, instruction) for each in rest[:2]]
        rest = rest[2:]
    if isinstance(rest[0], Vector):
        disabled = [scalar(binder, each, "b32", instruction) for each in rest[0].elements]
        rest = rest[1:]
    return MmaOperands(
        d_address=scalar_address(binder, operands[0], instruction),
        a=a,
        b=scalar(binder, operands[2], "b64", instruction),
        descriptor=scalar(binder, operands[3], "b32", instruction),
        scales=scales,
        disabled=disabled,
        adds=scalar(binder, rest[0], "pred", instruction),
        scale=int(rest[1].value) if len(rest) > 1 and isinstance(rest[1], Immediate) else 0,
    )


@opcode("tcgen05.mma", section="9.7.16.10.9.1", meaning="D = A * B + D in tensor memory, asynchronous")
def bind_mma(binder: Binder, instruction: Instruction) -> Step:
    kind = next((p for p in instruction.parts if p.startswith("kind::")), "")
    scaled = instruction.has("block_scale")
    if kind not in FORMATS or scaled != (kind in block_scale.KINDS) or {"ws", "sp"} & {*instruction.parts}:
        raise unsupported(instruction, "this kind")
    count = block_scale.scales_of_a_row(kind, instruction.parts) if scaled else 0
    ctas = 2 if instruction.has("cta_group::2") else 1
    operands = _operands(binder, instruction)
    from_tmem = isinstance(instruction.operands[1], Address)
    text = instruction.text

    def mma(w: Warp) -> None:
        _by_one_lane(w, "tcgen05.mma")
        cta, cluster = w.cta, w.cta.cluster
        shape = decode_instruction_descriptor(operands.descriptor(w), kind, ctas, count)
        pair = [cta] if ctas == 1 else [cluster.ctas[cta.rank & ~1], cluster.ctas[cta.rank | 1]]
        lane, column = divmod(operands.d_address(w), 1 << 16)
        if lane not in ((0, 16) if shape.m == 64 else (0,)):
            raise IllegalAccess(f"tcgen05.mma with D at lane {lane}")
        if from_tmem and shape.a in ("e2m1x2", *PADDED):
            raise unsupported(instruction, f"A of {shape.a} in tensor memory")
        blocks = d_blocks(shape, ctas, lane, column)
        keep = _enabled([get(w) for get in operands.disabled], ctas)
        accumulates = bool(operands.adds(w))
        cta.mma_epoch += 1
        access = w.issue(cta.mma_agent, cta.mma_epoch, text)
        access.clock.seen[cta.mma_agent] = cta.mma_epoch
        a_raw = operands.a(w)
        b_plan = plan(
            decode_descriptor(operands.b(w), True), shape.n // ctas, *_row(shape, shape.b), shape.b_mn_major
        )
        a_plan = None if from_tmem else plan(
            decode_descriptor(a_raw, True), shape.m // ctas, *_row(shape, shape.a), shape.a_mn_major
        )  # fmt: skip
        sides = []
        if (scales := shape.scales) is not None:
            at_a, at_b = (get(w) for get in operands.scales)
            sides = [(scales, at_a, scales.a_byte, shape.m // ctas), (scales, at_b, scales.b_byte, shape.n)]
        for member in pair:
            member.tmem.check(column, blocks[0][1].stop - column)
            for part in (a_plan, b_plan):
                if part is not None:
                    member.shared.check(part.low, part.high)
                    member.shared.shadow.read(part.cells, access)
            if from_tmem:
                member.tmem.shadow.read(_a_block(shape, ctas, a_raw), access)
            for each, address, _, rows in sides:
                each.read(member.tmem, address, rows, access)
            for lanes, columns, _ in blocks:
                if accumulates:
                    member.tmem.shadow.read((lanes, columns), access)
                member.tmem.shadow.write((lanes, columns), access)
            member.shared.shadow.note(cta.mma_agent, cta.mma_epoch, text)

        def complete() -> None:
            b = np.concatenate([collect(m.shared, b_plan, shape.b) for m in pair])
            if shape.negate_b:
                b = -b
            for member, enabled in zip(pair, keep, strict=False):
                if a_plan is not None:
                    a = collect(member.shared, a_plan, shape.a)
                else:
                    a = values(_words(member, _a_block(shape, ctas, a_raw)).view(np.uint8), shape.a)
                if shape.negate_a:
                    a = -a
                factors = [each.of_rows(member.tmem, *side) for each, *side in sides]
                for lanes, columns, part in blocks:
                    old = _words(member, (lanes, columns))
                    before = _divided(old, operands.scale) if accumulates else None
                    if factors:
                        new = _scaled(before, a, b, *factors)
                    else:
                        new = accumulate(before, a, b[part], shape.d, shape.saturate)
                    if enabled is not None:
                        new = np.where(enabled[lanes][:, None], new, old)
                    member.tmem.cells[lanes, columns] = new

        w.report.bytes["MMA operands"] += (shape.m + shape.n) * shape.row_bytes
        cta.pipes["MMA"].issue(text, complete)

    return mma


def _by_one_lane(w: Warp, name: str) -> None:
    lanes = int(w.mask.sum())
    if lanes != 1:
        raise SimulationError(f"{name} by {lanes} lanes of {w.name}; one thread must issue it")


def _words(cta: Cta, block: tuple[Any, slice]) -> np.ndarray:
    """A copy of a block of tensor memory."""
    return np.array(cta.tmem.cells[block], order="C")


def _divided(sums: np.ndarray, scale: int) -> np.ndarray:
    """Sums in fp32 divided by 2 ** scale, or sums of any type if `scale` is 0."""
    return (sums.view(np.float32) * np.float32(2.0**-scale)).view(np.uint32) if scale else sums


def _row(shape: MmaShape, kind: str) -> tuple[int, int]:
    """K and the bytes of an element, as `plan` takes them: two elements of e2m1x2 count as one."""
    return (shape.k // 2, 1) if kind == "e2m1x2" else (shape.k, WIDTHS.get(kind, 1))


def _scaled(
    before: np.ndarray | None, a: np.ndarray, b: np.ndarray, of_a: np.ndarray, of_b: np.ndarray
) -> np.ndarray:
    """128 rows of D, each quarter of the lanes computed with its own copy of the scales."""
    quarters = []
    for quarter in range(block_scale.QUARTERS):
        rows = slice(32 * quarter, 32 * quarter + 32)
        left = block_scale.by_blocks(a[rows], of_a[quarter, rows])
        right = block_scale.by_blocks(b, of_b[quarter])
        quarters.append(accumulate(None if before is None else before[rows], left, right, "f32"))
    return np.concatenate(quarters)


def _a_block(shape: MmaShape, ctas: int, address: int) -> tuple[slice, slice]:
    """A in tensor memory: row i in lane i, its K elements in consecutive columns."""
    lane, column = address >> 16, address & 0xFFFF
    return slice(lane, lane + shape.m // ctas), slice(column, column + shape.row_bytes // 4)


def _enabled(words: list[int], ctas: int) -> list[np.ndarray | None]:
    """For each CTA, the lanes that disable-output-lane leaves enabled; None if it names no lane."""
    if not any(words):
        return [None] * ctas
    bits = np.unpackbits(np.array(words, np.uint32).view(np.uint8), bitorder="little") == 0
    return [bits[128 * i : 128 * (i + 1)] for i in range(ctas)]


@opcode(
    "tcgen05.commit", section="9.7.16.12.1", meaning="Arrival once the earlier tcgen05 operations are done"
)
def bind_commit(binder: Binder, instruction: Instruction) -> Step:
    address = scalar_address(binder, instruction.operands[0], instruction)
    multicast, text = instruction.has("multicast::cluster"), instruction.text
    mask = scalar(binder, instruction.operands[1], "u16", instruction) if multicast else None

    def commit(w: Warp) -> None:
        _by_one_lane(w, "tcgen05.commit")
        cta = w.cta
        at = in_cluster(address(w))
        chosen = None if mask is None else mask(w)
        ranks = [at >> RANK_SHIFT] if chosen is None else [r for r in range(16) if (chosen >> r) & 1]
        barriers = [use_mbarrier(w, (at & OFFSET_MASK) | (rank << RANK_SHIFT)) for rank in ranks]
        clock = w.release()
        clock.seen[cta.mma_agent] = cta.mma_epoch

        def complete() -> None:
            for barrier in barriers:
                if barrier.cta.finished:
                    raise IllegalAccess(
                        f"a commit arrives on the {barrier.name}, all of whose warps have exited"
                    )
                barrier.arrive(1, clock, commit=True)

        cta.pipes["MMA"].issue(text, complete)

    return commit
