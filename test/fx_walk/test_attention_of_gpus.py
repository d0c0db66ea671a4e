"""Attention that is traced for a GPU without one: the ops are those that torch has there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.fx_walk.collect import GraphReport, collect
from cute_backend.planning import Arch
from cute_backend.planning.naming import words
from cute_backend.spec import EpilogueSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "wheels"))
import kernels as wheels

BATCH, HEADS, ROWS, COLUMNS = 4, 4, 64, 64

CUDNN = "_scaled_dot_product_cudnn_attention"
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CPU = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = "bmm"

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


def heads(
    rows: int = ROWS, columns: int = COLUMNS, number: int = HEADS, dtype: Any = torch.bfloat16
) -> Tensor:
    return torch.empty(BATCH, rows, number, columns, dtype=dtype).transpose(1, 2)


def ops_of(report: GraphReport) -> set[str]:
    """The ops that compute attention in a graph."""
    names = {str(node.target).split(".")[1] for node in report.graph.nodes if "aten." in str(node.target)}
    return {name for name in names if name in (PRODUCTS, "_softmax") or "scaled_dot_product" in name}


def traced(fn: Callable[..., Any], *args: Tensor, arch: str | None = "sm_90a", **how: Any) -> set[str]:
    (report,) = collect(fn, args, arch=arch, **how)
    return ops_of(report)


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask.expand(BATCH, 1, -1, ROWS))


@pytest.mark.parametrize(
    ("arch", "op"),
    [("sm_90a", CUDNN), ("sm_100a", CUDNN), ("sm_80", FLASH), ("sm_89", FLASH), ("sm_120a", FLASH)],
)
def test_the_op_is_that_of_the_gpu(arch: str, op: str) -> None:
    assert traced(F.scaled_dot_product_attention, heads(), heads(), heads(), arch=arch) == {op}


def test_every_architecture_has_an_op() -> None:
    found = {
        str(arch): traced(F.scaled_dot_product_attention, *[heads()] * 3, arch=arch.value) for arch in Arch
    }
    assert all(each in ({CUDNN}, {FLASH}) for each in found.values()), found


@pytest.mark.parametrize(
    ("query", "key", "value", "op"),
    [
        (heads(), heads(1), heads(1), FLASH),
        (heads(columns=256), heads(columns=256), heads(columns=256), FLASH),
        (heads(columns=20), heads(columns=20), heads(columns=20), FLASH),
        (heads(columns=160), heads(columns=160), heads(columns=264), EFFICIENT),
        (heads(dtype=torch.float32), heads(dtype=torch.float32), heads(dtype=torch.float32), EFFICIENT),
    ],
    ids=["one key", "256 columns", "20 columns", "unequal columns", "fp32"],
)
def test_a_fused_op_is_left_to_another_by_its_limits(
    query: Tensor, key: Tensor, value: Tensor, op: str
) -> None:
    assert traced(F.scaled_dot_product_attention, query, key, value) == {op}


def test_groups_of_queries_share_keys() -> None:
    def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    few = heads(number=2)
    assert traced(grouped, heads(), few, few) == {CUDNN}


@pytest.mark.parametrize("columns", [1, ROWS], ids=["broadcast", "whole"])
def test_a_mask_whose_columns_are_one_is_left_to_products(columns: int) -> None:
    """As that of transformers 5.17 for an encoder, which has a column for all keys: no fused op reads it. A
    CPU's op does."""
    args = heads(), heads(), heads(), torch.ones(BATCH, 1, ROWS, columns, dtype=torch.bool)
    assert traced(masked, *args) == ({PRODUCTS} if columns == 1 else {CUDNN})
    assert traced(masked, *args, arch=None) == {CPU}


def test_gradients_come_from_the_same_op() -> None:
    query, key, value = (heads().requires_grad_() for _ in range(3))
    reports = collect(F.scaled_dot_product_attention, (query, key, value), arch="sm_90a")
    assert [ops_of(each) for each in reports] == [{CUDNN}, {f"{CUDNN}_backward"}]


def test_symbolic_sizes_need_no_guard() -> None:
    assert traced(F.scaled_dot_product_attention, heads(), heads(), heads(), dynamic=True) == {CUDNN}


def test_real_tensors_are_computed_by_the_ops_of_a_cpu() -> None:
    """A program that reads a value runs on what it was given."""

    def reads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value) * float(query.sum().item() > 0)

    reports = collect(reads, (heads().zero_(), heads().zero_(), heads().zero_()), arch="sm_90a")
    assert CPU in set().union(*map(ops_of, reports))


@pytest.mark.exhaustive
@needs_transformers
@pytest.mark.parametrize("name", ["vit-bf16", "bert-bf16"])
def test_a_pack_has_the_kernel_of_queries_keys_and_values(name: str) -> None:
    specs = [EpilogueSpec.from_json(text) for text, _ in wheels.traced(Arch.SM90A, name)]
    assert {words(spec) for spec in specs} == {"mm_by_3_bias", "mm_bias_residual", "mm_bias_gelu"}
