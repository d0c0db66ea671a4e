"""The result of a reduction, and pointwise work on it alone, which a kernel does when it finishes it.

Examples are the scale of a quantisation, `max(amax, eps) / 448`, and the inverse deviation of a norm,
`rsqrt(mean + eps)`. Otherwise it would take one more kernel, unless a reader of the plane computes it.

A result of 16 bits is rounded first, as it would be in memory: so a scale is that of the largest element that
memory has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import DTYPES, fake, first_argument, known, target_name, tensor_of
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.value import StoredValue
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.lower import CASTS, constant, is_pointwise, is_reshape, lower, lower_cast
from cute_backend.fx_walk.values.numbers import number
from cute_backend.fx_walk.values.rounded import as_in_memory, in_memory
from cute_backend.kinds.results import Form
from cute_backend.spec import REDUCED, Op, Operand, Order, Reduction

_MOST_OPS = 256
"""The most ops with which a kernel finishes a reduction. Every member has all of its ops, so their number
grows with the square of a chain's length; the longest known are the dozen of a scale's power of two."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Reduced(StoredValue):
    """The reduction of the chain's value `value`, to which the ops `after` are applied, if there are any."""

    reduction: Reduction
    after: tuple[Op, ...] = ()

    def admits(self, reader: fx.Node, is_inner: bool) -> bool:
        return _keeps(reader) or (is_pointwise(reader) and not is_inner)

    def is_followed(self, draft: Draft, node: fx.Node) -> bool:
        return _keeps(node) or _is_finishing(draft, node)

    def follow(self, draft: Draft, node: fx.Node) -> Reduced:
        return self if _keeps(node) else _finished(draft, node)

    def can_store(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point or not self.after

    def form(self, order: Order, block: int) -> Form:
        return self.reduction

    def elements(self, m: int, n: int, block: int) -> int:
        reduction = self.reduction
        batches = m // reduction.rows if reduction.rows else 1  # the columns of every batch
        return batches * prod(reduction.axis.kept(m, n)) // block


def _keeps(node: fx.Node) -> bool:
    """Whether a reader of a reduction's result only changes its form, so that the kernel can write the
    reader's result: another shape with its axes in order, or rounding from fp32 to 16 bits."""
    before, after = tensor_of(first_argument(node)), tensor_of(node)
    if node.op != "call_function" or before is None or after is None or before.device != after.device:
        return False
    if is_reshape(node):
        return target_name(node) != "aten.permute.default" and known(before.numel() == after.numel())
    is_cast = target_name(node) in CASTS
    return is_cast and before.dtype is torch.float32 and after.dtype in (torch.bfloat16, torch.float16)


def _is_finishing(draft: Draft, node: fx.Node) -> bool:
    """Whether a node is pointwise work whose operands are results of one reduction of the region and numbers,
    and nothing else. Its result has as many elements as the reduction's, and is a float or a bool."""
    result, sources = tensor_of(node), _sources(draft, node)
    if not sources or result is None or not is_pointwise(node) or result.device != draft.first.device:
        return False
    if result.dtype not in (*_FLOATS, torch.bool):
        return False
    values = [draft.values[source] for source in sources]
    if len({(value.value, value.reduction) for value in values if isinstance(value, Reduced)}) != 1:
        return False
    others = [source for source in node.all_input_nodes if source not in sources]
    return all(_is_of_floats(draft, source, result) for source in sources) and all(
        tensor_of(other) is not None and constant(other) is not None for other in others
    )


def _finished(draft: Draft, node: fx.Node) -> Reduced:
    """The value of a node for which `_is_finishing` holds. Raises Refused if no kernel computes it."""
    first, *_ = _sources(draft, node)
    base = draft.values[first]
    assert isinstance(base, Reduced)
    if len(base.after) >= _MOST_OPS:
        why = f"follows {len(base.after)} ops on a reduction's result; a kernel finishes one with {_MOST_OPS}"
        raise Refused(Reason.UNSUPPORTED_OP, target=target_name(node), why=why)
    chain = Chain((), draft.chain.precision, draft.chain.target)

    def resolve(argument: Any) -> Operand:
        if not isinstance(argument, fx.Node):
            return number(argument)
        value = draft.values.get(argument)
        if isinstance(value, Reduced):
            names: dict[Operand, Operand] = {REDUCED: REDUCED}
            result: Operand = REDUCED
            for op in value.after:
                result = names[op.name] = chain.repeat(op, names)
            result = result if value.after else in_memory(argument, chain, result)
            return lower_cast(chain, result, DTYPES[fake(argument).dtype])
        filled = constant(argument)
        assert filled is not None
        return filled

    result = as_in_memory(node, chain, lower(node, chain, resolve))
    if not isinstance(result, str):
        raise Refused(Reason.UNSUPPORTED_OP, target=target_name(node), why="does not depend on its operands")
    return replace(base, after=chain.ops_for(result))


def _sources(draft: Draft, node: fx.Node) -> list[fx.Node]:
    """The reduced members that a node reads."""
    return [source for source in node.all_input_nodes if isinstance(draft.values.get(source), Reduced)]


def _is_of_floats(draft: Draft, source: fx.Node, result: torch.Tensor) -> bool:
    value, tensor = draft.values[source], fake(source)
    assert isinstance(value, Reduced)
    kept = tensor.dtype in _FLOATS or (tensor.dtype is torch.bool and bool(value.after))
    return kept and known(tensor.numel() == result.numel())
