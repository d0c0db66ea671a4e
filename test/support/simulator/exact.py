"""Specs, operands and tiles of exact products: small integers and powers of two, with results to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.replay import replay
from cute_backend.runtime.arguments.operands import TORCH_DTYPES
from cute_backend.simulator.simulate import Launch, Machine, run_region
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Order,
    ProductKind,
    Reduction,
    Scaling,
    Store,
    Stride,
    WeightGroups,
)

SM80, SM90, SM100 = Arch.SM80, Arch.SM90A, Arch.SM100A


ARCHS = pytest.mark.parametrize("arch", [SM100, SM90], ids=lambda arch: arch.value)


def op(name: str, row: str, *operands: str) -> Op:
    return Op(name, row, operands, DType.F32)


SCALE_A = Load("scale_a", LoadKind.COLVEC, DType.F32, Stride.ONE, Stride.ZERO)


SCALE_B = Load("scale_b", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE)


RESIDUAL = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE)


TABLE = replace(
    RESIDUAL,
    stride_n=Stride.OTHER,
    m_modes=(Stride.ZERO, Stride.OTHER),
    blocks=Blocks(64, Stride.ZERO, Stride.ONE),
)
"""A table that two batches, each with half of the rows, share with all blocks of columns."""


GROUP_SCALE = Load("scale_g", LoadKind.GROUPVEC, DType.F32, Stride.ONE, Stride.ZERO)
"""A number for each group, as the scales of whole experts in NVFP4."""


def scaled_residual(
    a: DType = DType.E4M3, b: DType = DType.E4M3, a_major: Major = Major.K, b_major: Major = Major.K
) -> EpilogueSpec:
    """acc * scale_a * scale_b + exact0: a column, a row, and a plane."""
    return EpilogueSpec(
        (Accumulator("acc", a, b, a_major, b_major),),
        (SCALE_A, SCALE_B, RESIDUAL),
        (
            op("t0", "mul", "acc", "scale_a"),
            op("t1", "mul", "t0", "scale_b"),
            op("t2", "add", "t1", "exact0"),
        ),
        (Store("out0", "t2", DType.BF16),),
    )


def scaled_pair(
    a: DType = DType.BF16, b: DType = DType.BF16, a_major: Major = Major.K, b_major: Major = Major.K
) -> EpilogueSpec:
    """acc0 * scale_a * scale_b + exact0 - acc1: two products of one A, which do not commute."""
    return EpilogueSpec(
        tuple(Accumulator(name, a, b, a_major, b_major) for name in ("acc0", "acc1")),
        (SCALE_A, SCALE_B, RESIDUAL),
        (
            op("t0", "mul", "acc0", "scale_a"),
            op("t1", "mul", "t0", "scale_b"),
            op("t2", "add", "t1", "exact0"),
            op("t3", "sub", "t2", "acc1"),
        ),
        (Store("out0", "t3", DType.BF16),),
    )


def promoted(spec: EpilogueSpec) -> EpilogueSpec:
    """The spec with its fp8 sums promoted."""
    return replace(spec, accumulators=tuple(replace(acc, fast_accum=False) for acc in spec.accumulators))


LARGE = (-128, -63)
"""The values of int8 operands: sums of a K of 2,000 leave 24 bits, and none leaves int32."""


def integers(shape: tuple[int, int], dtype: DType, generator: torch.Generator) -> Tensor:
    if dtype in (DType.U4X2, DType.I4X2):
        return torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator).to(torch.uint8)
    low, high = {DType.I8: LARGE, DType.U8: (0, 256)}.get(dtype, (-2, 3))
    values = torch.randint(low, high, shape, generator=generator)
    return fp4(values) if dtype is DType.E2M1X2 else values.to(TORCH_DTYPES[dtype])


def fp4(values: Tensor) -> Tensor:
    """Integers of -4 to 4 but 3, (lines, K), as E2M1, two in a byte."""
    codes = torch.tensor([0, 2, 4, 0, 6])[values.abs().long()] + 8 * (values < 0)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.float4_e2m1fn_x2)


def operands(spec: EpilogueSpec, m: int, n: int, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Operands whose products and sums are integers below 2**24, so that only the store rounds.

    Every row and every column has a different scale, so that a wrong one changes the result. K counts values;
    a byte of fp4 has two. If columns are in segments, loads that vary over N belong to the first segment.
    """
    generator = torch.Generator().manual_seed(m + n + k)
    acc, *others = spec.accumulators
    n = acc.width or n
    a = integers((m, k) if acc.a_major is Major.K else (k, m), acc.a_dtype, generator)
    b = integers((n, k) if acc.b_major is Major.K else (k, n), acc.b_dtype, generator)
    loads = {
        "scale_a": torch.arange(m) % 61 + 1.0,
        "scale_b": torch.arange(n) % 67 + 1.0,
        "exact0": torch.randint(-99, 100, (m, n), generator=generator).to(torch.bfloat16),
        "exact1": torch.arange(m * n).view(m, n).remainder(101).to(torch.bfloat16),
    }
    if any(load.name == "exact0" and load.stride_m is Stride.ONE for load in spec.loads):
        loads["exact0"] = loads["exact0"].t().contiguous().t()
    if TABLE in spec.loads:
        table = torch.randint(-99, 100, (m // 2, 64), generator=generator).to(torch.bfloat16)
        loads["exact0"] = table[None, :, None].expand(2, m // 2, n // 64, 64)
    of_a, of_b = block_scales(acc, m, n, k) if acc.is_block_scaled else ([], [])
    if acc.weight_groups is not None:
        widths = [each.width or n for each in spec.accumulators]
        beside = (weight_vectors(acc.weight_groups, width, k, i) for i, width in enumerate(widths))
        of_b = [vector for of_all in zip(*beside, strict=True) for vector in of_all]
    return (
        [a if acc.a_major is Major.K else a.t(), *of_a],
        [
            b.t() if acc.b_major is Major.K else b,
            *(_another(each, each.width or n, k, generator) for each in others),
            *of_b,
        ],
        [loads[load.name].to(TORCH_DTYPES[load.dtype]) for load in spec.loads if load.name in loads],
    )


def _another(acc: Accumulator, n: int, k: int, generator: torch.Generator) -> Tensor:
    """The B of an accumulator after the first, (K, N)."""
    if acc.b_major is Major.K:
        return integers((n, k), acc.b_dtype, generator).t()
    return integers((k, n), acc.b_dtype, generator)


def weight_vectors(groups: WeightGroups, n: int, k: int, product: int = 0) -> list[Tensor]:
    """The scales and zeros of a weight in groups of K, (groups, N). They differ from their neighbours along
    either axis, and from those of another product."""
    numbers = 3 * torch.arange(k // groups.values) + torch.arange(n)[:, None] + 2 * product
    made = (numbers % 7 + 1.0, numbers % 5)
    return [each.to(TORCH_DTYPES[of]).t() for each, of in zip(made, groups.vectors, strict=False)]


def block_scales(acc: Accumulator, m: int, n: int, k: int) -> tuple[list[Tensor], list[Tensor]]:
    """The scales of A and of B, laid out as torch requires. Scales differ from their neighbours along either
    axis, and from those that are one MMA, one word or one tile away."""
    if acc.a_scaling.by_mma:
        return [tiled(acc.a_scaling, m, k, 5)], [tiled(acc.b_scaling, n, k, 3)]
    blocks = torch.arange(-(-k // 128))
    rows, columns = (torch.arange(count) for count in (acc.a_scaling.blocks(m), acc.b_scaling.blocks(n)))
    of_a = (5 * blocks[:, None] + rows) % 13 + 1.0
    of_b = (3 * blocks + 7 * columns[:, None]) % 11 + 1.0
    return [of_a.t()], [of_b.t()]


def tiled(scaling: Scaling, lines: int, k: int, step: int) -> Tensor:
    """Scales of single lines in tiles of 128 rows by 4 (cuBLAS, "1D Block Scaling"): 1 to 8 as powers of two,
    or numbers of 1 to 7. What pads them is the largest finite scale."""
    count = -(-k // scaling.facts.k)
    rows, columns = torch.meshgrid(torch.arange(lines), torch.arange(count), indexing="ij")
    kinds = 4 if scaling is Scaling.MX else 7
    numbers = (step * columns + rows + rows // 32 + columns // 4) % kinds
    codes = (
        numbers + 127 if scaling is Scaling.MX else (numbers + 1.0).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    wide = -(-count // 4)
    flat = torch.full((-(-lines // 128) * wide * 512,), 0x7E, dtype=torch.uint8)
    flat[(rows // 128 * wide + columns // 4) * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4] = (
        codes.to(torch.uint8)
    )
    return flat.view(TORCH_DTYPES[scaling.facts.dtype])


def check_exact(spec: EpilogueSpec, problem: tuple[int, int, int], machine: Machine) -> Launch:
    a, b, loads = operands(spec, *problem)
    outputs, launch = run_region(spec, a, b, loads, machine)
    for actual, expected in zip(outputs, replay(spec, a, b, loads), strict=True):
        assert torch.equal(actual, expected), wrong(actual, expected)
    return launch


def check_in_tile(
    spec: EpilogueSpec,
    config: TileConfig,
    m: int,
    n: int,
    k: int,
    alignments: Iterable[Alignment] = Alignment,
    **machine_of: int,
) -> None:
    """Checks a problem in a tile, and that no rule put another in its place for these alignments."""
    for alignment in alignments:
        planned = plan(spec, config, alignment).tile
        assert all(
            getattr(planned, size) == getattr(config, size) for size in ("tile_m", "tile_n", "products")
        )
    check_exact(spec, (m, n, k), machine(config, **machine_of))


def wrong(actual: Tensor, expected: Tensor) -> str:
    rows, columns = (actual.double() != expected.double()).nonzero().unbind(1)
    return (
        f"{len(rows)} of {actual.numel()} are wrong, in rows {rows.min()} to {rows.max()} and columns "
        f"{columns.min()} to {columns.max()}"
    )


def sm100(tile_m: int, tile_n: int, cluster_m: int = 1, cluster_n: int = 1, **options: int) -> TileConfig:
    return TileConfig(SM100, tile_m, tile_n, cluster_m, cluster_n, **options)


def sm90(tile_m: int, tile_n: int, cluster_m: int = 1, cluster_n: int = 1, **options: int) -> TileConfig:
    return TileConfig(SM90, tile_m, tile_n, cluster_m, cluster_n, **options)


def machine(config: TileConfig, seed: int | None = 1, clusters: int = 1) -> Machine:
    return Machine(config.arch, seed, config, clusters)


def batched(a_major: Major, b_major: Major, dtype: DType = DType.BF16) -> EpilogueSpec:
    """(acc * scale_b + exact0 + exact1) * colvec0 + scale_a, with operands that vary by column, by element,
    by batch and column, by batch, and by row; and the largest of each row."""
    z, s = Stride.ZERO, Stride.OTHER
    return EpilogueSpec(
        (Accumulator("acc", dtype, dtype, a_major, b_major, kind=ProductKind.BATCHED),),
        (
            SCALE_A,
            SCALE_B,
            RESIDUAL,
            replace(RESIDUAL, name="exact1", m_modes=(s, z)),
            Load("colvec0", LoadKind.COLVEC, DType.F32, s, z, (s, z)),
        ),
        (
            op("t0", "mul", "acc", "scale_b"),
            op("t1", "add", "t0", "exact0"),
            op("t2", "add", "t1", "exact1"),
            op("t3", "mul", "t2", "colvec0"),
            op("t4", "add", "t3", "scale_a"),
        ),
        (
            Store("out0", "t4", DType.BF16),
            Store("out1", "t4", DType.F32, form=Reduction(Axis.ROW, reductions.MAX)),
        ),
    )


def batches(
    spec: EpilogueSpec, count: int, m: int, n: int, k: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The operands of `count` products of (m, n, k), as those of `operands`."""
    made = [operands(spec, m + i, n, k) for i in range(count)]  # with different values in each
    a = torch.stack([a.contiguous()[:m] for (a,), _, _ in made])
    b = torch.stack([b.contiguous() for _, (b,), _ in made])
    a = a if spec.product.a_major is Major.K else a.transpose(1, 2).contiguous().transpose(1, 2)
    b = b.transpose(1, 2).contiguous().transpose(1, 2) if spec.product.b_major is Major.K else b
    _, _, (*loads, _) = operands(spec, count * m, n, k)
    of_batch = torch.arange(count * n).reshape(count, 1, n) % 53 - 26
    number = (torch.arange(count) + 1.0)[:, None]
    return [a], [b], [*loads, of_batch.bfloat16().expand(-1, m, -1), number.expand(-1, m)]


def sm80(tile_m: int, tile_n: int, **options: int) -> TileConfig:
    return TileConfig(Arch.SM80, tile_m, tile_n, **options)


def grouped(a_major: Major = Major.K, b_major: Major = Major.K) -> EpilogueSpec:
    """acc * scale_a * scale_b + exact0 + bias, a row for each group, and the largest of each row."""
    dense = scaled_residual(DType.BF16, DType.BF16, a_major, b_major)
    (acc,) = dense.accumulators
    return EpilogueSpec(
        (replace(acc, kind=ProductKind.GROUPED),),
        (*dense.loads, Load("bias", LoadKind.GROUPVEC, DType.F32, Stride.OTHER, Stride.ONE)),
        (*dense.ops, op("t3", "add", "t2", "bias")),
        (
            Store("out0", "t3", DType.BF16),
            Store("out1", "t3", DType.F32, form=Reduction(Axis.ROW, reductions.MAX)),
        ),
    )


def grouped_columns(a_major: Major = Major.MN, dtype: DType = DType.BF16) -> EpilogueSpec:
    """`grouped` with (M, N) planes that are contiguous along M, like those of a product whose columns are in
    groups, (G, N, K) by (K, M). The plane that is written has this dtype."""
    by_rows = grouped(a_major)
    residual = replace(RESIDUAL, stride_m=Stride.ONE, stride_n=Stride.OTHER)
    first, *others = by_rows.stores
    return replace(
        by_rows,
        loads=tuple(residual if load == RESIDUAL else load for load in by_rows.loads),
        stores=(replace(first, form=WholePlane(Order.COLUMN), dtype=dtype), *others),
    )


def grouped_k(dtype: DType = DType.BF16) -> EpilogueSpec:
    """acc * scale_a * scale_b + exact0 with K in groups, and the largest of each row. In fp8, each group has
    a scale_b of its own."""
    major = Major.MN if dtype is DType.BF16 else Major.K
    dense = scaled_residual(dtype, dtype, major, major)
    (acc,) = dense.accumulators
    by_group = Load("scale_b", LoadKind.GROUPVEC, DType.F32, Stride.OTHER, Stride.ONE)
    return replace(
        dense,
        accumulators=(replace(acc, kind=ProductKind.K_GROUPED),),
        loads=dense.loads if dtype is DType.BF16 else (SCALE_A, by_group, RESIDUAL),
        stores=(
            Store("out0", "t2", DType.BF16),
            Store("out1", "t2", DType.F32, form=Reduction(Axis.ROW, reductions.MAX)),
        ),
    )


def scaled_groups(
    spec: EpilogueSpec, ends: tuple[int, ...], m: int, n: int, k: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The operands of `groups` in MXFP8, MXFP4 or NVFP4, without a bias. The scales of each group's rows
    begin with a tile of their own, and those of each group's B are others. With GROUP_SCALE, each group has a
    number, too."""
    product = replace(spec.product, kind=ProductKind.DENSE)
    own = tuple(load for load in spec.loads if load != GROUP_SCALE)
    dense = EpilogueSpec((product,), own, (), (Store("out0", "acc", DType.BF16),))
    (a, _), _, loads = operands(dense, m, n, k)
    generator, scaling, dtype = (
        torch.Generator().manual_seed(m + n + k + 1),
        spec.product.a_scaling,
        spec.product.b_dtype,
    )
    bs = [integers((n, k), dtype, generator).view(torch.uint8) for _ in ends]
    b = torch.stack(bs).view(TORCH_DTYPES[dtype]).transpose(1, 2)
    of_rows = [tiled(scaling, end - first, k, 5 + i) for i, (first, end) in enumerate(pairwise((0, *ends)))]
    of_b = torch.stack([tiled(scaling, n, k, 3 + i).view(torch.uint8) for i in range(len(ends))])
    if GROUP_SCALE in spec.loads:
        loads.append((torch.arange(len(ends)) % 3 + 1.0)[:, None].expand(-1, n))
    ends_and_scales = [torch.tensor(ends, dtype=torch.int32), torch.cat(of_rows)]
    return [a, *ends_and_scales], [b, of_b.view(TORCH_DTYPES[scaling.facts.dtype])], loads


def groups_of_k(
    spec: EpilogueSpec, ends: tuple[int, ...], m: int, n: int, k: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Operands like those of `operands`, with groups of K that have these `ends`, and loads of
    (len(ends) * m, n). Beyond the last group are NaN."""
    a, b, _ = operands(spec, m, n, k)
    for beyond in (a[0][:, max(0, *ends) :], b[0][max(0, *ends) :]):
        beyond.copy_(torch.full(beyond.shape, torch.nan))
    loads = operands(spec, len(ends) * m, n, k)[2]
    if any(load.kind is LoadKind.GROUPVEC for load in spec.loads):
        loads[1] = torch.arange(len(ends) * n).reshape(len(ends), n) % 67 + 1.0
    return [*a, torch.tensor(ends, dtype=torch.int32)], b, loads


def groups(
    spec: EpilogueSpec, ends: tuple[int, ...], m: int, n: int, k: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Operands like those of `operands`, with groups of rows that have these `ends`, and a different B and
    bias for each group."""
    a, _, loads = operands(spec, m, n, k)
    b = torch.stack([operands(spec, m + i, n, k)[1][0].contiguous() for i in range(len(ends))])
    if spec.product.b_major is Major.K:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.arange(len(ends) * n).reshape(len(ends), n) % 59 * 5.0
    return [*a, torch.tensor(ends, dtype=torch.int32)], [b], [*loads, bias]
