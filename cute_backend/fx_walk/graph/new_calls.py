"""Calls that are added to a graph, with the values that other steps read from metas."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import fake


def call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Adds a call at the graph's place of insertion. It comes from the line of the program that `like` comes
    from."""
    made = graph.call_function(target, args, kwargs)
    made.meta.update({key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta})
    evaluate(made, fake(like))
    return made


def evaluate(node: fx.Node, like: torch.Tensor) -> None:
    """Computes the value of a node from those of its operands, in the mode of the fake tensor `like`."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with like.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
