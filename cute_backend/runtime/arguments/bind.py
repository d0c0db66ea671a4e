"""The binding of tensors to a kernel's arguments, for launches, the simulator, CUTLASS Operators and timings.

The layout of a tensor at launch need not be the one that the spec was made from: Inductor may pad or permute
its buffers. If a kernel can't read a tensor with these strides, the tensor gets other strides where its sizes
permit; otherwise it is copied, and the copy is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from cute_backend.kinds.axes import Extent
from cute_backend.runtime.arguments.operands import Tensors, check_scales, covers, plane_of
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.signature import TABLE_ROWS, TMA_ALIGN, Argument, ArgumentAlignment, Use, signature
from cute_backend.spec import PAIRED_DTYPES, PRODUCT_DTYPES, DType, EpilogueSpec, Stride


class Bound(NamedTuple):
    """Operands in the layouts that a kernel reads: A, every B, their scales and the loads, in the signature's
    order.

    `aligned` says whether TMA can read every plane among them. `as_given` says whether all are the tensors
    that `Binding.operands` returned, neither copied nor with other strides.
    """

    tensors: list[Tensor]
    aligned: bool
    as_given: bool


class Binding:
    """Converts tensors to the arguments of a spec's kernels."""

    def __init__(self, spec: EpilogueSpec) -> None:
        arguments = signature(spec)
        operands = [argument for argument in arguments if argument.use.is_operand]
        self._spec = spec
        self._split = [(i, load) for i, load in enumerate(spec.loads) if load.is_split]
        self._operand_views = _views(operands)
        self._result_views = _views(argument for argument in arguments if argument.use is Use.STORE)
        sized = {load.name for store in spec.stores for load in spec.loads_with_batches(store)}
        self._planes = _planes(operands, sized)
        self._strided = [
            (i, argument)
            for i, argument in enumerate(operands)
            if not argument.is_plane and any(stride is not Stride.OTHER for stride in _strides(argument))
        ]
        self._has_scales = any(scales.beside(side) for side, scales in spec.scaled)
        self._block_columns = spec.block_columns
        self._batch_rows = math.lcm(*(store.form.batch_rows or 1 for store in spec.stores))
        is_checked = self._has_scales or self._block_columns > 1 or self._batch_rows > 1
        self.takes_operands_as_given = not (self._operand_views or self._split or is_checked)
        """Whether `operands` makes no view and has nothing to check."""
        self._parts = [len(stores) for stores in spec.results]
        self._has_parts = len(spec.results) < len(spec.stores)
        self.takes_results_as_given = not (self._result_views or self._has_parts)
        """Whether `written` makes no view."""

    def operands(self, a: Tensors, b: Tensors, loads: Tensors) -> list[Tensor]:
        """Operands in the signature's order, in the views that every launch makes. It does not inspect
        strides.

        Raises ValueError if the product of a load's modes is not the rows of A, if its blocks don't make up
        the plane's columns, or if the number of scales is not that of the blocks of A and B.
        """
        if self._has_scales:
            check_scales(self._spec, a, b)
        if self._block_columns > 1 and plane_of(self._spec, a, b)[1] % self._block_columns:
            raise ValueError("N is no multiple of a block's columns")  # check_operands has the full message
        if self._batch_rows > 1 and plane_of(self._spec, a, b)[0] % self._batch_rows:
            raise ValueError("M is no multiple of a batch's rows")  # check_operands has the full message
        for index, load in self._split:
            m, n = plane_of(self._spec, a, b)
            if not covers(load, loads[index], m, self._spec.width_of(load.name) or n):
                raise ValueError(f"{load.name} is not of the plane")  # check_operands has the full message
        tensors = [*a, *b, *loads]
        for index, view in self._operand_views:
            tensors[index] = view(tensors[index])
        return tensors

    def bind(self, a: Tensors, b: Tensors, loads: Tensors) -> Bound:
        """Operands in layouts that kernels were compiled for. The operands have to be accepted by
        `check_operands`."""
        tensors = self.operands(a, b, loads)
        given, aligned = list(tensors), True
        for plane in self._planes:
            tensor = tensors[plane.index]
            if not plane.fits(tensor):
                conformed = plane.conform(tensor)
                aligned = aligned and plane.fits(conformed)
                tensors[plane.index] = plane.with_sizes_of(tensor, conformed) if plane.sized else conformed
        for index, argument in self._strided:
            tensors[index] = _with_strides(argument, tensors[index])
        return Bound(tensors, aligned, all(map(is_, tensors, given)))

    def written(self, memory: list[Tensor]) -> list[Tensor]:
        """The tensors that a kernel writes, in the signature's order: one for each store, then the workspace
        if some store reduces. `memory` has one for each result, and may be changed."""
        if self._has_parts:
            results, rest = memory[: len(self._parts)], memory[len(self._parts) :]
            parts = (result.chunk(count, -1) for result, count in zip(results, self._parts, strict=True))
            memory = [part for views in parts for part in views] + rest
        for index, view in self._result_views:
            memory[index] = view(memory[index])
        return memory


_View = Callable[[Tensor], Tensor]


def _views(arguments: Iterable[Argument]) -> list[tuple[int, _View]]:
    """The arguments that are passed as another view: one element as a vector, truth values as bytes, pairs of
    values as integers."""
    found: list[tuple[int, _View]] = []
    for index, argument in enumerate(arguments):
        if not argument.dims:
            found.append((index, _as_vector if argument.use.is_operand else _vector_of_result))
        if argument.dtype in (DType.BOOL, *PRODUCT_DTYPES):
            found.append((index, _as_bytes))
        if argument.dtype in PAIRED_DTYPES.values():
            found.append((index, _as_words))
    return found


def _as_vector(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _vector_of_result(tensor: Tensor) -> Tensor:
    return tensor.view(1)  # a launch allocates it, so its axes are known


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _as_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def _strides(argument: Argument) -> tuple[Stride, ...]:
    """The strides that a kernel expects of an argument."""
    return tuple(dim.stride for dim in argument.dims) or (Stride.ONE,)


@dataclass(frozen=True)
class _Plane:
    """An operand at `index` that TMA reads, for one alignment at least, contiguous along axis `unit`.

    An unaligned operand is copied if TMA `always` reads it; otherwise the kernel of the other alignment runs.
    Along the `repeated` axes of a table, all elements are the same: these axes are blocks of columns, and all
    but the last of its `modes` modes of M. If it is `sized`, the kernel reads the sizes of these.
    """

    index: int
    title: str
    unit: int
    bytes: int
    always: bool
    repeated: tuple[int, ...] = ()
    modes: int = 0
    sized: bool = False

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor is contiguous along `unit` and aligned for TMA, and no box spans the last and
        the first rows of a table."""
        aligned = tensor.data_ptr()
        for axis, stride in enumerate(tensor.stride()):
            if axis == self.unit:
                if stride != 1:
                    return False
            elif (stride == 0) is not (axis in self.repeated):
                return False
            else:
                aligned |= stride * self.bytes
        return not aligned % TMA_ALIGN and self._in_boxes(tensor)

    def _in_boxes(self, tensor: Tensor) -> bool:
        *outer, rows = (1, *tensor.shape[: self.modes])
        return rows % TABLE_ROWS == 0 or math.prod(outer) == 1

    def conform(self, tensor: Tensor) -> Tensor:
        """Returns the same values in a layout that the kernel reads, by other strides or by a copy.

        An operand that is contiguous but not aligned stays as it is unless TMA always reads it. Rows of a
        table that don't repeat from box to box are copied for all rows of M.
        """
        strides = list(tensor.stride())
        elements = TMA_ALIGN // self.bytes
        pitch = -(-tensor.shape[self.unit] // elements) * elements
        for axis, size in enumerate(tensor.shape):
            if axis in self.repeated:
                strides[axis] = 0
            elif size == 1:  # the stride of an axis of one element is never used
                strides[axis] = 1 if axis == self.unit else pitch
        restrided = tensor.as_strided(tensor.shape, strides)
        if self.fits(restrided) or (strides[self.unit] == 1 and not self.always):
            return restrided
        count("operands_copied")
        if self.repeated:
            warn_once(
                ("copied", self.title, self.repeated),
                f"cute_backend: {self.title}, {tuple(tensor.shape)} with strides {tensor.stride()}, is "
                "copied at each call: TMA wants its last axis contiguous, base and pitch in multiples of "
                f"{TMA_ALIGN} bytes and, if batches share it, rows in multiples of {TABLE_ROWS}.",
            )
            return self._copied_table(restrided)
        warn_once(
            ("copied", self.title, self.unit),
            f"cute_backend: {self.title}, {tuple(tensor.shape)} with strides {tensor.stride()}, is copied at "
            f"each call: its kernel wants mode {self.unit} contiguous"
            + (f" and, for TMA, base and pitch in multiples of {TMA_ALIGN} bytes." if self.always else "."),
        )
        by_unit = tensor.transpose(self.unit, -1)
        buffer = tensor.new_empty((*by_unit.shape[:-1], pitch))[..., : by_unit.shape[-1]]
        return buffer.transpose(self.unit, -1).copy_(tensor)

    def with_sizes_of(self, given: Tensor, tensor: Tensor) -> Tensor:
        """A table, which may have been copied for all rows of M, with the outer modes of M that it had."""
        last = self.modes - 1
        return tensor.expand(*given.shape[:last], *tensor.shape[last:])

    def _copied_table(self, tensor: Tensor) -> Tensor:
        """A table with aligned rows; with one for each row of M if they don't repeat from box to box."""
        *modes, blocks, columns = tensor.shape
        outer = (0,) * (len(modes) - 1)
        rows = tensor.select(-2, 0)
        if self._in_boxes(tensor):
            rows = rows[outer]
        else:
            rows, modes = rows.reshape(-1, columns), [*(1 for _ in outer), math.prod(modes)]
        rows = rows.clone(memory_format=torch.contiguous_format)
        return rows.as_strided((*modes, blocks, columns), (*outer, columns, 0, 1))


def _planes(operands: Sequence[Argument], sized: Container[str]) -> list[_Plane]:
    return [
        _Plane(
            i,
            plane.title,
            plane.unit,
            plane.dtype.bits // 8,
            plane.alignment is ArgumentAlignment.TMA,
            plane.repeated,
            sum(dim.extent is Extent.MODE for dim in plane.dims),
            plane.name in sized,
        )
        for i, plane in enumerate(operands)
        if plane.is_plane and plane.unit is not None
    ]


def _with_strides(argument: Argument, tensor: Tensor) -> Tensor:
    """Returns the same values with the strides that the argument states. It copies the tensor if its unit
    axis is not contiguous otherwise. Along an axis of stride 0, the element at index 0 counts."""
    if not argument.dims:
        return tensor if tensor.stride() == (1,) else tensor.reshape(()).as_strided((1,), (1,))
    strides = list(tensor.stride())
    for axis, dim in enumerate(argument.dims):
        if dim.stride is Stride.ZERO:
            strides[axis] = 0
        elif dim.stride is Stride.ONE and tensor.shape[axis] == 1:
            strides[axis] = 1  # the stride of an axis of one element is never used
    if argument.unit is not None and strides[argument.unit] != 1:
        count("operands_copied")
        by_unit = tensor.transpose(argument.unit, -1).contiguous()
        return _with_strides(argument, by_unit.transpose(argument.unit, -1))
    return tensor if tensor.stride() == tuple(strides) else tensor.as_strided(tensor.shape, strides)
