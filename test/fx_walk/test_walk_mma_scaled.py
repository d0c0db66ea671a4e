"""MXFP8, MXFP4 and NVFP4 in the shapes of torch: what is taken, and what is refused by which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType
from torch.torch_version import TorchVersion

import cute_backend
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.planning import Arch
from cute_backend.spec import BColumns, DType, Scaling
from support.epilogues import MMA_SCALED, Problem
from support.fx_walk.synthetic import BF16, E4M3, F32, OP, Graph, aten, called, rewritten, run, walk
from support.reference import as_tuple, in_float64, relative_error

M, N, K = 136, 272, 416
FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
TILED = SwizzleType.SWIZZLE_32_4_4.value


def count(scaling: Scaling, lines: int, k: int = K) -> int:
    rows, blocks = -(-lines // 128) * 128, -(-k // {Scaling.MX: 32, Scaling.NV: 16}[scaling])
    return rows * (-(-blocks // 4) * 4)


def product(made: Graph, scaling: Scaling, dtype: torch.dtype = E4M3, n: int = N, **of: Any) -> fx.Node:
    """`_scaled_mm`, or with `recipes` its second version, of scales in a row or of the shape `of`."""
    k = K // 2 if dtype is FP4 else K
    device = of.get("device", "cpu")
    a, b = made.input("a", (M, k), dtype, None, device), made.input("b", (k, n), dtype, (1, k), device)
    scale = of.get("scale", E8M0 if scaling is Scaling.MX else E4M3)
    shapes = of.get("shape_a", (count(scaling, M),)), of.get("shape_b", (count(scaling, n),))
    scale_a = made.input("scale_a", shapes[0], scale, of.get("strides"), device)
    scale_b = made.input("scale_b", shapes[1], scale, None, device)
    arguments: Any = (a, b, scale_a, scale_b, None, None, BF16)
    target = aten._scaled_mm.default
    if recipes := of.get("recipes"):
        whole = [made.input(f"whole_{side}", of.get("whole", ()), F32) for side in "ab" if len(recipes) > 1]
        swizzles = of.get("swizzles", [TILED, 0][: len(recipes)])
        of_a, of_b = [scale_a, *whole[:1]], [scale_b, *whole[1:]]
        target = aten._scaled_mm_v2.default
        arguments = (a, b, of_a, recipes, swizzles, of_b, of.get("recipes_b", recipes), swizzles, None, BF16)
    node = made.graph.call_function(target, arguments)
    with made.mode:
        node.meta["val"] = torch.empty(M, n, dtype=BF16, device=device)
    return node


FORMATS = [
    (Scaling.MX, E4M3, {}),
    (Scaling.MX, FP4, {}),
    (Scaling.NV, FP4, {}),
    (Scaling.MX, E4M3, {"recipes": [3]}),
    (Scaling.MX, FP4, {"recipes": [3]}),
    (Scaling.NV, FP4, {"recipes": [2]}),
    (Scaling.NV, FP4, {"recipes": [2, 0]}),
]


@pytest.mark.parametrize(("scaling", "dtype", "of"), FORMATS, ids=str)
def test_every_recipe(scaling: Scaling, dtype: torch.dtype, of: dict[str, Any]) -> None:
    made = Graph()
    graph = made.output(made.call(aten.relu.default, product(made, scaling, dtype, **of)))
    (region,), rejections = walk(graph)
    assert not rejections
    acc = region.spec.product
    assert (acc.a_scaling, acc.b_scaling, acc.fast_accum) == (scaling, scaling, True)
    assert acc.a_dtype is acc.b_dtype is (DType.E2M1X2 if dtype is FP4 else DType.E4M3)
    two_levels = len(of.get("recipes", ())) > 1
    assert [load.kind.value for load in region.spec.loads] == ["scalar"] * 2 * two_levels
    rewritten(graph)
    assert called(graph) == [str(OP)]


@pytest.mark.parametrize("name", MMA_SCALED)
def test_the_replay_equals_float64(name: str) -> None:
    """The whole way on a CPU, where torch has no such product."""
    program = MMA_SCALED[name]
    inputs = program.inputs(Problem(130, 144, 160))
    compiled = torch.compile(program.fn, backend="cute", fullgraph=True)
    for result, expected in zip(as_tuple(compiled(*inputs)), in_float64(program, inputs), strict=True):
        assert relative_error(result, expected) < 4e-3


def test_scales_of_two_axes_are_taken_in_a_row() -> None:
    made = Graph()
    shape = (256, count(Scaling.MX, M) // 256)
    graph = made.output(product(made, Scaling.MX, shape_a=shape))
    rewritten(graph)
    (call,) = (node for node in graph.nodes if str(node.target) == str(OP))
    _, of_a = call.args[0]
    assert of_a.meta["val"].shape == (count(Scaling.MX, M),)


@pytest.mark.parametrize(
    ("of", "reason", "words"),
    [
        ({"shape_a": (count(Scaling.MX, M) - 4,)}, Reason.SCALE_LAYOUT, "scale_a is torch.float8_e8m0fnu of"),
        ({"shape_b": (4,)}, Reason.SCALE_LAYOUT, "BlockWise1x32 takes 6144 contiguous elements"),
        ({"strides": (2,)}, Reason.SCALE_LAYOUT, "with strides (2)"),
        ({"scale": F32, "recipes": [3]}, Reason.SCALE_LAYOUT, "is torch.float32 of shape"),
        ({"recipes": [3], "swizzles": []}, Reason.RECIPE, "BlockWise1x32 in NO_SWIZZLE by NO_SWIZZLE"),
        ({"recipes": [3], "swizzles": [0]}, Reason.RECIPE, "in NO_SWIZZLE by NO_SWIZZLE; supported: "),
        ({"recipes": [3], "recipes_b": [2]}, Reason.RECIPE, "BlockWise1x32 by BlockWise1x16"),
        ({"recipes": [2]}, Reason.OPERAND_DTYPE, "not multiply torch.float8_e4m3fn by torch.float8_e4m3fn"),
    ],
    ids=str,
)
def test_what_is_refused_and_why(of: dict[str, Any], reason: Reason, words: str) -> None:
    made = Graph()
    made.output(product(made, Scaling.MX, **of))
    regions, (rejection,) = walk(made.graph)
    assert not regions and rejection.reason is reason
    assert words in rejection.message


@pytest.mark.skipif(not hasattr(SwizzleType, "SWIZZLE_32_8"), reason="this torch has no SWIZZLE_32_8")
def test_the_swizzle_of_later_torch_is_refused_by_name() -> None:
    made = Graph()
    made.output(product(made, Scaling.MX, recipes=[3], swizzles=[SwizzleType.SWIZZLE_32_8.value]))
    _, (rejection,) = walk(made.graph)
    assert "BlockWise1x32 in SWIZZLE_32_8" in rejection.message


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM80, Arch.SM120A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("dtype", [E4M3, FP4], ids=str)
def test_other_gpus_refuse_them_by_name(arch: Arch, dtype: torch.dtype) -> None:
    made = Graph()
    made.output(product(made, Scaling.MX, dtype, device="cuda"))
    regions, (rejection,) = walk(made.graph, capability=arch.target.capability)
    assert not regions
    by_dtype = dtype is FP4 or not arch.target.fp8
    assert rejection.reason is (Reason.OPERAND_DTYPE if by_dtype else Reason.RECIPE)
    assert arch.value in rejection.message


def test_halves_of_one_product_have_their_own_tiles_of_scales() -> None:
    """Of 512 columns, where the second half begins with a tile; of 272 it begins within one."""
    for n, regions in ((512, 1), (272, 0)):
        made = Graph()
        node = product(made, Scaling.MX, n=n)
        gate, up = (made.call(aten.slice.Tensor, node, 1, i * n // 2, (i + 1) * n // 2) for i in range(2))
        graph = made.output(made.call(aten.mul.Tensor, made.call(aten.relu.default, gate), up))
        found, _ = walk(graph)
        if not regions:
            assert all(len(region.spec.accumulators) == 1 for region in found)
            continue
        (region,) = found
        assert len(region.spec.accumulators) == 2 and region.spec.b_columns is BColumns.APART
        inputs = [_random(each.meta["val"]) for each in graph.nodes if each.op == "placeholder"]
        (result,) = run(rewritten(graph), *inputs)
        whole = _dequantised(inputs[0], inputs[2]) @ _dequantised(inputs[1].t(), inputs[3]).t()
        assert relative_error(result, whole[:, : n // 2].relu() * whole[:, n // 2 :]) < 4e-3


def _random(fake: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(fake.numel())
    if fake.dtype is E8M0:
        return torch.randint(124, 130, fake.shape, generator=generator, dtype=torch.uint8).view(E8M0)
    values = torch.randint(-3, 4, fake.shape, generator=generator).to(E4M3)
    return torch.empty_strided(fake.shape, fake.stride(), dtype=E4M3).copy_(values)


def _dequantised(operand: Tensor, scales: Tensor) -> Tensor:
    from support.reference import of_tiles

    return of_tiles(operand, scales)


@pytest.mark.parametrize("second", [False, True], ids=["_scaled_mm", "scaled_mm"])
def test_programs_on_fake_cuda_tensors(second: bool) -> None:
    """As vLLM's torch backends call them."""

    def program(x: Tensor, weight: Tensor, of_x: Tensor, of_weight: Tensor, residual: Tensor) -> Tensor:
        if second:
            recipe, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
            y = F.scaled_mm(x, weight.t(), of_x, recipe, of_weight, recipe, swizzle, swizzle)
        else:
            y = torch._scaled_mm(x, weight.t(), of_x, of_weight, out_dtype=BF16)
        return F.silu(y) + residual

    with FakeTensorMode():
        args = (
            torch.empty(256, 1024, dtype=E4M3, device="cuda"),
            torch.empty(512, 1024, dtype=E4M3, device="cuda"),
            torch.empty(256 * 32, dtype=E8M0, device="cuda"),
            torch.empty(512 * 32, dtype=E8M0, device="cuda"),
            torch.empty(256, 512, dtype=BF16, device="cuda"),
        )
    if second and TorchVersion(torch.__version__) < "2.13":
        pytest.skip(f"Dynamo of torch {torch.__version__} does not trace torch.nn.functional.scaled_mm")
    explained = cute_backend.explain(program, *args, arch="sm_100a")
    explained.assert_fused(regions=1, no=[Reason.RECIPE])
    assert explained.regions[0].spec.product.b_scaling is Scaling.MX
    (rejection,) = cute_backend.explain(program, *args, arch="sm_90a").rejections
    assert rejection.reason is Reason.RECIPE
