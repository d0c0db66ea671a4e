"""Where the tiles of A and B come from: the boxes that TMA cuts from an operand for a work item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from cute_backend.templates import batch as batches
from cute_backend.templates.scheduler import KPlace, Place


def all_boxes(box: tuple[int, int], tensor: cute.Tensor) -> cute.Tensor:
    """All boxes of an operand: (box, index, index), and a batch mode where the operand has one."""
    return cute.group_modes(batches.boxes(tensor, box), 0, 2)


def _always(place: Place) -> bool:
    return True


@dataclass(frozen=True)
class Source:
    """An operand in global memory, and the `stages` (box, stage) that TMA brings its tiles to, or (box,
    index, stage) for tiles of several boxes.

    `cut` gives all boxes (box, line, k tile) of a tensor, and `line` the row or column of boxes at a place.
    `share` is the part that the CTA loads for others, of `shares`. `has` tells whether the tile at a place is
    one of this operand, and `follows` whether the rows of products follow each other in it. `options` are
    those of the copy.
    """

    tma: cpasync.TmaInfo
    stages: cute.Tensor
    cut: Callable[[cute.Tensor], cute.Tensor]
    line: Callable[[Place], Int32]
    share: Any = 0
    shares: int = 1
    has: Callable[[Place], bool | Boolean] = _always
    follows: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def partition(self, tensor: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """The stages, and the boxes of a tensor, partitioned for TMA."""
        shares = cute.make_layout(self.shares)
        return cpasync.tma_partition(self.tma.atom, self.share, shares, self.stages, self.cut(tensor))

    def at(self, place: Place) -> Tiles:
        """The tiles for a work item."""
        tensor = self.tma.tma_tensor
        if not isinstance(place, KPlace) and self.follows:
            tensor = batches.from_first(tensor, place)
        stages, boxes = self.partition(tensor)
        return Tiles(self, place, self.line(place), stages, boxes)


@dataclass(frozen=True)
class Tiles:
    """The tiles of an operand for one work item."""

    source: Source
    place: Place
    line: Int32
    stages: cute.Tensor
    boxes: cute.Tensor

    def box(self, k: Int32, further: int = 0) -> cute.Tensor:
        """The box of a k tile, `further` boxes after the line's."""
        line = self.line + further
        if isinstance(self.place, KPlace):
            tensor = batches.of_k_tile(self.source.tma.tma_tensor, self.place, k)
            return self.source.partition(tensor)[1][(None, line, 0, 0)]
        return batches.of_place(self.boxes, self.place)[(None, line, k)]

    def bring(self, k: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        """Begins to load a k tile to a stage."""
        place = (None, *[0] * (cute.rank(self.stages) - 2), stage)
        target = self.stages[place]
        cute.copy(self.source.tma.atom, self.box(k), target, tma_bar_ptr=barrier, **self.source.options)
