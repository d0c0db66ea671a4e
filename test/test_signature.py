"""The order, the axes, the strides and the alignment of a kernel's arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.signature import Argument, Use, signature
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    Columns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Order,
    ProductKind,
    Reduction,
    Scaling,
    Store,
    Stride,
)
from support.random_specs import specs

ACC = Accumulator("acc", DType.BF16, DType.BF16, b_major=Major.MN)
HALVES = tuple(replace(ACC, name=f"acc{i}", b_major=Major.K) for i in range(2))
INTERLEAVED = tuple(
    replace(acc, columns=columns) for acc, columns in zip(HALVES, (Columns.EVEN, Columns.ODD), strict=True)
)
EXACT_OF_BLOCKS = Load(
    "exact", LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.OTHER, blocks=Blocks(8, Stride.ZERO, Stride.ONE)
)
BY_BLOCKS = Accumulator(
    "acc", DType.E4M3, DType.E4M3, fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE
)
LOADS = (
    Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE),
    Load("exact1", LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.OTHER),
    Load("exact2", LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.ONE, (Stride.OTHER, Stride.ZERO)),
    replace(EXACT_OF_BLOCKS, name="exact3"),
    replace(EXACT_OF_BLOCKS, name="exact4", m_modes=(Stride.OTHER, Stride.ZERO)),
    Load("rowvec0", LoadKind.ROWVEC, DType.BOOL, Stride.ZERO, Stride.ONE),
    replace(EXACT_OF_BLOCKS, name="rowvec1", kind=LoadKind.ROWVEC, stride_m=Stride.ZERO),
    Load("colvec0", LoadKind.COLVEC, DType.F32, Stride.OTHER, Stride.ZERO),
    Load("scalar0", LoadKind.SCALAR, DType.F32, Stride.ZERO, Stride.ZERO),
)
OF_GROUPS = Load("bias", LoadKind.GROUPVEC, DType.F32, Stride.OTHER, Stride.ONE)
STORES = (Store("out0", "acc", DType.BF16, WholePlane(Order.COLUMN)), Store("out1", "acc", DType.F32))


def reducing(name: str, axis: Axis) -> Store:
    return Store(name, "acc", DType.F32, form=Reduction(axis, reductions.MAX))


def spec_of(
    accumulators: tuple[Accumulator, ...] = (ACC,),
    loads: tuple[Load, ...] = (),
    stores: tuple[Store, ...] = STORES[1:],
) -> EpilogueSpec:
    value = accumulators[0].name
    return EpilogueSpec(accumulators, loads, (), tuple(replace(store, value=value) for store in stores))


def shown(argument: Argument) -> str:
    """Its name, dtype, the extent of each axis with its stride, and its alignment."""
    axes = ", ".join(f"{dim.extent.name}:{dim.stride.value}" for dim in argument.dims)
    return f"{argument.name} {argument.dtype.value} ({axes}) {argument.alignment.value}"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(
            spec_of(loads=LOADS, stores=STORES),
            [
                "a bf16 (M:s, K:1) tma",
                "b bf16 (K:s, N:1) tma",
                "exact0 bf16 (M:s, N:1) plane",
                "exact1 f32 (M:s, N:s) element",
                "exact2 f32 (MODE:s, MODE:0, N:1) element",
                "exact3 f32 (M:s, BLOCKS:0, BLOCK:1) element",
                "exact4 f32 (MODE:s, MODE:0, BLOCKS:0, BLOCK:1) element",
                "rowvec0 bool (N:1) element",
                "rowvec1 f32 (BLOCKS:0, BLOCK:1) element",
                "colvec0 f32 (M:s) element",
                "scalar0 f32 () element",
                "out0 bf16 (M:1, N:s) plane",
                "out1 f32 (M:s, N:1) plane",
            ],
            id="loads and several stores",
        ),
        pytest.param(
            spec_of(HALVES),
            [
                "a bf16 (M:s, K:1) tma",
                "b0 bf16 (K:1, N:s) tma",
                "b1 bf16 (K:1, N:s) tma",
                "out1 f32 (M:s, N:1) plane",
            ],
            id="a pair",
        ),
        pytest.param(
            spec_of((BY_BLOCKS,)),
            [
                "a e4m3 (M:s, K:1) tma",
                "a_scales f32 (M:s, K_BLOCKS:s) element",
                "b e4m3 (K:1, N:s) tma",
                "b_scales f32 (K_BLOCKS:s, N_BLOCKS:s) element",
                "out1 f32 (M:s, N:1) plane",
            ],
            id="scaled by blocks",
        ),
        pytest.param(
            spec_of(
                tuple(
                    replace(BY_BLOCKS, name=name, a_scaling=Scaling.SQUARE, b_scaling=Scaling.LINE)
                    for name in ("gate", "up")
                )
            ),
            [
                "a e4m3 (M:s, K:1) tma",
                "a_scales f32 (M_BLOCKS:s, K_BLOCKS:s) element",
                "b0 e4m3 (K:1, N:s) tma",
                "b1 e4m3 (K:1, N:s) tma",
                "b0_scales f32 (K_BLOCKS:s, N:s) element",
                "b1_scales f32 (K_BLOCKS:s, N:s) element",
                "out1 f32 (M:s, N:1) plane",
            ],
            id="a pair scaled by blocks",
        ),
        pytest.param(
            spec_of(INTERLEAVED),
            ["a bf16 (M:s, K:1) tma", "b bf16 (K:1, COLUMNS:s) tma", "out1 f32 (M:s, N:1) plane"],
            id="a pair in one B",
        ),
        pytest.param(
            spec_of((replace(ACC, kind=ProductKind.BATCHED, a_major=Major.MN),)),
            [
                "a bf16 (BATCHES:s, ROWS:1, K:s) tma",
                "b bf16 (BATCHES:s, K:s, N:1) tma",
                "out1 f32 (M:s, N:1) plane",
            ],
            id="batched",
        ),
        pytest.param(
            spec_of(tuple(replace(acc, kind=ProductKind.GROUPED) for acc in HALVES), (LOADS[0], OF_GROUPS)),
            [
                "a bf16 (M:s, K:1) tma",
                "offsets i32 (GROUPS:1) element",
                "b0 bf16 (GROUPS:s, K:1, N:s) tma",
                "b1 bf16 (GROUPS:s, K:1, N:s) tma",
                "exact0 bf16 (M:s, N:1) plane",
                "bias f32 (GROUPS:s, N:1) element",
                "out1 f32 (M:s, N:1) plane",
            ],
            id="a pair of groups",
        ),
        pytest.param(
            spec_of(
                stores=(
                    reducing("peak", Axis.ALL),
                    STORES[1],
                    reducing("rows", Axis.ROW),
                    reducing("columns", Axis.COLUMN),
                )
            ),
            [
                "a bf16 (M:s, K:1) tma",
                "b bf16 (K:s, N:1) tma",
                "peak f32 () element",
                "out1 f32 (M:s, N:1) plane",
                "rows f32 (M:1) element",
                "columns f32 (N:1) element",
                "workspace u8 (BYTES:1) workspace",
            ],
            id="reductions",
        ),
    ],
)
def test_the_arguments_of_a_spec(spec: EpilogueSpec, expected: list[str]) -> None:
    assert [shown(argument) for argument in signature(spec)] == expected


@given(spec=specs())
def test_arguments_come_by_use_with_names_of_their_own(spec: EpilogueSpec) -> None:
    arguments = signature(spec)
    roles = [list(Use).index(argument.use) for argument in arguments]
    assert roles == sorted(roles)
    assert len({argument.name for argument in arguments}) == len(arguments)
    for argument in arguments:
        units = [axis for axis, dim in enumerate(argument.dims) if dim.stride is Stride.ONE]
        assert argument.unit == (units[0] if units else None)
        assert len(units) == 1 or not argument.is_plane, "a plane is contiguous along one axis"


def test_what_an_alignment_promises() -> None:
    a, _, plane, *_, room = signature(
        spec_of(loads=LOADS[:1], stores=(STORES[1], reducing("peak", Axis.ALL)))
    )
    assert [each.align(tma=True) for each in (a, plane, room)] == [16, 16, 32]
    assert [each.align(tma=False) for each in (a, plane, room)] == [16, 2, 32]


@pytest.mark.parametrize(
    ("dims", "shape", "how", "strides"),
    [
        (LOADS[0], (3, 10), {}, (10, 1)),
        (LOADS[0], (3, 10), {"align": 8}, (16, 1)),
        (LOADS[1], (3, 10), {"step": 2}, (20, 2)),
        (LOADS[2], (4, 3, 10), {}, (10, 0, 1)),
        (LOADS[-1], (), {}, ()),
    ],
)
def test_packed_strides_leave_no_gap_but_for_alignment(
    dims: Load, shape: tuple[int, ...], how: dict[str, int], strides: tuple[int, ...]
) -> None:
    assert Argument.of_load(dims).packed(shape, **how) == strides
