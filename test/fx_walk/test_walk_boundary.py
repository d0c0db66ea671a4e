"""Where regions end: what each case launches and moves, counted on Inductor's own schedule.

Bytes are counted per element of the (M, N) plane. A bare product reads and
writes the same bytes on both sides of each comparison.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from cute_backend import config
from cute_backend.fx_walk.ends import settle
from cute_backend.fx_walk.ends.boundary import Boundary, Choices, Limits, cheapest_stores
from cute_backend.fx_walk.ends.consumers import reduces
from cute_backend.fx_walk.ends.launches import launches
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import Arch
from cute_backend.spec import Axis, DType, LoadKind
from support.fx_walk.synthetic import Graph, aten, prims, walk
from support.traffic import Traffic, alone, fused

pytestmark = pytest.mark.usefixtures("no_blocks")

BF16 = torch.bfloat16
M, N, K, RANK = 128, 80, 40, 8


def planes(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(torch.ones(shape, dtype=dtype) for shape in shapes)


def of_an_element(traffic: Traffic) -> float:
    return traffic.bytes / (M * N)


def formulas(traffic: Traffic) -> list[list[str]]:
    return [kernel_formula(region.spec).splitlines() for region in traffic.regions]


def low_rank(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w + 0.5 * ((x @ a) @ b)


ADAPTED = ((K, N), (K, RANK), (RANK, N))


def test_the_larger_product_takes_what_follows_where_lora_adds_a_small_one() -> None:
    """The small one's result is an operand, as the larger one's was before; no byte more crosses."""
    args = planes((M, K), *ADAPTED)
    ours, theirs = fused(low_rank, args), alone(low_rank, args)
    assert [(region.problem[2], kernel_formula(region.spec)) for region in ours.regions] == [
        (K, "out0 = bf16(acc + exact0)"),
        (RANK, "out0 = bf16(acc * 0.5)"),
    ]
    assert (theirs.kernels, ours.kernels) == (4, 3)
    assert of_an_element(theirs) - of_an_element(ours) == 4


def test_gate_and_up_with_lora_are_a_pair() -> None:
    def gated(x: Tensor, *weights: Tensor) -> Tensor:
        return F.silu(low_rank(x, *weights[:3])) * low_rank(x, *weights[3:])

    args = planes((M, K), *ADAPTED, *ADAPTED)
    ours, theirs = fused(gated, args), alone(gated, args)
    pair = max(ours.regions, key=lambda region: len(region.products))
    assert kernel_formula(pair.spec).splitlines() == [
        "t0 = acc0 + exact0",
        "out0 = bf16(t0 / (exp(-t0) + 1) * (acc1 + exact1))",
    ]
    assert (theirs.kernels, ours.kernels) == (9, 4)  # x times both small matrices is one launch
    assert of_an_element(theirs) - of_an_element(ours) > 16


def test_a_cast_that_is_read_in_blocks_is_no_region() -> None:
    """Whoever reads it casts as it reads, also where a view lies between."""

    def sums_of_blocks(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).float().view(M, -1, 20).sum(-1)

    args = planes((M, K), (K, N))
    with config.patch(block_reductions="always"):
        ours, theirs = fused(sums_of_blocks, args), alone(sums_of_blocks, args)
    assert not ours.regions
    assert [rejection.reason for rejection in ours.rejections] == [
        Reason.NOTHING_TO_FUSE,
        Reason.LEFT_TO_USERS,
        Reason.BLOCK_SIZE,
    ]
    assert (ours.kernels, ours.bytes) == (theirs.kernels, theirs.bytes)


@pytest.mark.parametrize("how", ["padded", "moved"])
def test_a_cast_is_not_written_for_a_kernel_that_copies_it(how: str) -> None:
    """Linear attention, as Sana's, pads values and moves keys, in fp32, before a product reads them."""

    def attention(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
        heads = torch.relu(x @ w).view(2, 64, 4, 20).permute(0, 2, 1, 3).float()
        if how == "moved":
            return heads @ other
        return F.pad(heads, (0, 0, 0, 1), value=1.0) @ other

    args = (*planes((M, K), (K, N)), torch.ones(2, 4, 20, 16))
    ours, theirs = fused(attention, args), alone(attention, args)
    assert ours.kernels <= theirs.kernels and ours.bytes <= theirs.bytes
    assert all(store.dtype is DType.BF16 for region in ours.regions for store in region.spec.stores)


def test_work_on_a_stored_operand_is_done_again_where_its_result_is_wider() -> None:
    """The plane of tanh is written for the caller, in fp32; the kernel reads the operand in bf16."""

    def scaled(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.tanh(p.float())
        return ((a @ b) * factor).bfloat16(), factor

    args = planes((M, K), (K, N), (M, N))
    ours, theirs = fused(scaled, args), alone(scaled, args)
    assert formulas(ours) == [["out0 = bf16(acc * tanh(exact0))"]]
    assert [load.dtype for load in ours.regions[0].spec.loads] == [DType.BF16]
    assert theirs.kernels == ours.kernels and of_an_element(theirs) - of_an_element(ours) == 2


def gated_backward(dy: Tensor, w: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """The gradients of silu(gate) * up and, for the gradient of w, that product once more."""
    wide, wide_up, dh = gate.float(), up.float(), (dy @ w).float()
    s = torch.sigmoid(wide)
    act = wide * s
    slope = s * (1 + wide * (1 - s))
    dw = dy.t() @ (act * wide_up).bfloat16()
    return (dh * act).bfloat16(), (dh * wide_up * slope).bfloat16(), (dh * s).bfloat16(), dw


def test_a_gated_backward_reads_gate_and_up_and_not_what_follows_from_them() -> None:
    args = planes((M, K), (K, N), (M, N), (M, N))
    ours, theirs = fused(gated_backward, args), alone(gated_backward, args)
    (region,) = ours.regions
    assert [(load.kind, load.dtype) for load in region.spec.loads] == [(LoadKind.EXACT, DType.BF16)] * 2
    assert len(region.spec.stores) == 3
    assert ours.kernels == theirs.kernels and ours.bytes <= theirs.bytes
    with config.patch(max_exact_loads=2):
        assert fused(gated_backward, args).regions[0].spec == region.spec


@pytest.mark.parametrize("one_weight", [True, False])
def test_the_gradients_of_gate_and_up_are_written_once(one_weight: bool) -> None:
    """Those of one weight are joined: the kernel writes each into its half of one result."""

    def gated(x: Tensor, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
        halves = F.linear(x, w).chunk(2, -1) if one_weight else (F.linear(x, w), F.linear(x, up))
        return F.linear(F.silu(halves[0]) * halves[1], down)

    args = planes((M, K), (2 * N if one_weight else N, K), (N, K), (K, N))
    trained = tuple(arg.requires_grad_() for arg in args)
    ours, theirs = fused(gated, trained), alone(gated, trained)
    assert theirs.kernels - ours.kernels == (2 if one_weight else 3)
    assert of_an_element(theirs) - of_an_element(ours) >= 8


LOGSUMEXP = "row_logsumexp(tanh(t0 / 30) * 30)"
"""The logsumexp of a softcapped row. Zero times it makes an infinite one NaN, as torch's is."""


def test_a_softcapped_loss_writes_no_logits() -> None:
    """Inductor writes the loss with two branches, each with its own multiple of tanh in fp32."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = 30 * torch.tanh((x @ w).float() / 30)
        return F.cross_entropy(logits, target)

    args = (*planes((M, K), (K, N)), torch.zeros(M, dtype=torch.long))
    ours, theirs = fused(loss, args), alone(loss, args)
    picked = "bf16(row_max(where(column == colvec0, t0, -inf)))"
    assert formulas(ours) == [
        ["t0 = bf16(acc)", f"out0 = f32(nan_if_infinite({LOGSUMEXP}))", f"out1 = {picked}"]
    ]
    assert ours.kernels == theirs.kernels + 1 and of_an_element(theirs) - of_an_element(ours) > 11.5
    trained = tuple(arg.clone().requires_grad_(arg.is_floating_point()) for arg in args)
    ours, theirs = fused(loss, trained), alone(loss, trained)
    assert ours.kernels == theirs.kernels + 1 and ours.bytes < 0.75 * theirs.bytes


def test_a_softcap_in_16_bits_is_written_before_it_grows() -> None:
    """Both branches follow from tanh, which the kernel writes."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((30 * torch.tanh((x @ w) / 30)).float(), target)

    args = (*planes((M, K), (K, N)), torch.zeros(M, dtype=torch.long))
    ours, theirs = fused(loss, args), alone(loss, args)
    assert formulas(ours) == [["out0 = bf16(tanh(acc / 30))"]]
    assert ours.kernels == theirs.kernels and of_an_element(theirs) - of_an_element(ours) == 2


def test_the_backward_pass_of_a_layer_norm_sums_columns_in_the_kernel() -> None:
    """The row kernel reads its addends anyway; the rounded sums over rows would be one more kernel."""

    def normed(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, after: Tensor) -> Tensor:
        return F.layer_norm(x @ w, (N,), scale, shift) @ after

    args = tuple(arg.requires_grad_() for arg in planes((M, K), (K, N), (N,), (N,), (N, N)))
    ours, theirs = fused(normed, args), alone(normed, args)
    (region,) = ours.regions
    reduced = [store.form.reduction and store.form.reduction.axis for store in region.spec.stores]
    assert reduced.count(Axis.COLUMN) == 2 and reduced.count(None) == 1
    assert all(store.dtype is DType.BF16 for store in region.spec.stores if store.form.reduction is None)
    assert ours.kernels == theirs.kernels and ours.bytes < theirs.bytes


@pytest.mark.parametrize(
    ("m", "n", "has_maxima"),
    [(64, 14336, False), (8192, 14336, True), (8192, 4104, True), (8192, 4096, False)],
)
def test_row_maxima_come_from_the_kernel_where_their_launch_costs_less_than_a_second_reading(
    m: int, n: int, has_maxima: bool
) -> None:
    """A reader that divides rows by their maxima reads them twice where the kernel stores no maxima, unless
    they have at most 8 KiB."""
    made = Graph()
    rows = made.call(aten.relu.default, made.mm(m, n))
    made.output(made.call(aten.div.Tensor, rows, made.call(aten.amax.default, rows, [1], True)))
    (region,), _ = walk(made.graph)
    assert [bool(store.form.reduction) for store in region.spec.stores] == [False] + has_maxima * [True]


@pytest.mark.parametrize("columns", [4096, 4104])
def test_a_mean_square_is_of_rows_as_long_as_memory_has_them(columns: int) -> None:
    """The squares are in fp32; the bytes are those of the plane that is read, in bf16."""
    made = Graph()
    wide = made.call(prims.convert_element_type.default, made.mm(8192, columns), torch.float32)
    mean = made.call(aten.mean.dim, made.call(aten.mul.Tensor, wide, wide), [1], True)
    made.output(made.call(aten.mul.Tensor, wide, made.call(aten.rsqrt.default, mean)))
    found, _ = walk(made.graph)
    assert sum(len(region.spec.reductions) for region in found) == (columns > 4096)


@pytest.mark.parametrize("dim", [None, -1])
def test_the_scale_of_a_quantisation_costs_no_launch_of_its_own(dim: int | None) -> None:
    """The kernel that finishes the maxima writes scales, which are all that is needed outside. Those of rows
    are finished by rows' last tiles."""

    def scaled(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(a @ b)
        largest = y.abs().max() if dim is None else y.abs().amax(dim)
        return y, largest.float().clamp(min=1e-12) / 448

    args = planes((M, K), (K, N))
    ours, theirs = fused(scaled, args), alone(scaled, args)
    kind = "all" if dim is None else "row"
    assert formulas(ours)[0][-1] == f"out1 = f32(maximum(bf16({kind}_max(abs(t0))), 1e-12) / 448)"
    assert ours.kernels == (2 if dim is None else 1) < theirs.kernels
    assert ours.bytes < theirs.bytes


def test_work_on_results_of_two_reductions_is_left() -> None:
    def of_both(a: Tensor, b: Tensor) -> Tensor:
        y = torch.relu(a @ b).float()
        return (y.amax(-1) - y.mean(-1)) * 2

    args = planes((M, K), (K, N))
    ours, theirs = fused(of_both, args), alone(of_both, args)
    assert all(not store.after for region in ours.regions for store in region.spec.stores)
    assert ours.kernels <= theirs.kernels + 1 and ours.bytes <= theirs.bytes


def test_maxima_that_nothing_combines_with_their_rows_come_from_the_kernel_at_any_length() -> None:
    made = Graph()
    rows = made.call(aten.relu.default, made.mm(8192, 4096))
    made.output(rows, made.call(aten.amax.default, rows, [1]))
    (region,), _ = walk(made.graph)
    assert len(region.spec.reductions) == 1


def choices_of(
    graph: fx.Graph, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)
) -> list[Choices]:
    """The choices that a graph gives to the search for the ends of its regions."""
    found: list[Choices] = []

    def recorded(choices: Choices, room: Limits) -> Boundary | None:
        found.append(choices)
        return cheapest_stores(choices, room)

    monkeypatch.setattr(settle, "cheapest_stores", recorded)
    walk(graph, capability=capability)
    return found


@pytest.mark.parametrize(
    ("m", "n", "axis", "capability", "apart"),
    [
        (64, 1024, 1, (9, 0), False),
        (64, 1088, 1, (9, 0), True),
        (8192, 3072, 1, (9, 0), False),
        (8192, 4096, 1, (9, 0), True),
        (8192, 4104, 1, (9, 0), True),
        (64, 1024, 0, (9, 0), True),
        (64, 1024, 1, (10, 0), True),
        (64, 1024, 1, (8, 0), True),
    ],
)
def test_the_launch_that_finishes_a_reduction_is_the_one_that_the_plan_has(
    m: int, n: int, axis: int, capability: tuple[int, int], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search expects what the plan of the region's kernel then says."""
    made = Graph()
    rows = made.call(aten.relu.default, made.mm(m, n, 4096, device="cuda"))
    graph = made.output(rows, made.call(aten.amax.default, rows, [axis]))
    (choices,) = choices_of(graph, monkeypatch, capability)
    assert [value.apart for value in choices.values if value.is_reduced] == [apart]
    (region,), _ = walk(graph, capability=capability)
    assert len(region.spec.reductions) == 1
    assert launches(region, Arch.of_capability(capability)) == 1 + apart


def test_what_crosses_is_counted_alike_for_any_m_where_results_are_to_be_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(m: int) -> list[Choices]:
        made = Graph()
        total = made.call(aten.sum.dim_IntList, made.call(aten.relu.default, made.mm(m)), [1])
        return choices_of(made.output(total), monkeypatch)

    assert asked(64) != asked(128)
    with config.patch(batch_invariant=True):
        assert asked(64) == asked(128) != []


@pytest.mark.parametrize(
    ("shape", "dims", "loops"),
    [((64, 7), [1], False), ((64, 8), [1], True), ((3, 4, 2), [1, 2], True), ((3, 2, 2), [], True)],
)
def test_inductor_writes_short_reductions_out(shape: tuple[int, ...], dims: list[int], loops: bool) -> None:
    """Below eight elements, which is the default of `unroll_reductions_threshold`."""
    made = Graph()
    total = made.call(aten.sum.dim_IntList, made.input("x", shape), dims)
    assert reduces(total) is loops


def test_a_reduction_of_unknown_size_is_a_loop() -> None:
    made = Graph()
    size = made.size("s", 4)
    assert reduces(made.call(aten.sum.dim_IntList, made.input("x", (64, size)), [1]))


def test_pooled_tokens_are_all_that_is_written() -> None:
    def pooled(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).mean(1)

    x, w = planes((4, M, K), (K, N))
    ours, theirs = fused(pooled, (x, w)), alone(pooled, (x, w))
    assert formulas(ours) == [["out0 = bf16(column_mean128(tanh(acc)))"]]
    assert theirs.kernels == ours.kernels == 2  # the kernel that finishes the means counts
    assert theirs.bytes - ours.bytes == 2 * 2 * 4 * M * N


def many_gradients(a: Tensor, b: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Three planes and two sums of columns, from a product and five planes."""
    y = (a @ b).float()
    first = y * given[0] + given[1]
    second = first * given[2]
    third = second * torch.tanh(given[3]) + given[4]
    return first.bfloat16(), second.bfloat16(), third.bfloat16(), first.sum(0), (second * third).sum(0)


def test_reductions_take_no_room_from_planes() -> None:
    """Shared memory holds eight bf16 planes, and the sums of columns leave the kernel beside them."""
    args = (*planes((M, K), (K, N)), *planes(*[(M, N)] * 5))
    ours, theirs = fused(many_gradients, args), alone(many_gradients, args)
    (region,) = ours.regions
    assert [store.form.reduction is None for store in region.spec.stores] == [True] * 3 + [False] * 2
    assert len(region.spec.loads_of(LoadKind.EXACT)) == 5
    assert ours.kernels < theirs.kernels and ours.bytes < theirs.bytes
    with config.patch(max_stores=4):
        few = fused(many_gradients, args)
    assert few.kernels >= ours.kernels and few.bytes > ours.bytes


def chain_of_planes(a: Tensor, b: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Reads a plane for each step, and returns the last two values; the value before the sixth is narrow."""
    y = (a @ b).float()
    for plane in given[:5]:
        y = y * plane + 1.0
    narrow = y.to(torch.float8_e4m3fn)
    y = narrow.float()
    for plane in given[5:]:
        y = torch.tanh(y) * plane
    return (y.bfloat16(),)


def test_a_region_with_too_many_planes_ends_where_the_fewest_bytes_cross() -> None:
    args = (*planes((M, K), (K, N)), *planes(*[(M, N)] * 12))
    ours = fused(chain_of_planes, args)
    (region,) = ours.regions
    assert [store.dtype for store in region.spec.stores] == [DType.E4M3]
    assert len(region.spec.loads_of(LoadKind.EXACT)) == 5
    (refused,) = (each for each in ours.rejections if each.reason is Reason.TOO_MANY_LOADS)
    assert f"results of {2 * M * N} bytes are left to other kernels" in refused.message
    with config.patch(max_exact_loads=12):
        (whole,) = fused(chain_of_planes, args).regions
    assert [store.dtype for store in whole.spec.stores] == [DType.BF16]


def test_a_cast_of_a_vector_in_memory_is_no_kernel() -> None:
    """The derivative of a layer norm reads the statistics that the forward pass kept, in fp32 and rounded."""

    def scaled(a: Tensor, b: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        rounded = deviation.bfloat16()
        return torch.relu(a @ b) * rounded, torch.tanh(rounded)

    args = (*planes((M, K), (K, N)), *planes((M, 1), dtype=torch.float32))
    ours, theirs = fused(scaled, args), alone(scaled, args)
    (region,) = ours.regions
    assert [load.dtype for load in region.spec.loads] == [DType.F32]
    assert (ours.kernels, theirs.kernels) == (2, 3)


def test_an_op_on_a_vector_that_heads_share_is_no_kernel() -> None:
    """Gemma's norms by head multiply by 1 + w, in fp32. An op that reads two vectors stays a kernel, and so
    does one on a vector of all columns."""

    def scaled(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return torch.relu(a @ b).unflatten(1, (-1, w.shape[0])) * (1 + w.float())

    def twice(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.relu(a @ b).unflatten(1, (-1, w.shape[0])) * (w + v)

    args = planes((M, K), (K, N), (N // 4,), (N // 4,))
    (region,) = fused(scaled, args[:3]).regions
    assert [(load.dtype, load.kind) for load in region.spec.loads] == [(DType.BF16, LoadKind.ROWVEC)]
    kernels = [fused(scaled, args[:3]).kernels, fused(twice, args).kernels]
    assert kernels == [1, 2] and fused(scaled, planes((M, K), (K, N), (N,))).kernels == 2


def test_sums_that_a_cat_joins_are_left_to_the_kernels_that_write_them_into_it() -> None:
    """Ours would leave a copy of each, as in the gradient of a modulation of six vectors."""

    def sums(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(a @ b)
        return y, torch.cat(((y * first).sum(0), first.sum(0), (y * second).sum(0)))

    args = planes((M, K), (K, N), (M, N), (M, N))
    ours, theirs = fused(sums, args), alone(sums, args)
    assert (ours.kernels, theirs.kernels) == (2, 3)
    assert not any(region.spec.reductions for region in ours.regions)
