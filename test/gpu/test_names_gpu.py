"""A profiler shows each kernel of a fused program by the name of its entry in the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import cute_backend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("axis", "kernels"),
    [(-1, ["{}_cutlass_0"]), (0, ["{}_cutlass_0", "{}_finish_cutlass_1"])],
    ids=["in the last tile", "in a second kernel"],
)
def test_torch_profiler_shows_kernels_by_name(axis: int, kernels: list[str]) -> None:
    """Maxima of rows are finished in a row's last tile, those of columns by a second kernel."""

    def silu_and_maxima(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.silu(a @ b)
        return y, y.abs().amax(axis)

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
    assert shown == {kernel.format(entry) for kernel in kernels}


def test_a_profiler_shows_the_tile_that_was_named(fresh_compiler: None) -> None:
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    for tile in ("128x256_2x1", "64x128_2x1"):
        torch._dynamo.reset()
        layer = torch.compile(
            lambda x, w: F.relu(F.linear(x, w)), backend="cute", options={"cute_backend.tile": tile}
        )
        right = F.relu(F.linear(x, w))
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            torch.testing.assert_close(layer(x, w), right)
            torch.cuda.synchronize()
        (name,) = {event.name for event in seen.events() if "cute_mm" in event.name}
        assert name.startswith(f"cute_mm_relu_{tile.partition('_')[0]}_"), name


def test_kernels_that_two_threads_build_at_once_keep_their_names() -> None:
    a = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    epilogues = {"mm_tanh": lambda y: y.tanh(), "mm_sigmoid_exp": lambda y: y.sigmoid().exp()}

    def run(epilogue):
        return cute_backend.gemm(a, b, epilogue=epilogue)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, epilogues.values()))
    for result, epilogue in zip(results, epilogues.values(), strict=True):
        torch.testing.assert_close(result, epilogue((a @ b).float()).bfloat16(), atol=0.02, rtol=0.02)
    for words, epilogue in epilogues.items():
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run(epilogue)
            torch.cuda.synchronize()
        (name,) = {event.name for event in seen.events() if "cute_" in event.name}
        assert name.startswith(f"cute_{words}_"), name
