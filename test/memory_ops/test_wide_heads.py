"""Queries, keys and values in one launch, with heads of 256 columns, normed and rotated as Gemma 3's are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.kinds.results import Heads
from cute_backend.planning import Alignment, Arch, offered, plan
from cute_backend.replay import replay
from cute_backend.simulator.simulate import Machine, run_region
from cute_backend.spec import (
    Accumulator,
    Blocks,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Operand,
    Store,
    Stride,
)
from support.sweeps import in_parts, of_part
from support.verdicts import assert_sound

COLUMNS = 256
BLOCKS = Blocks(COLUMNS, Stride.ZERO, Stride.ONE)
WEIGHT = Load("rowvec0", LoadKind.ROWVEC, DType.BF16, Stride.ZERO, Stride.OTHER, blocks=BLOCKS)
TABLE = Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.OTHER, (), BLOCKS)
SCALE = Load("colvec0", LoadKind.COLVEC, DType.F32, Stride.OTHER, Stride.ZERO)
OF_COLUMNS = Load("rowvec0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE)


class Chain:
    """Ops and loads with further names."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.loads: list[Load] = []

    def op(self, kind: str, *operands: Operand, block: int = 0) -> str:
        self.ops.append(Op(f"t{len(self.ops)}", kind, operands, DType.F32, block=block))
        return self.ops[-1].name

    def load(self, load: Load) -> str:
        base = load.name.rstrip("0")
        count = sum(each.name.startswith(base) for each in self.loads)
        self.loads.append(replace(load, name=f"{base}{count}"))
        return self.loads[-1].name


def gemma(heads: tuple[int, ...], dtype: DType = DType.BF16) -> EpilogueSpec:
    """All but the last of several products normed by head and rotated by halves; scaled first if in fp8."""
    chain, accumulators, stores = Chain(), [], []
    scale = chain.load(SCALE) if dtype.bits == 8 else ""
    for i, count in enumerate(heads):
        acc = Accumulator(f"acc{i}", dtype, dtype, width=count * COLUMNS)
        value = acc.name
        if scale:
            value = chain.op("mul", chain.op("mul", value, scale), chain.load(OF_COLUMNS))
        if i < len(heads) - 1:
            mean = chain.op("block_mean", chain.op("mul", value, value), block=COLUMNS)
            root = chain.op("rsqrt", chain.op("add", mean, Const(0.5)))
            value = chain.op("mul", chain.op("mul", value, root), chain.load(WEIGHT))
            turned = chain.op(ROTATE_HALF.name, value, block=COLUMNS)
            cos = chain.op("mul", value, chain.load(TABLE))
            value = chain.op("add", cos, chain.op("mul", turned, chain.load(TABLE)))
        accumulators.append(acc)
        stores.append(Store(f"out{i}", value, DType.BF16, form=Heads(0, COLUMNS)))
    return EpilogueSpec(tuple(accumulators), tuple(chain.loads), tuple(chain.ops), tuple(stores))


def operands(spec: EpilogueSpec, m: int, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(m)
    types = {DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.E4M3: torch.float8_e4m3fn}

    def integers(*shape: int, dtype: DType) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(types[dtype])

    loads = []
    for load in spec.loads:
        width, count = spec.width_of(load.name), spec.width_of(load.name) // COLUMNS
        if load.kind is LoadKind.ROWVEC and load.blocks is not None:
            loads.append(integers(COLUMNS, dtype=load.dtype).expand(count, COLUMNS))
        elif load.kind is LoadKind.EXACT:
            loads.append(integers(m, 1, COLUMNS, dtype=load.dtype).expand(m, count, COLUMNS))
        else:
            loads.append(integers(m if load.kind is LoadKind.COLVEC else width, dtype=load.dtype))
    dtype = spec.product.a_dtype
    bs = [integers(acc.width, k, dtype=dtype).t() for acc in spec.accumulators]
    return [integers(m, k, dtype=dtype)], bs, loads


HEADS = (8, 4, 4)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3], ids=lambda dtype: dtype.value)
def test_tiles_hold_wide_heads_of_segments(dtype: DType) -> None:
    tiles = {arch: [each.name for each in offered(arch, gemma(HEADS, dtype))] for arch in ARCHS}
    hopper = ["128x256_1x2", "64x256_1x1_pingpong", "128x256_2x1", "64x256_2x1_pingpong"]
    assert tiles == {Arch.SM90A: hopper, Arch.SM100A: ["256x256_2x1_2cta", "128x256_1x1"]}


ARCHS = (Arch.SM90A, Arch.SM100A)


@pytest.mark.sweep(1)
@in_parts(4)
@pytest.mark.parametrize("alignment", Alignment, ids=lambda alignment: alignment.value)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.value)
def test_every_kernel_of_wide_heads_has_a_sound_rung(
    arch: Arch, dtype: DType, alignment: Alignment, part: slice
) -> None:
    spec = gemma(HEADS, dtype)
    assert_sound([plan(spec, config, alignment) for config in of_part(offered(arch, spec), part)])


@pytest.mark.sim
@pytest.mark.parametrize("m", [1, 100, 127, 2049])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.value)
def test_wide_heads_at_edges(arch: Arch, m: int) -> None:
    """Values of fewer columns than the clusters of their tiles."""
    spec = gemma((3, 3, 1) if m < 2000 else (2, 2, 1))
    a, bs, loads = operands(spec, m, 64)
    results, _ = run_region(spec, a, bs, loads, Machine(arch, m, offered(arch, spec)[0], 1))
    for result, right in zip(results, replay(spec, a, bs, loads), strict=True):
        torch.testing.assert_close(result.float(), right.float(), rtol=8e-3, atol=8e-3)
