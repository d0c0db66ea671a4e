"""Load classes: each spelling on a graph made by hand, and all of them through torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend.backend import cute
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.spec import LoadKind, Stride
from support.fx_walk.exact import K, integers, product_inputs
from support.fx_walk.spellings import COLVEC, EXACT, ROWVEC, SCALAR, SHAPES, SPELLINGS, Spelling
from support.fx_walk.synthetic import BF16, F32, Graph, aten, called, prims, rewritten, run, walk


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_has_its_class_on_a_synthetic_graph(name: str, shape: str, dynamic: bool) -> None:
    (m, n), spelling = SHAPES[shape], SPELLINGS[name]
    given = spelling.view(spelling.tensor(m, n), m, n)
    made = Graph()
    symbols = {size: made.size(f"s{size}", size) for size in {m, n} - {1}} if dynamic else {}
    sizes = [symbols.get(size, size) for size in given.shape]
    strides = [symbols.get(stride, stride) for stride in given.stride()]
    mm = made.mm(symbols.get(m, m), symbols.get(n, n), K)
    load = made.input("load", sizes, strides=strides)
    graph = made.output(made.call(aten.add.Tensor, mm, load))

    guards = list(made.shape_env.guards)
    (region,), rejections = walk(graph)
    assert not rejections
    (spec_load,) = region.spec.loads
    assert spec_load.kind is spelling.kind_at(m, n)
    assert (spec_load.stride_m is not Stride.ZERO) == (spec_load.kind in (COLVEC, EXACT))
    assert (spec_load.stride_n is not Stride.ZERO) == (spec_load.kind in (ROWVEC, EXACT))
    assert called(rewritten(graph)) == ["cute_backend.gemm_epilogue.default"]
    assert made.shape_env.guards == guards

    a, b = product_inputs(m, n)
    (result,) = run(graph, *symbols, a, b, given)
    assert torch.equal(result, (a.float() @ b.float() + given.float()).to(BF16))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_all_spellings_through_torch_compile(shape: str, dynamic: bool, fresh_compiler: None) -> None:
    """One product each, in one graph: every one fused, with its class, and equal to eager to the bit."""
    m, n = SHAPES[shape]
    spellings = list(SPELLINGS.values())
    products = [product_inputs(m, n) for _ in spellings]
    loads = [spelling.tensor(m, n) for spelling in spellings]

    def program(products: list[tuple[Tensor, Tensor]], loads: list[Tensor]) -> list[Tensor]:
        return [
            a @ b + spelling.view(load, a.shape[0], b.shape[1])
            for (a, b), load, spelling in zip(products, loads, spellings, strict=True)
        ]

    expected = program(products, loads)
    results = torch.compile(program, backend=cute, dynamic=dynamic or None)(products, loads)
    for name, result, wanted in zip(SPELLINGS, results, expected, strict=True):
        assert torch.equal(result, wanted), name
        assert result.stride() == wanted.stride(), name
    assert counters["cute_backend"] == {"anchors": len(spellings), "regions": len(spellings)}

    (report,) = collect(program, (products, loads), dynamic=dynamic or None)
    kinds = [region.spec.loads[0].kind for region in report.regions]
    assert kinds == [spelling.kind_at(m, n) for spelling in spellings]


def test_a_load_that_is_read_in_two_ways_is_two_loads() -> None:
    """A (32,) vector and its column meet the same square product."""
    made = Graph()
    mm, vector = made.mm(32, 32, K), made.input("v", (32,))
    column = made.call(aten.unsqueeze.default, vector, 1)
    graph = made.output(made.call(aten.add.Tensor, made.call(aten.mul.Tensor, mm, vector), column))
    (region,), _ = walk(graph)
    assert [(load.name, load.kind) for load in region.spec.loads] == [
        ("rowvec0", ROWVEC),
        ("colvec0", COLVEC),
    ]
    a, b = product_inputs(32, 32)
    vector_value = Spelling(ROWVEC, lambda m, n: (n,), lambda t, m, n: t).tensor(32, 32)
    (result,) = run(rewritten(graph), a, b, vector_value)
    wanted = a.float() @ b.float() * vector_value.float() + vector_value.float()[:, None]
    assert torch.equal(result, wanted.to(BF16))


def test_leading_axes_collapse_to_one_m() -> None:
    """(B, S, N), (B, S, 1), (1, 1, N) on the activations of a 3-D linear."""
    made = Graph()
    view = made.call(aten.reshape.default, made.mm(12, 40, K), [3, 4, 40])
    value = view
    for name, shape in {"plane": (3, 4, 40), "column": (3, 4, 1), "row": (1, 1, 40)}.items():
        value = made.call(aten.add.Tensor, value, made.input(name, shape))
    graph = made.output(value)
    (region,), rejections = walk(graph)
    assert not rejections
    assert [(load.name, load.m_modes) for load in region.spec.loads] == [
        ("exact0", ()),
        ("colvec0", ()),
        ("rowvec0", ()),
    ]
    a, b = product_inputs(12, 40)
    plane, column, row = (
        torch.ones(3, 4, 40).to(BF16),
        torch.arange(12).reshape(3, 4, 1).to(BF16),
        torch.arange(40),
    )
    (result,) = run(rewritten(graph), a, b, plane, column, row.reshape(1, 1, 40).to(BF16))
    wanted = ((a.float() @ b.float()).reshape(3, 4, 40) + plane + column + row).to(BF16)
    assert torch.equal(result, wanted)


BATCHES, ROWS, COLUMNS = 3, 8, 40
Z, S = Stride.ZERO, Stride.OTHER


PER_BATCH = {
    "row_of_a_batch": (integers(BATCHES, 1, COLUMNS), EXACT, (S, Z)),
    "expanded_row_of_a_batch": (integers(BATCHES, 1, COLUMNS).expand(-1, ROWS, -1), EXACT, (S, Z)),
    "strided_row_of_a_batch": (integers(BATCHES, 1, 2 * COLUMNS)[..., ::2], EXACT, (S, Z)),
    "number_of_a_batch": (integers(BATCHES, 1, 1), COLVEC, (S, Z)),
    "row_of_a_place": (integers(1, ROWS, COLUMNS), EXACT, (Z, S)),
    "plane_of_one_batch": (integers(ROWS, COLUMNS), EXACT, (Z, S)),
    "transposed_plane_of_one_batch": (integers(COLUMNS, ROWS).t(), EXACT, (Z, S)),
    "number_of_a_place": (integers(ROWS, 1), COLVEC, (Z, S)),
    "permuted": (integers(ROWS, BATCHES, COLUMNS).transpose(0, 1), EXACT, (S, S)),
    "part_of_longer_batches": (integers(BATCHES, ROWS + 3, COLUMNS)[:, 2:-1], EXACT, (S, S)),
    "column_of_longer_batches": (integers(BATCHES, ROWS + 3, 2)[:, 2:-1, 1:], COLVEC, (S, S)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PER_BATCH)
def test_leading_axes_that_are_not_one_are_modes_of_m(name: str, dynamic: bool) -> None:
    """Over a plane (B * S, N), whatever B and S are when it is called."""
    given, kind, modes = PER_BATCH[name]
    made = Graph()
    batches, rows = (made.size("batches", BATCHES), made.size("rows", ROWS)) if dynamic else (BATCHES, ROWS)
    symbols = {BATCHES: batches, ROWS: rows}
    product = made.mm(batches * rows, COLUMNS, K)
    nodes = [node for node in made.graph.nodes if node.name in ("batches", "rows")]
    view = made.call(aten.reshape.default, product, [*(nodes or (batches, rows)), COLUMNS])
    sizes = [symbols.get(size, size) for size in given.shape]
    load = made.input("load", sizes, strides=given.stride())
    graph = made.output(made.call(aten.add.Tensor, view, load))

    guards = list(made.shape_env.guards)
    (region,), rejections = walk(graph)
    assert not rejections
    (spec_load,) = region.spec.loads
    assert (spec_load.kind, spec_load.m_modes) == (kind, modes)
    assert called(rewritten(graph)) == ["cute_backend.gemm_epilogue.default"]
    assert made.shape_env.guards == guards

    a, b = product_inputs(BATCHES * ROWS, COLUMNS)
    (result,) = run(graph, *([BATCHES, ROWS] if dynamic else []), a, b, given)
    wanted = (a.float() @ b.float()).reshape(BATCHES, ROWS, COLUMNS) + given.float()
    assert torch.equal(result, wanted.to(BF16))


def test_every_leading_axis_is_a_mode() -> None:
    """Of one tensor (1, 4, 1, N) over (2, 4, 3, N) and over (3, 4, 2, N): two loads of one class."""
    made = Graph()
    value, row = made.mm(24, COLUMNS, K), made.input("row", (1, 4, 1, COLUMNS))
    for shape in ([2, 4, 3, COLUMNS], [3, 4, 2, COLUMNS], [3, 4, 2, COLUMNS]):
        value = made.call(aten.add.Tensor, made.call(aten.reshape.default, value, shape), row)
    graph = made.output(value)
    (region,), _ = walk(graph)
    assert [(load.name, load.m_modes) for load in region.spec.loads] == [
        ("exact0", (Z, S, Z)),
        ("exact1", (Z, S, Z)),
    ]
    a, b = product_inputs(24, COLUMNS)
    given = integers(1, 4, 1, COLUMNS)
    (result,) = run(rewritten(graph), a, b, given)
    wanted = (a.float() @ b.float()).reshape(2, 4, 3, COLUMNS) + given
    wanted = wanted.reshape(3, 4, 2, COLUMNS) + 2 * given.float()
    assert torch.equal(result, wanted.to(BF16))


def test_an_axis_of_one_is_no_mode() -> None:
    """(B, 1, 1, N) over (B, 1, S, N): M has two modes, not three."""
    made = Graph()
    view = made.call(aten.reshape.default, made.mm(12, COLUMNS, K), [3, 1, 4, COLUMNS])
    graph = made.output(made.call(aten.mul.Tensor, view, made.input("row", (3, 1, 1, COLUMNS))))
    (region,), _ = walk(graph)
    assert region.spec.loads[0].m_modes == (S, Z)
    a, b = product_inputs(12, COLUMNS)
    given = integers(3, 1, 1, COLUMNS)
    (result,) = run(rewritten(graph), a, b, given)
    assert torch.equal(result, ((a.float() @ b.float()).reshape(3, 1, 4, COLUMNS) * given).to(BF16))


# Gathers: operands that are computed before the kernel, whatever selects them


def gather_inputs() -> dict[str, Tensor]:
    """A product's A and B, of 16 by 24, a table of 64 rows of small integers, and places in it."""
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    a, b = product_inputs(16, 24)
    return {
        "a": a,
        "b": b,
        "table": integers(-30, 31, 64, 24).to(BF16),
        "rows": integers(-64, 64, 16),
        "columns": integers(0, 24, 24),
        "places": integers(0, 64, 16, 24),
        "row": integers(0, 64, 1),
    }


GATHERS: dict[str, tuple[LoadKind, str]] = {
    "rows": (EXACT, "table[rows]"),
    "embedding": (EXACT, "F.embedding(rows % 64, table)"),
    "index_select": (EXACT, "table.index_select(0, rows % 64)"),
    "unsafe": (EXACT, "torch.ops.aten._unsafe_index(table, [rows])"),
    "columns": (EXACT, "table[:16][:, columns]"),
    "both": (EXACT, "table[rows[:, None], columns]"),
    "gather": (EXACT, "table.gather(0, places)"),
    "take": (EXACT, "table.take(places)"),
    "take_along_dim": (EXACT, "table.take_along_dim(places, 0)"),
    "one_row": (ROWVEC, "table[row]"),
    "of_one_row": (ROWVEC, "table[3, columns]"),
    "of_one_column": (COLVEC, "table[rows, 5].unsqueeze(1)"),
    "one_element": (SCALAR, "table[row, 0]"),
    "of_transposed": (EXACT, "table.t()[:, rows].t()"),
    "work_on_it": (EXACT, "table[rows].abs().float()"),
}


def gathering(text: str) -> Callable[..., Tensor]:
    """A product and a sum with the text, which may name the `gather_inputs`; `;` ends a statement."""
    *before, operand = text.split("; ")
    lines = "".join(f"    {line}\n" for line in ["y = a @ b", *before, f"return F.relu(y) + {operand}"])
    namespace = {"torch": torch, "F": torch.nn.functional}
    exec(f"def program({', '.join(gather_inputs())}):\n{lines}", namespace)
    return namespace["program"]  # type: ignore[return-value]


def assert_gathers_as_eager(text: str, dynamic: bool) -> None:
    """To the bit, and so are the inputs that are written."""
    program, given, written = gathering(text), gather_inputs(), gather_inputs()
    result = torch.compile(program, backend=cute, dynamic=dynamic)(*given.values())
    expected = program(*written.values())
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
    assert all(torch.equal(given[name], written[name]) for name in given)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_is_an_operand_like_any_other(name: str, dynamic: bool, fresh_compiler: None) -> None:
    kind, text = GATHERS[name]
    assert_gathers_as_eager(text, dynamic)
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1}
    (report,) = collect(gathering(text), tuple(gather_inputs().values()), dynamic=dynamic)
    (load,) = report.regions[0].spec.loads
    assert load.kind is kind


WRITTEN = {
    "table_before": "table.mul_(2); table[rows]",
    "table_after": "g = table[rows]; table.mul_(2); g",
    "rows_of_it_after": "g = table[rows]; table[rows] = 7; g + table[row]",
    "rows_of_it_before": "table[rows] = 7; g = table[rows]; table.add_(g[0]); g",
    "places_after": "g = table[rows]; rows.fill_(1); g + table[rows]",
    "by_an_op": "g = table[rows]; torch.ops.cute_backend_test.double(table); g + table[rows]",
    "with_the_result": "g = table[rows]; table[:16] = y; g",
}
"""The table or the places are written in place, in front of the gather or behind it."""


@pytest.mark.parametrize("shape", [(8, 48), (1, 8, 48)])
@pytest.mark.parametrize("batches", [1, 4])
def test_work_that_is_done_again_is_broadcast_as_its_result_is(batches: int, shape: tuple[int, ...]) -> None:
    """The result is in memory in fp32, for another reader. Two bytes are read to make it again."""
    made = Graph()
    plane = made.call(aten.reshape.default, made.mm(batches * 8, 48, K), [batches, 8, 48])
    cast = made.call(prims.convert_element_type.default, made.input("load", shape), F32)
    doubled = made.call(aten.abs.default, made.call(aten.add.Tensor, cast, cast))
    graph = made.output(made.call(aten.mul.Tensor, plane, doubled), doubled)
    (region,), rejections = walk(graph)
    assert not rejections and [view.node.name for view in region.views] == ["load"]
    a, b = product_inputs(batches * 8, 48)
    given = integers(*shape)
    result, _ = run(rewritten(graph), a, b, given)
    wanted = (a.float() @ b.float()).reshape(batches, 8, 48) * (given.float() * 2).abs()
    assert torch.equal(result, wanted)


@torch.library.custom_op("cute_backend_test::double", mutates_args={"table"})
def double(table: Tensor) -> None:
    table.mul_(2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_gather_reads_what_was_there(name: str, fresh_compiler: None) -> None:
    assert_gathers_as_eager(WRITTEN[name], False)
    assert counters["cute_backend"]["regions"] == 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "operand",
    [
        "table[y.argmax(-1)]",
        "table[(y[:, 0] > 0).long()]",
        "table[F.relu(y).sum(-1).long() % 64]",
        "F.relu(y)[rows % 16]",
    ],
)
def test_what_the_product_selects_is_selected_after_it(operand: str, fresh_compiler: None) -> None:
    assert_gathers_as_eager(operand, False)
    (report,) = collect(gathering(operand), tuple(gather_inputs().values()))
    assert Reason.CYCLE in [rejection.reason for rejection in report.rejections]
    assert not any(region.spec.loads for region in report.regions)


def test_as_many_rows_as_a_mask_has_are_right(fresh_compiler: None) -> None:
    """How many is known at run time alone."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_gathers_as_eager("table[torch.arange(64) % 4 == 1]", False)
