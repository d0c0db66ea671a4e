"""Every configuration that ships, aligned and not, and every shared epilogue on every architecture:
`make test-sim`."""

from __future__ import annotations

import functools
from collections import defaultdict

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

SEEDS = (None, 1)
SQUARE = 144
KERNELS = pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, id=f"{name}-{arch.value}")
        for name in EPILOGUES
        for arch in Arch
        if EPILOGUES[name].runs_on(arch)
    ],
)


def _offered(name: str, arch: Arch) -> list[TileConfig]:
    inputs = EPILOGUES[name].inputs(Problem(SQUARE, SQUARE, SQUARE))
    [graph] = collect(EPILOGUES[name].fn, inputs, dynamic=False)
    return list(offered(arch, graph.regions[0].spec))


@functools.cache
def the_table(arch: Arch) -> dict[tuple[str, Alignment], list[TileConfig]]:
    """The tiles to simulate of each epilogue and alignment: the first and the last that the epilogue is
    offered, and of each other tile one epilogue of those that it serves, another by element than by TMA."""
    names = [name for name, epilogue in EPILOGUES.items() if epilogue.runs_on(arch)]
    served: defaultdict[TileConfig, list[str]] = defaultdict(list)
    table: defaultdict[tuple[str, Alignment], list[TileConfig]] = defaultdict(list)
    for name in names:
        tiles = _offered(name, arch)
        for tile in tiles:
            served[tile].append(name)
        for alignment in Alignment:
            table[name, alignment] += dict.fromkeys((tiles[0], tiles[-1]))
    for turn, (tile, takers) in enumerate(served.items()):
        for shift, alignment in enumerate(Alignment):
            if not any(tile in table[name, alignment] for name in takers):
                table[takers[(turn + shift) % len(takers)], alignment].append(tile)
    return table


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
    inputs = epilogue.inputs(Problem(m, n, 272))
    expected = as_tuple(reference(epilogue.fn, inputs))
    [graph] = collect(epilogue.fn, inputs, dynamic=False)
    spec = graph.regions[0].spec
    configs = the_table(arch)[name, alignment]
    if not (spec.planes or spec.loads_of(LoadKind.EXACT)):
        alignment = Alignment.TMA  # vectors and reductions need none
    for config in configs:
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
    for name in EPILOGUES:
        configs = _offered(name, arch)
        clusters = {**{config: name for config in configs if config.cluster_size > 1}, **clusters}
    for config, name in clusters.items():
        for m in range(64, 2 * config.cta_rows * config.cluster_m + 1, 64):
            epilogue = EPILOGUES[name]
            inputs = epilogue.inputs(Problem(m, m if epilogue.square else n, k))
            simulation = run(epilogue.fn, inputs, Machine(arch, 1, config, clusters=1))
            expected = as_tuple(reference(epilogue.fn, inputs))
            for actual, right in zip(as_tuple(simulation.outputs), expected, strict=True):
                assert relative_error(actual, right) < TOLERANCE[actual.dtype], (config.name, name, m)
