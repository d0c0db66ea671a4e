"""The order in which a kernel computes a spec's values, and their names in its text.

Statements run in loops over the elements of a subtile. There is one loop, unless ops reduce blocks of
columns: an op that reads a block's result needs a further loop, after the one that computes what is reduced.
Blocks wider than a subtile are reduced in passes ahead of the visits (`passes`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from cute_backend.formula import formula
from cute_backend.memory_ops.shared_noise import values_read
from cute_backend.memory_ops.simplify import simplify
from cute_backend.spec import DType, EpilogueSpec, Op, Operand, Overflow, Store


@dataclass(frozen=True)
class Schedule:
    """The ops that a kernel computes, in the order of their statements, and the loop of each value.

    `loops` maps each value to the first loop that can read it. An op that reduces blocks is computed after
    the loop before that one.
    """

    ops: tuple[Op, ...]
    loops: dict[str, int]


def schedule(spec: EpilogueSpec, given: Collection[str] = (), wanted: Collection[str] = ()) -> Schedule:
    """The schedule of a spec that `simplify` has made. Ops that no store needs are left out, or those that
    the values in `wanted` don't need, if there are any. The values in `given` are computed before."""
    needed = set(wanted) or {stored_value(spec, store)[0] for store in spec.stores}
    for op in reversed(spec.ops):
        if op.name in needed and op.name not in given:
            needed.update(values_read(spec, op))
    ops = [op for op in spec.ops if op.name in needed and op.name not in given]
    loops = dict.fromkeys(spec.dtypes, 0)
    for op in ops:
        loop = max((loops[name] for name in values_read(spec, op)), default=0)
        loops[op.name] = loop + op.reads_block
    _place_indices(spec, ops, loops)
    placed = [(loops[op.name] - op.reads_block, op.reads_block, index) for index, op in enumerate(ops)]
    return Schedule(tuple(ops[index] for *_, index in sorted(placed)), loops)


def passes(spec: EpilogueSpec, columns: int) -> list[list[Op]]:
    """The ops that reduce blocks wider than subtiles of `columns` columns, which are blocks of one size. Each
    list has those whose operands need only the results of earlier lists."""
    wide = {op.name for op in spec.ops if op.reduction is not None and not op.fits_visit(columns)}
    needed = {op.name for op in schedule(spec).ops} & wide
    depth: dict[str, int] = {}
    found: list[list[Op]] = []
    for op in spec.ops:
        depth[op.name] = max((depth.get(name, 0) for name in values_read(spec, op)), default=0)
        if op.name in needed:
            if depth[op.name] == len(found):
                found.append([])
            found[depth[op.name]].append(op)
            depth[op.name] += 1
    return found


def _place_indices(spec: EpilogueSpec, ops: Sequence[Op], loops: dict[str, int]) -> None:
    """Moves ops on indices of elements alone to the first loop that reads them, so that none is kept."""
    indices: set[str] = set()
    for op in ops:
        if not op.reads_block and indices.issuperset(values_read(spec, op)):
            indices.add(op.name)
    stored = {stored_value(spec, store)[0] for store in spec.stores}
    first: dict[str, int] = {}
    """The first loop that reads each value."""
    for op in reversed(ops):
        if op.name in indices - stored:
            loops[op.name] = first[op.name]
        for name in values_read(spec, op):
            loop = loops[op.name] - op.reads_block
            first[name] = min(first.get(name, loop), loop)


def stored_value(spec: EpilogueSpec, store: Store) -> tuple[str, Overflow]:
    """The value that a store converts to its dtype, and the rule of that conversion.

    A cast to exactly the store's dtype is left to the store, which converts whole vectors. Where the spec
    asks for it, a value is rounded before it is reduced, and the result is rounded too.
    """
    op = next((op for op in spec.ops if op.name == store.value), None)
    if store.form.reduction is None and op is not None and op.op == "cast" and op.dtype is store.dtype:
        (operand,) = op.operands
        if isinstance(operand, str):
            return operand, op.overflow
    # A value that has the dtype already is stored as it is: an infinity of e5m2 stays one.
    rounded = store.form.is_element and store.dtype is DType.E5M2 and spec.dtypes[store.value] is DType.E5M2
    return store.value, Overflow.NONFINITE if rounded else Overflow.SATURATE


def kernel_names(spec: EpilogueSpec) -> dict[str, str]:
    """Returns the names in a kernel's text for the ops of a spec and for the ops that `simplify` makes.

    They are `t0`, `t1`, ..., in the order of the statements, and skip names that operands and stores have.
    Ops that the kernel does not compute, because cheaper ones replace them, come last.
    """
    simple = simplify(spec)
    given = spec.producers.keys() - {op.name for op in spec.ops} | {store.name for store in spec.stores}
    counted = (name for index in count() if (name := f"t{index}") not in given)
    computed = (op for segment in simple.segments for op in schedule(segment).ops)
    ops = dict.fromkeys(op.name for op in (*computed, *simple.ops, *spec.ops))
    return dict(zip(ops, counted, strict=False))


def renamed(spec: EpilogueSpec, names: Mapping[str, str]) -> EpilogueSpec:
    """The same spec with other names of its ops."""

    def name(operand: Operand) -> Operand:
        return names.get(operand, operand) if isinstance(operand, str) else operand

    ops = (replace(op, name=names[op.name], operands=tuple(map(name, op.operands))) for op in spec.ops)
    stores = (replace(store, value=names.get(store.value, store.value)) for store in spec.stores)
    return replace(spec, ops=tuple(ops), stores=tuple(stores))


def kernel_formula(spec: EpilogueSpec) -> str:
    """The formula of a spec, with the names that its values have in a kernel's text."""
    return formula(spec, kernel_names(spec))
