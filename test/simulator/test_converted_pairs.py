"""Pairs of weights of 8 and 4 bits that a kernel converts, on the simulated machine: two accumulators, whose
weights lie one below the other in a stage.

Small integers and powers of two, so that a kernel has to be right to the bit. The two products do not
commute, and their weights, scales and zeros differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cute_backend
from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, plan
from cute_backend.planning.fitting import fits
from cute_backend.planning.transposing import Tiled
from cute_backend.planning.widths import visit_columns
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import TORCH_DTYPES
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import STORED_DTYPES, Accumulator, DType, EpilogueSpec, Store, WeightGroups
from support.shipped import epilogue_spec
from support.simulator.exact import machine, scaled_pair, wrong
from support.verdicts import assert_sound

I8, U8, E4M3, U4X2, I4X2 = DType.I8, DType.U8, DType.E4M3, DType.U4X2, DType.I4X2
F32, BF16, F16 = DType.F32, DType.BF16, DType.F16


class Case(NamedTuple):
    """The stored dtype of both weights, that of the rows, and the weights' groups of K."""

    stored: DType
    other: DType = BF16
    groups: WeightGroups | None = None

    @property
    def spec(self) -> EpilogueSpec:
        """acc0 * scale_a * scale_b + exact0 - acc1."""
        spec = scaled_pair(self.other, self.stored)
        return replace(
            spec, accumulators=tuple(replace(each, weight_groups=self.groups) for each in spec.accumulators)
        )


CASES = {
    "int8": Case(I8),
    "e4m3": Case(E4M3, F16),
    "int4": Case(I4X2),
    "HQQ": Case(U8, F16, WeightGroups(64, F16, F16, F16, F16)),
    "torchao's int8": Case(I8, BF16, WeightGroups(128, F32, F32, I8, BF16)),
    "torchao's int4": Case(I8, BF16, WeightGroups(32, BF16, BF16, I8, BF16)),
    "nibbles": Case(U4X2, BF16, WeightGroups(128, BF16, BF16, I8, BF16)),
    "nibbles in small groups": Case(I4X2, BF16, WeightGroups(32, BF16, BF16, BF16, BF16)),
    "without zeros": Case(I4X2, F16, WeightGroups(256, F32, F16)),
}


def tile(arch: Arch, tile_m: int, width: int, **options: int) -> TileConfig:
    columns = visit_columns(width)
    unrolled = columns < 32
    return TileConfig(
        arch,
        tile_m,
        width,
        subtile_n=columns,
        products=2,
        transposed=True,
        converts=True,
        unrolled=unrolled,
        **options,
    )


TILES = {
    "8 rows": tile(Arch.SM90A, 64, 8),
    "two warpgroups": tile(Arch.SM90A, 128, 32),
    "odd width": tile(Arch.SM90A, 64, 56),
    "wide": tile(Arch.SM90A, 64, 64),
    "cluster": tile(Arch.SM90A, 64, 16, split_k=2),
    "memory": tile(Arch.SM90A, 128, 32, split_k=6),
}

WARPS = {
    "cp.async": tile(Arch.SM80, 64, 32),
    "24 rows": tile(Arch.SM80, 64, 24),
    "with conversions": tile(Arch.SM89, 64, 64),
    "TMA": tile(Arch.SM120A, 64, 32),
    "40 rows by TMA": tile(Arch.SM120A, 64, 40),
}


def stored_values(dtype: DType, n: int, k: int, generator: torch.Generator) -> Tensor:
    if dtype.values > 1:
        return torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    low = 0 if dtype is U8 else -4
    return torch.randint(low, 5, (n, k), generator=generator).to(TORCH_DTYPES[dtype])


def operands(case: Case, m: int, n: int, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """All weights, then all their scales, then all their zeros."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randint(-2, 3, (m, k), generator=generator).to(TORCH_DTYPES[case.other])
    bs = [stored_values(case.stored, n, k, generator).t() for _ in range(2)]
    of_k = case.groups
    for low, dtype in zip((1, -3), () if of_k is None else of_k.vectors, strict=False):
        high, shape = low + 4, (n, k // of_k.values)
        bs += [torch.randint(low, high, shape, generator=generator).to(TORCH_DTYPES[dtype]).t() for _ in "ab"]
    loads = [
        torch.arange(m) % 5 + 1.0,
        torch.arange(n) % 7 + 1.0,
        torch.randint(-99, 100, (m, n), generator=generator).bfloat16(),
    ]
    return [a], bs, loads


def held(case: Case, config: TileConfig) -> TileConfig:
    """A tile, or the widest of the narrower ones of which a thread has registers for groups of K."""
    widths = range(config.tile_n, 0, -8)
    narrower = (replace(config, tile_n=each, subtile_n=visit_columns(each)) for each in widths)
    of_case = (replace(each, packing=case.stored.values, unrolled=each.rolled) for each in narrower)
    return next(each for each in of_case if fits(Tiled(case.spec, each)))


def check(case: Case, config: TileConfig, problem: tuple[int, int, int]) -> None:
    """Checks a problem in this tile, and that no rule put another in its place."""
    config, given = held(case, config), operands(case, *problem)
    planned = plan(case.spec, config, Alignment.TMA).tile
    assert (planned.tile_m, planned.tile_n, planned.products) == (config.tile_m, config.tile_n, 2)
    (actual,), _ = run_region(case.spec, *given, machine(config))
    (expected,) = replay(case.spec, *given)
    assert torch.equal(actual, expected), wrong(actual, expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    "m", [1, 5, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (64, 130))]
)
@pytest.mark.parametrize("k", [256, 768, pytest.param(1792, marks=pytest.mark.exhaustive)])
def test_products_are_exact(case: str, name: str, m: int, k: int) -> None:
    """Tails of N, and K of a few groups, of which some are the last of their chunk."""
    check(CASES[case], TILES[name], (m, TILES[name].tile_m + 40, k))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("m", [1, 5, 64, pytest.param(130, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("k", [256, 768, pytest.param(1792, marks=pytest.mark.exhaustive)])
def test_products_by_warps_are_exact(case: str, name: str, m: int, k: int) -> None:
    check(CASES[case], WARPS[name], (m, WARPS[name].tile_m + 40, k))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", ["int8", "torchao's int4", "int4"])
@pytest.mark.parametrize(
    "config", [TILES["8 rows"], WARPS["cp.async"], WARPS["TMA"]], ids=lambda c: c.arch.value
)
@pytest.mark.parametrize("k", [32, 160, 352])
def test_k_ends_within_a_k_tile(case: str, config: TileConfig, k: int) -> None:
    check(CASES[case], config, (5, 104, k))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stored", STORED_DTYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(
    "config", [TILES["8 rows"], WARPS["24 rows"], WARPS["TMA"]], ids=lambda c: c.arch.value
)
def test_dtypes(stored: DType, config: TileConfig) -> None:
    check(Case(stored), config, (5, 104, 288))


def test_each_product_has_the_weights_of_its_chain() -> None:
    """A unit matrix picks the weights, whose scales and zeros have any bits."""
    case = CASES["nibbles"]
    accumulators = tuple(
        Accumulator(name, BF16, case.stored, weight_groups=case.groups) for name in ("acc0", "acc1")
    )
    spec = EpilogueSpec(accumulators, (), (), (Store("out0", "acc0", F32), Store("out1", "acc1", F32)))
    generator = torch.Generator().manual_seed(4)
    n, k = 72, 256
    weights = [stored_values(case.stored, n, k, generator) for _ in range(2)]
    scales = [torch.rand(n, k // 128, generator=generator).bfloat16() for _ in range(2)]
    zeros = [torch.randint(-9, 16, (n, k // 128), generator=generator).to(torch.int8) for _ in range(2)]
    given = [each.t() for each in (*weights, *scales, *zeros)]
    a = torch.eye(k)[96:160].bfloat16()  # of both groups
    results, _ = run_region(spec, [a], given, [], machine(replace(TILES["wide"], packing=2)))
    for result, w, scale, zero in zip(results, weights, scales, zeros, strict=True):
        codes = torch.stack([w & 15, w >> 4], 2).view(n, -1, 128).bfloat16()
        chain = (codes - zero[..., None].bfloat16()) * scale[..., None]
        assert torch.equal(result, chain.view(n, k).t()[96:160].float())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_120a"])
@pytest.mark.parametrize("m", [5, 64])
def test_a_program(arch: str, m: int) -> None:
    """Gate and up, from torch.compile to the simulated kernel."""
    torch.manual_seed(m)
    weights = [torch.randint(-128, 128, (104, 272), dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(104, 1) / 99 for _ in range(2)]
    x = torch.randn(m, 272, dtype=torch.bfloat16)

    def linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, w.to(x.dtype)) * scale.to(x.dtype).reshape(-1)

    def program(x: Tensor) -> Tensor:
        gate, up = (linear(x, *each) for each in zip(weights, scales, strict=True))
        return F.silu(gate) * up

    (region,) = cute_backend.explain(program, x, arch=arch).regions
    assert len(region.spec.accumulators) == 2
    result, expected = cute_backend.simulate(program, x, arch=arch, async_seed=1), program(x).float()
    assert (result.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("m", [8, 64, 96])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM80, Arch.SM120A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
def test_the_chosen_tile_or_the_next_rung_spills_nothing(
    case: str, m: int, arch: Arch, alignment: Alignment
) -> None:
    """The tiles of Llama 8B's gate and up. A pair whose tile does not fit by the estimate is left apart."""
    spec = replace(epilogue_spec("swiglu", True), accumulators=CASES[case].spec.accumulators)
    chosen = choose(arch, spec, Sizes(m, 14336, 4096), arch.target.sm_count)
    if fits(Tiled(spec, chosen)):
        (verdict,) = assert_sound([plan(spec, chosen, alignment)])
        assert len(verdict.spilled) <= 2, verdict.words
