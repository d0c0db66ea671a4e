"""Rotary embeddings behind products: blocks of columns whose halves are rotated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import cute_backend
from cute_backend import config
from cute_backend.backend import cute
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.kinds.blocks import ROTATE_HALF
from cute_backend.spec import Blocks, Order, Stride
from support.fx_walk.exact import integers, product_inputs

BATCHES, PLACES, HEADS, WIDTH = 2, 4, 3, 32
M, N = BATCHES * PLACES, HEADS * WIDTH
COS, SIN = integers(1, PLACES, WIDTH), integers(1, PLACES, WIDTH) - 1


def rotate_half(x: Tensor) -> Tensor:
    """As transformers has it."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """As transformers has it, of one operand."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin)


def heads(y: Tensor) -> Tensor:
    return y.view(BATCHES, PLACES, -1, WIDTH)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def by_chunk(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second.neg(), first), -1)


def by_split(x: Tensor) -> Tensor:
    first, second = x.split([WIDTH // 2, WIDTH // 2], dim=-1)
    return torch.cat([-second, first], dim=x.dim() - 1)


def inverse(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second, -first), -1)


def rotate_every_two(x: Tensor) -> Tensor:
    """As transformers has it of GPT-J, and of Cohere as `rotate_half`."""
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def as_diffusers(x: Tensor) -> Tensor:
    """As diffusers' `apply_rotary_emb` rotates Flux's heads."""
    real, imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imag, real], dim=-1).flatten(3)


def by_select(x: Tensor) -> Tensor:
    x = x.unflatten(-1, (-1, 2))
    return torch.stack((x.select(-1, -1).neg(), x[..., 0]), dim=-1).flatten(-2)


def by_narrow_slices(x: Tensor) -> Tensor:
    x = x.unflatten(-1, (-1, 2))
    return torch.cat((-x[..., 1:], x[..., :1]), dim=-1).flatten(-2)


def inverse_of_pairs(x: Tensor) -> Tensor:
    return torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2)


def turned(x: Tensor, rotate: Callable[[Tensor], Tensor], axis: int = 2) -> Tensor:
    return x * COS.unsqueeze(axis) + rotate(x) * SIN.unsqueeze(axis)


NEIGHBOURS: dict[str, Callable[[Tensor], Tensor]] = {
    "GPT-J": lambda y: turned(heads(y), rotate_every_two),
    "Cohere": lambda y: turned(heads(y).transpose(1, 2), rotate_every_two, 1),
    "Flux": lambda y: turned(heads(y).transpose(1, 2).float(), as_diffusers, 1).to(y.dtype),
    "select": lambda y: turned(heads(y), by_select),
    "narrow slices": lambda y: turned(heads(y).transpose(1, 2), by_narrow_slices, 1),
    "inverse": lambda y: turned(heads(y), inverse_of_pairs),
    "of all columns": lambda y: rotate_every_two(y) + 1,
    "beside row maxima": lambda y: rotate_every_two(y).amax(-1),
}


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "llama": lambda y: apply_rotary_pos_emb(heads(y).transpose(1, 2), COS, SIN),
    "heads behind places": lambda y: apply_rotary_pos_emb(heads(y), COS, SIN, unsqueeze_dim=2),
    "one sequence": lambda y: apply_rotary_pos_emb(
        y.view(1, M, HEADS, WIDTH).transpose(1, 2), COS.repeat(1, 2, 1), SIN.repeat(1, 2, 1)
    ),
    "in fp32": lambda y: apply_rotary_pos_emb(heads(y).transpose(1, 2).float(), COS, SIN).to(y.dtype),
    "chunk": lambda y: heads(y) * COS.unsqueeze(2) + by_chunk(heads(y)) * SIN.unsqueeze(2),
    "split": lambda y: heads(y) * COS.unsqueeze(2) + by_split(heads(y)) * SIN.unsqueeze(2),
    "derivative": lambda y: heads(y) * COS.unsqueeze(2) + inverse(heads(y) * SIN.unsqueeze(2)),
    "alone": lambda y: rotate_half(heads(y)) + 1,
    "norm": lambda y: apply_rotary_pos_emb(rms(heads(y).float()), COS, SIN, 2),
}


@pytest.mark.sweep(1)
@pytest.mark.settings(rotary_embeddings="always", shared_launches=False)
@pytest.mark.parametrize(("spellings", "block"), [(SPELLINGS, WIDTH), (NEIGHBOURS, 2)])
def test_every_spelling_through_torch_compile(
    spellings: dict[str, Callable[[Tensor], Tensor]], block: int, fresh_compiler: None
) -> None:
    """One product each, in one graph: each is one kernel, and gives what eager does, to the bit where that
    rounds nothing."""
    products = [product_inputs(M, N) for _ in spellings]

    def program(products: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [spelling(a @ b) for (a, b), spelling in zip(products, spellings.values(), strict=True)]

    results, expected = torch.compile(program, backend=cute)(products), program(products)
    for name, result, wanted in zip(spellings, results, expected, strict=True):
        assert result.dtype is wanted.dtype and result.stride() == wanted.stride(), name
        torch.testing.assert_close(result.float(), wanted.float(), rtol=1e-2, atol=1e-2, msg=name)
    assert counters["cute_backend"] == {"anchors": len(spellings), "regions": len(spellings)}
    (report,) = collect(program, (products,))
    for name, region in zip(spellings, report.regions, strict=True):
        assert [op.block for op in region.spec.ops if op.op == ROTATE_HALF.name] == [block], name
        assert [store.form.order for store in region.spec.stores] == [Order.ROW], name


SIZES = [(1, 5, 1, 64, True), (3, 1, 2, 32, False), (2, 3, 3, 128, True)]


@pytest.mark.settings(rotary_embeddings="always")
@pytest.mark.parametrize("rounds", [False, True])
def test_the_result_is_eagers(rounds: bool, fresh_compiler: None) -> None:
    """Of several sizes, in both orders of heads and places; to eager's last digits where casts round."""
    torch.manual_seed(1)
    inputs = [
        (
            torch.randn(batches * places, 16).bfloat16(),
            torch.randn(count * width, 16).bfloat16().t(),
            *torch.randn(2, batches, places, width).bfloat16(),
        )
        for batches, places, count, width, _ in SIZES
    ]

    def program(inputs: list[tuple[Tensor, ...]]) -> list[Tensor]:
        results = []
        for (a, b, cos, sin), (batches, places, count, width, first) in zip(inputs, SIZES, strict=True):
            x = (a @ b).view(batches, places, count, width)
            x = x.transpose(1, 2) if first else x
            results.append(apply_rotary_pos_emb(x, cos, sin, 1 if first else 2))
        return results

    with torch._inductor.config.patch(emulate_precision_casts=rounds):  # type: ignore[attr-defined]
        (report,) = collect(program, (inputs,))
        results = torch.compile(program, backend=cute, dynamic=False)(inputs)
    assert [region.spec.halved_columns for region in report.regions] == [size[3] for size in SIZES]
    for result, right in zip(results, program(inputs), strict=True):
        assert result.stride() == right.stride()
        if rounds:
            assert torch.equal(result, right)
        else:
            assert (result.float() - right.float()).norm() < 1e-2 * right.float().norm()


@pytest.mark.sweep(1)
@pytest.mark.settings(rotary_embeddings="always", shared_launches=False)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_neighbours_and_then_halves_are_rotated_in_one_kernel(arch: str) -> None:
    """The halves are rotated in a visit that has whole heads, so no column leaves its neighbour."""
    w, cos = integers(4 * WIDTH, 64).sign(), integers(1, 1, WIDTH)

    def program(x: Tensor) -> Tensor:
        y = (x @ w.t()).float().view(M, 4, WIDTH)
        return (rotate_half(rotate_every_two(y) * cos) + y).flatten(1)

    x = integers(M, 64) % 2  # so that all sums are exact
    (report,) = collect(program, (x,), arch=arch)
    (region,) = report.regions
    assert {2, WIDTH} <= {op.block for op in region.spec.ops}
    assert torch.equal(cute_backend.simulate(program, x, arch=arch), program(x))


@pytest.mark.settings(rotary_embeddings="always")
def test_operands_lie_as_positions_do() -> None:
    (report,) = collect(lambda a, b: SPELLINGS["llama"](a @ b), product_inputs(M, N))
    (region,) = report.regions
    for load in region.spec.loads:
        assert load.blocks == Blocks(WIDTH, Stride.ZERO, Stride.ONE)
        assert load.m_modes == (Stride.ZERO, Stride.OTHER)


def of_width(width: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: rotate_half((a @ b).unflatten(-1, (-1, width))) * 2


def beside_row_maxima(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = a @ b
    return rotate_half(y.unflatten(-1, (-1, 64))) * 2, y.amax(-1)


def swapped(a: Tensor, b: Tensor) -> Tensor:
    x = (a @ b).unflatten(-1, (-1, 64))
    return torch.cat((x[..., 32:], x[..., :32]), -1) * 2


def of_rows(a: Tensor, b: Tensor) -> Tensor:
    return rotate_half((a @ b).t()) * 2


def pairs_in_another_order(a: Tensor, b: Tensor) -> Tensor:
    y = a @ b
    return torch.stack((y[:, ::2], -y[:, 1::2]), -1).flatten(-2) + y


def some_pairs(a: Tensor, b: Tensor) -> Tensor:
    y = a @ b
    return torch.stack((-y[:, 1:64:2], y[:, :64:2]), -1).flatten(-2) * 2


def pairs_of_rows(a: Tensor, b: Tensor) -> Tensor:
    return rotate_every_two((a @ b).t()) * 2


def pairs_of_even_columns(a: Tensor, b: Tensor) -> Tensor:
    gate, up = (a @ b).unflatten(-1, (-1, 2)).unbind(-1)
    return rotate_every_two(gate * up)


def half_is_read_elsewhere(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x = (a @ b).unflatten(-1, (-1, 64))
    half = -x[..., 32:]
    return torch.cat((half, x[..., :32]), -1) * 2, half.cumsum(0)


@pytest.mark.settings(rotary_embeddings="always", shared_launches=False)
@pytest.mark.parametrize(
    ("program", "arch", "reason", "said"),
    [
        (
            of_width(12),
            "sm_90a",
            Reason.ROTATION_SIZE,
            "of 12 columns.*supported sizes: 16, 32, 64, 96, 128, 160, 192, 256",
        ),
        (
            of_width(24),
            "sm_100a",
            Reason.ROTATION_SIZE,
            "of 24 columns.*supported sizes: 16, 32, 48, 64, 80, 96, 128, 160, 192, 256",
        ),
        (of_width(64), "sm_80", Reason.ROTATION_SIZE, "of 64 columns.*supported sizes: none"),
        (beside_row_maxima, "sm_90a", Reason.ROTATED_PLACES, "rotates blocks of 64 columns"),
        (swapped, "sm_90a", Reason.UNPAIRED, "takes a part of the product's columns"),
        (of_rows, "sm_90a", Reason.REARRANGED, "rows"),
        (half_is_read_elsewhere, "sm_90a", Reason.UNPAIRED, "takes a part of the product's columns"),
        (pairs_in_another_order, "sm_90a", Reason.UNPAIRED, "takes a part of the product's columns"),
        (some_pairs, "sm_90a", Reason.UNPAIRED, "takes a part of the product's columns"),
        (pairs_of_rows, "sm_90a", Reason.REARRANGED, "rows"),
        (pairs_of_even_columns, "sm_90a", Reason.ROTATION_SIZE, "of 2 columns"),
    ],
)
def test_other_rotations_are_refused(
    program: Callable[..., object], arch: str, reason: Reason, said: str
) -> None:
    """By the size of the block and what would fit; and nothing of the product is lost."""
    a, b = product_inputs(M, 192)
    (report,) = collect(program, (a, b.t().contiguous().t()), arch=arch)
    assert not any(op.op == ROTATE_HALF.name for region in report.regions for op in region.spec.ops) or (
        reason is Reason.ROTATED_PLACES
    )
    messages = [each.message for each in report.rejections if each.reason is reason]
    assert any(said.split(".*")[0] in each and said.split(".*")[-1] in each for each in messages), messages


@pytest.mark.parametrize(("setting", "taken"), [("always", True), ("auto", False), ("never", False)])
def test_rotations_of_one_product_are_kept_in_the_kernel_if_asked(setting: str, taken: bool) -> None:
    with config.patch(rotary_embeddings=setting):
        (report,) = collect(lambda a, b: SPELLINGS["llama"](a @ b).relu(), product_inputs(M, N))
    rotated = [op for region in report.regions for op in region.spec.ops if op.op == ROTATE_HALF.name]
    assert bool(rotated) is taken
    assert (Reason.ROTATION_COST in {each.reason for each in report.rejections}) is not taken
