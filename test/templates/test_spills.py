"""The verdicts of the compiler on the shared epilogues. A kernel of every configuration has a rung that
spills nothing, aligned or not, promoted or not, and where tokens are drawn. Most kernels have it at once.

`make test` builds a few configurations of each table with one epilogue each, `make test-exhaustive` each of
them with all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet

from cute_backend.fx_walk.collect import collect
from cute_backend.kinds import reductions
from cute_backend.kinds.results import OfBlocks
from cute_backend.planning import (
    PLANES,
    REDUCTIONS,
    Alignment,
    Arch,
    Plan,
    Sizes,
    TileConfig,
    choose,
    offered,
    plan,
    plane_bits_held,
    rungs,
    tunable,
    unserved,
)
from cute_backend.planning.hoisting import can_hoist
from cute_backend.planning.shared_memory import plane_bits
from cute_backend.spec import (
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    ProductKind,
    Reduction,
    Scaling,
    Store,
    Stride,
    WeightGroups,
)
from support.archs import FIRST
from support.epilogues import EPILOGUES, GROUPED, Problem
from support.heavy import HEAVY
from support.shipped import SAMPLING, code_of, epilogue_spec, heavy_spec, is_fp8, sampling_spec, served
from support.sweeps import EXHAUSTIVE, in_parts, of_part
from support.verdicts import Verdict, assert_first_rungs_are_clean, assert_sound

PROMOTED = {"fast_accum": False}
TABLES: dict[str, tuple[Arch, dict[str, Any]]] = {
    "sm_90a": (Arch.SM90A, {"fast_accum": True}),
    "sm_90a-promoted": (Arch.SM90A, PROMOTED),
    "sm_90a-1x128-128x128": (
        Arch.SM90A,
        {**PROMOTED, "a_scaling": Scaling.LINE, "b_scaling": Scaling.SQUARE},
    ),
    "sm_90a-1x128-1x128": (Arch.SM90A, {**PROMOTED, "a_scaling": Scaling.LINE, "b_scaling": Scaling.LINE}),
    "sm_100a": (Arch.SM100A, {"fast_accum": True}),
    "sm_100a-1x128-128x128": (
        Arch.SM100A,
        {**PROMOTED, "a_scaling": Scaling.LINE, "b_scaling": Scaling.SQUARE},
    ),
    "sm_100a-1x128-1x128": (Arch.SM100A, {**PROMOTED, "a_scaling": Scaling.LINE, "b_scaling": Scaling.LINE}),
    "sm_80": (Arch.SM80, {"fast_accum": True}),
    "sm_86": (Arch.SM86, {"fast_accum": True}),
    "sm_89": (Arch.SM89, {"fast_accum": True}),
    "sm_89-promoted": (Arch.SM89, PROMOTED),
    "sm_120a": (Arch.SM120A, {"fast_accum": True}),
}
"""An architecture, and how the products of the shared epilogues are accumulated in its tiles."""

IN_SWEEPS = tuple(table for table in TABLES if "x128" in table)
"""Tables that are left for sweeps: on sm_100a the epilogue of their kernels is that of others, and tests of
scales of blocks look for spills in what they simulate."""

EVERY_DAY = [
    pytest.param(table, marks=() if arch in FIRST and table not in IN_SWEEPS else EXHAUSTIVE)
    for table, (arch, _) in TABLES.items()
]
"""Tables as cases: those of architectures that share a template with another are left for sweeps."""


def with_hoists(arch: Arch, spec: EpilogueSpec) -> list[TileConfig]:
    """The offered configurations, and each again with its visits unrolled if that hoists rowvecs."""
    configs = offered(arch, spec)
    return [*configs, *(replace(config, unrolled=True) for config in configs if can_hoist(config, spec))]


def distinct(arch: Arch, spec: EpilogueSpec) -> list[Plan]:
    """The plans of every configuration offered, aligned and not; one of those with the same code."""
    plans: dict[str, Plan] = {}
    for config in with_hoists(arch, spec):
        for alignment in Alignment:
            plans.setdefault(code_of(spec, config, alignment), plan(spec, config, alignment))
    return list(plans.values())


def one_of_each_configuration(arch: Arch, specs: list[EpilogueSpec]) -> dict[TileConfig, Plan]:
    """A plan of every configuration that is offered to any of the specs, which take turns."""
    plans: dict[TileConfig, Plan] = {}
    for i, spec in enumerate(specs * 6):
        for config in with_hoists(arch, spec):
            if config not in plans:
                plans[config] = plan(spec, config, list(Alignment)[i % 2])
                break
    return plans


def spec_in(table: str, name: str) -> EpilogueSpec:
    """A shared epilogue, its products accumulated as a table has them."""
    _, how = TABLES[table]
    spec = epilogue_spec(name, how["fast_accum"])
    return replace(spec, accumulators=tuple(replace(acc, **how) for acc in spec.accumulators))


def names_in(table: str) -> list[str]:
    """The shared epilogues of a table: only fp8 sums are promoted, and not every architecture has fp8."""
    arch, how = TABLES[table]
    names = [name for name, epilogue in EPILOGUES.items() if epilogue.runs_on(arch)]
    return [name for name in names if how["fast_accum"] or is_fp8(name)]


@pytest.mark.sweep(2)
@in_parts(64)
@pytest.mark.parametrize("table", EVERY_DAY)
def test_every_configuration_has_a_sound_rung(table: str, part: slice) -> None:
    arch, _ = TABLES[table]
    plans = one_of_each_configuration(arch, [spec_in(table, name) for name in names_in(table)])
    assert plans.keys() >= set(offered(arch, next(iter(plans.values())).spec))
    assert_sound(of_part(plans.values(), part))


@pytest.mark.sweep(1)
@in_parts(16)
@pytest.mark.parametrize("name", ["addmm_relu", "square", "sums"])
@pytest.mark.parametrize("stored", [DType.I8, DType.E4M3])
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM80, Arch.SM89, Arch.SM120A])
def test_weights_are_converted_without_spills_or_waits(
    name: str, stored: DType, arch: Arch, part: slice
) -> None:
    """Tiles for rows of unknown and of known numbers. No product waits for the one before it."""
    spec = epilogue_spec(name, True)
    acc = replace(spec.product, a_dtype=DType.BF16, b_dtype=stored, a_major=Major.K, b_major=Major.K)
    spec = replace(spec, accumulators=(acc,))
    known = {choose(arch, spec, Sizes(m, n, 4096), 132) for m in (8, 40, 64, 128, 200) for n in (4096, 28672)}
    tiles = dict.fromkeys((*offered(arch, spec), *known))
    plans = [plan(spec, tile, alignment) for tile in tiles for alignment in Alignment]
    assert_first_rungs_are_clean(of_part(plans, part))


@pytest.mark.sweep(1)
@in_parts(3)
@pytest.mark.parametrize(
    "groups",
    [
        WeightGroups(32, DType.BF16, DType.BF16, DType.BF16, DType.BF16),
        WeightGroups(128, DType.F32, DType.F32, DType.I8, DType.BF16),
        WeightGroups(256, DType.F32, DType.F32, DType.F32, DType.F32),
    ],
    ids=lambda groups: f"{groups.values}-{groups.product.value}",
)
@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM80, Arch.SM120A])
def test_weights_in_groups_are_converted_without_spills_or_waits(
    groups: WeightGroups, arch: Arch, part: slice
) -> None:
    """On mma.sync a lower rung may run: the estimate counts Hopper's registers, and 64 x 72 spills 24 bytes
    in its first."""
    spec = epilogue_spec("addmm_relu", True)
    acc = replace(spec.product, b_dtype=DType.U8, a_major=Major.K, b_major=Major.K, weight_groups=groups)
    spec = replace(spec, accumulators=(acc,))
    shapes = [(m, n, k) for m in (8, 64, 200) for n, k in ((4096, 14336), (28672, 4096))]
    known = dict.fromkeys(choose(arch, spec, Sizes(*shape), arch.target.sm_count) for shape in shapes)
    check = assert_first_rungs_are_clean if arch.target.by_wgmma else assert_sound
    check([plan(spec, tile, Alignment.TMA) for tile in of_part(known, part)])


def ways_to_sample() -> Iterator[ParameterSet]:
    """Each way to draw tokens on every architecture that has it. `make test` has two, of few draws: bodies of
    many take ten seconds to compile."""
    kept = {("greedy", Arch.SM90A), ("four", Arch.SM100A)}
    for name, how in SAMPLING.items():
        for arch in Arch:
            if arch.target.fp8 or "scale_hidden" not in how:
                marks = () if (name, arch) in kept else EXHAUSTIVE
                yield pytest.param(name, arch, id=f"{name}-{arch.value}", marks=marks)


@pytest.mark.parametrize(("name", "arch"), list(ways_to_sample()))
def test_every_way_to_sample_has_a_sound_rung(name: str, arch: Arch) -> None:
    """Each in another configuration."""
    configs = offered(arch, spec := sampling_spec(name))
    assert_sound([plan(spec, configs[[*SAMPLING].index(name) % len(configs)], Alignment.TMA)])


def scaled_in_groups(a, experts_fp8, scale_rows, scale_experts, ends, row, column, residual):
    # Rowwise fp8 with rows in groups, which reads vectors of every kind.
    scales = scale_rows, scale_experts
    y = torch._scaled_grouped_mm(a, experts_fp8, *scales, ends, out_dtype=torch.bfloat16, use_fast_accum=True)
    return ((F.silu(y) + row) * column[:, None] + residual).to(torch.bfloat16)


def scaled_beside_bf16(a, experts_fp8, scale_rows, scale_experts, ends, row_bf16, column, residual):
    return scaled_in_groups(a, experts_fp8, scale_rows, scale_experts, ends, row_bf16, column, residual)


def in_groups_of(fn: Any) -> EpilogueSpec:
    program = replace(GROUPED["grouped_fp8"], fn=fn)
    (report,) = collect(program.fn, program.inputs(Problem(256, 256, 256)))
    return report.regions[0].spec


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("fn", "tile", "alignment"),
    [
        (scaled_in_groups, "128x224_2x1", Alignment.TMA),
        (scaled_in_groups, "128x128_2x1_pingpong", Alignment.PLAIN),
        (scaled_beside_bf16, "128x128_2x1_pingpong", Alignment.PLAIN),
    ],
)
def test_warps_that_find_groups_and_stage_two_vectors_have_registers(
    fn: Any, tile: str, alignment: Alignment
) -> None:
    """With 40 registers in each of their threads, these spilled 16, 16 and 24 bytes on sm_90a."""
    spec = in_groups_of(fn)
    config = next(config for config in tunable(Arch.SM90A, spec) if config.name == tile)
    assert Verdict.of(plan(spec, config, alignment)).spilled == (0,)


@pytest.mark.exhaustive
def test_tiles_are_sound_for_groups_with_vectors_of_every_kind() -> None:
    """One kernel of each tile that may serve them on sm_90a, whatever its cluster and raster."""
    spec, plans = in_groups_of(scaled_in_groups), {}
    for config in tunable(Arch.SM90A, spec):
        for alignment in Alignment:
            tile = config.tile_m, config.tile_n, config.pingpong, alignment
            plans.setdefault(tile, plan(spec, config, alignment))
    assert_first_rungs_are_clean(plans.values())


STRIDES = {
    LoadKind.COLVEC: (Stride.ONE, Stride.ZERO),
    LoadKind.ROWVEC: (Stride.ZERO, Stride.ONE),
    LoadKind.EXACT: (Stride.OTHER, Stride.ONE),
    LoadKind.GROUPVEC: (Stride.ONE, Stride.ZERO),
}


def in_groups(
    *loads: LoadKind, pair: bool = False, nvfp4: bool = False, largest: int | None = None
) -> EpilogueSpec:
    """The silu of a product with rows in groups, times the second product of a pair, plus or times each load.
    With `largest`, there is also the largest element of each block of `largest` columns, or of each row if it
    is 0."""
    dtype, scaling = (DType.E2M1X2, Scaling.NV) if nvfp4 else (DType.BF16, Scaling.NONE)
    acc = Accumulator("acc", dtype, dtype, kind=ProductKind.GROUPED, a_scaling=scaling, b_scaling=scaling)
    products = (replace(acc, name="acc0"), replace(acc, name="acc1")) if pair else (acc,)
    read = tuple(Load(f"{kind.value}{i}", kind, DType.F32, *STRIDES[kind]) for i, kind in enumerate(loads))
    ops = [Op("t0", "sigmoid", (products[0].name,), DType.F32)]
    ops.append(Op("t1", "mul", (products[0].name, "t0"), DType.F32))
    for operand in (*products[1:], *read):
        is_term = isinstance(operand, Load) and operand.stride_n is Stride.ONE
        names = ops[-1].name, operand.name
        ops.append(Op(f"t{len(ops)}", "add" if is_term else "mul", names, DType.F32))
    result = ops[-1].name
    stores = [Store("out0", result, DType.BF16)]
    if largest:
        ops.append(Op("largest", "block_max", (result,), DType.F32, block=largest))
        stores.append(Store("out1", "largest", DType.F32, OfBlocks(largest)))
    elif largest == 0:
        stores.append(Store("out1", result, DType.F32, form=Reduction(Axis.ROW, reductions.MAX)))
    return EpilogueSpec(products, read, tuple(ops), tuple(stores))


ROWS_IN_GROUPS = {
    "routed pair": in_groups(LoadKind.COLVEC, pair=True),
    "rowvec": in_groups(LoadKind.ROWVEC),
    "block maxima": in_groups(LoadKind.COLVEC, LoadKind.ROWVEC, largest=8),
    "row maxima": in_groups(LoadKind.COLVEC, LoadKind.ROWVEC, largest=0),
    "nvfp4": in_groups(LoadKind.GROUPVEC, LoadKind.ROWVEC, nvfp4=True),
    "nvfp4 plane": in_groups(LoadKind.ROWVEC, LoadKind.ROWVEC, LoadKind.EXACT, nvfp4=True),
    "nvfp4 pair": in_groups(LoadKind.GROUPVEC, LoadKind.ROWVEC, pair=True, nvfp4=True),
    "plane": in_groups(LoadKind.EXACT),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ROWS_IN_GROUPS)
def test_two_warpgroups_leave_warps_that_find_groups_registers(name: str) -> None:
    """In a tile that is chosen. With 56 registers in each thread that loads or multiplies, all spilled 8 to
    32 bytes."""
    spec = ROWS_IN_GROUPS[name]
    config = choose(Arch.SM100A, spec, Sizes(300, 136, 200, groups=6), Arch.SM100A.target.sm_count)
    assert config.column_groups == 2
    assert_sound([plan(spec, config, list(Alignment)[[*ROWS_IN_GROUPS].index(name) % 2])])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ROWS_IN_GROUPS)
def test_tiles_of_two_warpgroups_are_sound_for_rows_in_groups(name: str) -> None:
    spec = ROWS_IN_GROUPS[name]
    halves = [config for config in tunable(Arch.SM100A, spec) if config.column_groups > 1]
    plans = [plan(spec, config, alignment) for config in halves for alignment in Alignment]
    assert_sound(plans[:: 1 + len(plans) // 16])


@pytest.mark.exhaustive
@pytest.mark.parametrize("table", TABLES)
def test_first_rungs_are_clean(table: str) -> None:
    """Those of every configuration that is offered to a shared epilogue."""
    arch, _ = TABLES[table]
    plans = [each for name in names_in(table) for each in distinct(arch, spec_in(table, name))]
    assert_first_rungs_are_clean(plans)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_in_16_bits_are_sound_where_ctas_share_a_multiprocessor(name: str) -> None:
    """There the k loop has two bodies. Ampere multiplies no fp8, so few shared epilogues are for it as they
    are."""
    spec = epilogue_spec(name, True)
    products = (replace(acc, a_dtype=DType.BF16, b_dtype=DType.BF16) for acc in spec.accumulators)
    spec = replace(spec, accumulators=tuple(products))
    if unserved(spec, Arch.SM80.target) is not None:
        pytest.skip("it converts to fp8")
    plans = [each for each in distinct(Arch.SM80, spec) if each.tile.occupancy > 1]
    if not plans:
        pytest.skip("no tile that it is offered has two CTAs on a multiprocessor")
    assert_sound(plans)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", HEAVY)
def test_many_planes_are_sound(name: str, arch: Arch) -> None:
    """Read by element, or by TMA as far as they fit."""
    if not served([name], heavy_spec, arch):
        pytest.skip("it has no fp8")
    assert_sound(distinct(arch, heavy_spec(name)))


def full(loads: int, planes: int, sums: int, dtype: DType = DType.BF16) -> EpilogueSpec:
    """A bf16 product with these planes of a dtype, each of which follows from the one before, and sums of
    columns."""
    acc = Accumulator("acc", DType.BF16, DType.BF16)
    read = [Load(f"exact{i}", LoadKind.EXACT, dtype, Stride.OTHER, Stride.ONE) for i in range(loads)]
    ops = [Op("t0", "mul", ("acc", Const(1.5)), DType.F32)]
    ops += (Op(f"t{i}", "add", (f"t{i - 1}", f"exact{i - 1}"), DType.F32) for i in range(1, loads + 1))
    ops += (Op(f"t{loads + i}", "exp", (f"t{loads + i - 1}",), DType.F32) for i in range(1, planes))
    column_sum = Reduction(Axis.COLUMN, reductions.SUM)
    stores = [Store(f"out{i}", f"t{loads + i}", dtype) for i in range(planes)]
    stores += (Store(f"out{planes + i}", f"t{i}", DType.F32, form=column_sum) for i in range(sums))
    return EpilogueSpec((acc,), tuple(read), tuple(ops), tuple(stores))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize(("loads", "planes", "sums"), [(7, 1, 0), (6, 2, 0), (4, PLANES, REDUCTIONS)])
def test_as_many_planes_as_a_kernel_has_room_for_are_sound(
    arch: Arch, loads: int, planes: int, sums: int
) -> None:
    spec = full(loads, planes, sums)
    if loads > PLANES and plane_bits(spec) > plane_bits_held(arch, spec.accumulators):
        pytest.skip("its shared memory does not hold them")
    assert_sound(distinct(arch, spec))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", FIRST)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_six_planes_have_sound_tiles(arch: Arch, dtype: DType) -> None:
    """Whatever shared memory holds of them: every tile has a plan, and the chosen one a rung that spills
    nothing."""
    spec = full(6, 1, 0, dtype)
    assert all(rungs(each) for each in distinct(arch, spec))
    chosen = choose(arch, spec, Sizes(4096, 4096, 4096), arch.target.sm_count)
    assert_sound([plan(spec, chosen, Alignment.TMA)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_sound(name: str, arch: Arch) -> None:
    if not served([name], sampling_spec, arch):
        pytest.skip("it has no fp8")
    assert_sound(distinct(arch, sampling_spec(name)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [arch for arch in Arch if arch.target.groups])
@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_sound(name: str, arch: Arch) -> None:
    (report,) = collect(GROUPED[name].fn, GROUPED[name].inputs(Problem(256, 256, 256)))
    assert_sound(distinct(arch, report.regions[0].spec))
