"""Every shared epilogue in every configuration that ships, aligned and not: `make test-sim`."""

from __future__ import annotations

import pytest
import torch

from cute_backend.fx_walk.collect import collect
from cute_backend.planning import Alignment, Arch, TileConfig, offered
from cute_backend.simulator.simulate import Machine, reference, run
from cute_backend.spec import LoadKind
from support.epilogues import EPILOGUES, Problem
from support.golden_regions import NAMES, PROGRAMS, fused, the_region
from support.reference import TOLERANCE, as_tuple, relative_error

pytestmark = pytest.mark.sim

SEEDS = (None, 1, 2)
KERNELS = pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, id=f"{name}-{arch.value}")
        for name in EPILOGUES
        for arch in Arch
        if EPILOGUES[name].runs_on(arch)
    ],
)


GOLDEN = [
    pytest.param(name, arch, id=f"{name}-{arch.value}")
    for name, epilogue in PROGRAMS.items()
    for arch in Arch
    if name in NAMES[arch.value]
]


@pytest.mark.parametrize(("name", "arch"), GOLDEN)
def test_no_seed_changes_a_golden_module(name, arch):
    """The kernels that `make test` simulates with one seed."""
    epilogue = PROGRAMS[name]
    m, n, k = 144 if epilogue.square else 200, 144 if name in EPILOGUES else 256, 256  # whole heads and pairs
    inputs = epilogue.inputs(Problem(m, n, k))
    config = the_region(name, arch.value).kernel().plan.tile
    first = None
    for seed in range(1, 9):
        with fused(name):
            outputs = as_tuple(run(epilogue.fn, inputs, Machine(arch, seed, config, clusters=1)).outputs)
        first = first or outputs
        for actual, right in zip(outputs, first, strict=True):
            assert torch.equal(actual.double(), right.double()), (config.name, seed)


@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@KERNELS
def test_the_configuration_table(name, arch, alignment):
    epilogue = EPILOGUES[name]
    # What TMA takes, and what it does not; swiglu7 reads rows of 2 N in bf16, whole multiples of 16 bytes.
    n = 304 if alignment is Alignment.TMA else 300 if name == "swiglu7" else 301
    m = n if epilogue.square else 330
    inputs = epilogue.inputs(Problem(m, n, 528))
    expected = as_tuple(reference(epilogue.fn, inputs))
    [graph] = collect(epilogue.fn, inputs, dynamic=False)
    spec = graph.regions[0].spec
    if not (spec.planes or spec.loads_of(LoadKind.EXACT)):
        alignment = Alignment.TMA  # vectors and reductions need none
    for config in offered(arch, spec):
        for seed in SEEDS:
            simulation = run(epilogue.fn, inputs, Machine(arch, seed, config, clusters=1))
            [launch] = simulation.launches
            assert launch.kernel.plan.alignment is alignment
            for actual, right in zip(as_tuple(simulation.outputs), expected, strict=True):
                assert relative_error(actual, right) < TOLERANCE[actual.dtype], (config.name, seed)


@pytest.mark.parametrize("arch", Arch, ids=lambda arch: arch.value)
def test_clusters_with_ctas_without_rows(arch):
    """Each cluster that ships, with the first epilogue that it serves: every multiple of 64 rows up to two
    clusters of them."""
    n, k = 80, 144
    clusters: dict[TileConfig, str] = {}
    for name, epilogue in EPILOGUES.items():
        [graph] = collect(epilogue.fn, epilogue.inputs(Problem(n, n, k)), dynamic=False)
        configs = offered(arch, graph.regions[0].spec)
        clusters = {**{config: name for config in configs if config.cluster_size > 1}, **clusters}
    for config, name in clusters.items():
        for m in range(64, 2 * config.cta_rows * config.cluster_m + 1, 64):
            epilogue = EPILOGUES[name]
            inputs = epilogue.inputs(Problem(m, m if epilogue.square else n, k))
            simulation = run(epilogue.fn, inputs, Machine(arch, 1, config, clusters=1))
            expected = as_tuple(reference(epilogue.fn, inputs))
            for actual, right in zip(as_tuple(simulation.outputs), expected, strict=True):
                assert relative_error(actual, right) < TOLERANCE[actual.dtype], (config.name, name, m)
