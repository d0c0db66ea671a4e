"""A package of AOTInductor on a GPU: another process loads it and runs the kernels that were built for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from support.packages import make_package, serve

pytestmark = pytest.mark.gpu

SERVES = """
import sys
import torch
import cute_backend
from torch._dynamo.utils import counters

package, saved = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
for x, expected in torch.load(saved):
    assert torch.equal(model(x.cuda()).cpu(), expected), x.shape
print(dict(counters["cute_backend"]))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
    model(x.cuda())
    torch.cuda.synchronize()
print(sorted({event.name for event in seen.events() if "cute_mm" in event.name}))
"""


def test_a_package_runs_its_kernels_in_another_process(fresh_compiler: None, tmp_path: Path) -> None:
    package, saved = make_package(tmp_path, k=256, n=512, rows=(300, 64, 17), device="cuda")
    assert counters["cute_backend"]["regions"] == 1
    counted, kernels = serve(SERVES, package, saved)
    assert counted == "{}", "kernels were built, or replayed, that the first process should have built"
    assert "cute_mm_bias_relu" in kernels
