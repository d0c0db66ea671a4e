"""Products that Inductor has padded, as it does on a GPU where its own timing says that cuBLAS gains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm

from cute_backend.backend import cute
from cute_backend.fx_walk.preparation.padding import take_padding_back
from support.fx_walk.synthetic import Graph, aten


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu()


def rows_of_their_own(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(x[:, :1], x, weight.t(), beta=2.0, alpha=0.5).relu()


def with_a_plane(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    plane = torch.ones(x.shape[0], weight.shape[0], dtype=x.dtype)
    return torch.addmm(plane, x, weight.t()).relu()


def no_addend(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x @ weight.t()).relu().view(2, -1, weight.shape[0])


def greatest(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).amax(-1)


def even_and_odd(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = torch.addmm(bias, x, weight.t())
    return y[:, ::2].clamp(max=7) * y[:, 1::2]


def halves(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    gate, up = (x @ weight.t()).chunk(2, dim=-1)
    return F.silu(gate) * up


def even_alone(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x @ weight.t())[:, ::2]


def bare(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.t()


def row_major_b(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x @ weight.t().contiguous()).relu()


def batches(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (_in_batches(x) @ _in_batches(weight).mT + bias[: _in_batches(weight).shape[1]]).relu()


def some_batches(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (_in_batches(x) @ _in_batches(weight).mT)[:1].relu()


def _in_batches(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (2, -1))


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> list[bool]:
    """Have Inductor pad on a CPU, whatever a timing would say; notes what it asked to pad."""
    asked: list[bool] = []
    should_pad = pad_mm.should_pad

    def note(*args: object, **kwargs: object) -> bool:
        asked.append(should_pad(*args, **kwargs))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(pad_mm, "check_device", lambda a, b: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    monkeypatch.setattr(pad_mm, "should_pad", note)
    return asked


PAIRS = (even_and_odd, halves)


def run(program: Callable[..., Tensor], m: int, n: int, k: int) -> dict[str, int]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((m, k), (n, k), (n,))
    )
    with inductor_config.patch(force_shape_pad=True, force_disable_caches=True):
        actual = torch.compile(program, backend=cute, dynamic=False)(x, weight, bias)
    exact = program(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(actual.double(), exact, rtol=0.01, atol=0.01)
    return dict(counters["cute_backend"])


@pytest.mark.sweep(5)
@pytest.mark.parametrize("program", [linear, rows_of_their_own, with_a_plane, no_addend, greatest, batches])
@pytest.mark.parametrize("size", [(130, 64, 72), (128, 50, 72), (130, 50, 72), (130, 64, 71)])
def test_what_was_padded_fuses(
    program: Callable[..., Tensor], size: tuple[int, int, int], padded: list[bool]
) -> None:
    assert run(program, *size) == {"anchors": 1, "regions": 1}
    assert padded == [True]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("program", PAIRS)
@pytest.mark.parametrize("size", [(2, 64, 72), (130, 64, 72), (130, 64, 71)])
def test_pairs_of_columns_that_were_padded_fuse(
    program: Callable[..., Tensor], size: tuple[int, int, int], padded: list[bool]
) -> None:
    """The slices of the columns stand between the padding's slice and the work."""
    assert run(program, *size) == {"anchors": 1, "regions": 1}
    assert padded == [True]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("program", "size"),
    [
        (bare, (130, 50, 72)),
        (even_alone, (130, 64, 72)),
        (row_major_b, (130, 50, 72)),
        (linear, (130, 50, 71)),
        (some_batches, (130, 64, 72)),
    ],
    ids=[
        "nothing follows",
        "only a slice follows",
        "rows of B are not aligned",
        "K is padded too",
        "not all batches are read",
    ],
)
def test_padding_that_nothing_here_gains_from_stays(
    program: Callable[..., Tensor], size: tuple[int, int, int], padded: list[bool]
) -> None:
    counted = run(program, *size)
    assert counted["anchors"] == counted["nothing_to_fuse"] == 1 and counted["regions"] == 0
    assert padded == [True]


@pytest.mark.parametrize("written", [False, True])
def test_padding_before_a_write_in_place_stays(written: bool) -> None:
    """Without padding, the product would read its operand after the write."""
    made = Graph()
    a, b = made.input("a", (130, 72)), made.input("b", (72, 64))
    rows = made.call(aten.constant_pad_nd.default, a, [0, 0, 0, 6])
    product = made.call(aten.mm.default, rows, b)
    if written:
        made.call(aten.copy_.default, a, made.call(aten.neg.default, a))
    cut = made.call(aten.slice.Tensor, product, 0, 0, 130)
    graph = made.output(made.call(aten.relu.default, cut))
    take_padding_back(graph)
    (product,) = (node for node in graph.nodes if node.target is aten.mm.default)
    assert product.meta["val"].shape[0] == (136 if written else 130)
