"""The tensors in arguments of CUTLASS Operators: their layouts, which need no values, and their values.

Arguments hold a torch tensor, a fake one or, if TVM-FFI is off, the DSL's own tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

import torch
from cutlass.cute.typing import AddressSpace
from cutlass.operators.utils.dtype import torch_type_from_cutlass_type
from cutlass.operators.utils.tensor import TensorWrapper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cute_backend.errors import UsageError
from cute_backend.fx_walk.graph.static import DTYPES
from cute_backend.signature import TMA_ALIGN
from cute_backend.spec import DType

TensorArgument = Union[TensorWrapper, Tensor]


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor. `offset` is its address or, without one, its offset within its storage.

    The first of three modes is a batch of one, and is left out.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @staticmethod
    def of(name: str, tensor: Any) -> Layout:
        """The layout of an argument. Raises UsageError for a batch, or for anything but a tensor."""
        if isinstance(tensor, TensorWrapper):
            given = tuple(tensor.shape), tuple(tensor.stride)
            dtype, offset = _torch_dtype(name, tensor), tensor.data_ptr
        elif isinstance(tensor, Tensor):
            given = tuple(tensor.shape), tensor.stride()
            dtype = tensor.dtype
            fake = isinstance(tensor, FakeTensor) or tensor.is_meta
            offset = tensor.storage_offset() * tensor.element_size() if fake else tensor.data_ptr()
        else:
            raise UsageError(f"{name} is a {type(tensor).__name__}; these operators take torch tensors")
        shape, strides = given
        if len(shape) == 3:
            if shape[0] != 1:
                raise UsageError(
                    f"{name} is a batch of {shape[0]}; these kernels compute one product per launch"
                )
            shape, strides = shape[1:], strides[1:]
        return Layout(shape, strides, dtype, offset)

    @property
    def value_dtype(self) -> DType | None:
        """The dtype of a spec; None for a dtype that specs don't have."""
        return DTYPES.get(self.dtype)

    @property
    def unit(self) -> int | None:
        """The mode along which a matrix is contiguous: the last one if both are, None if neither is."""
        contiguous = [mode for mode in (1, 0) if self.strides[mode] == 1]
        long = [mode for mode in contiguous if self.shape[mode] > 1]
        return next(iter([*long, *contiguous]), None)

    @property
    def aligned(self) -> bool:
        """Whether TMA can read and write the matrix: its base and its pitch are multiples of 16 bytes."""
        if self.unit is None:
            return False
        pitch = self.strides[1 - self.unit] * self.dtype.itemsize
        return pitch != 0 and not (self.offset | pitch) % TMA_ALIGN


def _torch_dtype(name: str, tensor: TensorWrapper) -> torch.dtype:
    try:
        return torch_type_from_cutlass_type(tensor.dtype)
    except KeyError as error:
        raise UsageError(f"{name} has elements of {tensor.dtype}, which torch has no dtype for") from error


def values_of(name: str, tensor: TensorArgument) -> Tensor:
    """The tensor itself, without a batch of one. Raises UsageError unless it has values on a GPU."""
    values = tensor.runtime_tensor if isinstance(tensor, TensorWrapper) else tensor
    if not isinstance(values, Tensor):
        if values.memspace != AddressSpace.gmem:
            raise UsageError(f"{name} is not on a GPU, where kernels run")
        layout = Layout.of(name, tensor)
        return at_address(values.data_ptr, layout)
    if not values.is_cuda:
        raise UsageError(f"{name} is on {values.device}; kernels run on a GPU")
    return values[0] if values.dim() == 3 else values


class _Memory:
    """Bytes at an address, in the form that torch accepts (CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def bytes_at(address: int, size: int) -> Tensor:
    """`size` bytes of a GPU's memory as a uint8 tensor, which does not own them.

    Raises UsageError if torch would copy them.
    """
    memory = torch.as_tensor(_Memory(address, size))
    if memory.data_ptr() != address:
        raise UsageError(f"torch can't view the memory at {address:#x} without a copy")
    return memory


def at_address(address: int, layout: Layout) -> Tensor:
    """A tensor of a GPU's memory, which does not own it."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    elements = bytes_at(address, reach * layout.dtype.itemsize).view(layout.dtype)
    return elements.as_strided(layout.shape, layout.strides)
