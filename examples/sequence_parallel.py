"""Trains a gated MLP with norm and residual, sequence parallel on several GPUs as torchtitan divides a block.

    torchrun --nproc-per-node 2 examples/sequence_parallel.py [--async-tp]

Each rank has a part of the positions for the norm and the residual, and a part of the columns or rows of
every weight. Compares the loss and the gradients of each step of `torch.compile(block, backend="cute")` with
eager's on every rank, and prints what was fused. With `--async-tp`, torch overlaps products with the
collectives around them. Without a GPU (`--cpu`) the regions are replayed, over gloo.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

TOKENS, HIDDEN, INTERMEDIATE, STEPS = 256, 512, 1024, 3
TOLERANCE = 0.02
"""Relative in norm: eager rounds to bf16 after each op, and a fused epilogue once."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN, eps=1e-5), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def divided(mesh: DeviceMesh) -> nn.Module:
    """The block, with the same weights in every call. Its input and its result are parts of the positions."""
    torch.manual_seed(0)
    positions = Shard(1)
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(positions,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=positions),
    }
    return parallelize_module(Block().to(torch.bfloat16).to(mesh.device_type), mesh, plan)


def train(block: nn.Module, call: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """The losses and the gradients of all steps of an optimizer."""
    optimizer, seen = torch.optim.SGD(block.parameters(), lr=0.1), []
    for x in inputs:
        loss = call(x).float().square().mean()
        loss.backward()
        seen += [loss.detach(), *(each.grad.clone() for each in block.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [each.to_local() if isinstance(each, DTensor) else each for each in seen]


def main() -> int:
    device = "cpu" if "--cpu" in sys.argv else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (ranks,))
    torch.manual_seed(1 + dist.get_rank())  # every rank has its own positions
    shape = (1, TOKENS // ranks, HIDDEN)
    inputs = [torch.randn(shape).to(torch.bfloat16).to(device) for _ in range(STEPS)]
    block = divided(mesh)
    expected = train(block, block, inputs)
    if "--async-tp" in sys.argv:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's pass still asks for it
            enable_symm_mem_for_group(mesh.get_group().group_name)
    block = divided(mesh)
    actual = train(block, torch.compile(block, backend="cute"), inputs)
    error = max(
        ((a.double() - e.double()).norm() / e.double().norm()).item()
        for a, e in zip(actual, expected, strict=True)
    )
    fused = dict(counters["cute_backend"])
    regions = fused.get("regions", 0) + fused.get("cached_regions", 0)  # a second run reads Inductor's cache
    right = error < TOLERANCE and regions > 0 and not fused.get("replayed")
    verdict = "right" if right else "WRONG"
    print(
        f"rank {dist.get_rank()}: differs from eager by {error:.2%} in norm; {fused}; {verdict}", flush=True
    )
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
