"""A package of AOTInductor on a GPU: another process loads it and runs the kernels that were built for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import cute_backend

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


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(256, 512, dtype=torch.bfloat16)
        with torch.no_grad():  # sums of products of small integers are exact, however they are rounded
            for parameter in self.parameters():
                parameter.copy_((torch.arange(parameter.numel()).view(parameter.shape) % 97 == 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)) + 1


def test_a_package_runs_its_kernels_in_another_process(fresh_compiler: None, tmp_path: Path) -> None:
    model, package, saved = Model().cuda().eval(), tmp_path / "model.pt2", tmp_path / "expected.pt"
    x = (torch.arange(300 * 256, device="cuda").view(300, 256) % 5 - 2).bfloat16()
    with torch.no_grad():
        torch.save([(x[:m].cpu(), model(x[:m]).cpu()) for m in (300, 64, 17)], saved)
        rows = torch.export.Dim("rows", min=2, max=512)
        exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: rows}})
    torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(package),
        inductor_configs={"post_grad_custom_pre_pass": cute_backend.epilogue_pass},
    )
    assert counters["cute_backend"]["regions"] == 1
    done = subprocess.run(
        [sys.executable, "-c", SERVES, str(package), str(saved)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counted, kernels = done.stdout.splitlines()
    assert counted == "{}", "kernels were built, or replayed, that the first process should have built"
    assert "cute_mm_bias_relu" in kernels
