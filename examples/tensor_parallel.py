"""A gated MLP on several GPUs, tensor parallel with DTensor: regions end at the collectives between them.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Each rank has a part of the columns of gate and up and of the rows of down, whose products are summed by an
all-reduce. Compares `torch.compile(mlp, backend="cute")` with eager on every rank, and prints what was fused.
Without a GPU (`--cpu`) the regions are replayed, over gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TOKENS, HIDDEN, INTERMEDIATE = 256, 512, 1024
TOLERANCE = 0.01
"""Relative in norm: eager rounds to bf16 after each op, and a fused epilogue once."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * 0.5 + x


def main() -> int:
    device = "cpu" if "--cpu" in sys.argv else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)  # the same weights and tokens on every rank
    mlp, x = MLP().to(torch.bfloat16).to(device), torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16).to(device)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallel = parallelize_module(mlp, mesh, plan)
    with torch.no_grad():
        expected = parallel(x)
        actual = torch.compile(parallel, backend="cute")(x)
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    fused = dict(counters["cute_backend"])
    right = error < TOLERANCE and fused.get("regions", 0) > 0 and not fused.get("replayed")
    verdict = "right" if right else "WRONG"
    print(
        f"rank {dist.get_rank()}: differs from eager by {error:.2%} in norm; {fused}; {verdict}", flush=True
    )
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
