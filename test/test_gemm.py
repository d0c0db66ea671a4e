"""The eager entry, on CPU: what it computes, what it remembers, and what it refuses."""

import math
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import UsageError, config, gemm
from cute_backend.eager import call as eager
from cute_backend.fx_walk import epilogue_pass
from cute_backend.planning import Arch, Sizes, choose, plan
from cute_backend.runtime.calls.op import gemm_epilogue
from cute_backend.runtime.kernels.reach import Problem, reachable_kernels
from cute_backend.spec import EpilogueSpec
from support.epilogues import MMA_SCALED
from support.epilogues import Problem as Shape
from support.reference import of_tiles, relative_error

M, N, K = 48, 64, 32
E4M3, E5M2, BF16, F16, F32 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
)
OUTSIDE = torch.ones(N)
"""A tensor that epilogues read, and that does not depend on a product."""


@pytest.fixture(autouse=True)
def settings_as_shipped():
    with config.patch(block_reductions="auto"):
        yield


def operands(a_dtype=E4M3, b_dtype=None):
    """Small integers, so that every product is exact."""
    a = torch.randint(-4, 5, (M, K)).to(a_dtype)
    return a, torch.randint(-4, 5, (N, K)).to(b_dtype or a_dtype).t()


def scales():
    return 2.0 ** (torch.arange(M) % 3)[:, None], 2.0 ** (torch.arange(N) % 5)


def product(a, b):
    return a.float() @ b.float()


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (BF16, BF16), (F16, F16)]
)
def test_scales_and_bias_are_applied_in_fp32(a_dtype, b_dtype):
    (a, b), (scale_a, scale_b) = operands(a_dtype, b_dtype), scales()
    bias = torch.arange(N).to(BF16)
    out = gemm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=F32)
    assert torch.equal(out, product(a, b) * scale_a * scale_b + bias)


@pytest.mark.parametrize("a_lines", [1, 128])
@pytest.mark.parametrize("b_lines", [1, 128])
def test_scales_may_be_of_blocks(a_lines, b_lines):
    m, n, k = 130, 272, 400
    a = torch.randint(-4, 5, (m, k)).to(E4M3)
    b = torch.randint(-4, 5, (n, k)).to(E4M3).t()
    of_a = torch.randint(1, 9, (4, -(-m // a_lines))).float().t()
    of_b = torch.randint(1, 9, (4, -(-n // b_lines))).float()
    left = a.float() * of_a.repeat_interleave(a_lines, 0)[:m].repeat_interleave(128, 1)[:, :k]
    right = b.float() * of_b.repeat_interleave(b_lines, 1)[:, :n].repeat_interleave(128, 0)[:k]
    bias = torch.arange(n).to(BF16)
    out = gemm(a, b, scale_a=of_a, scale_b=of_b, bias=bias, epilogue=torch.relu, out_dtype=F32)
    assert torch.equal(out, torch.relu(left @ right + bias))
    with pytest.raises(UsageError, match="bfloat16 scale_b; scales are float32"):
        gemm(a, b, scale_a=of_a, scale_b=of_b.to(BF16))


@pytest.mark.parametrize("name", ["mxfp8_silu_residual", "mxfp4_residual_amax", "nvfp4_gelu_mul"])
def test_scales_may_be_in_tiles(name):
    """Those of MXFP8, MXFP4 and NVFP4, against float64."""
    a, b, of_a, of_b, *_ = MMA_SCALED[name].inputs(Shape(130, 272, 416))
    out = gemm(a, b, scale_a=of_a, scale_b=of_b, epilogue=torch.relu, out_dtype=F32)
    exact = torch.relu(of_tiles(a, of_a) @ of_tiles(b.t(), of_b).t())
    assert relative_error(out, exact) < 1e-6
    assert gemm(a, b, scale_a=of_a, scale_b=of_b).dtype is BF16
    with pytest.raises(UsageError, match=r"scale_b is .* takes \d+ contiguous elements"):
        gemm(a, b, scale_a=of_a, scale_b=of_b[:-4])
    with pytest.raises(UsageError, match=r"with float8_.* and float32; both scales in tiles are"):
        gemm(a, b, scale_a=of_a, scale_b=torch.ones(272))
    with pytest.raises(UsageError, match="an empty product"):
        gemm(a[:0], b, scale_a=of_a[:0], scale_b=of_b)


def test_rowwise_scales_stay_loads_where_k_has_one_block():
    (a, b), (scale_a, scale_b) = operands(), scales()
    exact = product(a, b) * scale_a * scale_b
    assert torch.equal(gemm(a, b, scale_a=scale_a, scale_b=scale_b[None], out_dtype=F32), exact)
    program = list(eager._programs.values())[-1]
    [spec] = [node.args[3] for node in program.graph.graph.nodes if node.target is gemm_epilogue]
    assert [load.name for load in EpilogueSpec.from_json(spec).loads] == ["scale_a", "scale_b"]


@pytest.mark.parametrize(("dtype", "expected"), [(E4M3, BF16), (BF16, BF16), (F16, F16)])
def test_the_default_dtype_is_that_of_inference(dtype, expected):
    a, b = operands(dtype)
    assert torch.equal(gemm(a, b), product(a, b).to(expected))


def test_scales_may_be_missing_or_single_on_one_side():
    (a, b), (scale_a, scale_b) = operands(), scales()
    exact = product(a, b)
    assert torch.equal(gemm(a, b, scale_a=scale_a, out_dtype=F32), exact * scale_a)
    assert torch.equal(gemm(a, b, scale_b=scale_b[None], out_dtype=F32), exact * scale_b)
    half = torch.tensor(0.5)
    assert torch.equal(gemm(a, b, scale_a=half, scale_b=scale_b, out_dtype=F32), exact * scale_b / 2)


def test_the_epilogue_sees_fp32_and_may_return_several():
    a, b = operands()
    seen = []

    def epilogue(acc):
        seen.append(acc.dtype)
        return acc, (acc / 16).to(E4M3), acc > 0

    full, narrow, positive = gemm(a, b, epilogue=epilogue)
    exact = product(a, b)
    assert seen == [F32]
    assert torch.equal(full, exact.to(BF16))
    assert torch.equal(narrow.float(), (exact / 16).to(E4M3).float())
    assert torch.equal(positive, exact > 0)


REDUCTIONS = {
    "amax of abs": lambda x: x.abs().amax(-1),
    "a scale of amax": lambda x: x.abs().amax(-1).clamp(min=1e-6) / 448,
    "kept": lambda x: x.amin(-1, keepdim=True),
    "sum and mean": lambda x: (x.sum(-1), x.mean(-1, keepdim=True)),
    "max with indices": lambda x: tuple(x.max(-1)),
    "argmin": lambda x: x.argmin(-1),
    "logsumexp": lambda x: (x / 64).logsumexp(-1),
    "columns": lambda x: (x.sum(0), x.amax(0, keepdim=True), x.argmax(0)),
    "everything": lambda x: (x.sum(), x.abs().amax(), x.argmax()),
    "of what is rounded": lambda x: (x / 3).to(E4M3).float().amax(-1),
}


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.parametrize("beside", [True, False], ids=["beside the plane", "alone"])
def test_an_epilogue_may_reduce(reduction, beside):
    """A reduction keeps the dtype that torch gives it; the plane is converted as ever."""
    a, b = operands()
    given = gemm(a, b, epilogue=lambda acc: (acc * 2, reduction(acc)) if beside else reduction(acc))
    if beside:
        plane, given = given
        assert torch.equal(plane, (product(a, b) * 2).to(BF16))
    given, expected = (
        each if isinstance(each, tuple) else (each,) for each in (given, reduction(product(a, b)))
    )
    for actual, right in zip(given, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("m", [1, M])
def test_only_planes_are_converted(m):
    """Results are distinguished by their ops: with one row, sums over the rows have the shape of a plane."""
    a, b = operands()
    plane, kept, row = gemm(
        a[:m], b, epilogue=lambda acc: (acc / 3, (acc / 3).sum(0, keepdim=True), (acc / 3).amax(-1))
    )
    exact = product(a[:m], b) / 3
    assert torch.equal(plane, exact.to(BF16))
    torch.testing.assert_close(kept, exact.sum(0, keepdim=True), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(row, exact.amax(-1), rtol=1e-6, atol=0)
    assert kept.dtype is row.dtype is F32


def test_a_remembered_epilogue_reads_its_tensors_anew():
    a, b = operands()
    row, plane = torch.ones(N), torch.ones(M, N, dtype=BF16)
    before = len(eager._programs)

    def epilogue(acc):
        return acc * row + plane

    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) + 1)
    row, plane = torch.arange(N).float(), torch.randint(9, (M, N)).to(BF16)
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) * row + plane)
    row.add_(1)
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) * row + plane)
    assert len(eager._programs) == before + 1


def test_a_tensor_of_another_layout_is_another_program():
    a, b = operands()
    shift = torch.arange(N).float()
    epilogue = lambda acc: acc + shift  # noqa: E731
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) + shift)
    shift = torch.arange(M).float()[:, None]
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) + shift)
    shift = torch.randn(M, N)
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) + shift)


def test_numbers_in_the_closure_are_not_frozen():
    a, b = operands()

    def shifted(by):
        return gemm(a, b, epilogue=lambda acc: acc / 0.0 * by, out_dtype=F32)[product(a, b) > 0]

    assert (shifted(1.0) == math.inf).all()
    assert (shifted(-1.0) == -math.inf).all()
    zero, minus_zero = (
        gemm(a, b, epilogue=lambda acc, z=z: acc * 0.0 * z, out_dtype=F32) for z in (0.0, -0.0)
    )
    assert torch.equal(torch.signbit(zero), ~torch.signbit(minus_zero))


def test_a_helper_functions_globals_count_too(monkeypatch):
    a, b = operands()
    epilogue = lambda acc: _helper(acc)  # noqa: E731
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) * 2)
    monkeypatch.setitem(globals(), "FACTOR", torch.tensor(3.0))
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) * 3)
    monkeypatch.setitem(globals(), "FACTOR", 4)
    assert torch.equal(gemm(a, b, epilogue=epilogue, out_dtype=F32), product(a, b) * 4)


FACTOR = torch.tensor(2.0)


def _helper(x):
    return x * FACTOR


def test_objects_whose_state_cannot_be_told_are_traced_at_every_call():
    a, b = operands()
    state = {"factor": 2.0}
    module = torch.nn.PReLU(N, dtype=F32).requires_grad_(False)
    before = len(eager._programs)

    def call():
        return gemm(a, b, epilogue=lambda acc: module(acc) * state["factor"], out_dtype=F32)

    assert torch.equal(call(), F.prelu(product(a, b), module.weight) * 2)
    state["factor"] = 4.0
    module.weight.fill_(0.5)
    assert torch.equal(call(), F.prelu(product(a, b), torch.full((N,), 0.5)) * 4)
    assert len(eager._programs) == before


def test_in_place_work_on_the_result_stays_inside():
    a, b = operands()
    assert torch.equal(
        gemm(a, b, epilogue=lambda acc: acc.relu_().add_(1), out_dtype=F32), product(a, b).relu() + 1
    )


def test_the_program_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(eager, "_PROGRAMS", 2)
    eager._programs.clear()
    a, b = operands()
    for number in (0, 1, 0, 2, 0):
        gemm(a, b, epilogue=lambda acc, number=number: acc + number)
    assert len(eager._programs) == 2


@pytest.mark.parametrize(("m", "n", "k"), [(0, N, K), (M, 0, K), (M, N, 0)])
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_an_empty_product_needs_no_kernel(dtype, m, n, k):
    a, b = torch.ones(m, k).to(dtype), torch.ones(n, k).to(dtype).t()
    scale, bias = torch.ones(m, 1), torch.arange(n).float()
    out = gemm(a, b, scale_a=scale, bias=bias, epilogue=lambda acc: acc + 1, out_dtype=F32)
    assert torch.equal(out, (bias + 1).expand(m, n))
    rows, columns = gemm(a, b, bias=bias, epilogue=lambda acc: (acc.sum(-1), acc.sum(0)))
    assert torch.equal(rows, bias.expand(m, n).sum(-1)) and torch.equal(columns, bias * m)


@pytest.fixture
def announced(monkeypatch):
    """The announced problems, as (spec, M, N, K, groups), a list for each call."""
    calls = []
    monkeypatch.setattr(eager, "_programs", OrderedDict())
    monkeypatch.setattr(epilogue_pass, "announce", lambda problems, device, **how: calls.append(problems))
    return calls


@pytest.mark.parametrize(("plane", "variants"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("arch", list(Arch))
def test_a_first_call_asks_for_the_kernels_of_its_own_sizes(plane, variants, arch, announced):
    """An exact load may lie anywhere, so it takes a kernel more; none is built for other sizes."""
    (a, b), other = operands(), torch.ones((M, N) if plane else (N,))
    for _ in range(2):
        gemm(a, b, epilogue=lambda acc: acc * other)
    (((spec, *sizes, groups),),) = announced
    assert groups is None
    kernels = reachable_kernels(Problem(spec, *sizes), arch, sm_count=132)
    assert len(kernels) == variants
    chosen = choose(arch, spec, Sizes(M, N, K), 132)
    assert {each.plan for each in kernels} == {plan(spec, chosen, each.plan.alignment) for each in kernels}


def test_nothing_is_built_for_what_is_refused(announced):
    refused("one kernel", epilogue=lambda acc: (acc.relu(), acc.softmax(-1)))
    assert not announced


def plus(*shape, **how):
    """An epilogue that closes over a tensor of this shape."""
    other = torch.ones(shape, **how)
    return lambda acc: acc + other


def refused(message, a=None, b=None, **arguments):
    default_a, default_b = operands()
    with pytest.raises(UsageError, match=message) as caught:
        gemm(default_a if a is None else a, default_b if b is None else b, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"a \(48, 32\) and b \(64, 32\); it multiplies \(M, K\) by \(K, N\)", {"b": operands()[1].t()}),
        (r"a \(2, 48, 32\)", {"a": torch.zeros(2, 48, 32, dtype=E4M3)}),
        (r"float32 by float8_e4m3fn; it multiplies .*bfloat16 by bfloat16", {"a": torch.zeros(M, K)}),
        (r"float8_e5m2 by float8_e5m2", {"a": operands(E5M2)[0], "b": operands(E5M2)[1]}),
        (
            r"b has strides \(64, 1\); int8, fp8 and fp4 want K contiguous, as in weight\.t\(\) of a",
            {"b": operands()[1].contiguous()},
        ),
        (
            r"a has strides \(1, 48\); int8, fp8 and fp4 want K contiguous, as in a row-major",
            {"a": operands()[0].t().contiguous().t()},
        ),
        (
            r"a has a stride of 24 bytes; .* multiples of 16 bytes",
            {"a": torch.zeros(M, 24).to(E4M3), "b": operands()[1][:24]},
        ),
        (r"scale_a \(1, 48\); it takes one element, \(48,\) or \(48, 1\)", {"scale_a": torch.ones(1, M)}),
        (r"float16 scale_b; scales are float32", {"scale_b": torch.ones(N, dtype=F16)}),
        (r"bias \(48,\); it takes a float one of \(64,\)", {"bias": torch.ones(M)}),
        (r"int64 bias", {"bias": torch.ones(N, dtype=torch.int64)}),
        (r"a on cpu and bias on meta", {"bias": torch.ones(N, device="meta")}),
        (r"out_dtype=float64; it writes float32, bfloat16", {"out_dtype": torch.float64}),
        (r"no derivative.*torch\.no_grad", {"scale_a": torch.ones(M, 1, requires_grad=True)}),
        (r"a of type float; it takes a tensor", {"a": 1.0}),
        (r"b of type list; it takes a tensor", {"b": [[1.0]]}),
        (r"scale_a of type float; it takes a tensor", {"scale_a": 2.0}),
        (r"scale_b of type int; it takes a tensor", {"scale_b": 2}),
        (r"bias of type float; it takes a tensor", {"bias": 0.5}),
        (r"an epilogue of type Tensor; it takes a function of the result", {"epilogue": torch.ones(N)}),
        (r"use_fast_accum=None; it takes True or False", {"use_fast_accum": None}),
        (r"out_dtype of type str; it takes a torch\.dtype", {"out_dtype": "bf16"}),
        (r"fails on the product, \(48, 64\) on cpu, closing over \(7,\) on cpu: ", {"epilogue": plus(7)}),
        (
            r"closing over \(64,\) on meta: .*(same device|different devices)",
            {"epilogue": plus(N, device="meta")},
        ),
        (r"returned a tensor \(3, 48, 64\); it returns \(48, 64\)", {"epilogue": plus(3, M, N)}),
        (r"returned a NoneType; it returns tensors", {"epilogue": lambda acc: None}),
        (r"returned an empty tuple; it returns tensors", {"epilogue": lambda acc: ()}),
        (r"returned a int; it returns tensors", {"epilogue": lambda acc: 1}),
        (
            r"returned a tensor \(24,\); it returns \(48, 64\), the product's shape, or reductions of it",
            {"epilogue": lambda acc: acc.reshape(24, 2, 64).sum((1, 2))},
        ),
        (
            r"sum_1 is complete only when the kernel has ended, and add depends on it: .* those of several",
            {"epilogue": lambda acc: (acc, acc.abs().amax(-1) + acc.sum(-1))},
        ),
        (
            r"one kernel: div reads amax, which reduces the region's own result .*; the epilogue can "
            r"return the reduction together with its operand, and the caller can apply it",
            {"epilogue": lambda acc: (acc / acc.abs().amax(-1, keepdim=True)).to(E4M3)},
        ),
        (r"aten\.var\.correction is a reduction that kernels do not", {"epilogue": lambda acc: acc.var(-1)}),
        (r"fails on the product, .* Dimension out of range", {"epilogue": lambda acc: acc.sum(2)}),
        (
            r"one kernel: .* reads amax, which reduces the region's own result",
            {"epilogue": lambda acc: acc.softmax(-1)},
        ),
        (r"a result does not depend on the product", {"epilogue": lambda acc: torch.zeros(M, N)}),
        (
            r"a result does not depend on the product",
            {"epilogue": lambda acc: (acc, torch.ones(M, N).sum(-1))},
        ),
        *(
            (
                r"makes a Python number of an element of a tensor \(aten\._local_scalar_dense\.default\), .* "
                r"it may use the tensor itself, and torch\.where",
                {"epilogue": epilogue},
            )
            for epilogue in (
                lambda acc: acc if acc.sum() > 0 else -acc,
                lambda acc: acc * float(OUTSIDE[0]),
                lambda acc: acc + OUTSIDE[1].item(),
            )
        ),
        *(
            (r"kernel: aten\.frexp\.Tensor is pointwise but gives several tensors", {"epilogue": epilogue})
            for epilogue in (torch.frexp, lambda acc: torch.frexp(acc)[0], lambda acc: acc.relu().frexp()[1])
        ),
        (r"aten\.sort\.default is neither a pointwise op", {"epilogue": lambda acc: acc.sort(-1).values}),
    ],
)
def test_what_no_kernel_takes_is_named_beside_what_is_taken(message, arguments):
    refused(message, **arguments)


@pytest.mark.parametrize("bias_dtype", [BF16, F16, F32])
def test_a_bias_of_another_float_dtype_is_added(bias_dtype):
    """`addmm` takes the operands' dtype alone."""
    a, b = operands(BF16)
    bias = torch.arange(N).to(bias_dtype) / 4
    assert torch.equal(gemm(a, b, bias=bias, out_dtype=F32), product(a, b) + bias.float())
    clamped = gemm(a, b, bias=bias, epilogue=torch.relu, out_dtype=F32)
    assert torch.equal(clamped, (product(a, b) + bias.float()).relu())


def test_a_captured_tensor_is_not_written_to():
    row = torch.ones(N)
    refused("calls aten.add_.Tensor on a tensor that does not depend", epilogue=lambda acc: acc * row.add_(1))
    assert torch.equal(row, torch.ones(N))


@pytest.mark.exhaustive
def test_a_failing_epilogue_is_told_of_in_its_error_alone():
    """Torch also logs a traceback of a call that fails on fakes."""
    code = """
import torch
from cute_backend import UsageError, gemm
a = b = torch.ones(16, 16, dtype=torch.bfloat16)
other = torch.ones(7)
try:
    gemm(a, b, epilogue=lambda acc: acc + other)
except UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "closing over (7,)" in done.stdout
    assert done.stderr == ""


def test_two_threads_do_not_trace_at_once() -> None:
    """torch's tracers patch global state, and a second one in another thread would leave it patched."""
    inside: list[int] = []
    at_once: list[int] = []

    def traced(scale: float) -> Tensor:
        def epilogue(result: Tensor) -> Tensor:
            inside.append(1)
            at_once.append(len(inside))
            time.sleep(0.05)  # for as long, another thread could enter
            inside.pop()
            return result * scale

        return gemm(torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16(), epilogue=epilogue)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(traced, (1.0, 2.0, 3.0, 4.0)))
    assert [result[0, 0].item() for result in results] == [16.0, 32.0, 48.0, 64.0]
    assert len(at_once) >= 4 and set(at_once) == {1}
