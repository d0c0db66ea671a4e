"""Pairs of accumulators: two products of one A, and even and odd columns of one, on the simulated machine.

Small integers and powers of two, so that a kernel has to be right to the bit. The two products have scales of
their own and are subtracted, so that neither one read for the other, nor a column for its neighbour, goes by.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Arch, TileConfig, tile_table
from cute_backend.spec import (
    DType,
    Major,
)
from support.simulator.pairs import NEIGHBOURS, TWO, check, difference

COLUMNS = pytest.mark.parametrize("columns", [TWO, NEIGHBOURS], ids=["two", "neighbours"])


COUNTS = {Arch.SM90A: 5, Arch.SM100A: 4}
CONFIGS = [(arch, index) for arch in COUNTS for index in range(COUNTS[arch])]


@pytest.mark.sweep(1)
@COLUMNS
@pytest.mark.parametrize(("arch", "index"), CONFIGS, ids=lambda value: str(getattr(value, "value", value)))
def test_every_configuration_at_edges_in_every_direction(arch, index, columns):
    spec = difference(columns)
    configs = tile_table(arch, spec)
    assert len(configs) == COUNTS[arch] and all(config.products == 2 for config in configs)
    config = configs[index]
    check(spec, config, 2 * config.tile_m + 40, config.tile_n + 24, 208)


@pytest.mark.sweep(1)
@COLUMNS
@pytest.mark.parametrize("arch", COUNTS)
def test_the_masked_store_and_few_rows(arch, columns):
    spec = difference(columns)
    for m in (1, 133):
        check(spec, tile_table(arch, spec)[-2], m, 69, 160)


@pytest.mark.sweep(1)
@COLUMNS
@pytest.mark.parametrize("arch", COUNTS)
@pytest.mark.parametrize("majors", [(Major.K, Major.MN), (Major.MN, Major.K)], ids=["b", "a"])
@pytest.mark.parametrize("index", [0, -1], ids=["largest", "smallest"])
def test_operands_that_are_contiguous_along_m_or_n(arch, majors, columns, index):
    spec = difference(columns, DType.BF16, *majors)
    config = tile_table(arch, spec)[index]
    check(spec, config, config.tile_m + 40, config.tile_n + 24, 104)


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@COLUMNS
@pytest.mark.parametrize("arch", COUNTS)
@pytest.mark.parametrize("seed", [2, 3])
def test_no_seed_changes_a_bit(seed, arch, columns):
    """One cluster works through all tiles, and every ring of stages wraps around."""
    spec = difference(columns)
    config = tile_table(arch, spec)[2 if arch is Arch.SM100A else 0]
    check(spec, config, 2 * config.tile_m, 2 * config.tile_n, 7 * 128, seed)


PROMOTED = len(tile_table(Arch.SM90A, difference(TWO, fast_accum=False)))
"""Configurations of pairs whose sums are promoted."""


@pytest.mark.sweep(1)
@COLUMNS
@pytest.mark.parametrize("index", range(PROMOTED))
def test_slow_accumulation_is_promoted(columns, index):
    spec = difference(columns, fast_accum=False)
    configs = tile_table(Arch.SM90A, spec)
    assert len(configs) == PROMOTED
    check(spec, configs[index], configs[index].tile_m + 40, configs[index].tile_n + 24, 1040)


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@COLUMNS
def test_tiles_as_wide_as_an_mma_can_be(columns):
    """128 x 128 of each product, in two warpgroups."""
    config, spec = TileConfig(Arch.SM90A, 128, 128, 2, products=2), difference(columns)
    check(spec, replace(config, b_columns=spec.b_columns), 168, 152, 208)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", [152, 165], ids=["tma", "plain"])
@pytest.mark.parametrize("shape", [(64, 64, 1, 6), (128, 96, 1, 8), (128, 96, 2, 3)], ids=str)
def test_sums_of_parts_of_k_through_memory(shape, n):
    """Of 7 k tiles, the last one not full: with 6 parts the last two have nothing, with 8 the last one."""
    tile_m, tile_n, cluster_m, parts = shape
    config = TileConfig(Arch.SM90A, tile_m, tile_n, cluster_m, split_k=parts, products=2)
    check(difference(TWO), config, 133, n, 7 * 128 - 48)
