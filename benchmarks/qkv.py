"""Time the q, k and v projections of a Llama 8B layer on a GPU: in one launch, in three, and by Inductor.

    python benchmarks/qkv.py FILE.json [plain|bias|rope|heads|packed|norm|bf16|fp8|TOKENS...]

For one token of each of 1 and 64 sequences, and for 512, 2,048 and 8,192 tokens of one, in bf16 and in fp8
(rowwise scales): bare, with biases, and with rotary embeddings on q and k, in the kernel and behind it; these
also with results contiguous as (B, H, S, D), with one weight for q, k and v, and with an RMS norm of each
head of q and k before the rotation. Further arguments select cases. Results are compared with eager first. In
CUDA graphs, interleaved, from a cold L2; microseconds, medians.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rotary import FP8, HEAD, HIDDEN, compare, rotate_half
from torch import Tensor

from cute_backend import config, explain
from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.runtime import launch

HEADS = (32, 8, 8)
SHAPES = {"1": (1, 1), "64": (64, 1), "512": (1, 512), "2048": (1, 2048), "8192": (1, 8192)}
DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
CALLS, ROUNDS = 4, 15

SETTINGS = {
    "shared": {"shared_launches": True, "rotary_embeddings": "always"},
    "behind": {"shared_launches": True, "rotary_embeddings": "never", "block_reductions": "never"},
    "apart": {"shared_launches": False, "rotary_embeddings": "always"},
}
"""The settings of our kernels, by name."""


def projections(x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    """The products (B, S, columns) of x (B, S, HIDDEN). `scales` of fp8 values are x's, then weights'."""
    if not scales:
        return [
            torch.nn.functional.linear(x, weight, biases[i] if biases else None)
            for i, weight in enumerate(weights)
        ]
    flat, (of_x, *of_weights) = x.flatten(0, 1), scales
    return [
        torch._scaled_mm(
            flat,
            weight.t(),
            of_x,
            of_weights[i],
            bias=biases[i] if biases else None,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).unflatten(0, x.shape[:2])
        for i, weight in enumerate(weights)
    ]


def heads(x: Tensor) -> Tensor:
    """(B, S, heads * HEAD) as (B, heads, S, HEAD), as attention reads it."""
    return x.view(*x.shape[:2], -1, HEAD).transpose(1, 2)


def plain(x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: list[Tensor], *rest: Tensor) -> Any:
    """The projections alone."""
    return [heads(each) for each in projections(x, weights[:3], [], scales)]


def bias(x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: list[Tensor], *rest: Tensor) -> Any:
    """The projections with biases, as Qwen2 has them."""
    return [heads(each) for each in projections(x, weights[:3], biases, scales)]


def rope(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: list[Tensor], cos: Tensor, sin: Tensor
) -> Any:
    """The projections, with rotary embeddings on q and k."""
    q, k, v = (heads(each) for each in projections(x, weights[:3], [], scales))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v


def contiguous(*args: Any) -> Any:
    """`rope`, with results that are contiguous."""
    return [each.contiguous() for each in rope(*args)]


def packed(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: list[Tensor], cos: Tensor, sin: Tensor
) -> Any:
    """`rope` with one projection for queries, keys and values, as Phi-3 has it."""
    (every,) = projections(x, weights[3:], [], [scales[0], scales[4]] if scales else [])
    q, k, v = (heads(each) for each in every.split([count * HEAD for count in HEADS], -1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The RMS norm of each head, as Qwen3 spells it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norm(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: list[Tensor], cos: Tensor, sin: Tensor
) -> Any:
    """`contiguous` with norms of queries and keys by head, as Qwen3 has them. Biases serve as weights."""
    q, k, v = (heads(each) for each in projections(x, weights[:3], [], scales))
    q, k, cos, sin = (
        rms_norm(q, biases[0][:HEAD]),
        rms_norm(k, biases[1][:HEAD]),
        cos.unsqueeze(1),
        sin.unsqueeze(1),
    )
    rotated = (each * cos + rotate_half(each) * sin for each in (q, k))
    return [each.contiguous() for each in (*rotated, v)]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "bias": bias,
    "rope": rope,
    "heads": contiguous,
    "packed": packed,
    "norm": norm,
}


def inputs(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """x, weights and the three of them as one, biases, scales, cosines and sines."""
    torch.manual_seed(seed)
    batch, length = shape
    x = torch.randn(batch, length, HIDDEN, device="cuda")
    weights = [torch.randn(count * HEAD, HIDDEN, device="cuda") * HIDDEN**-0.5 for count in HEADS]
    weights.append(torch.cat(weights))
    biases = [torch.randn(count * HEAD, device="cuda", dtype=torch.bfloat16) for count in HEADS]
    angles = torch.arange(length, device="cuda")[None, :, None] * 1e4 ** (
        -torch.arange(HEAD // 2, device="cuda") / (HEAD // 2)
    )
    angles = torch.cat((angles, angles), -1).expand(batch, length, HEAD)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    scales = []
    if dtype is FP8:
        weights = [weight * HIDDEN**0.5 for weight in weights]
        scales = [torch.full((batch * length, 1), HIDDEN**-0.5, device="cuda")]
        scales += [torch.ones(1, len(weight), device="cuda") for weight in weights]
    return x.to(dtype), [weight.to(dtype) for weight in weights], biases, scales, cos, sin


def asked(options: Iterable[str]) -> list[str]:
    """Returns the options that the command names; all of them if it names none."""
    return [each for each in options if each in sys.argv[2:]] or list(options)


@torch.no_grad()
def main() -> None:
    """Writes all times to the file that the command names, and prints a row for each case."""
    require_gpu()
    cases = {
        (dtype, tokens, name): [inputs(SHAPES[tokens], DTYPES[dtype], i) for i in range(CALLS)]
        for dtype in asked(DTYPES)
        for tokens in asked(SHAPES)
        for name in asked(PROGRAMS)
    }
    found = {}
    for setting, values in SETTINGS.items():
        with config.patch(**values):  # type: ignore[attr-defined]
            for key, sets in cases.items():
                found[(*key, setting)] = explain(PROGRAMS[key[-1]], *sets[0]).regions
    regions = [region for each in found.values() for region in each]
    launch.announce([(each.spec, *each.sizes, each.groups) for each in regions], torch.device("cuda"))
    units: dict[tuple[str, ...], Any] = {}
    for key, sets in cases.items():
        program = PROGRAMS[key[-1]]
        for by in (*SETTINGS, "inductor"):
            torch._dynamo.reset()
            with config.patch(**SETTINGS.get(by, {})):  # type: ignore[attr-defined]
                compiled = torch.compile(
                    program, backend="inductor" if by == "inductor" else "cute", dynamic=False
                )
                compare(f"{key} by {by}", compiled(*sets[0]), program(*sets[0]))
                units[(*key, by)] = unit_of(compiled, sets)
    times = {key: timing.median_us for key, timing in time_units(units, ROUNDS).items()}
    Path(sys.argv[1]).write_text(json.dumps({" ".join(key): us for key, us in times.items()}))
    for key in cases:
        shared = times[(*key, "shared")]
        others = ", ".join(
            f"{by} {times[(*key, by)]:7.1f} ({times[(*key, by)] / shared:.2f})"
            for by in (*SETTINGS, "inductor")[1:]
        )
        tiles = ", ".join(region.kernel().config.name for region in found[(*key, "shared")])
        print(f"{' '.join(key):<16} {shared:7.1f} us, {others}; {tiles}")


if __name__ == "__main__":
    main()
