"""Values that a kernel rounds to their 16-bit dtype before later ops read them, whatever the precision is."""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import fake
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.spec import Operand, Precision

_MARK = "cute_backend_rounded"
"""The key of a node's meta."""

_OPS = {torch.bfloat16: "round_to_bf16", torch.float16: "round_to_f16"}


def mark_rounded(node: fx.Node) -> None:
    """Makes members that read a value read it as it is in memory."""
    node.meta[_MARK] = True


def as_in_memory(node: fx.Node, chain: Chain, value: Operand) -> Operand:
    """The value of a node, rounded to 16 bits if it is marked and has such a dtype.

    Under EAGER every value is rounded already.
    """
    return in_memory(node, chain, value) if node.meta.get(_MARK) else value


def in_memory(node: fx.Node, chain: Chain, value: Operand) -> Operand:
    """The value of a node, rounded to 16 bits if it has such a dtype."""
    if chain.precision is Precision.EAGER or fake(node).dtype not in _OPS:
        return value
    return chain.emit(_OPS[fake(node).dtype], value)
