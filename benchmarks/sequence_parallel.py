"""Times a sequence-parallel block of Llama 8B on several GPUs, in bf16 and with an MLP in fp8.

    torchrun --standalone --nproc-per-node 2 benchmarks/sequence_parallel.py sequence-parallel.csv

Each rank has a shard of the tokens, (tokens / ranks, 4096). `block` is a norm, attention, a norm and a gated
MLP in bf16, parallel by DTensor. `fp8` is the MLP alone, quantised by rows as they come: every rank gathers
the tokens, and the products' results are added and scattered. Each program is compiled by Inductor and by
backend="cute", both with and without async TP (`torch._inductor.config._micro_pipeline_tp`), and compared
with eager. Every round runs each of the four once, in a random order, from a cold L2, between two barriers; a
time is that of the slowest rank. Figures are medians in milliseconds. `--rounds 0` fills the caches alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, INNER, HEADS, KEY_HEADS, COLUMNS = 4096, 14336, 32, 8, 128
TOLERANCE = {"block": 0.02, "fp8": 0.05}
"""Relative in norm to eager, which rounds to bf16 after each op."""
FP8 = torch.float8_e4m3fn

Program = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * COLUMNS, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * COLUMNS, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * COLUMNS, bias=False)
        self.o = nn.Linear(HEADS * COLUMNS, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, COLUMNS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x is (2, tokens / 2 / ranks, 4096), of two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH, eps=1e-5), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def block(mesh: DeviceMesh) -> Program:
    shard, gather = Shard(1), Replicate()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=shard)
    whole = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(gather,))
    plan = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    plan |= {"attention": whole, "mlp": whole}
    plan |= {f"attention.{name}": columns for name in "qkv"} | {"attention.o": rows}
    plan |= {"mlp.gate": columns, "mlp.up": columns, "mlp.down": rows}
    return parallelize_module(Block().to("cuda", torch.bfloat16), mesh, plan)


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    return (rows.float() / scale).clamp(-448, 448).to(FP8), scale


def fp8(mesh: DeviceMesh) -> Program:
    group, ranks = mesh.get_group(), mesh.size()

    def weight(rows: int, k: int) -> tuple[Tensor, Tensor]:
        values, scale = quantised(torch.randn(rows, k, device="cuda") / k**0.5)
        return values.t(), scale.t()

    gate, up, down = (weight(*size) for size in [(INNER // ranks, WIDTH)] * 2 + [(WIDTH, INNER // ranks)])

    def linear(rows: tuple[Tensor, Tensor], by: tuple[Tensor, Tensor]) -> Tensor:
        return torch._scaled_mm(rows[0], by[0], rows[1], by[1], out_dtype=torch.bfloat16, use_fast_accum=True)

    def mlp(x: Tensor) -> Tensor:
        rows = quantised(collectives.all_gather_tensor(x, 0, group))
        inner = F.silu(linear(rows, gate)) * linear(rows, up)
        return collectives.reduce_scatter_tensor(linear(quantised(inner), down), "sum", 0, group) + x

    return mlp


PROGRAMS = {"block": block, "fp8": fp8}
BACKENDS = list(product(("inductor", "cute"), (False, True)))


def compiled(program: Program, x: Tensor, backend: str, async_tp: bool) -> Program:
    """The program as a backend compiles it, after its first calls."""
    options = {"_micro_pipeline_tp": True} if async_tp else None
    fn = torch.compile(lambda x: program(x), backend=backend, options=options, dynamic=False)
    for _ in range(3):
        fn(x)
    torch.cuda.synchronize()
    return fn


def milliseconds(fn: Program, x: Tensor, swept: Tensor) -> float:
    """The time of one call, of the slowest rank."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    swept.sum()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    fn(x)
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(start.elapsed_time(end), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def time(name: str, program: Program, tokens: int, ranks: int, rounds: int) -> dict[str, object]:
    """One row of the table: a program's times for a number of tokens, and the largest error."""
    shape = (tokens // ranks, WIDTH) if name == "fp8" else (2, tokens // 2 // ranks, WIDTH)
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    expected = program(x).double()
    fns, error = {}, 0.0
    for backend, async_tp in BACKENDS:
        counters.clear()
        key = f"{backend}{'_async' if async_tp else ''}"
        fns[key] = compiled(program, x, backend, async_tp)
        off = ((fns[key](x).double() - expected).norm() / expected.norm()).item()
        error = max(error, off)
        found = counters["cute_backend"]
        assert not found["replayed"] and not found["builds_failed"], dict(found)
    assert error < TOLERANCE[name], f"{name} differs from eager by {error:.1%} in norm"
    swept = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {key: [] for key in fns}
    order = random.Random(tokens)  # the same on every rank
    for _ in range(rounds):
        for key in order.sample(list(fns), len(fns)):
            times[key].append(milliseconds(fns[key], x, swept))
    row = {key: f"{median(each):.3f}" if each else "" for key, each in times.items()}
    return {"program": name, "tokens": tokens, "ranks": ranks, **row, "error": f"{error:.2e}"}


@torch.no_grad()
def main(given: argparse.Namespace) -> None:
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (ranks,))
    enable_symm_mem_for_group(mesh.get_group().group_name)
    torch.manual_seed(rank)
    rows = []
    for name in given.programs:
        program = PROGRAMS[name](mesh)
        for tokens in given.tokens:
            rows.append(time(name, program, tokens, ranks, given.rounds))
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0:
        with given.file.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="the CSV file to write")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args())
