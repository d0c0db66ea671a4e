"""Products and quotients under `emulate_precision_casts`: rounded where eager's 16-bit kernels round.

ATen's CPU kernels read a second operand of one element in fp32; those of a GPU bring it to the tensor's
dtype. What a GPU gives is compared with the CPU's kernels on whole tensors, which round in the same steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend.replay import replay
from cute_backend.spec import EpilogueSpec, Precision
from support.fx_walk.synthetic import BF16, F32, Graph, aten, walk

F16 = torch.float16
M, N = 8, 192

OPS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "mul": (aten.mul.Tensor, (), {}),
    "div": (aten.div.Tensor, (), {}),
    "floor": (aten.div.Tensor_mode, (), {"rounding_mode": "floor"}),
    "trunc": (aten.div.Tensor_mode, (), {"rounding_mode": "trunc"}),
}
NUMBERS = (0.007812, 0.1, 3.3, -1.7, 0.0, float("inf"))


def dividend(dtype: torch.dtype) -> Tensor:
    """Values of many sizes, zeros, infinities and a NaN: (M, N)."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(M, N, generator=generator) * torch.exp2(torch.arange(N) % 12 - 4.0)
    values[0, :4] = torch.tensor([0.0, float("inf"), float("-inf"), float("nan")])
    return values.to(dtype)


def replayed(name: str, y: Tensor, other: Tensor, device: str, number_first: bool = False) -> Tensor:
    """`y` as a product with the identity, then the op, as a graph on `device` would compute it."""
    target, args, how = OPS[name]
    made = Graph()
    product = made.call(
        aten.mm.default,
        made.input("y", tuple(y.shape), y.dtype, device=device),
        made.input("eye", (N, N), y.dtype, device=device),
    )
    load = made.input("other", tuple(other.shape), other.dtype, device=device)
    operands = (load, product) if number_first else (product, load)
    result = made.call(target, *operands, *args, **how)
    result.meta["low_precision_pointwise_barrier"] = True
    (region,), rejections = walk(made.output(result), Precision.EAGER)
    assert not rejections
    return replay_of_sums(region.spec, y, other)


def replay_of_sums(spec: EpilogueSpec, y: Tensor, other: Tensor) -> Tensor:
    """The spec's result where its accumulator is `y`: row by row times 1, for 0 times infinity is NaN."""
    rows = [
        replay(spec, [y.new_ones(1, 1)], [row[None, :]], [of_row(other, index)])
        for index, row in enumerate(y)
    ]
    return torch.cat([row for (row,) in rows])


def of_row(other: Tensor, index: int) -> Tensor:
    return other if other.dim() == 0 else other[index : index + 1]


def assert_same(result: Tensor, wanted: Tensor) -> None:
    assert result.dtype is wanted.dtype
    same = (result == wanted) & (result.signbit() == wanted.signbit()) | (result.isnan() & wanted.isnan())
    assert same.all(), (result[~same][:4], wanted[~same][:4])


def eager(name: str, left: Tensor, right: Tensor) -> Tensor:
    target, args, how = OPS[name]
    return target(left, right, *args, **how)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_a_number_is_read_as_each_device_reads_it(name: str, dtype: torch.dtype) -> None:
    y = dividend(dtype)
    for number in NUMBERS:
        for own in (F32, BF16, F16):
            other = torch.tensor(number, dtype=own)
            assert_same(replayed(name, y, other, "cpu"), eager(name, y, other))
            whole = other.to(dtype).expand(M, N).contiguous()
            assert_same(replayed(name, y, other, "cuda:0"), eager(name, y, whole))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_a_tensor_is_divided_by_in_steps(name: str, dtype: torch.dtype, device: str) -> None:
    y = dividend(dtype)
    other = y.flip(0).roll(7, 1).contiguous()
    assert_same(replayed(name, y, other, device), eager(name, y, other))


@pytest.mark.parametrize("name", OPS)
def test_a_number_that_comes_first_is_rounded_first(name: str) -> None:
    y, number = dividend(BF16), torch.tensor(3.3)
    wanted = eager(name, number.to(BF16).expand(M, N).contiguous(), y)
    for device in ("cpu", "cuda:0"):
        assert_same(replayed(name, y, number, device, number_first=True), wanted)
