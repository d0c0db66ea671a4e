"""No configuration in the table spills, under any shared epilogue, aligned or not, promoted or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from epilogues import EPILOGUES, Problem

from cute_backend.fx_walk.collect import collect
from cute_backend.memory_ops import Variant
from cute_backend.runtime.build import build
from cute_backend.runtime.kernel import Kernel
from cute_backend.spec import EpilogueSpec
from cute_backend.templates.config import SMEM_BYTES, Arch, table


def spec_of(name: str, fast_accum: bool) -> EpilogueSpec:
    """A shared epilogue with its fp8 sums promoted or not, whatever the program says of them."""
    epilogue = EPILOGUES[name]
    (report,) = collect(epilogue.fn, epilogue.inputs(Problem(256, 256, 256)))
    spec = report.regions[0].spec
    return replace(spec, accumulators=tuple(replace(a, fast_accum=fast_accum) for a in spec.accumulators))


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
    faults = []
    for config in table(arch, spec):
        for variant in Variant:
            built = build(Kernel(spec, config, variant))
            if built.spill_bytes or built.smem_bytes > SMEM_BYTES:
                figures = f"{built.spill_bytes} bytes spilled, {built.smem_bytes} of shared memory"
                faults.append(f"{config.name}, {variant.value}: {figures}")
    assert not faults
