"""Reductions of rows that the last tile of a row finishes, on the simulated machine: results have the bits
that the kernel gives them which finishes them otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.planning import Arch, TileConfig, kernel_plan
from cute_backend.planning.last_tile import MOST_PARTS
from cute_backend.simulator.host import HostProgram
from cute_backend.simulator.simulate import Machine, run_region
from cute_backend.spec import (
    REDUCED,
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Op,
    ProductKind,
    Reduction,
    Store,
)
from support.sweeps import EXHAUSTIVE

KINDS = (reductions.SUM, reductions.MAX, reductions.MIN, reductions.PROD)
SCALE = (
    Op("t0", "maximum", (REDUCED, Const(0.01)), DType.F32),
    Op("t1", "div", ("t0", Const(448.0)), DType.F32),
)


def of_rows(kind: ProductKind = ProductKind.DENSE) -> EpilogueSpec:
    """Reductions of a bf16 product whose results round, and work on a result."""
    stores = [
        Store(f"out{i}", "acc", DType.F32, form=Reduction(Axis.ROW, each)) for i, each in enumerate(KINDS)
    ]
    stores[1] = replace(stores[1], dtype=DType.BF16, after=SCALE)
    return EpilogueSpec((Accumulator("acc", DType.BF16, DType.BF16, kind=kind),), (), (), tuple(stores))


def factors(m: int, n: int, *batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n)
    a, b = (torch.randn(*batch, size, 64, generator=generator) for size in (m, n))
    return a.bfloat16(), (b / 16).bfloat16().transpose(-1, -2)


def results(
    spec: EpilogueSpec, a: Sequence[Tensor], b: Sequence[Tensor], machine: Machine, rows: int = -1
) -> tuple[list[Tensor], int]:
    """The bits of the results of a kernel, and the number of its launches. `rows` limits the results."""
    launches = []
    launch = HostProgram.launch

    def counted(*given: object, **how: object) -> object:
        reports = launch(*given, **how)
        launches.append(len(reports))
        return reports

    with patch.object(HostProgram, "launch", counted):
        found, _ = run_region(spec, a, b, [], machine)
    return [each[:rows].float().view(torch.int32) for each in found], launches[0]


def check(
    spec: EpilogueSpec,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    config: TileConfig,
    seeds: Sequence[int] = (1, 2),
    *,
    rows: int | None = None,
) -> None:
    """One launch gives the bits of two, in whatever order CTAs run."""
    with patch.object(kernel_plan, "counters_needed", lambda *sizes: 0):
        machine = Machine(config.arch, config=config)
        expected, launches = results(spec, a, b, machine, rows)
    assert launches == 2
    for seed in seeds:
        machine = Machine(config.arch, seed, config, clusters=1 + seed % 3)
        found, launches = results(spec, a, b, machine, rows)
        assert launches == 1
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


TILES = {
    "cooperative": TileConfig(Arch.SM90A, 128, 64, cluster_n=2),
    "ping-pong": TileConfig(Arch.SM90A, 64, 64, 2, pingpong=True),
    "two blocks of rows": TileConfig(Arch.SM90A, 128, 64, pingpong=True),
    "split-K": TileConfig(Arch.SM90A, 64, 64, split_k=4),
}
SIZES = {
    "one row": (1, 8),
    "one tile": (64, 64),
    "edges": (201, 200),
    "all of a group of parts": (40, 512),
    "several groups": (40, 520),
}


EVERY_DAY = {("ping-pong", "several groups"), ("split-K", "one tile")}
"""The cases of `make test`."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("tile", "size"),
    [
        pytest.param(tile, size, marks=() if (tile, size) in EVERY_DAY else EXHAUSTIVE)
        for tile in TILES
        for size in SIZES
    ],
)
def test_one_launch_gives_the_bits_of_two(tile: str, size: str) -> None:
    a, b = factors(*SIZES[size])
    check(of_rows(), [a], [b], TILES[tile])


def test_as_many_parts_as_a_last_tile_combines() -> None:
    """With one tile more, a second kernel finishes the rows."""
    narrow, (a, b) = TILES["ping-pong"], factors(20, MOST_PARTS * 64)
    check(of_rows(), [a], [b], narrow, [1])
    a, b = factors(20, MOST_PARTS * 64 + 8)
    _, launches = results(of_rows(), [a], [b], Machine(Arch.SM90A, 1, narrow))
    assert launches == 2


def test_rows_of_batches_that_are_no_multiple_of_a_strip() -> None:
    a, b = factors(21, 136, 3)
    check(of_rows(ProductKind.BATCHED), [a], [b], TILES["cooperative"])


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", ["ping-pong", "two blocks of rows"])
def test_rows_of_groups(config: str) -> None:
    """Groups of one row, of none, and of several tiles; strips of two groups begin within 16 rows."""
    ends = torch.tensor([1, 2, 2, 90, 170], dtype=torch.int32)
    (a, _), (_, b) = factors(180, 8), factors(8, 136, 5)
    check(of_rows(ProductKind.GROUPED), [a, ends], [b], TILES[config], rows=170)
