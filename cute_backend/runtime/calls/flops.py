"""Floating-point operations of the ops, for torch.

`FlopCounterMode` asks for them, and so do passes of Inductor: to them, an op with a formula is a product that
can hide a collective, and one without is pointwise work. A product of M, N and K counts 2 * M * N * K, as
torch counts its own; epilogues do not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cute_backend.runtime.arguments.operands import Size, Tensors, b_shape, parse_spec
from cute_backend.runtime.calls.sample_op import passes_of


@register_flop_formula(
    [torch.ops.cute_backend.gemm_epilogue, torch.ops.cute_backend.gemm_epilogue_into], get_raw=True
)
def of_products(a: Tensors, b: Tensors, loads: Tensors, spec: str, *_: Any, **__: Any) -> Size:
    """The operations of all products of a spec. Every row of A counts, and every value of K, since only the
    device knows where groups end."""
    parsed = parse_spec(spec)
    columns = sum(b_shape(parsed.product, each)[-1] for each in b[: parsed.b_count])
    return 2 * a[0].numel() * parsed.product.a_dtype.values * columns


@register_flop_formula(torch.ops.cute_backend.sample, get_raw=True)
def _of_sample(
    hidden: Tensor, weight: Tensor, _: Any, seed: Tensor | None, num_samples: int, *others: Any, **__: Any
) -> Size:
    return_logprob = others[-1]
    passes = 1 if seed is None else passes_of(num_samples, return_logprob)
    return 2 * hidden.numel() * weight.shape[0] * passes
