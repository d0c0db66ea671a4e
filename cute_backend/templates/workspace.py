"""The workspace: a buffer of bytes in which one kernel leaves intermediate results for a second.

Reductions leave partial results, each of one tile or of a part of one. A tensor of partials is (parts,
results), results contiguous:

- A row has one partial for each tile of columns, or for each half of a tile that two warpgroups share.
- A column has one partial for each piece of rows that a warp handles.
- A plane has one partial for each warp on each tile.

The place of a partial alone determines which tile it came from, so equal inputs give equal bits.

Sizes are Python's integers or the DSL's, so that the host and a kernel compute the same layout.
"""

from __future__ import annotations

from typing import Any

from cute_backend.planning import TileConfig
from cute_backend.signature import WORKSPACE_ALIGN
from cute_backend.spec import Axis

Size = Any
"""An int, or the DSL's Int64."""

SUM_BYTES = 4
"""Bytes of a sum in fp32."""

SECTOR_SUMS = WORKSPACE_ALIGN // SUM_BYTES
"""Sums in a sector of L2."""


def partials_shape(axis: Axis, config: TileConfig, m: Size, n: Size) -> tuple[Size, Size]:
    """The shape of a tensor of partials for a plane of (m, n)."""
    if axis.keeps_rows:
        return _ceil_div(n, config.group_n), m
    if axis.keeps_columns:
        return _ceil_div(m, config.warp_rows), n
    return _ceil_div(m, config.cta_rows) * config.row_warps * _ceil_div(n, config.group_n), 1


def partials_bytes(axis: Axis, config: TileConfig, m: Size, n: Size, bits: int) -> Size:
    """The bytes of workspace that a tensor of partials takes."""
    parts, results = partials_shape(axis, config, m, n)
    return _ceil_div(parts * results * (bits // 8), WORKSPACE_ALIGN) * WORKSPACE_ALIGN


def sums_pitch(n: Size) -> Size:
    """The row pitch of the sums of a part of K, in elements: a whole number of L2 sectors."""
    return _ceil_div(n, SECTOR_SUMS) * SECTOR_SUMS


def sums_bytes(config: TileConfig, m: Size, n: Size) -> Size:
    """The bytes of workspace that the sums of all products and parts of K take for a plane of (m, n)."""
    if not config.sums_in_memory:
        return 0
    return config.products * config.split_k * m * sums_pitch(n) * SUM_BYTES


def _ceil_div(size: Size, by: int) -> Size:
    return (size + (by - 1)) // by
