"""The built-in table of experts: how rows are split, and that every variant computes what it is called."""

from itertools import pairwise

import pytest
import torch

from cute_backend import explain
from cute_backend.bench import grouped, grouped_fp8
from cute_backend.bench.measure import compiled, work_of
from cute_backend.bench.table import Runner
from support.reference import TOLERANCE, relative_error


def workloads(problem):
    return {workload.name: workload for workload in problem.workloads}


SMALL_EXPERTS = grouped.Experts("small", 5, 2, 64, 48)


@pytest.mark.parametrize("split", grouped.Split)
def test_experts_have_the_rows_of_their_split(split):
    counts = SMALL_EXPERTS.rows(40, split)
    assert len(counts) == 5 and sum(counts) == 80
    assert (max(counts) == counts[0] == 40) is (split is grouped.Split.SKEWED)
    (few,) = [each for each in grouped.MODELS if each.name == "deepseek-v3"]
    assert few.rows(64, split).count(0) > 0


def in_float64_experts(name, args):
    x, weight, *rest = args
    ends = rest[-2] if name == "block" else rest[0]
    rows = []
    for expert, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        y = x[first:end].double() @ weight[expert].double().t()
        gate, up = y.chunk(2, -1)
        y = y if name == "gate_up" else torch.nn.functional.silu(gate) * up
        rows.append(y @ rest[0][expert].double().t() if name == "block" else y)
    y = torch.cat(rows)
    return y * rest[-1].double()[:, None] if name == "block" else y


@pytest.mark.parametrize(
    ("name", "runner"),
    [
        (workload.name, runner)
        for workload in grouped.problem(SMALL_EXPERTS, 8, grouped.Split.ROUTED).workloads
        for runner in workload.runners
    ],
)
def test_every_variant_of_experts_computes_its_formula(name, runner):
    workload = workloads(grouped.problem(SMALL_EXPERTS, 8, grouped.Split.ROUTED))[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = workload.inputs()
    with torch.no_grad():
        result = compiled(runner, workload.fn)(*args)
    assert relative_error(result, in_float64_experts(name, args)) < 2 * TOLERANCE[torch.bfloat16]
    if runner is Runner.CUTE:
        regions = explain(workload.fn, *args, arch="sm_90a").regions
        assert len(regions) == (2 if name == "block" else 1)


def test_experts_without_rows_need_not_be_read():
    experts, tokens = SMALL_EXPERTS, 1
    with torch.device("meta"):
        works = {
            name: work_of(workload, workload.inputs(), workload.fn(*workload.inputs()))
            for name, workload in workloads(grouped.problem(experts, tokens, grouped.Split.ROUTED)).items()
        }
    weights, ends = 2 * 2 * 3 * 48 * 64, 4 * 5
    assert works["gate_up"].operations == works["gated"].operations == 2 * 2 * 2 * 48 * 64
    assert works["block"].operations == 3 * 2 * 2 * 48 * 64
    assert works["gated"].bytes == 2 * weights // 3 + ends + 2 * 2 * (64 + 48)
    assert works["block"].bytes == weights + ends + 2 * 2 * (64 + 64 + 1)


def test_fp8_variants_are_one_kernel_each_of_the_same_products():
    problem = grouped_fp8.problem(SMALL_EXPERTS, 8, grouped.Split.ROUTED)
    operations = {"gate_up": 2 * 16 * 96 * 64, "gated": 2 * 16 * 96 * 64}
    for name, workload in workloads(problem).items():
        assert workload.operations == operations.get(name, 2 * 16 * 64 * 48)
        if Runner.CUTE in workload.runners:
            (region,) = explain(workload.fn, *workload.inputs(), arch="sm_90a").regions
            assert len(region.spec.accumulators) == (2 if name == "gated" else 1)
