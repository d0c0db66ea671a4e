"""Async tensor parallelism: torch's pass meets the products that it would meet without this package."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import micro_pipeline_tp

import cute_backend
from cute_backend import config, epilogue_pass
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.runtime.host import notices
from support import ranks
from support.fx_walk.distributed import (
    COLUMNS,
    INTERMEDIATE,
    Block,
    async_tp,
    fake_group,
    moved,
    post_grad_graphs,
    sequence_parallel,
)

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
RANKS = 4

WITH_AG, WITH_RS = "all_gather with products", "reduce_scatter with products"
AG, RS = "all_gather alone", "reduce_scatter alone"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    counters.clear()
    yield
    torch._dynamo.reset()


def block_graphs(backend: str, batch: int, attends: bool, trains: bool) -> list[fx.Graph]:
    module = sequence_parallel(Block(attends).to(BF16)).requires_grad_(trains)
    x = torch.zeros(batch, 64 // dist.get_world_size(), COLUMNS, dtype=BF16, requires_grad=trains)
    return post_grad_graphs(module, (x,), backend)


def counted(graphs: list[fx.Graph]) -> list[Counter[str]]:
    return [moved(graph) for graph in graphs]


def assert_not_worse(ours: list[Counter[str]], theirs: list[Counter[str]]) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our[WITH_AG] >= their[WITH_AG] and our[WITH_RS] >= their[WITH_RS], (our, their)
        assert our[AG] <= their[AG] and our[RS] <= their[RS], (our, their)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_block_overlaps_what_it_overlaps_with_inductor(batch: int, attends: bool, trains: bool) -> None:
    with fake_group(RANKS), async_tp():
        theirs = counted(block_graphs("inductor", batch, attends, trains))
        ours = counted(block_graphs("cute", batch, attends, trains))
    assert_not_worse(ours, theirs)
    layers = 1 + attends
    assert ours[0] == {WITH_AG: layers, WITH_RS: layers}
    assert not trains or ours[1] == {WITH_AG: layers, RS: layers}


def rows_of(quantised: str) -> Callable[..., Tensor]:
    """An MLP on (T, D) in fp8 with scales of tensors or of rows, or in bf16."""
    group = dist.group.WORLD

    def in_fp8(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        if quantised == "rowwise":
            scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
        return (x.float() / scale).clamp(-448, 448).to(E4M3), scale

    def multiply(x: Tensor, scale: Tensor, weight: Tensor, of_weight: Tensor) -> Tensor:
        if quantised == "":
            return x @ weight.to(BF16)
        return torch._scaled_mm(x, weight, scale, of_weight, out_dtype=BF16)

    def program(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, one: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as collectives

        weights = (gate, up, down)
        scales = [one.new_ones(1, each.shape[1]) if quantised == "rowwise" else one for each in weights]
        if quantised == "tensorwise":  # what is gathered is fp8
            a, scale = in_fp8(x, one)
            a = collectives.all_gather_tensor(a, 0, group)
        else:
            a = collectives.all_gather_tensor(x, 0, group)
            a, scale = in_fp8(a, one) if quantised else (a, one)
        h = F.silu(multiply(a, scale, gate, scales[0])) * multiply(a, scale, up, scales[1])
        h, scale = in_fp8(h, one) if quantised else (h, one)
        y = multiply(h, scale, down, scales[2])
        return collectives.reduce_scatter_tensor(y, "sum", 0, group) + x

    return program


@pytest.mark.parametrize(
    "quantised, kinds",
    [
        ("", {WITH_AG: 1, WITH_RS: 1}),
        ("tensorwise", {WITH_AG: 1, WITH_RS: 1}),
        ("rowwise", {AG: 1, WITH_RS: 1}),
    ],
)
def test_rows_in_bf16_and_fp8_overlap_as_with_inductor(quantised: str, kinds: dict[str, int]) -> None:
    dtype = E4M3 if quantised else BF16
    weights = [
        torch.zeros(n, k).to(dtype).t()
        for k, n in ((COLUMNS, INTERMEDIATE), (COLUMNS, INTERMEDIATE), (INTERMEDIATE, COLUMNS))
    ]
    args = (torch.zeros(64, COLUMNS, dtype=BF16), *weights, torch.ones(()))
    with fake_group(RANKS), async_tp(), torch.no_grad():
        theirs = counted(post_grad_graphs(rows_of(quantised), args, "inductor"))
        ours = counted(post_grad_graphs(rows_of(quantised), args, "cute"))
    assert_not_worse(ours, theirs)
    assert ours == [kinds]
    # Rowwise scales follow the gather: products without it are fused.
    assert counters["cute_backend"]["regions"] == (quantised == "rowwise")


def test_without_the_setting_products_are_fused() -> None:
    with fake_group(RANKS), async_tp(), inductor_config.patch(_micro_pipeline_tp=False):
        (graph,) = block_graphs("cute", 1, False, False)
    assert moved(graph) == {AG: 1, RS: 1}
    assert counters["cute_backend"]["regions"] == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("trains", [False, True])
def test_a_group_of_one_rank(trains: bool) -> None:
    with fake_group(1), async_tp():
        theirs = counted(block_graphs("inductor", 1, True, trains))
        ours = counted(block_graphs("cute", 1, True, trains))
    assert_not_worse(ours, theirs)


# What can't be recognised or run


def test_gathers_keep_their_form_if_others_read_them() -> None:
    """The rows are read in the shape in which they were gathered, too."""
    import torch.distributed._functional_collectives as collectives

    def program(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        gathered = collectives.all_gather_tensor(x, 0, dist.group.WORLD)
        return F.linear(gathered.reshape(1, -1, COLUMNS), weight).relu(), gathered.amax(0)

    x, weight = torch.zeros(1, 16, COLUMNS, dtype=BF16), torch.zeros(INTERMEDIATE, COLUMNS, dtype=BF16)
    with fake_group(RANKS), async_tp(), torch.no_grad():
        (theirs,) = post_grad_graphs(program, (x, weight), "inductor")
        (ours,) = post_grad_graphs(program, (x, weight), "cute")
    assert moved(ours) == moved(theirs) == {AG: 1}
    assert counters["cute_backend"]["regions"] == 1


def failing(graph: fx.Graph) -> None:
    """A pass that fails when it has changed a graph."""
    for node in reversed(graph.nodes):
        if node.op == "call_function":
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    raise RuntimeError("planted")


@pytest.mark.parametrize("how", ["moved", "fails"])
def test_without_torchs_pass_the_program_is_right_and_the_lack_is_counted(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_warned", set())
    if how == "moved":
        monkeypatch.delattr(micro_pipeline_tp, "micro_pipeline_tp_pass")
    else:
        monkeypatch.setattr(micro_pipeline_tp, "micro_pipeline_tp_pass", failing)
    with (
        fake_group(RANKS),
        async_tp(),
        config.patch(raise_errors=False),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        (graph,) = block_graphs("cute", 2, False, False)
    assert counters["cute_backend"]["regions"] == 1
    assert counters["cute_backend"]["internal_error"] == 1
    said = [str(each.message) for each in caught if "async tensor parallelism" in str(each.message)]
    assert len(said) == 1 and ("micro_pipeline_tp_pass" if how == "moved" else "planted") in said[0]
    assert moved(graph)[AG] == 1


def test_a_failure_of_torchs_pass_is_raised_if_errors_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_pipeline_tp, "micro_pipeline_tp_pass", failing)
    wanted = config.patch(raise_errors=True)
    with fake_group(RANKS), async_tp(), wanted, pytest.raises(Exception, match="planted"):
        block_graphs("cute", 2, False, False)


# What the user sees, and what caches see


def test_the_refusal_says_that_the_product_is_left_to_async_tensor_parallelism() -> None:
    with fake_group(RANKS), async_tp():
        module = sequence_parallel(Block(False).to(BF16)).requires_grad_(False)
        explained = cute_backend.explain(module, torch.zeros(1, 16, COLUMNS, dtype=BF16))
        block_graphs("cute", 1, False, False)
    assert [each.reason for each in explained.rejections] == [Reason.LEFT_TO_ASYNC_TP] * 2
    assert "fused_all_gather_matmul" in explained.rejections[0].message
    assert counters["cute_backend"]["left_to_async_tp"] == 2
    assert counters["cute_backend"]["opaque_product"] == 0


def test_the_setting_is_part_of_the_key_of_inductors_caches() -> None:
    plain = epilogue_pass.uuid()
    with inductor_config.patch(_micro_pipeline_tp=True):
        assert epilogue_pass.uuid() != plain


# Numbers


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequences", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_two_processes_agree_with_eager(sequences: int) -> None:
    """Forward and backward, over gloo, with the ops of async tensor parallelism, and the guide's training
    step without them."""
    script = ranks.ROOT / "test/support/fx_walk/two_ranks.py"
    printed = ranks.run(script, "--cpu", "--sequences", str(sequences))
    assert printed.count("right") == 4, printed
