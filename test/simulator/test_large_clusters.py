"""Clusters of four CTAs, some of which have no rows or no columns, on the simulated Hopper."""

from __future__ import annotations

import pytest

from cute_backend.fx_walk.collect import collect
from cute_backend.planning import Arch, TileConfig, offered
from cute_backend.simulator.simulate import Machine, reference, run
from support.epilogues import EPILOGUES, Problem
from support.reference import TOLERANCE, as_tuple, relative_error

EPILOGUE = EPILOGUES["bias_gelu_residual"]
N, K = 160, 272


def large() -> list[TileConfig]:
    """The tiles that are offered in clusters of four CTAs."""
    [graph] = collect(EPILOGUE.fn, EPILOGUE.inputs(Problem(256, N, K)), dynamic=False)
    every = offered(Arch.SM90A, graph.regions[0].spec)
    return [config for config in every if config.cluster_m * config.cluster_n == 4]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [1, 64, 200])
@pytest.mark.parametrize("clusters", [(2, 2), (1, 4)])
def test_ctas_without_rows_or_columns_take_part_in_multicasts(clusters: tuple[int, int], m: int) -> None:
    config, *_ = [each for each in large() if (each.cluster_m, each.cluster_n) == clusters]
    inputs = EPILOGUE.inputs(Problem(m, N, K))
    simulation = run(EPILOGUE.fn, inputs, Machine(Arch.SM90A, 1, config, clusters=1))
    expected = as_tuple(reference(EPILOGUE.fn, inputs))
    for actual, right in zip(as_tuple(simulation.outputs), expected, strict=True):
        assert relative_error(actual, right) < TOLERANCE[actual.dtype]
