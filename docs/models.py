"""Writes docs/models.md: what is fused of models, and the kernels and bytes that it saves.

    pip install '.[models]'
    python docs/models.py

Needs no GPU; on one, kernels are counted as Inductor makes them for it.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from architectures import ARCHITECTURES, architecture
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode

from cute_backend import config
from cute_backend.api.described import default_arch
from cute_backend.fx_walk.ends.launches import launches
from cute_backend.fx_walk.epilogue_pass import EpiloguePass
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.capability import Capability, Named, device_capability
from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.planning import Arch
from cute_backend.tracing.attention import attend_as_on
from cute_backend.tracing.shape_rules import shape_rules

ROOT = Path(__file__).resolve().parent.parent

MODELS = {
    "scaled_mm_recipes": ["rowwise", "tensorwise"],
    "torchao_fp8": ["mlp_per_row", "mlp_per_tensor", "attention_per_row", "attention_per_tensor"],
    "hugging_face": [
        f"{name}{quantized}"
        for name in (
            *("llama", "qwen3", "gemma3", "gpt_oss", "mixtral"),
            *("qwen3_moe", "deepseek_v3", "llama4"),
        )
        for quantized in ("", "_fp8")
    ],
    "training": ["gelu", "swiglu", "dropout", "checkpointed_gelu", "checkpointed_swiglu"],
}
"""The programs that each file of examples/ defines."""

HEAD = """\
# Models

This page shows which parts of models `torch.compile(model, backend="cute")` fuses. The first models are
those in `examples/`. The others are one layer of many architectures, of the classes of transformers and
diffusers, in bf16 (`docs/architectures.py`). No model was changed. `python docs/models.py` wrote this
page{device}.

- products: matrix products of the program; in training, forward and backward.
- fused: the number of products that our kernels compute, and the number of these kernels. A product that
  packs queries, keys and values counts as three if it is divided.
- kernels: the launches with Inductor alone, and with our kernels. A second kernel that finishes reductions
  counts.
- KiB: the bytes that all kernels read and write, with Inductor alone and with our kernels. Sequences have
  64 tokens, so most of these bytes are weights.

Inductor's kernels are those that it would make for a GPU, and ours those for {arch}. A kernel that adds up
parts of K is not counted.

In fp8, torchao's `FqnToConfig` also quantises the experts of Mixtral, Qwen3-MoE and DeepSeek-V3. torchao
0.18 can't do so for GPT-OSS and Llama 4, whose weights are (expert, in, out): they stay in bf16.
"""

WHY = """
## Why the rest is not fused

Of these models together, the number of products that are left to Inductor, and the number of places at
which regions end, by [reason](refusals.md). `feedback` is a norm or a quantisation, which divides by a
result over the whole row. `left_to_users` is mostly a cast that readers repeat. `not_pointwise` and
`rearranged` are mostly attention, and copies of heads for it. `python -m cute_backend explain
examples/FILE.py:NAME` gives each reason in a sentence, with its line.
"""

ARCH = Arch(default_arch()) if torch.cuda.is_available() else Arch.SM90A
"""The architecture whose launches are counted."""

CAPABILITY = device_capability if torch.cuda.is_available() else Named(ARCH)


class Recorder(EpiloguePass):
    """The pass, which records its regions and rejections."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.regions: list[Region] = []
        self.rejections: list[tuple[Rejection, bool]] = []
        """Rejections, each with whether it is a product's."""

    def analyse(
        self, graph: fx.Graph, capability: Capability = CAPABILITY
    ) -> tuple[list[Region], list[Rejection]]:
        anchors = {node.name for node in graph.nodes if is_anchor(node)}
        regions, rejections = super().analyse(graph, capability)
        self.products += len(anchors)
        self.regions += regions
        self.rejections += [(rejection, rejection.node in anchors) for rejection in rejections]
        return regions, rejections


def scheduled(
    fn: Callable[..., Any], args: tuple[Any, ...], graph_pass: CustomGraphPass | None
) -> tuple[int, int]:
    """The number of kernels that Inductor launches on a GPU for a call of `fn` and its backward pass, and the
    bytes that they read and write. No kernel is compiled, and nothing is computed: a CPU lacks some ops."""
    moved: list[int] = []

    def schedule(graph: GraphLowering) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        launched = filter(is_kernel, graph.scheduler.nodes)
        moved.extend(node.get_read_write_buffers_sizes() for node in launched)
        return SimpleNamespace(call=None, runner=None, key="", __file__="", source_code="", value="")

    def inner(gm: fx.GraphModule, inputs: Any, **how: Any) -> Callable[..., Any]:
        with mock.patch.object(GraphLowering, "compile_to_module", schedule):
            compile_fx_inner(copy.deepcopy(gm), inputs, **how)
        return lambda *_: zeros(gm)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        if isinstance(CAPABILITY, Named):
            attend_as_on(CAPABILITY.arch.target.capability, gm)
        return compile_fx(gm, inputs, inner_compile=inner)

    torch._dynamo.reset()
    with (
        shape_rules(),
        config.patch(raise_errors=True),
        inductor_config.patch(
            post_grad_custom_pre_pass=graph_pass, force_disable_caches=True, cpu_backend="triton"
        ),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        torch.compile(fn, backend=backend, dynamic=False)(*args)
    return len(moved), sum(moved)


def zeros(gm: fx.GraphModule) -> list[Any]:
    """Results of a graph that have the right shapes."""

    def made(result: Any) -> Any:
        value = result.meta["val"] if isinstance(result, fx.Node) else result
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        ).zero_()

    (results,) = gm.graph.output_node().args
    return [made(each) for each in results]


def is_kernel(node: Any) -> bool:
    """Whether a node of Inductor's schedule is launched: neither memory alone nor an item of a tuple."""
    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)


class Row(NamedTuple):
    """A model's row, and why the rest of it is not fused."""

    model: str
    products: int
    fused: str
    kernels: tuple[int, int]
    bytes: tuple[int, int]
    left: Counter[str]
    """The number of products that are left to Inductor, by the names of reasons."""
    ends: Counter[str]
    """The number of places at which regions end."""

    @property
    def counts(self) -> str:
        kernels, kib = (
            "{} to {}".format(*pair) for pair in (self.kernels, [-(-b // 1024) for b in self.bytes])
        )
        return f"| {self.model} | {self.products} | {self.fused} | {kernels} | {kib} |"


def row(model: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Row:
    if torch.cuda.is_available():
        fn = fn.cuda() if isinstance(fn, torch.nn.Module) else fn
        args = tuple(arg.detach().cuda().requires_grad_(arg.requires_grad) for arg in args)
    recorder = Recorder()
    (before, bytes_before), (after, bytes_after) = scheduled(fn, args, None), scheduled(fn, args, recorder)
    after += sum(launches(region, ARCH) - 1 for region in recorder.regions)
    fused = sum(len(region.products) for region in recorder.regions)
    left, ends = (reasons(recorder.rejections, of_products) for of_products in (True, False))
    return Row(
        model,
        recorder.products,
        f"{fused} in {len(recorder.regions)}",
        (before, after),
        (bytes_before, bytes_after),
        left,
        ends,
    )


def reasons(rejections: list[tuple[Rejection, bool]], of_products: bool) -> Counter[str]:
    return Counter(each.reason.value for each, is_product in rejections if is_product is of_products)


def rows() -> Iterator[Row]:
    for file, names in MODELS.items():
        module = importlib.import_module(file)
        for name in names:
            print(f"{file}.py:{name}", file=sys.stderr)
            yield row(f"{file}.py:{name}", getattr(module, name), module.example_inputs())
    for name in ARCHITECTURES:
        print(name, file=sys.stderr)
        yield row(name, *architecture(name))


def tables(rows: Sequence[Row]) -> Iterator[str]:
    yield "| model | products | fused | kernels | KiB |"
    yield "| --- | --- | --- | --- | --- |"
    yield from (each.counts for each in rows)
    yield WHY
    left, ends = (
        sum(each, Counter[str]()) for each in zip(*((row.left, row.ends) for row in rows), strict=True)
    )
    yield "| reason | products left | regions end |"
    yield "| --- | --- | --- |"
    yield from (f"| `{each}` | {left[each]} | {ends[each]} |" for each, _ in (left + ends).most_common())


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    where = f" on an {torch.cuda.get_device_name()}" if torch.cuda.is_available() else " without a GPU"
    device = f"{where}, with torch {torch.__version__}"
    head = HEAD.format(device=device, arch=ARCH.value)
    (ROOT / "docs" / "models.md").write_text(head + "\n" + "\n".join(tables([*rows()])) + "\n")


if __name__ == "__main__":
    main()
