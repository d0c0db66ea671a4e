"""A profiler shows each kernel of a fused program by the name of its entry in the cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import cute_backend

pytestmark = pytest.mark.gpu


def silu_and_maxima(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.silu(a @ b)
    return y, y.abs().amax(-1)


def test_torch_profiler_shows_the_product_and_its_second_stage_by_name() -> None:
    a = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    (region,) = cute_backend.explain(silu_and_maxima, a, b).regions
    entry = region.kernel().entry
    compiled = torch.compile(silu_and_maxima, backend="cute")
    compiled(a, b)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        compiled(a, b)
        torch.cuda.synchronize()
    shown = {event.name for event in seen.events() if "cute_" in event.name}
    assert shown == {f"{entry}_cutlass_0", f"{entry}_finish_cutlass_1"}
