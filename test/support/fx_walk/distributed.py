"""Distributed programs without GPUs: a process group that moves nothing, and the graphs of its programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

COLUMNS, INTERMEDIATE, HEADS = 512, 1024, 8


@contextmanager
def fake_group(ranks: int) -> Iterator[dist.ProcessGroup]:
    """A group of which this process is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def async_tp() -> Iterator[None]:
    """Async tensor parallelism is on, and every group counts as one with symmetric memory."""
    from torch.distributed._symmetric_memory import _test_mode

    with (
        _test_mode(),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        inductor_config.patch(_micro_pipeline_tp=True),
    ):
        yield


class _Done(Exception):
    pass


def post_grad_graphs(fn: Callable[..., Any], args: tuple[Any, ...], backend: str) -> list[fx.Graph]:
    """The forward graph, and the backward one if a gradient is wanted, after Inductor's post-grad passes."""
    graphs = []

    def inner(gm: fx.GraphModule, inputs: Any, **how: Any) -> Callable[..., Any]:
        compile_fx.view_to_reshape(gm)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(gm, inputs)
        with compile_fx.V.set_fake_mode(mode):
            compile_fx._recursive_post_grad_passes(gm, bool(how.get("is_inference")))
        graphs.append(gm.graph)

        def run(*_: Any) -> Any:
            raise _Done

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def inductor(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=inner)

    torch._dynamo.reset()
    with (
        mock.patch.object(compile_fx, "compile_fx_inner", inner),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
        suppress(_Done),
    ):
        torch.compile(fn, backend=inductor if backend == "inductor" else backend, fullgraph=True)(*args)
    return graphs


def moved(graph: fx.Graph) -> Counter[str]:
    """How many collectives of each kind a graph has, apart or in one op with products."""
    kinds = Counter[str]()
    for node in graph.nodes:
        name = str(node.target)
        for kind in ("all_gather", "reduce_scatter"):
            if kind in name and name.startswith("symm_mem.fused_"):
                kinds[f"{kind} with products"] += 1
            elif name.startswith(f"_c10d_functional.{kind}"):
                kinds[f"{kind} alone"] += 1
            elif name.startswith(f"symm_mem._low_contention_{kind}"):
                kinds[f"{kind} of low contention"] += 1
    return kinds


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, 1e-5).to(x.dtype) * self.weight


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(COLUMNS, INTERMEDIATE, bias=False)
        self.up = nn.Linear(COLUMNS, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, COLUMNS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, COLUMNS // HEADS)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer, or its MLP alone."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), MLP()
        if attends:
            self.attention_norm, self.attention = Norm(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "attention"):
            x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.norm(x))


def sequence_parallel(module: Block, device: str = "cpu") -> nn.Module:
    """A block whose input, norms and residuals are divided by positions, and whose products by columns or
    rows."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shard = Shard(1)

    def whole() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),))

    plan = {
        "norm": SequenceParallel(),
        "mlp": whole(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=shard),
    }
    if hasattr(module, "attention"):
        plan |= {
            "attention_norm": SequenceParallel(),
            "attention": whole(),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=shard),
        }
    return parallelize_module(module, mesh, plan)
