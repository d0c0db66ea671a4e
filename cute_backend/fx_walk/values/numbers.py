"""Python numbers: as the chain holds them, and as tensors of a dtype hold them."""

from __future__ import annotations

from typing import Any

import torch

from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.spec import Const

_INT32 = torch.iinfo(torch.int32)


def number(value: Any) -> Const:
    """A Python number as the chain holds it. Raises Refused if it is symbolic, or an integer beyond int32."""
    if not isinstance(value, (bool, int, float)):
        raise Refused(Reason.SYMBOLIC_SCALAR, value=value)
    if isinstance(value, int) and not _INT32.min <= value <= _INT32.max:
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=value, dtype="beyond int32")
    return Const(value)


def round_number(value: float, dtype: torch.dtype) -> float:
    """A number rounded to fp32, and then to a float dtype."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        exact = torch.full((), value, dtype=torch.float64, device="cpu")
        return float(exact.to(torch.float32).to(dtype).to(torch.float32).item())


def wrap_number(value: int, dtype: torch.dtype) -> int:
    """The low bits of an integer, as an integer dtype holds them."""
    low = torch.iinfo(dtype).min
    return (value - low) % 2 ** torch.iinfo(dtype).bits + low
