"""The kernel on mma.sync for GPUs that have TMA but no warpgroup instructions, such as RTX Blackwell."""

from __future__ import annotations

from cute_backend.templates.sm80 import Sm80Gemm
from cute_backend.templates.tma_feed import TmaFeed


class Sm120Gemm(Sm80Gemm):
    """D = epilogue(A B) as in `Sm80Gemm`, except that a separate warp loads A and B by TMA."""

    feed_type = TmaFeed
