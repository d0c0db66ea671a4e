"""The time of a tile of mma.sync, computed from a GPU's data sheet, for GPUs on which nothing was
measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from cute_backend.planning.targets.target import Cut, Tiles, TileTime, Timing

PAIR_COLUMNS = 32
"""Columns of B that a pair of warps multiplies by at a time (`templates/warp_columns.py`)."""

SHARED_BYTES = 128
"""Bytes of shared memory that a multiprocessor reads or writes in a cycle, since Volta."""


@dataclass(frozen=True)
class DataSheet:
    """Figures of a GPU's data sheet for one multiprocessor, and for memory."""

    clock_mhz: float
    """The boost clock."""
    products: int
    """Products of 16-bit operands that a multiprocessor's tensor cores sum up in a cycle."""
    bytes_per_us: float
    """The bandwidth of memory."""
    l2_bytes: float | None = None
    """Bytes that a multiprocessor receives from L2 in a cycle if all do; None if no figure is published."""

    def timing(self, tiles: Tiles) -> Timing:
        """The constants of the cost model for a table of tiles, and for tiles whose columns follow from M.
        Rows beyond the last are not read."""
        cuts = [Cut(*shape[:2], occupancy=shape.occupancy) for shape in tiles.all]
        times = {cut: self._time(cut.mma_m, cut.mma_n, cut.occupancy) for cut in cuts}
        for rows, columns in product(tiles.even.rows, tiles.even.columns):
            time = self._time(rows, columns, 1)._replace(error=tiles.even.error)
            times[Cut(rows, columns, transposed=True)] = time
        return Timing(times, reached={}, beyond_us=0.0, bytes_per_us=self.bytes_per_us)

    def _time(self, rows: int, columns: int, occupancy: int) -> TileTime:
        """The time of a KiB of K.

        It is the longer of two times: that of the tensor cores, and that of shared memory, from which each
        warp reads its rows of A and all columns of B, or twice the rows and half of the columns, if these are
        whole instructions of both warps of a pair (`templates/warp_columns.py`). With all multiprocessors
        busy, L2 may take longer than both, and each CTA waits for the others of its multiprocessor.
        """
        warps, warp_rows = max(rows // 32, 4), min(rows // 4, 32)
        multiplied = rows * columns * 512 / self.products
        lines = warp_rows + columns
        if columns % PAIR_COLUMNS == 0:
            lines = min(lines, 2 * warp_rows + columns // 2)
        shared = (warps * lines + rows + columns) * 1024 / SHARED_BYTES
        read = 0.0 if self.l2_bytes is None else (rows + columns) * 1024 / self.l2_bytes
        least = max(multiplied, shared)
        busy = occupancy * max(read, least) - least
        return TileTime(0.0, 1.0, least / self.clock_mhz, busy / self.clock_mhz, 0.0)
