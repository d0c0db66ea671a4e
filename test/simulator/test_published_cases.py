"""The 25 cases of the first published system that fuses a product's epilogue for the RTX 5090, on sm_120a.

They are those of MagiCompiler's pass over CUTLASS's epilogue visitor trees (SandAI-org/MagiCompiler, pull
request 30): what it fuses is one kernel here, and of what it refuses two more cases are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.planning import Arch
from cute_backend.simulator.simulate import Machine, run
from cute_backend.spec import BColumns, EpilogueSpec
from support.reference import TOLERANCE, relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def silu(y: Tensor) -> Tensor:
    return F.silu(y.float()).to(BF16)


def gelu7(y: Tensor) -> Tensor:
    gate = y.float().clamp(max=7)
    return (gate * torch.sigmoid(1.702 * gate)).to(BF16)


def swiglu7(y: Tensor) -> Tensor:
    gate, linear = y[..., ::2].float().clamp(max=7), y[..., 1::2].float().clamp(-7, 7)
    return (gate * torch.sigmoid(1.702 * gate) * (linear + 1)).to(BF16)


def normed(y: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    x = residual + y.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (gamma + 1)).to(BF16)


@dataclass(frozen=True)
class Case:
    """`epilogue` of a product (M, K) by the transpose of (N, K), and of further operands, shapes of "M" and
    "N" with their dtypes; what its result is stored as, or the reason for which nothing is fused."""

    epilogue: Callable[..., Tensor]
    gives: torch.dtype | Reason = BF16
    others: tuple[tuple[str, torch.dtype], ...] = ()
    dtype: torch.dtype = BF16
    n: int = 1024
    k: int = 1024

    def program(self, a: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        return self.epilogue(torch.mm(a, weight.permute(1, 0)), *others)

    def inputs(self, m: int) -> tuple[Tensor, ...]:
        """Halves, whose products and their sums are exact, and normal values."""
        sizes = {"M": m, "N": self.n}
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        product = [(randn(rows, self.k) * 2).round().div(2).to(self.dtype) for rows in (m, self.n)]
        return (*product, *(randn(*(sizes[axis] for axis in axes)).to(dtype) for axes, dtype in self.others))

    def spec(self) -> EpilogueSpec:
        """Its only region's."""
        (report,) = collect(self.program, self.inputs(1024), arch=Arch.SM120A.value)
        (region,) = report.regions
        assert not report.rejections
        return region.spec


FUSED_THERE = {
    "silu": Case(silu),
    "sigmoid": Case(lambda y: F.sigmoid(y.float()).to(BF16)),
    "gelu": Case(lambda y: F.gelu(y.float()).to(BF16)),
    "gelu7": Case(gelu7),
    "relu, squared": Case(lambda y: torch.square(F.relu(y.float())).to(BF16)),
    "relu": Case(torch.relu),
    "swiglu7": Case(swiglu7),
    "plus a number": Case(lambda y: y + 0.5),
    "times a number": Case(lambda y: y * 0.25),
    "over a number, silu": Case(lambda y: silu(y / 8)),
    "less a number, relu": Case(lambda y: torch.relu(y - 2)),
    "plus a bias, silu": Case(lambda y, bias: silu(y + bias), others=(("N", BF16),)),
    "times a plane": Case(lambda y, gate: y * gate, others=(("MN", BF16),)),
    "bf16 all along": Case(F.silu),
    "bf16 through fp32": Case(silu),
    "bf16 to fp32": Case(lambda y: F.silu(y.float()), F32),
    "bf16 to fp16": Case(lambda y: F.silu(y).half(), F16),
    "fp16": Case(F.silu, F16, dtype=F16),
}
"""The last five store each dtype; one more case there is that equal programs have equal keys."""

REFUSED_THERE = {
    # What the norm reads as well would have to be stored first: the product stays torch's.
    "read by a norm as well": Case(normed, Reason.NOTHING_TO_FUSE, others=(("MN", F32), ("N", BF16)), n=5120),
    "bare": Case(lambda y: y, Reason.NOTHING_TO_FUSE),
    "K of no multiple of 8": Case(silu, Reason.OPERAND_ALIGNMENT, k=1023),
    "N of no multiple of 4": Case(silu, n=1026),
    "swiglu7 of 12 columns": Case(swiglu7, n=12),
    "fp32": Case(F.silu, Reason.OPERAND_DTYPE, dtype=F32),
}

CASES = FUSED_THERE | REFUSED_THERE


def test_all_cases_are_here() -> None:
    """With that of equal keys."""
    assert len(CASES) + 1 == 25


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", CASES)
def test_the_walker_fuses_as_much_or_more(name: str) -> None:
    case = CASES[name]
    if isinstance(case.gives, Reason):
        (report,) = collect(case.program, case.inputs(1024), arch=Arch.SM120A.value)
        assert not report.regions
        assert report.rejections[0].reason is case.gives
        return
    spec = case.spec()
    (store,) = spec.stores
    assert store.dtype.value == {BF16: "bf16", F16: "f16", F32: "f32"}[case.gives]
    assert (spec.b_columns is BColumns.INTERLEAVED) is (case.epilogue is swiglu7)


def test_equal_programs_have_equal_keys() -> None:
    case = FUSED_THERE["plus a bias, silu"]
    renamed = replace(case, epilogue=lambda z, shift: silu(z + shift))
    assert case.spec().to_json() == renamed.spec().to_json()


RUN = {name: case for name, case in CASES.items() if not isinstance(case.gives, Reason)}

IN_MAKE_TEST = ("swiglu7", "N of no multiple of 4")


@pytest.mark.parametrize(
    "name", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.sim) for name in RUN]
)
def test_the_kernel_gives_the_programs_numbers(name: str) -> None:
    """On more than one tile, at the edges of tiles, against the program in float64."""
    case = replace(RUN[name], n=min(RUN[name].n, 104) + RUN[name].n % 4, k=136)
    inputs = case.inputs(72)
    simulation = run(case.program, inputs, Machine(Arch.SM120A, 1))
    (launch,) = simulation.launches
    assert launch.kernel.arch is Arch.SM120A
    expected = case.program(*(tensor.double() for tensor in inputs))
    assert simulation.outputs.dtype is case.gives
    assert relative_error(simulation.outputs, expected) < TOLERANCE[case.gives]
