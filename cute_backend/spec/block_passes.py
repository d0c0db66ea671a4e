"""Whether blocks of columns can be reduced in passes over narrow subtiles, ahead of the visits.

A pass reads each subtile of a block and adds up partials by row. The visits of the block then read the result
as a value of the row, so no visit has to hold a block whole. Accumulators can be read any number of times,
but a plane comes once. So if the ops before a reduction read planes, these are read first, and the one fp32
value from which all else follows is put in the place of an accumulator: the value that is kept. Passes and
visits begin with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cute_backend.dtypes import DType
from cute_backend.spec.chain_ops import Op
from cute_backend.spec.products import Accumulator

LEAST_AHEAD = 16
"""Columns of the narrowest subtiles over which passes reduce blocks: TMA moves planes of any dtype in
them."""


@dataclass(frozen=True)
class BlockPasses:
    """Passes that reduce blocks of `columns` columns. If the planes `early` are read ahead of them,
    passes and visits begin with the value `kept`, and read neither these planes nor accumulators."""

    columns: int
    kept: str = ""
    early: frozenset[str] = frozenset()


def block_passes(
    ops: Sequence[Op],
    accumulators: Sequence[Accumulator],
    planes: Collection[str],
    stored: Iterable[str],
    blocks: Collection[int],
) -> BlockPasses | None:
    """Returns the passes that reduce the blocks of `ops`; None if passes can't, or if no blocks are reduced.

    All blocks must have one size, among these the sizes `blocks` of which a store has one element. The loads
    `planes` that are read before a reduction must be needed for nothing but the value that is kept, and
    neither reductions nor the values that are `stored` may need accumulators except through it. Pairs of
    products keep no value, which would take the place of one of their two accumulators alone, and sums in
    int32 leave no place for one. A kernel also needs subtiles that divide the blocks (`LEAST_AHEAD`).
    """
    reducing = [op for op in ops if op.whole_columns]
    sizes = {op.whole_columns for op in reducing} | set(blocks)
    if len(sizes) != 1 or any(op.reduction is None for op in reducing):
        return None
    results = {op.name for op in reducing}
    early = _behind(ops, results).intersection(planes)
    if not early:
        return BlockPasses(min(sizes))
    if len(accumulators) > 1 or any(acc.dtype is not DType.F32 for acc in accumulators):
        return None
    names = {acc.name for acc in accumulators}
    later = {*stored, *(name for op in reducing for name in op.values)}
    reduced, multiplied, loaded = (_after(ops, each) for each in (results, names, early))
    for op in reversed(ops):
        alone = op.dtype.register is DType.F32 and op.name not in reduced
        if not alone or op.name not in multiplied or op.name not in loaded:
            continue
        if _behind(ops, later, {op.name} | results).isdisjoint(names | early):
            return BlockPasses(min(sizes), op.name, frozenset(early))
    return None


def _after(ops: Sequence[Op], values: Collection[str]) -> set[str]:
    """The names of values, and of all that is computed from them."""
    found = set(values)
    for op in ops:
        if not found.isdisjoint(op.values):
            found.add(op.name)
    return found


def _behind(ops: Sequence[Op], values: Iterable[str], given: Collection[str] = ()) -> set[str]:
    """The names of values, and of all that they are computed from, down to the `given` ones."""
    needed = set(values)
    for op in reversed(ops):
        if op.name in needed and op.name not in given:
            needed.update(op.values)
    return needed
