"""Each of several processes compares a sequence-parallel block with eager, with async tensor parallelism on,
and then runs `examples/sequence_parallel.py` without it.

    torchrun --nproc-per-node 2 test/support/fx_walk/two_ranks.py --cpu --sequences 1

The ops of async tensor parallelism run as torch's own fallbacks for them: one collective and the products.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))
from examples import sequence_parallel as example
from support.fx_walk.distributed import COLUMNS, Block, async_tp, sequence_parallel

ERROR = 0.02
"""Relative in norm, of bf16 results that eager rounds after each op."""


def main() -> int:
    from torch.distributed import _symmetric_memory as symmetric

    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, required=True)
    given, sys.argv[1:] = parser.parse_known_args()
    dist.init_process_group("gloo")
    on_cpu = torch.library.Library("symm_mem", "IMPL", "CPU")
    for op in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        on_cpu.impl(op, getattr(symmetric, f"_{op}_fallback"))
    torch.manual_seed(0)
    module = sequence_parallel(Block(attends=False).to(torch.bfloat16))
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(given.sequences, 32, COLUMNS, dtype=torch.bfloat16)
    expected = results(module, module, x)
    # Refusals are counted by the pass, so no graph comes from a cache. The C++ of both ranks does.
    with (
        async_tp(),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        actual = results(torch.compile(module, backend="cute"), module, x)
    errors = [((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True)]
    left = counters["cute_backend"]["left_to_async_tp"]
    right = max(errors) < ERROR and left == 3 and counters["cute_backend"]["regions"] > 0
    verdict = "right" if right else "WRONG"
    print(f"{max(errors):.2%}, {dict(counters['cute_backend'])}: {verdict}", flush=True)
    torch._dynamo.reset()
    counters.clear()
    return (not right) + example.main()  # that ends the process group


def results(call: nn.Module, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a call, and the gradients of x and of every parameter."""
    leaf = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = call(leaf)
    local = y.to_local() if hasattr(y, "to_local") else y
    local.backward(torch.ones_like(local))
    grads = [each.grad for each in module.parameters()]
    grads = [each.to_local() if hasattr(each, "to_local") else each for each in grads]
    return [each.detach().double() for each in (local, leaf.grad, *grads)]


if __name__ == "__main__":
    sys.exit(main())
