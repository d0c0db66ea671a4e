"""Losses without gradients on a GPU: right, and without logits in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROWS, COLUMNS, DEPTH = 300, 32072, 512


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ROWS, DEPTH, device="cuda", generator=generator).bfloat16()
    w = torch.randn(COLUMNS, DEPTH, device="cuda", generator=generator).div(DEPTH**0.5).bfloat16()
    labels = torch.randint(0, COLUMNS, (ROWS,), device="cuda", generator=generator)
    labels[::7] = -100
    return x, w, labels


def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), labels, reduction="none")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_is_right_and_writes_no_logits(dynamic: bool) -> None:
    args = operands()
    compiled = torch.compile(loss, backend="cute", dynamic=dynamic)
    with torch.no_grad():
        compiled(*args)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = compiled(*args)
        peak = torch.cuda.max_memory_allocated() - before
        x, w, labels = args
        logits = F.linear(x, w).double()
        right = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-5)
    assert peak < 2 * ROWS * COLUMNS / 8, "logits of 16 bits would take eight times as many bytes"


def test_a_label_that_is_no_column_has_an_infinite_loss() -> None:
    x, w, labels = operands()
    compiled = torch.compile(loss, backend="cute")
    with torch.no_grad():
        before = compiled(x, w, labels)
        labels[3], labels[4] = COLUMNS, 2**40
        after = compiled(x, w, labels)
    assert after[3:5].isinf().all() and torch.equal(after[5:], before[5:])


def test_a_training_step_that_computes_the_logits_again_holds_none_of_them_in_between() -> None:
    """The checkpoint keeps x, and the forward pass writes no logits."""
    from torch.utils.checkpoint import checkpoint

    args = operands()

    def step(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(
            lambda x, w: F.cross_entropy(F.linear(x, w).float(), labels), x, w, use_reentrant=False
        )

    compiled = torch.compile(step, backend="cute")
    leaves = [each.clone().requires_grad_() for each in args[:2]]
    compiled(*leaves, args[2]).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = compiled(*leaves, args[2])
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * ROWS * COLUMNS / 8
    result.backward()
    others = [each.detach().double().requires_grad_() for each in leaves]
    F.cross_entropy(F.linear(*others), args[2]).backward()
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.grad is not None and other.grad is not None
        error = (leaf.grad.double() / 2 - other.grad).norm() / other.grad.norm()
        assert error < 0.02
