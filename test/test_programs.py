"""Random torch programs through `torch.compile(backend="cute")` on CPU, where the kernel's replay runs.

With `emulate_precision_casts` they must give eager's bits, as long as sums are exact and every op's result is
determined. Without, they must give what the program gives in fp32, rounded once where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

M, N, K = 16, 32, 16
BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LOADS = {"row": (N,), "column": (M, 1), "scalar": (), "plane": (M, N)}

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Tensor, Tensor], Tensor]

DETERMINED: dict[str, Unary] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky": lambda x: F.leaky_relu(x, 0.3),
    "double": lambda x: x * 2,
    "third": lambda x: x * 0.3,
    "shift": lambda x: x + 1.5,
    "over": lambda x: x / 7,
    "one over": lambda x: 1 / (x.abs() + 1),
    "square": lambda x: x**2,
    "clamp": lambda x: x.clamp(-3, 5),
    "floor": torch.floor,
    "round": torch.round,
    "sign": torch.sign,
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "positive": lambda x: torch.where(x > 0, x, 0.25),
    "is small": lambda x: ((x < 2) & ~(x == 1)).to(x.dtype),
    "to bf16": lambda x: x.to(BF16),
    "to f16": lambda x: x.to(F16),
    "to f32": lambda x: x.float(),
    "through e4m3": lambda x: x.clamp(-400, 400).to(E4M3).to(BF16),
    "through int8": lambda x: x.clamp(-100, 100).to(torch.int8).to(x.dtype),
}
DETERMINED_PAIRS: dict[str, Binary] = {
    "add": torch.add,
    "sub": torch.sub,
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=2),
    "mul": torch.mul,
    "maximum": lambda x, y: torch.maximum(*_promoted(x, y)),
    "minimum": lambda x, y: torch.minimum(*_promoted(x, y)),
    "where": lambda x, y: torch.where(x > y, x, y),
}
SMOOTH: dict[str, Unary] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3),
    "softplus": F.softplus,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "erf": torch.erf,
    "sin": lambda x: torch.sin(x) + torch.cos(x),
    "root": lambda x: torch.sqrt(x.abs() + 1),
    "rsqrt": lambda x: torch.rsqrt(x * x + 1),
    "log": lambda x: torch.log(x.abs() + 1) + torch.log1p(x.abs()),
    "exp": lambda x: torch.exp(-x.abs()) + torch.exp2(-x.abs()),
    "power": lambda x: (x.abs() + 1) ** 0.7,
    "roots": lambda x: (x.abs() + 1) ** 0.5 - (x.abs() + 2) ** -0.5 + (x.abs() + 1) ** -1,
    "scale": lambda x: x * 0.3 - 1,
    "over": lambda x: 2 / (x.abs() + 1),
}
SMOOTH_PAIRS: dict[str, Binary] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda x, y: torch.tanh(x) * y,
    "maximum": lambda x, y: torch.maximum(*_promoted(x, y)),
    "lerp": lambda x, y: torch.add(x, y, alpha=0.5),
}


def _promoted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


@dataclass(frozen=True)
class Step:
    """The op `name` of the value `left` and, where it takes two, of an earlier value or a load, `right`."""

    name: str
    left: int
    right: int | str | None


@dataclass(frozen=True)
class Program:
    """A matrix product, steps after it, and which values come out."""

    scaled: bool
    load_dtypes: dict[str, torch.dtype]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def inputs(self, make: Callable[[tuple[int, ...]], Tensor]) -> list[Tensor]:
        """Operands and loads; `make` gives fp32 values of a shape."""
        dtype = E4M3 if self.scaled else BF16
        scales = [
            torch.exp2(make((M, 1)).clamp(-2, 2).round()),
            torch.exp2(make((1, N)).clamp(-2, 2).round()),
        ]
        loads = [make(shape).to(self.load_dtypes[name]) for name, shape in LOADS.items()]
        return [make((M, K)).to(dtype), make((N, K)).to(dtype).t(), *scales, *loads]

    def function(
        self, unary: dict[str, Unary], binary: dict[str, Binary]
    ) -> Callable[..., tuple[Tensor, ...]]:
        def program(
            a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *loads: Tensor
        ) -> tuple[Tensor, ...]:
            named = dict(zip(LOADS, loads, strict=True))
            values = [torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=BF16) if self.scaled else a @ b]
            for step in self.steps:
                left = values[step.left]
                if step.right is None:
                    values.append(unary[step.name](left))
                else:
                    right = named[step.right] if isinstance(step.right, str) else values[step.right]
                    values.append(binary[step.name](left, right))
            return tuple(values[index] for index in self.outputs)

        return program


@st.composite
def programs(draw: st.DrawFn, unary: dict[str, Unary], binary: dict[str, Binary]) -> Program:
    steps: list[Step] = []
    for made in range(1, 1 + draw(st.integers(1, 7))):
        values = st.one_of(st.just(made - 1), st.integers(0, made - 1))
        if draw(st.booleans()):
            right = draw(st.one_of(st.sampled_from(sorted(LOADS)), values))
            steps.append(Step(draw(st.sampled_from(sorted(binary))), draw(values), right))
        else:
            steps.append(Step(draw(st.sampled_from(sorted(unary))), draw(values), None))
    others = draw(st.lists(st.integers(1, len(steps)), max_size=1))
    return Program(
        scaled=draw(st.booleans()),
        load_dtypes={name: draw(st.sampled_from([BF16, F32])) for name in LOADS},
        steps=tuple(steps),
        outputs=tuple(dict.fromkeys([len(steps), *others])),
    )


def compiled_result(
    function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], *, eager: bool
) -> tuple[Tensor, ...]:
    """The results of the compiled program; asserts that its product was fused, if there is something to
    fuse."""
    torch._dynamo.reset()
    counters.clear()
    with inductor_config.patch(emulate_precision_casts=eager, force_disable_caches=True):
        result = torch.compile(function, backend="cute")(*inputs)
    counted = counters["cute_backend"]
    assert counted["regions"] + counted["nothing_to_fuse"] == 1, dict(counted)
    return result


HOW = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
SEEDS = st.integers(0, 2**16)


@settings(max_examples=8, **HOW)
@given(program=programs(DETERMINED, DETERMINED_PAIRS), seed=SEEDS)
def test_eager_precision_gives_eagers_bits(program: Program, seed: int) -> None:
    eager_bits(program, seed)


@pytest.mark.exhaustive
@settings(max_examples=80, **HOW)
@given(program=programs(DETERMINED, DETERMINED_PAIRS), seed=SEEDS)
def test_eager_precision_gives_eagers_bits_of_many(program: Program, seed: int) -> None:
    eager_bits(program, seed)


def eager_bits(program: Program, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = program.inputs(lambda shape: torch.randint(-7, 8, shape, generator=generator).float())
    function = program.function(DETERMINED, DETERMINED_PAIRS)
    wanted = function(*inputs)
    for got, expected in zip(compiled_result(function, inputs, eager=True), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def in_fp32(program: Program, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Every value of the program in fp32, from the exact product on."""
    a, b, scale_a, scale_b, *loads = (tensor.float() for tensor in inputs)
    if program.scaled:
        product, scaled = a @ b * scale_a * scale_b, torch.eye(N)
    else:
        product, scaled = a @ b, torch.eye(N)
    everything = Program(False, program.load_dtypes, program.steps, tuple(range(len(program.steps) + 1)))
    return everything.function(SMOOTH, SMOOTH_PAIRS)(product, scaled, scale_a, scale_b, *loads)


@settings(max_examples=8, **HOW)
@given(program=programs(SMOOTH, SMOOTH_PAIRS), seed=SEEDS)
def test_fused_precision_rounds_once(program: Program, seed: int) -> None:
    rounds_once(program, seed)


@pytest.mark.exhaustive
@settings(max_examples=80, **HOW)
@given(program=programs(SMOOTH, SMOOTH_PAIRS), seed=SEEDS)
def test_fused_precision_rounds_many_once(program: Program, seed: int) -> None:
    rounds_once(program, seed)


def rounds_once(program: Program, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = program.inputs(lambda shape: torch.randn(shape, generator=generator))
    function = program.function(SMOOTH, SMOOTH_PAIRS)
    values = in_fp32(program, inputs)
    largest = max(value.abs().max().item() for value in values)
    results = compiled_result(function, inputs, eager=False)
    for index, got in zip(program.outputs, results, strict=True):
        expected = values[index]
        tolerance = torch.finfo(got.dtype).eps / 2 * 1.01
        torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=2e-5 * largest)
