"""Weights that arrive from other GPUs before the first product of a graph, as in fully sharded training.

torch's overlap scheduling hides the gather of a weight behind the products before it. Nothing hides the
gathers that the first product waits for. So if two products have a weight each, and one of them is the
graph's first, they are left apart: the first one hides the gather for the second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx
from torch._inductor import config as inductor_config

from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.static import target_name
from cute_backend.fx_walk.products.anchor import Anchor

if TYPE_CHECKING:
    from cute_backend.fx_walk.search.walk import Walk


def exposed_gather(walk: Walk, anchors: Sequence[Anchor]) -> str | None:
    """Why a kernel should not compute several products: the graph's first one would wait for more gathers.
    None if nothing speaks against it."""
    settings = getattr(inductor_config, "aten_distributed_optimizations", None)
    if not getattr(settings, "enable_overlap_scheduling", False):
        return None
    gathers = {root(anchor.b) for anchor in anchors if _is_gathered(root(anchor.b))}
    first = min(walk.anchors, key=walk.order.__getitem__)
    if len(gathers) < 2 or all(anchor.node is not first for anchor in anchors):
        return None
    return "their weights are gathered separately, and nothing before them could hide the second gather"


def _is_gathered(weight: fx.Node) -> bool:
    return target_name(weight) == "_c10d_functional.wait_tensor.default"
