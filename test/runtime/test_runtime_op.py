"""The op as torch sees it: schema, fake kernel, dispatch, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend  # noqa: F401  registers the op
from cute_backend.replay import replay
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.spec import (
    Accumulator,
    Columns,
    DType,
    EpilogueSpec,
    Order,
    ProductKind,
    Scaling,
    Store,
    WeightGroups,
)
from support.runtime.handmade import make_spec

OP = torch.ops.cute_backend.gemm_epilogue.default
SPEC = make_spec(second_store=True)


def operands(m: int = 6, n: int = 10, k: int = 4, device: str = "cpu") -> tuple[list[Tensor], ...]:
    torch.manual_seed(m * 100 + n)
    a = torch.randn(m, k, device=device).bfloat16()
    b = torch.randn(n, k, device=device).bfloat16().t()
    loads = [
        torch.randn((), device=device).reshape(1),
        torch.randn(n, device=device),
        torch.randn(m, 3, device=device).select(1, 0),
        torch.randn(m, n, device=device).bfloat16(),
    ]
    return [a], [b], loads


def test_on_cpu_it_is_the_replay() -> None:
    a, b, loads = operands()
    expected = (a[0].float() @ b[0].float()) * loads[0] + loads[1] + loads[2][:, None] + loads[3].float()
    out0, out1 = OP(a, b, loads, SPEC.to_json())
    torch.testing.assert_close(out1, expected)
    torch.testing.assert_close(out0, expected.bfloat16())


def test_the_fake_kernel_knows_shapes_dtypes_orders_and_device() -> None:
    with FakeTensorMode():
        out0, out1 = OP(
            *operands(device="cuda"),
            make_spec(order=Order.COLUMN, store=DType.E4M3, second_store=True).to_json(),
        )
    assert (out0.shape, out0.stride(), out0.dtype) == ((6, 10), (1, 6), torch.float8_e4m3fn)
    assert (out1.shape, out1.stride(), out1.dtype) == ((6, 10), (10, 1), torch.float32)
    assert out0.device.type == out1.device.type == "cuda"


@pytest.mark.parametrize("order", [Order.ROW, Order.COLUMN])
def test_the_fake_kernel_agrees_with_the_replay(order: Order) -> None:
    spec = make_spec(order=order, store=DType.BOOL)
    real = replay(spec, *operands())
    with FakeTensorMode() as mode:
        fake = OP(*([mode.from_tensor(t) for t in side] for side in operands()), spec.to_json())
    assert [(t.shape, t.stride(), t.dtype) for t in fake] == [(t.shape, t.stride(), t.dtype) for t in real]


def test_one_compilation_serves_every_m(fresh_compiler: None) -> None:
    """In a fresh cache: without the pass, Inductor's keys do not have the op's schema."""
    spec = SPEC.to_json()

    def fn(a: list[Tensor], b: list[Tensor], loads: list[Tensor]) -> list[Tensor]:
        return OP(a, b, loads, spec)

    compiled = torch.compile(fn, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (6, 40, 41):
            for real, expected in zip(compiled(*operands(m)), fn(*operands(m)), strict=True):
                assert torch.equal(real, expected)


def test_torch_finds_no_fault_in_its_registration() -> None:
    torch.library.opcheck(OP, (*operands(), SPEC.to_json()))


def test_it_is_not_differentiable() -> None:
    a, b, loads = operands()
    a[0].requires_grad_()
    assert not any(out.requires_grad for out in OP(a, b, loads, SPEC.to_json()))


def replaced(side: int, index: int, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], ...]:
    given = operands()
    given[side][index] = change(given[side][index])
    return given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([], [], operands()[2]), r"got 0 A and 0 B tensors; the spec multiplies one A by 1 B"),
        ((*operands()[:2], operands()[2][:2]), r"got 2 loads; the spec reads 4 \(scalar0, .*exact0\)"),
        (
            replaced(0, 0, lambda a: a[:, :3]),
            r"acc wants A \(M, K\) and B \(K, N\), not \(6, 3\) and \(4, 10\)",
        ),
        (replaced(1, 0, lambda b: b[0]), r"acc wants A \(M, K\) and B \(K, N\), not \(6, 4\) and \(10\)"),
        (replaced(0, 0, Tensor.half), r"A of acc is torch.float16; the spec says torch.bfloat16"),
        (replaced(2, 1, Tensor.double), r"rowvec0 is torch.float64; the spec says torch.float32"),
        (
            replaced(2, 1, lambda v: v[:6]),
            r"rowvec0 is a load of kind rowvec and wants shape \(10\), not shape \(6\)",
        ),
        (
            replaced(2, 2, lambda v: v[:, None]),
            r"colvec0 .* colvec and wants shape \(6\), not shape \(6, 1\)",
        ),
        (replaced(2, 3, Tensor.t), r"exact0 .* exact and wants shape \(6, 10\), not shape \(10, 6\)"),
        (replaced(2, 0, lambda s: s.expand(2)), r"scalar0 .* scalar and wants one element, not shape \(2\)"),
    ],
)
def test_operands_that_contradict_the_spec_are_refused_in_one_sentence(
    given: tuple[list[Tensor], ...], message: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message) as error:
        OP(*given, SPEC.to_json())
    assert "\n" not in str(error.value)


GATED = replace(SPEC, accumulators=tuple(replace(SPEC.product, name=name) for name in ("acc", "acc1")))
EVEN_ODD = replace(
    GATED,
    accumulators=(
        replace(GATED.accumulators[0], columns=Columns.EVEN),
        replace(GATED.accumulators[1], columns=Columns.ODD),
    ),
)


def test_every_block_has_a_scale() -> None:
    acc = Accumulator(
        "acc", DType.E4M3, DType.E4M3, fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE
    )
    spec = EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.F32),))
    a, b = torch.ones(6, 144).to(torch.float8_e4m3fn), torch.ones(144, 160).to(torch.float8_e4m3fn)
    of_a, of_b = torch.full((6, 2), 2.0), torch.full((2, 2), 3.0)
    (out,) = OP([a, of_a], [b, of_b], [], spec.to_json())
    assert (out == 6 * 144).all()
    for a_given, b_given, message in (
        ([a], [b], r"got 1 A and 1 B tensors; .* one A by 1 B, each with scales of its blocks"),
        ([a, of_a[:5]], [b, of_b], r"the scales of A have shape \(5, 2\); by blocks of 1x128 .* \(6, 2\)"),
        ([a, of_a], [b, of_b[:, :1]], r"scales of B have shape \(2, 1\); by blocks of 128x128 .* \(2, 2\)"),
        (
            [a, of_a.half()],
            [b, of_b],
            r"block scale of A of acc is torch.float16; the spec says .*32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            OP(a_given, b_given, [], spec.to_json())
    binding = Binding(spec)
    assert not binding.takes_operands_as_given, "compiled host code can't tell how many blocks there are"
    assert binding.operands([a, of_a], [b, of_b], []) == [a, of_a, b, of_b]
    with pytest.raises(ValueError, match="the scales of B have shape"):
        binding.operands([a, of_a], [b, of_b[:, :1]], [])


def test_every_group_of_a_weight_has_a_scale_and_a_zero() -> None:
    groups = WeightGroups(32, DType.F32, DType.F32, DType.I8, DType.BF16)
    acc = Accumulator("acc", DType.BF16, DType.I8, weight_groups=groups)
    spec = EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.BF16),)).to_json()
    a, b = torch.ones(6, 96).bfloat16(), torch.ones(10, 96).to(torch.int8).t()
    scales, zeros = torch.full((3, 10), 2.0), torch.zeros(3, 10).to(torch.int8)
    zeros[1] = 3
    assert torch.equal(OP([a], [b, scales, zeros], [], spec)[0], torch.zeros(6, 10).bfloat16())
    for given, message in (
        ([b, scales], "1 A and 2 B tensors; .* each with scales and zeros of its groups"),
        (
            [b, scales[:2], zeros],
            r"the scales of B have shape \(2, 10\); of groups of 32 of K they have \(3, 10\)",
        ),
        ([b, scales, zeros[:, :1]], r"the zeros of B have shape \(3, 1\); of groups of 32"),
        (
            [b, scales, zeros.float()],
            "zeros of the groups of B of acc is torch.float32; the spec says torch.int8",
        ),
        ([b[:80], scales, zeros], r"B is \(80, 10\), and 80 is no multiple of its groups of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            OP([a[:, : len(given[0])]], given, [], spec)
        if given[0] is b and len(given) == 3 and given[2].dtype is torch.int8:
            with pytest.raises(ValueError, match=message):
                Binding(EpilogueSpec.from_json(spec)).operands([a], given, [])


def test_groups_of_rows_have_scales_in_tiles_of_their_own() -> None:
    acc = Accumulator(
        "acc",
        DType.E4M3,
        DType.E4M3,
        fast_accum=True,
        kind=ProductKind.GROUPED,
        a_scaling=Scaling.MX,
        b_scaling=Scaling.MX,
    )
    spec = EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.F32),))
    a, b = torch.ones(6, 144).to(torch.float8_e4m3fn), torch.ones(2, 160, 144).to(torch.float8_e4m3fn)
    b, ends = b.transpose(1, 2), torch.tensor([4, 6], dtype=torch.int32)
    powers = torch.tensor([1.0, 2.0])[:, None].to(torch.float8_e8m0fnu)
    of_a, of_b = powers.expand(2, 1024).flatten(), powers.expand(2, 2048).contiguous()
    (out,) = OP([a, ends, of_a], [b, of_b], [], spec.to_json())
    assert (out[:4] == 144).all() and (out[4:] == 4 * 144).all()
    for of_rows, of_columns, message in (
        (of_a[:-1], of_b, r"scales of A have shape \(2047\); for rows in groups, .* a multiple of 8, and"),
        (of_a.view(2, 1024), of_b, r"the scales of A have shape \(2, 1024\); for rows in groups"),
        (of_a, of_b[:1], r"scales of B have shape \(1, 2048\); by blocks of 1x32 they have \(2, 2048\)"),
        (of_a, of_b[:, :1024], r"scales of B have shape \(2, 1024\); by blocks of 1x32"),
    ):
        with pytest.raises(ValueError, match=message):
            OP([a, ends, of_rows], [b, of_columns], [], spec.to_json())


def test_every_b_of_a_pair_is_looked_at() -> None:
    a, (b,), loads = operands()
    outputs = OP(a, [torch.cat([b, b], 1)], loads, EVEN_ODD.to_json())
    assert [tuple(output.shape) for output in outputs] == [(6, 10), (6, 10)]
    for spec, bs, message in (
        (GATED, [b], "got 1 A and 1 B tensors; the spec multiplies one A by 2 B"),
        (GATED, [b, b[:, :8]], r"acc1 is \(6, 4\) times \(4, 8\); the first B has 10 columns"),
        (GATED, [b, b.half()], "B of acc1 is torch.float16"),
        (EVEN_ODD, [b, b], "multiplies one A by 1 B"),
        (EVEN_ODD, [b[:, :9]], r"B is \(4, 9\), which has not as many even columns as odd ones"),
        (EVEN_ODD, [b], r"rowvec0 is a load of kind rowvec and wants shape \(5\), not shape \(10\)"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            OP(a, bs, loads, spec.to_json())


BATCHED = replace(SPEC, accumulators=(replace(SPEC.product, kind=ProductKind.BATCHED),))


def batches(count: int = 2, m: int = 3) -> tuple[list[Tensor], ...]:
    a, b, loads = operands(count * m)
    return [a[0].unflatten(0, (count, m))], [b[0].expand(count, -1, -1)], loads


def test_a_batched_product_has_the_rows_of_all_batches() -> None:
    a, b, loads = batches()
    expected = (a[0].float() @ b[0].float()).flatten(0, 1) * loads[0] + loads[1]
    expected = expected + loads[2][:, None] + loads[3].float()
    out0, out1 = OP(a, b, loads, BATCHED.to_json())
    torch.testing.assert_close(out1, expected)
    torch.testing.assert_close(out0, expected.bfloat16())
    with FakeTensorMode() as mode:
        fake = OP(*([mode.from_tensor(t) for t in side] for side in batches()), BATCHED.to_json())
    assert [(t.shape, t.stride()) for t in fake] == [(t.shape, t.stride()) for t in (out0, out1)]


def test_batches_of_a_and_b_are_as_many() -> None:
    a, b, loads = batches()
    for left, right in ((a[0][0], b[0]), (a[0], b[0][0]), (a[0], b[0][:1]), (a[0][..., :3], b[0])):
        with pytest.raises(
            (ValueError, RuntimeError), match=r"acc wants A \(B, M, K\) and B \(B, K, N\), not"
        ):
            OP([left], [right], loads, BATCHED.to_json())


GROUPED = replace(SPEC, accumulators=(replace(SPEC.product, kind=ProductKind.GROUPED),))


def groups(ends: tuple[int, ...] = (2, 2, 5)) -> tuple[list[Tensor], ...]:
    a, b, loads = operands()
    weights = torch.stack([b[0], b[0] + 1, b[0] - 2])
    return [a[0], torch.tensor(ends, dtype=torch.int32)], [weights], loads


def test_a_grouped_product_has_a_b_for_each_group_of_rows() -> None:
    (left, ends), (right,), loads = groups()
    product = torch.cat([left[:2].float() @ right[0].float(), left[2:5].float() @ right[2].float()])
    expected = product * loads[0][:5] + loads[1] + loads[2][:5, None] + loads[3][:5].float()
    out0, out1 = OP([left, ends], [right], loads, GROUPED.to_json())
    torch.testing.assert_close(out1[:5], expected)
    torch.testing.assert_close(out0[:5], expected.bfloat16())
    with FakeTensorMode() as mode:
        fake = OP(*([mode.from_tensor(t) for t in side] for side in groups()), GROUPED.to_json())
    assert [(t.shape, t.stride()) for t in fake] == [(t.shape, t.stride()) for t in (out0, out1)]


def test_groups_of_a_and_b_are_as_many() -> None:
    (left, ends), (right,), loads = groups()
    for a, b, message in (
        ([left], [right], r"got 1 A and 1 B tensors; .* one A, with the offsets of its groups, by 1 B"),
        (
            [left, ends],
            [right[:2]],
            r"acc wants A \(M, K\), offsets \(G,\) and B \(G, K, N\), not .* and \(3\) and",
        ),
        ([left, ends], [right[0]], r"acc wants A \(M, K\), offsets"),
        ([left[None], ends], [right], r"acc wants A \(M, K\), offsets"),
        ([left, ends[None]], [right], r"acc wants A \(M, K\), offsets"),
        ([left, ends.long()], [right], "the offsets of the groups is torch.int64; the spec says torch.int32"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            OP(a, b, loads, GROUPED.to_json())


def test_operands_of_two_devices_are_refused() -> None:
    with FakeTensorMode():
        a, b, loads = operands(device="cuda")
        loads[1] = torch.empty(10)
        with pytest.raises(ValueError, match="tensors on cuda:0 and on cpu; it takes one device"):
            OP(a, b, loads, SPEC.to_json())


def test_what_is_no_spec_is_refused() -> None:
    with pytest.raises(ValueError, match="not a canonical epilogue spec"):
        OP(*operands(), "{}")
