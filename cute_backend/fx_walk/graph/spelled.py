"""Helpers to read an expression that a graph spells in several calls."""

from __future__ import annotations

from typing import Any

from torch import fx

from cute_backend.fx_walk.graph.static import leading_arguments, target_name


class SpelledOtherwise(Exception):
    """Raised if a graph spells something else."""


def operands(node: Any, target: str, count: int) -> list[Any]:
    """The first `count` arguments of a call of `target`. Raises SpelledOtherwise if `node` is no such
    call, or is given others."""
    called = isinstance(node, fx.Node) and node.op == "call_function" and target_name(node) == target
    found = leading_arguments(node, count) if called else None
    if found is None:
        raise SpelledOtherwise
    return found
