"""Writes the lines of a module that reduce.

Partials that a thread holds are made in `begin` and written in `end`; all reductions have lines in `visit`
(`kinds/reductions/axis.py`). This file also writes the arguments of the kernel that finishes the reductions,
and the ops on their results.
"""

from __future__ import annotations

from cute_backend.memory_ops.schedule import kernel_names, renamed
from cute_backend.memory_ops.simplify import simplify
from cute_backend.memory_ops.statements import EmittedChain
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


def end(spec: EpilogueSpec, counts: bool) -> list[str]:
    """The statements that write the partials of rows and planes; none where there are none. If the kernel
    `counts` the tiles of rows, the last tile then finishes the reductions."""
    lines = []
    for name, reduction in spec.reductions.items():
        lines += reduction.write(name, f"held.{name}") if reduction.axis.is_held else []
    if counts:
        partials = (part for name, each in spec.reductions.items() for part in each.partials(name))
        parts = ", ".join(f"glob.{part.name}" for part in partials)
        results = ", ".join(f"glob.{name}" for name in spec.reductions)
        lines.append(f"finish.rows(tile, glob.{COUNTERS}, [{parts}], [{results}])")
    return lines


def result(store: Store, reduction: Reduction, element_type: str, overflow: Overflow) -> str:
    """The expression of the `Result` that finishes a store, as `templates.finish` takes it."""
    kept = ", saturate=False" if overflow is Overflow.NONFINITE else ""
    kept += f", rows={rows}" if (rows := reduction.rows) else ""
    kept += f", after={_after_name(store)}" if store.after else ""
    return f"reduce.Result({reduction.text}, Axis.{reduction.axis.name}, {element_type}{kept})"


def _after_name(store: Store) -> str:
    return f"{store.name}_after"


def after(spec: EpilogueSpec) -> list[str]:
    """The functions that compute the ops after reductions, before blank lines."""
    lines = []
    for store in spec.stores:
        if store.after:
            finishing = spec.finishing(store)
            finishing = renamed(simplify(finishing), kernel_names(finishing))
            chain = EmittedChain(finishing, {REDUCED: REDUCED})
            text, dtype, _ = chain.stored(finishing.stores[0])
            lines += [
                f"def {_after_name(store)}({REDUCED}):",
                *(f"    {statement}" for statement in chain.statements),
                f"    return {conversion_expression(text, dtype, DType.F32)}",
                "",
                "",
            ]
    return lines
