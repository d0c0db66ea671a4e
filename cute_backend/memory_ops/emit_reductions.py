"""Writes the lines of a module that reduce.

Partials of rows and of planes are made in `begin` and written in `end`; all reductions have lines in `visit`.
This file also writes the arguments of the kernel that finishes the reductions, and the ops on their results.

A thread meets all its elements of a row in the visits of a tile, so the partials of rows are held from
`begin` on and written in `end`, and so are those of planes. A thread meets all its elements of a column
within one visit.
"""

from __future__ import annotations

from collections.abc import Sequence

from cute_backend.memory_ops.partials import partials
from cute_backend.memory_ops.schedule import kernel_names, renamed
from cute_backend.memory_ops.simplify import simplify
from cute_backend.memory_ops.statements import Chain
from cute_backend.ops import conversion_expression
from cute_backend.signature import COUNTERS
from cute_backend.spec import (
    REDUCED,
    DType,
    EpilogueSpec,
    Op,
    Overflow,
    Reduction,
    Store,
)


def of_blocks(op: Op) -> str:
    """The statement of an op that reads blocks of a subtile, which follows the loop that computes the
    values."""
    assert op.over_blocks is not None
    return f"{op.name} = {op.over_blocks.text(f'{op.name}_of', op.block, op.part_columns)}"


def begin_blocks(op: Op) -> str:
    """The statement that makes the partials of blocks wider than a subtile."""
    assert op.reduction is not None
    return f"{op.name}_parts = reduce.Blocks(reduce.{op.reduction.name.upper()}, {op.block})"


def _reduction(store: Store) -> Reduction:
    assert store.reduce is not None
    return store.reduce


def _kind(store: Store) -> str:
    """The expression of a store's kind in `device_reduce`."""
    reduction = _reduction(store)
    name = f"reduce.{reduction.kind.name.upper()}"
    return name if reduction.parts == reduction.kind.parts else f"reduce.of_plane({name})"


def held(store: Store) -> bool:
    """Whether a thread keeps a store's partials from one subtile to the next."""
    return store.reduce is not None and store.reduce.axis.is_held


def begin(store: Store) -> list[str]:
    """The statements that make a tile's partials, before the first subtile."""
    return [f"        {store.name} = {_partials(store)}"]


def _partials(store: Store) -> str:
    return f"reduce.Partials({_kind(store)}, {_reduction(store).axis.partials})"


def take(store: Store) -> list[str]:
    """The statements that reduce a subtile's elements, after the loop that computes them, and write partials
    of its columns."""
    axis = _reduction(store).axis
    if axis.is_held:
        return [f"        held.{store.name}.{axis.take}({store.name}, sub)"]
    parts = f"{store.name}_parts"
    return [
        f"        {parts} = {_partials(store)}",
        f"        {parts}.{axis.take}({store.name}, sub)",
        *_write(store, parts),
    ]


def end(stores: Sequence[Store], counts: bool) -> list[str]:
    """The hook that writes the partials of rows and planes; no lines where there are none. If the kernel
    `counts` the tiles of rows, the last tile then finishes the reductions."""
    lines = []
    for store in filter(held, stores):
        lines += _write(store, f"held.{store.name}")
    if counts:
        reducing = [store for store in stores if store.reduce is not None]
        parts = ", ".join(f"glob.{part.name}" for store in reducing for part in partials(store))
        results = ", ".join(f"glob.{store.name}" for store in reducing)
        lines.append(f"        finish.rows(tile, glob.{COUNTERS}, [{parts}], [{results}])")
    return ["    @cute.jit", "    def end(self, tile, glob, held):", *lines] if lines else []


def _write(store: Store, parts: str) -> list[str]:
    """The statements that combine partials with those of other lanes and write them to their places."""
    axis = _reduction(store).axis
    names = [part.name for part in partials(store)]
    values = ", ".join(f"{name}_part" for name in names)
    lines = [
        axis.target,
        f"({values},) = {parts}[{axis.slot}]" if len(names) == 1 else f"{values} = {parts}[{axis.slot}]",
        "if inside:",
        *(f"    {name}_glob[{axis.place}] = {name}_part" for name in names),
    ]
    if axis.slot.isidentifier():
        each = f"for {axis.slot} in cutlass.range_constexpr({axis.partials}):"
        lines = [each, *(f"    {line}" for line in lines)]
    globs = [f"{name}_glob = glob.{name}" for name in names]
    return [f"        {line}" for line in (f"{parts}.across({axis.lanes})", *globs, *lines)]


def result(store: Store, element_type: str, overflow: Overflow) -> str:
    """The expression of the `Result` that finishes a store, as `templates.finish` takes it."""
    kept = ", saturate=False" if overflow is Overflow.NONFINITE else ""
    kept += f", rows={rows}" if (rows := _reduction(store).rows) else ""
    kept += f", after={_after_name(store)}" if store.after else ""
    return f"reduce.Result({_kind(store)}, Axis.{_reduction(store).axis.name}, {element_type}{kept})"


def _after_name(store: Store) -> str:
    return f"{store.name}_after"


def after(spec: EpilogueSpec) -> list[str]:
    """The functions that compute the ops after reductions, before blank lines."""
    lines = []
    for store in spec.reductions:
        if store.after:
            finishing = spec.finishing(store)
            finishing = renamed(simplify(finishing), kernel_names(finishing))
            chain = Chain(finishing, {REDUCED: REDUCED})
            text, dtype, _ = chain.stored(finishing.stores[0])
            lines += [
                f"def {_after_name(store)}({REDUCED}):",
                *(f"    {statement}" for statement in chain.statements),
                f"    return {conversion_expression(text, dtype, DType.F32)}",
                "",
                "",
            ]
    return lines
