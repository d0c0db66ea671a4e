"""Matrix products whose arithmetic a graph does not show, or shows as other ops.

A library multiplies by an operator or a Triton kernel of its own, and torch has operators that `anchors.py`
does not read. torch and Inductor decompose products with M, N or K of 1 into a multiply and a sum.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import target_name

_OF_PRODUCTS = re.compile(
    r"(?:^|_)(?:(?:gemm|matmul|(?:b|add)?mm|linear_cross_entropy)(?:_|$)|q?linear(?:_pointwise)?$)"
    r"|^(?:(?:bf|f|i)\d+){3}(?:_|$)"
)
"""Words in the names of operators and kernels that multiply matrices, and names that begin with the dtypes of
A, of B and of the result, such as `bf16i4bf16_rowwise`."""

_IN_PLAIN_ATEN = {
    "mslk.f8f8bf16": "with KernelPreference.TORCH, torchao calls _scaled_mm, which is fused",
    "torch_nn._linear_cross_entropy": "without LinearCrossEntropyOptions, torch calls mm, which is fused",
}
"""Options that give a product that the graph shows, by the beginning of the name of the op in its place."""

_OF_TRITON = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")
"""The nodes of Triton kernels that a program launches itself."""


def opaque_product(node: fx.Node) -> str | None:
    """The name of an operator or of a Triton kernel that by its name multiplies matrices, such as torchao's
    `ao::blockwise_fp8_gemm`, vLLM's `_C::cutlass_scaled_mm` and aten's `_weight_int4pack_mm`. None for other
    nodes."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _OF_TRITON:
        name = _kernel_name(node.kwargs["kernel_idx"])
        return f"the Triton kernel {name}" if _OF_PRODUCTS.search(name) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    return target_name(node) if _is_named_as_product(node.target) else None


def in_plain_aten(name: str | None) -> str:
    """The option by which the graph shows the opaque product of this name, as the end of a sentence; empty if
    none is known."""
    known = (how for start, how in _IN_PLAIN_ATEN.items() if name is not None and name.startswith(start))
    return next((f"; {how}" for how in known), "")


@cache
def _is_named_as_product(op: torch._ops.OpOverload) -> bool:
    namespace, name = op._schema.name.split("::")
    return namespace != "cute_backend" and _OF_PRODUCTS.search(name) is not None


_DECOMPOSED = re.compile(r"aten\.(?:(?:add|b|badd|baddb)?mm|(?:add)?mv|v?dot)\b")
"""Products that torch and Inductor decompose."""


def decomposed_product(node: fx.Node) -> str | None:
    """The name of the product that is computed by this node, a sum of products of elements or, if K is 1, a
    multiply. None for other nodes."""
    product = _origin(node)
    is_sum = product is not None and _is_sum(node)
    is_multiply = target_name(node) == "aten.mul.Tensor" and len(node.all_input_nodes) == 2
    is_whole = is_multiply and not any(_is_sum(user) and _origin(user) == product for user in node.users)
    return product if is_sum or is_whole else None


def _is_sum(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket is torch.ops.aten.sum


def _origin(node: fx.Node) -> str | None:
    """The name of the product that a node was decomposed from; None if it comes from no product."""
    name = str(node.meta.get("original_aten"))
    return name if node.op == "call_function" and _DECOMPOSED.match(name) else None


def _kernel_name(index: Any) -> str:
    """The name of the function behind a Triton kernel, its autotuner and its heuristics."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(index)
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))
