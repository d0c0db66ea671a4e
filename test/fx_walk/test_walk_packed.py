"""Products with packed columns: which are divided into parts that share a launch, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend import config
from cute_backend.api import Explanation
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.preparation import packed
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.kinds.blocks import PART
from cute_backend.kinds.results import Heads
from support.model_files import load_architecture

BF16 = torch.bfloat16
WIDTH, HEADS, COLUMNS = 256, 4, 64


@pytest.fixture(autouse=True)
def shared() -> Iterator[None]:
    with config.patch(shared_launches=True):  # type: ignore[attr-defined]
        yield


def explained(fn: Callable[..., Any], *shapes: tuple[int, ...], arch: str = "sm_90a") -> Explanation:
    with FakeTensorMode():
        return cute_backend.explain(fn, *(torch.empty(shape, dtype=BF16) for shape in shapes), arch=arch)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, COLUMNS)).transpose(1, 2)


def worked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Work on two parts, as rotary embeddings are, and none on the third."""
    return q * 0.5, k.relu(), v


def sliced(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in Phi-3.
    packed = F.linear(x, w)
    return worked(*(heads(packed[..., WIDTH * i : WIDTH * (i + 1)]) for i in range(3)))


def chunked(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in MPT.
    return worked(*map(heads, F.linear(x, w).chunk(3, dim=-1)))


def divided(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in GPT-2.
    return worked(*map(heads, F.linear(x, w).split(WIDTH, dim=-1)))


def unbound(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in ModernBERT.
    packed = F.linear(x, w).view(*x.shape[:2], 3, HEADS, COLUMNS)
    return worked(*packed.transpose(3, 1).unbind(dim=2))


def permuted(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in timm's vision transformers.
    packed = F.linear(x, w).reshape(*x.shape[:2], 3, HEADS, COLUMNS).permute(2, 0, 3, 1, 4)
    return worked(*packed.unbind(0))


def selected(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    packed = F.linear(x, w).view(*x.shape[:2], 3, HEADS, COLUMNS)
    return worked(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])


SPELLINGS = [sliced, chunked, divided, unbound, permuted, selected]
SHAPES = (2, 32, WIDTH), (3 * WIDTH, WIDTH)


def operands(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-1, 2, shape, generator=generator).to(BF16) for shape in shapes]


def check(fn: Callable[..., Any], args: list[Tensor], dynamic: bool = False) -> None:
    """Compares the replay with eager, and expects one region."""
    results = torch.compile(fn, backend="cute", dynamic=dynamic)(*args)
    assert counters["cute_backend"]["regions"] == 1
    for result, right in zip(results, fn(*args), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
def test_parts_of_a_product_share_a_launch(fn: Callable[..., Any], fresh_compiler: None) -> None:
    (region,) = explained(fn, *SHAPES).regions
    assert [acc.width for acc in region.spec.accumulators] == [WIDTH] * 3
    assert region.formula.splitlines() == [
        "out0 = bf16(acc0 * 0.5)",
        "out1 = bf16(relu(acc1))",
        "out2 = bf16(acc2)",
    ]
    check(fn, operands(*SHAPES))


@pytest.mark.parametrize("shape", [(1, 1, WIDTH), (64, 1, WIDTH), (1, 100, WIDTH)])
def test_few_rows(shape: tuple[int, ...], fresh_compiler: None) -> None:
    check(sliced, operands(shape, SHAPES[1]))


def test_parts_may_differ_in_width(fresh_compiler: None) -> None:
    def grouped(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        q, k, v = F.linear(x, w, bias).split((256, 64, 64), dim=-1)
        return worked(heads(q), heads(k), heads(v))

    shapes = (2, 32, WIDTH), (384, WIDTH), (384,)
    (region,) = explained(grouped, *shapes).regions
    assert [acc.width for acc in region.spec.accumulators] == [256, 64, 64]
    assert [product.label for product in region.products] == ["w [0:256]", "w [256:320]", "w [320:384]"]
    assert [load.label for load in region.loads] == ["bias [0:256]", "bias [256:320]", "bias [320:384]"]
    assert [load.kind for load in region.loads] == ["rowvec"] * 3
    check(grouped, operands(*shapes))


def test_fp8_has_the_scales_of_its_parts(fresh_compiler: None) -> None:
    def scaled(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        packed = torch._scaled_mm(x, w.t(), of_x, of_w, bias=bias, out_dtype=BF16)
        q, k, v = packed.view(2, 32, -1).chunk(3, dim=-1)
        return worked(heads(q), heads(k), heads(v))

    x, w, bias = operands((64, WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,))
    of_x, of_w = torch.full((64, 1), 0.5), torch.arange(3 * WIDTH).view(1, -1) % 2 + 1.0
    args = [x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), of_x, of_w, bias]
    (region,) = cute_backend.explain(scaled, *args, arch="sm_90a").regions
    assert [load.kind for load in region.loads] == ["colvec", *["rowvec"] * 6]
    check(scaled, args)


def test_parts_are_written_as_attention_reads_them(fresh_compiler: None) -> None:
    def copied(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return tuple(heads(each).contiguous() for each in F.linear(x, w).chunk(3, dim=-1))

    (region,) = explained(copied, *SHAPES).regions
    assert [store.form for store in region.spec.stores] == [Heads(32, COLUMNS)] * 3
    check(copied, operands(*SHAPES))


@pytest.mark.parametrize("axes", [(1,), (0, 1)])
def test_symbolic_lengths_and_batches_are_divided_too(axes: tuple[int, ...], fresh_compiler: None) -> None:
    x, w = operands(*SHAPES)
    for axis in axes:
        torch._dynamo.mark_dynamic(x, axis)
    check(sliced, [x, w])


def by_chunk_of_heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in GPT-NeoX.
    packed = F.linear(x, w).view(*x.shape[:2], -1, 3 * COLUMNS).transpose(1, 2)
    return worked(*packed.chunk(3, dim=-1))


def by_axis_of_three(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in BLOOM.
    packed = F.linear(x, w).view(*x.shape[:2], HEADS, 3, COLUMNS)
    return worked(packed[..., 0, :], packed[..., 1, :], packed[..., 2, :])


def by_groups_of_queries(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As Falcon has it, with slices: four queries, a key and a value in each of two groups.
    packed = F.linear(x, w).view(*x.shape[:2], 2, 6, COLUMNS)
    q, k, v = packed[:, :, :, :4], packed[:, :, :, 4:5], packed[:, :, :, 5:]
    return worked(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("fn", "blocks"),
    [
        (by_chunk_of_heads, [COLUMNS] * 3),
        (by_axis_of_three, [COLUMNS] * 3),
        (by_groups_of_queries, [4 * COLUMNS, COLUMNS, COLUMNS]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_parts_may_alternate_by_head(fn: Callable[..., Any], blocks: list[int], fresh_compiler: None) -> None:
    """Each part is blocks of the weight's columns, and nothing is copied."""
    shapes = (2, 32, WIDTH), (2 * 6 * COLUMNS, WIDTH)
    (region,) = explained(fn, *shapes).regions
    assert [acc.b_block for acc in region.spec.accumulators] == blocks
    check(fn, operands(*shapes))
    check_views_alone(fn, operands(*shapes))
    torch._dynamo.reset()
    counters.clear()
    x, w = operands(*shapes)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(x, 0)
    check(fn, [x, w])


def check_views_alone(fn: Callable[..., Any], args: list[Tensor]) -> None:
    """Expects that the graph has no op but the kernel and views."""
    (report,) = collect(fn, tuple(args), arch="sm_90a")
    rewrite(report.graph, report.regions)
    calls = {node.target for node in report.graph.nodes if node.op == "call_function"}
    assert torch.ops.cute_backend.gemm_epilogue.default in calls
    copies = {torch.ops.aten.clone.default, torch.ops.aten.mm.default, torch.ops.aten.slice_scatter.default}
    assert not calls & copies


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("columns", [80, 96])
def test_tiles_may_be_cut_to_heads(columns: int, arch: str) -> None:
    """To 160 or 192 columns."""

    def by_axis(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        packed = F.linear(x, w).view(*x.shape[:2], -1, 3, columns)
        return worked(packed[..., 0, :], packed[..., 1, :], packed[..., 2, :])

    (region,) = explained(by_axis, SHAPES[0], (4 * 3 * columns, WIDTH), arch=arch).regions
    assert [acc.b_block for acc in region.spec.accumulators] == [columns] * 3


def test_biases_and_scales_alternate_by_head(fresh_compiler: None) -> None:
    def scaled(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        packed = torch._scaled_mm(x, w.t(), of_x, of_w, bias=bias, out_dtype=BF16)
        return worked(*packed.view(2, 32, HEADS, 3 * COLUMNS).transpose(1, 2).chunk(3, dim=-1))

    x, w, bias = operands((64, WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,))
    of_x, of_w = torch.full((64, 1), 0.5), torch.arange(3 * WIDTH).view(1, -1) % 7 + 1.0
    args = [x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), of_x, of_w, bias]
    (region,) = cute_backend.explain(scaled, *args, arch="sm_90a").regions
    assert [load.kind for load in region.loads] == ["colvec", *["rowvec"] * 6]
    assert region.loads[1].label.endswith("[0:64] of every 192")
    check(scaled, args)
    torch._dynamo.reset()
    counters.clear()

    def biased(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        packed = F.linear(x, w, bias)
        return worked(*packed.view(1, -1, HEADS, 3 * COLUMNS).transpose(1, 2).chunk(3, dim=-1))

    check(biased, operands((1, WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt_neox", "bloom"])
def test_models_that_pack_by_head_are_one_launch(name: str) -> None:
    module, args = load_architecture(name)
    region = cute_backend.explain(module, *args, arch="sm_90a").regions[0]
    assert [acc.b_block for acc in region.spec.accumulators] == [COLUMNS] * 3
    assert all(isinstance(store.form, Heads) for store in region.spec.stores[:2])


def of_odd_heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Heads of 112 columns, of which no tile consists."""
    packed = F.linear(x, w[:672]).view(*x.shape[:2], -1, 3 * 112).transpose(1, 2)
    return worked(*packed.chunk(3, dim=-1))


def of_the_transposed_weight(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """B is contiguous along N, where blocks of columns lie within rows of the swizzle."""
    packed = (x @ w.view(WIDTH, 3 * WIDTH)).view(*x.shape[:2], -1, 3 * COLUMNS).transpose(1, 2)
    return worked(*packed.chunk(3, dim=-1))


def of_a_weight_that_is_contiguous_along_nothing(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    packed = F.linear(x, w.view(-1, 2 * WIDTH)[:, ::2]).view(*x.shape[:2], -1, 3 * COLUMNS).transpose(1, 2)
    return worked(*packed.chunk(3, dim=-1))


def of_a_weight_that_tma_cannot_read(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Its rows are 520 bytes apart, which is no multiple of 16."""
    rows = w.flatten()[: 6 * COLUMNS * (WIDTH + 4)].view(-1, WIDTH + 4)[:, :WIDTH]
    packed = F.linear(x, rows).view(*x.shape[:2], -1, 3 * COLUMNS).transpose(1, 2)
    return worked(*packed.chunk(3, dim=-1))


def heads_that_meet(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = F.linear(x, w).view(*x.shape[:2], -1, 3 * COLUMNS).chunk(3, dim=-1)
    return q * k, v.relu()


def gains_nothing(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(heads, F.linear(x, w).chunk(3, dim=-1)))


def reads_all(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    packed = F.linear(x, w)
    return *worked(*map(heads, packed.chunk(3, dim=-1))), packed.sum()


def leaves_some(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, _ = F.linear(x, w).chunk(3, dim=-1)
    return q * 0.5, k.relu()


def overlaps(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    packed = F.linear(x, w)
    return packed[..., :512] * 0.5, packed[..., 256:].relu()


def meets(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = F.linear(x, w).chunk(3, dim=-1)
    return q * k, v.relu()


@pytest.mark.parametrize(
    "fn",
    [
        gains_nothing,
        reads_all,
        leaves_some,
        overlaps,
        meets,
        of_odd_heads,
        of_the_transposed_weight,
        of_a_weight_that_is_contiguous_along_nothing,
        of_a_weight_that_tma_cannot_read,
        heads_that_meet,
    ],
)
def test_other_products_stay_whole(fn: Callable[..., Any]) -> None:
    found = explained(fn, *SHAPES)
    assert all(len(region.spec.accumulators) == 1 for region in found.regions)
    assert found.rejections


def test_pairs_of_halves_stay_pairs() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, dim=-1)
        return F.silu(gate) * up

    (region,) = explained(gated, (64, WIDTH), (2 * WIDTH, WIDTH)).regions
    assert len(region.spec.accumulators) == 2 and not region.spec.accumulators[0].width


def test_parts_of_heads_that_a_cat_joins_stay_one_product(fresh_compiler: None) -> None:
    """They could share a launch, but then a copy would join the results."""

    def joined(x: Tensor, w: Tensor) -> tuple[Tensor]:
        packed = F.linear(x, w).view(*x.shape[:2], HEADS, -1)
        first, second = packed.split((32, packed.shape[-1] - 32), dim=-1)
        return (torch.cat((first * 0.5, second.relu()), dim=-1),)

    shapes = SHAPES[0], (HEADS * COLUMNS, WIDTH)
    (region,) = explained(joined, *shapes).regions
    assert len(region.spec.accumulators) == 1 and not region.spec.product.b_block
    assert PART.name in [op.op for op in region.spec.ops]
    check(joined, operands(*shapes))


def test_other_architectures_divide_nothing() -> None:
    assert not explained(sliced, *SHAPES, arch="sm_80").regions
    with config.patch(shared_launches=False):  # type: ignore[attr-defined]
        assert not explained(sliced, *SHAPES).regions


def test_parts_that_meet_are_halves_of_one_product() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, dim=-1)
        return F.silu(gate) * up

    (region,) = explained(gated, (2, 32, WIDTH), (2 * WIDTH, WIDTH)).regions
    assert region.node == "mm"  # the product of the program


def test_products_that_gain_only_with_others_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Any] = []

    def gains(products: Any, regions: Any) -> bool:
        """One product of every trial gains nothing."""
        is_first = not trials or trials[-1] is not regions
        if is_first:
            trials.append(regions)
        return not is_first

    def several(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for weight in weights for part in chunked(x, weight))

    monkeypatch.setattr(packed, "_gains", gains)
    (region,) = explained(several, SHAPES[0], *[SHAPES[1]] * 5).regions
    assert {acc.width for acc in region.spec.accumulators} == {3 * WIDTH}
    assert len(trials) == packed._TRIALS
