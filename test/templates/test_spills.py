"""No configuration in the table spills, under any shared epilogue, aligned or not, promoted or not, nor where
tokens are drawn."""

from __future__ import annotations

import pytest
from epilogues import EPILOGUES
from heavy import HEAVY
from shipped import SAMPLING, code_of, epilogue_spec, heavy_spec, is_fp8, sampling_spec

from cute_backend.planning import Arch, Variant, offered
from cute_backend.runtime.build import build
from cute_backend.runtime.kernel import Kernel
from cute_backend.spec import EpilogueSpec


def assert_none_spills(arch: Arch, spec: EpilogueSpec) -> None:
    faults, built_before = [], set()
    for config in offered(arch, spec):
        for variant in Variant:
            code = code_of(spec, config, variant)
            if code in built_before:
                continue
            built_before.add(code)
            built = build(Kernel(spec, config, variant))
            if built.spill_bytes or built.smem_bytes > arch.target.smem_bytes:
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
    if not (fast_accum or is_fp8(name)):
        pytest.skip("only fp8 sums are promoted")
    assert_none_spills(arch, epilogue_spec(name, fast_accum))


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", HEAVY)
def test_many_planes_do_not_spill(name: str, arch: Arch) -> None:
    """Read by element, or by TMA as far as they fit."""
    assert_none_spills(arch, heavy_spec(name))


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", SAMPLING)
def test_no_sampling_kernel_spills(name: str, arch: Arch) -> None:
    assert_none_spills(arch, sampling_spec(name))
