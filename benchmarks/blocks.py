"""Times reductions of blocks of columns on a GPU: the time that a norm by head or a quantisation adds to a
product.

    python benchmarks/blocks.py FILE.json [M N K [PROGRAM...]]

Each program is a product in bf16, of M = N = K = 4096 if the command names no sizes, alone, with a plane and
with work on blocks, by our kernels and by Inductor's. N is a multiple of 128. torch's bare product is timed
too. Results are compared with eager first. Programs run in CUDA graphs, interleaved, from a cold L2; figures
are medians in microseconds. Names of programs select these and those that they are compared with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cute_backend import config, explain
from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.runtime.calls.prepare import announce

CALLS, ROUNDS, WRONG = 3, 11, 2e-2
FP8 = torch.float8_e4m3fn


def bare(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    return (x @ w.t()).relu()


def norm_by_head(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    return normed(x @ w.t(), row)


def normed(y: Tensor, row: Tensor) -> Tensor:
    """The norm of each head of 128 columns."""
    heads = y.view(len(y), -1, 128).float()
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)
    return row * heads.to(torch.bfloat16)


def softmax_of_groups(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    return (x @ w.t()).view(len(x), -1, 16).softmax(-1)


def quantised(y: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    blocks = y.float().view(len(y), -1, columns)
    scale = blocks.abs().amax(-1) / 448.0
    return (blocks / scale.unsqueeze(-1)).to(FP8).view(len(y), -1), scale


def silu(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    return F.silu(x @ w.t())


def silu_quantised(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(silu(x, w, row, plane), 128)


def pair(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    gate, up = w.chunk(2)
    return F.silu(x @ gate.t()) * (x @ up.t())


def pair_quantised(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(pair(x, w, row, plane), 128)


def residual(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    return x @ w.t() + plane


def residual_normed(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    return normed(x @ w.t() + plane, row)


def silu_by_plane(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * plane


def silu_by_plane_quantised(x: Tensor, w: Tensor, row: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(silu_by_plane(x, w, row, plane), 128)


PROGRAMS: dict[Callable[..., Any], str] = {
    bare: "bare",
    norm_by_head: "bare",
    softmax_of_groups: "bare",
    silu: "silu",
    silu_quantised: "silu",
    pair: "pair",
    pair_quantised: "pair",
    residual: "residual",
    residual_normed: "residual",
    silu_by_plane: "silu_by_plane",
    silu_by_plane_quantised: "silu_by_plane",
}
"""Each program, and the name of the one that it is compared with."""


def inputs(seed: int, m: int, n: int, k: int) -> tuple[Tensor, ...]:
    """A, a weight, a row and a plane, each contiguous. Elements of products are about 1, so that eager's
    rounding stays small in exponentials."""
    torch.manual_seed(seed)
    x, w, row, plane = (torch.randn(shape, device="cuda") for shape in ((m, k), (n, k), (128,), (m, n)))
    return x.bfloat16(), (w * k**-0.5).bfloat16(), row.bfloat16(), plane.bfloat16()


def compare(name: str, results: Any, expected: Any) -> None:
    """Raises AssertionError if a result differs from eager's by more than rounding, in norm."""
    for result, right in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        limit = 0.1 if right.dtype is FP8 else WRONG
        error = ((result.float() - right.float()).norm() / right.float().norm()).item()
        assert error < limit, f"{name} differs from eager by {error:.2e}"


@torch.no_grad()
@config.patch(block_reductions="always")
def main() -> None:
    """Writes all times to the file that the command names, and prints a row for each program."""
    require_gpu()
    path, *asked = sys.argv[1:]
    sizes, names = [int(size) for size in asked[:3]] or [4096] * 3, asked[3:]
    named = {fn: beside for fn, beside in PROGRAMS.items() if not names or fn.__name__ in names}
    programs = {fn: of for fn, of in PROGRAMS.items() if fn in named or fn.__name__ in named.values()}
    m, n, k = sizes
    sets = [inputs(seed, m, n, k) for seed in range(CALLS)]
    regions = [region for fn in programs for region in explain(fn, *sets[0]).regions]
    announce([(each.spec, *each.sizes, each.groups) for each in regions], torch.device("cuda"), at_once=True)
    units: dict[tuple[str, str], Any] = {("torch", "mm"): unit_of(lambda x, w, row, plane: x @ w.t(), sets)}
    for fn in programs:
        for backend in ("cute", "inductor"):
            compiled = torch.compile(fn, backend=backend, dynamic=False)
            compare(f"{fn.__name__} by {backend}", compiled(*sets[0]), fn(*sets[0]))
            units[fn.__name__, backend] = unit_of(compiled, sets)
    times = {key: timing.median_us for key, timing in time_units(units, ROUNDS).items()}
    Path(path).write_text(json.dumps({" ".join(key): us for key, us in times.items()}))
    print(f"{m} x {n} x {k}: torch's product {times['torch', 'mm']:.1f} us")
    for fn, beside in programs.items():
        ours, theirs = times[fn.__name__, "cute"], times[fn.__name__, "inductor"]
        kernel = explain(fn, *sets[0]).regions[0].kernel()
        print(
            f"{fn.__name__:<24} {ours:7.1f} us, {ours / times[beside, 'cute']:.3f} of {beside}, "
            f"Inductor {theirs / ours:.2f}, {kernel.plan.tile.name}"
        )


if __name__ == "__main__":
    main()
