"""Code that Inductor generates for a GPU, on a machine that has none: operands are fake tensors on CUDA.

A graph may call the op, collectives and views, for which Inductor compiles nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cute_backend.backend import epilogue_pass
from cute_backend.fx_walk.replacement.direct_call import register

H200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H200", warp_size=32)


@contextmanager
def lowered(
    fn: Callable[..., Sequence[Tensor]], *shapes: tuple[tuple[int, ...], torch.dtype], **options: Any
) -> Iterator[GraphLowering]:
    """The graph of a function of tensors of these shapes, as Inductor lowers it after the pass."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        args = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in shapes]
    gm = make_fx(fn, decomposition_table=select_decomp_table())(*args)
    gm.graph.eliminate_dead_code()
    register()
    with (
        inductor_config.patch({"post_grad_custom_pre_pass": epilogue_pass, **options}),
        mock.patch("torch.cuda.get_device_properties", lambda device=None: H200),
        mock.patch("torch._inductor.scheduler.has_triton", lambda: True),
        V.set_fake_mode(mode),
        DebugContext(),
    ):
        post_grad_passes(gm, True)
        gm.recompile()
        graph = GraphLowering(gm, example_inputs=args, shape_env=mode.shape_env, is_inference=True)
        with V.set_graph_handler(graph):
            graph.run(*args)
            yield graph
