"""A package of AOTInductor, made with the pass: another process loads it and runs what was fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from cute_backend.fx_walk import epilogue_pass
from support.packages import BF16, ROWS, make_package, package_of, serve

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


@pytest.mark.exhaustive
def test_a_package_runs_fused_in_another_process(fresh_compiler: None, tmp_path: Path) -> None:
    package, saved = make_package(tmp_path, k=32, n=48, rows=(64, 17), device="cpu")
    assert dict(counters["cute_backend"]) == {"anchors": 1, "regions": 1}
    refused, fused = serve(LOADS, package, saved)
    assert refused == "REFUSED Could not find schema for cute_backend::gemm_epilogue_into."
    assert fused == "FUSED 2"


def test_a_package_is_made_with_its_kernels(
    fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may end before a launch, and with it what is built in the background. C++ is written, and
    not compiled."""
    asked: list[bool] = []
    monkeypatch.setattr(epilogue_pass, "announce", lambda problems, device, *, at_once: asked.append(at_once))
    with inductor_config.patch({"aot_inductor.package_cpp_only": True}):
        make_package(tmp_path, k=32, n=48, rows=(64, 17), device="cpu")
    torch.compile(lambda a, b: (a @ b).relu(), backend="cute")(*torch.ones(2, 16, 16).bfloat16())
    assert asked == [True, False]


class Forms(torch.nn.Module):
    """A region of every form that the op takes: without operands besides A and B, with two results, with a
    reduction, in fp8, and with a result in a cache."""

    def forward(
        self, x: Tensor, weights: Tensor, rows_fp8: Tensor, fp8: Tensor, tokens: Tensor, keys: Tensor
    ) -> Any:
        bare, gate, up, two, reduced, key = weights
        one = torch.ones(())
        plain = F.relu(x @ bare)
        gated = F.relu(x @ gate) * (x @ up)
        wide = (x @ two).float()
        both = F.relu(wide), (wide * 2).to(BF16)
        largest = F.relu(x @ reduced).amax(-1)
        scaled = F.relu(torch._scaled_mm(rows_fp8, fp8, one, one, out_dtype=BF16))
        keys[:, :, 3:5] = F.linear(tokens, key.t()).relu().unflatten(-1, (-1, 32)).transpose(1, 2)
        return plain, gated, *both, largest, scaled, keys.sum()


RUNS_FORMS = """
import sys
import torch
import cute_backend

package, saved = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
for args, expected, written in torch.load(saved):
    for result, right in zip(model(*args), expected, strict=True):
        assert torch.equal(result, right) and result.stride() == right.stride(), (result, right)
    assert torch.equal(args[-1], written)
    print("RIGHT", args[0].shape[0])
"""


@pytest.mark.exhaustive
@pytest.mark.settings(shared_launches=False)
def test_packages_run_regions_of_every_form(fresh_compiler: None, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(BF16)

    calls, saved = [], tmp_path / "expected.pt"
    for rows in (24, 5):
        a_fp8, b_fp8 = whole(rows, 32).to(torch.float8_e4m3fn), whole(64, 32).to(torch.float8_e4m3fn).t()
        keys = torch.zeros(2, 2, 8, 32, dtype=BF16)
        args = [whole(rows, 32), whole(6, 32, 64), a_fp8, b_fp8, whole(2, 2, 32), keys]
        keys = args[-1].clone()
        expected = Forms()(*args[:-1], keys)
        calls.append((args, expected, keys))
    torch.save(calls, saved)
    by_rows = dict.fromkeys(("x", "weights", "rows_fp8", "fp8", "tokens", "keys"))
    by_rows["x"] = by_rows["rows_fp8"] = {0: ROWS}
    package = package_of(tmp_path, Forms(), calls[0][0], by_rows)
    assert counters["cute_backend"]["regions"] == 6
    assert serve(RUNS_FORMS, package, saved) == ["RIGHT 24", "RIGHT 5"]
