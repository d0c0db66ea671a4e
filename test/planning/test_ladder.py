"""The tiles that may take the place of one whose kernel spills."""

from __future__ import annotations

import pytest

from cute_backend.planning import Alignment, Arch, TileConfig, choose, named, offered, plan, rungs, table
from support.epilogues import EPILOGUES
from support.shipped import epilogue_spec


@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90A, Arch.SM100A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("name", EPILOGUES)
def test_each_rung_but_the_first_has_fewer_accumulators(name: str, arch: Arch) -> None:
    if not EPILOGUES[name].runs_on(arch):
        pytest.skip(f"{arch.value} has no kernel for it")
    spec = epilogue_spec(name, True)
    for config in offered(arch, spec):
        for alignment in Alignment:
            first, *below = rungs(plan(spec, config, alignment))
            assert first == plan(spec, config, alignment) and len(below) <= 2
            assert all((each.spec, each.alignment) == (spec, alignment) for each in below)
            sizes = [each.tile.thread_accumulators for each in (first, *below)]
            assert sizes == sorted(sizes, reverse=True) and len(set(sizes[:2])) == len(sizes[:2])


def test_the_next_smaller_tile_of_the_cluster_comes_before_the_smallest() -> None:
    spec = epilogue_spec("bias_gelu_residual", True)
    large = named(Arch.SM90A, spec, "128x256_2x1")
    _, next_smaller, smallest = rungs(plan(spec, large, Alignment.TMA))
    assert (next_smaller.tile.cluster_m, next_smaller.tile.cluster_n) == (2, 1)
    assert smallest == plan(spec, table(Arch.SM90A, spec)[-1], Alignment.TMA)


def test_the_smallest_tile_has_no_other_rung() -> None:
    spec = epilogue_spec("rowwise", True)
    small = plan(spec, TileConfig(Arch.SM90A, 64, 64), Alignment.TMA)
    assert rungs(small) == (small,)
    assert len(rungs(plan(spec, choose(Arch.SM90A, spec, 8192, 8192, 8192, 132), Alignment.TMA))) > 1
