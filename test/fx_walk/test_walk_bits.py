"""Tensors whose bits are read as another dtype, and values that a mask chooses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cute_backend.fx_walk.refusals.reasons import Reason
from support.fx_walk.synthetic import BF16, F32, Graph, aten, called, prims, rewritten, run, walk

M, N, K = 16, 16, 16
I32 = torch.int32
OP = "cute_backend.gemm_epilogue.default"


def plane(made: Graph) -> fx.Node:
    """A product of zeros and a plane, in fp32."""
    product = made.call(prims.convert_element_type.default, made.mm(M, N, K), F32)
    return made.call(aten.add.Tensor, product, made.input("plane", (M, N), F32))


def results(graph: fx.Graph, values: Tensor) -> tuple[Tensor, Tensor]:
    """The result of a graph on `values` in its plane, before and after the pass, which fuses all of it."""
    zero = torch.zeros(M, K, dtype=BF16)
    (wanted,) = run(copy.deepcopy(graph), zero, zero.t(), values)
    after = rewritten(graph)
    assert called(after) == [OP]
    (result,) = run(after, zero, zero.t(), values)
    return result, wanted


def special() -> Tensor:
    """(M, N) fp32 of every exponent, and NaN."""
    return ((torch.arange(256, dtype=I32).reshape(M, N) << 23) + 5).view(F32)


@pytest.mark.parametrize("mask", [0xFF800000, -(1 << 23), 0x7FFFFF])
def test_bits_of_floats_are_integers(mask: int) -> None:
    """Numbers that int32 doesn't have keep their low 32 bits."""
    made = Graph()
    bits = made.call(aten.view.dtype, plane(made), I32)
    kept = made.call(aten.bitwise_and.Scalar, bits, mask)
    result, wanted = results(made.output(made.call(aten.view.dtype, kept, F32)), special())
    assert torch.equal(result.view(I32), wanted.view(I32))


@pytest.mark.parametrize(
    ("dtype", "wanted", "reason", "words"),
    [
        (BF16, torch.int16, Reason.UNSUPPORTED_OP, "reads torch.bfloat16 as torch.int16"),
        (BF16, torch.float16, Reason.UNSUPPORTED_OP, "reads torch.bfloat16 as torch.float16"),
        (F32, torch.uint8, Reason.NOT_POINTWISE, "aten.view.dtype"),
    ],
)
def test_other_bits_are_read_outside(
    dtype: torch.dtype, wanted: torch.dtype, reason: Reason, words: str
) -> None:
    """Those of 16-bit floats, whose values may be kept in fp32, and those of another size."""
    made = Graph()
    relu = made.call(aten.relu.default, made.mm(M, N, K))
    value = made.call(prims.convert_element_type.default, relu, dtype)
    regions, rejections = walk(made.output(made.call(aten.view.dtype, value, wanted)))
    assert len(regions) == 1
    (rejection,) = [each for each in rejections if each.reason is reason]
    assert words in rejection.message


def filled(made: Graph, value: Any, accumulate: bool = False) -> fx.Graph:
    whole = plane(made)
    mask = made.call(aten.gt.Scalar, whole, 0.5)
    return made.output(made.call(aten.index_put.default, whole, [mask], value, accumulate))


def test_a_mask_chooses_what_one_value_replaces() -> None:
    made = Graph()
    value = made.call(aten.full.default, [], -3.5, dtype=F32, device=torch.device("cpu"))
    result, wanted = results(filled(made, value), special())
    assert torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize(("size", "accumulate"), [(1, True), (None, False)], ids=["sums", "values"])
def test_other_assignments_stay_outside(size: int | None, accumulate: bool) -> None:
    """Sums, and as many values as the mask has elements that hold."""
    made = Graph()
    value = made.input("values", (size or 256,), F32)
    graph = filled(made, value, accumulate)
    regions, rejections = walk(graph)
    inside = [node.target for region in regions for node in region.nodes]
    assert aten.index_put.default not in inside
    assert "aten.index_put.default" in str([each.message for each in rejections])


def ceiling(made: Graph, value: fx.Node, **other: Any) -> fx.Node:
    """torchao's conversion of fp32 to the codes of E8M0, with other arguments."""
    name = "torch._higher_order_ops.inline_asm_elementwise"
    inline = pytest.importorskip(name, reason="this torch has no inline PTX").inline_asm_elementwise
    how = {
        "asm_str": "cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;",
        "constraints": "=h,r",
        "dtype": torch.uint16,
        "is_pure": True,
        "pack": 1,
    }
    node = made.graph.call_function(inline, (value,), {**how, **other})
    with made.mode:
        node.meta["val"] = torch.empty(M, N, dtype=torch.uint16)
    return node


def test_the_conversion_of_data_center_blackwell_rounds_up() -> None:
    """Of every exponent, neighbours of powers of two, both signs, infinities and NaN."""
    made = Graph()
    code = made.call(prims.convert_element_type.default, ceiling(made, plane(made)), torch.uint8)
    graph = rewritten(made.output(code))
    assert called(graph) == [OP]
    zero, exponents = torch.zeros(M, K, dtype=BF16), torch.arange(256, dtype=I32).reshape(M, N) << 23
    for step in (-1, 0, 1, 1 << 22, (1 << 22) + 1, -(1 << 31)):
        values = (exponents + step).view(F32)
        (result,) = run(graph, zero, zero.t(), values)
        exact = values.double().abs()
        power = torch.ceil(torch.log2(exact)).clamp(-127, 127) + 127
        wanted = torch.where(exact.isnan(), 255, power).to(torch.uint8)
        assert torch.equal(result, wanted), step


@pytest.mark.parametrize(
    "other", [{"asm_str": "mov.b16 $0, 0;"}, {"dtype": torch.int16}], ids=["asm", "dtype"]
)
def test_other_inline_ptx_stays_outside(other: dict[str, Any]) -> None:
    made = Graph()
    code = made.call(prims.convert_element_type.default, ceiling(made, plane(made), **other), torch.uint8)
    regions, (rejection,) = walk(made.output(code))
    assert len(regions) == 1 and rejection.reason is Reason.NOT_POINTWISE


def test_codes_in_16_bits_are_computed_outside() -> None:
    """No kernel stores 16-bit integers."""
    made = Graph()
    code = ceiling(made, plane(made))
    graph = made.output(code, made.call(prims.convert_element_type.default, code, torch.uint8))
    assert "inline_asm_elementwise" in {str(node.target) for node in rewritten(graph).nodes}
