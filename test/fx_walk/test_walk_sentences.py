"""The sentences of refusals, as explanations have them: they are true, and use the program's names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend import config
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.products.anchors import read_anchor
from cute_backend.fx_walk.products.opaque_products import opaque_product
from cute_backend.fx_walk.products.pairs import of_slices, unlike
from cute_backend.fx_walk.refusals.reasons import Reason, Rejection
from cute_backend.fx_walk.values.classify import ColumnSlice
from support.fx_walk.synthetic import Graph

Program = Callable[..., Any]

M, N, K = 48, 128, 64


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


X, W, ROWS, COLUMN = bf16(M, K), bf16(K, N), bf16(K), bf16(K, 1)


def refused(fn: Program, *args: Any, **how: Any) -> list[Rejection]:
    return [each for graph in collect(fn, args, **how) for each in graph.rejections]


# Two products in a chain


def low_rank(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return torch.relu((x @ down) @ up)


def low_rank_with_bias(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return torch.relu(F.linear(F.linear(x, down.t()), up.t(), x.sum()[None].expand(N)))


def low_rank_in_heads(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return torch.relu((x @ down).view(M, 16) @ up).view(M, 4, 32)


def low_rank_of_gates(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    inner = x @ down
    return F.silu(inner @ up) * (inner @ up.flip(0))


@pytest.mark.parametrize("program", [low_rank, low_rank_with_bias, low_rank_in_heads, low_rank_of_gates])
def test_a_product_that_only_products_read_is_followed_by_no_op(program: Program) -> None:
    (first,) = [each for each in refused(program, X, bf16(K, 16), bf16(16, N)) if each.node.startswith("mm")]
    assert first.reason is Reason.NOTHING_TO_FUSE
    assert first.message == "no op that could be fused follows the product"


def adapted(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    inner = x @ down
    return x @ w + inner @ up


def test_products_of_two_inputs_are_apart_in_the_words_of_the_program() -> None:
    found = refused(adapted, X, W, bf16(K, 16), bf16(16, N))
    (apart,) = [each.message for each in found if each.reason is Reason.APART]
    assert re.fullmatch(
        r"add \(\S+:\d+\) reads it and is computed in the kernel of mm_1 \(\S+:\d+\), and one kernel can't "
        r"compute both products, because that one multiplies x and this one inner \(\S+:\d+\)",
        apart,
    )


# The names of values


def softmaxed(x: Tensor, w: Tensor) -> Tensor:
    scores = torch.relu(x @ w)
    total = scores.sum(-1, keepdim=True)
    return scores / total


def of_int64(x: Tensor, w: Tensor) -> Tensor:
    codes = (x @ w).to(torch.int64)
    return codes * 2


def scanned(x: Tensor, w: Tensor) -> Tensor:
    scores = torch.relu(x @ w)
    running = scores.cumsum(-1)
    return scores / running


def of_double(x: Tensor, w: Tensor) -> Tensor:
    table = torch.arange(N, device=x.device, dtype=torch.float64).sin()
    return (x @ w) * table


def written(x: Tensor, w: Tensor) -> Tensor:
    scores = torch.relu(x @ w)
    x.copy_(scores[:, :K])
    return scores * 2 + x.sum()


@pytest.mark.parametrize(
    ("program", "reason", "names"),
    [
        (softmaxed, Reason.FEEDBACK, ["total (FILE)"]),
        (of_int64, Reason.UNSUPPORTED_DTYPE, ["codes (FILE)"]),
        (scanned, Reason.CYCLE, ["running (FILE)"]),
        (of_double, Reason.FLOAT64, ["table (FILE)"]),
        (low_rank, Reason.NOTHING_TO_FUSE, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_values_have_the_names_of_the_program(program: Program, reason: Reason, names: list[str]) -> None:
    args = (X, bf16(K, 16), bf16(16, N)) if program is low_rank else (X, W)
    with config.patch(block_reductions="never"):  # type: ignore[attr-defined]
        found = refused(program, *args)
    messages = [re.sub(r"\w+\.py:\d+", "FILE", each.message) for each in found if each.reason is reason]
    assert messages and all(name in message for name in names for message in messages)
    assert not any(re.search(r"\b(?:arg\d+_1|primals_\d+)\b", each.message) for each in found)


# Products that a graph shows as other ops, or not at all


@pytest.mark.parametrize(
    ("program", "args", "target"),
    [
        (lambda x, w: torch.relu(x @ w), (X[:1], COLUMN), "aten.mm.default"),
        (lambda x, w: torch.relu(x @ w), (X, ROWS), "aten.mv.default"),
        (lambda x, w: torch.relu(x @ w), (ROWS, ROWS), "aten.dot.default"),
        (torch.bmm, (X[:, None], X[:, :, None]), "aten.bmm.default"),
        (lambda x, w: torch.relu(torch.bmm(x, w)), (X[:, :, None], X[:, None]), "aten.bmm.default"),
        (torch.addmm, (bf16(1, 1), X[:1], COLUMN), "aten.addmm.default"),
        (torch.addmm, (bf16(16), bf16(1, 16), bf16(16, 16)), "aten.addmm.default"),
        (torch.addmv, (bf16(M), X, ROWS), "aten.addmv.default"),
    ],
    ids=["row_by_column", "mv", "dot", "batch", "outer", "bias", "small", "addmv"],
)
def test_a_decomposed_product_is_one(program: Program, args: tuple[Tensor, ...], target: str) -> None:
    (found,) = refused(program, *args)
    assert found.reason is Reason.MATRIX_VECTOR
    assert found.message.startswith(f"it is part of {target} with M, N or K of 1")


def test_ops_that_a_program_spells_are_no_product() -> None:
    assert not refused(lambda x, w: torch.relu((x * w).sum(-1)), X, ROWS)


def test_a_decomposed_product_that_a_kernel_computes_is_not_refused() -> None:
    graphs = collect(lambda x, w, v: torch.relu(x @ w) @ v, (X, W, bf16(N)))
    (region,) = [region for graph in graphs for region in graph.regions]
    assert region.spec.reductions
    assert not any(each.reason is Reason.MATRIX_VECTOR for graph in graphs for each in graph.rejections)


def int4() -> Tensor:
    codes = torch.randint(0, 15, (64, 64), dtype=torch.int32)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def int8() -> Tensor:
    return torch.randint(-8, 8, (N, K), generator=torch.Generator().manual_seed(0)).to(torch.int8)


@pytest.mark.parametrize(
    ("program", "args", "target"),
    [
        (
            lambda x, w, s: torch.relu(torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 32, s)),
            (X, int4(), bf16(2, 64, 2)),
            "aten._weight_int4pack_mm_for_cpu.default",
        ),
        (
            lambda x, w, s: torch.relu(torch.ops.aten._weight_int8pack_mm(x, w, s)),
            (X, int8(), bf16(N)),
            "aten._weight_int8pack_mm.default",
        ),
    ],
    ids=["int4", "int8"],
)
def test_products_of_packed_weights_are_opaque(
    program: Program, args: tuple[Tensor, ...], target: str
) -> None:
    (found,) = refused(program, *args)
    assert found.reason is Reason.OPAQUE_PRODUCT
    assert found.message.startswith(f"{target} multiplies matrices by code of its own")


@pytest.mark.parametrize(
    ("name", "is_product"),
    [
        ("aten::_sparse_semi_structured_addmm", True),
        ("aten::_mixed_dtypes_linear", True),
        ("aten::_dyn_quant_matmul_4bit", True),
        ("quantized::linear", True),
        ("aten::_trilinear", False),
        ("aten::upsample_linear1d", False),
        ("aten::_scaled_dot_product_flash_attention", False),
    ],
)
def test_operators_are_products_by_their_names(name: str, is_product: bool) -> None:
    namespace, op = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), op)
    graph = torch.fx.Graph()
    node = graph.call_function(getattr(packet, packet.overloads()[0]))
    assert (opaque_product(node) is not None) is is_product


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("mslk::f8f8bf16_rowwise", "; with KernelPreference.TORCH, torchao calls _scaled_mm, which is fused"),
        ("torch_nn::_linear_cross_entropy_of_a_test", "torch calls mm, which is fused"),
        ("mslk::bf16i4bf16_shuffled", "grouped_mm and _scaled_grouped_mm"),
        ("bitsandbytes::gemm_4bit", "grouped_mm and _scaled_grouped_mm"),
        ("quanto::qbytes_mm", "grouped_mm and _scaled_grouped_mm"),
    ],
)
def test_products_of_libraries_are_opaque_with_the_option_that_shows_them(name: str, end: str) -> None:
    namespace, op = name.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        library.define(f"{op}(Tensor a, Tensor b) -> Tensor")
        library.impl(op, lambda a, b: a @ b, "CompositeExplicitAutograd")
        called = getattr(getattr(torch.ops, namespace), op)
        (found,) = refused(lambda x, w: torch.relu(called(x, w)), X, W)
    finally:
        library._destroy()
    assert found.reason is Reason.OPAQUE_PRODUCT
    assert found.message.startswith(f"{namespace}.{op}.default multiplies matrices by code of its own")
    assert found.message.endswith(end)


# Rotations


def rotated(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = y.chunk(2, -1)
    return y * cos + torch.cat((-second, first), -1) * sin


ALONG_N = "supported sizes: none if B is contiguous along N"
OTHER_KIND = "supported sizes: none after this kind of product; one dense product"


@pytest.mark.parametrize("setting", ["always", "auto"])
@pytest.mark.parametrize(
    ("x", "w", "columns", "why"),
    [
        (X, W, 64, ALONG_N),
        (X, W, 32, ALONG_N),
        (X, W, N, ALONG_N),
        (X.expand(2, M, K).clone(), bf16(2, N, K).mT, 64, OTHER_KIND),
        (X, bf16(96, K).t(), 24, "supported sizes: 16, 32"),
    ],
    ids=["heads", "small_heads", "whole_rows", "batches", "odd_size"],
)
def test_a_rotation_that_no_tile_does_says_what_would(
    x: Tensor, w: Tensor, columns: int, why: str, setting: str
) -> None:
    """`rotation_cost` would promise that `rotary_embeddings = "always"` fuses it."""
    program = torch.bmm if x.dim() == 3 else torch.mm

    def fn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(program(x, w).unflatten(-1, (-1, columns)), cos, sin)

    with config.patch(rotary_embeddings=setting):  # type: ignore[attr-defined]
        found = refused(fn, x, w, bf16(columns), bf16(columns), arch="sm_90a")
    (message,) = [each.message for each in found if each.reason is Reason.ROTATION_SIZE]
    assert why in message
    assert not any(each.reason is Reason.ROTATION_COST for each in found)


# Columns


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("n", [1, 32, N])
def test_a_product_in_two_parts_has_no_other_number_of_columns(n: int, step: int) -> None:
    """A product of 128 columns that a kernel has in two parts was said to have 64."""
    graph = Graph()
    wide, other = read_anchor(graph.mm(n=N, name="0")), read_anchor(graph.mm(n=n, name="1"))
    halves = (ColumnSlice(0, step, N // 2), ColumnSlice(1 if step == 2 else N // 2, step, N // 2))
    for part in of_slices(wide, halves):
        why = unlike(replace(other, a=wide.a), part)
        assert why == "the columns of one are divided into two parts"


# Values that the caller needs


def with_its_maximum(x: Tensor, w: Tensor, plane: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return y[:, 64:] * y[:, :64] * 2, y.amax(-1), y + plane


def test_a_value_that_is_returned_is_read_by_the_caller() -> None:
    found = refused(with_its_maximum, X, W, bf16(M, 3, N)[:, 0])
    (message,) = [each.message for each in found if each.reason is Reason.LEFT_TO_USERS]
    assert message.startswith("it is read by the caller, outside the kernel")
