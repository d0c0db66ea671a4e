"""The built-in tables: their problems, how rows are picked, and that every variant computes them right."""

from dataclasses import replace

import pytest
import torch

from cute_backend import UsageError, explain
from cute_backend.__main__ import main
from cute_backend.bench import block_scaled_mm, decoding, gated, int8, row_maxima, scaled_mm, weights
from cute_backend.bench.command import TABLES
from cute_backend.bench.measure import compiled, work_of
from cute_backend.bench.table import PEERS, Cell, Rate, Runner, function_table, select
from cute_backend.spec import Scaling
from support.epilogues import Epilogue
from support.reference import TOLERANCE, relative_error
from support.reference import in_float64 as program_in_float64

SMALL = {
    problem.name: problem
    for problem in (
        scaled_mm.problem(48, 64, 96),
        scaled_mm.slow_problem(32, 48, 64),
        scaled_mm.bf16_problem(16, 32, 64),
    )
}


def in_float64(workload, args):
    """The workload's formula, as its docstring has it, in float64."""
    x, weight, *rest = [each.double() for each in args]
    product = x @ weight.t()
    if workload.rate is Rate.BF16:
        return product if workload.name == "bare" else (product + rest[0]).relu()
    y = product * rest[0] * rest[1]
    if workload.name == "full":
        return torch.nn.functional.gelu(y + rest[2], approximate="tanh") + rest[3]
    if workload.name == "quant":
        return torch.nn.functional.silu(y) * rest[2] * rest[3]
    return y


@pytest.mark.sweep(6)
@pytest.mark.parametrize("runner", [Runner.EAGER, Runner.INDUCTOR, Runner.CUTE])
@pytest.mark.parametrize(
    ("problem", "index"), [(p, i) for p, problem in SMALL.items() for i in range(len(problem.workloads))]
)
def test_every_variant_computes_its_formula(problem, index, runner):
    workload = SMALL[problem].workloads[index]
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = workload.inputs()
    with torch.no_grad():
        result = compiled(runner, workload.fn)(*args)
    assert result.dtype is (torch.float8_e4m3fn if workload.name == "quant" else torch.bfloat16)
    assert relative_error(result, in_float64(workload, args)) < TOLERANCE[result.dtype]


def test_every_cute_variant_is_one_region():
    for problem in SMALL.values():
        for workload in problem.workloads:
            if Runner.CUTE in workload.runners:
                (region,) = explain(workload.fn, *workload.inputs(), arch="sm_90a").regions
                assert region.spec.accumulators[0].fast_accum is (workload.fn is not scaled_mm.bare_slow)


def test_int8_is_one_kernel_of_the_same_operations(monkeypatch):
    monkeypatch.setitem(int8.LINEARS, "small", (48, 64))
    wide, narrow = int8.problem("small", 24).workloads
    assert wide.operations == narrow.operations == 2 * 24 * 48 * 64
    args = narrow.inputs()
    (region,) = explain(narrow.fn, *args, arch="sm_90a").regions
    assert region.formula == "out0 = bf16(acc * colvec0 * rowvec0 + rowvec1)"
    x, weight, of_rows, of_columns, bias = (each.double() for each in args)
    exact = x @ weight.t() * of_rows * of_columns + bias
    for runner in (Runner.EAGER, Runner.CUTE):
        assert relative_error(compiled(runner, narrow.fn)(*args), exact) < narrow.tolerance


@pytest.mark.parametrize("widths", [(48,), (96, 40, 24)])
def test_weights_are_converted_by_one_kernel_of_the_same_operations(widths):
    wide, *narrow = weights.problem("small", 24, widths, 256).workloads
    for workload in narrow:
        assert workload.operations == wide.operations == 2 * 24 * sum(widths) * 256
        x, *given = args = workload.inputs()
        (region,) = explain(workload.fn, *args, arch="sm_90a").regions
        assert region.spec.product.is_converted
        assert len(region.spec.accumulators) == len(widths)
        each = len(given) // len(widths)
        exact = [x.double() @ dequantised(*given[i : i + each]).t() for i in range(0, len(given), each)]
        for runner in (Runner.EAGER, Runner.CUTE):
            results = compiled(runner, workload.fn)(*args)
            for result, of in zip(results if len(widths) > 1 else [results], exact, strict=True):
                assert relative_error(result, of) < workload.tolerance


def test_queries_keys_and_values_of_a_llama_have_rows_of_their_own():
    (table,) = select(TABLES, ["q-k-v-*"], peers=False)
    assert [problem.name for problem in table.problems] == [f"q-k-v-{m}-weights" for m in (2, 8, 16, 64, 128)]
    first, *_ = table.problems
    for workload in first.workloads:
        assert workload.operations == 2 * 2 * (4096 + 1024 + 1024) * 4096


def dequantised(weight, scales, zeros=None):
    """A weight with a scale of each column, or with scales and zeros of groups of K."""
    if weight.dtype is torch.uint8:
        weight = torch.stack([weight & 15, weight >> 4], -1).flatten(1)
    groups = weight.double().unflatten(1, (scales.shape[1], -1))
    shifted = groups if zeros is None else groups - zeros[..., None]
    return (shifted * scales[..., None]).flatten(1)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_ratio_is_of_cells_that_are_timed(table):
    for problem in table.problems:
        cells = {Cell(workload.name, runner) for workload in problem.workloads for runner in workload.runners}
        compared = {cell for ratio in table.ratios for cell in (ratio.of, ratio.to)}
        assert table.baseline in cells
        assert table is scaled_mm.SCALED_MM or compared <= cells


def test_names_are_of_one_thing(capsys):
    """Of one table or one row; and --help names the tables."""
    names = [name for table in TABLES for name in (table.name, *(each.name for each in table.problems))]
    assert len(set(names)) == len(names)
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"({', '.join(table.name for table in TABLES)})" in told


def test_the_table_at_full_size():
    table = scaled_mm.SCALED_MM
    names = [problem.name for problem in table.problems]
    assert names[:7] == [
        "4096x4096x4096",
        "8192x8192x8192",
        "8192x8192x1024",
        "512x28672x8192",
        "2048x8192x28672",
        "128x8192x8192",
        "16x8192x8192",
    ]
    assert names[7:] == ["4096x4096x4096-slow", "8192x8192x8192-slow", "8192x8192x8192-bf16"]
    cells = {
        Cell(workload.name, runner)
        for problem in table.problems
        for workload in problem.workloads
        for runner in workload.runners
    }
    assert {table.baseline} | {cell for ratio in table.ratios for cell in (ratio.of, ratio.to)} <= cells


def test_work_counts_operations_and_each_byte_once():
    m, n, k = 512, 28672, 8192
    with torch.device("meta"):
        works = {}
        for workload in scaled_mm.problem(m, n, k).workloads:
            out = torch.empty(m, n, dtype=torch.float8_e4m3fn if workload.name == "quant" else torch.bfloat16)
            works[workload.name] = work_of(workload, workload.inputs(), out)
    assert {work.operations for work in works.values()} == {2 * m * n * k}
    product = m * k + n * k + 4 * m + 4 * n
    assert works["bare"].bytes == product + 2 * m * n
    assert works["full"].bytes == product + 2 * n + 4 * m * n
    assert works["quant"].bytes == product + 4 + 3 * m * n


def test_work_of_a_function_counts_what_torch_can_and_no_broadcast_axis():
    weight = torch.randn(32, 16)
    row = torch.randn(1, 16).expand(8, 16)
    layer = torch.nn.Linear(32, 16, bias=False)
    (problem,) = function_table(
        "plain", lambda x, row: x @ weight + row, (torch.ones(8, 32), row), Rate.BF16
    ).problems
    (workload,) = problem.workloads
    args = workload.inputs()
    work = work_of(workload, args, workload.fn(*args))
    assert work.operations == 2 * 8 * 16 * 32
    assert work.bytes == 4 * (8 * 32 + 16 + 8 * 16)
    (problem,) = function_table("layer", layer, (torch.ones(8, 32),), Rate.BF16).problems
    (workload,) = problem.workloads
    assert work_of(workload, workload.inputs(), layer(torch.ones(8, 32))).bytes == 4 * (
        8 * 32 + 32 * 16 + 8 * 16
    )


def test_rows_are_picked_by_name_and_peers_by_option():
    table, other = select(TABLES, ["16x8192*", "*-bf16", "H4-V128256-*"], peers=False)
    assert [problem.name for problem in table.problems] == ["16x8192x8192", "8192x8192x8192-bf16"]
    assert [problem.name for problem in other.problems] == ["H4-V128256-D4096", "H4-V128256-D8192"]
    assert not any(
        runner in PEERS
        for problem in table.problems
        for workload in problem.workloads
        for runner in workload.runners
    )
    assert select(TABLES, ["sampling"], peers=True) == [decoding.SAMPLING]
    assert select(TABLES, [], peers=True) == list(TABLES)
    said = r"no table or row is called '17x\*'; .* scaled_mm \(4096x4096x4096 to 8192x8192x8192-bf16\), "
    with pytest.raises(UsageError, match=said):
        select(TABLES, ["16x*", "17x*"], peers=False)


def test_a_function_is_timed_beside_eager_and_inductor():
    table = function_table("fn", torch.sin, (torch.ones(3),), Rate.BF16, peers=True)
    assert [str(ratio) for ratio in table.ratios] == [
        "cute fn / eager fn",
        "cute fn / inductor fn",
        "cute fn / max-autotune fn",
    ]


# Tokens, and row maxima

DECODING = decoding.problem(5, 72, 32)
MAXIMA = row_maxima.fp8_problem(48), row_maxima.bf16_problem(48)


def workloads(problem):
    return {workload.name: workload for workload in problem.workloads}


def test_the_table_of_tokens_at_full_size():
    table = decoding.SAMPLING
    sizes = [tuple(int(part[1:]) for part in problem.name.split("-")) for problem in table.problems]
    assert len(sizes) == 20
    assert {h for h, _, _ in sizes} == {1, 4, 16, 64, 256}
    assert {(v, d) for _, v, d in sizes} == {
        (128256, 4096),
        (128256, 8192),
        (151936, 4096),
        (151936, 8192),
    }
    assert [str(ratio) for ratio in table.ratios] == [
        "cute sample / eager logits",
        "cute sample / inductor multinomial",
        "cute greedy / eager logits",
        "cute greedy / inductor greedy",
    ]


def test_the_least_work_of_a_token_is_to_read_the_weights_once():
    h, v, d = 4, 128256, 4096
    with torch.device("meta"):
        works = {
            name: work_of(workload, workload.inputs(), torch.empty(h, 1, dtype=torch.int64))
            for name, workload in workloads(decoding.problem(h, v, d)).items()
        }
    assert {work.operations for work in works.values()} == {2 * h * v * d}
    assert works["sample"].bytes == 2 * v * d + 2 * h * d + 8 * h + 8
    assert works["greedy"].bytes == works["multinomial"].bytes == 2 * v * d + 2 * h * d + 8 * h


@pytest.mark.parametrize(
    ("name", "runner"),
    [(name, runner) for name, workload in workloads(DECODING).items() for runner in workload.runners],
)
def test_every_variant_gives_what_its_check_wants(name, runner):
    workload = workloads(DECODING)[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = workload.inputs()
    with torch.no_grad():
        result = compiled(runner, workload.fn)(*args)
        if name == "logits":
            assert relative_error(result, args[0].double() @ args[1].double().t()) < 4e-3
        else:
            assert workload.check(args, result) <= workload.tolerance


@pytest.mark.parametrize("name", ["sample", "multinomial", "greedy"])
def test_checks_fail_what_is_wrong(name):
    """Another token in one row, one that is none, too few of them; and for a draw, that of another seed."""
    workload = workloads(DECODING)[name]
    torch.manual_seed(0)
    args = workload.inputs()
    right = workload.fn(*args)
    assert workload.check(args, right) <= workload.tolerance
    wrong = [torch.where(right == right[2], 72, right), right[:-1]]
    if name != "multinomial":
        other = right.clone()
        other[2] = (other[2] + 1) % 72
        wrong.append(other)
    if name == "sample":
        wrong.append(workload.fn(*args))
        args[2].sub_(1)
    for tokens in wrong:
        assert not workload.check(args, tokens) <= workload.tolerance


@pytest.mark.parametrize("problem", MAXIMA, ids=lambda problem: problem.name)
def test_maxima_stand_beside_the_same_product(problem):
    alone, maxima = problem.workloads
    args = maxima.inputs()
    torch._dynamo.reset()
    with torch.no_grad():
        out, largest = compiled(Runner.CUTE, maxima.fn)(*args)
        right = in_float64(replace(alone, name="bare" if alone.rate is Rate.FP8 else "full"), args)
    assert relative_error(out, right) < TOLERANCE[torch.bfloat16]
    assert relative_error(largest, right.abs().amax(-1)) < TOLERANCE[torch.bfloat16]
    formulas = [explain(each.fn, *args, arch="sm_90a").first_region().formula for each in (alone, maxima)]
    assert ["row_max" in formula for formula in formulas] == [False, True]


# Gated pairs


def in_float64_gated(problem, args):
    """The gated half of a problem, in float64."""
    x, *rest = (each.double() for each in args)
    if len(rest) == 1:
        y = x @ rest[0]
        gate, linear = y[:, ::2].clamp(max=7), y[:, 1::2].clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (linear + 1)
    if len(rest) == 5:
        gate, up, scale, *scales = rest
    else:
        weight, scale, weight_scale = rest
        (gate, up), scales = weight.chunk(2), weight_scale.chunk(2, -1)
    y, z = ((x @ w.t()) * scale * s for w, s in zip((gate, up), scales, strict=True))
    return torch.nn.functional.silu(y) * z


GATED = (
    gated.bf16_problem(40, 96, 64, row_major=False),
    gated.bf16_problem(40, 96, 64, row_major=True),
    gated.fp8_problem(40, 96, 64, gated.two),
    gated.fp8_problem(40, 96, 64, gated.chunk),
)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("runner", [Runner.EAGER, Runner.INDUCTOR, Runner.CUTE])
@pytest.mark.parametrize("problem", GATED, ids=lambda problem: problem.name)
def test_every_variant_of_a_gated_pair_computes_its_formula(problem, runner):
    wide, pair = problem.workloads
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = pair.inputs()
    with torch.no_grad():
        result = compiled(runner, pair.fn)(*args)
        assert wide.fn(*wide.inputs()).shape == (40, 96) and result.shape == (40, 48)
    assert relative_error(result, in_float64_gated(problem, args)) < 2 * TOLERANCE[torch.bfloat16]
    (region,) = explain(pair.fn, *args, arch="sm_90a").regions
    assert len(region.spec.accumulators) == 2


def test_a_gated_pair_has_the_operations_of_the_wide_product():
    with torch.device("meta"):
        for problem in gated.GATED.problems:
            wide, pair = problem.workloads
            n = wide.fn(*wide.inputs()).shape[1]
            out = pair.fn(*pair.inputs())
            assert out.shape[1] == n // 2
            assert wide.operations == pair.operations == 2 * out.shape[0] * n * pair.inputs()[0].shape[1]


# Scales of blocks

BLOCKS = block_scaled_mm.problem(20, 256, 384)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [name for name in workloads(BLOCKS) if name != "slow"])
def test_block_scaled_variants_compute_their_formula(name):
    workload = workloads(BLOCKS)[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = workload.inputs()
    with torch.no_grad():
        result = compiled(Runner.CUTE, workload.fn)(*args)
    (right,) = program_in_float64(Epilogue(workload.fn, {}, ()), args)
    assert relative_error(result, right) < TOLERANCE[torch.bfloat16]
    (region,) = explain(workload.fn, *args, arch="sm_90a").regions
    product = region.spec.product
    assert (product.a_scaling, product.b_scaling) == {
        "rowwise": (Scaling.NONE, Scaling.NONE),
        "blocks": (Scaling.LINE, Scaling.SQUARE),
        "lines": (Scaling.LINE, Scaling.LINE),
    }[name.split()[0]]
