"""Weights of which a byte in memory has two values, neighbours along K.

A program takes the two nibbles of each byte by masks and shifts, and puts those of all bytes side by side.
Before or behind that, it may subtract 8. Libraries differ in the ops, in the dtypes and in where they
convert. All that matters is that every op is one of a number and a byte, so that a table says what it makes
of each of the 256 bytes, and that nothing else reads what is between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from cute_backend.fx_walk.graph.new_calls import call
from cute_backend.fx_walk.graph.sizes import SymbolicSizes
from cute_backend.fx_walk.graph.static import (
    DTYPES,
    Size,
    arguments,
    fake,
    known,
    same_sizes,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape
from cute_backend.kinds.stored import STORED
from cute_backend.spec import STORED_DTYPES, DType

_JOINED = "aten.cat.default"
_CONVERSION = "prims.convert_element_type.default"
_TURNED = "aten.permute.default"

_FORMATS = tuple(stored for stored in STORED.values() if stored.values == 2)


@dataclass(frozen=True)
class PackedValues:
    """Values that a program takes from the bytes of `node`: those that the ops `after`, each of one operand
    and of numbers, make of `values`, whose `axis` has the two of each byte. It follows that of K."""

    node: fx.Node
    dtype: DType
    values: fx.Node
    axis: int
    after: tuple[fx.Node, ...] = ()

    @property
    def shape(self) -> list[Size]:
        """The shape of the bytes."""
        shape: list[Size] = list(fake(self.values).shape)
        return shape[: self.axis] + shape[self.axis + 1 :]

    @property
    def is_along_last(self) -> bool:
        """Whether K is the last axis of the bytes, or the last ones."""
        return self.axis == len(self.shape)

    def along_k(self, sizes: SymbolicSizes, k: Size, n: Size) -> fx.Node:
        """The values (K, N) of the bytes as (K / 2, N), if they are (N, K) in any shape."""
        aten, like, graph, given = torch.ops.aten, self.values, sizes.graph, sizes.argument
        value = call(graph, like, aten.reshape.default, self.node, [given(n), given(k // 2)])
        value = call(graph, like, aten.permute.default, value, [1, 0])
        cat = arguments(self.values)
        halves = [self._of_bytes(graph, half, value) for half in cat["tensors"]]
        joined = call(graph, like, aten.cat.default, halves, 1)
        return call(graph, like, aten.reshape.default, joined, [given(k), given(n)])

    def _of_bytes(self, graph: fx.Graph, half: fx.Node, value: fx.Node) -> fx.Node:
        """One value of each byte of a view of the bytes, with an axis behind the first. The ops after the two
        are joined come before that."""
        for node in (*_ops_between(half, self.node), *self.after):
            if not is_reshape(node):
                args, kwargs = _of_one(node, value)
                value = call(graph, node, node.target, *args, **kwargs)
        return call(graph, half, torch.ops.aten.unsqueeze.default, value, 1)


def are_of_one_byte(halves: Sequence[fx.Node]) -> bool:
    """Whether two values are made from one tensor of bytes, each by ops of one operand and of numbers."""
    sources = {_byte_of(half) for half in halves}
    return len(sources) == 1 and all(each is not None and fake(each).dtype is torch.uint8 for each in sources)


def packed_values(values: fx.Node) -> PackedValues | None:
    """The bytes of which these values, in any shape, are the nibbles, the low one first. None if they are
    made in another way, if a step exchanges axes or repeats elements, or if something else reads a step. If
    the last op is a conversion, the values are what it converts."""
    node, after = values, list[fx.Node]()
    while len(node.users) == 1 and (source := _operand(node)) is not None:
        if not is_reshape(node):
            after.append(node)
        elif not _is_in_order(node):
            return None
        node = source
    if after and target_name(after[0]) == _CONVERSION:
        return None
    if node.op != "call_function" or target_name(node) != _JOINED or len(node.users) != 1:
        return None
    halves, shape = arguments(node)["tensors"], fake(node).shape
    axis = arguments(node)["dim"] % len(shape)
    if len(halves) != 2 or axis == 0 or any(len(half.users) != 1 for half in halves):
        return None
    if any(fake(half).shape[axis] != 1 or fake(half).dtype is not fake(node).dtype for half in halves):
        return None
    source = _byte_of(halves[0])
    of = None if source is None else tensor_of(source)
    if source is None or source is not _byte_of(halves[1]) or of is None or of.dtype is not torch.uint8:
        return None
    if not all(map(_is_in_order, chain.from_iterable(_ops_between(half, source) for half in halves))):
        return None
    found = PackedValues(source, DType.U4X2, node, axis, tuple(reversed(after)))
    if not same_sizes(of.shape, found.shape) and not found.is_along_last:
        return None
    dtype = _dtype_of(halves, source, found.after)
    return None if dtype is None else replace(found, dtype=dtype)


@_disable_current_modes()
def _dtype_of(halves: Sequence[fx.Node], source: fx.Node, after: Sequence[fx.Node]) -> DType | None:
    """The dtype of which the bytes have the values that the ops `after` make of these; None if there is no
    such one."""
    every = torch.arange(256, dtype=torch.uint8)
    tables = [_table([*_ops_between(half, source), *after], every).double() for half in halves]
    for stored in _FORMATS:
        if torch.equal(torch.stack(tables), stored.unpacked(every[None]).double()):
            return stored.dtype
    return None


def _table(ops: Sequence[fx.Node], value: Tensor) -> Tensor:
    """The result of ops of one operand."""
    for node in ops:
        if not is_reshape(node):
            args, kwargs = _of_one(node, value)
            value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value


def stored_dtype(values: fx.Node) -> DType | None:
    """The dtype in memory of stored values, which a program may take from bytes of two; None if they are not
    stored values."""
    tensor = tensor_of(values)
    if tensor is None:
        return None
    if (found := packed_values(values)) is not None:
        return found.dtype
    dtype = DTYPES.get(tensor.dtype)
    return dtype if dtype in STORED_DTYPES else None


def in_memory(values: fx.Node) -> fx.Node:
    """The elements (K / 2, N) or (K, N) of stored values (K, N): what their bytes are."""
    found = packed_values(values)
    return values if found is None else found.node


def _is_in_order(node: fx.Node) -> bool:
    """Whether an op of one operand leaves the elements in their order, each once."""
    (source,) = node.all_input_nodes
    return target_name(node) != _TURNED and known(fake(node).numel() == fake(source).numel())


def _byte_of(half: fx.Node) -> fx.Node | None:
    """The value that ops of one operand and of numbers make a half from: the last one that has other readers,
    or that is not such an op."""
    node = half
    while node is half or len(node.users) == 1:
        source = _operand(node)
        if source is None:
            return None if node is half else node
        node = source
    return node


def _operand(node: fx.Node) -> fx.Node | None:
    """The only operand of a pointwise op, or of a reshape; None for any other node."""
    if node.op != "call_function" or not (is_pointwise(node) or is_reshape(node)):
        return None
    sources = node.all_input_nodes
    return sources[0] if len(sources) == 1 and tensor_of(sources[0]) is not None else None


def _ops_between(half: fx.Node, source: fx.Node) -> list[fx.Node]:
    """The ops that make a half from its bytes, the first one first."""
    ops, node = list[fx.Node](), half
    while node is not source:
        ops.append(node)
        (node,) = node.all_input_nodes
    return ops[::-1]


def _of_one(node: fx.Node, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op of one operand, with `value` in its place."""
    args: Sequence[Any] = fx.map_arg(node.args, lambda _: value)
    return tuple(args), dict(fx.map_arg(node.kwargs, lambda _: value))
