"""Matrix products that a library multiplies by an operator or a Triton kernel of its own."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.static import target_name

_OF_PRODUCTS = re.compile(r"(?:^|_)(?:gemm|matmul|b?mm)(?:_|$)")
"""Words in the names of operators and kernels that multiply matrices."""

_OF_TRITON = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")
"""The nodes of Triton kernels that a program launches itself."""


def opaque_product(node: fx.Node) -> str | None:
    """The name of an operator that a library defines, or of a Triton kernel, that by its name multiplies
    matrices, such as torchao's `ao::blockwise_fp8_gemm` and vLLM's `_C::cutlass_scaled_mm`. None for other
    nodes."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _OF_TRITON:
        name = _kernel_name(node.kwargs["kernel_idx"])
        return f"the Triton kernel {name}" if _OF_PRODUCTS.search(name) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    namespace, name = node.target._schema.name.split("::")
    is_library = namespace not in ("aten", "prims", "cute_backend")
    return target_name(node) if is_library and _OF_PRODUCTS.search(name) else None


def _kernel_name(index: Any) -> str:
    """The name of the function behind a Triton kernel, its autotuner and its heuristics."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(index)
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))
