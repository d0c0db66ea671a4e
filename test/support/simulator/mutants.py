"""Planted faults (mutants) in kernels: what one consists of, and the kernels that faults are planted in.

A fault is planted while a kernel is traced, by replacing what it calls (`planting.py`). Only what the
compiler alone makes, such as the bits of a descriptor, is replaced in PTX. The faults themselves are in
`mutants_sm80.py`, `mutants_sm90.py` and `mutants_sm100.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch

from cute_backend.kinds import reductions
from cute_backend.kinds.blocks import ROTATE_FIRST, ROTATE_HALF
from cute_backend.kinds.results import Heads, TiledScales
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import Alignment, Arch, Rowvecs, TileConfig, plan
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.compiling.compile import SYMBOL
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator import simulate
from cute_backend.simulator.host import HostProgram
from cute_backend.spec import (
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Op,
    ProductKind,
    Reduction,
    Scaling,
    Store,
    WeightGroups,
)
from support.compile_once import afresh
from support.simulator.exact import (
    GROUP_SCALE,
    SCALE_B,
    TABLE,
    grouped,
    grouped_columns,
    grouped_k,
    groups,
    groups_of_k,
    op,
    operands,
    promoted,
    scaled_groups,
    scaled_pair,
    scaled_residual,
    sm80,
    sm90,
    sm100,
    wrong,
)
from support.simulator.planting import Wrong, part_of, planted

# An fp8 product with scales of rows and columns and a residual, written in bf16.
SPEC = scaled_residual()
# Its largest element of each column in place of the plane: a reduction with partials and a second kernel.
LARGEST = replace(SPEC, stores=(Store("out0", "t2", DType.F32, form=Reduction(Axis.COLUMN, reductions.MAX)),))
# Its largest element of each row, which the last tile of the row writes.
LARGEST_OF_ROWS = replace(
    SPEC, stores=(Store("out0", "t2", DType.F32, form=Reduction(Axis.ROW, reductions.MAX)),)
)
# A product with DeepSeek's fp32 scales, A in blocks of 1 x 128 and B in blocks of 128 x 128.
BLOCKWISE = replace(
    SPEC,
    accumulators=(
        replace(SPEC.accumulators[0], fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE),
    ),
    loads=SPEC.loads[2:],
    ops=(replace(SPEC.ops[2], operands=("acc", "exact0")),),
)
# Products whose scales the MMA applies.
BLACKWELL_SCALED = {
    name: replace(
        BLOCKWISE,
        accumulators=(Accumulator("acc", dtype, dtype, a_scaling=scaling, b_scaling=scaling),),
    )
    for name, scaling, dtype in (
        ("mxfp8", Scaling.MX, DType.E4M3),
        ("mxfp4", Scaling.MX, DType.E2M1X2),
        ("nvfp4", Scaling.NV, DType.E2M1X2),
    )
}
# A kernel that writes E8M0 scales in tiles.
SCALES = replace(
    BLACKWELL_SCALED["mxfp8"],
    loads=(),
    ops=(
        op("t0", "abs", "acc"),
        Op("t1", "block_max", ("t0",), DType.F32, block=32),
        Op("t2", "add", ("t1", Const(1.0)), DType.F32),
    ),
    stores=(Store("out0", "t2", DType.E8M0, TiledScales(32)),),
)
"""Even if all elements are zeros, the code of the largest one plus 1 differs from the padding of the
scales."""
# BLOCKWISE, with a scale for each column and block of K of B.
COLUMNWISE = replace(BLOCKWISE, accumulators=(replace(BLOCKWISE.accumulators[0], b_scaling=Scaling.LINE),))
# A product of int8, minus a number, in int32.
INT8 = EpilogueSpec(
    (Accumulator("acc", DType.I8, DType.I8),),
    (),
    (Op("t0", "sub", ("acc", Const(7)), DType.I32),),
    (Store("out0", "t0", DType.I32),),
)
# A bf16 input times a weight of int8 with a scale for each column.
CONVERTED = EpilogueSpec(
    (Accumulator("acc", DType.BF16, DType.I8),),
    (SCALE_B,),
    (op("t0", "mul", "acc", "scale_b"),),
    (Store("out0", "t0", DType.F32),),
)
# Two products of one A in bf16, and by weights of int8, or of two values in a byte in groups of K.
TWO_PRODUCTS = scaled_pair()
TWO_CONVERTED, TWO_IN_GROUPS = (
    replace(
        TWO_PRODUCTS,
        accumulators=tuple(
            replace(each, b_dtype=stored, weight_groups=groups) for each in TWO_PRODUCTS.accumulators
        ),
    )
    for stored, groups in (
        (DType.I8, None),
        (DType.I4X2, WeightGroups(64, DType.BF16, DType.BF16, DType.I8, DType.BF16)),
    )
)
# A bf16 input times a weight of uint8 in groups of K, with scales and zeros.
GROUPED_WEIGHT = replace(
    CONVERTED,
    accumulators=(
        Accumulator(
            "acc",
            DType.BF16,
            DType.U8,
            weight_groups=WeightGroups(64, DType.BF16, DType.BF16, DType.BF16, DType.BF16),
        ),
    ),
)
# The same of two values in a byte, with integer zeros: with signs, or without and in the smallest groups.
GROUPED_NIBBLES, LESS_UNSIGNED = (
    replace(
        CONVERTED,
        accumulators=(
            Accumulator(
                "acc",
                DType.BF16,
                DType.U4X2,
                weight_groups=WeightGroups(values, DType.BF16, DType.BF16, zero, DType.BF16),
            ),
        ),
    )
    for values, zero in ((64, DType.I8), (32, DType.U8))
)
# The same of int8, with scales in fp32 and zeros of int8, for whole k tiles.

INTEGER_ZEROS = replace(
    CONVERTED,
    accumulators=(
        Accumulator(
            "acc",
            DType.BF16,
            DType.I8,
            weight_groups=WeightGroups(128, DType.F32, DType.F32, DType.I8, DType.BF16),
        ),
    ),
)
# SPEC without fast accumulation: the sums of k tiles are promoted.
SLOW = promoted(SPEC)
_BF16 = scaled_residual(DType.BF16, DType.BF16)
FP8_PLANES = replace(
    _BF16,
    loads=tuple(replace(load, dtype=DType.E4M3) if load.order else load for load in _BF16.loads),
    stores=(replace(_BF16.stores[0], dtype=DType.E4M3),),
)
# SPEC, with a repeating table in place of the residual.
REPEATED = replace(SPEC, loads=(*SPEC.loads[:2], TABLE))
# A product of which each 64 columns are rotated by halves, so that a kernel keeps columns in another order.
ROTATED = replace(
    SPEC,
    loads=SPEC.loads[:2],
    ops=(
        replace(SPEC.ops[0], operands=("acc", "scale_b")),
        replace(SPEC.ops[0], name="t1", op=ROTATE_HALF.name, operands=("t0",), block=64),
        replace(SPEC.ops[0], name="t2", operands=("t1", "scale_a")),
    ),
)
# ROTATED, times a table.
ROTATED_BY_TABLE = replace(
    ROTATED,
    loads=(*ROTATED.loads, TABLE),
    ops=(*ROTATED.ops, op("t3", "mul", "t2", TABLE.name)),
    stores=tuple(replace(store, value="t3") for store in ROTATED.stores),
)
# ROTATED, with neighbouring columns as partners.
NEIGHBOURS = replace(ROTATED, ops=(ROTATED.ops[0], replace(ROTATED.ops[1], block=2), ROTATED.ops[2]))
# ROTATED, of the first 20 of each 96 columns, whose halves are 10 apart, in other lanes.
FIRST_COLUMNS = replace(
    ROTATED,
    ops=(
        ROTATED.ops[0],
        replace(ROTATED.ops[1], op=ROTATE_FIRST.name, operands=("t0", Const(20)), block=96),
        ROTATED.ops[2],
    ),
)
# A product of which each 64 columns are divided by the largest of them, plus 1.
LARGEST_OF_BLOCKS = replace(
    ROTATED,
    ops=(
        ROTATED.ops[0],
        replace(ROTATED.ops[0], name="t1", op="abs", operands=("t0",)),
        replace(ROTATED.ops[0], name="t2", op="block_max", operands=("t1",), block=64),
        replace(ROTATED.ops[0], name="t3", op="add", operands=("t2", Const(1.0))),
        replace(ROTATED.ops[0], name="t4", op="div", operands=("t0", "t3")),
    ),
    stores=(replace(ROTATED.stores[0], value="t4"),),
    loads=ROTATED.loads[1:],
)
# LARGEST_OF_BLOCKS, behind the residual, and times it: a plane is read ahead of passes, another by visits.
KEPT = replace(
    LARGEST_OF_BLOCKS,
    ops=(
        ROTATED.ops[0],
        op("kept", "add", "t0", "exact0"),
        *(
            replace(each, operands=tuple("kept" if name == "t0" else name for name in each.operands))
            for each in LARGEST_OF_BLOCKS.ops[1:]
        ),
        op("t5", "add", "t4", "exact1"),
    ),
    stores=(replace(ROTATED.stores[0], value="t5"),),
    loads=(*LARGEST_OF_BLOCKS.loads, SPEC.loads[2], replace(SPEC.loads[2], name="exact1")),
)
# A product whose columns are in two segments, of 72 and 136 columns.
SEGMENTED = replace(
    SPEC,
    accumulators=tuple(
        replace(SPEC.product, name=f"acc{i}", width=width) for i, width in enumerate((72, 136))
    ),
    ops=(
        replace(SPEC.ops[0], operands=("acc0", SPEC.ops[0].operands[1])),
        *SPEC.ops[1:],
        replace(SPEC.ops[0], name="t3", operands=("acc1", "scale_a")),
    ),
    stores=(*SPEC.stores, Store("out1", "t3", DType.F32)),
)
# A product that writes heads, (B, H, 40, 64).
HEADED = replace(
    ROTATED,
    ops=ROTATED.ops[:1],
    stores=(replace(SPEC.stores[0], value="t0", form=Heads(40, 64)),),
    loads=SPEC.loads[:2],
)
# A product of rows in groups.
GROUPED = replace(grouped(), stores=grouped().stores[:1])
# A product of columns in groups, computed transposed.
GROUPED_COLUMNS = replace(grouped_columns(), stores=grouped_columns().stores[:1])
# Rows in groups in MXFP8.
GROUPED_MX = replace(
    BLACKWELL_SCALED["mxfp8"],
    accumulators=(replace(BLACKWELL_SCALED["mxfp8"].product, kind=ProductKind.GROUPED),),
)
# Rows in groups in MXFP4 and NVFP4; the latter with a number for each group.
GROUPED_FP4 = {
    name: replace(each, accumulators=(replace(each.product, kind=ProductKind.GROUPED),))
    for name, each in BLACKWELL_SCALED.items()
    if each.product.a_dtype is DType.E2M1X2
}
GROUPED_FP4["nvfp4"] = replace(
    GROUPED_FP4["nvfp4"],
    loads=(*GROUPED_FP4["nvfp4"].loads, GROUP_SCALE),
    ops=(*GROUPED_FP4["nvfp4"].ops, op("scaled", "mul", GROUPED_FP4["nvfp4"].ops[-1].name, "scale_g")),
    stores=tuple(replace(store, value="scaled") for store in GROUPED_FP4["nvfp4"].stores),
)
# A product of K in groups, in 16 bits.
GROUPED_K = replace(grouped_k(), stores=grouped_k().stores[:1])
# A product of K in groups, in fp8.
GROUPED_K_FP8 = replace(grouped_k(DType.E4M3), stores=GROUPED_K.stores)


class WrongNumbers(AssertionError):
    """A kernel ran to its end, and its results differ from the reference."""


@dataclass(frozen=True)
class Subject:
    """A kernel, and a problem of several tiles, which `clusters` clusters work through. `ends` are the ends
    of the groups of a grouped product."""

    config: TileConfig
    problem: tuple[int, int, int]
    alignment: Alignment = Alignment.TMA
    spec: EpilogueSpec = SPEC
    clusters: int = 1
    ends: tuple[int, ...] = ()

    @property
    def kernel(self) -> Kernel:
        return Kernel(plan(self.spec, self.config, self.alignment))

    def check(self, program: HostProgram, seed: int) -> None:
        """Runs the problem. Raises WrongNumbers, or the simulator's error."""
        if self.spec.product.kind is ProductKind.K_GROUPED:
            a, b, loads = groups_of_k(self.spec, self.ends, *self.problem)
        elif self.ends and self.spec.product.is_block_scaled:
            a, b, loads = scaled_groups(self.spec, self.ends, *self.problem)
        elif self.ends:
            a, b, loads = groups(self.spec, self.ends, *self.problem)
        else:
            a, b, loads = operands(self.spec, *self.problem)
        machine = simulate.Machine(self.config.arch, seed, self.config, clusters=self.clusters)
        with patch.object(simulate, "_program", lambda kernel: program):
            results, launch = simulate.run_region(self.spec, a, b, loads, machine)
        assert launch.kernel == self.kernel
        for actual, expected in zip(results, replay(self.spec, a, b, loads), strict=True):
            if not torch.equal(actual, expected):
                raise WrongNumbers(wrong(torch.atleast_2d(actual), torch.atleast_2d(expected)))


# The kernels that faults are planted in. A new fault takes the smallest one that makes the call.
ONE = Subject(sm100(128, 64), (192, 192, 384))  # M = N: only the strides tell a row from a column
PAIR = Subject(sm100(256, 64, 2, 1, ctas=2), (520, 104, 256))
MULTICAST = Subject(sm100(128, 64, 2, 2), (296, 168, 256))
HALVES = Subject(sm100(128, 128, column_groups=2), (192, 328, 384))
MASKED = Subject(sm100(128, 64), (131, 69, 128), Alignment.PLAIN)
PING_PONG = Subject(sm90(64, 128, pingpong=True), (136, 144, 896))  # 7 k tiles: stages change hands
FEW_ROWS = Subject(sm90(64, 64), (40, 72, 256))
COOPERATIVE = Subject(sm90(128, 128), (136, 136, 896))
STAGED = Subject(sm90(128, 256, rowvecs=Rowvecs.SMEM_STAGED), (136, 264, 512))
PROMOTED = Subject(sm90(64, 64), (72, 72, 896), spec=SLOW)
HOPPER_MULTICAST = Subject(sm90(128, 64, 2, 1), (136, 136, 512))
REDUCING = Subject(sm90(128, 64), (136, 136, 128), spec=LARGEST)
REDUCING_ROWS = Subject(sm90(128, 64, 1, 2), (136, 136, 128), spec=LARGEST_OF_ROWS, clusters=4)
BLOCK_SCALED = Subject(sm90(64, 128, pingpong=True), (72, 136, 1280), spec=BLOCKWISE)
COLUMN_SCALED = Subject(sm90(64, 64), (72, 72, 1040), spec=COLUMNWISE)
PIECES = Subject(sm90(64, 256, pingpong=True), (72, 264, 1040), spec=COLUMNWISE)
HALF_BLOCKS = Subject(sm90(64, 192, pingpong=True), (40, 328, 400), spec=BLOCKWISE)
SCALED_PARTS = Subject(sm90(64, 64, split_k=4), (40, 72, 640), spec=BLOCKWISE)  # 2, 2, 1 and 0 blocks
BLACKWELL_BLOCKS = Subject(sm100(128, 64), (136, 200, 784), spec=BLOCKWISE)
BLACKWELL_LINES = Subject(sm100(256, 128, 2, ctas=2, column_groups=2), (264, 136, 400), spec=COLUMNWISE)
WRITES_SCALES = Subject(sm100(128, 64), (200, 160, 288), spec=SCALES)
MXFP8 = Subject(sm100(128, 64), (136, 200, 1152), spec=BLACKWELL_SCALED["mxfp8"])
MXFP4 = Subject(sm100(128, 128), (136, 136, 1056), spec=BLACKWELL_SCALED["mxfp4"])
NVFP4 = Subject(sm100(256, 192, 2, ctas=2), (264, 392, 544), spec=BLACKWELL_SCALED["nvfp4"])
WARPS = Subject(sm80(64, 64), (136, 136, 896), spec=scaled_residual(DType.BF16, DType.BF16))
FEW_K_TILES = replace(WARPS, problem=(72, 72, 72))
MANY_SUBTILES = replace(WARPS, config=sm80(128, 128), problem=(136, 136, 72))
TWO_CTAS = replace(WARPS, config=sm80(64, 64, occupancy=2), problem=(136, 136, 208))
WHOLE_K_TILES = replace(TWO_CTAS, problem=(136, 136, 192))
ADA = Subject(TileConfig(Arch.SM89, 64, 64), (72, 136, 304), spec=SLOW)
# A box of 16 columns of fp8 has a vector for half of a warp's lanes.
HALF_BOXES = Subject(
    TileConfig(Arch.SM89, 64, 48, subtile_n=16, transposed=True), (72, 144, 208), spec=FP8_PLANES
)
FED_BY_TMA = replace(WARPS, config=TileConfig(Arch.SM120A, 64, 64))
ROWS_BESIDE_TMA = replace(
    FED_BY_TMA, config=replace(FED_BY_TMA.config, rowvecs=Rowvecs.SMEM_STAGED), problem=(200, 72, 304)
)
PARTS = Subject(sm90(64, 64, split_k=4), (72, 72, 1040))
BLACKWELL_PARTS = Subject(sm100(128, 64, split_k=4), (136, 72, 1040))
SUMS_BY_WGMMA = Subject(sm90(64, 64, split_k=6), (72, 72, 1040))
SUMS_IN_MEMORY = replace(
    WARPS, config=sm80(64, 64, split_k=4, rowvecs=Rowvecs.SMEM_STAGED), problem=(136, 72, 720)
)
# In the third of four parts, K ends in a k tile that another one follows.
TWO_CTAS_IN_PARTS = replace(TWO_CTAS, config=sm80(64, 64, occupancy=2, split_k=4), problem=(72, 72, 272))
SUMS_BY_TMA = replace(FED_BY_TMA, config=replace(FED_BY_TMA.config, split_k=2), problem=(72, 72, 304))
INT8_BY_WGMMA = Subject(sm90(64, 64, pingpong=True), (136, 72, 272), spec=INT8)
CONVERTING = Subject(
    sm90(64, 16, subtile_n=16, transposed=True, converts=True), (24, 136, 2320), spec=CONVERTED
)
# Both products of a pair, transposed: a warpgroup has two blocks of 64 rows of each.
STACKED = Subject(
    sm90(128, 24, subtile_n=24, pingpong=True, transposed=True, products=2), (40, 264, 448), spec=TWO_PRODUCTS
)
CONVERTING_BY_WARPS = Subject(
    sm80(64, 32, transposed=True, converts=True),
    (40, 136, 464),
    spec=replace(CONVERTED, accumulators=(Accumulator("acc", DType.BF16, DType.E4M3),)),
)
CONVERTING_BESIDE_TMA = replace(
    CONVERTING_BY_WARPS,
    config=replace(CONVERTING_BY_WARPS.config, arch=Arch.SM120A),
    problem=(40, 136, 2320),
    spec=CONVERTED,
)
CONVERTING_GROUPS = Subject(
    sm90(64, 16, subtile_n=16, transposed=True, converts=True), (24, 136, 1472), spec=GROUPED_WEIGHT
)
CONVERTING_INTEGERS = replace(CONVERTING_GROUPS, problem=(24, 136, 1408), spec=INTEGER_ZEROS)
NIBBLES = Subject(
    sm90(64, 16, subtile_n=16, transposed=True, converts=True, packing=2),
    (24, 136, 1472),
    spec=GROUPED_NIBBLES,
)
NIBBLES_LESS_UNSIGNED = replace(NIBBLES, spec=LESS_UNSIGNED)
NIBBLES_BY_WARPS = replace(
    NIBBLES_LESS_UNSIGNED,
    config=sm80(64, 32, transposed=True, converts=True, packing=2),
    problem=(24, 136, 1312),
)
NIBBLES_BESIDE_TMA = replace(NIBBLES_BY_WARPS, config=replace(NIBBLES_BY_WARPS.config, arch=Arch.SM120A))
GROUPS_IN_PARTS = replace(CONVERTING_GROUPS, config=replace(CONVERTING_GROUPS.config, split_k=2))
GROUPS_BY_WARPS = replace(CONVERTING_GROUPS, config=CONVERTING_BY_WARPS.config)
GROUPS_BESIDE_TMA = replace(CONVERTING_GROUPS, config=CONVERTING_BESIDE_TMA.config)
GROUPS_BY_WARPS_IN_PARTS = replace(GROUPS_BY_WARPS, config=replace(GROUPS_BY_WARPS.config, split_k=2))
CONVERTING_PAIR = Subject(
    sm90(64, 16, subtile_n=16, unrolled=True, transposed=True, converts=True, products=2),
    (24, 104, 784),
    spec=TWO_CONVERTED,
)
PAIR_IN_GROUPS = replace(
    CONVERTING_PAIR,
    config=replace(CONVERTING_PAIR.config, packing=2),
    problem=(24, 104, 832),
    spec=TWO_IN_GROUPS,
)
SEGMENTS_IN_GROUPS = replace(
    PAIR_IN_GROUPS,
    config=replace(PAIR_IN_GROUPS.config, products=1),
    problem=(24, 208, 832),
    spec=replace(
        SEGMENTED,
        accumulators=tuple(
            replace(each, name=of.name, width=of.width)
            for each, of in zip(TWO_IN_GROUPS.accumulators, SEGMENTED.accumulators, strict=True)
        ),
    ),
)
PAIR_BY_WARPS = replace(
    PAIR_IN_GROUPS, config=sm80(64, 32, transposed=True, converts=True, packing=2, products=2)
)
PAIR_BESIDE_TMA = replace(PAIR_BY_WARPS, config=replace(PAIR_BY_WARPS.config, arch=Arch.SM120A))
INT8_IN_PARTS = Subject(sm90(64, 64, split_k=4), (72, 72, 2064), spec=INT8)
INT8_BY_WARPS = Subject(sm80(128, 128), (136, 72, 272), spec=INT8)
INT8_ON_BLACKWELL = Subject(sm100(128, 64), (136, 72, 272), spec=INT8)

ROTATING = Subject(sm90(64, 128, pingpong=True), (72, 192, 256), spec=ROTATED)
ROTATING_TABLE = Subject(sm90(64, 128, pingpong=True), (256, 192, 256), spec=ROTATED_BY_TABLE)
REPEATING = Subject(sm90(64, 64), (256, 128, 128), spec=REPEATED)
ROTATING_NEIGHBOURS = Subject(sm90(64, 64), (72, 72, 128), spec=NEIGHBOURS)
ROTATING_FIRST = Subject(sm90(64, 96, subtile_n=96), (72, 192, 128), spec=FIRST_COLUMNS)
PASSES = Subject(sm90(64, 128, pingpong=True), (72, 192, 256), spec=LARGEST_OF_BLOCKS)
BLACKWELL_PASSES = Subject(sm100(128, 128), (136, 192, 256), spec=LARGEST_OF_BLOCKS)
KEEPS = Subject(sm90(64, 128, pingpong=True), (72, 192, 256), spec=KEPT)
BLACKWELL_KEEPS = Subject(sm100(128, 128), (136, 192, 256), spec=KEPT)
ROTATING_IN_PARTS = Subject(sm90(64, 64), (72, 192, 128), spec=FIRST_COLUMNS)
SEGMENTS = Subject(sm90(64, 64, pingpong=True), (136, 208, 256), spec=SEGMENTED)
HEADS = Subject(sm90(64, 128, pingpong=True), (120, 192, 64), spec=HEADED)
BLACKWELL_HEADS = Subject(sm100(128, 128), (120, 192, 64), spec=HEADED)
BLACKWELL_SEGMENTS = Subject(sm100(128, 64), (136, 208, 256), spec=SEGMENTED)
BLACKWELL_ROTATING = Subject(sm100(128, 64), (136, 128, 256), spec=ROTATED)

ENDS = (*range(20), 83, 83, 128)
GROUPS = Subject(sm90(64, 64, 2), (128, 72, 160), spec=GROUPED, ends=ENDS)
PING_PONG_GROUPS = Subject(sm90(128, 64, pingpong=True), (128, 72, 160), spec=GROUPED, ends=(0, 70, 128))
BLACKWELL_GROUPS = Subject(sm100(128, 64), (128, 72, 160), spec=GROUPED, ends=ENDS)
COLUMN_GROUPS = Subject(sm90(64, 64), (128, 72, 160), spec=GROUPED_COLUMNS, ends=(0, 72, 104, 128))
BLACKWELL_COLUMN_GROUPS = replace(COLUMN_GROUPS, config=sm100(128, 64))
MX_GROUPS = Subject(sm100(128, 64), (200, 136, 288), spec=GROUPED_MX, ends=(1, 130, 130, 200))
K_GROUPS = Subject(sm90(64, 64, pingpong=True), (72, 72, 200), spec=GROUPED_K, ends=(0, 70, 71, 190))
BLACKWELL_K_GROUPS = Subject(sm100(128, 64), (72, 72, 200), spec=GROUPED_K, ends=(0, 70, 71, 190))
K_GROUPS_FP8 = Subject(sm90(64, 64), (72, 72, 240), spec=GROUPED_K_FP8, ends=(16, 16, 160, 208))
BLACKWELL_K_GROUPS_FP8 = replace(K_GROUPS_FP8, config=sm100(128, 64))
K_TAILS = replace(K_GROUPS_FP8, config=sm90(64, 64, 2), ends=(16, 16, 160, 203))
BLACKWELL_K_TAILS = replace(K_TAILS, config=sm100(128, 64))
PAIRS_OF_K_TAILS = replace(K_TAILS, config=sm100(256, 64, 2, ctas=2))

SUBJECTS = {
    "one": ONE,
    "pair": PAIR,
    "multicast": MULTICAST,
    "halves": HALVES,
    "masked": MASKED,
    "ping-pong": PING_PONG,
    "few rows": FEW_ROWS,
    "cooperative": COOPERATIVE,
    "staged": STAGED,
    "promoted": PROMOTED,
    "block-scaled": BLOCK_SCALED,
    "column-scaled": COLUMN_SCALED,
    "scaled parts": SCALED_PARTS,
    "blocks on Blackwell": BLACKWELL_BLOCKS,
    "lines on Blackwell": BLACKWELL_LINES,
    "MXFP8": MXFP8,
    "scales in tiles": WRITES_SCALES,
    "MXFP4": MXFP4,
    "NVFP4 by a pair": NVFP4,
    "hopper multicast": HOPPER_MULTICAST,
    "reducing": REDUCING,
    "reducing rows": REDUCING_ROWS,
    "parts": PARTS,
    "int8": INT8_BY_WGMMA,
    "parts of int8": INT8_IN_PARTS,
    "converting": CONVERTING,
    "converting groups": CONVERTING_GROUPS,
    "converting integers": CONVERTING_INTEGERS,
    "converting parts of groups": GROUPS_IN_PARTS,
    "converting groups by warps": GROUPS_BY_WARPS,
    "converting groups beside TMA": GROUPS_BESIDE_TMA,
    "converting parts of groups by warps": GROUPS_BY_WARPS_IN_PARTS,
    "converting pairs": CONVERTING_PAIR,
    "converting pairs in groups": PAIR_IN_GROUPS,
    "converting pairs by warps": PAIR_BY_WARPS,
    "converting pairs beside TMA": PAIR_BESIDE_TMA,
    "int8 by warps": INT8_BY_WARPS,
    "int8 on Blackwell": INT8_ON_BLACKWELL,
    "parts on Blackwell": BLACKWELL_PARTS,
    "rotating": ROTATING,
    "rotating by a table": ROTATING_TABLE,
    "rotating neighbours": ROTATING_NEIGHBOURS,
    "rotating first columns": ROTATING_FIRST,
    "rotating in parts of heads": ROTATING_IN_PARTS,
    "repeating": REPEATING,
    "passes": PASSES,
    "passes on Blackwell": BLACKWELL_PASSES,
    "kept values": KEEPS,
    "kept values on Blackwell": BLACKWELL_KEEPS,
    "segments": SEGMENTS,
    "converting segments": SEGMENTS_IN_GROUPS,
    "heads": HEADS,
    "heads on Blackwell": BLACKWELL_HEADS,
    "segments on Blackwell": BLACKWELL_SEGMENTS,
    "rotating on Blackwell": BLACKWELL_ROTATING,
    "groups": GROUPS,
    "ping-pong groups": PING_PONG_GROUPS,
    "groups on Blackwell": BLACKWELL_GROUPS,
    "groups of columns": COLUMN_GROUPS,
    "groups of columns on Blackwell": BLACKWELL_COLUMN_GROUPS,
    "groups of MXFP8": MX_GROUPS,
    "groups of K": K_GROUPS,
    "groups of K on Blackwell": BLACKWELL_K_GROUPS,
    "groups of K in fp8": K_GROUPS_FP8,
    "groups of K in fp8 on Blackwell": BLACKWELL_K_GROUPS_FP8,
    "a tail of K in fp8": K_TAILS,
    "a tail of K in fp8 on Blackwell": BLACKWELL_K_TAILS,
    "a tail of K in fp8 by a pair": PAIRS_OF_K_TAILS,
    "warps": WARPS,
    "few k tiles": FEW_K_TILES,
    "many subtiles": MANY_SUBTILES,
    "two CTAs on a multiprocessor": TWO_CTAS,
    "whole k tiles": WHOLE_K_TILES,
    "parts of two CTAs": TWO_CTAS_IN_PARTS,
    "fp8 on Ada": ADA,
    "boxes for half of the lanes": HALF_BOXES,
    "warps fed by TMA": FED_BY_TMA,
    "rowvecs beside TMA": ROWS_BESIDE_TMA,
}


@dataclass(frozen=True)
class InPtx:
    """A regular expression, and what replaces it wherever it is found in a kernel's PTX."""

    old: str
    new: str

    def apply(self, text: str) -> str:
        """The text with the fault. Raises AssertionError if `old` is not in it."""
        faulty, count = re.subn(self.old, self.new, text)
        assert count, f"{self.old!r} is nowhere in the PTX"
        return faulty


@dataclass(frozen=True)
class Mutant:
    """A fault in a kernel, and the error that shows it. `message` is searched for in the error's text."""

    name: str
    subject: Subject
    fault: tuple[Wrong, ...] | InPtx
    error: type[Exception]
    message: str = ""

    @property
    def part(self) -> str:
        """The part of a kernel that is wrong."""
        return "PTX" if isinstance(self.fault, InPtx) else part_of(self.fault[0].at)

    def program(self, folder: Path) -> HostProgram:
        """The faulty kernel, its text in `folder`."""
        kernel = self.subject.kernel
        if isinstance(self.fault, InPtx):
            compiled = built(kernel)
            return HostProgram(self.fault.apply(compiled.ptx), compiled.host_object, SYMBOL)
        compiled = traced(kernel, self.fault, folder)
        return HostProgram(compiled.ptx, compiled.host_object, SYMBOL)


def traced(kernel: Kernel, fault: tuple[Wrong, ...], folder: Path) -> Built:
    """Compiles a kernel with a fault. Raises NeverReached if no call of the kernel fits it."""
    path = folder / "kernel.py"
    path.write_text(source := emit(kernel.plan))
    with planted(fault):
        return afresh(kernel, source, path)


@cache
def built(kernel: Kernel) -> Built:
    """A kernel without a fault, compiled once."""
    return build(kernel)


def sound(subject: Subject) -> HostProgram:
    """The kernel without a fault."""
    compiled = built(subject.kernel)
    return HostProgram(compiled.ptx, compiled.host_object, SYMBOL)


# The simulator's messages about a race. The dot does not match a line's end, so one sentence has both sides.
UNWRITTEN = "reads {}.*, which was never written"
UNFINISHED = "reads {}.*, written by .*: nothing that it waited for says that this write is complete"
STILL_READ = "overwrites {}.* may still be reading.*: nothing waits for it"
UNMET = r"cp\.async\.bulk\.tensor.*reads shared.*; lanes of one warp are ordered by bar\.warp\.sync"
STILL_WRITTEN = "overwrites {}.*, written by .*: nothing that it waited for"
STORED_TWICE = (
    "overwrites byte .*, which .* writes in the same kernel .*: no barrier, and no release and acquire"
)
SHARED, TMEM = "shared 0x", "tensor memory lane"

SWIZZLE_128 = 0x4000404000010000
"""The constant bits of our tcgen05 descriptors: swizzle 2 (128 bytes), stride offset 1024, version 1."""
