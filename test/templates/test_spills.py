"""No configuration in the table spills, under any of the shared epilogues, in either alignment."""

from __future__ import annotations

import pytest
from epilogues import EPILOGUES, Problem

from cute_backend.fx_walk.collect import collect
from cute_backend.memory_ops import Variant
from cute_backend.runtime.build import build
from cute_backend.runtime.kernel import Kernel
from cute_backend.templates.config import SMEM_BYTES, Arch, table


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", EPILOGUES)
def test_no_kernel_spills_or_outgrows_shared_memory(name: str, arch: Arch) -> None:
    epilogue = EPILOGUES[name]
    (report,) = collect(epilogue.fn, epilogue.inputs(Problem(256, 256, 256)))
    spec = report.regions[0].spec
    spilling = {}
    for config in table(arch, spec):
        for variant in Variant:
            built = build(Kernel(spec, config, variant))
            assert built.smem_bytes <= SMEM_BYTES
            if built.spill_bytes:
                spilling[config.name, variant.value] = built.spill_bytes
    assert not spilling
