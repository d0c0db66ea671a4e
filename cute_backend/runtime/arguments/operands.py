"""The rules for the op's operands: dtypes, shapes, devices and outputs of a spec.

Everything here is safe on symbolic sizes: a comparison that holds statically adds no guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Union

from torch import SymInt, Tensor

from cute_backend.kinds.axes import Extent
from cute_backend.kinds.scales import shown
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.signature import Argument, Use, of_use, signature
from cute_backend.spec import (
    Accumulator,
    BColumns,
    EpilogueSpec,
    Load,
    Order,
    ProductKind,
    Store,
)

Size = Union[int, SymInt]

Tensors = Sequence[Tensor]


@cache
def parse_spec(text: str) -> EpilogueSpec:
    """The spec behind its canonical JSON, parsed once for each text. Raises SpecError on anything else."""
    return EpilogueSpec.from_json(text)


def output_like(stores: Sequence[Store], like: Tensor, m: Size, n: Size, width: int = 0) -> Tensor:
    """An uninitialised result of a store, or of the stores that are its parts, dense in their order, on the
    device of `like`. `width` is the number of columns of its segment, or 0 without segments."""
    store = stores[0]
    dtype = TORCH_DTYPES[store.dtype.part]
    result = Argument.of_store(store, width)
    shape = result.shape({Extent.M: m, Extent.N: n * len(stores) * store.dtype.values})
    if store.form.order is Order.COLUMN:
        return like.new_empty(shape[::-1], dtype=dtype).t()
    return like.new_empty(shape, dtype=dtype)


def outputs_like(spec: EpilogueSpec, like: Tensor, m: Size, n: Size) -> list[Tensor]:
    """`output_like` of every result of a spec."""
    return [output_like(each, like, m, n, spec.width_of(each[0].value)) for each in spec.results]


def m_of(load: Load, tensor: Tensor) -> Size:
    """M: the product of the sizes of the modes of M that a load has."""
    return prod(tensor.shape[: len(load.m_modes)])


def blocks_of(spec: EpilogueSpec) -> list[tuple[str, int]]:
    """The loads, ops and stores that have blocks of columns, with their sizes."""
    loads = [(load.name, load.blocks.step) for load in spec.loads if load.blocks is not None]
    others = [(op.name, op.block) for op in spec.ops]
    others += [(store.name, store.form.block_columns) for store in spec.stores]
    return loads + [(name, columns) for name, columns in others if columns]


def covers(load: Load, tensor: Tensor, m: Size, n: Size) -> bool:
    """Whether the axes of a load whose M or N is several modes have these sizes. `n` is that of its segment,
    where there are segments."""
    if load.m_modes and m_of(load, tensor) != m:
        return False
    return load.blocks is None or tensor.shape[-2] * load.blocks.step == n


def b_shape(acc: Accumulator, b: Tensor) -> Sequence[Size]:
    """The shape of a B as it is multiplied, with its columns as one axis."""
    if not acc.b_block or b.dim() != 3:
        return b.shape
    k, blocks, columns = b.shape
    return (k, blocks * columns)


def plane_of(spec: EpilogueSpec, a: Tensors, b: Tensors) -> tuple[Any, Any]:
    """M and N of the plane, B * M rows for A (B, M, K), and G * M where K lies in groups."""
    m, n = prod(a[0].shape[:-1]), spec.plane_n(b_shape(spec.product, b[0])[-1])
    return (m * a[1].shape[0] if spec.product.kind is ProductKind.K_GROUPED else m), n


def groups_of(spec: EpilogueSpec, a: Tensors) -> int | None:
    """The number of groups, of rows or of K; None for a product without groups."""
    return a[1].shape[0] if spec.product.kind.has_offsets else None


def check_scales(spec: EpilogueSpec, a: Tensors, b: Tensors) -> None:
    """Raises ValueError if the vectors beside A or a B are not those of its blocks or groups."""
    k, groups = a[0].shape[-1] * spec.product.a_dtype.values, groups_of(spec, a)
    beside_a = a[1 if groups is None else 2 :]
    beside = [(a[0], beside_a), *((b[i], b[i + spec.b_count :: spec.b_count]) for i in range(spec.b_count))]
    of_a, of_b = spec.scaled
    for (side, scales), (operand, vectors) in zip((of_a, *(of_b,) * spec.b_count), beside, strict=True):
        if why := scales.misfit(side, operand.shape, k, groups, [each.shape for each in vectors]):
            raise ValueError(why)


_SHAPES = {
    ProductKind.DENSE: ("A (M, K) and B (K, N)", 2, 2),
    ProductKind.BATCHED: ("A (B, M, K) and B (B, K, N)", 3, 3),
    ProductKind.GROUPED: ("A (M, K), offsets (G,) and B (G, K, N)", 2, 3),
    ProductKind.K_GROUPED: ("A (M, K), offsets (G,) and B (K, N)", 2, 2),
}
"""The shapes of a product of each kind in words, and the number of axes of A and B."""


def check_operands(spec: EpilogueSpec, a: Tensors, b: Tensors, loads: Tensors) -> None:
    """Raises ValueError, with a message of one sentence, if operands contradict the spec or one another.

    It does not check strides: a launch copies loads whose layout is not that of the spec.
    """
    grouped = spec.product.kind.has_offsets
    beside_a, beside_b = (scales.beside(side) for side, scales in spec.scaled)
    if (len(a), len(b)) != (1 + len(beside_a) + grouped, (1 + len(beside_b)) * spec.b_count):
        vectors = " and ".join(each.name for each in beside_b)
        raise ValueError(
            f"gemm_epilogue got {len(a)} A and {len(b)} B tensors; the spec multiplies one A"
            f"{', with the offsets of its groups,' if grouped else ''} by {spec.b_count} B"
            f"{f', each with {vectors} of its {spec.product.b_scales.parts}' if vectors else ''}"
        )
    if len(loads) != len(spec.loads):
        names = ", ".join(load.name for load in spec.loads) or "none"
        raise ValueError(f"gemm_epilogue got {len(loads)} loads; the spec reads {len(spec.loads)} ({names})")
    arguments = signature(spec)
    left, offsets = a[0], a[1:2] if grouped else ()
    wanted, rank_a, rank_b = _SHAPES[spec.product.kind]
    leading = offsets[0].shape if spec.product.kind is ProductKind.GROUPED else left.shape[:-2]
    first = b_shape(spec.product, b[0])
    for acc, right in zip(spec.first_of_each_b, b):  # noqa: B905, as scales follow
        shape = b_shape(acc, right)
        if (
            left.dim() != rank_a
            or len(shape) != rank_b
            or left.shape[-1] != shape[-2] * acc.packing
            or tuple(shape[:-2]) != tuple(leading)
            or (acc.b_block and right.shape[-1] != acc.b_block)
            or any(each.dim() != 1 for each in offsets)
        ):
            given = " and ".join(shown(tensor.shape) for tensor in (left, *offsets, right))
            blocks = f", with columns in blocks of {acc.b_block}" if acc.b_block else ""
            blocks += f", with {acc.packing} of K in an element of B" if acc.packing > 1 else ""
            raise ValueError(f"{acc.name} wants {wanted}{blocks}, not {given}")
        if acc.width and shape[-1] != acc.width:
            raise ValueError(f"{acc.name} has a segment of {acc.width} columns, and its B is {shown(shape)}")
        if not acc.width and shape[-1] != first[-1]:
            raise ValueError(
                f"{acc.name} is {shown(left.shape)} times {shown(shape)}; the first B has {first[-1]} columns"
            )
    if spec.b_columns is BColumns.INTERLEAVED and b[0].shape[-1] % 2 != 0:
        raise ValueError(f"B is {shown(b[0].shape)}, which has not as many even columns as odd ones")
    operands = [argument for argument in arguments if argument.use.is_operand]
    for argument, tensor in zip(operands, (*a, *b, *loads), strict=True):
        if tensor.dtype is not TORCH_DTYPES[argument.dtype]:
            raise ValueError(
                f"{argument.title} is {tensor.dtype}; the spec says {TORCH_DTYPES[argument.dtype]}"
            )
    m, n = plane_of(spec, a, b)
    shapes = {load.name: tensor.shape for load, tensor in zip(spec.loads, loads, strict=True)}
    # Widths of segments are whole blocks, as a spec makes sure of.
    for name, columns in [] if spec.product.width else blocks_of(spec):
        if n % columns != 0:
            raise ValueError(f"{name} has blocks of {columns} columns, and {n} columns are no multiple")
    for store in spec.stores:
        rows = spec.rows_of_batch(store, shapes, m)
        if rows and m % rows != 0:
            raise ValueError(f"{store.name} {store.form.batches(rows)}, and {m} rows are no multiple")
    check_scales(spec, a, b)
    sizes = {Extent.M: m, Extent.N: n, Extent.GROUPS: groups_of(spec, a)}
    for load, argument, tensor in zip(spec.loads, of_use(operands, Use.LOAD), loads, strict=True):
        _check_load(load, argument, tensor, sizes)
    for tensor in (*a, *b, *loads):
        if tensor.device != a[0].device:
            raise ValueError(
                f"gemm_epilogue got tensors on {a[0].device} and on {tensor.device}; it takes one device"
            )


def _check_load(load: Load, argument: Argument, tensor: Tensor, sizes: Mapping[Extent, Size]) -> None:
    if load.m_modes:
        modes, m = len(load.m_modes), sizes[Extent.M]
        tail = tuple(dim.size(sizes) for dim in argument.dims[modes:])
        fits = tensor.dim() == modes + len(tail) and tensor.shape[modes:] == tail
        fits = fits and m_of(load, tensor) == m
        wanted = f"{modes} sizes that multiply to {m}" + "".join(f", then {size}" for size in tail)
    elif not argument.dims:
        fits, wanted = tensor.numel() == 1, "one element"
    else:
        expected = argument.shape(sizes)
        fits, wanted = tensor.shape == expected, f"shape {shown(expected)}"
    if not fits:
        raise ValueError(
            f"{load.name} is a load of kind {load.kind.value} and wants {wanted}, "
            f"not shape {shown(tensor.shape)}"
        )
