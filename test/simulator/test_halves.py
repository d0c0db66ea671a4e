"""Kernels of the Blackwell template in which two warpgroups share the epilogue: half of the columns each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.fx_walk.collect import collect
from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.planning.halving import can_halve
from cute_backend.planning.hoisting import can_hoist
from cute_backend.planning.rules import suited
from cute_backend.planning.targets import Shape
from cute_backend.simulator.simulate import Machine, reference, run
from cute_backend.spec import EpilogueSpec
from support.epilogues import EPILOGUES, Problem
from support.reference import TOLERANCE, as_tuple, relative_error
from support.verdicts import assert_sound

pytestmark = pytest.mark.sim

SHAPES = [Shape(256, 256, 2, ctas=2), Shape(128, 128)]


def halves(spec: EpilogueSpec, shape: Shape) -> TileConfig | None:
    """The tile as it serves a spec, with a second warpgroup and, if that is possible, its rowvecs hoisted; or
    None if it can't have one."""
    for config in suited(Arch.SM100A, [shape], spec):
        both = replace(config, column_groups=2)
        if config == both or can_halve(config, spec):
            return replace(both, unrolled=can_hoist(both, spec))
    return None


@pytest.mark.parametrize("shape", SHAPES, ids=["wide", "narrow"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_shared_epilogue_is_right(name: str, shape: Shape) -> None:
    """The second half of the last tile has no column of the plane, and that of the first has some."""
    epilogue = EPILOGUES[name]
    m, n, k = (304, 304, 272) if epilogue.square else (272, 304, 272)
    inputs = epilogue.inputs(Problem(m, n, k))
    [graph] = collect(epilogue.fn, inputs, dynamic=False)
    spec = graph.regions[0].spec
    config = halves(spec, shape)
    if config is None or plan(spec, config, Alignment.TMA).tile.column_groups < 2:
        pytest.skip("its planes or its registers leave no room for a second warpgroup")
    simulation = run(epilogue.fn, inputs, Machine(Arch.SM100A, 1, config, clusters=1))
    for actual, right in zip(
        as_tuple(simulation.outputs), as_tuple(reference(epilogue.fn, inputs)), strict=True
    ):
        assert relative_error(actual, right) < TOLERANCE[actual.dtype]
    [launch] = simulation.launches
    assert launch.kernel.plan.tile.column_groups == 2
    assert launch.report.roles["epilogue"].warps == 8 * config.cluster_size
    assert_sound([launch.kernel.plan])


@pytest.mark.parametrize("name", ["bias_gelu_residual", "sums"])
def test_both_halves_add_up_the_sums_of_parts_of_k(name: str) -> None:
    epilogue = EPILOGUES[name]
    inputs = epilogue.inputs(Problem(144, 112, 784))
    config = TileConfig(Arch.SM100A, 128, 64, split_k=2, column_groups=2)
    simulation = run(epilogue.fn, inputs, Machine(Arch.SM100A, 1, config, clusters=1))
    for actual, right in zip(
        as_tuple(simulation.outputs), as_tuple(reference(epilogue.fn, inputs)), strict=True
    ):
        assert relative_error(actual, right) < TOLERANCE[actual.dtype]
    [launch] = simulation.launches
    assert (launch.kernel.plan.tile.column_groups, launch.kernel.plan.tile.split_k) == (2, 2)
