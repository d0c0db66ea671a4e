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
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.signature import Argument, Role, of_role, signature
from cute_backend.spec import (
    SCALE_TILE,
    Accumulator,
    BColumns,
    EpilogueSpec,
    Load,
    Order,
    ProductKind,
    Scaling,
    Store,
    WeightGroups,
)

Size = Union[int, SymInt]


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
    if store.order is Order.COLUMN:
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


def plane_of(spec: EpilogueSpec, a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Any, Any]:
    """M and N of the plane, B * M rows for A (B, M, K), and G * M where K lies in groups."""
    m, n = prod(a[0].shape[:-1]), spec.plane_n(b_shape(spec.product, b[0])[-1])
    return (m * a[1].shape[0] if spec.product.kind is ProductKind.K_GROUPED else m), n


def groups_of(spec: EpilogueSpec, a: Sequence[Tensor]) -> int | None:
    """The number of groups, of rows or of K; None for a product without groups."""
    return a[1].shape[0] if spec.product.kind.has_offsets else None


def check_scales(spec: EpilogueSpec, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Raises ValueError if the number of scales is not the number of blocks of A and B, or the scales and
    zeros of a weight in groups of K are not those of its groups and columns."""
    product = spec.product
    if product.weight_groups is not None:
        _check_groups(product.weight_groups, b[0], b[spec.b_count :])
    if not product.is_block_scaled:
        return
    k = a[0].shape[1] * product.a_dtype.values
    groups: tuple[Size, ...] = ()
    if product.kind.has_offsets:
        groups = a[1].shape
        _check_scales_of_groups(product, a[2], k)
    of_a = ("A", product.a_scaling, scales_shape(product.a_scaling, a[0].shape[0], k))
    of_b = scales_shape(product.b_scaling, b[0].shape[-1], k, transposed=True)
    scales = [] if groups else [(of_a, tensor) for tensor in a[1:]]
    scales += [(("B", product.b_scaling, (*groups, *of_b)), tensor) for tensor in b[spec.b_count :]]
    for (operand, blocks, expected), tensor in scales:
        if tensor.shape != expected:
            raise ValueError(
                f"the scales of {operand} have shape {_shape(tensor.shape)}; by blocks of {blocks.value} "
                f"they have {_shape(expected)}"
                + (", in tiles of 128 rows by 4 scales (SWIZZLE_32_4_4)" if blocks.by_mma else "")
            )


def _check_groups(groups: WeightGroups, b: Tensor, vectors: Sequence[Tensor]) -> None:
    """Raises ValueError unless each of the scales and zeros of a weight (K, N) is (K / groups.values, N)."""
    k, n = b.shape
    if k % groups.values != 0:
        raise ValueError(f"B is {_shape(b.shape)}, and {k} is no multiple of its groups of {groups.values}")
    for kind, tensor in zip(("scales", "zeros"), vectors, strict=False):
        if tensor.shape != (k // groups.values, n):
            raise ValueError(
                f"the {kind} of B have shape {_shape(tensor.shape)}; of groups of {groups.values} of K they "
                f"have {_shape((k // groups.values, n))}"
            )


def _of_groups(groups: WeightGroups | None) -> str:
    """The tensors that come with every B in groups of K, in words."""
    if groups is None:
        return ""
    return ", each with scales " + ("of its groups" if groups.zero is None else "and zeros of its groups")


def _check_scales_of_groups(product: Accumulator, scales: Tensor, k: int) -> None:
    """Raises ValueError unless the scales of A are those of whole rows. Only the device knows how many tiles
    groups have, so the last tile in memory may be incomplete if no group uses it, as it may be in torchao."""
    row = product.a_scaling.tiled(1, k) // SCALE_TILE[0]
    if scales.dim() != 1 or scales.numel() % row:
        raise ValueError(
            f"the scales of A have shape {_shape(scales.shape)}; for rows in groups, scales of blocks of "
            f"{product.a_scaling.value} have 1 axis, whose length is a multiple of {row}, and lie in tiles "
            "of 128 rows by 4 scales (SWIZZLE_32_4_4), where each group begins with a tile of its own"
        )


def scales_shape(scaling: Scaling, lines: Size, k: Size, *, transposed: bool = False) -> tuple[Size, ...]:
    """The shape in which the op expects the scales of `lines` rows of A, or columns of B, by `k` values.
    Counted in blocks, it is (lines, k), or (k, lines) if `transposed`; tiled scales have one axis."""
    if scaling.by_mma:
        return (scaling.tiled(lines, k),)
    shape = (scaling.blocks(lines), scaling.k_blocks(k))
    return shape[::-1] if transposed else shape


_SHAPES = {
    ProductKind.DENSE: ("A (M, K) and B (K, N)", 2, 2),
    ProductKind.BATCHED: ("A (B, M, K) and B (B, K, N)", 3, 3),
    ProductKind.GROUPED: ("A (M, K), offsets (G,) and B (G, K, N)", 2, 3),
    ProductKind.K_GROUPED: ("A (M, K), offsets (G,) and B (K, N)", 2, 2),
}
"""The shapes of a product of each kind in words, and the number of axes of A and B."""


def check_operands(
    spec: EpilogueSpec, a: Sequence[Tensor], b: Sequence[Tensor], loads: Sequence[Tensor]
) -> None:
    """Raises ValueError, with a message of one sentence, if operands contradict the spec or one another.

    It does not check strides: a launch copies loads whose layout is not that of the spec.
    """
    scaled, grouped = spec.product.is_block_scaled, spec.product.kind.has_offsets
    weight = spec.product.weight_groups
    beside = int(scaled) if weight is None else len(weight.vectors)
    if (len(a), len(b)) != (1 + scaled + grouped, (1 + beside) * spec.b_count):
        raise ValueError(
            f"gemm_epilogue got {len(a)} A and {len(b)} B tensors; the spec multiplies one A"
            f"{', with the offsets of its groups,' if grouped else ''} by {spec.b_count} B"
            f"{', each with scales of its blocks' if scaled else ''}"
            f"{_of_groups(spec.product.weight_groups)}"
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
            or left.shape[-1] != shape[-2]
            or tuple(shape[:-2]) != tuple(leading)
            or (acc.b_block and right.shape[-1] != acc.b_block)
            or any(each.dim() != 1 for each in offsets)
        ):
            given = " and ".join(_shape(tensor.shape) for tensor in (left, *offsets, right))
            blocks = f", with columns in blocks of {acc.b_block}" if acc.b_block else ""
            raise ValueError(f"{acc.name} wants {wanted}{blocks}, not {given}")
        if acc.width and shape[-1] != acc.width:
            raise ValueError(f"{acc.name} has a segment of {acc.width} columns, and its B is {_shape(shape)}")
        if not acc.width and shape[-1] != first[-1]:
            raise ValueError(
                f"{acc.name} is {_shape(left.shape)} times {_shape(shape)}; the first B has {first[-1]} "
                "columns"
            )
    if spec.b_columns is BColumns.INTERLEAVED and b[0].shape[-1] % 2 != 0:
        raise ValueError(f"B is {_shape(b[0].shape)}, which has not as many even columns as odd ones")
    operands = [argument for argument in arguments if argument.role.is_operand]
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
    for load, argument, tensor in zip(spec.loads, of_role(operands, Role.LOAD), loads, strict=True):
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
        fits, wanted = tensor.shape == expected, f"shape {_shape(expected)}"
    if not fits:
        raise ValueError(
            f"{load.name} is a load of kind {load.kind.value} and wants {wanted}, "
            f"not shape {_shape(tensor.shape)}"
        )


def _shape(sizes: Sequence[Size]) -> str:
    return "(" + ", ".join(str(size) for size in sizes) + ")"
