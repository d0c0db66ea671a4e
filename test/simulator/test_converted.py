"""Weights of 8 and 4 bits that kernels convert on their way to the MMA, on the simulated machine: every
stored value, tails of all sizes, and every way in which a tile is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

import cute_backend
from cute_backend.kinds.stored import STORED
from cute_backend.planning import Arch, TileConfig
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import TORCH_DTYPES
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import STORED_DTYPES, Accumulator, DType, EpilogueSpec, Store
from support.simulator.exact import RESIDUAL, SCALE_B, machine, op, sm90, wrong


def converting(tile_m: int, tile_n: int, **options: int) -> TileConfig:
    return sm90(tile_m, tile_n, transposed=True, converts=True, **options)


def by_warps(arch: Arch, tile_m: int, tile_n: int, **options: int) -> TileConfig:
    return TileConfig(arch, tile_m, tile_n, transposed=True, converts=True, **options)


TILES = {
    "8 rows": converting(64, 8, subtile_n=8),
    "two warpgroups": converting(128, 64),
    "two blocks": converting(256, 32),
    "odd width": converting(128, 88, subtile_n=8, unrolled=True),
    "wide": converting(128, 128),
    "cluster": converting(64, 16, subtile_n=16, split_k=2),
    "memory": converting(128, 32, split_k=6),
}

WARPS = {
    "cp.async": by_warps(Arch.SM80, 64, 32),
    "16 rows": by_warps(Arch.SM80, 64, 16, subtile_n=16, unrolled=True),
    "24 rows": by_warps(Arch.SM80, 64, 24, subtile_n=24, unrolled=True),
    "80 rows": by_warps(Arch.SM80, 128, 80, subtile_n=16, unrolled=True),
    "two blocks": by_warps(Arch.SM80, 128, 64),
    "two warpgroups": by_warps(Arch.SM80, 256, 64),
    "with conversions": by_warps(Arch.SM89, 64, 32),
    "memory": by_warps(Arch.SM89, 64, 32, split_k=4),
    "TMA": by_warps(Arch.SM120A, 64, 32),
    "40 rows by TMA": by_warps(Arch.SM120A, 128, 40, subtile_n=8, unrolled=True),
    "48 rows by TMA": by_warps(Arch.SM120A, 64, 48, subtile_n=16, unrolled=True),
    "two blocks by TMA": by_warps(Arch.SM120A, 128, 32),
}
"""Tiles of mma.sync."""


def arch_of(tile: TileConfig) -> str:
    return tile.arch.value


def spec(stored: DType, other: DType) -> EpilogueSpec:
    """acc * scale_b + exact0."""
    ops = op("t0", "mul", "acc", "scale_b"), op("t1", "add", "t0", "exact0")
    stores = Store("out0", "t1", DType.F32), Store("out1", "t1", DType.BF16)
    return EpilogueSpec((Accumulator("acc", other, stored),), (SCALE_B, RESIDUAL), ops, stores)


def weight(stored: DType, n: int, k: int) -> Tensor:
    """Values of the whole range of int8, or small integers, which every sum has exactly."""
    generator = torch.Generator().manual_seed(n + k)
    if stored.values > 1:
        return torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    if stored is not DType.I8:
        return torch.randint(-4, 5, (n, k), generator=generator).to(TORCH_DTYPES[stored])
    values = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
    values[0], values[-1] = -128, 127
    return values


def check(stored: DType, other: DType, config: TileConfig, problem: tuple[int, int, int]) -> None:
    m, n, k = problem
    generator = torch.Generator().manual_seed(m)
    a = torch.randint(-2, 3, (m, k), generator=generator).to(TORCH_DTYPES[other])
    residual = torch.randint(-99, 100, (m, n), generator=generator).bfloat16()
    given = [a], [weight(stored, n, k).t()], [torch.arange(n) % 67 + 1.0, residual]
    results, _ = run_region(spec(stored, other), *given, machine(replace(config, packing=stored.values)))
    for actual, expected in zip(results, replay(spec(stored, other), *given), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("m", [1, 5, 64, 130])
@pytest.mark.parametrize("k", [16, 336, 656])
def test_products_are_exact(tile: str, m: int, k: int) -> None:
    """Tails of N, and K of less than a k tile, of a part of one, and of several. Many rows are those of a
    tile and two of the next."""
    config = TILES[tile]
    check(DType.I8, DType.BF16, config, (min(m, config.tile_n + 2), config.tile_m + 40, k))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tile", WARPS)
@pytest.mark.parametrize("m", [1, 5, 64, 130])
@pytest.mark.parametrize("k", [16, 336, 656])
def test_products_by_warps_are_exact(tile: str, m: int, k: int) -> None:
    config = WARPS[tile]
    check(DType.I8, DType.BF16, config, (min(m, config.tile_n + 2), config.tile_m + 40, k))


CONVERSIONS = [TILES["8 rows"], WARPS["cp.async"]]
"""A tile with instructions that convert fp8, and one without."""


def stored_by(*tiles: TileConfig) -> list[ParameterSet]:
    """Tiles, each with every dtype that its GPU converts."""
    return [
        pytest.param(tile, stored, id=f"{arch_of(tile)}-{stored.value}")
        for tile in tiles
        for stored in STORED_DTYPES
        if stored in tile.target.converts
    ]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("tile", "stored"), stored_by(*CONVERSIONS, WARPS["with conversions"], WARPS["TMA"]))
@pytest.mark.parametrize("other", [DType.BF16, DType.F16], ids=lambda dtype: dtype.value)
def test_dtypes(tile: TileConfig, stored: DType, other: DType) -> None:
    check(stored, other, tile, (5, 104, 272))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("tile", "stored"), stored_by(*CONVERSIONS))
@pytest.mark.parametrize("other", [DType.BF16, DType.F16], ids=lambda dtype: dtype.value)
def test_every_stored_value(tile: TileConfig, stored: DType, other: DType) -> None:
    """A unit matrix picks each of the 256 values, in fp8 also infinities and NaN, from two columns."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    if stored.values > 1:
        elements = codes.view(16, 16)
        values = STORED[stored].unpacked(elements.t())
        a = torch.eye(32, dtype=TORCH_DTYPES[other])
        product = EpilogueSpec(
            (Accumulator("acc", other, stored),), (), (), (Store("out0", "acc", DType.F32),)
        )
        (result,), _ = run_region(
            product, [a], [elements.t()], [], machine(replace(tile, converts=True, packing=2))
        )
        low = 0 if stored is DType.U4X2 else -8
        expected = torch.stack([codes.view(16, 16) % 16, codes.view(16, 16) // 16], 2).int() + low
        assert torch.equal(result, expected.view(16, 32).t().float())
        assert torch.equal(result, values.float())
        return
    values = torch.stack([codes, codes.flip(0)]).view(TORCH_DTYPES[stored])
    finite = values.float().isfinite()
    product = EpilogueSpec((Accumulator("acc", other, stored),), (), (), (Store("out0", "acc", DType.F32),))
    given = torch.where(finite, values.float(), 0).reshape(32, 16)
    a = torch.eye(16, dtype=TORCH_DTYPES[other])
    (result,), _ = run_region(product, [a], [given.to(TORCH_DTYPES[stored]).t()], [], machine(tile))
    assert torch.equal(result, given.t())
    special = values[:, ~finite[0] | ~finite[1]].t().flatten()
    if len(special):
        a = torch.eye(1, 16, dtype=TORCH_DTYPES[other])
        b = torch.zeros(len(special), 16).to(TORCH_DTYPES[stored])
        b.view(torch.uint8)[:, 0] = special.view(torch.uint8)
        (result,), _ = run_region(product, [a], [b.t()], [], machine(tile))
        assert torch.equal(result[0].nan_to_num(7.5), special.float().nan_to_num(7.5))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.parametrize("m", [5, 130])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_120a"])
def test_torchao_s_weights(config: str, m: int, arch: str) -> None:
    """A quantised linear, from torch.compile to the simulated kernel."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(m)
    linear = torch.nn.Linear(272, 104, dtype=torch.bfloat16).requires_grad_(False)
    quantization.quantize_(linear, getattr(quantization, config)())
    x = torch.randn(m, 272, dtype=torch.bfloat16)

    def program(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(linear(x))

    result, expected = cute_backend.simulate(program, x, arch=arch, async_seed=1), program(x).float()
    assert (result.float() - expected).norm() < 0.01 * expected.norm()
