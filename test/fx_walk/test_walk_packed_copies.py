"""Queries, keys and values that a program copies together, and then takes one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.backend import cute
from support.traffic import alone, fused

B, S, H, D = 9, 49, 4, 64
"""Windows of 7 by 7 patches, as in SAM."""


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, S, H * D), (3 * H * D, H * D)
    x, w = (torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in shapes)
    return x, w


def joined(x: Tensor, w: Tensor) -> Tensor:
    packed = F.linear(x, w).reshape(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
    return packed.reshape(3, B * H, S, D)


def attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (part.view(B, H, S, D) for part in joined(x, w).unbind(0))
    return F.scaled_dot_product_attention(q, k, v)


def selected(x: Tensor, w: Tensor) -> Tensor:
    packed = joined(x, w)
    q, k, v = (packed[index].view(B, H, S, D) for index in range(3))
    return F.scaled_dot_product_attention(q, k, v)


def regions(fn: Callable[..., Tensor]) -> list[int]:
    """The products of each region of a function, if launches are shared."""
    with config.patch(shared_launches=True):
        return [len(region.products) for region in fused(fn, operands()).regions]


def test_each_part_is_written_in_the_layout_of_attention() -> None:
    with config.patch(shared_launches=True):
        ours, theirs = fused(attention, operands()), alone(attention, operands())
    (region,) = ours.regions
    assert [str(store.form) for store in region.spec.stores] == [f"(B, H, {S}, {D})"] * 3
    assert (theirs.kernels, ours.kernels) == (5, 2)
    assert theirs.bytes - ours.bytes == 2 * 2 * 3 * B * S * H * D  # the copy reads and writes 16 bits


def test_parts_may_be_taken_by_their_index() -> None:
    assert regions(selected) == [3]


def test_a_copy_that_is_read_whole_stays() -> None:
    def whole(x: Tensor, w: Tensor) -> Tensor:
        packed = joined(x, w)
        q, k, v = (part.view(B, H, S, D) for part in packed.unbind(0))
        return F.scaled_dot_product_attention(q, k, v).sum() + packed.cumsum(0).sum()

    assert regions(whole) == []


def test_results_are_right(fresh_compiler: None) -> None:
    args = operands()
    with config.patch(shared_launches=True), torch.no_grad():
        result = torch.compile(attention, backend=cute)(*args)
    assert counters["cute_backend"]["regions"] == 1
    torch.testing.assert_close(result.float(), attention(*args).float(), rtol=0.02, atol=0.02)
