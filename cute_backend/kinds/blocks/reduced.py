"""Reductions of blocks: all elements of a block have its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_backend.kinds.blocks.kind import BlockOp
from cute_backend.kinds.reductions import REDUCTIONS, ReductionKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class BlockReduction(BlockOp):
    """The reduction of each block by one kind."""

    def __init__(self, kind: ReductionKind) -> None:
        self.name, self.reduction, self._kind = f"block_{kind.name}", kind, kind

    def fits_visit(self, columns: int, block: int, part: int) -> bool:
        return columns % block == 0

    def whole_columns(self, block: int, part: int) -> int:
        return block

    def words(self, block: int) -> str:
        return f"block{block}_{self._kind.name}({{0}})"

    def text(self, value: str, block: int, part: int) -> str:
        return f"reduce.of_blocks(reduce.{self._kind.name.upper()}, {value}, sub, {block})"

    def reference(self, rows: Tensor, part: int, accumulate: torch.dtype) -> Tensor:
        return self._kind.reference(rows, accumulate).unsqueeze(-1).expand(rows.shape)


BLOCK_REDUCTIONS = {kind.name: BlockReduction(kind) for kind in REDUCTIONS if kind.of_blocks}
"""The reductions of blocks, by the names of the kinds that reduce them."""
