"""Shape rules for ops that torch has only on a GPU, so that programs with them are traced without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_GROUPED = "_scaled_grouped_mm_v2"


@contextmanager
def shape_rules() -> Iterator[None]:
    """Registers a shape rule for the second version of `_scaled_grouped_mm`, which `scaled_grouped_mm` calls,
    if torch has none. Without a rule, torch runs the op itself on tensors of zeros, which needs a GPU."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_GROUPED}", "Meta"):
        yield
        return
    with torch.library._scoped_library("aten", "IMPL", "Meta") as library:
        library.impl(_GROUPED, _grouped)
        yield


def _grouped(a: Tensor, b: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """The result for A (M, K) or (G, M, K) and B (K, N) or (G, K, N): a group's axis is first, if it has one.
    A and B are followed by three lists for each of them, the offsets, the bias and the dtype."""
    offsets: Any = arguments[6] if len(arguments) > 6 else options.get("offs")
    dtype = arguments[8] if len(arguments) > 8 else options.get("out_dtype")
    sizes = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        sizes.insert(0, offsets.shape[0] if a.dim() == 2 else a.shape[0])
    return a.new_empty(sizes, dtype=dtype or torch.bfloat16)
