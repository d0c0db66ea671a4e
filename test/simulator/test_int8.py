"""Products of int8 on the simulated machine, in every template: their sums against int64 arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_backend.planning import Arch, TileConfig
from cute_backend.replay import replay
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import (
    Accumulator,
    Columns,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Store,
    Stride,
)
from support.simulator.exact import SCALE_A, SCALE_B, machine, sm80, sm90, sm100
from support.simulator.mutants import KEPT

ACC = Accumulator("acc", DType.I8, DType.I8)
SHIFT = Load("shift", LoadKind.ROWVEC, DType.I32, Stride.ZERO, Stride.ONE)
SCALED = (Op("t1", "mul", ("acc", "scale_a"), DType.F32), Op("t2", "mul", ("t1", "scale_b"), DType.F32))
SPEC = EpilogueSpec(
    (ACC,),
    (SCALE_A, SCALE_B, SHIFT),
    (Op("t0", "add", ("acc", "shift"), DType.I32), *SCALED),
    (Store("out0", "t0", DType.I32), Store("out1", "t2", DType.F32), Store("out2", "t2", DType.BF16)),
)
"""acc + shift in int32, and acc * scale_a * scale_b in fp32 and bf16."""

TILES = {
    "wgmma": sm90(64, 64),
    "wgmma ping-pong": sm90(128, 128, 2, pingpong=True),
    "wgmma two warpgroups": sm90(128, 192, 1, 2),
    "wgmma odd width": sm90(64, 80, subtile_n=16),
    "wgmma cluster": sm90(64, 64, split_k=2),
    "wgmma memory": sm90(128, 128, split_k=6),
    "wgmma transposed": sm90(128, 96, transposed=True),
    "mma.sync": sm80(64, 64),
    "mma.sync side by side": sm80(128, 128, occupancy=2),
    "mma.sync tall": sm80(256, 128),
    "mma.sync memory": sm80(64, 64, split_k=4),
    "mma.sync TMA": TileConfig(Arch.SM120A, 128, 64),
    "mma.sync TMA memory": TileConfig(Arch.SM120A, 64, 64, split_k=2),
    "tcgen05": sm100(128, 64),
    "tcgen05 two CTAs": sm100(256, 128, 2, ctas=2),
    "tcgen05 cluster": sm100(128, 64, split_k=2),
}
WITH_TILES = pytest.mark.parametrize("tile", TILES)


def operands(m: int, n: int, k: int, factor: int = 1) -> tuple[Tensor, Tensor]:
    """The whole range of int8. Sums of the first rows leave 24 bits if K is 1,040 or more."""
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (
        torch.randint(-128, 128, (each, k), dtype=torch.int8, generator=generator) for each in (m, factor * n)
    )
    a[0], b[0], b[-1] = -128, -128, 127
    return a, b.t()


def sums(a: Tensor, b: Tensor) -> np.ndarray:
    return a.numpy().astype(np.int64) @ b.numpy().astype(np.int64)


def vectors(m: int, n: int) -> list[Tensor]:
    rows, columns = torch.arange(m) % 61 + 1.5, torch.arange(n) % 67 / 64 + 1
    return [rows / 64, columns, torch.arange(n, dtype=torch.int32) * 1001]


def check(
    spec: EpilogueSpec, config: TileConfig, problem: tuple[int, int, int], seed: int | None = 1
) -> None:
    """Int32 results to the bit; the fp32 ones are one conversion and two products, each rounded once."""
    m, n, _ = problem
    a, b = operands(*problem)
    scale_a, scale_b, shift = loads = vectors(m, n)
    (shifted, wide, narrow), _ = run_region(spec, [a], [b], loads, machine(config, seed))
    exact = sums(a, b)
    assert np.array_equal(shifted.numpy(), (exact + shift.numpy()).astype(np.int32))
    expected = exact.astype(np.float32) * scale_a.numpy()[:, None] * scale_b.numpy()
    assert np.array_equal(wide.numpy(), expected)
    assert torch.equal(narrow, torch.from_numpy(expected).bfloat16())


@pytest.mark.sweep(1)
@WITH_TILES
@pytest.mark.parametrize("k", [16, 336, 1040])
def test_sums_are_those_of_int64(tile: str, k: int) -> None:
    """Tails of M and N, and K of less than a k tile, of a part of one, and of sums beyond 24 bits."""
    config = TILES[tile]
    check(SPEC, config, (config.tile_m + 37, config.tile_n + 24, k))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("tile", ["wgmma", "mma.sync", "mma.sync TMA", "tcgen05"])
def test_few_rows(tile: str, m: int) -> None:
    check(SPEC, TILES[tile], (m, 72, 208))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tile", ["wgmma cluster", "wgmma memory", "mma.sync memory", "tcgen05 cluster"])
def test_parts_of_k_that_are_not_exact_in_fp32(tile: str) -> None:
    """The sum of each part has more than 24 bits, and is odd in some places."""
    config = TILES[tile]
    problem = (40, 48, config.split_k * 2048)
    a, b = (torch.full(shape, -127, dtype=torch.int8) for shape in ((40, problem[2]), (48, problem[2])))
    a[:, :: problem[2] // config.split_k] = torch.arange(-20, 20)[:, None]
    loads = vectors(*problem[:2])
    (shifted, _, _), _ = run_region(SPEC, [a], [b.t()], loads, machine(config))
    exact = sums(a, b.t())
    assert (exact.astype(np.float32).astype(np.int64) != exact).any()
    assert np.array_equal(shifted.numpy(), (exact + loads[2].numpy()).astype(np.int32))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "columns", [(Columns.ALL, Columns.ALL), (Columns.EVEN, Columns.ODD)], ids=["apart", "interleaved"]
)
@pytest.mark.parametrize(
    "arch", [Arch.SM90A, Arch.SM100A, Arch.SM80, Arch.SM120A], ids=lambda arch: arch.value
)
def test_a_pair_of_products(arch: Arch, columns: tuple[Columns, Columns]) -> None:
    """acc0 * scale_a + acc1, and in int32 acc0 - acc1 * 3, of two Bs or of the columns of one."""
    spec = EpilogueSpec(
        tuple(replace(ACC, name=f"acc{i}", columns=each) for i, each in enumerate(columns)),
        (SCALE_A,),
        (
            Op("t0", "mul", ("acc0", "scale_a"), DType.F32),
            Op("t1", "add", ("t0", "acc1"), DType.F32),
            Op("t2", "mul", ("acc1", Const(3)), DType.I32),
            Op("t3", "sub", ("acc0", "t2"), DType.I32),
        ),
        (Store("out0", "t1", DType.F32), Store("out1", "t3", DType.I32)),
    )
    m, n, k = 140, 72, 272
    a, both = operands(m, n, k, factor=2)
    apart = columns[0] is Columns.ALL
    bs = [both[:, :n], both[:, n:]] if apart else [both]
    first, second = (sums(a, b) for b in (bs if apart else (both[:, ::2], both[:, 1::2])))
    tile_m = 128 if arch is Arch.SM100A else 64
    config = TileConfig(arch, tile_m, 64, products=2, b_columns=spec.b_columns)
    scale = vectors(m, n)[0] // 1 + 1  # an integer, so that contraction to one fma changes nothing
    (scaled, whole), _ = run_region(spec, [a], bs, [scale], machine(config))
    expected = first.astype(np.float32) * scale.numpy()[:, None] + second.astype(np.float32)
    assert np.array_equal(scaled.numpy(), expected)
    assert np.array_equal(whole.numpy(), first - 3 * second)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "config", [sm90(64, 128, subtile_n=64), sm100(128, 128, subtile_n=64), sm80(64, 64, subtile_n=64)]
)
def test_blocks_behind_a_plane(config: TileConfig) -> None:
    """acc * scale_b + exact0 over the largest of each 64 columns, plus 1: no value waits in an accumulator's
    place, so visits have whole blocks."""
    spec = replace(KEPT, accumulators=(ACC,))
    assert spec.by_visits and not spec.kept
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (lines, 48), dtype=torch.int8, generator=generator) for lines in (72, 192))
    scales = torch.arange(192) % 67 + 1.0
    planes = [torch.randint(-99, 100, (72, 192), generator=generator).bfloat16() for _ in range(2)]
    given = [a], [b.t()], [scales, *planes]
    (result,), _ = run_region(spec, *given, machine(config))
    assert torch.equal(result, replay(spec, *given)[0])
