"""Finds the ops that draw noise from Philox blocks that several elements of a thread share.

Such an op draws for the element's own row and column, which `device_noise.Draws` knows. Its statement
therefore reads the seed and the number of the sample, but no index.
"""

from __future__ import annotations

from collections.abc import Iterator

from cute_backend.ops import COLUMN_INDEX, GUMBEL, ROW_INDEX
from cute_backend.spec import Const, EpilogueSpec, Op, Operand


def shares_noise(spec: EpilogueSpec, op: Op) -> bool:
    """Whether an op draws noise for the element's own row and column, with one seed and sample for all
    elements."""
    if op.op != GUMBEL.name:
        return False
    seed_low, seed_high, index, row, sample = op.operands
    made_by: dict[Operand, str] = {each.name: each.op for each in spec.ops}
    own = [made_by.get(each) for each in (index, row)] == [COLUMN_INDEX.name, ROW_INDEX.name]
    uniform = _uniform(spec)
    return own and all(isinstance(each, Const) or each in uniform for each in (seed_low, seed_high, sample))


def operands_read(spec: EpilogueSpec, op: Op) -> tuple[Operand, ...]:
    """The operands whose values an op's statement reads."""
    return (*op.operands[:2], op.operands[4]) if shares_noise(spec, op) else op.operands


def values_read(spec: EpilogueSpec, op: Op) -> Iterator[str]:
    """The names among `operands_read`."""
    return (operand for operand in operands_read(spec, op) if isinstance(operand, str))


def _uniform(spec: EpilogueSpec) -> set[str]:
    """The values that are the same for every element, that is, computed from numbers and scalars only."""
    uniform = {load.name for load in spec.loads if load.kind.is_uniform}
    for op in spec.ops:
        if op.operands and uniform.issuperset(op.values):
            uniform.add(op.name)
    return uniform
