"""One row: at M = 1 a view of the plane has no stride from row to row, and a token's gate and up still meet.

Programs go through torch.compile up to the pass; the op is then the replay, on operands bound as a launch
binds them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.products.pairs import column_slice
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.operands import parse_spec
from cute_backend.simulator.simulate import run_with
from cute_backend.spec import LoadKind
from support.fx_walk.compared import assert_same_after_the_pass
from support.fx_walk.pairs import CUTS, Cut, K, N, the_region
from support.fx_walk.synthetic import BF16, Graph, aten

E4M3 = torch.float8_e4m3fn

Gate = Callable[[Tensor], Tensor]


def chunk(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def split(y: Tensor) -> Tensor:
    gate, up = y.split(y.shape[-1] // 2, -1)
    return F.silu(gate) * up


def slices(y: Tensor) -> Tensor:
    half = y.shape[-1] // 2
    return F.silu(y[..., :half]) * y[..., half:]


def rows_of_a_view(y: Tensor) -> Tensor:
    gate, up = y.unflatten(-1, (2, -1)).unbind(-2)
    return F.silu(gate) * up


def neighbours(y: Tensor) -> Tensor:
    return F.silu(y[..., ::2]) * y[..., 1::2]


def neighbours_of_a_view(y: Tensor) -> Tensor:
    gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


def first_row(y: Tensor) -> Tensor:
    return chunk(y.reshape(-1, y.shape[-1])[0])


def flattened(y: Tensor) -> Tensor:
    return chunk(y.flatten())


GATES = [chunk, split, slices, rows_of_a_view, neighbours, neighbours_of_a_view]


class Gated(torch.nn.Module):
    """A packed gate and up weight, (2 N, K), and what is done with its product."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.packed = torch.nn.Linear(K, 2 * N, dtype=BF16)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.packed(x))


def row(*shape: int) -> Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(0)).to(BF16)


@pytest.mark.parametrize("gate", [*GATES, first_row, flattened], ids=lambda gate: gate.__name__)
def test_a_packed_weight_is_one_kernel_of_one_row(gate: Gate) -> None:
    module, x = Gated(gate).requires_grad_(False), row(1, 1)
    torch.testing.assert_close(bound_as_launched(module, x), module(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("gate", [chunk, neighbours], ids=lambda gate: gate.__name__)
def test_one_row_is_one_however_sizes_are_taken(gate: Gate, dynamic: bool) -> None:
    (report,) = collect(Gated(gate).requires_grad_(False), (row(1),), dynamic=dynamic)
    (region,) = report.regions
    assert len(region.anchors) == 2 and not report.rejections and region.problem == (1, N, K)


@pytest.mark.parametrize("gate", [chunk, neighbours], ids=lambda gate: gate.__name__)
def test_scales_and_biases_are_cut_along(gate: Gate) -> None:
    generator = torch.Generator().manual_seed(1)
    a, weight = torch.randn(1, K, generator=generator), torch.randn(2 * N, K, generator=generator)
    scales = torch.full((1, 1), 0.5), torch.arange(1.0, 2 * N + 1)[None, :] / N
    bias = torch.randn(2 * N, generator=generator).to(BF16)

    def program(a: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
        return gate(torch._scaled_mm(a, weight.t(), scale_a, scale_b, bias, out_dtype=BF16))

    args = (a.to(E4M3), weight.to(E4M3), *scales, bias)
    torch.testing.assert_close(bound_as_launched(program, *args), program(*args), rtol=0.03, atol=0.03)


def bound_as_launched(fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Calls `fn` with its one region, of two accumulators, replayed on its operands in the strides that its
    kernel gets. No operand is copied.
    """
    calls = 0

    def execute(a: list[Tensor], b: list[Tensor], loads: list[Tensor], text: str) -> list[Tensor]:
        nonlocal calls
        calls += 1
        spec, copied = parse_spec(text), counters["cute_backend"]["operands_copied"]
        operands, first = Binding(spec).bind(a, b, loads).tensors, 1 + spec.b_count
        assert counters["cute_backend"]["operands_copied"] == copied
        assert len(spec.accumulators) == 2
        return torch.ops.cute_backend.gemm_epilogue([operands[0]], operands[1:first], operands[first:], text)

    result = run_with(fn, args, execute)
    assert calls == 1
    return result


@CUTS
def test_operands_of_the_whole_row_are_cut_along(cut: Cut) -> None:
    """Of a plane and of a column, one row is a vector and a number."""
    made = Graph()
    a, b = made.input("a", (1, K)), made.input("b", (K, N), strides=(1, K))
    y = made.call(aten.addmm.default, made.input("bias", (N,)), a, b)
    for name, shape in {"plane": (1, N), "row": (N,), "column": (1, 1), "number": ()}.items():
        y = made.call(aten.mul.Tensor, y, made.input(name, shape))
    graph = made.output(made.call(aten.sub.Tensor, *cut(made, y)))
    kinds = [load.kind for load in the_region(graph).spec.loads]
    assert kinds == [LoadKind.ROWVEC] * 6 + [LoadKind.SCALAR] * 2
    assert_same_after_the_pass(graph, 1)


def test_a_part_of_one_row_is_told_by_its_columns_alone() -> None:
    made = Graph()
    y = made.mm(1, N, K)
    views = {
        "all": (made.call(aten.squeeze.dim, y, 0), (0, 1, N)),
        "odd": (made.call(aten.slice.Tensor, y, 1, 1, N, 2), (1, 2, N // 2)),
        "rows far apart": (made.call(aten.as_strided.default, y, [1, 8], [999, 3], 5), (5, 3, 8)),
        "turned": (made.call(aten.permute.default, y, [1, 0]), (0, 1, N)),
        "stretched": (made.call(aten.reshape.default, y, [1, N // 2, 2]), (0, 1, N)),
        "twice": (made.call(aten.expand.default, y, [2, N]), None),
    }
    for name, (node, wanted) in views.items():
        part = column_slice(node, 1)
        assert (part and (part.start, part.step, part.count)) == wanted, name
