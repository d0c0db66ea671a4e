"""Intermediate planes with strides that nobody needs: regions write rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.backend import cute
from cute_backend.fx_walk.preparation.free_strides import lay_in_rows
from cute_backend.memory_ops.schedule import kernel_formula
from support.fx_walk.synthetic import Graph, aten
from support.traffic import alone, fused

pytestmark = pytest.mark.usefixtures("no_blocks")

B, C, S = 2, 80, 48


def stream(x: Tensor, taps: Tensor, *weights: Tensor) -> Tensor:
    """The residual stream of an encoder of speech: it starts as a convolution's result, (C * S, 1, S)."""
    states = F.gelu(F.conv1d(x, taps, padding=1)).permute(0, 2, 1)
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        states = states + F.linear(F.gelu(F.linear(states, first)), second)
    return F.layer_norm(states, (C,))


def operands(layers: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, C, S), (C, C, 3), *[(4 * C, C), (C, 4 * C)] * layers]
    return tuple((torch.randn(shape, generator=generator) / 8).bfloat16() for shape in shapes)


def test_residual_adds_after_a_convolution_are_fused() -> None:
    """A layer more saves 10 planes: its product and gelu's are written and read once less."""
    ours, theirs = ([count(stream, operands(layers)) for layers in (2, 3)] for count in (fused, alone))
    adds = [region for region in ours[1].regions if region.spec.loads]
    assert [kernel_formula(region.spec) for region in adds] == ["out0 = bf16(exact0 + acc)"] * 3
    saved = [before.bytes - after.bytes for before, after in zip(theirs, ours, strict=True)]
    plane = 2 * B * S * C
    assert saved[1] - saved[0] == (2 * 4 + 2) * plane
    assert all(after.kernels < before.kernels for before, after in zip(theirs, ours, strict=True))


def projected(x: Tensor, gain: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Projections of patches that are scaled first, as by the norm of a vision encoder: (C * S, 1, S)."""
    states = x.permute(0, 2, 1) * gain
    return tuple(F.relu(F.linear(states, weight)) for weight in weights)


def test_linears_of_scaled_patches_are_products_of_rows() -> None:
    """torch lowers them to a `bmm` of an expanded weight each, since it can't merge batches with patches."""
    x, *_ = operands(1)
    args = x, torch.ones(C).bfloat16(), *(torch.ones(C, C).bfloat16() for _ in range(3))
    with config.patch(shared_launches=True):
        ours, theirs = fused(projected, args), alone(projected, args)
    (region,) = ours.regions
    assert len(region.products) == 3 and region.problem == (B * S, 3 * C, C)
    assert (ours.kernels, theirs.kernels) == (2, 7)
    assert theirs.bytes - ours.bytes == 2 * B * S * C * (3 * 2 + 2)


def test_an_input_that_something_else_needs_in_its_layout_keeps_it() -> None:
    def returned(x: Tensor, gain: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        states = x.permute(0, 2, 1) * gain
        return F.relu(F.linear(states, weight)), states

    x, *_ = operands(1)
    args = x, torch.ones(C).bfloat16(), torch.ones(C, C).bfloat16()
    ours, theirs = fused(returned, args), alone(returned, args)
    assert not ours.regions and (ours.kernels, ours.bytes) == (theirs.kernels, theirs.bytes)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_result_has_the_strides_of_eager(dynamic: bool, fresh_compiler: None) -> None:
    def given(*args: Tensor) -> tuple[Tensor, Tensor]:
        states = args[0].permute(0, 2, 1) + F.linear(torch.relu(F.linear(args[1], args[2])), args[3])
        return (states + F.linear(torch.relu(F.linear(states, args[2])), args[3])), states.sum(-1)

    x, _, up, down = operands(1)
    args = x, torch.ones(B, S, C).bfloat16(), up, down
    for batches in args[:2] if dynamic else ():
        torch._dynamo.mark_dynamic(batches, 0)
    with torch.no_grad():
        results = torch.compile(given, backend=cute)(*args)
        expected = given(*args)
    for result, wanted in zip(results, expected, strict=True):
        assert result.stride() == wanted.stride()
        torch.testing.assert_close(result.float(), wanted.float(), rtol=0.02, atol=0.05)
    assert counters["cute_backend"]["regions"] == 3


@pytest.mark.parametrize(
    ("reader", "stays"),
    [
        (aten.relu.default, False),
        (lambda made, plane: made.call(aten.permute.default, plane, [0, 2, 1]), True),
        (lambda made, plane: made.call(aten.as_strided.default, plane, [4], [1]), True),
        (lambda made, plane: made.call(aten.relu_.default, plane), True),
        (lambda made, plane: made.call(aten.cumsum.default, plane, 0), True),
    ],
    ids=["pointwise", "given away as a view", "as_strided", "written to", "another op"],
)
def test_strides_stay_where_something_may_need_them(reader, stays: bool) -> None:
    made = Graph()
    rows = made.call(aten.reshape.default, made.mm(B * S, C), [B, S, C])
    stream = made.input("stream", (B, S, C), strides=(C * S, 1, S))
    plane = made.call(aten.add.Tensor, stream, rows)
    read = made.call(reader, plane) if isinstance(reader, torch._ops.OpOverload) else reader(made, plane)
    graph = made.output(read)
    before = plane.meta["val"].stride()
    assert before == (C * S, 1, S)
    lay_in_rows(graph)
    assert plane.meta["val"].stride() == (before if stays else (S * C, C, 1))
    views = [node.meta["val"].stride() for node in plane.users if node.target is aten.permute.default]
    assert views == [(C * S, S, 1)] * len(views)


def test_views_of_what_is_laid_in_rows_follow() -> None:
    made = Graph()
    rows = made.call(aten.reshape.default, made.mm(B * S, C), [B, S, C])
    stream = made.input("stream", (B, S, C), strides=(C * S, 1, S))
    plane = made.call(aten.add.Tensor, stream, rows)
    view = made.call(aten.permute.default, plane, [2, 0, 1])
    lay_in_rows(made.output(made.call(aten.relu.default, view)))
    assert view.meta["val"].stride() == (1, S * C, C)
    assert view.meta["val"].untyped_storage()._cdata == plane.meta["val"].untyped_storage()._cdata
