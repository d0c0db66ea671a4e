"""A package of AOTInductor, made with the pass: another process loads it and runs what was fused."""

from __future__ import annotations

from pathlib import Path

from torch._dynamo.utils import counters

from support.packages import make_package, serve

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


def test_a_package_runs_fused_in_another_process(fresh_compiler: None, tmp_path: Path) -> None:
    package, saved = make_package(tmp_path, k=32, n=48, rows=(64, 17), device="cpu")
    assert dict(counters["cute_backend"]) == {"anchors": 1, "regions": 1}
    refused, fused = serve(LOADS, package, saved)
    assert refused == "REFUSED Could not find schema for cute_backend::gemm_epilogue."
    assert fused == "FUSED 2"
