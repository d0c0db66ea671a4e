"""Weights that are stored in 8 or 4 bits with a scale, and maybe a zero, for each column and group of K.

Such a weight reaches the pass as a chain from the stored values: a conversion, a subtraction of zeros, a
multiplication by scales, and conversions and views between them. The groups are an axis of their own while
zeros and scales are applied. Libraries differ in how the axes lie there, and in the dtypes in which they
compute. All that matters is that every step is one of these, and that nothing else reads what is between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.static import (
    DTYPES,
    Size,
    arguments,
    describe,
    fake,
    first_argument,
    known,
    same_sizes,
    target_name,
    tensor_of,
)
from cute_backend.fx_walk.products.packed_weights import stored_dtype
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.kinds.scales.weight_groups import VECTOR_DTYPES, computed_in
from cute_backend.spec import GROUP_SIZES, DType, WeightGroups

CONVERSION = "prims.convert_element_type.default"
SCALING = "aten.mul.Tensor"
SUBTRACTION = "aten.sub.Tensor"
SWAPS = ("aten.permute.default", "aten.t.default", "aten.transpose.int")
_RESHAPES = (
    "aten.reshape.default",
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.flatten.using_ints",
)
"""Ops that keep the order of all elements."""


class Axes(Enum):
    """The axes of a weight (K, N) whose K is G groups of g, while zeros and scales are applied."""

    COLUMNS = "N, G, g"
    ROWS = "N * G, g"
    ALONG_K = "G, g, N"
    """The axes of (K, N), which the product reads as they are. Kernels take scales (G, N) alone."""

    def of_vectors(self, groups: Size, n: Size) -> tuple[Size, ...]:
        """The shape of zeros and scales, which have one element for each group and column."""
        shapes = {Axes.COLUMNS: (n, groups, 1), Axes.ROWS: (n * groups, 1), Axes.ALONG_K: (groups, 1, n)}
        return shapes[self]


@dataclass(frozen=True)
class Vector:
    """Zeros or scales: the `node` in memory, of as many elements and, if there is such a one, two axes, the
    dtype that it is `cast` to first, if it is, and the `shape` in which the chain reads it."""

    node: fx.Node
    cast: torch.dtype | None
    shape: Sequence[Size]

    @staticmethod
    def of(operand: fx.Node, computed: torch.dtype) -> Vector:
        """The vector that is an operand of a step in the dtype `computed`. A cast of what is in memory
        is left to the kernel where it has the same result."""
        shape, node = fake(operand).shape, _unreshaped(operand, axes=2)
        if node.op == "call_function" and target_name(node) == CONVERSION:
            source = _unreshaped(first_argument(node), axes=2)
            cast, of = fake(node).dtype, DTYPES.get(fake(source).dtype)
            is_exact = of in (DType.I8, DType.U8) or cast is torch.float32
            if root(source).op in ("placeholder", "get_attr") and (is_exact or cast is computed):
                return Vector(source, cast, shape)
        return Vector(node, None, shape)


@dataclass(frozen=True)
class GroupedWeight:
    """The stored values of a weight (K, N) in groups of `values` of K, and the steps that make it what a
    product reads, the first one first: conversions, and ops with a vector."""

    node: fx.Node
    axes: Axes
    k: Size
    n: Size
    values: Size
    steps: tuple[tuple[fx.Node, Vector | None], ...]

    @property
    def vectors(self) -> dict[str, Vector]:
        """The zeros and the scales, by the op that applies them."""
        return {target_name(node): vector for node, vector in self.steps if vector is not None}

    @property
    def proven_values(self) -> int | None:
        """The values in a group as a number, also if sizes are symbolic. None if they are not proven to be as
        many as kernels take."""
        return next((size for size in GROUP_SIZES if known(self.values == size)), None)

    def groups(self, to: DType) -> WeightGroups:
        """The groups of the weight in an operand of dtype `to`. Raises Refused if no kernel converts such
        groups."""
        shape = self.axes.of_vectors(self.k // self.values, self.n)
        order = [target_name(node) for node, vector in self.steps if vector is not None]
        given = [vector.shape for vector in self.vectors.values()]
        if order not in ([SCALING], [SUBTRACTION, SCALING]):
            raise self._refused("a scale for each of them, and before it at most one zero")
        values = self.proven_values
        if values is None:
            raise self._refused(f"groups of {', '.join(map(str, GROUP_SIZES))} values")
        if not all(same_sizes(each, shape) for each in given):
            raise self._refused(f"one element for each group and column, {describe(shape)} here")
        computed: dict[str, DType | None] = {}
        for node, vector in self.steps:
            dtype = DTYPES.get(fake(node).dtype)
            if vector is not None:
                computed[target_name(node)] = dtype
            elif computed and dtype is not to and dtype is not DType.F32:
                raise self._refused(f"conversions to f32 and {to.value}")
        dtypes = {name: DTYPES.get(fake(vector.node).dtype) for name, vector in self.vectors.items()}
        scale, zero = dtypes[SCALING], dtypes.get(SUBTRACTION)
        product, difference = computed[SCALING], computed.get(SUBTRACTION)
        if scale is None or (zero is None and SUBTRACTION in dtypes):
            raise self._refused(f"them only if {VECTOR_DTYPES}")
        if product is None or None in computed.values():
            raise self._refused(f"them only if {computed_in(to)}")
        if product is DType.F32 and difference is DType.F32 and self._rounds_between(to):
            raise self._refused("no conversion to fewer bits between the zero and a scale in f32")
        groups = WeightGroups(values, scale, product, zero, difference)
        if rule := groups.contradiction(to):
            raise self._refused(f"them only if {rule}")
        return groups

    def _rounds_between(self, to: DType) -> bool:
        """Whether the difference is converted to `to` before it is scaled."""
        names = [target_name(node) for node, _ in self.steps]
        between = self.steps[names.index(SUBTRACTION) + 1 : names.index(SCALING)]
        return any(DTYPES.get(fake(node).dtype) is to for node, _ in between)

    def _refused(self, taken: str) -> Refused:
        shapes = " and ".join(describe(vector.shape) for vector in self.vectors.values())
        return Refused(
            Reason.WEIGHT_GROUPS,
            weight=user_label(self.node),
            values=self.values,
            k=self.k,
            given=shapes or "none",
            taken=taken,
        )


def grouped_weight(b: fx.Node) -> GroupedWeight | None:
    """The stored weight in groups of K that B, (K, N), is made from. None if it is made in another way, or if
    something else reads a step of it."""
    found = read_grouped(b)
    return found if isinstance(found, GroupedWeight) else None


def read_grouped(b: fx.Node) -> GroupedWeight | fx.Node:
    """The same, or the node that is no step of such a weight, and is the nearest to B."""
    (k, n), node, is_swapped = fake(b).shape, b, False
    steps: list[tuple[fx.Node, Vector | None]] = []
    grouped: tuple[Axes, Size] | None = None
    while True:
        tensor = tensor_of(node)
        if tensor is None:
            return node
        if stored_dtype(node) is not None:
            break
        if node.op != "call_function" or len(node.users) != 1:
            return node
        target = target_name(node)
        if target == CONVERSION and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            steps.append((node, None))
            node = first_argument(node)
        elif grouped is None and target in SWAPS and tensor.dim() == 2:
            node, is_swapped = first_argument(node), is_swapped is not exchanges(node)
        elif target in _RESHAPES:
            source = first_argument(node)
            grouped = grouped or _grouped(fake(source).shape, is_swapped, k, n)
            if grouped is None:
                return node
            node = source
        elif grouped is not None and (operand := _applied(node)) is not None:
            steps.append((node, Vector.of(operand, tensor.dtype)))
            node = arguments(node)["self" if arguments(node)["other"] is operand else "other"]
        else:
            return node
    if grouped is None or not any(vector for _, vector in steps):
        return node
    axes, values = grouped
    return GroupedWeight(_unreshaped(node), axes, k, n, values, tuple(reversed(steps)))


def exchanges(view: fx.Node) -> bool:
    """Whether a view of two axes exchanges them, as all do but a permutation that leaves them."""
    given = arguments(view)
    return [axis % 2 for axis in given["dims"]] == [1, 0] if "dims" in given else True


def _grouped(shape: Sequence[Size], is_swapped: bool, k: Size, n: Size) -> tuple[Axes, Size] | None:
    """The axes of a weight before it was reshaped to (N, K), which `is_swapped`, or to (K, N), and the values
    in a group."""
    if len(shape) == 3 and is_swapped and known(shape[0] == n) and known(shape[1] * shape[2] == k):
        return Axes.COLUMNS, shape[2]
    if len(shape) == 3 and not is_swapped and known(shape[2] == n) and known(shape[0] * shape[1] == k):
        return Axes.ALONG_K, shape[1]
    if len(shape) == 2 and is_swapped and known(shape[0] * shape[1] == n * k):
        # Of rows that are no whole groups, the first axis is longer.
        return (Axes.ROWS, shape[1]) if known(shape[0] == n * (k // shape[1])) else None
    return None


def _applied(node: fx.Node) -> fx.Node | None:
    """The zeros or scales that a step subtracts or multiplies by."""
    target, given = target_name(node), arguments(node)
    if target == SUBTRACTION and given["alpha"] != 1:
        return None
    if target not in (SUBTRACTION, SCALING):
        return None
    pairs = [(given["self"], given["other"])]
    pairs += [(given["other"], given["self"])] if target == SCALING else []
    for weight, operand in pairs:
        of, vector = tensor_of(weight), tensor_of(operand)
        if of is None or vector is None or not same_sizes(of.shape, fake(node).shape):
            continue
        if vector.dim() == of.dim() and not same_sizes(vector.shape, of.shape):
            return operand
    return None


def _unreshaped(node: fx.Node, axes: int | None = None) -> fx.Node:
    """The value before it was reshaped, or the last value of `axes` axes."""
    while node.op == "call_function" and target_name(node) in _RESHAPES and fake(node).dim() != axes:
        node = first_argument(node)
    return node
