"""The checks of compiled host code on the tensors that it is called with."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from cute_backend.runtime.compiling.compile import fake_operands
from cute_backend.runtime.kernels.kernel import Kernel


@cache
def compiled_for(kernel: Kernel) -> list[Any]:
    return list(fake_operands(kernel.plan).values())


def check_layouts(kernel: Kernel, tensors: list[Tensor]) -> None:
    """Checks arguments as compiled host code does, against the layouts that it was compiled for."""
    sizes: dict[int, int] = {}
    for tensor, fake in zip(tensors, compiled_for(kernel), strict=True):
        if tensor.dim() != len(fake.shape):
            raise ValueError("Mismatched rank")
        if tensor.data_ptr() % fake._assumed_align:
            raise ValueError("Misaligned data")
        for size, symbol in zip(tensor.shape, fake.shape, strict=True):
            if size != (symbol if isinstance(symbol, int) else sizes.setdefault(id(symbol), size)):
                raise ValueError("Mismatched shape")
        for stride, wanted in zip(tensor.stride(), fake.stride, strict=True):
            if stride != wanted if isinstance(wanted, int) else stride % wanted.divisibility:
                raise ValueError("Mismatched strides")
