"""Programs that read a product through views, indices and other ops for which Inductor generates code: no
kernel of ours writes more than Inductor alone reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from cute_backend import config
from cute_backend.fx_walk.ends.consumers import reads_in_place
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.spec import DType
from support.fx_walk.synthetic import Graph, aten, prims
from support.traffic import Traffic, alone, fused

BF16 = torch.bfloat16
B, S, H, D, K = 2, 64, 4, 32, 40
N = H * D


@pytest.fixture(autouse=True)
def settings_as_shipped() -> Iterator[None]:
    settings = {"block_reductions": "auto", "rotary_embeddings": "auto", "shared_launches": True}
    with config.patch(**settings), torch.no_grad():
        yield


def gpt_fast(y: Tensor, table: Tensor) -> Tensor:
    q, cos, sin = y.view(B, S, H, D).float().reshape(B, S, H, -1, 2), table[..., 0], table[..., 1]
    rotated = (q[..., 0] * cos - q[..., 1] * sin, q[..., 1] * cos + q[..., 0] * sin)
    return torch.stack(rotated, -1).flatten(3).type_as(y)


def torchtune(y: Tensor, table: Tensor) -> Tensor:
    q = y.view(B, S, H, D).float().reshape(B, S, H, -1, 2)
    even, odd = q.unbind(-1)
    cos, sin = table.view(-1, S, 1, D // 2, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(3).type_as(y)


def swin(y: Tensor) -> Tensor:
    rolled = torch.roll(y.view(B, 8, 8, N).float(), (-2, -2), (1, 2))
    windows = rolled.view(B, 2, 4, 2, 4, N).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, N)
    return torch.tanh(windows).to(BF16)


def image(y: Tensor) -> Tensor:
    return y.float().transpose(1, 2).view(B, N, 8, 8)


def gated_heads(y: Tensor) -> Tensor:
    gate, up = y.view(B, S, H, D).float().chunk(2, -1)
    return torch.exp(gate) * up


def swapped(y: Tensor, index: Tensor) -> Tensor:
    return torch.tanh(y.float()[:, index])


def embedded(y: Tensor, index: Tensor) -> Tensor:
    return torch.tanh(F.embedding(index, y.float().view(-1, N)))


TABLE, INDEX = torch.ones(S, 1, D // 2, 2), torch.arange(48)

ONLY_CAST: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "halves of heads": (gated_heads, ()),
    "windows of swin": (swin, ()),
    "nearest upsampling": (lambda y: torch.tanh(F.interpolate(image(y), scale_factor=2)), ()),
    "bilinear upsampling": (lambda y: F.interpolate(image(y), scale_factor=2, mode="bilinear"), ()),
    "pooling": (lambda y: F.avg_pool2d(image(y), 2), ()),
    "rows by index": (swapped, (INDEX,)),
    "rows as embeddings": (embedded, (INDEX,)),
    "a column of each row": (lambda y, at: torch.tanh(y.float().gather(-1, at)), (INDEX.view(1, -1, 1),)),
    "a few tokens": (lambda y: (torch.exp(y.float()[:, -1]), torch.exp(y.float()[:, :8])), ()),
    "other tokens": (lambda y: torch.exp(y.float()[:, 1:]), ()),
    "flip": (lambda y: torch.exp(y.float().flip(1)), ()),
    "repeat": (lambda y: torch.exp(y.float().repeat(1, 2, 1)), ()),
    "overlapping windows": (lambda y: torch.exp(y.float().unfold(1, 4, 2)), ()),
    "reflected borders": (lambda y: torch.exp(F.pad(y.float(), (1, 1), mode="reflect")), ()),
    "a part of a larger tensor": (lambda y: torch.exp(F.pad(y.float(), (0, 0, 1, 1))[:, 1:]), ()),
    "gated halves of heads": (lambda y: F.glu(y.view(B, S, H, D).float()), ()),
    "running sums": (lambda y: y.float().cumsum(1), ()),
    "sorted rows": (lambda y: y.float().sort(-1)[0], ()),
    "fp64": (lambda y: torch.exp(y.double()[:, 1:]), ()),
}
"""Programs whose product is only cast to a wider dtype before other work, with their other arguments."""


def compared(follow: Callable[..., Any], *given: Tensor, bias: bool = False) -> tuple[Traffic, Traffic]:
    """The traffic of a linear and what follows it, with our kernels and without. No byte or launch more is
    ours."""
    linear = (torch.ones(B, S, K, dtype=BF16), torch.ones(N, K, dtype=BF16), torch.ones(N, dtype=BF16))

    def program(x: Tensor, w: Tensor, b: Tensor, *given: Tensor) -> Any:
        return follow(F.linear(x, w, b if bias else None), *given)

    ours, theirs = fused(program, (*linear, *given)), alone(program, (*linear, *given))
    assert ours.kernels <= theirs.kernels and ours.bytes <= theirs.bytes
    return ours, theirs


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ONLY_CAST)
def test_a_product_that_is_only_cast_wider_stays_as_narrow_as_inductor_leaves_it(name: str) -> None:
    follow, given = ONLY_CAST[name]
    ours, theirs = compared(follow, *given)
    assert (ours.kernels, ours.bytes, ours.regions) == (theirs.kernels, theirs.bytes, ())


@pytest.mark.parametrize("rotary", [gpt_fast, torchtune])
def test_neighbouring_columns_of_heads_are_rotated_in_the_kernel(rotary: Callable[..., Tensor]) -> None:
    """The result is written in the dtype of the product, and nothing else is."""
    ours, theirs = compared(rotary, TABLE)
    assert [kernel_formula(region.spec) for region in ours.regions] == [
        "out0 = pair(acc0 * exact0 - acc1 * exact1, acc1 * exact0 + acc0 * exact1)"
    ]
    assert ours.kernels == 1 and theirs.bytes - ours.bytes > 6 * B * S * N


def test_a_bias_is_written_in_the_dtype_of_the_product() -> None:
    ours, _ = compared(lambda y: torch.exp(y.float()[:, 1:]), bias=True)
    assert all(store.dtype is DType.BF16 for region in ours.regions for store in region.spec.stores)


@pytest.mark.parametrize(
    "read", [lambda y: y[:, 1:], lambda y: y.flip(1), lambda y: y.view(B, 8, 8, N)[:, ::2]]
)
def test_work_is_written_before_it_is_cast_wider(read: Callable[[Tensor], Tensor]) -> None:
    ours, _ = compared(lambda y: torch.exp(read(torch.relu(y).float())))
    assert [kernel_formula(region.spec) for region in ours.regions] == ["out0 = bf16(relu(acc))"]


WIDE: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda y: y.float(),
    "a part returned": lambda y: y.float()[:, -1],
    "ordered by aten": lambda y: y.float().topk(2),
    "convolved": lambda y: F.conv1d(y.float().transpose(1, 2), torch.ones(N, 1, 3), groups=N),
    "a view of memory": lambda y: torch.exp(y.float().as_strided((B, S - 3, 4, N), (S * N, N, N, 1))),
    "a view as complex numbers": lambda y: torch.view_as_real(
        torch.view_as_complex(y.float().view(B, S, -1, 2)) * torch.ones(N // 2, dtype=torch.complex64)
    ),
    "attention": lambda y: F.scaled_dot_product_attention(
        *y.float().view(B, S, 4, 1, -1).transpose(1, 3).unbind(2)[:3]
    ),
}
"""Readers that need a wide result in memory, which Inductor alone writes by one more kernel."""


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_result_that_has_to_be_in_memory_is_written_once(name: str) -> None:
    ours, theirs = compared(WIDE[name])
    assert [kernel_formula(region.spec) for region in ours.regions] == ["out0 = f32(acc)"]
    assert ours.kernels < theirs.kernels and ours.bytes < theirs.bytes


def test_logits_that_labels_are_gathered_from_are_not_written() -> None:
    """The gather reads one element of a row, which the kernel keeps beside the sums of exponentials. Labels
    that count take a launch of their own."""

    def program(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float().view(-1, N), target)

    args = torch.ones(B, S, K, dtype=BF16), torch.ones(N, K, dtype=BF16), torch.zeros(B * S, dtype=torch.long)
    ours, theirs = fused(program, args), alone(program, args)
    (region,) = ours.regions
    assert not region.spec.planes and len(region.spec.reductions) == 2
    assert theirs.bytes - ours.bytes > 3.9 * B * S * N


def reader(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = Graph()
    return made.call(target, made.input("x", (64, 1024), torch.float32), *args, **kwargs)


@pytest.mark.parametrize(
    ("node", "reads"),
    [
        (lambda: reader(aten.slice.Tensor, 1, 0, 4), True),
        (lambda: reader(aten.unbind.int, 1), True),
        (lambda: reader(aten.unfold.default, 1, 4, 2), True),
        (lambda: reader(prims.rev.default, [1]), True),
        (lambda: reader(aten.constant_pad_nd.default, [1, 1]), True),
        (lambda: reader(aten.cumsum.default, 1), True),
        (lambda: reader(aten.sort.default, 0), True),
        (lambda: reader(aten.sort.default, 1), False),
        (lambda: reader(aten.topk.default, 4), False),
        (lambda: reader(aten.as_strided.default, [4, 4], [4, 1]), False),
        (lambda: reader(aten.histc.default), False),
        (lambda: reader(aten.mul_.Tensor, 2), False),
    ],
)
def test_inductor_is_asked_for_what_reads_in_place(node: Callable[[], fx.Node], reads: bool) -> None:
    assert reads_in_place(node()) is reads


def test_products_convolutions_and_calls_of_aten_need_memory() -> None:
    made = Graph()
    x = made.input("x", (1, 64, 64), torch.float32)
    nodes = (
        made.call(aten.bmm.default, x, x),
        made.call(aten.convolution.default, x, x, None, [1], [0], [1], False, [0], 1),
        made.call(aten._cdist_forward.default, x, x, 2.0, None),
    )
    assert not any(map(reads_in_place, nodes))
