"""The lines of a module that reduce: in `begin` and `end` for rows, in `visit` for rows and columns.

A thread meets all its elements of a row in the visits of a tile, so rows are held from `begin` on and written
in `end`. Columns it meets within one visit.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import Axis, ReduceKind, Store
from .partials import partials

_KINDS = {
    ReduceKind.SUM: "SUM",
    ReduceKind.MEAN: "SUM",
    ReduceKind.MAX: "MAX",
    ReduceKind.MIN: "MIN",
    ReduceKind.ARGMAX: "ARGMAX",
    ReduceKind.ARGMIN: "ARGMIN",
    ReduceKind.LOGSUMEXP: "LOGSUMEXP",
}


def by_rows(store: Store) -> bool:
    """Whether a store's partials are those of rows: whole planes are reduced by rows first."""
    return store.reduce is not None and store.reduce.axis is not Axis.COLUMN


def begin(store: Store) -> list[str]:
    """A row's partials before the first subtile."""
    return [f"        {store.name} = {_partials(store, 'tile.rows')}"]


def _partials(store: Store, count: str) -> str:
    assert store.reduce is not None
    return f"reduce.Partials(reduce.{_KINDS[store.reduce.kind]}, {count})"


def take(store: Store) -> list[str]:
    """A subtile's elements, after the loop that computes them; partials of its columns are then written."""
    if by_rows(store):
        return [f"        held.{store.name}.take_rows({store.name}, sub)"]
    parts = f"{store.name}_parts"
    place, index = "piece, column, inside = sub.column_target(c)", "piece, column"
    return [
        f"        {parts} = {_partials(store, 'sub.columns')}",
        f"        {parts}.take_columns({store.name}, sub)",
        *_write(store, parts, "sub", "column_lanes", "c", "sub.columns", place, index),
    ]


def end(stores: Sequence[Store]) -> list[str]:
    """The hook that writes the partials of rows; no lines where there are none."""
    rows = [store for store in stores if by_rows(store)]
    if not rows:
        return []
    lines = ["    @cute.jit", "    def end(self, tile, glob, held):"]
    for store in rows:
        place, inside = "part, row, inside = tile.row_target(r)", "part, row"
        lines += _write(store, f"held.{store.name}", "tile", "row_lanes", "r", "tile.rows", place, inside)
    return lines


def _write(
    store: Store, held: str, owner: str, lanes: str, slot: str, count: str, place: str, index: str
) -> list[str]:
    names = [part.name for part in partials(store)]
    values = ", ".join(f"{name}_part" for name in names)
    return [
        f"        {held}.across({owner}.{lanes})",
        *(f"        {name}_glob = glob.{name}" for name in names),
        f"        for {slot} in cutlass.range_constexpr({count}):",
        f"            {place}",
        f"            ({values},) = {held}[{slot}]"
        if len(names) == 1
        else f"            {values} = {held}[{slot}]",
        "            if inside:",
        *(f"                {name}_glob[{index}] = {name}_part" for name in names),
    ]
