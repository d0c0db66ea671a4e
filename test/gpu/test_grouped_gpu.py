"""Grouped products on a real GPU: rows are split on the device, so one CUDA graph holds for every split."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda.bindings import driver
from torch import Tensor
from torch._dynamo.utils import counters

from support.reference import TOLERANCE, relative_error

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
M, N, K, GROUPS = 520, 272, 528, 40

SPLITS = {
    "even": [13 * (group + 1) for group in range(GROUPS)],
    "all_in_the_first": [M] * GROUPS,
    "all_in_the_last": [0] * (GROUPS - 1) + [M],
    "half_in_one": [0, M // 2, *(M // 2 + 6 * group for group in range(1, GROUPS - 2)), M],
    "one_row_each": list(range(1, GROUPS + 1)),
    "none": [0] * GROUPS,
    "a_tail_in_no_group": [11 * group for group in range(GROUPS)],
}


def routed(x: Tensor, weight: Tensor, ends: Tensor, routing: Tensor, residual: Tensor) -> Tensor:
    return F.silu(F.grouped_mm(x, weight.transpose(1, 2), offs=ends)) * routing[:, None] + residual


def test_one_graph_holds_for_every_split(fresh_compiler: None) -> None:
    """Rows of each group are right, and those of none are as they were."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    x, weight, routing, residual = normal(M, K), normal(GROUPS, N, K) / K**0.5, normal(M), normal(M, N)
    ends = torch.tensor(SPLITS["even"], dtype=torch.int32, device="cuda")
    compiled = torch.compile(routed, backend="cute", dynamic=False)
    compiled(x, weight, ends, routing, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(x, weight, ends, routing, residual)
    for split, rows in SPLITS.items():
        ends.copy_(torch.tensor(rows, dtype=torch.int32))
        result.view(torch.int16).fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert (result[rows[-1] :].view(torch.int16) == -1).all(), split
        parts = [
            F.silu(x[first:end].double() @ weight[group].double().t())
            for group, (first, end) in enumerate(pairwise((0, *rows)))
        ]
        if rows[-1]:
            expected = torch.cat(parts) * routing[: rows[-1], None] + residual[: rows[-1]]
            assert relative_error(result[: rows[-1]], expected) < TOLERANCE[torch.bfloat16], split
    counters = torch._dynamo.utils.counters["cute_backend"]
    assert counters["regions"] == 1 and not counters["replayed"], dict(counters)


def test_a_gradient_is_right_for_every_split(fresh_compiler: None) -> None:
    """K in groups: what lies beyond the last group is NaN, and an empty group's gradient is zeros."""
    generator = torch.Generator("cuda").manual_seed(0)
    dy, x = (torch.randn(M, n, generator=generator, device="cuda").bfloat16() for n in (N, K))
    compiled = torch.compile(
        lambda dy, x, ends: F.grouped_mm(dy.t(), x, offs=ends).float(), backend="cute", dynamic=False
    )
    for split, rows in SPLITS.items():
        left, right = dy.clone(), x.clone()
        left[rows[-1] :], right[rows[-1] :] = float("nan"), float("nan")
        result = compiled(left, right, torch.tensor(rows, dtype=torch.int32, device="cuda"))
        for group, (first, end) in enumerate(pairwise((0, *rows))):
            expected = dy[first:end].double().t() @ x[first:end].double()
            if first == end:
                assert not result[group].any(), (split, group)
            else:
                assert relative_error(result[group], expected) < 2e-5, (split, group)
    counters = torch._dynamo.utils.counters["cute_backend"]
    assert counters["regions"] == 1 and not counters["replayed"], dict(counters)


@pytest.mark.parametrize("fast", [True, False])
def test_a_gradient_in_fp8_is_right_for_every_split(fast: bool, fresh_compiler: None) -> None:
    """K in groups that begin at multiples of 16, with scales of every group's rows and columns."""
    generator = torch.Generator("cuda").manual_seed(0)
    k = 16 * M
    dy, x = (torch.randn(n, k, generator=generator, device="cuda").to(E4M3) for n in (N, K))
    of_dy, of_x = (torch.rand(GROUPS * n, generator=generator, device="cuda") + 0.5 for n in (N, K))

    def gradient(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        y = torch._scaled_grouped_mm(
            dy, x.t(), of_dy, of_x, ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return y.float()

    compiled = torch.compile(gradient, backend="cute", dynamic=False)
    for split, rows in SPLITS.items():
        ends = [16 * row for row in rows]
        ends[-1] -= 5 if ends[-1] > ends[-2] else 0  # the end of the last group is free
        left, right = dy.clone(), x.clone()
        left[:, ends[-1] :], right[:, ends[-1] :] = (torch.full((), float("nan")).to(E4M3) for _ in range(2))
        result = compiled(left, right, torch.tensor(ends, dtype=torch.int32, device="cuda"))
        for group, (first, end) in enumerate(pairwise((0, *ends))):
            scales = of_dy.view(GROUPS, N, 1)[group] * of_x.view(GROUPS, 1, K)[group]
            expected = dy[:, first:end].double() @ x[:, first:end].double().t() * scales
            if first == end:
                assert not result[group].any(), (split, group)
            else:
                assert relative_error(result[group], expected) < (5e-3 if fast else 1e-3), (split, group)
    counters = torch._dynamo.utils.counters["cute_backend"]
    assert counters["regions"] == 1 and not counters["replayed"], dict(counters)


def isolated(values: Tensor) -> Tensor:
    """A copy in a mapping of its own. No memory is mapped before it."""

    def done(result: tuple[Any, ...]) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None

    place = driver.CUmemAllocationProp()
    place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    place.location.id = torch.cuda.current_device()
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    page = done(driver.cuMemGetAllocationGranularity(place, least))
    nbytes = -(-values.nbytes // page) * page
    start = int(done(driver.cuMemAddressReserve(nbytes + 2 * page, 0, 0, 0))) + page
    done(driver.cuMemMap(start, nbytes, 0, done(driver.cuMemCreate(nbytes, place, 0)), 0))
    access = driver.CUmemAccessDesc()
    access.location = place.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    done(driver.cuMemSetAccess(start, nbytes, [access], 1))
    interface = {"shape": (values.nbytes,), "typestr": "|u1", "data": (start, False), "version": 3}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")
    return memory.view(values.dtype).view(values.shape).copy_(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "fp8"])
def test_a_gradient_reads_nothing_before_its_operands(dtype: torch.dtype, fresh_compiler: None) -> None:
    """Nothing is mapped before them, and a group's last k tile begins before the group."""
    k, n = 16 * M, 256
    dy, x = (torch.randn(k, n, device="cuda").to(dtype) for _ in range(2))
    ends = torch.arange(1, GROUPS + 1, dtype=torch.int32, device="cuda") * 208
    left, right = isolated(dy), isolated(x)
    if dtype is E4M3:
        left, right = (isolated(each.t().contiguous()) for each in (dy, x))
    scales = torch.ones(GROUPS * n, device="cuda")

    def gradient(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        if dtype is not E4M3:
            return F.grouped_mm(left.t(), right, offs=ends).float()
        further = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_grouped_mm(left, right.t(), scales, scales, ends, **further).float()

    result = torch.compile(gradient, backend="cute", dynamic=False)(left, right, isolated(ends))
    for group, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        expected = dy[first:end].double().t() @ x[first:end].double()
        assert relative_error(result[group], expected) < 5e-3, group


def test_fp8_experts_of_torchao(fresh_compiler: None) -> None:
    pytest.importorskip("torchao.quantization", reason="needs torchao")
    from support.experts import Experts, in_fp8

    experts = in_fp8(Experts(8, 512, 256).cuda())
    ends = torch.tensor([0, 40, 41, 170, 170, 300, 511, 512], dtype=torch.int32, device="cuda")
    x, routing = torch.randn(512, 512, device="cuda").bfloat16(), torch.rand(512, device="cuda").bfloat16()
    counters.clear()
    result = torch.compile(experts, backend="cute", dynamic=False)(x, ends, routing)
    assert counters["cute_backend"]["regions"] == 2
    assert relative_error(result, experts(x, ends, routing)) < 4e-2, "eager rounds gate and up to bf16"


@pytest.mark.exhaustive  # candidates are compiled and timed, as in test_tune_gpu.py
def test_rows_in_groups_are_tuned(fresh_compiler: None) -> None:
    """The candidates are timed with two splits, and the fastest serves any other."""
    x, weight = torch.randn(1000, 528, device="cuda").bfloat16(), torch.randn(7, 272, 528, device="cuda")
    weight = (weight / 528**0.5).bfloat16()
    ends = torch.tensor([0, 300, 301, 301, 700, 990, 1000], dtype=torch.int32, device="cuda")
    routing, residual = torch.rand(1000, device="cuda").bfloat16(), torch.randn(1000, 272, device="cuda")
    counters.clear()
    compiled = torch.compile(routed, backend="cute", dynamic=False, options={"max_autotune": True})
    result = compiled(x, weight, ends, routing, residual.bfloat16())
    found = counters["cute_backend"]
    assert found["tuned"] == 1 and not found["untuned_failed"] and not found["candidates_failed"]
    parts = [
        F.silu(x[first:end].double() @ weight[group].double().t())
        for group, (first, end) in enumerate(pairwise((0, *ends.tolist())))
    ]
    expected = torch.cat(parts) * routing[:, None] + residual.bfloat16()
    assert relative_error(result, expected) < TOLERANCE[torch.bfloat16]
