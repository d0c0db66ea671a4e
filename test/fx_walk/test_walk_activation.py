"""`aten._addmm_activation`: an addmm that ends with relu or gelu, which gelu depending on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.spec import Precision
from support.fx_walk.synthetic import BF16, Graph, aten, called, rewritten, run, walk

M, N, K = 24, 40, 16


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Sums are exact, so that what is left to differ is the activation."""
    generator = torch.Generator().manual_seed(0)
    integers = (torch.randint(-4, 5, size, generator=generator) for size in ((N,), (M, K), (K, N)))
    bias, a, b = (values.to(BF16) / 4 for values in integers)
    return bias, a, b


def graph_of(device: str = "cpu", **options: object) -> Graph:
    made = Graph()
    operands = [
        made.input(name, size, device=device) for name, size in (("bias", (N,)), ("a", (M, K)), ("b", (K, N)))
    ]
    made.output(made.call(aten._addmm_activation.default, *operands, **options))
    return made


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("use_gelu", [False, True], ids=["relu", "gelu"])
def test_a_cpu_gets_what_its_eager_gives(use_gelu: bool, precision: Precision) -> None:
    graph = rewritten(graph_of(use_gelu=use_gelu, alpha=2, beta=0.5).graph, precision)
    assert called(graph) == ["cute_backend.gemm_epilogue.default"]
    bias, a, b = inputs()
    (result,) = run(graph, bias, a, b)
    wanted = torch._addmm_activation(bias, a, b, use_gelu=use_gelu, alpha=2, beta=0.5)
    # The tanh gelu is off by up to 5e-4; the sums are rounded to bf16 first in eager alone.
    rtol = 0.0 if not use_gelu else 1e-3 if precision is Precision.EAGER else 0.02
    torch.testing.assert_close(result, wanted, rtol=rtol, atol=1e-4 if use_gelu else 0.0)


def test_the_gelu_of_a_gpu_is_the_one_by_tanh() -> None:
    for device, function in (("cpu", "erf"), ("cuda:0", "tanh")):
        (region,), rejections = walk(graph_of(device, use_gelu=True).graph)
        assert not rejections and f"{function}(" in kernel_formula(region.spec)


def test_a_gpu_bends_the_sum_as_it_was_accumulated() -> None:
    """As cuBLASLt's epilogue does: nothing is rounded before the store."""
    (region,), _ = walk(graph_of("cuda:0", use_gelu=True).graph, Precision.EAGER)
    assert [op.op for op in region.spec.ops].index("cast") == len(region.spec.ops) - 1


def test_more_work_follows_it() -> None:
    made = graph_of()
    product = next(node for node in made.graph.nodes if node.target is aten._addmm_activation.default)
    with made.graph.inserting_after(product):
        negated = made.call(aten.neg.default, product)
    made.graph.output_node().args = ((negated,),)
    (region,), _ = walk(made.graph)
    assert kernel_formula(region.spec) == "out0 = bf16(-relu(acc + bias))"
