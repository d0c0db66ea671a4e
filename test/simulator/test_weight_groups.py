"""Weights of 8 and 4 bits in groups of K on the simulated machine: the bits of weights, tails of all sizes,
and every way in which a tile is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend.planning import Arch, TileConfig
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import TORCH_DTYPES
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import STORED_DTYPES, Accumulator, DType, EpilogueSpec, Store, WeightGroups
from support.simulator.exact import RESIDUAL, machine, op, sm90, wrong

F32, BF16, F16, I8, U8 = DType.F32, DType.BF16, DType.F16, DType.I8, DType.U8
U4X2, I4X2 = DType.U4X2, DType.I4X2


def converting(tile_m: int, tile_n: int, **options: int) -> TileConfig:
    return sm90(tile_m, tile_n, transposed=True, converts=True, **options)


def by_warps(arch: Arch, tile_m: int, tile_n: int, **options: int) -> TileConfig:
    return TileConfig(arch, tile_m, tile_n, transposed=True, converts=True, **options)


TILES = {
    "8 rows": converting(64, 8, subtile_n=8),
    "two warpgroups": converting(128, 64),
    "two blocks": converting(256, 32),
    "wide": converting(64, 128),
    "cluster": converting(64, 16, subtile_n=16, split_k=2),
    "memory": converting(128, 32, split_k=6),
}

WARPS = {
    "cp.async": by_warps(Arch.SM80, 64, 32),
    "48 rows": by_warps(Arch.SM80, 64, 48, subtile_n=16, unrolled=True),
    "two blocks": by_warps(Arch.SM80, 128, 32),
    "memory": by_warps(Arch.SM89, 64, 64, split_k=4),
    "TMA": by_warps(Arch.SM120A, 64, 64),
    "two blocks by TMA": by_warps(Arch.SM120A, 128, 32),
}
"""Tiles of mma.sync."""

CONVERSIONS = [TILES["wide"], WARPS["cp.async"], WARPS["TMA"]]
"""A tile of each template."""

EACH_TEMPLATE = pytest.mark.parametrize("tile", CONVERSIONS, ids=lambda tile: tile.arch.value)

GROUPS = {
    "torchao's int8": (I8, BF16, WeightGroups(128, F32, F32, I8, BF16)),
    "torchao's int4": (I8, BF16, WeightGroups(32, BF16, BF16, I8, BF16)),
    "HQQ": (U8, BF16, WeightGroups(64, BF16, BF16, BF16, BF16)),
    "HQQ in fp16": (U8, F16, WeightGroups(128, F16, F16, F16, F16)),
    "no zeros": (I8, F16, WeightGroups(256, F16, F16)),
    "fp32": (I8, F16, WeightGroups(64, F32, F32, F32, F32)),
    "zeros in fp32": (U8, BF16, WeightGroups(32, F32, BF16, F32, F32)),
    "rounded as they are read": (I8, BF16, WeightGroups(256, F16, BF16, U8, BF16)),
    "nibbles": (U4X2, BF16, WeightGroups(128, BF16, BF16, I8, BF16)),
    "nibbles by 32": (U4X2, BF16, WeightGroups(32, BF16, BF16, U8, BF16)),
    "nibbles by 256 in fp32": (I4X2, BF16, WeightGroups(256, F32, F32, I8, BF16)),
    "nibbles by 64 in fp16": (I4X2, F16, WeightGroups(64, F16, F16, F16, F16)),
    "nibbles and fp32": (U4X2, F16, WeightGroups(128, F32, F32, F32, F32)),
    "nibbles without zeros": (I4X2, BF16, WeightGroups(64, BF16, BF16)),
}


def spec(stored: DType, other: DType, groups: WeightGroups) -> EpilogueSpec:
    """acc + exact0."""
    acc = Accumulator("acc", other, stored, weight_groups=groups)
    return EpilogueSpec((acc,), (RESIDUAL,), (op("t0", "add", "acc", "exact0"),), (Store("out0", "t0", F32),))


def weight(stored: DType, n: int, k: int, generator: torch.Generator) -> Tensor:
    """The elements (N, K / values) of a weight."""
    if stored.values > 1:
        return torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    low, high = {I8: (-128, 128), U8: (0, 256)}.get(stored, (-4, 5))
    return torch.randint(low, high, (n, k), generator=generator).to(TORCH_DTYPES[stored])


def whole(groups: WeightGroups, n: int, k: int, generator: torch.Generator) -> list[Tensor]:
    """Scales, and zeros, of few bits, which every sum of a product has exactly."""
    shape = (n, k // groups.values)
    scales = torch.randint(1, 16, shape, generator=generator) / 8
    zeros = torch.randint(0, 100, shape, generator=generator)
    return [each.to(TORCH_DTYPES[of]) for each, of in zip((scales, zeros), groups.vectors, strict=False)]


def check(case: str, config: TileConfig, problem: tuple[int, int, int]) -> None:
    (m, n, k), (stored, other, groups) = problem, GROUPS[case]
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randint(-2, 3, (m, k), generator=generator).to(TORCH_DTYPES[other])
    residual = torch.randint(-99, 100, (m, n), generator=generator).bfloat16()
    vectors = [each.t() for each in whole(groups, n, k, generator)]
    given = [a], [weight(stored, n, k, generator).t(), *vectors], [residual]
    product = spec(stored, other, groups)
    (actual,), _ = run_region(product, *given, machine(replace(config, packing=stored.values)))
    (expected,) = replay(product, *given)
    assert torch.equal(actual, expected), wrong(actual, expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "m", [1, 5, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (64, 130))]
)
@pytest.mark.parametrize("k", [256, 768, pytest.param(1280, marks=pytest.mark.exhaustive)])
def test_products_are_exact(case: str, tile: str, m: int, k: int) -> None:
    """Tails of N, and K of a few groups, of which some are the last of their chunk. Many rows are those of a
    tile and two of the next."""
    config = TILES[tile]
    check(case, config, (min(m, config.tile_n + 2), config.tile_m + 40, k))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("tile", WARPS)
@pytest.mark.parametrize("m", [1, 5, 64, 130])
@pytest.mark.parametrize("k", [256, 768, pytest.param(1280, marks=pytest.mark.exhaustive)])
def test_products_by_warps_are_exact(case: str, tile: str, m: int, k: int) -> None:
    config = WARPS[tile]
    check(case, config, (min(m, config.tile_n + 2), config.tile_m + 40, k))


@pytest.mark.sweep(2)
@EACH_TEMPLATE
@pytest.mark.parametrize("k", [32, 160, 352])
def test_k_ends_within_a_k_tile(tile: TileConfig, k: int) -> None:
    check("torchao's int4", tile, (5, 104, k))


def chain(stored: Tensor, to: torch.dtype, groups: WeightGroups, *vectors: Tensor) -> Tensor:
    """The weight (N, K) as a program computes it, in torch's own roundings."""
    n, k = stored.shape
    weight = stored.float().view(n, -1, groups.values)
    scale, *zeros = (each.unsqueeze(2) for each in vectors)
    product = TORCH_DTYPES[groups.product]
    for zero in zeros:
        assert groups.difference is not None
        difference = TORCH_DTYPES[groups.difference]
        weight = weight.to(difference) - zero.to(difference)
    return (weight.to(product) * scale.to(product)).to(to).view(n, k)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", GROUPS)
@EACH_TEMPLATE
def test_weights_have_the_bits_of_the_chain(case: str, tile: TileConfig) -> None:
    """A unit matrix picks the weights of a fourth of 256 values of K, with scales and zeros of any bits."""
    stored, other, groups = GROUPS[case]
    generator = torch.Generator().manual_seed(len(case))
    elements = weight(stored, 72, 256, generator)
    values = torch.stack([elements & 15, elements >> 4], 2).view(72, 256) if stored.values > 1 else elements
    values = values.float() - 8 * (stored is I4X2)
    shape = (72, 256 // groups.values)
    drawn = torch.rand(shape, generator=generator), torch.rand(shape, generator=generator) * 200
    vectors = [each.to(TORCH_DTYPES[of]) for each, of in zip(drawn, groups.vectors, strict=False)]
    expected = chain(values, TORCH_DTYPES[other], groups, *vectors).t().float()
    acc = Accumulator("acc", other, stored, weight_groups=groups)
    bare = EpilogueSpec((acc,), (), (), (Store("out0", "acc", F32),))
    rows = slice(len(case) % 4, None, 4)
    a = torch.eye(256, dtype=TORCH_DTYPES[other])[rows]
    given = [a], [elements.t(), *(each.t() for each in vectors)], []
    (actual,), _ = run_region(bare, *given, machine(replace(tile, packing=stored.values)))
    assert torch.equal(actual, expected[rows])
    assert torch.equal(actual, replay(bare, *given)[0])


CODES = {
    "both with signs": (I8, BF16, WeightGroups(256, F32, F32, I8, BF16)),
    "both without": (U8, BF16, WeightGroups(256, F32, F32, U8, BF16)),
    "rounded differences": (I8, BF16, WeightGroups(256, F32, F32, U8, BF16)),
    "differences in fp32": (U8, F16, WeightGroups(256, F32, F32, I8, F32)),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", CODES)
def test_every_value_less_every_zero(case: str) -> None:
    """A unit matrix picks all 256 values of each of 256 columns, which have all zeros."""
    stored, other, groups = CODES[case]
    assert groups.subtracts_exactly(stored) is (case != "rounded differences")
    codes = torch.arange(256).to(torch.uint8)
    values = codes.expand(256, 256).contiguous().view(TORCH_DTYPES[stored])
    scales = torch.rand(256, 1, generator=torch.Generator().manual_seed(4)) - 0.5
    zeros = codes.view(TORCH_DTYPES[groups.vectors[1]])[:, None]
    expected = chain(values, TORCH_DTYPES[other], groups, scales, zeros).t().float()
    acc = Accumulator("acc", other, stored, weight_groups=groups)
    bare = EpilogueSpec((acc,), (), (), (Store("out0", "acc", F32),))
    given = [torch.eye(256, dtype=TORCH_DTYPES[other])], [values.t(), scales.t(), zeros.t()], []
    (actual,), _ = run_region(bare, *given, machine(TILES["wide"]))
    assert torch.equal(actual, expected)
    assert torch.equal(actual, replay(bare, *given)[0])


def test_every_order_of_scales_in_memory() -> None:
    """(N, groups) and (groups, N), and a slice of either."""
    stored, other, groups = GROUPS["HQQ"]
    generator = torch.Generator().manual_seed(1)
    values = weight(stored, 104, 320, generator)
    scales, zeros = whole(groups, 104, 320, generator)
    a = torch.randint(-2, 3, (5, 320), generator=generator).bfloat16()
    product = spec(stored, other, groups)
    residual = torch.zeros(5, 104).bfloat16()
    expected = replay(product, [a], [values.t(), scales.t(), zeros.t()], [residual])[0]
    sliced = torch.stack([scales, scales], 2)[..., 0].t()
    for vectors in ((scales.t().contiguous(), sliced), (sliced, zeros.t().contiguous())):
        given = [a], [values.t(), vectors[0], zeros.t() if vectors[1] is sliced else vectors[1]], [residual]
        (actual,), _ = run_region(product, *given, machine(TILES["8 rows"]))
        assert torch.equal(actual, expected)


@pytest.mark.sweep(2)
@EACH_TEMPLATE
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_scale_that_is_not_finite_stays_in_its_group(tile: TileConfig, number: float) -> None:
    """The last group ends within a k tile, beyond which A and B are zeros."""
    stored, other, groups = GROUPS["torchao's int4"]
    generator = torch.Generator().manual_seed(2)
    values = weight(stored, 72, 160, generator)
    scales, zeros = whole(groups, 72, 160, generator)
    scales[7, 4] = number
    a, residual = torch.ones(2, 160).bfloat16(), torch.zeros(2, 72).bfloat16()
    given = [a], [values.t(), scales.t(), zeros.t()], [residual]
    (actual,), _ = run_region(spec(stored, other, groups), *given, machine(tile))
    (expected,) = replay(spec(stored, other, groups), *given)
    assert actual.isfinite().sum() == 142
    assert torch.equal(actual.nan_to_num(7.5), expected.nan_to_num(7.5))


@pytest.mark.sweep(2)
@EACH_TEMPLATE
@pytest.mark.parametrize("stored", STORED_DTYPES, ids=lambda dtype: dtype.value)
def test_dtypes(tile: TileConfig, stored: DType) -> None:
    groups = WeightGroups(128, BF16, BF16)
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-2, 3, (5, 384), generator=generator).bfloat16()
    values, (scales,) = weight(stored, 104, 384, generator), whole(groups, 104, 384, generator)
    given = [a], [values.t(), scales.t()], [torch.zeros(5, 104).bfloat16()]
    tile = replace(tile, packing=stored.values)
    (actual,), _ = run_region(spec(stored, BF16, groups), *given, machine(tile))
    assert torch.equal(actual, replay(spec(stored, BF16, groups), *given)[0])


def torchao_configs() -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    return {
        "int8": quantization.Int8WeightOnlyConfig(granularity=granularity.PerGroup(128)),
        "int4": quantization.IntxWeightOnlyConfig(torch.int4, granularity.PerGroup(64)),
    }


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", ["int8", "int4"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_120a"])
def test_torchao_s_weights(config: str, arch: str) -> None:
    """A quantised linear, from torch.compile to the simulated kernel."""
    torch.manual_seed(5)
    linear = torch.nn.Linear(384, 104, dtype=torch.bfloat16).requires_grad_(False)
    configs = torchao_configs()
    pytest.importorskip("torchao.quantization").quantize_(linear, configs[config])
    x = torch.randn(5, 384, dtype=torch.bfloat16)

    def program(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(linear(x))

    (region,) = cute_backend.explain(program, x, arch=arch).regions
    assert region.spec.product.weight_groups is not None
    result, expected = cute_backend.simulate(program, x, arch=arch, async_seed=1), program(x).float()
    assert (result.float() - expected).norm() < 0.01 * expected.norm()
