"""The signature of a kernel: its arguments in order, each with its layout in memory.

Only the function `signature` derives it from a spec. It determines the parameters of a generated `launch`,
the layouts for which that is compiled, the views and copies of a launch (`runtime.bind`), the memory of its
results, random operands for timings and the arguments of CUTLASS Operators. To add an argument to kernels,
add it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from cute_backend.kinds.axes import Dim, Extent, Stride, plane
from cute_backend.kinds.scales import Scales, Side
from cute_backend.spec import (
    Accumulator,
    DType,
    EpilogueSpec,
    Load,
    Major,
    ProductKind,
    Store,
)

TMA_ALIGN = 16
"""Bytes that divide the base address and every stride of a tensor that TMA reads or writes (CUDA Driver API,
cuTensorMapEncodeTiled)."""

TABLE_ROWS = 128
"""The rows of the tallest box that TMA loads from a plane. A table that repeats along M has a multiple of
this number of rows, because otherwise boxes would extend from its last row to its first."""

WORKSPACE_ALIGN = 32
"""The address of the workspace, and the offset of each tensor in it, are multiples of this: a sector of
L2."""

OFFSETS = "offsets"
"""The argument with the ends of groups of rows or of K. An end is the index after the group's last, as in
torch."""

WORKSPACE = "workspace"
"""The argument with the bytes for the partials of all reductions, or for the sums of parts of K."""


COUNTERS = "counters"
"""The argument with the counters of the tiles of rows, by which a kernel finds a row's last tile. Each is 0
before a launch, and again after it. If there are none, a second kernel finishes the reductions."""


class Use(Enum):
    """The purpose of an argument. The order of the members is the order of the arguments."""

    A = "A"
    A_SCALES = "scales beside A"
    OFFSETS = "offsets"
    B = "B"
    B_SCALES = "scales and zeros beside B"
    LOAD = "load"
    STORE = "store"
    WORKSPACE = "workspace"
    COUNTERS = "counters of tiles"

    @property
    def is_operand(self) -> bool:
        """Whether the kernel reads it. The caller of the op passes these arguments; the runtime allocates the
        others."""
        return self not in (Use.STORE, Use.WORKSPACE, Use.COUNTERS)


class ArgumentAlignment(Enum):
    """The alignment of an argument: bytes of which its base address, and its strides that are not 1, are
    multiples."""

    ELEMENT = "element"
    """The bytes of an element."""
    PLANE = "plane"
    """`TMA_ALIGN` in kernels whose planes move by TMA, and the bytes of an element in others."""
    TMA = "tma"
    """`TMA_ALIGN`: tensors with another alignment are copied."""
    WORKSPACE = "workspace"
    """`WORKSPACE_ALIGN`."""


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel takes.

    `name` is the name of the parameter of `launch`, and `title` the name of the tensor in messages. `dims`
    are the axes of the op's tensor. () is one element, a scalar load or a reduction of the whole plane;
    kernels take it as a vector of one element. A BOOL is passed as its byte.
    """

    name: str
    title: str
    use: Use
    dtype: DType
    dims: tuple[Dim, ...]
    alignment: ArgumentAlignment = ArgumentAlignment.ELEMENT
    inner: int | None = None
    """The axis along which libraries store neighbours of a vector beside A or B, whose strides are any."""

    @staticmethod
    def of_load(load: Load, width: int = 0) -> Argument:
        """The argument of an epilogue's load, in a segment of `width` columns if there are segments."""
        aligned = ArgumentAlignment.TMA if load.is_table else ArgumentAlignment.ELEMENT
        aligned = aligned if load.order is None else ArgumentAlignment.PLANE
        return Argument(load.name, load.name, Use.LOAD, load.dtype, load.dims(width), aligned)

    @staticmethod
    def of_store(store: Store, width: int = 0) -> Argument:
        """The argument of a store, in a segment of `width` columns if there are segments."""
        aligned = ArgumentAlignment.PLANE if store.form.in_boxes else ArgumentAlignment.ELEMENT
        return Argument(store.name, store.name, Use.STORE, store.dtype, store.form.dims(width), aligned)

    @cached_property
    def unit(self) -> int | None:
        """The axis that has to be contiguous, None if none has to be."""
        return next((axis for axis, dim in enumerate(self.dims) if dim.stride is Stride.ONE), None)

    @property
    def is_plane(self) -> bool:
        """Whether TMA reads or writes it in kernels of at least one alignment."""
        return self.alignment in (ArgumentAlignment.PLANE, ArgumentAlignment.TMA)

    @property
    def repeated(self) -> tuple[int, ...]:
        """The axes along which its elements are repeated."""
        return tuple(axis for axis, dim in enumerate(self.dims) if dim.stride is Stride.ZERO)

    def align(self, tma: bool) -> int:
        """The bytes of which its base address, and its strides that are not 1, are multiples. `tma` is
        whether TMA moves planes."""
        if self.alignment is ArgumentAlignment.WORKSPACE:
            return WORKSPACE_ALIGN
        promised = self.alignment is ArgumentAlignment.TMA or (
            tma and self.alignment is ArgumentAlignment.PLANE
        )
        return TMA_ALIGN if promised else self.dtype.bits // 8

    def shape(self, sizes: Mapping[Extent, Any]) -> tuple[Any, ...]:
        """Its shape for these sizes of extents. Raises KeyError for an extent that is not among them."""
        return tuple(dim.size(sizes) for dim in self.dims)

    def packed(self, shape: Sequence[Any], align: int = 1, step: Any = 1) -> tuple[Any, ...]:
        """Strides without gaps for this shape, in elements. The unit axis is innermost, then the last other
        axis.

        The smallest stride is `step`; every other one is rounded up to a multiple of `align` elements.
        """
        strides: dict[int, Any] = {}
        for axis in sorted(range(len(self.dims)), key=lambda axis: (axis != self.unit, -axis)):
            varies = self.dims[axis].stride is not Stride.ZERO
            strides[axis] = step if varies else 0
            if varies:
                step = -(-step * shape[axis] // align) * align
        return tuple(strides[axis] for axis in range(len(self.dims)))


def signature(spec: EpilogueSpec, sums: bool = False, counts: bool = False) -> tuple[Argument, ...]:
    """The arguments of a spec's kernels, in order: A, every B, loads, stores and, if some stores reduce or if
    the tile leaves the `sums` of parts of K there (`TileConfig.sums_in_memory`), the workspace. Then, if the
    kernel `counts` the tiles of rows (`planning.may_finish_rows`), the counters. The offsets of groups come
    after A, then the scales beside A. Those beside every B come after all B: the scales of each, then its
    zeros."""
    first = spec.product
    batched, grouped = first.kind is ProductKind.BATCHED, first.kind is ProductKind.GROUPED
    batches = (Extent.BATCHES,) if batched else ()
    groups = (Extent.GROUPS,) if grouped else batches
    (of_a, a_scales), (of_b, b_scales) = spec.scaled
    a = plane((*batches, of_a.lines, Extent.K), first.a_major is Major.K)
    arguments = [Argument("a", f"A of {first.name}", Use.A, first.a_dtype, a, ArgumentAlignment.TMA)]
    if first.kind.has_offsets:
        ends = (Dim(Extent.GROUPS, Stride.ONE),)
        arguments.append(Argument(OFFSETS, "the offsets of the groups", Use.OFFSETS, DType.I32, ends))
    arguments += _beside({"a": first}, Use.A_SCALES, of_a, a_scales)
    products = {("b" if spec.b_count == 1 else f"b{i}"): acc for i, acc in enumerate(spec.first_of_each_b)}
    for name, product in products.items():
        b = plane((*groups, Extent.K, of_b.lines), first.b_major is not Major.K, product.width)
        if product.packing > 1:
            b = (replace(b[0], values=product.packing), b[1])
        if product.b_block:
            blocks = Dim(Extent.BLOCKS, Stride.OTHER, product.b_block, product.width)
            b = (b[0], blocks, Dim(Extent.BLOCK, Stride.OTHER, product.b_block))
        title = f"B of {product.name}"
        arguments.append(Argument(name, title, Use.B, first.b_dtype, b, ArgumentAlignment.TMA))
    arguments += _beside(products, Use.B_SCALES, of_b, b_scales)
    arguments += (Argument.of_load(load, spec.width_of(load.name)) for load in spec.loads)
    arguments += (Argument.of_store(store, spec.width_of(store.value)) for store in spec.stores)
    if spec.reductions or sums:
        room = (Dim(Extent.BYTES, Stride.ONE),)
        arguments.append(
            Argument(WORKSPACE, "the workspace", Use.WORKSPACE, DType.U8, room, ArgumentAlignment.WORKSPACE)
        )
    if counts:
        each = (Dim(Extent.COUNTERS, Stride.ONE),)
        arguments.append(Argument(COUNTERS, "the counters of tiles", Use.COUNTERS, DType.I32, each))
    return tuple(arguments)


def of_use(arguments: Sequence[Argument], use: Use) -> tuple[Argument, ...]:
    """The arguments of one use, in order."""
    return tuple(argument for argument in arguments if argument.use is use)


def _beside(products: Mapping[str, Accumulator], use: Use, side: Side, scales: Scales) -> list[Argument]:
    """The vectors beside the operands of products, by the names of their arguments."""
    return [
        Argument(
            f"{name}_{vector.name}",
            f"{vector.title} of {side.name} of {acc.name}",
            use,
            vector.dtype,
            tuple(dim.of_segment(acc.width) for dim in vector.dims),
            ArgumentAlignment.TMA if vector.by_tma else ArgumentAlignment.ELEMENT,
            vector.inner,
        )
        for vector in scales.beside(side)
        for name, acc in products.items()
    ]
