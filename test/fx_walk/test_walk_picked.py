"""Losses and log-probabilities without gradients: kernels keep the logit of a label, and write no logits.

Launches cost nothing here. Rows are so few and short that a launch would decide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

from cute_backend import config
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import Arch, offered
from cute_backend.replay import replay
from cute_backend.spec import Axis, EpilogueSpec
from support.reference import relative_error
from support.traffic import fused

pytestmark = pytest.mark.usefixtures("free_launches")

BF16 = torch.bfloat16
M, N, K = 48, 640, 32
INF = float("inf")
Loss = Callable[[Tensor, Tensor], Tensor]


def operands(rows: int = M, columns: int = N) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(count, K, generator=generator).to(BF16) for count in (rows, columns))
    target = torch.randint(0, columns, (rows,), generator=generator)
    target[1::5] = -100  # not counted
    return x, w, target


def after_linear(loss: Loss) -> Callable[..., Tensor]:
    return lambda x, w, target: loss(F.linear(x, w), target)


def taken(y: Tensor, target: Tensor) -> Tensor:
    return y.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)


LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "fp32": lambda y, t: F.cross_entropy(y.float(), t),
    "sum": lambda y, t: F.cross_entropy(y.float(), t, reduction="sum"),
    "each": lambda y, t: F.cross_entropy(y.float(), t, reduction="none"),
    "ignored": lambda y, t: F.cross_entropy(y.float(), t.clamp(min=0), ignore_index=7),
    "weights": lambda y, t: F.cross_entropy(y.float(), t, weight=torch.arange(1.0, N + 1)),
    "smoothed": lambda y, t: F.cross_entropy(y.float(), t, label_smoothing=0.1),
    "smoothed in bf16": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "nll": lambda y, t: F.nll_loss(F.log_softmax(y, -1, dtype=torch.float32), t),
    "temperature": lambda y, t: F.cross_entropy(y.float() / 0.7, t),
    "softcap": lambda y, t: F.cross_entropy(30 * torch.tanh(y.float() / 30), t),
    "bias": lambda y, t: F.cross_entropy((y + torch.arange(N) / N).float(), t),
    "log-probability": lambda y, t: taken(F.log_softmax(y.float(), -1), t),
    "minus logsumexp": lambda y, t: taken(y.float(), t) - y.float().logsumexp(-1),
    "categorical": lambda y, t: Categorical(logits=y.float(), validate_args=False).log_prob(t.clamp(min=0)),
    "texts": lambda y, t: F.cross_entropy(y.view(4, -1, N).float().view(-1, N), t),
    "shifted": lambda y, t: F.cross_entropy(
        y.view(4, -1, N)[:, :-1].reshape(-1, N).float(), t.view(4, -1)[:, 1:].reshape(-1)
    ),
}


def specs(fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[EpilogueSpec]:
    with torch.no_grad():
        return [region.spec for region in fused(fn, args).regions]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", LOSSES)
def test_no_logits_are_written(name: str) -> None:
    fn, args = after_linear(LOSSES[name]), operands()
    (spec,) = specs(fn, args)
    assert all((each := store.form.reduction) is not None and each.axis is Axis.ROW for store in spec.stores)
    assert "row_max(where(column == colvec0, " in kernel_formula(spec)
    with torch.no_grad():
        x, w, target = args
        right = fn(x.double(), w.double(), target)
        got, eager = torch.compile(fn, backend="cute")(*args), fn(*args)
    assert got.dtype is eager.dtype
    assert relative_error(got, right) < 2 * relative_error(eager, right) + 1e-5


def test_a_head_in_fp16() -> None:
    fn, (x, w, target) = after_linear(LOSSES["fp32"]), operands()
    args = (x.half(), w.half(), target)
    (spec,) = specs(fn, args)
    assert not spec.planes and len(spec.reductions) == 2
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend="cute")(*args), fn(*args), rtol=2e-3, atol=2e-3)


def test_an_fp8_head() -> None:
    e4m3 = torch.float8_e4m3fn

    def loss(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, target: Tensor) -> Tensor:
        y = torch._scaled_mm(x, w.t(), sx, sw, out_dtype=BF16, use_fast_accum=True)
        return F.cross_entropy(y.float(), target, reduction="none")

    x, w, target = operands()
    scales = torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5
    args = (x.to(e4m3), w.to(e4m3), *scales, target)
    (spec,) = specs(loss, args)
    assert len(spec.stores) == 2 and not spec.planes
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(loss, backend="cute")(*args), loss(*args), rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize(("rows", "columns"), [(1, N), (M, 1), (1, 1), (3, 129)])
def test_one_row_and_one_column(rows: int, columns: int) -> None:
    fn, args = after_linear(LOSSES["each"]), operands(rows, columns)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend="cute")(*args), fn(*args), rtol=0.02, atol=0.02)


def test_rows_of_any_number() -> None:
    fn = after_linear(LOSSES["fp32"])
    compiled = torch.compile(fn, backend="cute", dynamic=True)
    with torch.no_grad():
        for rows in (M, 3, 77):
            torch.testing.assert_close(compiled(*operands(rows)), fn(*operands(rows)), rtol=0.02, atol=0.02)


def test_rows_that_are_all_ignored() -> None:
    x, w, target = operands()
    for name in ("fp32", "sum"):
        fn, args = after_linear(LOSSES[name]), (x, w, torch.full_like(target, -100))
        with torch.no_grad():
            result = torch.compile(fn, backend="cute")(*args)
            torch.testing.assert_close(result, fn(*args), equal_nan=True)


def test_infinite_logits() -> None:
    """A label whose logit is -inf has an infinite loss, and another one a finite one."""
    x, w, target = operands()

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(torch.where(torch.arange(N) < 300, -INF, y.float()), t, reduction="none")

    fn = after_linear(loss)
    with torch.no_grad():
        result, wanted = torch.compile(fn, backend="cute")(x, w, target), fn(x, w, target)
    assert wanted.isinf().any() and (wanted.isfinite() & (wanted > 0)).any()
    torch.testing.assert_close(result, wanted, rtol=0.02, atol=0.02)


def test_a_label_that_is_no_column_has_an_infinite_loss() -> None:
    x, w, target = operands()
    (spec,) = specs(after_linear(LOSSES["each"]), (x, w, target))
    target = target.clamp(min=0)
    before = replay(spec, [x], [w.t()], [target])[-1]
    target[3], target[4] = N, 2**40
    after = replay(spec, [x], [w.t()], [target])[-1]
    assert after[3:5].tolist() == [-INF, -INF]
    assert torch.equal(after[5:], before[5:]) and torch.equal(after[:3], before[:3])


def rotated(y: Tensor, t: Tensor) -> Tensor:
    heads = y.view(len(y), -1, 64)
    first, second = heads.chunk(2, -1)
    turned = heads * 0.5 + torch.cat((-second, first), -1) * 0.25
    return taken(turned.reshape(y.shape), t)


def test_no_place_is_looked_for_in_columns_of_another_order() -> None:
    """The kernel of a rotation has the columns of halves side by side."""
    fn, args = after_linear(rotated), operands()
    with config.patch(rotary_embeddings="always"):  # type: ignore[attr-defined]
        found = fused(fn, args)
        assert Reason.ROTATED_PLACES in {rejection.reason for rejection in found.rejections}
        assert not any("column" in kernel_formula(region.spec) for region in found.regions)
        assert all(offered(Arch.SM90A, region.spec) for region in found.regions)


def own_argmax(y: Tensor, t: Tensor) -> Tensor:
    return y.gather(-1, y.argmax(-1, keepdim=True))


LEFT: dict[str, Loss] = {
    "an index of the product's own": own_argmax,
    "several of a row": lambda y, t: y.relu().gather(-1, t.clamp(min=0)[:, None].repeat(1, 3)),
    "another axis": lambda y, t: y.relu().gather(0, t.clamp(min=0)[None, :N] % M),
    "some rows": lambda y, t: y.relu().gather(-1, t.clamp(min=0)[: M // 2, None]),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_gathers_read_memory(name: str) -> None:
    fn, args = after_linear(LEFT[name]), operands()
    assert not any("column" in kernel_formula(spec) for spec in specs(fn, args))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend="cute")(*args), fn(*args), rtol=0.02, atol=0.02)


def test_logits_that_a_backward_pass_reads_are_written() -> None:
    fn, (x, w, target) = after_linear(LOSSES["fp32"]), operands()
    regions = fused(fn, (x.requires_grad_(), w.requires_grad_(), target)).regions
    forward = next(region.spec for region in regions if "logsumexp" in kernel_formula(region.spec))
    assert len(forward.planes) == 1
