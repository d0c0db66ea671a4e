"""Every kernel that this tree ships: those of the golden modules, and those of every configuration offered.

`compare_kernels.py` runs this file in each of two trees. If the way to list or build kernels changes, change
it here too, and keep the names of the kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from cute_backend.fx_walk.collect import collect
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import Alignment, Arch, TileConfig, offered, plan, unserved
from cute_backend.runtime.calls.sample_op import SAMPLES_PER_PASS
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import EpilogueSpec
from support.draws import recorded
from support.epilogues import BLOCKWISE, EPILOGUES, Problem
from support.golden_regions import ARCHS, NAMES, the_region
from support.heavy import HEAVY, heavy_inputs

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
"""Ways to draw tokens. The last two keep the most values in registers that a pass may."""


@cache
def traced_spec(name: str) -> EpilogueSpec:
    """A shared epilogue as the walker finds it. A process traces it once, which takes 0.2 to 0.4 seconds."""
    epilogue = {**EPILOGUES, **BLOCKWISE}[name]
    (report,) = collect(epilogue.fn, epilogue.inputs(Problem(256, 256, 256)))
    return report.regions[0].spec


@cache
def epilogue_spec(name: str, fast_accum: bool) -> EpilogueSpec:
    """A shared epilogue with its fp8 sums promoted or not, whatever the program asks for."""
    spec = traced_spec(name)
    return replace(spec, accumulators=tuple(replace(a, fast_accum=fast_accum) for a in spec.accumulators))


def is_fp8(name: str) -> bool:
    """Whether a shared epilogue multiplies fp8, the only sums that are promoted."""
    a, *_ = EPILOGUES[name].inputs(Problem(16, 16, 16))
    return a.is_floating_point() and a.element_size() == 1


@cache
def heavy_spec(name: str) -> EpilogueSpec:
    """An epilogue of many planes, which are read by element, or by TMA if they fit in shared memory."""
    (report,) = collect(HEAVY[name], heavy_inputs(256, 256, 256))
    return report.regions[0].spec


@cache
def sampling_spec(name: str) -> EpilogueSpec:
    """The last pass of a way to draw tokens."""
    how = SAMPLING[name]
    dtype = torch.float8_e4m3fn if "scale_hidden" in how else torch.bfloat16
    calls, _ = recorded(torch.ones(2, 16).to(dtype), torch.ones(3, 16).to(dtype), seed=0, **how)
    return calls[-1][3]


def code_of(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> str:
    """A kernel's module without its header, which differs between alignments even if their code is the
    same."""
    return emit(plan(spec, config, alignment)).split('"""')[2]


@dataclass(frozen=True)
class Shipped:
    """A kernel, its label, and a digest that kernels with the same code share."""

    name: str
    kernel: Kernel
    code: str


def shipped(wanted: Callable[[str], bool] = lambda label: True) -> Iterator[Shipped]:
    """The kernels of the tables whose labels are `wanted`. "golden/<epilogue>-<architecture>" is one kernel;
    "configurations/<spec>-<architecture>" is many, whose labels end in "/<tile>-<alignment>".
    """
    for name in EPILOGUES:
        for arch in ARCHS:
            if name in NAMES[arch] and wanted(label := f"golden/{name}-{arch}"):
                kernel = the_region(name, arch).kernel()
                yield _shipped(label, kernel.plan.spec, kernel.plan.tile, kernel.plan.alignment)
    for label, arch, spec_of in _tables():
        if wanted(label):
            spec = spec_of()
            for config in offered(arch, spec):
                for alignment in Alignment:
                    yield _shipped(f"{label}/{config.name}-{alignment.value}", spec, config, alignment)


def _tables() -> Iterator[tuple[str, Arch, Callable[[], EpilogueSpec]]]:
    """The name of each table of configurations, its architecture, and a function that makes its spec."""
    for arch in Arch:
        for name in EPILOGUES:
            if not EPILOGUES[name].runs_on(arch):
                continue
            yield f"configurations/{name}-{arch.value}", arch, partial(epilogue_spec, name, True)
            if arch is Arch.SM90A and is_fp8(name):
                label = f"configurations/{name}-promoted-{arch.value}"
                yield label, arch, partial(epilogue_spec, name, False)
        for name in served(HEAVY, heavy_spec, arch):
            yield f"configurations/heavy {name}-{arch.value}", arch, partial(heavy_spec, name)
        for name in served(SAMPLING, sampling_spec, arch):
            yield f"configurations/sampling {name}-{arch.value}", arch, partial(sampling_spec, name)


def served(names: Iterable[str], spec_of: Callable[[str], EpilogueSpec], arch: Arch) -> list[str]:
    """The names of the specs for which an architecture has the instructions."""
    return [name for name in names if unserved(spec_of(name), arch.target) is None]


def _shipped(name: str, spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Shipped:
    identity = spec.to_json() + code_of(spec, config, alignment)
    return Shipped(
        name, Kernel(plan(spec, config, alignment)), hashlib.sha256(identity.encode()).hexdigest()[:16]
    )


def built(kernel: Kernel) -> dict[str, Any]:
    """A compiled kernel: its PTX and cubin, registers per thread, bytes spilled, and bytes of shared
    memory."""
    made = build(kernel)
    return {
        "ptx": made.ptx,
        "cubin": made.cubin,
        "registers": made.registers,
        "spill bytes": made.spill_bytes,
        "shared memory": made.smem_bytes,
    }
