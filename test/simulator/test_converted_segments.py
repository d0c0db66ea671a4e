"""Products of one input by several weights of 8 and 4 bits, which one kernel converts, on the simulated
machine: each weight has rows of its own in the transposed product.

Small integers and powers of two, so that a kernel has to be right to the bit. Weights, scales, zeros and what
follows differ from segment to segment, and no width is a multiple of a tile.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cute_backend
from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, choose, named, plan, tile_table
from cute_backend.planning.kernel_plan import rungs
from cute_backend.planning.widths import visit_columns
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import TORCH_DTYPES
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import (
    STORED_DTYPES,
    Accumulator,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Store,
    Stride,
    WeightGroups,
)
from support.serialized import has_serialized_products
from support.simulator.exact import RESIDUAL, SCALE_A, SCALE_B, machine, op, weight_vectors, wrong

I8, U8, E4M3, U4X2, I4X2 = DType.I8, DType.U8, DType.E4M3, DType.U4X2, DType.I4X2
F32, BF16, F16 = DType.F32, DType.BF16, DType.F16

FORMATS: dict[str, tuple[DType, DType, WeightGroups | None]] = {
    "int8": (I8, BF16, None),
    "e4m3": (E4M3, F16, None),
    "int4": (I4X2, BF16, None),
    "HQQ": (U8, F16, WeightGroups(64, F16, F16, F16, F16)),
    "torchao's int8": (I8, BF16, WeightGroups(128, F32, F32, I8, BF16)),
    "torchao's int4": (I8, BF16, WeightGroups(32, BF16, BF16, I8, BF16)),
    "nibbles": (U4X2, BF16, WeightGroups(128, BF16, BF16, I8, BF16)),
    "nibbles in small groups": (I4X2, BF16, WeightGroups(32, BF16, BF16, BF16, BF16)),
    "without zeros": (I4X2, F16, WeightGroups(256, F32, F16)),
}
"""The stored dtype of all weights, that of the rows, and the weights' groups of K."""


def tile(tile_m: int, width: int) -> TileConfig:
    columns = visit_columns(width)
    shape = {"subtile_n": columns, "unrolled": columns < 32}
    return TileConfig(Arch.SM90A, tile_m, width, transposed=True, converts=True, **shape)


TILES = {
    "8 rows": tile(64, 8),
    "two warpgroups": tile(128, 32),
    "odd width": tile(64, 56),
    "wide": tile(64, 96),
}


def spec(format: str, *widths: int) -> EpilogueSpec:
    """A product by a scale of each row and of each column, one beside a plane, and bare ones."""
    stored, other, groups = FORMATS[format]
    accumulators = (
        Accumulator(f"acc{i}", other, stored, width=width, weight_groups=groups)
        for i, width in enumerate(widths)
    )
    ops = (
        op("t0", "mul", "acc0", "scale_a"),
        op("t1", "mul", "t0", "scale_b"),
        op("t2", "mul", "acc1", "scale_a"),
        op("t3", "sub", "exact0", "t2"),
    )
    stores = [Store("out0", "t1", BF16), Store("out1", "t3", F32)]
    stores += [Store(f"out{i}", f"acc{i}", F32) for i in range(2, len(widths))]
    return EpilogueSpec(tuple(accumulators), (SCALE_A, SCALE_B, RESIDUAL), ops, tuple(stores))


def operands(of: EpilogueSpec, m: int, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """All weights, then all their scales, then all their zeros."""
    generator = torch.Generator().manual_seed(m + k)
    product, widths = of.product, [each.width for each in of.accumulators]

    def drawn(low: int, high: int, *shape: int, dtype: DType) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(TORCH_DTYPES[dtype])

    if product.packing > 1:
        bs = [drawn(0, 256, n, k // 2, dtype=U8).t() for n in widths]
    else:
        bs = [drawn(0 if product.b_dtype is U8 else -4, 5, n, k, dtype=product.b_dtype).t() for n in widths]
    if (groups := product.weight_groups) is not None:
        every = (weight_vectors(groups, n, k, i) for i, n in enumerate(widths))
        bs += [vector for of_all in zip(*every, strict=True) for vector in of_all]
    loads = [
        torch.arange(m) % 5 + 1.0,
        torch.arange(widths[0]) % 7 + 1.0,
        drawn(-99, 100, m, widths[1], dtype=BF16),
    ]
    return [drawn(-2, 3, m, k, dtype=product.a_dtype)], bs, loads


def check(of: EpilogueSpec, config: TileConfig, m: int, k: int, alignment: Alignment = Alignment.TMA) -> None:
    """Checks a problem in this tile, and that no rule put another in its place."""
    config, given = replace(config, packing=of.product.packing), operands(of, m, k)
    planned = plan(of, config, alignment).tile
    assert (planned.tile_m, planned.tile_n) == (config.tile_m, config.tile_n)
    results, _ = run_region(of, *given, machine(config))
    for actual, expected in zip(results, replay(of, *given), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("m", [1, 5, 64, pytest.param(130, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("k", [256, 768, pytest.param(1792, marks=pytest.mark.exhaustive)])
def test_products_are_exact(format: str, name: str, m: int, k: int) -> None:
    """Rows beyond the last one of a segment are no rows of the next one."""
    check(spec(format, TILES[name].tile_m + 40, 72, 136), TILES[name], m, k)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("format", ["int8", "e4m3", "int4"])
def test_one_warpgroup_has_three_blocks_of_rows(format: str) -> None:
    check(spec(format, 232, 72), tile(192, 24), 5, 272)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("format", ["int8", "torchao's int4", "int4"])
@pytest.mark.parametrize("k", [32, 160, 352])
def test_k_ends_within_a_k_tile(format: str, k: int) -> None:
    check(spec(format, 104, 8, 40, 200), TILES["8 rows"], 5, k)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stored", STORED_DTYPES, ids=lambda dtype: dtype.value)
def test_dtypes(stored: DType) -> None:
    accumulators = (replace(each, b_dtype=stored) for each in spec("int8", 72, 104).accumulators)
    check(replace(spec("int8", 72, 104), accumulators=tuple(accumulators)), TILES["8 rows"], 5, 288)


def test_planes_that_are_not_aligned() -> None:
    of, m, k = spec("nibbles", 72, 104, 24), 5, 384
    a, bs, (scale_a, scale_b, plane) = operands(of, m, k)
    longer = torch.zeros(m, plane.shape[1] + 1, dtype=plane.dtype)
    longer[:, 1:] = plane
    given = [a, bs, [scale_a, scale_b, longer[:, 1:]]]
    results, _ = run_region(of, *given, machine(replace(TILES["8 rows"], packing=2)))
    for actual, expected in zip(results, replay(of, a, bs, [scale_a, scale_b, plane]), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)


def test_each_segment_has_the_weights_of_its_chain() -> None:
    """A unit matrix picks the weights, whose scales and zeros have any bits."""
    stored, _, groups = FORMATS["nibbles"]
    widths, k = (72, 40), 256
    accumulators = tuple(
        Accumulator(f"acc{i}", BF16, stored, width=width, weight_groups=groups)
        for i, width in enumerate(widths)
    )
    of = EpilogueSpec(accumulators, (), (), tuple(Store(f"out{i}", f"acc{i}", F32) for i in range(2)))
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8) for n in widths]
    scales = [torch.rand(n, k // 128, generator=generator).bfloat16() for n in widths]
    zeros = [torch.randint(-9, 16, (n, k // 128), generator=generator).to(torch.int8) for n in widths]
    given = [each.t() for each in (*weights, *scales, *zeros)]
    a = torch.eye(k)[96:160].bfloat16()  # of both groups
    results, _ = run_region(of, [a], given, [], machine(replace(tile(64, 64), packing=2)))
    for result, w, scale, zero in zip(results, weights, scales, zeros, strict=True):
        codes = torch.stack([w & 15, w >> 4], 2).view(len(w), -1, 128).bfloat16()
        chain = (codes - zero[..., None].bfloat16()) * scale[..., None]
        assert torch.equal(result, chain.view(len(w), k).t()[96:160].float())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("m", [5, 64])
def test_a_program(m: int) -> None:
    """Queries, keys and values, from torch.compile to the simulated kernel. Keys have no scale, and values a
    bias."""
    torch.manual_seed(m)
    x = torch.randn(m, 272, dtype=torch.bfloat16)
    weights = [torch.randint(-128, 128, (n, 272), dtype=torch.int8) for n in (136, 40, 72)]
    scale, bias = torch.rand(136) / 99, torch.randn(72, dtype=torch.bfloat16)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (F.linear(x, w.to(x.dtype)) for w in weights)
        return (q * scale.to(x.dtype)).view(m, 17, 8).transpose(0, 1), k, (v + bias).relu()

    (region,) = cute_backend.explain(program, x, arch="sm_90a").regions
    assert [acc.width for acc in region.spec.accumulators] == [136, 40, 72]
    results = cute_backend.simulate(program, x, arch="sm_90a", async_seed=1)
    for result, expected in zip(results, program(x), strict=True):
        assert (result.float() - expected.float()).norm() < 0.01 * expected.float().norm()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [8, 16, 32, 64, 96, 128])
def test_the_tiles_of_a_model_are_sound(format: str, m: int) -> None:
    """Those of Llama 8B's queries, keys and values, or those that take their place where a kernel spills."""
    _, other, _ = FORMATS[format]
    given = spec(format, 4096, 1024, 1024)
    sizes, each = Sizes(m, 6144, 4096), replace(SCALE_B, name="scale_c", dtype=other)
    of = replace(given, loads=(*given.loads, each), ops=(*given.ops, op("t4", "mul", "acc2", "scale_c")))
    of = replace(of, stores=(*of.stores[:2], Store("out2", "t4", other)))
    built = []
    for rung in rungs(plan(of, choose(Arch.SM90A, of, sizes, 132), Alignment.TMA)):
        built.append(build(Kernel(rung)))
        if not built[-1].spill_bytes:
            break
    assert not built[-1].spill_bytes and not has_serialized_products(built[-1].cubin)


def test_a_tile_of_any_width_serves_by_its_name() -> None:
    of = spec("int8", 4096, 1024, 1024)
    tile = choose(Arch.SM90A, of, Sizes(176, 6144, 4096), 132)
    assert tile.tile_n not in {each.tile_n for each in tile_table(Arch.SM90A, of)}
    assert named(Arch.SM90A, of, tile.name) == tile


def test_a_scale_of_one_segment_is_none_of_another() -> None:
    """Loads with columns belong to one segment; the scale of a row may be shared."""
    of = spec("int8", 72, 104, 40)
    assert [of.width_of(load.name) for load in of.loads] == [0, 72, 104]
    shared = Load("rowvec0", LoadKind.ROWVEC, F32, Stride.ZERO, Stride.ONE)
    with pytest.raises(ValueError, match="rowvec0 is a rowvec of 2 segments; only a scalar or a colvec has"):
        replace(
            of,
            loads=(*of.loads, shared),
            ops=(*of.ops, op("t4", "mul", "acc2", "rowvec0"), op("t5", "mul", "t1", "rowvec0")),
            stores=(replace(of.stores[0], value="t5"), of.stores[1], replace(of.stores[2], value="t4")),
        )
