"""The kernel on mma.sync of GPUs that have TMA and no instructions of a warpgroup, as RTX Blackwell."""

from __future__ import annotations

from cute_backend.templates.sm80 import Sm80Gemm
from cute_backend.templates.tma_feed import TmaFeed


class Sm120Gemm(Sm80Gemm):
    """D = epilogue(A B), as `Sm80Gemm` has it, with A and B brought by TMA and a warp of its own."""

    feed_type = TmaFeed
