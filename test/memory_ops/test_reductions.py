"""Kernels that reduce, on the simulated machine, against the replay: every kind along every axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.planning import Arch, TileConfig
from cute_backend.replay import replay
from cute_backend.simulator.simulate import Machine, run_region
from cute_backend.spec import (
    REDUCED,
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Store,
    Stride,
)
from support.small_specs import reducing
from support.sweeps import EXHAUSTIVE

INF, NAN = float("inf"), float("nan")

PLANE = Load("exact0", LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.ONE)
# The product is of whole numbers and cancels, so that the plane is what is reduced, whatever it holds.
VALUE = (
    Op("nothing", "mul", ("acc", Const(0.0)), DType.F32),
    Op("value", "add", ("nothing", "exact0"), DType.F32),
)


KINDS = tuple(kind for kind in reductions.REDUCTIONS if kind is not reductions.PROD)
"""Every kind but the product: whether that of `difficult` overflows on the way depends on the order."""


def spec_of(*axes: Axis, kinds: Sequence[reductions.ReductionKind] = KINDS) -> EpilogueSpec:
    """These kinds along these axes, and the plane itself."""
    ops, stores = VALUE, [Store("out0", "value", DType.F32)]
    for axis in axes:
        for kind in kinds:
            of_kind, store = reducing(f"out{len(stores)}", "value", axis, kind)
            ops, stores = (*ops, *of_kind), [*stores, store]
    acc = Accumulator("acc", DType.BF16, DType.BF16)
    return EpilogueSpec((acc,), (PLANE,), ops, tuple(stores))


SPECS = {"rows": spec_of(Axis.ROW), "columns": spec_of(Axis.COLUMN), "all": spec_of(Axis.ALL)}

CONFIGS = {
    "cooperative": TileConfig(Arch.SM90A, 128, 64, cluster_n=2),
    "ping-pong": TileConfig(Arch.SM90A, 64, 128, 2, pingpong=True),
    "one CTA": TileConfig(Arch.SM100A, 128, 64),
    "two CTAs": TileConfig(Arch.SM100A, 256, 128, 2, ctas=2),
}


def difficult(m: int, n: int) -> Tensor:
    """Negative but for a few values, so that a zero from beyond the edge would win; ties everywhere."""
    generator = torch.Generator().manual_seed(m * n)
    plane = torch.randint(-40, -4, (m, n), generator=generator).float()
    plane[0, :] = -INF
    plane[m // 2, n // 3] = INF
    plane[m - 1, n // 2 :: 3] = NAN
    plane[:, n - 1] = -3.0  # the largest of most rows, in the last column
    plane[m // 3, ::5] = 0.0
    plane[m // 3, 1::5] = -0.0
    return plane


def numbers(m: int, n: int) -> Tensor:
    """Whole numbers from -40 to 40, so that sums are exact."""
    return torch.randint(-40, 41, (m, n), generator=torch.Generator().manual_seed(m)).float()


def check(spec: EpilogueSpec, config: TileConfig, plane: Tensor, async_seed: int) -> None:
    m, n = plane.shape
    a = torch.randint(-2, 3, (m, 64)).bfloat16()
    b = torch.randint(-2, 3, (n, 64)).bfloat16().t()
    machine = Machine(config.arch, async_seed=async_seed, config=config)
    outputs, _ = run_region(spec, [a], [b], [plane], machine)
    for store, actual, right in zip(spec.stores, outputs, replay(spec, [a], [b], [plane]), strict=True):
        kind = None if store.form.reduction is None else store.form.reduction.kind
        exact = (
            kind in (None, reductions.PROD)
            or not store.dtype.is_float
            or (kind.is_element and not store.after)
        )
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-6, "atol": 1e-6}
        message = f"{store.name} {store.form}"
        torch.testing.assert_close(
            actual, right, equal_nan=True, **tolerance, msg=lambda m, at=message: f"{at}: {m}"
        )


EVERY_DAY = {("rows", "cooperative"), ("columns", "ping-pong"), ("all", "one CTA")}
"""The kernels of `make test`: of each axis one, which several tests run."""


def kernels(*axes: str) -> pytest.MarkDecorator:
    """Gives a test an axis and a tile, of which `make test` has those of `EVERY_DAY`."""
    cases = [
        pytest.param(axis, config, marks=() if (axis, config) in EVERY_DAY else EXHAUSTIVE)
        for axis in axes
        for config in CONFIGS
    ]
    return pytest.mark.parametrize(("axis", "config"), cases)


@pytest.mark.sweep(2)
@kernels(*SPECS)
def test_every_kind(axis: str, config: str) -> None:
    """Tiles cut by both edges, several of them; a tile of the cluster may lie beyond the plane as a whole."""
    for seed, (m, n) in enumerate([(140, 72), (1, 72)]):
        check(SPECS[axis], CONFIGS[config], difficult(m, n), seed)


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", ["ping-pong", "one CTA"])
def test_products_are_exact_in_any_order_where_their_factors_are_powers_of_two(config: str) -> None:
    """Factors are powers of two, so that products are exact in every order, but for a zero and a NaN."""
    generator = torch.Generator().manual_seed(3)
    powers = torch.randint(-1, 2, (140, 72), generator=generator) * (torch.arange(72) % 9 == 4)
    plane = 2.0**powers * (1 - 2 * torch.randint(0, 2, (140, 72), generator=generator))
    plane[5, 7], plane[9, 70] = 0.0, NAN
    kinds = (reductions.PROD,)
    check(spec_of(Axis.ROW, Axis.COLUMN, kinds=kinds), CONFIGS[config], plane, 0)
    check(spec_of(Axis.ALL, kinds=kinds), CONFIGS[config], plane[10:76], 0)


SCALE = (
    Op("t0", "maximum", (REDUCED, Const(3.0)), DType.F32),
    Op("t1", "div", ("t0", Const(448.0)), DType.F32),
)
INVERSE = (
    Op("t0", "add", (REDUCED, Const(900.0)), DType.F32),
    Op("is_large", "gt", (REDUCED, Const(0.0)), DType.BOOL),
    Op("t1", "rsqrt", ("t0",), DType.F32),
    Op("t2", "where", ("is_large", "t1", Const(-1.0)), DType.F32),
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", ["ping-pong", "one CTA", "cooperative"])
def test_ops_after_a_reduction_are_done_by_the_kernel_that_finishes_it(config: str) -> None:
    spec = spec_of(Axis.ROW, Axis.COLUMN, Axis.ALL, kinds=(reductions.MAX, reductions.MEAN))
    after = {reductions.MAX: SCALE, reductions.MEAN: INVERSE}
    reduced = ((each, each.form.reduction) for each in spec.stores)
    stores = [replace(each, after=after[found.kind]) for each, found in reduced if found is not None]
    stores[0] = replace(stores[0], dtype=DType.BF16)
    check(replace(spec, stores=(spec.stores[0], *stores)), CONFIGS[config], numbers(140, 72), 0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", ["ping-pong", "one CTA"])
def test_an_infinite_logsumexp_is_nan_where_a_softmax_asks_for_it(config: str) -> None:
    nothing, added = Op("t0", "mul", (REDUCED, Const(0.0)), DType.F32), ("t0", REDUCED)
    spec = spec_of(Axis.ROW, kinds=(reductions.LOGSUMEXP,))
    after = (nothing, Op("t1", "add", added, DType.F32))
    spec = replace(spec, stores=(replace(spec.stores[1], after=after),))
    plane = difficult(140, 72)
    reference = replay(spec, [torch.zeros(140, 8)], [torch.zeros(8, 72)], [plane])[0]
    assert torch.equal(reference.isfinite(), plane.amax(-1).isfinite())
    check(spec, CONFIGS[config], plane, 0)


@pytest.mark.sweep(1)
@kernels("rows", "columns")
def test_of_equals_the_first_also_where_all_are_infinite_or_none_is_a_number(axis: str, config: str) -> None:
    """Rows, or columns, of one value each."""
    plane = torch.tensor([-INF, INF, NAN]).repeat(66)[:66, None].expand(66, 72)
    if axis == "columns":
        plane = torch.tensor([-INF, INF, NAN]).repeat(66)[:72].expand(66, 72)
    check(SPECS[axis], CONFIGS[config], plane.contiguous(), 0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("value", [-INF, INF, NAN])
@kernels("all")
def test_of_a_plane_of_equals_the_first(axis: str, config: str, value: float) -> None:
    check(SPECS[axis], CONFIGS[config], torch.full((66, 136), value), 0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", ["cooperative", "one CTA"])
def test_planes_that_tma_does_not_take(config: str) -> None:
    check(SPECS["rows"], CONFIGS[config], difficult(40, 67), 0)


@pytest.mark.exhaustive
def test_extrema_and_where_they_are_do_not_depend_on_the_tile() -> None:
    kinds = [kind for kind in reductions.REDUCTIONS if kind.is_element or kind.is_place]
    rows = SPECS["rows"]
    reduced = rows.reductions
    kept = tuple(each for each in rows.stores if each.name in reduced and reduced[each.name].kind in kinds)
    spec = replace(rows, stores=kept)
    plane = difficult(70, 136)
    a, b = torch.ones(70, 64).bfloat16(), torch.ones(136, 64).bfloat16().t()
    results = [
        run_region(spec, [a], [b], [plane], Machine(config.arch, config=config))[0]
        for config in CONFIGS.values()
    ]
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [32, 96])
@pytest.mark.parametrize("config", CONFIGS)
def test_batches_of_rows(config: str, rows: int) -> None:
    """Several batches in a tile, and tiles in which a batch ends in the middle."""
    spec = spec_of(Axis.COLUMN, kinds=(reductions.SUM, reductions.MIN, reductions.LOGSUMEXP))
    batched = [
        replace(store, form=replace(found, rows=rows)) if (found := store.form.reduction) else store
        for store in spec.stores
    ]
    check(replace(spec, stores=tuple(batched)), CONFIGS[config], difficult(5 * rows, 67), rows)
