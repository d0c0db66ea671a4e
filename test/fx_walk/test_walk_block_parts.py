"""Work on a part of each head's columns, such as rotary embeddings of the first columns of a head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.backend import cute
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.kinds.blocks import PART, ROTATE_FIRST, ROTATE_HALF
from cute_backend.kinds.results import Heads
from cute_backend.planning import Arch, tile_table
from cute_backend.spec import Blocks, Stride
from support.fx_walk.exact import integers, product_inputs
from support.model_files import load_architecture

pytestmark = pytest.mark.settings(rotary_embeddings="always")

BATCHES, PLACES, HEADS, WIDTH, TURNED = 2, 4, 3, 64, 32
M, N = BATCHES * PLACES, HEADS * WIDTH
COS, SIN = integers(1, PLACES, TURNED), integers(1, PLACES, TURNED) - 1


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def heads(y: Tensor, width: int = WIDTH) -> Tensor:
    return y.view(BATCHES, PLACES, -1, width).transpose(1, 2)


def turned(x: Tensor, rotate: Callable[[Tensor], Tensor] = rotate_half) -> Tensor:
    cos, sin = (each.unsqueeze(1)[..., : x.shape[-1]] for each in (COS, SIN))
    return x * cos + rotate(x) * sin


def as_gpt_neox(y: Tensor) -> Tensor:
    q = heads(y)
    rot, passed = q[..., :TURNED], q[..., TURNED:]
    return torch.cat([turned(rot), passed], dim=-1)


def as_glm(y: Tensor) -> Tensor:
    q = heads(y)
    return torch.cat([turned(q[..., :TURNED], rotate_every_two), q[..., TURNED:]], dim=-1)


def as_deepseek(y: Tensor) -> Tensor:
    """The last columns of each head are rotated."""
    passed, rot = heads(y).split([WIDTH - TURNED, TURNED], dim=-1)
    return torch.cat((passed, turned(rot)), dim=-1)


def as_gptj(y: Tensor) -> Tensor:
    """Heads stay behind places."""
    q = y.view(BATCHES, PLACES, HEADS, WIDTH)
    cos, sin = (each.unsqueeze(2) for each in (COS, SIN))
    rot = q[:, :, :, :TURNED]
    return torch.cat([rot * cos + rotate_every_two(rot) * sin, q[:, :, :, TURNED:]], dim=-1)


def of_a_head_norm(y: Tensor) -> Tensor:
    q = heads(y).float()
    q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * integers(WIDTH)
    return torch.cat((turned(q[..., :TURNED]), q[..., TURNED:]), -1).to(y.dtype)


def by_chunk_both(y: Tensor) -> Tensor:
    first, second = heads(y).chunk(2, -1)
    return torch.cat((turned(first), second.relu() * 2), -1)


def three_parts(y: Tensor) -> Tensor:
    first, second, third = heads(y).split([16, 16, 32], -1)
    return torch.cat((first + 1, turned(second), third.neg()), -1)


def from_the_end(y: Tensor) -> Tensor:
    q = heads(y)
    return torch.cat((q[..., :-TURNED], turned(q[..., -TURNED:])), -1)


def without_rotation(y: Tensor) -> Tensor:
    q = heads(y)
    return torch.cat((q[..., :24] * integers(1, 1, 1, 24)[..., :1], q[..., 24:] + 1), -1)


def of_the_whole_row(y: Tensor) -> Tensor:
    """One head, as the keys of multi-query attention."""
    q = heads(y, N)
    return torch.cat((turned(q[..., :TURNED]), q[..., TURNED:]), -1)


SPELLINGS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "GPT-NeoX": (as_gpt_neox, TURNED),
    "GLM": (as_glm, 2),
    "DeepSeek": (as_deepseek, TURNED),
    "GPT-J": (as_gptj, 2),
    "norm": (of_a_head_norm, TURNED),
    "chunk": (by_chunk_both, TURNED),
    "three parts": (three_parts, 16),
    "from the end": (from_the_end, TURNED),
    "no rotation": (without_rotation, 0),
    "the whole row": (of_the_whole_row, TURNED),
}


def test_every_spelling_through_torch_compile(fresh_compiler: None) -> None:
    """One product each, in one graph: each is one kernel, and gives what eager does."""
    products = [product_inputs(M, N) for _ in SPELLINGS]

    def program(products: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        spellings = [spelling for spelling, _ in SPELLINGS.values()]
        return [spelling(a @ b) for (a, b), spelling in zip(products, spellings, strict=True)]

    results, expected = torch.compile(program, backend=cute)(products), program(products)
    for name, result, wanted in zip(SPELLINGS, results, expected, strict=True):
        assert result.dtype is wanted.dtype and result.stride() == wanted.stride(), name
        torch.testing.assert_close(result.float(), wanted.float(), rtol=1e-2, atol=1e-2, msg=name)
    assert counters["cute_backend"] == {"anchors": len(SPELLINGS), "regions": len(SPELLINGS)}
    (report,) = collect(program, (products,))
    columns = [region.spec.halved_columns for region in report.regions]
    assert sorted(columns) == sorted(each for _, each in SPELLINGS.values())
    parts = [{op.block for op in region.spec.ops if op.op == PART.name} for region in report.regions]
    assert sorted(parts, key=max) == [{WIDTH}] * (len(SPELLINGS) - 1) + [{N}]


def test_the_cosines_are_those_of_a_part() -> None:
    """They are read for all columns, as if each part of a head were the rotated one."""
    (report,) = collect(lambda a, b: as_gpt_neox(a @ b), product_inputs(M, N))
    (region,) = report.regions
    assert [load.blocks for load in region.spec.loads] == [Blocks(TURNED, Stride.ZERO, Stride.ONE)] * 2


def of_the_first(columns: int, width: int = WIDTH) -> Callable[[Tensor, Tensor], Tensor]:
    def program(a: Tensor, b: Tensor) -> Tensor:
        q = (a @ b).unflatten(-1, (-1, width))
        return torch.cat((rotate_half(q[..., :columns]), q[..., columns:]), -1) * 2

    return program


def with_weights_of_heads(a: Tensor, b: Tensor) -> Tensor:
    q = (a @ b).unflatten(-1, (-1, WIDTH))
    return torch.cat((q[..., :16] * integers(HEADS, 16), q[..., 16:]), -1)


def with_an_irregular_weight(a: Tensor, b: Tensor) -> Tensor:
    q = (a @ b).unflatten(-1, (-1, WIDTH))
    return torch.cat((q[..., :16], q[..., 16:] * integers(48)), -1)


def with_a_norm_of_a_part(a: Tensor, b: Tensor) -> Tensor:
    q = (a @ b).unflatten(-1, (-1, WIDTH))
    first = q[..., :16]
    return torch.cat((first - first.amax(-1, keepdim=True), q[..., 16:]), -1)


def in_another_order(a: Tensor, b: Tensor) -> Tensor:
    q = (a @ b).unflatten(-1, (-1, WIDTH))
    return torch.cat((q[..., 16:] * 2, q[..., :16]), -1)


def a_part_of_another_product(a: Tensor, b: Tensor) -> Tensor:
    q, k = ((a @ each).unflatten(-1, (-1, WIDTH)) for each in (b, b + 1))
    return torch.cat((q[..., :16] * 2, k[..., 16:]), -1)


@pytest.mark.parametrize(
    ("program", "reason", "said"),
    [
        (of_the_first(6, 48), Reason.ROTATION_SIZE, "of 6 columns"),
        (of_the_first(22, 64), Reason.ROTATED_PART, "halves of columns [0:22] of 64"),
        (with_weights_of_heads, Reason.PART_OPERAND, "along columns [0:16] of 64"),
        (with_an_irregular_weight, Reason.PART_OPERAND, "along columns [16:64] of 64"),
        (with_a_norm_of_a_part, Reason.REDUCED_PART, "reduces columns [0:16] of 64"),
        pytest.param(
            *(in_another_order, Reason.UNPAIRED, "takes a part"),
            marks=pytest.mark.settings(shared_launches=False),  # a division of the product would say less
        ),
        (a_part_of_another_product, Reason.UNPAIRED, "takes a part"),
    ],
)
def test_other_parts_are_refused(program: Callable[..., object], reason: Reason, said: str) -> None:
    """By what contradicts, and nothing selects columns then."""
    (report,) = collect(program, product_inputs(M, N), arch="sm_90a")
    messages = [each.message for each in report.rejections if each.reason is reason]
    assert any(said in each for each in messages), report.rejections
    assert not any(op.op == PART.name for region in report.regions for op in region.spec.ops)


def test_a_part_that_is_read_elsewhere_is_taken_from_the_product(fresh_compiler: None) -> None:
    """No kernel stores a part: the region writes the product, of which it is a view."""

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        q = heads(a @ b)
        rot, passed = q.split([TURNED, WIDTH - TURNED], dim=-1)
        return torch.cat((turned(rot), passed), -1), rot.cumsum(1)

    inputs = product_inputs(M, N)
    for result, right in zip(torch.compile(program, backend=cute)(*inputs), program(*inputs), strict=True):
        assert torch.equal(result, right)


def rotated_by_tables(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GPT-NeoX, for any number of positions."""
    q = F.linear(x, w).view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
    rot = q[..., :TURNED]
    rot = rot * cos.unsqueeze(1) + rotate_half(rot) * sin.unsqueeze(1)
    return torch.cat((rot, q[..., TURNED:]), dim=-1)


def of_positions(batches: int, places: int, tables: int = 1) -> list[Tensor]:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(places)
    shapes = (batches, places, 48), (N, 48), *[(tables, places, TURNED)] * 2
    return [torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("batches", [1, 3])
def test_one_kernel_rotates_every_number_of_positions(batches: int, fresh_compiler: None) -> None:
    """S is all rows of one batch, or those of the cosines that all batches share."""
    (report,) = collect(rotated_by_tables, of_positions(batches, 40), dynamic=True)
    (region,) = report.regions
    assert [store.form for store in region.spec.stores] == [Heads(0, WIDTH)]
    fn = torch.compile(rotated_by_tables, backend=cute, dynamic=True)
    for places in (40, 100, 7):
        args = of_positions(batches, places)
        assert torch.equal(fn(*args), rotated_by_tables(*args))
    assert counters["cute_backend"]["regions"] == 1


def test_positions_that_no_operand_counts_are_refused() -> None:
    """Cosines of each batch have one stride along all rows, so nothing says where a batch ends."""
    (report,) = collect(rotated_by_tables, of_positions(3, 40, 3), dynamic=True)
    (message,) = (each.message for each in report.rejections if each.reason is Reason.OUTPUT_LAYOUT)
    assert "if S is a number, B is 1, or the result is computed from an operand that all batches" in message
    assert not report.regions


MODELS = ("phi", "stablelm", "nemotron", "glm4", "gptj", "gpt_neox")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS])
def test_models_rotate_a_part_of_their_heads_in_the_kernel(name: str) -> None:
    """Queries and keys of one layer, in one launch with the values."""
    module, args = load_architecture(name)
    with config.patch(shared_launches=True):  # type: ignore[attr-defined]
        (report,) = collect(module, args)
    rotated = [op for region in report.regions for op in region.spec.ops if op.op == ROTATE_HALF.name]
    parts = [op for region in report.regions for op in region.spec.ops if op.op == PART.name]
    assert len(rotated) == len(parts) == 2
    assert not {each.reason for each in report.rejections} & {Reason.UNPAIRED, Reason.ROTATION_SIZE}


FIRST = [(24, 96), (32, 80), (20, 80), (24, 64), (12, 32), (80, 80)]


def of_first(count: int, columns: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A program that rotates the first `count` of `columns` columns of three heads, and its inputs."""

    def program(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = heads(a @ b, columns)
        rot, passed = q[..., :count], q[..., count:]
        rot = rot * cos + rotate_half(rot) * sin
        return torch.cat((rot, passed), -1) if count < columns else rot

    tables = integers(1, 1, PLACES, count), integers(1, 1, PLACES, count) - 1
    return program, (*product_inputs(M, 3 * columns), *tables)


def test_first_columns_through_torch_compile(fresh_compiler: None) -> None:
    """One product each, in one graph: each is one kernel, and gives what eager does."""
    made = [of_first(*sizes) for sizes in FIRST]

    def program(inputs: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [each(*given) for (each, _), given in zip(made, inputs, strict=True)]

    inputs = [given for _, given in made]
    results, expected = torch.compile(program, backend=cute)(inputs), program(inputs)
    for sizes, result, wanted in zip(FIRST, results, expected, strict=True):
        assert result.stride() == wanted.stride() and torch.equal(result, wanted), sizes
    assert counters["cute_backend"] == {"anchors": len(FIRST), "regions": len(FIRST)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("count", "columns"), FIRST)
def test_hopper_exchanges_halves_of_first_columns(count: int, columns: int) -> None:
    """Tables have these columns alone, and a tile serves the region. Data center Blackwell orders whole heads
    of 80 columns by TMA."""
    program, inputs = of_first(count, columns)
    (region,) = collect(program, inputs, arch="sm_90a")[0].regions
    assert [op.block for op in region.spec.ops if op.op == ROTATE_FIRST.name] == [columns]
    period = columns if count < columns else 0
    assert {load.blocks for load in region.spec.loads} == {Blocks(count, Stride.ZERO, Stride.ONE, period)}
    assert tile_table(Arch.SM90A, region.spec)
    elsewhere = collect(program, inputs, arch="sm_100a")[0].regions
    exchanged = [op.op for region in elsewhere for op in region.spec.ops if op.op == ROTATE_FIRST.name]
    assert len(exchanged) == (count < columns)
    assert not collect(program, inputs, arch="sm_80")[0].regions


def test_two_tables_leave_one_result() -> None:
    """In visits of 80 columns, beside which the residual would be a third plane that is read."""

    rotated, inputs = of_first(32, 80)

    def program(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor, residual: Tensor) -> Tensor:
        return rotated(a, b, cos, sin) + residual

    (report,) = collect(program, (*inputs, heads(integers(M, 240), 80)), arch="sm_90a")
    assert all(tile_table(Arch.SM90A, region.spec) for region in report.regions)
    assert Reason.BLOCK_SIZE in [each.reason for each in report.rejections]


def test_a_weight_of_first_columns_is_read_for_each_block() -> None:
    """A vector has one element for each column: of columns [0:24] of 64 there is none."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        q = heads(a @ b)
        return torch.cat((q[..., :24] * integers(24), q[..., 24:] + 1), -1)

    (report,) = collect(program, product_inputs(M, N), arch="sm_90a")
    assert Reason.PART_OPERAND in [each.reason for each in report.rejections]


def attention_inputs(
    qkv: Callable[..., object], tokens: int, columns: int, count: int, hidden: int
) -> tuple[Callable[..., object], tuple[Tensor, ...]]:
    tables = torch.empty(2, 1, 1, tokens, count, dtype=torch.bfloat16).unbind()
    weights = torch.empty(3 * hidden // columns * columns, hidden, dtype=torch.bfloat16)
    return qkv, (torch.empty(1, tokens, hidden, dtype=torch.bfloat16), weights, *tables)


def packed_by_heads(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As GPT-NeoX-20B: the query, key and value of each head are side by side."""
    columns = 80 if x.shape[-1] % 96 else 96
    q, k, v = F.linear(x, w).unflatten(-1, (-1, 3 * columns)).transpose(1, 2).chunk(3, -1)
    count = cos.shape[-1]

    def turn(y: Tensor) -> Tensor:
        rot = y[..., :count]
        return torch.cat((rot * cos + rotate_half(rot) * sin, y[..., count:]), -1)

    return turn(q), turn(k), v


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("columns", "count", "hidden"), [(96, 24, 6144), (80, 32, 2560), (80, 20, 2560), (80, 80, 2560)]
)
@pytest.mark.parametrize(("tokens", "shares"), [(16, True), (64, True), (256, False), (2048, False)])
def test_packed_heads_are_rotated_where_the_tile_costs_less(
    columns: int, count: int, hidden: int, tokens: int, shares: bool
) -> None:
    """For many tokens, the tiles of packed heads take longer than the best tile and a kernel that rotates."""
    program, inputs = attention_inputs(packed_by_heads, tokens, columns, count, hidden)
    with config.patch(shared_launches=True, rotary_embeddings="auto"):
        regions = collect(program, inputs, arch="sm_90a")[0].regions
    assert [len(region.spec.accumulators) for region in regions if region.spec.moves_columns] == [3] * shares
    for region in regions:
        assert all(region.spec.fits_visit(config.subtile_n) for config in tile_table(Arch.SM90A, region.spec))
