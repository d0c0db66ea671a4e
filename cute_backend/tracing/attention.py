"""Attention as torch has it on a GPU, for a program that is traced without one.

`scaled_dot_product_attention` becomes one of several ops, or products and a softmax, by its operands and by
the device. A CPU's op takes any mask, so queries, keys and values are its operands as they are. A GPU's fused
ops refuse some masks and heads, and the products that then take their place read other values, which the
kernels of queries, keys and values compute. The rules here are those of torch 2.11 to 2.13 on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

_SPELLED = torch._C._nn.scaled_dot_product_attention

_MOST_OF_CUDNN, _MOST_OF_FLASH = 128, 256
"""The most columns of a head that cuDNN's and FlashAttention's kernels take."""

_CUDNN_MAJORS = (9, 10)
"""The compute capabilities, by major number, on which torch prefers cuDNN's attention."""


def attend_as_on(capability: tuple[int, int], gm: fx.GraphModule) -> None:
    """Lets the attention of one of Dynamo's graphs, and of those that it calls, be traced as on a GPU of a
    compute capability. The graph then runs on fake tensors alone."""

    def attention(*args: Any, **options: Any) -> Tensor:
        return _attention(capability, *args, **options)

    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=_SPELLED):
                node.target = attention
            module.recompile()


def _attention(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` in the ops of a GPU; queries are (B, H, S, D)."""
    # Autocast would change the operands of torch's own op, and of no other. On a GPU torch chooses itself.
    if torch.is_autocast_enabled("cpu") or query.device.type != "cpu":
        return _SPELLED(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    operands = query, key, value
    keeps_sums = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
    is_dense = _are_dense(operands, enable_gqa) and (attn_mask is None or _is_one(attn_mask.stride(-1)))
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    if is_dense and capability[0] in _CUDNN_MAJORS and _may_be_cudnn(operands):
        rest: Any = mask, keeps_sums, dropout_p, is_causal, False
        return aten._scaled_dot_product_cudnn_attention(*operands, *rest, scale=scale)[0]
    if is_dense and mask is None and _may_be_flash(operands, is_causal):
        return _flash(operands, dropout_p, is_causal, scale)
    if is_dense and _is_aligned(query) and _is_aligned(value) and _are_alike(query, key):
        rest = mask, keeps_sums, dropout_p, is_causal
        return aten._scaled_dot_product_efficient_attention(*operands, *rest, scale=scale)[0]
    rest = mask, dropout_p, is_causal
    return aten._scaled_dot_product_attention_math(*operands, *rest, scale=scale, enable_gqa=enable_gqa)[0]


def _are_dense(operands: Sequence[Tensor], enable_gqa: bool) -> bool:
    """Whether a fused kernel can read queries, keys and values by their dtype, axes, batches, heads and
    strides."""
    query, key, value = operands
    if any(each.dim() != 4 or each.dtype is not query.dtype for each in operands):
        return False
    heads = [each.shape[1] for each in operands]
    fits = guard_or_false(heads[1] == heads[2]) and (
        guard_or_false(heads[0] % heads[1] == 0) if enable_gqa else guard_or_false(heads[0] == heads[1])
    )
    same_batch = all(guard_or_false(each.shape[0] == query.shape[0]) for each in (key, value))
    return fits and same_batch and all(_is_one(each.stride(-1)) for each in operands)


def _may_be_cudnn(operands: Sequence[Tensor]) -> bool:
    query, key, value = operands
    return (
        query.dtype in _HALF
        and all(_is_aligned(each) and _has_at_most(each, _MOST_OF_CUDNN) for each in (query, value))
        and guard_or_false(key.shape[2] != 1)
    )


def _may_be_flash(operands: Sequence[Tensor], is_causal: bool) -> bool:
    query, key, value = operands
    return (
        query.dtype in _HALF
        and _are_alike(query, key)
        and _are_alike(query, value)
        and _has_at_most(query, _MOST_OF_FLASH)
        and not (is_causal and not guard_or_false(query.shape[2] == key.shape[2]))
    )


def _flash(operands: Sequence[Tensor], dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """FlashAttention's op, which takes heads of a multiple of 8 columns."""
    columns = operands[0].shape[-1]
    if scale is None:
        scale = float(columns) ** -0.5
    if columns % 8 == 0:
        rest: Any = dropout_p, is_causal, False
        return aten._scaled_dot_product_flash_attention(*operands, *rest, scale=scale)[0]
    padded = [torch.nn.functional.pad(each, (0, 8 - columns % 8)) for each in operands]
    return _flash(padded, dropout_p, is_causal, scale)[..., :columns]


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return guard_or_false(one.shape[-1] == other.shape[-1])


def _has_at_most(tensor: Tensor, columns: int) -> bool:
    return guard_or_false(tensor.shape[-1] <= columns)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether a head's columns take a multiple of 16 bytes."""
    return guard_or_false(tensor.shape[-1] * tensor.element_size() % 16 == 0)


def _is_one(stride: Any) -> bool:
    return guard_or_false(stride == 1)
