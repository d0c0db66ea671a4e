"""Cross entropy behind a product: the rows' logsumexp leaves its kernel, and few logits are read again.

Launches cost nothing here. Rows are so few and short that a launch would decide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.fx_walk.preparation import log_softmax
from cute_backend.memory_ops.schedule import kernel_formula
from support.fx_walk.synthetic import Graph, aten, prims
from support.reference import relative_error
from support.traffic import Traffic, alone, fused

pytestmark = pytest.mark.usefixtures("free_launches")

BF16 = torch.bfloat16
M, N, K = 64, 256, 32
Loss = Callable[[Tensor, Tensor], Tensor]
INF = float("inf")


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, K, generator=generator).to(BF16) for rows in (M, N))
    target = torch.randint(0, N, (M,), generator=generator)
    target[::5] = -100  # not counted
    return x, w, target


def after_linear(loss: Loss) -> Callable[..., Tensor]:
    return lambda x, w, target: loss(F.linear(x, w), target)


def formulas(traffic: Traffic) -> list[list[str]]:
    return [kernel_formula(region.spec).splitlines() for region in traffic.regions]


def counted(target: Tensor) -> Tensor:
    return target.clamp(min=0)


PLANE = ["t0 = bf16(acc)", "out0 = bf16(t0)"]
LOSSES: dict[str, tuple[Loss, str]] = {
    "bf16": (F.cross_entropy, "t0"),
    "fp32": (lambda y, t: F.cross_entropy(y.float(), t), "t0"),
    "summed": (lambda y, t: F.cross_entropy(y.float(), t, reduction="sum"), "t0"),
    "scaled": (lambda y, t: F.cross_entropy(y.float() / 1.5, t), "t0 / 1.5"),
    "softcapped": (
        lambda y, t: F.cross_entropy(30 * torch.tanh(y.float() / 30), t),
        "tanh(t0 / 30) * 30",
    ),
    "gathered": (
        lambda y, t: F.log_softmax(y.float(), -1).gather(-1, counted(t)[:, None]).sum(),
        "t0",
    ),
    "several of a row": (
        lambda y, t: F.log_softmax(y.float(), 1).gather(1, counted(t)[:, None].repeat(1, 3)).exp().sum(),
        "t0",
    ),
    "texts": (lambda y, t: F.cross_entropy(y.view(4, -1, N).float().view(-1, N), t), "t0"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", LOSSES)
def test_the_logsumexp_leaves_the_kernel(name: str) -> None:
    loss, logits = LOSSES[name]
    fn, args = after_linear(loss), operands()
    ours, theirs = fused(fn, args), alone(fn, args)
    (lines,) = formulas(ours)
    plane, logsumexp = f"bf16({logits})", f"f32(nan_if_infinite(row_logsumexp({logits})))"
    if name == "several of a row":
        assert lines == [*PLANE, f"out1 = {logsumexp}"]
        assert theirs.bytes - ours.bytes > 1.9 * M * N
    else:
        assert plane not in lines and f"out0 = {logsumexp}" in lines
        assert any("row_max(where(column == colvec0, t0, -inf))" in line for line in lines)
        assert theirs.bytes - ours.bytes > 3.9 * M * N
    torch.testing.assert_close(torch.compile(fn, backend="cute")(*args), fn(*args), rtol=0.02, atol=0.02)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["fp32", "softcapped"])
def test_a_training_step_reads_the_logits_once_less(name: str) -> None:
    """The backward pass reads the largest element and the log of the sum, as Inductor's own forward pass
    leaves them, and the product."""
    fn, (x, w, target) = after_linear(LOSSES[name][0]), operands()
    args = (x.requires_grad_(), w.requires_grad_(), target)
    ours, theirs = fused(fn, args), alone(fn, args)
    assert any("row_logsumexp" in line for line in formulas(ours)[0])
    assert theirs.bytes - ours.bytes > 1.9 * M * N

    def gradients(call: Callable[..., Tensor], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
        leaves = [arg.detach().to(dtype).requires_grad_() for arg in args[:2]]
        result = call(*leaves, target)
        return result.detach(), *torch.autograd.grad(result, leaves)

    eager, right = gradients(fn), gradients(fn, torch.float64)
    for result, other, wanted in zip(gradients(torch.compile(fn, backend="cute")), eager, right, strict=True):
        assert relative_error(result, wanted) < 1.5 * relative_error(other, wanted) + 5e-4


def test_an_infinite_logit_makes_the_loss_nan() -> None:
    """Also where another one is the target's: a kernel's logsumexp is infinite, a softmax's is NaN."""
    fn, (x, w, _) = after_linear(lambda y, t: F.log_softmax(y.float(), -1).gather(-1, t)), operands()
    w[7, 0], x[:, 0], x[3, 0] = INF, 1.0, -1.0
    index = torch.tensor([[5, 7]]).repeat(M, 1)
    assert fused(fn, (x, w, index)).regions
    result, wanted = torch.compile(fn, backend="cute")(x, w, index), fn(x, w, index)
    assert wanted.isnan().any() and wanted.isfinite().any() and wanted.isinf().any()
    torch.testing.assert_close(result, wanted, rtol=0.02, atol=0.02, equal_nan=True)


def log_softmax_of(y: Tensor) -> Tensor:
    return F.log_softmax(y.float(), -1)


LEFT: dict[str, Loss] = {
    "the whole plane": lambda y, t: log_softmax_of(y),
    "columns": lambda y, t: F.log_softmax(y.float(), 0).gather(1, counted(t)[:, None]),
    "other rows": lambda y, t: log_softmax_of(y).gather(0, counted(t)[None, :] % M),
    "some rows": lambda y, t: log_softmax_of(y).gather(1, counted(t)[: M // 2, None]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_reads_more_than_some_elements_is_left(name: str) -> None:
    fn, args = after_linear(LEFT[name]), operands()
    ours, theirs = fused(fn, args), alone(fn, args)
    assert not any("logsumexp" in line for lines in formulas(ours) for line in lines)
    assert (ours.kernels, ours.bytes) == (theirs.kernels, theirs.bytes)


def test_a_loss_that_follows_no_product_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[log_softmax._Writer] = []
    monkeypatch.setattr(log_softmax._Writer, "write", lambda writer: written.append(writer))
    fused(lambda y, x, w, t: (F.cross_entropy(y, t), torch.relu(x @ w.t())), (torch.ones(M, N), *operands()))
    assert not written
    fused(after_linear(F.cross_entropy), operands())
    assert len(written) == 1


@pytest.mark.parametrize("comes_first", [False, True])
def test_nothing_is_gathered_from_what_was_written_since(comes_first: bool) -> None:
    made = Graph()
    rows = made.call(prims.convert_element_type.default, made.mm(M, N, K), torch.float32)
    shifted = made.call(aten.sub.Tensor, rows, made.call(aten.amax.default, rows, [1], True))
    total = made.call(aten.sum.dim_IntList, made.call(aten.exp.default, shifted), [1], True)
    result = made.call(aten.sub.Tensor, shifted, made.call(aten.log.default, total))
    index, memory = made.input("index", (M, 1), torch.int64), made.input("memory", (M, 1), torch.float32)
    if comes_first:
        made.call(aten.copy_.default, memory, made.call(aten.sin.default, memory))
    taken = made.call(aten.gather.default, result, 1, index)
    if not comes_first:
        made.call(aten.copy_.default, memory, made.call(aten.sin.default, memory))
    made.output(taken)
    log_softmax.separate_logsumexps(made.graph)
    gathers = made.graph.find_nodes(op="call_function", target=aten.gather.default)
    assert (gathers == [taken]) is comes_first


def test_wide_logits_are_not_written() -> None:
    """An operand of fp32 makes them wide; its elements are gathered apart."""

    def loss(x: Tensor, w: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w) + bias, target)

    x, w, target = operands()
    args = (x, w, torch.ones(N), target)
    ours, theirs = fused(loss, args), alone(loss, args)
    assert not any(region.spec.planes for region in ours.regions) and ours.bytes < theirs.bytes / 4
    torch.testing.assert_close(torch.compile(loss, backend="cute")(*args), loss(*args), rtol=0.02, atol=0.02)


def test_rows_of_any_number_are_one_program() -> None:
    fn, (x, w, target) = after_linear(F.cross_entropy), operands()
    compiled = torch.compile(fn, backend="cute", dynamic=True)
    for rows in (M, 24, 3):
        part = x[:rows], w, target[:rows]
        torch.testing.assert_close(compiled(*part), fn(*part), rtol=0.02, atol=0.02)
