"""Regions of one A that share a launch: which do, which do not, and what they compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend import config
from cute_backend.api import Explanation
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.search import regions as search
from cute_backend.fx_walk.search.walk import Walk
from support.fx_walk.synthetic import Graph, aten, walk

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def shared() -> Iterator[None]:
    with config.patch(shared_launches=True):  # type: ignore[attr-defined]
        yield


def explained(fn: Callable[..., Any], *shapes: tuple[int, ...], arch: str = "sm_90a") -> Explanation:
    """Explains a program of bf16 tensors of these shapes."""
    with FakeTensorMode():
        return cute_backend.explain(fn, *(torch.empty(shape, dtype=BF16) for shape in shapes), arch=arch)


def regions(fn: Callable[..., Any], *shapes: tuple[int, ...], arch: str = "sm_90a") -> list[int]:
    """How many products each region of a program has."""
    return [len(region.spec.accumulators) for region in explained(fn, *shapes, arch=arch).regions]


X, Q, K, V = (64, 4096), (4096, 4096), (1024, 4096), (1024, 4096)


def plain(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def biased(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q, bias), F.linear(x, k).relu(), F.linear(x, v)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_projections_of_a_layer_share_a_launch(arch: str) -> None:
    assert regions(plain, X, Q, K, V, arch=arch) == [3]
    assert regions(biased, X, Q, K, V, (4096,), arch=arch) == [3]


def test_products_of_many_rows_are_left_to_torch() -> None:
    found = explained(plain, (2048, 4096), Q, K, V)
    assert not found.regions and {each.reason for each in found.rejections} == {Reason.UNSHARED}


def test_the_region_has_every_epilogue() -> None:
    found = explained(biased, X, Q, K, V, (4096,))
    (region,) = found.regions
    assert [acc.width for acc in region.spec.accumulators] == [4096, 1024, 1024]
    assert region.formula.splitlines() == [
        "out0 = bf16(acc0 + bias0)",
        "out1 = bf16(relu(acc1))",
        "out2 = bf16(acc2)",
    ]
    assert [load.label for load in region.loads] == ["bias"] and not found.rejections
    assert region.sizes == (64, 6144, 4096)


def test_other_architectures_have_a_launch_each() -> None:
    assert regions(biased, X, Q, K, V, (4096,), arch="sm_80") == [1]
    with config.patch(shared_launches=False):  # type: ignore[attr-defined]
        assert regions(biased, X, Q, K, V, (4096,)) == [1]


def test_a_load_without_columns_is_read_once() -> None:
    def scaled(x: Tensor, q: Tensor, k: Tensor, by: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q) * by + bias, F.linear(x, k) * by + bias

    (region,) = explained(scaled, X, K, V, (64, 1), (1024,)).regions
    assert [load.kind for load in region.loads] == ["colvec", "rowvec", "rowvec"]


def test_products_that_follow_from_one_another_do_not_share() -> None:
    def follows(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        first = F.linear(x, q).relu()
        return first, F.linear(x, k) * first.sum(-1, keepdim=True)

    assert regions(follows, X, K, V) == [1, 1]


def test_products_that_meet_are_a_pair() -> None:
    def gated(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return F.silu(F.linear(x, q)) * F.linear(x, k), F.linear(x, v).relu()

    assert sorted(regions(gated, X, K, V, V)) == [1, 2]


@pytest.mark.parametrize("written", [False, True])
def test_nothing_is_shared_across_a_write(written: bool) -> None:
    made = Graph()
    x, q, k = made.input("x", X), made.input("q", K), made.input("k", V)
    first = made.call(aten.relu.default, made.call(aten.mm.default, x, made.call(aten.t.default, q)))
    if written:
        made.call(aten.copy_.default, k, made.call(aten.neg.default, k))
    second = made.call(aten.relu.default, made.call(aten.mm.default, x, made.call(aten.t.default, k)))
    found, _ = walk(made.output(first, second))
    assert [len(region.anchors) for region in found] == ([1, 1] if written else [2])
    assert not written or "copy__default writes in place between them" in found[0].unshared


def test_rows_that_tma_does_not_write_are_apart() -> None:
    assert regions(biased, X, Q, (1028, 4096), V, (4096,)) in ([2, 1], [1, 2])


def test_at_most_four_share_a_launch() -> None:
    def many(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight).relu() for weight in weights)

    found = explained(many, X, *[K] * 5)
    assert [len(region.spec.accumulators) for region in found.regions] == [4, 1]
    why = "shares no launch with mm, because at most 4 products can"
    assert found.regions[1].unshared == why and why in str(found)


def test_two_launches_do_not_wait_for_each_other() -> None:
    def crossed(x: Tensor, y: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        of_x, of_y = F.linear(x, q).relu(), F.linear(y, q).relu()
        return of_x, of_y, F.linear(y, k).relu() * of_x, F.linear(x, k).relu() * of_y

    found = explained(crossed, X, X, K, V).regions
    assert sorted(len(region.spec.accumulators) for region in found) == [1, 1, 2]
    assert [region.unshared.partition(", because ")[2] for region in found if region.unshared] == [
        "one depends on the other"
    ] * 2


def test_nothing_is_shared_where_it_takes_longer() -> None:
    def wide(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q).relu(), F.linear(x, k)

    # K of each product by itself is divided among CTAs, which fill the GPU.
    found = explained(wide, (16, 16384), (512, 16384), (512, 16384))
    (region,), (rejection,) = found.regions, found.rejections
    loss = r", because by the cost model it would take (1\.\d{3}) times as long as launches of their own"
    assert re.fullmatch("shares no launch with mm_1" + loss, region.unshared)
    assert rejection.reason is Reason.UNSHARED and re.search(" with mm" + loss, rejection.message)


@pytest.mark.parametrize("settings", [{"tile": "128x128_1x1_split2"}, {"batch_invariant": True}])
def test_settings_of_tiles_hold_for_what_is_shared(settings: dict[str, Any]) -> None:
    with config.patch(**settings):  # type: ignore[attr-defined]
        assert all(region.kernel() for region in explained(biased, X, Q, K, V, (4096,)).regions)


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn])
def test_programs_compute_what_they_did(dtype: torch.dtype, fresh_compiler: None) -> None:
    torch.manual_seed(0)
    x, *weights = (torch.randint(-2, 3, (rows, 64)).to(dtype) for rows in (32, 64, 32, 48))
    scales = [torch.rand(32, 1), *(torch.rand(1, len(weight)) for weight in weights)]
    bias = torch.randn(64, dtype=BF16)

    def program(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        if dtype is BF16:
            return biased(x, q, k, v, bias)
        results = [
            torch._scaled_mm(x, weight.t(), scales[0], scale, out_dtype=BF16)
            for weight, scale in zip((q, k, v), scales[1:], strict=True)
        ]
        return results[0] * bias.sign(), results[1].relu(), results[2]

    counters.clear()
    compiled = torch.compile(program, backend="cute")
    for result, right in zip(compiled(x, *weights, bias), program(x, *weights, bias), strict=True):
        torch.testing.assert_close(result, right)
    assert counters["cute_backend"]["regions"] == 1


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (B, H, S, D) with rotary embeddings."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def roped(x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys with rotary embeddings, and values."""

    def turned(product: Tensor) -> Tensor:
        return turn(product.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2), cos, sin)

    return turned(F.linear(x, q)), turned(F.linear(x, k)), F.linear(x, v)


ROPED = ((2, 32, 4096), Q, K, V, (32, 128), (32, 128))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, [(3, True)]),
        ({"rotary_embeddings": "never"}, [(3, False)]),
        ({"shared_launches": False}, []),
        ({"shared_launches": False, "rotary_embeddings": "always"}, [(1, True), (1, True)]),
    ],
)
def test_rotary_embeddings_stay_in_shared_launches(
    settings: dict[str, Any], found: list[tuple[int, bool]]
) -> None:
    with config.patch(**{"rotary_embeddings": "auto", **settings}):  # type: ignore[attr-defined]
        explanation = explained(roped, *ROPED)
    assert [
        (len(each.spec.accumulators), each.spec.halved_columns > 0) for each in explanation.regions
    ] == found
    refused = [each for each in explanation.rejections if each.reason is Reason.ROTATION_COST]
    assert bool(refused) is not any(rotates for _, rotates in found)


@pytest.mark.parametrize(
    ("tokens", "hidden", "heads", "rotates"),
    [
        # 581 us, and 621 by Inductor with three products of torch (H100, benchmarks/qkv.py).
        (8192, 4096, (32, 8, 8), True),
        # The tile that rotates heads of 128 columns leaves more multiprocessors without work.
        (512, 8192, (64, 8, 8), False),
    ],
)
def test_a_shared_launch_rotates_where_products_and_a_kernel_take_longer(
    tokens: int, hidden: int, heads: tuple[int, ...], rotates: bool
) -> None:
    weights = [(count * 128, hidden) for count in heads]
    with config.patch(rotary_embeddings="auto"):  # type: ignore[attr-defined]
        explanation = explained(roped, (1, tokens, hidden), *weights, (tokens, 128), (tokens, 128))
    assert [len(each.spec.accumulators) for each in explanation.regions if each.spec.moves_columns] == [
        3
    ] * rotates
    messages = [each.message for each in explanation.rejections]
    assert rotates or any("times as long as with rotations by Inductor" in each for each in messages)


def test_norms_by_head_are_rotated_where_they_stay_in_the_kernel() -> None:
    """The norms take tiles of whole heads, with rotations or without: 25.4 us, and 31.5 with a kernel of
    Inductor's after it (H100, benchmarks/qkv.py)."""

    def normed(x: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *tables: Tensor) -> Any:
        heads = [F.linear(x, each).unflatten(-1, (-1, 128)).transpose(1, 2) for each in (q, k)]
        scaled = [weight * F.rms_norm(each, (128,)) for each in heads]
        return *(turn(each, *tables) for each in scaled), F.linear(x, v)

    with config.patch(rotary_embeddings="auto"):  # type: ignore[attr-defined]
        found = explained(normed, (1, 64, 4096), Q, K, V, (128,), (64, 128), (64, 128)).regions
    assert [len(each.spec.accumulators) for each in found if each.spec.moves_columns] == [3]


def normed_as_gemma_3_4b(rows: int, **options: Any) -> Any:
    """The explanation of normed heads of 256 columns."""

    def normed(x: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *tables: Tensor) -> Any:
        heads = [F.linear(x, each).unflatten(-1, (-1, 256)).transpose(1, 2) for each in (q, k, v)]
        scaled = [(1 + weight) * F.rms_norm(each, (256,)) for each in heads[:2]]
        return *(turn(each, *tables).contiguous() for each in scaled), heads[2].contiguous()

    shapes = (1, rows, 2560), (2048, 2560), (1024, 2560), (1024, 2560), (256,), (rows, 256), (rows, 256)
    with config.patch(rotary_embeddings="auto", block_reductions="auto"):  # type: ignore[attr-defined]
        return explained(normed, *shapes, **options)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_normed_heads_of_256_columns_share_a_launch(arch: str) -> None:
    (region,) = normed_as_gemma_3_4b(512, arch=arch).regions
    assert [(each.pass_columns, each.halved_columns) for each in region.spec.segments] == [
        (256, 256),
        (256, 256),
        (0, 0),
    ]


def test_heads_of_256_columns_of_few_rows_are_normed_by_inductor() -> None:
    found = normed_as_gemma_3_4b(128)
    assert not any(region.spec.pass_columns for region in found.regions)
    assert {each.reason for each in found.rejections} >= {Reason.BLOCK_COST}


def test_a_rotation_that_shares_no_launch_is_left_to_inductor() -> None:
    def alone(x: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        # The second product depends on the first, so nothing shares a launch.
        turned, *_ = roped(x, q, k, v, *tables)
        return turned, F.linear(x, y) * turned.sum(), F.linear(x, k) * turned.sum()

    with config.patch(rotary_embeddings="auto"):  # type: ignore[attr-defined]
        explanation = explained(alone, ROPED[0], V, *ROPED[1:])
    assert not any(region.spec.halved_columns for region in explanation.regions)
    assert any(each.reason is Reason.ROTATION_COST for each in explanation.rejections)


def visited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products for which the search looks for a region, as it goes on."""
    names: list[str] = []

    def noted(found: Walk, node: fx.Node) -> Region:
        names.append(node.name)
        return region(found, node)

    region = search._region
    monkeypatch.setattr(search, "_region", noted)
    return names


class Rope(Graph):
    """Products of operands with 64 rows, of which some are rotated by heads of 128 columns."""

    def times(self, a: fx.Node, name: str, columns: int = 1024) -> fx.Node:
        k = a.meta["val"].shape[1]
        return self.call(aten.mm.default, a, self.input(name, (k, columns), strides=(1, k)))

    def turned(self, product: fx.Node) -> fx.Node:
        heads = self.call(aten.reshape.default, product, [64, -1, 128])
        left, right = (self.call(aten.slice.Tensor, heads, 2, *ends) for ends in ((0, 64), (64, 128)))
        other = self.call(aten.cat.default, [self.call(aten.neg.default, right), left], -1)
        cos, sin = (self.input(f"{name}_{product.name}", (64, 1, 128)) for name in ("cos", "sin"))
        parts = (self.call(aten.mul.Tensor, *each) for each in ((heads, cos), (other, sin)))
        return self.call(aten.add.Tensor, *parts)


@pytest.mark.settings(rotary_embeddings="auto")
def test_a_search_goes_back_to_the_first_product_of_a_rotation_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second product of `x` depends on the first. Products of other operands are visited once."""
    made, names = Rope(), visited(monkeypatch)
    before = made.call(aten.relu.default, made.times(made.input("y", (64, 4096)), "before", 4096))
    x = made.call(aten.cumsum.default, before, 1)
    turned = made.turned(made.times(x, "q", 4096))
    v = made.call(aten.mul.Tensor, made.times(x, "v"), made.call(aten.sum.default, turned))
    found, rejections = walk(made.output(turned, made.call(aten.relu.default, made.times(v, "after"))))
    assert names == [
        "mm_default_3",
        "mm_default_2",
        "mm_default_1",
        "mm_default_2",
        "mm_default_1",
        "mm_default",
    ]
    assert not any(region.spec.moves_columns for region in found)
    assert Reason.ROTATION_COST in {each.reason for each in rejections}


@pytest.mark.settings(rotary_embeddings="auto")
def test_a_search_is_repeated_if_a_later_region_comes_between_the_products_of_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`q` and `v` could share a launch. The region of `z` is found last: it reads a result of `q`, and `v`
    reads one of its results."""
    made, names = Rope(), visited(monkeypatch)
    x, y = (made.input(name, (64, 4096)) for name in "xy")
    positive = made.call(aten.relu.default, made.times(y, "z"))
    turned = made.turned(made.times(x, "q", 4096))
    v = made.call(aten.add.Tensor, made.times(x, "v"), made.call(aten.cumsum.default, positive, 1))
    z = made.call(aten.mul.Tensor, positive, made.call(aten.sum.default, turned))
    found, rejections = walk(made.output(turned, z, v))
    assert names == 2 * ["mm_default_2", "mm_default_1", "mm_default"]
    assert not any(region.spec.moves_columns for region in found)
    assert Reason.ROTATION_COST in {each.reason for each in rejections}
