"""A package of AOTInductor, made with the pass: another process loads it and runs what was fused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import cute_backend

BF16 = torch.bfloat16

CHEAPLY = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
"""The C++ compiler takes nearly all of the time. Options that this torch does not have are left out."""

LOADS = """
import sys
import torch

package, saved = sys.argv[1:]
run = torch._inductor.aoti_load_package
try:
    run(package)
except RuntimeError as error:
    print("REFUSED", next(line for line in str(error).splitlines() if "schema" in line))

import cute_backend.replay

replayed = []
replay = cute_backend.replay.replay

def counting(spec, *operands):
    replayed.append(spec.key)
    return replay(spec, *operands)

cute_backend.replay.replay = counting
model = run(package)
for x, expected in torch.load(saved):
    assert torch.equal(model(x), expected), x.shape
print("FUSED", len(replayed))
"""
"""The process that serves. The CPU's implementation of the op looks the replay up at each call."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(32, 48, dtype=BF16)
        with torch.no_grad():  # sums of products of small integers are exact, however they are rounded
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 3 - 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)) + 1


def test_a_package_runs_fused_in_another_process(fresh_compiler: None, tmp_path: Path) -> None:
    model, package, saved = Model().eval(), tmp_path / "model.pt2", tmp_path / "expected.pt"
    x = torch.arange(64 * 32).view(64, 32).remainder(5).sub(2).to(BF16)
    rows = torch.export.Dim("rows", min=2, max=512)
    with torch.no_grad():
        exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: rows}})
        torch.save([(x[:m].clone(), model(x[:m])) for m in (64, 17)], saved)
    known = inductor_config.get_config_copy()
    torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(package),
        inductor_configs={
            "post_grad_custom_pre_pass": cute_backend.epilogue_pass,
            **{name: value for name, value in CHEAPLY.items() if name in known},
        },
    )
    assert dict(counters["cute_backend"]) == {"anchors": 1, "regions": 1}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(package), str(saved)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    refused, fused = done.stdout.splitlines()
    assert refused == "REFUSED Could not find schema for cute_backend::gemm_epilogue."
    assert fused == "FUSED 2"
