"""Weights of which a byte has two values, as libraries and people spell them, and others like them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import explain
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.spec import DType, WeightGroups

BF16, I8, U8, U4X2, I4X2 = DType.BF16, DType.I8, DType.U8, DType.U4X2, DType.I4X2
M, N, K = 24, 40, 256

Weight = Callable[[Tensor], Tensor]
"""The values (N, K) of bytes (N, K / 2)."""


def rows(m: int = M) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()


def bytes_of(n: int = N) -> Tensor:
    return torch.randint(0, 256, (n, K // 2), generator=torch.Generator().manual_seed(n)).to(torch.uint8)


def vectors(values: int, zeros: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(values)
    shape = (N, K // values)
    scales = torch.randint(1, 99, shape, generator=generator) / 64
    return scales.bfloat16(), torch.randint(0, 16, shape, generator=generator).to(zeros)


def stacked(w: Tensor) -> Tensor:
    return torch.stack([w & 15, w >> 4], -1).view(len(w), -1)


def gemma(w: Tensor) -> Tensor:
    """transformers' unpack of Gemma."""
    low, high = (w & 15).to(torch.int8) - 8, (w >> 4).to(torch.int8) - 8
    return torch.cat([low.unsqueeze(2), high.unsqueeze(2)], -1).reshape(len(w), -1)


def divided(w: Tensor) -> Tensor:
    return torch.stack([w % 16, w // 16], -1).flatten(1)


def of_floats(w: Tensor) -> Tensor:
    """Converted, and 8 subtracted, before the halves are joined."""
    halves = [(w & 0xF).bfloat16() - 8, (w.view(torch.uint8) >> 4 & 0xF).bfloat16() - 8]
    return torch.stack(halves, 2).view(len(w), -1)


def assigned(w: Tensor) -> Tensor:
    """To every other place of memory that was not written before."""
    values = torch.empty(len(w), K, dtype=torch.int8)
    values[:, ::2] = (w & 15).to(torch.int8) - 8
    values[:, 1::2] = (w >> 4).to(torch.int8) - 8
    return values


def assigned_last_first(w: Tensor) -> Tensor:
    values = torch.zeros(len(w), K, dtype=torch.uint8)
    values[..., 1::2], values[..., 0::2] = w >> 4, w & 15
    return values


SPELLINGS: dict[str, tuple[Weight, DType]] = {
    "assigned": (assigned, I4X2),
    "assigned, the last first": (assigned_last_first, U4X2),
    "stacked": (stacked, U4X2),
    "Gemma": (gemma, I4X2),
    "divided": (divided, U4X2),
    "floats": (of_floats, I4X2),
    "8 subtracted behind": (lambda w: stacked(w).to(torch.int8) - 8, I4X2),
    "8 subtracted from floats behind": (lambda w: stacked(w).bfloat16() - 8, I4X2),
    "8 added behind": (lambda w: -8 + gemma(w).float() + 8, I4X2),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_with_a_scale_of_each_column(spelling: str) -> None:
    values, stored = SPELLINGS[spelling]

    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.relu(F.linear(x, values(w).to(x.dtype) * scale))

    given = rows(), bytes_of(), torch.rand(N, 1, generator=torch.Generator().manual_seed(3)).bfloat16()
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert (region.spec.product.b_dtype, region.spec.product.weight_groups) == (stored, None)
    assert [load.kind.value for load in region.spec.loads] == ["rowvec"]
    assert f"{stored.value} converted to bf16" in str(explain(program, *given, arch="sm_90a"))
    agrees(program, *given)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("spelling", ["stacked", "Gemma", "divided"])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_spellings_in_groups(spelling: str, size: int) -> None:
    values, stored = SPELLINGS[spelling]

    def program(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        wide = values(w).view(len(w), -1, size).to(x.dtype) - zeros[..., None].to(x.dtype)
        return F.linear(x, (wide * scales[..., None]).view(len(w), -1))

    given = rows(), bytes_of(), *vectors(size)
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert region.spec.product.b_dtype is stored
    assert region.spec.product.weight_groups == WeightGroups(size, BF16, BF16, I8, BF16)
    agrees(program, *given)


@pytest.mark.parametrize("size", [None, 64])
def test_a_number_that_is_subtracted_behind_takes_no_zeros(size: int | None) -> None:
    """Also as the last step, and behind the division into groups."""

    def program(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        if size is None:
            return F.linear(x, stacked(w).to(x.dtype) - 8) * scales[:, 0]
        wide = stacked(w).view(len(w), -1, size).to(x.dtype) - 8
        return F.linear(x, (wide * scales[..., None]).view(len(w), -1))

    scales, _ = vectors(size or K)
    (region,) = explain(program, rows(), bytes_of(), scales, arch="sm_90a").regions
    of_k = None if size is None else WeightGroups(size, BF16, BF16)
    assert (region.spec.product.b_dtype, region.spec.product.weight_groups) == (I4X2, of_k)
    agrees(program, rows(), bytes_of(), scales)


def test_a_number_that_is_subtracted_behind_a_transposition_changes_no_columns() -> None:
    """As many bytes lie along K as along N, and they are contiguous along N."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return x @ (stacked(w.t()).t().to(x.dtype) - 8)

    given = rows(), bytes_of(K // 2)
    assert not any(region.spec.product.is_converted for region in explain(program, *given).regions)
    agrees(program, *given)


def agrees(program: Callable[..., Tensor], *given: Tensor) -> None:
    """Asserts that the compiled program, replayed, gives nearly the same as eager."""
    torch._dynamo.reset()
    found, expected = torch.compile(program, backend="cute", dynamic=False)(*given), program(*given)
    assert (found.float() - expected.float()).norm() < 0.01 * expected.float().norm()


@pytest.mark.filterwarnings("error:Raw SymInt value")
def test_batches_and_rows_that_vary() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, gemma(w).to(x.dtype)) * scale

    given = rows().view(2, M // 2, K), bytes_of(), torch.rand(N).bfloat16()
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert region.spec.product.b_dtype is I4X2
    compiled = torch.compile(program, backend="cute", dynamic=True)
    for m in (3, 1100):
        x = rows(m)
        found, expected = compiled(x, *given[1:]).float(), program(x, *given[1:]).float()
        assert (found - expected).norm() < 0.01 * expected.norm()


def high_assigned_first(w: Tensor) -> Tensor:
    values = torch.empty(len(w), K, dtype=torch.uint8)
    values[:, ::2], values[:, 1::2] = w >> 4, w & 15
    return values


def assigned_in_part(w: Tensor) -> Tensor:
    values = torch.ones(len(w), K, dtype=torch.uint8)
    values[:, ::2], values[:, 1:-2:2] = w & 15, (w >> 4)[:, :-1]
    return values


def assigned_of_two(w: Tensor) -> Tensor:
    values = torch.empty(len(w), K, dtype=torch.uint8)
    values[:, ::2], values[:, 1::2] = w & 15, w.flip(0) >> 4
    return values


OTHERS: dict[str, Weight] = {
    "the high nibble assigned first": high_assigned_first,
    "assigned in part": assigned_in_part,
    "assigned of different bytes": assigned_of_two,
    "the high nibble first": lambda w: torch.stack([w >> 4, w & 15], -1).view(len(w), -1),
    "another number subtracted": lambda w: gemma(w) + 1,
    "another number subtracted behind": lambda w: stacked(w).to(torch.int8) - 7,
    "bytes that wrap": lambda w: stacked(w) - 8,
    "halves of K": lambda w: torch.cat([w & 15, w >> 4], 1),
    "a nibble of three bits": lambda w: torch.stack([w & 7, w >> 4], -1).view(len(w), -1),
    "nibbles of different bytes": lambda w: torch.stack([w & 15, w.flip(0) >> 4], -1).view(len(w), -1),
    "four values": lambda w: torch.stack([w[:, ::2] >> i & 3 for i in (0, 2, 4, 6)], -1).view(len(w), -1),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("other", OTHERS)
def test_what_is_like_them_is_unpacked_by_inductor(other: str) -> None:
    """The kernel converts the bytes that Inductor writes, one for each value, or another dtype."""

    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.relu(F.linear(x, OTHERS[other](w).to(x.dtype) * scale))

    given = rows(), bytes_of(), torch.rand(N, 1).bfloat16()
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert region.spec.product.b_dtype in (I8, U8)
    agrees(program, *given)


def test_values_with_a_second_reader_are_unpacked_by_inductor() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        values = stacked(w)
        return F.relu(F.linear(x, values.to(x.dtype) * scale)), values

    given = rows(), bytes_of(), torch.rand(N, 1).bfloat16()
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert region.spec.product.b_dtype is U8


def test_two_columns_in_a_byte_are_unpacked_by_inductor() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        w = w.t()
        return F.relu(x @ torch.stack([w & 15, w >> 4], -1).view(K, -1).to(x.dtype))

    given = rows(), torch.randint(0, 256, (N // 2, K)).to(torch.uint8)
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert region.spec.product.b_dtype is not U4X2
    assert region.products[0].label == f"w, uint8 written in bf16 at each call, {2 * K * N:,} bytes"
    agrees(program, *given)


def along_n(x: Tensor, w: Tensor) -> Tensor:
    t = w.t()
    return x @ (torch.stack([t & 15, t >> 4], -1).reshape(K, -1).to(x.dtype) - 8)


def along_n_in_groups(x: Tensor, w: Tensor) -> Tensor:
    t, scales = w.t(), w[:, :4].to(x.dtype)
    values = torch.stack([t & 15, t >> 4], -1).reshape(4, K // 4, -1).to(x.dtype) - 8
    return x @ (values * scales.t()[:, None]).reshape(K, -1)


def exchanged_in_one_half(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, torch.stack([w & 15, (w >> 4).t()], -1).reshape(K // 2, K).to(x.dtype) - 8)


def exchanged_in_both_halves(x: Tensor, w: Tensor) -> Tensor:
    low, high = (half.view(N, 4, -1).permute(0, 2, 1).reshape(N, -1) for half in (w & 15, w >> 4))
    return F.linear(x, torch.stack([low, high], -1).reshape(N, K).to(x.dtype))


def exchanged_behind(x: Tensor, w: Tensor) -> Tensor:
    values = torch.stack([w & 15, w >> 4], -1).permute(0, 2, 1).reshape(N, K)
    return F.linear(x, values.to(x.dtype))


def one_row(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, stacked(w[:1].contiguous()).expand(N, K).to(x.dtype) - 8)


def joined_in_16_bits(x: Tensor, w: Tensor) -> Tensor:
    values = torch.stack([w & 15, (w >> 4).to(torch.int16) * -4095], -1).view(N, K) * 241 * 17
    return F.linear(x, values.to(x.dtype))


@pytest.mark.parametrize(
    "program",
    [
        along_n,
        along_n_in_groups,
        exchanged_in_one_half,
        exchanged_in_both_halves,
        exchanged_behind,
        one_row,
        joined_in_16_bits,
    ],
)
def test_nibbles_in_another_order_are_unpacked_by_inductor(program: Callable[..., Tensor]) -> None:
    """The second value of a byte follows the first one along K, in every column."""
    given = rows(), bytes_of(K // 2 if program is exchanged_in_one_half else N)
    found = explain(program, *given, arch="sm_90a").regions
    assert not {region.spec.product.b_dtype for region in found} & {U4X2, I4X2}
    agrees(program, *given)


def test_an_odd_k_is_unpacked_by_inductor() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.relu(F.linear(x[:, 1:], stacked(w)[:, 1:].to(x.dtype) * scale))

    given = rows(), bytes_of(), torch.rand(N, 1).bfloat16()
    found = explain(program, *given, arch="sm_90a").regions
    assert all(region.spec.product.b_dtype is not U4X2 for region in found)
    agrees(program, *given)


def test_columns_that_are_no_multiple_of_16_bytes_are_unpacked_by_inductor() -> None:
    """Nibbles that are joined along K would lie along N, as no kernel could read them."""

    def program(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        return F.relu(F.linear(x, gemma(w).to(x.dtype) * scales))

    def groups(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        wide = stacked(w).view(len(w), -1, 64).to(x.dtype)
        return F.relu(F.linear(x, (wide * scales[..., None]).view(len(w), -1)))

    for fn, count in ((program, 1), (groups, 4)):
        given = rows(), bytes_of(5), torch.rand(5, count).bfloat16()
        (region,) = explain(fn, *given, arch="sm_90a").regions
        assert region.products[0].label.startswith("w, uint8 written in bf16 at each call")
        agrees(fn, *given)


def test_groups_that_no_kernel_has_are_refused() -> None:
    def program(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        wide = stacked(w).reshape(len(w), -1, 16).to(x.dtype)
        return F.relu(F.linear(x, (wide * scales[..., None]).view(len(w), -1)))

    given = rows(), bytes_of(), torch.rand(N, K // 16).bfloat16()
    (rejection,) = explain(program, *given, arch="sm_90a").rejections
    assert rejection.reason is Reason.WEIGHT_GROUPS
    assert "groups of 16 of K, 256 in all" in rejection.message
    agrees(program, *given)


def test_groups_that_do_not_divide_k_are_unpacked_by_inductor() -> None:
    def program(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        repeated = scales.repeat_interleave(96, 1)[:, :K]
        return F.relu(F.linear(x, stacked(w).to(x.dtype) * repeated))

    given = rows(), bytes_of(), torch.rand(N, 3).bfloat16()
    (region,) = explain(program, *given, arch="sm_90a").regions
    assert not region.spec.product.is_converted


def test_zeros_of_another_shape_are_refused() -> None:
    def program(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        wide = stacked(w).view(len(w), -1, 64).to(x.dtype) - zeros
        return F.relu(F.linear(x, (wide * scales[..., None]).view(len(w), -1)))

    scales, _ = vectors(64)
    given = rows(), bytes_of(), scales, torch.rand(1, 4, 1).bfloat16()
    (rejection,) = explain(program, *given, arch="sm_90a").rejections
    assert rejection.reason is Reason.WEIGHT_GROUPS
    assert "of shape (1, 4, 1) and (40, 4, 1)" in rejection.message
    agrees(program, *given)


@pytest.mark.parametrize(("arch", "stored"), [("sm_80", U4X2), ("sm_120a", U4X2), ("sm_100a", BF16)])
def test_other_gpus(arch: str, stored: DType) -> None:
    def program(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        wide = stacked(w).view(len(w), -1, 64).to(x.dtype) - zeros[..., None]
        return F.relu(F.linear(x, (wide * scales[..., None]).view(len(w), -1)))

    (region,) = explain(program, rows(), bytes_of(), *vectors(64, torch.bfloat16), arch=arch).regions
    assert region.spec.product.b_dtype is stored
