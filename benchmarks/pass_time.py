"""Times the pass on a chain of layers, each a product with an epilogue, at several lengths of the chain.

    python benchmarks/pass_time.py [LAYERS ...]

A layer is `gelu(x @ w) + x` in bf16. The command prints the milliseconds that a layer takes, in the search
for regions and in the whole pass. It takes the least CPU time of several runs, so a busy machine changes
little. It needs no GPU.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from cute_backend.fx_walk.collect import as_the_pass_meets_it
from cute_backend.fx_walk.epilogue_pass import EpiloguePass

LAYERS = (50, 100, 200, 400)
RUNS = 3


def chain(layers: int) -> fx.GraphModule:
    """The post-grad graph of a chain."""

    def program(x: Tensor, weights: list[Tensor]) -> Tensor:
        for w in weights:
            x = F.gelu(x @ w) + x
        return x

    graphs: list[fx.Graph] = []

    def compile(gm: fx.GraphModule, inputs: Sequence[object], **how: object) -> Callable[..., object]:
        as_the_pass_meets_it(gm, inputs, how, graphs.append)
        return gm.forward

    def backend(gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return compile_fx(gm, inputs, inner_compile=compile)

    x = torch.randn(128, 64, dtype=torch.bfloat16)
    weights = [torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(layers)]
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend, dynamic=False)(x, weights)
    (graph,) = graphs
    return fx.GraphModule(torch.nn.Module(), graph)


def milliseconds(work: Callable[[fx.Graph], object], module: fx.GraphModule) -> float:
    """The least CPU time of some runs of `work`, each on a fresh copy of the graph."""
    found = []
    for _ in range(RUNS):
        graph = copied(module.graph)
        gc.collect()
        start = time.process_time()
        work(graph)
        found.append(time.process_time() - start)
    return min(found) * 1000


def copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def main(lengths: Sequence[int]) -> None:
    milliseconds(EpiloguePass(), chain(2))  # so that imports and first compilations are not timed
    print(f"{'layers':>6}  {'search':>8}  {'pass':>8}   ms a layer")
    for layers in lengths:
        module = chain(layers)
        search, whole = (milliseconds(work, module) for work in (EpiloguePass().analyse, EpiloguePass()))
        print(f"{layers:>6}  {search / layers:>8.2f}  {whole / layers:>8.2f}", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or LAYERS)
