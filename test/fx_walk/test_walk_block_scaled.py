"""Products whose blocks have scales: recipes in the shapes and strides of torch, and their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType
from torch.torch_version import TorchVersion

import cute_backend
from cute_backend.api import explanation_of
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.planning import Arch
from cute_backend.spec import Columns, Scaling
from support.epilogues import BLOCKWISE, Problem
from support.fx_walk.synthetic import BF16, E4M3, F32, OP, Graph, aten, called, rewritten, run, walk

M, N, K = 72, 272, 400
KB, MB, NB = 4, 1, 3
LINE, SQUARE = Scaling.LINE, Scaling.SQUARE


def values(node: fx.Node, seed: int = 0) -> Tensor:
    """Small integers, laid out as a node's fake tensor: their products are exact."""
    fake = node.meta["val"]
    generator = torch.Generator().manual_seed(seed)
    low, high = (-2, 3) if fake.dtype in (E4M3, BF16) else (1, 9)
    numbers = torch.randint(low, high, fake.shape, generator=generator)
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(numbers)


def inputs_of(graph: fx.Graph) -> list[Tensor]:
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return [values(node, seed) for seed, node in enumerate(nodes)]


def spread(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Scales of blocks as one for each element of (rows, k), by their shape."""
    rows, k = shape
    across = 1 if scales.shape[0] == rows else 128
    return scales.repeat_interleave(across, 0)[:rows].repeat_interleave(128, 1)[:, :k]


def expected(a: Tensor, b: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """By elements, each with its scale; scales are (rows of A, k) and (columns of B, k)."""
    left = a.float() * spread(of_rows, (a.shape[0], a.shape[1]))
    return left @ (b.t().float() * spread(of_columns, (b.shape[1], b.shape[0]))).t()


def scaled_mm(
    made: Graph, shape_a: Any, shape_b: Any, n: int = N, strides: tuple[Any, Any] = (None, None), **of: Any
) -> fx.Node:
    a, b = made.input("a", (M, K), E4M3), made.input("b", (K, n), E4M3, (1, K))
    scale_a = made.input("scale_a", shape_a, of.get("dtype", F32), strides[0])
    scale_b = made.input("scale_b", shape_b, of.get("dtype", F32), strides[1])
    arguments: Any = (a, b, scale_a, scale_b, None, None, BF16)
    target = aten._scaled_mm.default
    if recipes := of.get("recipes"):
        target = aten._scaled_mm_v2.default
        swizzles = [[each] for each in of.get("swizzles", (0, 0))]
        arguments = (
            *(a, b, [scale_a], [recipes[0]], swizzles[0]),
            *([scale_b], [recipes[1]], swizzles[1], None, BF16),
        )
    node = made.graph.call_function(target, arguments)
    with made.mode:
        node.meta["val"] = torch.empty(M, n, dtype=BF16)
    return node


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "scalings"),
    [
        ((M, KB), (KB, NB), (LINE, SQUARE)),
        ((M, KB), (KB, N), (LINE, LINE)),
        ((MB, KB), (KB, N), (SQUARE, LINE)),
    ],
    ids=["1x128 by 128x128", "1x128 by 1x128", "128x128 by 1x128"],
)
@pytest.mark.parametrize("contiguous", ["k", "lines"])
def test_the_recipes_of_scaled_mm(
    shape_a: tuple[int, int], shape_b: tuple[int, int], scalings: tuple[Scaling, Scaling], contiguous: str
) -> None:
    """Scales lie by any strides, for a kernel copies them one by one."""
    made = Graph()
    strides = ((1, shape_a[0]), (1, KB)) if contiguous == "lines" else (None, None)
    graph = made.output(made.call(aten.relu.default, scaled_mm(made, shape_a, shape_b, strides=strides)))
    (region,), rejections = walk(graph)
    assert not rejections and not region.spec.loads
    assert (region.spec.product.a_scaling, region.spec.product.b_scaling) == scalings
    assert not region.spec.product.fast_accum
    a, b, scale_a, scale_b = inputs = inputs_of(graph)
    (result,) = run(rewritten(graph), *inputs)
    assert called(graph) == [str(OP)]
    assert torch.equal(result, expected(a, b, scale_a, scale_b.t()).relu().to(BF16))


@pytest.mark.parametrize(
    ("recipes", "shape_a", "shape_b", "strides"),
    [
        ((4, 4), (M, KB), (N, KB), ((1, M), (1, N))),
        ((4, 5), (M, KB), (NB, KB), ((1, M), None)),
        ((4, 5), (M, KB), (KB, NB), ((1, M), (1, KB))),
        ((5, 4), (KB, MB), (N, KB), ((1, KB), (1, N))),
    ],
    ids=["1x128 by 1x128", "1x128 by 128x128", "1x128 by 128x128 for cuBLAS", "128x128 by 1x128 for cuBLAS"],
)
def test_the_recipes_of_scaled_mm_v2(recipes: Any, shape_a: Any, shape_b: Any, strides: Any) -> None:
    made = Graph()
    graph = made.output(scaled_mm(made, shape_a, shape_b, strides=strides, recipes=recipes))
    (region,), rejections = walk(graph)
    assert not rejections
    scalings = {4: LINE, 5: SQUARE}
    product = region.spec.product
    assert (product.a_scaling, product.b_scaling) == tuple(scalings[recipe] for recipe in recipes)
    a, b, scale_a, scale_b = inputs = inputs_of(graph)
    (result,) = run(rewritten(graph), *inputs)
    of_rows = scale_a.t() if shape_a == (KB, MB) else scale_a
    of_columns = scale_b.t() if shape_b == (KB, NB) else scale_b
    assert torch.equal(result, expected(a, b, of_rows, of_columns).to(BF16))


@pytest.mark.parametrize("strides", [(4, 1), (1, 4)], ids=str)
def test_strides_decide_where_two_layouts_fit(strides: tuple[int, int]) -> None:
    """Of 4 by 4 blocks; cuBLAS' are contiguous along K."""
    made = Graph()
    graph = made.output(scaled_mm(made, (M, KB), (4, KB), 512, (None, strides), recipes=(4, 5)))
    a, b, scale_a, scale_b = inputs = inputs_of(graph)
    (result,) = run(rewritten(graph), *inputs)
    of_columns = scale_b if strides == (4, 1) else scale_b.t()
    assert torch.equal(result, expected(a, b, scale_a, of_columns).to(BF16))


def test_what_cublas_pads_is_cut_off() -> None:
    """K of 144 has two blocks, of which cuBLAS wants four."""
    made = Graph()
    a, b = made.input("a", (M, 144), E4M3), made.input("b", (144, N), E4M3, (1, 144))
    scale_a, scale_b = made.input("scale_a", (M, 2), F32, (1, M)), made.input("scale_b", (4, NB), F32, (1, 4))
    node = made.graph.call_function(
        aten._scaled_mm_v2.default, (a, b, [scale_a], [4], [], [scale_b], [5], [], None, BF16)
    )
    with made.mode:
        node.meta["val"] = torch.empty(M, N, dtype=BF16)
    graph = made.output(node)
    left, right, of_rows, padded = inputs = inputs_of(graph)
    (result,) = run(rewritten(graph), *inputs)
    assert torch.equal(result, expected(left, right, of_rows, padded[:2].t()).to(BF16))


@pytest.mark.parametrize(
    ("n", "shape_b", "pair"),
    [(512, (KB, 4), True), (384, (KB, 3), False), (384, (KB, 384), True)],
    ids=["halves of two blocks", "halves of one and a half", "columns of their own"],
)
def test_halves_are_a_pair_where_blocks_are_whole(n: int, shape_b: tuple[int, int], pair: bool) -> None:
    made = Graph()
    product = scaled_mm(made, (M, KB), shape_b, n)
    gate, up = (made.call(aten.slice.Tensor, product, 1, first, first + n // 2) for first in (0, n // 2))
    graph = made.output(made.call(aten.mul.Tensor, gate, up))
    (region,), _ = walk(graph)
    assert len(region.spec.accumulators) == (2 if pair else 1)
    a, b, scale_a, scale_b = inputs = inputs_of(graph)
    whole = expected(a, b, scale_a, scale_b.t())
    (result,) = run(rewritten(graph), *inputs)
    if pair:
        assert torch.equal(result, (whole[:, : n // 2] * whole[:, n // 2 :]).to(BF16))


def test_neighbouring_columns_share_the_scales_of_all() -> None:
    made = Graph()
    product = scaled_mm(made, (M, KB), (KB, NB))
    gate, up = (made.call(aten.slice.Tensor, product, 1, first, N, 2) for first in (0, 1))
    graph = made.output(made.call(aten.sub.Tensor, gate, up))
    (region,), _ = walk(graph)
    assert [acc.columns for acc in region.spec.accumulators] == [Columns.EVEN, Columns.ODD]
    a, b, scale_a, scale_b = inputs = inputs_of(graph)
    whole = expected(a, b, scale_a, scale_b.t())
    (result,) = run(rewritten(graph), *inputs)
    assert torch.equal(result, (whole[:, ::2] - whole[:, 1::2]).to(BF16))


@pytest.mark.parametrize("shared", [True, False])
def test_two_products_are_a_pair_where_a_has_the_same_scales(shared: bool) -> None:
    made = Graph()
    gate = scaled_mm(made, (M, KB), (KB, NB))
    a, _, scale_a, _ = gate.args[:4]
    b, scale_b = made.input("b1", (K, N), E4M3, (1, K)), made.input("scale_b1", (KB, NB), F32)
    other = scale_a if shared else made.input("scale_a1", (M, KB), F32)
    up = made.graph.call_function(aten._scaled_mm.default, (a, b, other, scale_b, None, None, BF16))
    with made.mode:
        up.meta["val"] = torch.empty(M, N, dtype=BF16)
    graph = made.output(made.call(aten.mul.Tensor, gate, up))
    regions, rejections = walk(graph)
    assert [len(region.spec.accumulators) for region in regions] == ([2] if shared else [1, 1])
    left, right, of_rows, of_columns, right1, of_columns1, *rest = inputs = inputs_of(graph)
    first = expected(left, right, of_rows, of_columns.t())
    second = expected(left, right1, of_rows if shared else rest[0], of_columns1.t())
    (result,) = run(rewritten(graph), *inputs)
    if shared:
        assert torch.equal(result, (first * second).to(BF16))
    else:
        assert not rejections and torch.equal(result, (first.to(BF16).float() * second).to(BF16))


def test_a_dynamic_m_adds_no_guard() -> None:
    made = Graph()
    m = made.size("m", M)
    a, b = made.input("a", (m, K), E4M3), made.input("b", (K, N), E4M3, (1, K))
    scale_a, scale_b = made.input("scale_a", (m, KB), F32, (1, m)), made.input("scale_b", (KB, NB), F32)
    node = made.graph.call_function(aten._scaled_mm.default, (a, b, scale_a, scale_b, None, None, BF16))
    with made.mode:
        node.meta["val"] = torch.empty(m, N, dtype=BF16)
    graph = made.output(node)
    (region,), _ = walk(graph)
    assert region.spec.product.is_block_scaled
    rewritten(graph)
    assert not made.shape_env.guards


def reason(graph: fx.Graph, capability: tuple[int, int] = (9, 0)) -> Reason:
    regions, (rejection,) = walk(graph, capability=capability)
    assert not regions
    return rejection.reason


def test_what_is_not_taken() -> None:
    bf16, v2 = Graph(), Graph()
    assert reason(bf16.output(scaled_mm(bf16, (M, KB), (KB, NB), dtype=BF16))) is Reason.SCALE_DTYPE
    wrong = scaled_mm(v2, (M, KB), (KB, N + 1))
    assert reason(v2.output(wrong)) is Reason.MIXED_SCALES
    for arch, fused in ((Arch.SM90A, True), (Arch.SM100A, True), (Arch.SM89, False)):
        made = Graph()
        a, b = (
            made.input(name, shape, E4M3, strides, "cuda")
            for name, shape, strides in (("a", (M, K), None), ("b", (K, N), (1, K)))
        )
        scales = [made.input(f"scale{shape}", shape, F32, device="cuda") for shape in ((M, KB), (KB, NB))]
        graph = made.output(made.call(aten._scaled_mm.default, a, b, *scales, None, None, BF16))
        regions, rejections = walk(graph, capability=arch.target.capability)
        assert len(regions) == fused
        if not fused:
            (rejection,) = rejections
            assert rejection.reason is Reason.RECIPE
            recipes = f"BlockWise128x128; supported: TensorWise and RowWise on {arch.value}"
            assert recipes in rejection.message


@pytest.mark.parametrize(
    ("of", "reason", "words"),
    [
        (
            {"shape_b": (NB, KB + 1)},
            Reason.SCALE_LAYOUT,
            f"BlockWise128x128 takes ({NB}, {KB}) with any strides",
        ),
        ({"shape_b": (KB, NB)}, Reason.SCALE_LAYOUT, f"of shape ({KB}, {NB}) with strides ({NB}, 1)"),
        ({"shape_a": (KB, M)}, Reason.SCALE_LAYOUT, f"BlockWise1x128 takes ({M}, {KB})"),
        ({"swizzles": (1, 1)}, Reason.RECIPE, "BlockWise1x128 by BlockWise128x128 in SWIZZLE_32_4_4"),
        ({"dtype": BF16}, Reason.SCALE_DTYPE, "is torch.bfloat16; scales of tensors"),
    ],
    ids=["shape", "strides", "transposed", "swizzle", "dtype"],
)
def test_a_refusal_says_what_came_and_what_the_recipe_takes(
    of: dict[str, Any], reason: Reason, words: str
) -> None:
    made, shapes = Graph(), {"shape_a": (M, KB), "shape_b": (NB, KB)}
    graph = made.output(scaled_mm(made, **(shapes | of), recipes=(4, 5)))
    regions, (rejection,) = walk(graph)
    assert not regions and rejection.reason is reason
    assert words in rejection.message


@pytest.mark.parametrize("scaled_mm_v2", [False, True], ids=["_scaled_mm", "scaled_mm"])
def test_programs_on_fake_cuda_tensors(scaled_mm_v2: bool) -> None:
    """As vLLM calls `_scaled_mm`, and by the recipes of `torch.nn.functional`, where Dynamo traces it."""

    def program(x: Tensor, weight: Tensor, of_x: Tensor, of_weight: Tensor, residual: Tensor) -> Tensor:
        if scaled_mm_v2:
            recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
            y = torch.nn.functional.scaled_mm(
                x, weight.t(), of_x, recipes[0], of_weight, recipes[1], output_dtype=BF16
            )
        else:
            y = torch._scaled_mm(x, weight.t(), of_x, of_weight, out_dtype=BF16)
        return torch.nn.functional.silu(y) + residual

    with FakeTensorMode():
        args = (
            torch.empty(256, 1024, dtype=E4M3, device="cuda"),
            torch.empty(512, 1024, dtype=E4M3, device="cuda"),
            torch.empty(8, 256, device="cuda").t(),
            torch.empty(4, 8, device="cuda").t(),
            torch.empty(256, 512, dtype=BF16, device="cuda"),
        )
    if scaled_mm_v2 and TorchVersion(torch.__version__) < "2.13":
        pytest.skip(f"Dynamo of torch {torch.__version__} does not trace torch.nn.functional.scaled_mm")
    for arch in ("sm_90a", "sm_100a"):
        explained = cute_backend.explain(program, *args, arch=arch)
        explained.assert_fused(regions=1, no=[Reason.RECIPE])
        assert explained.regions[0].spec.product.b_scaling is SQUARE
        assert [load.label for load in explained.regions[0].loads] == ["residual"]
    (rejection,) = cute_backend.explain(program, *args, arch="sm_120a").rejections
    assert rejection.reason is Reason.RECIPE


def test_an_explanation_is_of_its_architecture() -> None:
    """A graph on the CPU, which would be replayed there, is explained as for that architecture."""
    program = BLOCKWISE["blockwise_silu_residual"]
    inputs = program.inputs(Problem(64, 128, 256))
    (region,) = cute_backend.explain(program.fn, *inputs, arch="sm_90a").regions
    assert "acc of b, with scales of blocks: 1x128 of A, 128x128 of B, at" in str(
        cute_backend.explain(program.fn, *inputs, arch="sm_90a")
    )
    assert region.kernel().entry.startswith("cute_scaled_mm_bias_silu_residual_")
    refused = cute_backend.explain(program.fn, *inputs, arch="sm_120a")
    assert not refused.regions
    (rejection,) = refused.rejections
    assert rejection.reason is Reason.RECIPE and "on sm_120a" in rejection.message


def by_blocks(h: Tensor) -> tuple[Tensor, Tensor]:
    """By blocks of 1 x 128, with scales as `_scaled_mm` takes them."""
    blocks = h.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (blocks / scale).flatten(-2).to(E4M3), scale.squeeze(-1).t().contiguous().t()


def mlp(
    x: Tensor, of_x: Tensor, wide: tuple[Tensor, ...], down: Tensor, of_down: Tensor, residual: Tensor
) -> Tensor:
    """DeepSeek's, of weights for gate and up, each with its scales, or of one that has both."""
    halves = [
        torch._scaled_mm(x, weight.t(), of_x, scales.t(), out_dtype=BF16)
        for weight, scales in zip(wide[::2], wide[1::2], strict=True)
    ]
    gate, up = halves if len(halves) > 1 else halves[0].chunk(2, -1)
    h, of_h = by_blocks(torch.nn.functional.silu(gate) * up)
    return torch._scaled_mm(h, down.t(), of_h, of_down.t(), out_dtype=BF16) + residual


def mlp_inputs(m: int, d: int, inner: int, weights: int, device: str = "cuda") -> tuple[Any, ...]:
    def fp8(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=E4M3, device=device)

    def scales(rows: int, k: int) -> Tensor:
        return torch.empty(rows, k // 128, device=device)

    lines = 2 * inner // weights
    wide = [each for _ in range(weights) for each in (fp8(lines, d), scales(lines // 128, d))]
    return (
        fp8(m, d),
        torch.empty(d // 128, m, device=device).t(),
        tuple(wide),
        fp8(d, inner),
        scales(d // 128, inner),
        torch.empty(m, d, dtype=BF16, device=device),
    )


def test_without_a_gpu_a_program_is_explained_as_for_data_center_blackwell() -> None:
    with FakeTensorMode():
        inputs = mlp_inputs(256, 512, 256, 2, device="cpu")
        found, named = cute_backend.explain(mlp, *inputs), cute_backend.explain(mlp, *inputs, arch="sm_100a")
    assert len(found.regions) == 2 and str(found) == str(named)


def test_a_region_that_no_tile_of_the_architecture_holds_is_explained() -> None:
    """A graph that was compiled for a CPU, where the walker assumes no target."""
    with FakeTensorMode():
        inputs = mlp_inputs(256, 512, 256, 2, device="cpu")
        [graph] = collect(mlp, inputs)
    found = explanation_of(graph.regions, graph.rejections)
    assert found.arch == "sm_100a" and len(found.regions) == 1
    (rejection,) = found.rejections
    assert rejection.reason is Reason.BLOCK_SIZE
    assert "no tile of sm_100a holds blocks of 128 columns whole" in rejection.message
    assert "block_size" in str(found)


@pytest.mark.parametrize("inner", [2048, 18432])
@pytest.mark.parametrize("weights", [1, 2])
def test_an_mlp_of_deepseek_is_two_kernels(inner: int, weights: int) -> None:
    """An expert's and a dense layer's: both products, silu, the product of both and its quantisation are one,
    and the second product and the residual are the other."""
    with FakeTensorMode():
        inputs = mlp_inputs(4096, 7168, inner, weights)
        explained = cute_backend.explain(mlp, *inputs, arch="sm_90a")
    assert not explained.rejections, "nothing is left to another kernel"
    first, second = explained.regions
    assert [len(region.spec.accumulators) for region in explained.regions] == [2, 1]
    assert {op.block for op in first.spec.ops if op.block} == {128}
    stored = [(store.dtype.value, store.form.block_columns) for store in first.spec.stores]
    assert stored == [("e4m3", 0), ("f32", 128)]
    assert [load.label for load in second.loads] == ["residual"]
