"""No configuration in the table spills, under any shared epilogue, aligned or not, promoted or not, nor where
tokens are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draws import recorded
from epilogues import EPILOGUES, Problem
from heavy import HEAVY, heavy_inputs

from cute_backend.fx_walk.collect import collect
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import SMEM_BYTES, Arch, Variant, offered
from cute_backend.runtime.build import build
from cute_backend.runtime.kernel import Kernel
from cute_backend.runtime.sample import SAMPLES_PER_PASS
from cute_backend.spec import EpilogueSpec


def spec_of(name: str, fast_accum: bool) -> EpilogueSpec:
    """A shared epilogue with its fp8 sums promoted or not, whatever the program says of them."""
    epilogue = EPILOGUES[name]
    (report,) = collect(epilogue.fn, epilogue.inputs(Problem(256, 256, 256)))
    spec = report.regions[0].spec
    return replace(spec, accumulators=tuple(replace(a, fast_accum=fast_accum) for a in spec.accumulators))


def assert_none_spills(arch: Arch, spec: EpilogueSpec) -> None:
    faults, built_before = [], set()
    for config in offered(arch, spec):
        for variant in Variant:
            code = emit(spec, config, variant).split('"""')[2]
            if code in built_before:
                continue
            built_before.add(code)
            built = build(Kernel(spec, config, variant))
            if built.spill_bytes or built.smem_bytes > SMEM_BYTES:
                figures = f"{built.spill_bytes} bytes spilled, {built.smem_bytes} of shared memory"
                faults.append(f"{config.name}, {variant.value}: {figures}")
    assert not faults


@pytest.mark.parametrize(
    ("arch", "fast_accum"),
    [(Arch.SM90A, True), (Arch.SM90A, False), (Arch.SM100A, True)],
    ids=["sm_90a", "sm_90a-promoted", "sm_100a"],
)
@pytest.mark.parametrize("name", EPILOGUES)
def test_no_kernel_spills_or_outgrows_shared_memory(name: str, arch: Arch, fast_accum: bool) -> None:
    spec = spec_of(name, fast_accum)
    if not fast_accum and spec.accumulators[0].a_dtype.bits > 8:
        pytest.skip("only fp8 sums are promoted")
    assert_none_spills(arch, spec)


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", HEAVY)
def test_many_planes_do_not_spill(name: str, arch: Arch) -> None:
    """Read by element, or by TMA as far as they fit."""
    (report,) = collect(HEAVY[name], heavy_inputs(256, 256, 256))
    assert_none_spills(arch, report.regions[0].spec)


FP8 = {"scale_hidden": torch.ones(2), "scale_weight": torch.ones(3), "bias": torch.zeros(3)}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {**FP8, "temperature": 0},
    "one": {"bias": torch.zeros(3)},
    "four": {**FP8, "num_samples": 4, "temperature": torch.ones(2)},
    "with logarithms": {
        **FP8,
        "num_samples": SAMPLES_PER_PASS - 1,
        "temperature": torch.ones(2),
        "return_logprob": True,
    },
    "a further pass": {**FP8, "num_samples": 2 * SAMPLES_PER_PASS, "temperature": torch.ones(2)},
}
"""The last two have all that a pass may keep in registers."""


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", SAMPLING)
def test_no_sampling_kernel_spills(name: str, arch: Arch) -> None:
    how = SAMPLING[name]
    dtype = torch.float8_e4m3fn if "scale_hidden" in how else torch.bfloat16
    calls, _ = recorded(torch.ones(2, 16).to(dtype), torch.ones(3, 16).to(dtype), seed=0, **how)
    assert_none_spills(arch, calls[-1][3])
