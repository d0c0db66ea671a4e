"""`torch.compile(backend="cute")`, and the pass inside Inductor."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_and_get_code

import cute_backend
from cute_backend import config
from cute_backend.backend import cute, epilogue_pass
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.epilogue_pass import deciding_sources
from cute_backend.runtime.calls.call_site import CallSite
from cute_backend.runtime.calls.op import on_cpu
from cute_backend.spec import BColumns
from support.epilogues import BLOCKWISE, Problem
from support.imports import reached_from
from support.reference import TOLERANCE, in_float64, relative_error

aten = torch.ops.aten
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
M, N, K = 64, 48, 32


def rand(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return rand(M, K), rand(N, K, seed=1) / 6, rand(N, seed=2)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def two_linears(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(linear_gelu(x, weight, bias), weight.t()).relu()


def counted() -> dict[str, int]:
    return dict(counters["cute_backend"])


class LeftOver(CustomGraphPass):
    """A post-grad post-pass that notes what compiled graphs call, views aside."""

    VIEWS = (
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.permute.default,
        aten.expand.default,
    )

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += [
            str(node.target)
            for node in graph.nodes
            if isinstance(node.target, torch._ops.OpOverload) and node.target not in self.VIEWS
        ]

    def uuid(self) -> None:
        return None


def assert_all_fused(
    fn: Callable[..., Any], *args: Any, regions: int = 1, anchors: int | None = None, **how: Any
) -> Any:
    """Asserts that the compiled function calls the op `regions` times, and nothing else. Returns its
    result."""
    left = LeftOver()
    with inductor_config.patch(post_grad_custom_post_pass=left):
        result = torch.compile(fn, backend=cute, **how)(*args)
    assert counted() == {"anchors": anchors or regions, "regions": regions}
    assert left.calls == ["cute_backend.gemm_epilogue.default"] * regions
    return result


def scaled_inputs() -> tuple[Tensor, ...]:
    a, b = rand(M, K, dtype=E4M3), rand(N, K, dtype=E4M3, seed=1).t()
    scales = torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5
    return (a, b, *scales, rand(N, seed=2), rand(M, N, seed=3))


def rowwise(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    y = torch._scaled_mm(a, b, sa, sb, bias=bias, out_dtype=BF16, use_fast_accum=True)
    return F.gelu(y, approximate="tanh") + residual


def tensorwise(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, sa[0, 0], sb[0, 0], out_dtype=BF16).relu() * residual


def to_fp8(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    y = F.silu(torch._scaled_mm(a, b, sa, sb, out_dtype=BF16)) * residual
    return (y.float() * sa[0, 0]).clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", [rowwise, to_fp8], ids=lambda program: program.__name__)
def test_an_fp8_product_and_all_after_it_is_one_call(
    program: Callable[..., Tensor], dynamic: bool | None, fresh_compiler: None
) -> None:
    args = scaled_inputs()
    result = assert_all_fused(program, *args, dynamic=dynamic)
    step = 0.13 if result.dtype is E4M3 else 0.02
    torch.testing.assert_close(result.float(), program(*args).float(), rtol=step, atol=step)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_scales_of_blocks_travel_with_their_operands(dynamic: bool | None, fresh_compiler: None) -> None:
    """Eager has no such product on a CPU, so the reference is in float64."""
    program = BLOCKWISE["blockwise_silu_residual"]
    args = program.inputs(Problem(48, 144, 272))
    result = assert_all_fused(program.fn, *args, dynamic=dynamic)
    (expected,) = in_float64(program, args)
    assert relative_error(result, expected) < TOLERANCE[BF16]


def test_tensorwise_scales_are_scalars(fresh_compiler: None) -> None:
    args = scaled_inputs()
    result = assert_all_fused(tensorwise, *args)
    torch.testing.assert_close(result, tensorwise(*args), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_three_dimensional_gated_mlp_is_two_calls(dynamic: bool | None, fresh_compiler: None) -> None:
    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) + x

    args = rand(4, 16, K), rand(N, K, seed=1) / 5, rand(N, K, seed=2) / 5, rand(K, N, seed=3) / 7
    result = assert_all_fused(mlp, *args, regions=2, anchors=3, dynamic=dynamic)
    reference = mlp(*(value.double() for value in args))
    assert (result - reference).abs().max() <= 1.5 * (mlp(*args) - reference).abs().max()


def per_batch(
    x: Tensor, weight: Tensor, gate: Tensor, shift: Tensor, position: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    y = F.linear(x, weight) * gate * keep
    return F.silu(y + position) + shift, y.abs().amax(-1)


def per_batch_inputs(batches: int, rows: int) -> tuple[Tensor, ...]:
    shapes = ((batches, 1, 1), (batches, 1, N), (1, rows, N), (rows, 1))
    x, weight = rand(batches, rows, K), rand(N, K, seed=1) / 6
    return x, weight, *(rand(*shape, seed=seed) for seed, shape in enumerate(shapes, 2))


def test_operands_for_each_batch_and_for_each_place_are_fused(fresh_compiler: None) -> None:
    args = per_batch_inputs(4, 16)
    for result, eager in zip(assert_all_fused(per_batch, *args), per_batch(*args), strict=True):
        assert result.stride() == eager.stride()
        torch.testing.assert_close(result, eager, rtol=0.02, atol=0.02)


def test_one_compilation_serves_every_batch_and_length(fresh_compiler: None) -> None:
    compiled = torch.compile(per_batch, backend=cute, dynamic=True)
    compiled(*per_batch_inputs(4, 16))
    assert counted() == {"anchors": 1, "regions": 1}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batches, rows in ((2, 33), (7, 2), (31, 5)):
            args = per_batch_inputs(batches, rows)
            for result, eager in zip(compiled(*args), per_batch(*args), strict=True):
                torch.testing.assert_close(result, eager, rtol=0.02, atol=0.02)


Spelling = Callable[[Tensor], tuple[Tensor, Tensor]]

HALVES: dict[str, Spelling] = {
    "chunk": lambda y: y.chunk(2, -1),
    "split": lambda y: y.split([N // 2, N // 2], dim=-1),
    "slices": lambda y: (y[..., : N // 2], y[..., N // 2 :]),
    "unbind": lambda y: y.unflatten(-1, (2, N // 2)).unbind(-2),
    "tensor_split": lambda y: y.tensor_split(2, -1),
}
NEIGHBOURS: dict[str, Spelling] = {
    "slices": lambda y: (y[..., ::2], y[..., 1::2]),
    "select": lambda y: (y.unflatten(-1, (-1, 2))[..., 0], y.unflatten(-1, (-1, 2))[..., 1]),
    "reshape": lambda y: y.reshape(*y.shape[:-1], N // 2, 2).unbind(-1),
}
PARTS = [
    pytest.param(spelling, neighbours, id=f"{'neighbours' if neighbours else 'halves'}-{name}")
    for neighbours, spellings in ((False, HALVES), (True, NEIGHBOURS))
    for name, spelling in spellings.items()
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("parts", "neighbours"), PARTS)
def test_every_spelling_of_two_parts_is_one_kernel(
    parts: Spelling, neighbours: bool, dynamic: bool | None, fresh_compiler: None
) -> None:
    """swiglu7 on three axes, with a bias and a row of maxima beside it. The weights' sizes are static."""
    linear = torch.nn.Linear(K, N, dtype=BF16)

    def gated(x: Tensor) -> tuple[Tensor, Tensor]:
        g, u = parts(linear(x))
        g, u = g.clamp(max=7), u.clamp(-7, 7)
        h = g * torch.sigmoid(1.702 * g) * (u + 1)
        return h, h.abs().amax(-1)

    x = rand(4, 16, K)
    with torch.no_grad():
        (report,) = collect(gated, (x,), dynamic)
        (region,) = report.regions
        assert (region.spec.b_columns is BColumns.INTERLEAVED) is neighbours and len(
            region.spec.accumulators
        ) == 2
        assert region.problem[1:] == (N // 2, K)
        results, eager = assert_all_fused(gated, x, dynamic=dynamic), gated(x)
        linear.double()
        references = gated(x.double())
    for result, rounded, reference in zip(results, eager, references, strict=True):
        assert (result.shape, result.stride()) == (rounded.shape, rounded.stride())
        assert (result - reference).abs().max() <= 1.5 * (rounded - reference).abs().max()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "softplus": F.softplus,
    "glu": F.glu,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "sigmoid": F.sigmoid,
    "logsigmoid": F.logsigmoid,
    "tanh": F.tanh,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_below": lambda x: x.clamp(min=0.25),
    "where": lambda x: torch.where(x > 0, x, -0.5),
    "masked_fill": lambda x: x.masked_fill(x < 0, 3.0),
    "alpha": lambda x: torch.sub(x, x.abs(), alpha=0.5),
    "number_minus": lambda x: 3 - x,
    "number_over": lambda x: 1 / (x.abs() + 1),
    "powers": lambda x: x**2 + x**3 + (x.abs() + 1) ** -0.5 + (x.abs() + 1) ** 1.7,
    "floor_divide": lambda x: x // 0.5,
    "logic": lambda x: ((x > -0.5) & (x < 0.5) | (x == 1)).to(BF16),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "square_root": lambda x: x.abs().sqrt() + torch.rsqrt(x.abs() + 1),
    "to_int8": lambda x: (x * 10).round().clamp(-128, 127).to(torch.int8),
    "to_float16": lambda x: (x.float() * 2).to(torch.float16),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("eager", [False, True], ids=["fused", "eager_rounding"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_fuses_whole(name: str, eager: bool, fresh_compiler: None) -> None:
    """And is no further from float64's result than eager is."""
    x, weight, _ = linear_inputs()

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return ACTIVATIONS[name](F.linear(x, weight))

    with inductor_config.patch(emulate_precision_casts=eager):
        result = assert_all_fused(program, x, weight)
    wanted = program(x, weight)
    assert result.dtype is wanted.dtype
    exact = program(x.double(), weight.double()).double()
    assert (result.double() - exact).abs().max() <= 1.5 * (wanted.double() - exact).abs().max() + 1e-6


def test_eager_rounding_is_eager_to_the_bit(fresh_compiler: None) -> None:
    """Sums of products of small integers are exact, so nothing but the rounding could differ.

    What is beyond e4m3 is the largest number of it in eager from torch 2.13 on, and NaN before.
    """

    def program(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        y = F.linear(x, weight, bias) * 0.3 + residual
        return (y.relu() * y).to(E4M3).to(BF16) - residual / 7

    ints = torch.Generator().manual_seed(3)
    args = [torch.randint(-8, 9, s, generator=ints).to(BF16) for s in ((M, K), (N, K), (N,), (M, N))]
    with inductor_config.patch(emulate_precision_casts=True):
        result = assert_all_fused(program, *args)
    torch.testing.assert_close(result, program(*args), rtol=0, atol=0, equal_nan=True)


def test_eager_rounding_of_mixed_operands_is_eager_to_the_bit(fresh_compiler: None) -> None:
    """Eager converts what it promotes to bf16, and what it compares with, before it computes."""

    def program(x: Tensor, weight: Tensor, scalar: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, weight) * 0.1
        return y + scalar, y * whole, torch.maximum(y, whole), (y > 0.3) | (y == scalar) | (y < whole)

    ints = torch.Generator().manual_seed(3)
    args = [torch.randint(-8, 9, s, generator=ints).to(BF16) for s in ((M, K), (N, K))]
    args += [torch.tensor(0.3), torch.randint(-3000, 3000, (M, N), generator=ints, dtype=torch.int32)]
    with inductor_config.patch(emulate_precision_casts=True):
        results = assert_all_fused(program, *args)
    for result, wanted in zip(results, program(*args), strict=True):
        assert torch.equal(result, wanted)


def test_eager_rounding_meets_a_size_as_an_operand(fresh_compiler: None) -> None:
    def program(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, weight)
        return y * 0.5, y > x.shape[0], y * x.shape[0]

    args = torch.ones(M, K).to(BF16), torch.ones(N, K).to(BF16)
    with inductor_config.patch(emulate_precision_casts=True):
        results = torch.compile(program, backend=cute, dynamic=True)(*args)
    assert counted() == {"anchors": 1, "regions": 1, "symbolic_scalar": 2}
    for result, wanted in zip(results, program(*args), strict=True):
        assert torch.equal(result, wanted)


def test_an_infinity_of_e5m2_that_is_selected_stays_one(fresh_compiler: None) -> None:
    def program(x: Tensor, weight: Tensor, plane: Tensor) -> Tensor:
        return torch.where(F.linear(x, weight) > 0, plane, plane.abs())

    x, weight, _ = linear_inputs()
    plane = torch.full((M, N), float("-inf")).to(torch.float8_e5m2)
    result = assert_all_fused(program, x, weight, plane)
    assert torch.equal(result.float(), program(x, weight, plane).float())


def test_one_compilation_serves_every_m(fresh_compiler: None) -> None:
    x, weight, bias = linear_inputs()
    compiled = torch.compile(linear_gelu, backend=cute, dynamic=True)
    for rows in (64, 7, 33, 2):
        torch.testing.assert_close(
            compiled(x[:rows].clone(), weight, bias),
            linear_gelu(x[:rows], weight, bias),
            rtol=0.02,
            atol=0.02,
        )
    assert counters["stats"]["unique_graphs"] == 1


def test_a_size_that_only_the_result_has_makes_no_cycle(fresh_compiler: None) -> None:
    """Of x (s, s, K), the product (s * s, 1) is given back axes of which the second is (s * s) // s, a symbol
    that no input has: the graph measured it on what the region was to become."""

    def program(x: Tensor, weight: Tensor, square: Tensor) -> tuple[Tensor, ...]:
        y = x @ weight
        return F.softplus(y), y @ square

    x, weight, square = rand(4, 4, 8), rand(1, 8, seed=1).t(), rand(1, 1, seed=2)
    results = torch.compile(program, backend=cute, dynamic=True)(x, weight, square)
    assert counted()["regions"] == 1
    for result, wanted in zip(results, program(x, weight, square), strict=True):
        torch.testing.assert_close(result, wanted, rtol=0.02, atol=0.02)


def test_halves_of_a_width_that_is_a_symbol(fresh_compiler: None) -> None:
    """No input has half of the weight's columns, and both halves read a part of the bias."""

    def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        both = (x @ weight + bias).unflatten(-1, (2, -1))
        return F.silu(both[..., 0, :]) * both[..., 1, :]

    x, weight, bias = rand(M, K), rand(2 * N, K, seed=1).t(), rand(2 * N, seed=2)
    result = torch.compile(gated, backend=cute, dynamic=True)(x, weight, bias)
    assert counted() == {"anchors": 1, "regions": 1}
    torch.testing.assert_close(result, gated(x, weight, bias), rtol=0.03, atol=0.03)


def test_no_rows_and_one_row(fresh_compiler: None) -> None:
    x, weight, bias = linear_inputs()
    compiled = torch.compile(linear_gelu, backend=cute)
    assert compiled(x[:0], weight, bias).shape == (0, N)
    assert counted() == {"anchors": 1, "regions": 0, "empty": 1}
    wanted = linear_gelu(x[:1], weight, bias)
    torch.testing.assert_close(compiled(x[:1], weight, bias), wanted, rtol=0.02, atol=0.02)
    assert counted()["regions"] == 1


def test_training_fuses_forward_and_meets_backward(fresh_compiler: None) -> None:
    """The saved value is a further store; gradients are as close to fp64's as eager's."""
    args = linear_inputs()

    def gradients(fn: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [value.clone().to(dtype).requires_grad_() for value in args]
        fn(*leaves).to(torch.float64).square().sum().backward()
        return [leaf.grad.double() for leaf in leaves]  # type: ignore[union-attr]

    results = gradients(torch.compile(linear_gelu, backend=cute), BF16)
    assert counted() == {"anchors": 3, "regions": 1, "nothing_to_fuse": 2}
    for result, eager, exact in zip(
        results, gradients(linear_gelu, BF16), gradients(linear_gelu, torch.float64), strict=True
    ):
        assert (result - exact).abs().max() <= 2 * (eager - exact).abs().max()


def test_a_backward_product_fuses_with_what_follows_it(fresh_compiler: None) -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.tanh(), weight)

    x, weight = rand(M, K), rand(N, K, seed=1) / 6
    grads = []
    for fn in (torch.compile(program, backend=cute), program):
        leaf = x.clone().requires_grad_()
        fn(leaf, weight).sum().backward()
        grads.append(leaf.grad)
    assert counted() == {"anchors": 2, "regions": 1, "nothing_to_fuse": 1}
    torch.testing.assert_close(grads[0], grads[1], rtol=0.02, atol=0.02)


# How the pass lives in Inductor


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_are_inductors(mode: str, fresh_compiler: None) -> None:
    args = linear_inputs()
    result = assert_all_fused(linear_gelu, *args, mode=mode)
    torch.testing.assert_close(result, linear_gelu(*args), rtol=0.02, atol=0.02)


def test_options_are_inductors(fresh_compiler: None) -> None:
    args = linear_inputs()
    assert_all_fused(linear_gelu, *args, options={"emulate_precision_casts": True})
    torch._dynamo.reset()
    with pytest.raises(Exception, match="option 'no_such_option' is neither one of Inductor's"):
        torch.compile(linear_gelu, backend=cute, options={"no_such_option": True})(*args)


def test_compilers_are_expected_before_a_graph_is_compiled(
    fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start while Inductor works."""
    order: list[object] = []
    monkeypatch.setattr("cute_backend.backend.expect", order.append)
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, *given, **how: order.append(gm) or gm
    )
    torch.compile(torch.relu, backend=cute)(torch.randn(4, 4))
    assert order[0] == {torch.device("cpu")} and isinstance(order[1], fx.GraphModule) and len(order) == 2


def test_the_pass_alone_is_an_option_of_inductor(fresh_compiler: None) -> None:
    args = linear_inputs()
    options = {"post_grad_custom_pre_pass": cute_backend.epilogue_pass}
    result = torch.compile(linear_gelu, options=options)(*args)
    assert counted() == {"anchors": 1, "regions": 1}
    torch.testing.assert_close(result, linear_gelu(*args), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("spelling", ["bk,nk->bn", "bk,kn->bn", "bsk,nk->bsn", "ebk,ekn->ebn"])
def test_an_einsum_is_the_product_that_it_spells(spelling: str, fresh_compiler: None) -> None:
    """Inductor gets a `bmm` whose result gains an axis of one element, and loses it again."""
    sizes = {"e": 3, "b": 24, "s": 5, "n": 32, "k": 16}
    shapes = [[sizes[axis] for axis in axes] for axes in spelling.replace("->", ",").split(",")]
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]

    def fn(a: Tensor, b: Tensor, residual: Tensor) -> Tensor:
        return F.gelu(torch.einsum(spelling, a, b)) + residual

    result = torch.compile(fn, backend=cute)(*args)
    assert counted() == {"anchors": 1, "regions": 1}
    torch.testing.assert_close(result, fn(*args), rtol=0.02, atol=0.05)


def test_an_einsum_that_moves_batches_is_fused(fresh_compiler: None) -> None:
    args = [torch.randn(*shape).bfloat16() for shape in ((24, 3, 16), (3, 16, 32), (24, 3, 32))]

    def fn(a: Tensor, b: Tensor, residual: Tensor) -> Tensor:
        return F.gelu(torch.einsum("bek,ekn->ben", a, b)) + residual

    result = torch.compile(fn, backend=cute)(*args)
    assert counted() == {"anchors": 1, "regions": 1}
    torch.testing.assert_close(result, fn(*args), rtol=0.02, atol=0.05)


def test_generated_code_calls_the_implementation_itself(fresh_compiler: None) -> None:
    args = linear_inputs()
    _, code = run_and_get_code(torch.compile(linear_gelu, backend=cute), *args)
    assert "from cute_backend.runtime.calls.op import on_cpu as gemm_epilogue_on_cpu" in code[0]
    assert re.search(r"gemm_epilogue_on_cpu\(\[.*, results=\[buf0\]\)", code[0])
    assert "torch.ops.cute_backend.gemm_epilogue" not in code[0]
    # One call for each input up to torch 2.14, one for all of them from 2.15 on.
    asserted = re.findall(r"assert_size_stride\w*\(+(\w+)", code[0])
    assert asserted and all(name.startswith("arg") for name in asserted)


def test_what_generated_code_calls_takes_the_ops_arguments() -> None:
    schema = torch.ops.cute_backend.gemm_epilogue_into.default._schema
    names = [argument.name for argument in schema.arguments]
    for call in (on_cpu, CallSite()):
        assert list(inspect.signature(call).parameters) == names


def test_each_call_in_generated_code_for_a_gpu_has_a_site_of_its_own() -> None:
    from cute_backend.fx_walk.replacement.direct_call import _implementation

    class Wrapper:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def add_import_once(self, line: str) -> None:
            self.lines.append(line)

    wrapper = Wrapper()
    names = [_implementation(wrapper, "cuda", buffer) for buffer in ("buf0", "buf3")]
    imported: dict[str, Any] = {}
    exec("\n".join(wrapper.lines), imported)
    sites = [imported[name] for name in names]
    assert all(isinstance(site, CallSite) for site in sites) and sites[0] is not sites[1]


@pytest.mark.parametrize("where", ["options", "config"])
@pytest.mark.parametrize("form", ["callable", "list", "both"])
def test_a_users_own_pass_is_kept_and_runs_first(where: str, form: str, fresh_compiler: None) -> None:
    seen: list[str] = []

    def own(graph: fx.Graph) -> None:
        seen.extend(str(node.target) for node in graph.nodes if node.op == "call_function")

    value: Any = {"callable": own, "list": [own], "both": [own, epilogue_pass]}[form]
    option = {"post_grad_custom_pre_pass": value}
    if where == "options":
        torch.compile(linear_gelu, backend=cute, options=option)(*linear_inputs())
    else:
        with inductor_config.patch(option):
            torch.compile(linear_gelu, backend=cute)(*linear_inputs())
    assert "aten.addmm.default" in seen and "cute_backend.gemm_epilogue.default" not in seen
    assert counted() == {"anchors": 1, "regions": 1}


def test_a_cached_graphs_regions_are_counted_and_logged(
    fresh_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    args = linear_inputs()
    first = torch.compile(two_linears, backend=cute)(*args)
    assert counted() == {"anchors": 2, "regions": 2}
    saved = torch.compiler.save_cache_artifacts()
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "cute_backend"):
        second = torch.compile(two_linears, backend=cute, fullgraph=True)(*args)
        assert counted() == {"anchors": 2, "regions": 2, "cached_regions": 2}
        torch._dynamo.reset()
        with fresh_cache():
            assert saved is not None
            torch.compiler.load_cache_artifacts(saved[0])
            third = torch.compile(two_linears, backend=cute)(*args)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert counted() == {"anchors": 2, "regions": 2, "cached_regions": 4}
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["2 fused regions, from Inductor's cache"] * 2
    assert torch.equal(first, second) and torch.equal(first, third)


def test_a_setting_that_changes_a_decision_misses_the_cache(fresh_compiler: None) -> None:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, weight, bias).relu()
        return y, y * 2

    args = linear_inputs()
    torch.compile(program, backend=cute)(*args)
    torch._dynamo.reset()
    with config.patch(max_stores=1):
        torch.compile(program, backend=cute)(*args)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    assert counted() == {"anchors": 2, "regions": 2, "too_many_stores": 1}


def test_the_uuid_follows_precision_and_settings() -> None:
    plain = epilogue_pass.uuid()
    with inductor_config.patch(emulate_precision_casts=True):
        assert epilogue_pass.uuid() != plain
    with config.patch(max_loads=3):
        assert epilogue_pass.uuid() != plain
    assert epilogue_pass.uuid() == plain


def test_the_uuid_follows_every_source_that_the_pass_or_its_graphs_import() -> None:
    root = Path(cute_backend.__file__).parent
    first = [root / name for name in ("backend.py", "runtime/calls/op.py", "runtime/calls/call_site.py")]
    reached = reached_from([*first, *root.rglob("fx_walk/**/*.py")])
    deciding = set(deciding_sources())
    assert len(reached) > 60 and reached <= deciding
    left_out = {path.relative_to(root).parts[0] for path in root.rglob("*.py")} - {
        path.relative_to(root).parts[0] for path in deciding
    }
    assert {"simulator", "bench", "fuzz", "operators"} < left_out


def test_a_pass_without_a_uuid_keeps_the_cache_off(fresh_compiler: None) -> None:
    torch.compile(linear_gelu, backend=cute, options={"post_grad_custom_pre_pass": lambda graph: None})(
        *linear_inputs()
    )
    assert counters["inductor"]["fxgraph_cache_bypass"] == 1


def test_of_cpp_wrappers_only_those_of_packages_call_the_op() -> None:
    from torch._inductor.virtualized import V

    from support.fx_walk.synthetic import Graph

    made = Graph()
    graph = made.output(made.call(torch.ops.aten.relu.default, made.mm()))
    with inductor_config.patch(cpp_wrapper=True):
        regions, rejections = epilogue_pass.analyse(graph)
        assert not regions
        assert [(each.node, each.reason.value) for each in rejections] == [("mm_default", "cpp_wrapper")]
        with V.set_aot_compilation(True):
            regions, rejections = epilogue_pass.analyse(graph)
    assert len(regions) == 1 and not rejections


# What a program may do around a region


def test_a_buffer_that_is_written_in_place_is_read_before(fresh_compiler: None) -> None:
    def program(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        y = F.linear(x, weight).relu() + buffer
        buffer.add_(1)
        return y * buffer

    x, weight, _ = linear_inputs()
    buffers = torch.ones(M, N).to(BF16), torch.ones(M, N).to(BF16)
    result = torch.compile(program, backend=cute)(x, weight, buffers[0])
    assert counted()["regions"] == 1
    torch.testing.assert_close(result, program(x, weight, buffers[1]), rtol=0.02, atol=0.02)
    assert torch.equal(*buffers)


def test_views_of_a_result_keep_their_strides(fresh_compiler: None) -> None:
    def program(x: Tensor, weight: Tensor, column_major: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, weight).relu()
        return y.t(), y.view(-1), y[:, :4], column_major.t() + F.linear(x, weight)

    x, weight, _ = linear_inputs()
    column_major = rand(N, M, seed=4)
    results = torch.compile(program, backend=cute)(x, weight, column_major)
    for result, wanted in zip(results, program(x, weight, column_major), strict=True):
        assert result.stride() == wanted.stride()
        torch.testing.assert_close(result, wanted, rtol=0.02, atol=0.02)


def test_equal_results_share_memory_only_where_inductors_do(fresh_compiler: None) -> None:
    """Up to torch 2.14 that is where eager's do. From 2.15 on Inductor takes `y * 1.0` for `y`."""

    def program(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, weight).relu()
        return y, y.clone(), y * 1.0, F.linear(x, weight).relu(), y.view(-1), y.view(N, M).clone()

    def memory(results: tuple[Tensor, ...]) -> list[int]:
        places = [result.data_ptr() for result in results]
        return [places.index(place) for place in places]

    x, weight, _ = linear_inputs()
    results = torch.compile(program, backend=cute)(x, weight)
    assert counted()["regions"] >= 1
    alone = torch.compile(program, backend="inductor")(x, weight)
    assert memory(results) == memory(alone)
    assert memory(results) in ([0, 1, 2, 3, 0, 5], [0, 1, 0, 3, 0, 5])
    assert memory(program(x, weight)) == [0, 1, 2, 3, 0, 5]
