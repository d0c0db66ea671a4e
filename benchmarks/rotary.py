"""Times rotary embeddings on a GPU: the q and k projections of a Llama 8B layer, with and without them.

Columns are rotated with those half a head away, as in Llama, or with the adjacent ones, as in Cohere.

    python benchmarks/rotary.py FILE.json [halves|neighbours]

It times 2,048 tokens of one sequence and one token of each of 64, in bf16 and in fp8 (rowwise scales), by our
kernels and by Inductor's. Results are compared with eager first. Programs run in CUDA graphs, interleaved,
from a cold L2; figures are medians in microseconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cute_backend import config, explain
from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.runtime.calls import launch

HIDDEN, HEAD, Q_HEADS, K_HEADS = 4096, 128, 32, 8
SHAPES = {"2048": (1, 2048), "64": (64, 1)}
CALLS, ROUNDS, WRONG = 4, 15, 2e-2
FP8 = torch.float8_e4m3fn


def rotate_half(x: Tensor) -> Tensor:
    """The rotation of halves, as transformers spells it."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    """The rotation of adjacent columns, as transformers spells it for Cohere."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


ROTATIONS = {"halves": rotate_half, "neighbours": rotate_pairs}


def rotated(
    rotate: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Heads (B, H, S, D) of q and k, (B, S, H * D) each, as attention reads them."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = (each.view(*each.shape[:2], -1, HEAD).transpose(1, 2) for each in (q, k))
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def bf16(x: Tensor, wq: Tensor, wk: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    """The two projections of x (B, S, HIDDEN)."""
    return x @ wq.t(), x @ wk.t()


def fp8(x: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    """The two projections of fp8 values. `scales` are that of x (M, 1), then those of wq and wk (1, N)."""
    of_x, *of_w = scales
    return tuple(
        torch._scaled_mm(
            x.flatten(0, 1), w.t(), of_x, of, out_dtype=torch.bfloat16, use_fast_accum=True
        ).unflatten(0, x.shape[:2])
        for w, of in zip((wq, wk), of_w, strict=True)
    )


def bare(product: Callable[..., Any]) -> Callable[..., Any]:
    """The projections alone."""

    def program(*args: Tensor) -> Any:
        return product(*args)

    return program


def with_rope(product: Callable[..., Any], rotation: str) -> Callable[..., Any]:
    """The projections with rotary embeddings."""

    def program(*args: Tensor) -> Any:
        return rotated(ROTATIONS[rotation], *product(*args), args[3], args[4])

    return program


def inputs(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """x, both weights, cosines and sines; for fp8 the scales as well."""
    torch.manual_seed(seed)
    (batch, length), half = shape, HEAD // 2
    x = torch.randn(batch, length, HIDDEN, device="cuda")
    wq, wk = (torch.randn(heads * HEAD, HIDDEN, device="cuda") for heads in (Q_HEADS, K_HEADS))
    angles = torch.arange(length, device="cuda")[None, :, None] * 1e4 ** (
        -torch.arange(half, device="cuda") / half
    )
    angles = torch.cat((angles, angles), -1).expand(batch, length, HEAD)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    if dtype is torch.bfloat16:
        return x.bfloat16(), (wq * HIDDEN**-0.5).bfloat16(), (wk * HIDDEN**-0.5).bfloat16(), cos, sin
    scales = [torch.full((batch * length, 1), HIDDEN**-0.5, device="cuda")]
    scales += [torch.ones(1, len(w), device="cuda") for w in (wq, wk)]
    return x.to(FP8), wq.to(FP8), wk.to(FP8), cos, sin, *scales


def compare(name: str, results: Any, expected: Any) -> None:
    """Raises AssertionError if a result differs from eager's by more than rounding, in norm."""
    for result, right in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        error = ((result.float() - right.float()).norm() / right.float().norm()).item()
        assert error < WRONG, f"{name} differs from eager by {error:.2e}"


@torch.no_grad()
@config.patch(rotary_embeddings="always")
def main() -> None:
    """Writes all times to the file that the command names, and prints a row for each case."""
    require_gpu()
    cases = {
        (dtype, tokens, rotation): (
            product,
            [inputs(shape, torch.bfloat16 if dtype == "bf16" else FP8, seed) for seed in range(CALLS)],
        )
        for dtype, product in (("bf16", bf16), ("fp8", fp8))
        for tokens, shape in SHAPES.items()
        for rotation in sys.argv[2:] or ROTATIONS
    }
    programs = {
        key: (with_rope(product, key[-1]), bare(product), sets) for key, (product, sets) in cases.items()
    }
    found = {key: explain(rope, *sets[0]).regions for key, (rope, _, sets) in programs.items()}
    regions = [region for each in found.values() for region in each]
    launch.announce(
        [(each.spec, *each.sizes, each.groups) for each in regions], torch.device("cuda"), at_once=True
    )
    units: dict[tuple[str, ...], Any] = {}
    for key, (rope, alone, sets) in programs.items():
        for backend in ("cute", "inductor"):
            torch._dynamo.reset()
            compiled = torch.compile(rope, backend=backend, dynamic=False)
            compare(f"{key} by {backend}", compiled(*sets[0]), rope(*sets[0]))
            units[(*key, backend)] = unit_of(compiled, sets)
        units[(*key, "bare")] = unit_of(alone, sets)
    times = {key: timing.median_us for key, timing in time_units(units, ROUNDS).items()}
    Path(sys.argv[1]).write_text(json.dumps({" ".join(key): us for key, us in times.items()}))
    for key, regions in found.items():
        ours, theirs, alone = (times[(*key, by)] for by in ("cute", "inductor", "bare"))
        tiles = ", ".join(region.kernel().plan.tile.name for region in regions)
        print(
            f"{' '.join(key):<20} {ours:7.1f} us, Inductor {theirs:7.1f} ({theirs / ours:.2f}), "
            f"torch's products alone {alone:7.1f}; {len(regions)} kernels, {tiles}"
        )


if __name__ == "__main__":
    main()
