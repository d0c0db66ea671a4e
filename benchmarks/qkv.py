"""Time the projections to queries, keys and values on a GPU: in one launch, in three, and by Inductor.

    python benchmarks/qkv.py FILE.json [LAYOUT...] [PROGRAM...] [bf16|fp8] [TOKENS...] [SETTING...] [tiles]

For 1, 16 and 64 sequences of one token, and for 256, 512, 1,024, 2,048, 4,096 and 8,192 tokens of one, in
bf16 and in fp8 (rowwise scales). `LAYOUTS` are the layers that can be timed; the default is that of Llama 8B.
Its projections are timed bare, with biases, and with rotary embeddings on q and k, in the kernel and behind
it; these also with results contiguous as (B, H, S, D), with one weight for q, k and v, with an RMS norm of
each head of q and k before the rotation, and with k and v in a cache, which the kernel writes, or in the
setting "copied" a kernel of Inductor's. Projections of other layers are rotated, as their models do it.
Further arguments select cases. With `tiles`, the kernel that rotates is also timed in every tile that the
planner offers.
Results are compared with eager first. In CUDA graphs, interleaved, from a cold L2; microseconds, medians.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cute_backend import config, explain
from cute_backend.api import ExplainedRegion
from cute_backend.bench.program_timing import Unit, require_gpu, time_units, unit_of
from cute_backend.fx_walk.search import shared_launch
from cute_backend.planning import Alignment, offered, plan
from cute_backend.runtime.arguments.device import device_at, max_active_clusters
from cute_backend.runtime.calls.prepare import announce
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.tuning.timing import arguments_of, taken_by


@dataclass(frozen=True)
class Layout:
    """The projections of a layer: the width of x, the numbers of heads of q, k and v, the columns of a head,
    how many of these are rotated, whether there are biases, and the program that the layer is."""

    hidden: int
    heads: tuple[int, int, int]
    columns: int
    turned: int
    biased: bool = False
    program: str = "rope"


LAYOUTS = {
    "llama": Layout(4096, (32, 8, 8), 128, 128),
    "llama-1b": Layout(2048, (32, 8, 8), 64, 64),
    "llama-70b": Layout(8192, (64, 8, 8), 128, 128),
    "qwen2-7b": Layout(3584, (28, 4, 4), 128, 128, biased=True),
    "neox": Layout(6144, (64, 64, 64), 96, 24, biased=True, program="by_heads"),
    "pythia": Layout(2560, (32, 32, 32), 80, 20, biased=True, program="by_heads"),
    "phi": Layout(2560, (32, 32, 32), 80, 32, biased=True),
    "danube": Layout(2560, (32, 8, 8), 80, 80),
    "nemotron": Layout(3072, (24, 8, 8), 128, 64),
    "gemma": Layout(2560, (8, 4, 4), 256, 256, program="norm"),
}
"""Llama 8B, Llama 3.2 1B, Llama 70B, Qwen2 7B, GPT-NeoX-20B, Pythia 2.8B, Phi-2, H2O-Danube 1.8B,
Nemotron-Mini 4B and Gemma 3 4B."""

SHAPES = {
    "1": (1, 1),
    "16": (16, 1),
    "64": (64, 1),
    "256": (1, 256),
    "512": (1, 512),
    "1024": (1, 1024),
    "2048": (1, 2048),
    "4096": (1, 4096),
    "8192": (1, 8192),
}
FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
CALLS, ROUNDS, WRONG = 4, 15, 2e-2

DEFAULT: dict[str, Any] = {"shared_launches": True, "rotary_embeddings": "auto"}

SETTINGS = {
    "copied": {"shared_launches": True, "rotary_embeddings": "always", "cache_writes": False},
    "shared": {"shared_launches": True, "rotary_embeddings": "always"},
    "behind": {"shared_launches": True, "rotary_embeddings": "never", "block_reductions": "never"},
    "apart": {"shared_launches": False, "rotary_embeddings": "always"},
}
"""The settings of our kernels, by name. "shared" is one launch, whatever the cost model predicts."""


def rotate_half(x: Tensor) -> Tensor:
    """The rotation of halves, as transformers spells it."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def compare(name: str, results: Any, expected: Any) -> None:
    """Raises AssertionError if a result differs from eager's by more than rounding, in norm."""
    for result, right in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        error = ((result.float() - right.float()).norm() / right.float().norm()).item()
        assert error < WRONG, f"{name} differs from eager by {error:.2e}"


@contextmanager
def setting(name: str) -> Iterator[None]:
    """Applies one of `SETTINGS`, or for another name the settings that are the default."""
    with config.patch(**SETTINGS.get(name, DEFAULT)):  # type: ignore[attr-defined]
        if name not in ("shared", "copied"):
            yield
        else:
            with mock.patch.object(shared_launch, "_loss", return_value=None):
                yield


def inputs(layout: Layout, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """x (B, S, hidden), the weights of q, k and v and of all three, their biases, the scales of x and of the
    weights if these are fp8, cosines and sines (B, S, turned), caches of keys and values, which are zeros,
    and the position from which they are written."""
    torch.manual_seed(seed)
    (batch, length), hidden, half = shape, layout.hidden, layout.turned // 2
    x = torch.randn(batch, length, hidden, device="cuda")
    widths = [count * layout.columns for count in layout.heads]
    weights = [torch.randn(width, hidden, device="cuda") * hidden**-0.5 for width in widths]
    weights.append(torch.cat(weights))
    biases = [torch.randn(width, device="cuda", dtype=torch.bfloat16) for width in widths]
    biases.append(torch.cat(biases))
    angles = torch.arange(length, device="cuda")[None, :, None] * 1e4 ** (
        -torch.arange(half, device="cuda") / half
    )
    angles = torch.cat((angles, angles), -1).expand(batch, length, 2 * half)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    scales = []
    if dtype is FP8:
        weights = [weight * hidden**0.5 for weight in weights]
        scales = [torch.full((batch * length, 1), hidden**-0.5, device="cuda")]
        scales += [torch.ones(1, len(weight), device="cuda") for weight in weights]
    sizes = (batch, layout.heads[1], 2 * length + 512, layout.columns)
    caches = [torch.zeros(sizes, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    first = torch.tensor(length + 3, device="cuda")
    return x.to(dtype), [weight.to(dtype) for weight in weights], biases, scales, cos, sin, caches, first


def projections(x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    """The products (B, S, columns) of x (B, S, hidden). `scales` of fp8 values are x's, then weights'."""
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


def heads(x: Tensor, width: int) -> Tensor:
    """(B, S, H * width) as (B, H, S, width), as attention reads it."""
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, S, D), of which the columns that cos and sin (B, S, turned) have are rotated."""
    turned, cos, sin = cos.shape[-1], cos.unsqueeze(1), sin.unsqueeze(1)
    if turned == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    part, passed = x[..., :turned], x[..., turned:]
    return torch.cat((part * cos + rotate_half(part) * sin, passed), -1)


def apart(layout: Layout, biased: bool, *args: Any) -> list[Tensor]:
    """q, k and v of three projections."""
    x, weights, biases, scales, *_ = args
    products = projections(x, weights[:3], biases if biased else [], scales)
    return [heads(each, layout.columns) for each in products]


def together(layout: Layout, *args: Any) -> Tensor:
    """q, k and v (B, S, columns) of one projection."""
    x, weights, biases, scales, *_ = args
    scales = [scales[0], scales[4]] if scales else []
    (every,) = projections(x, weights[3:], biases[3:] if layout.biased else [], scales)
    return every


def plain(layout: Layout, *args: Any) -> Any:
    """The projections alone."""
    return apart(layout, False, *args)


def bias(layout: Layout, *args: Any) -> Any:
    """The projections with biases, as Qwen2 has them."""
    return apart(layout, True, *args)


def rope(layout: Layout, *args: Any) -> Any:
    """The projections, with rotary embeddings on q and k."""
    q, k, v = apart(layout, layout.biased, *args)
    return turn(q, *args[4:6]), turn(k, *args[4:6]), v


def contiguous(layout: Layout, *args: Any) -> Any:
    """`rope`, with results that are contiguous."""
    return [each.contiguous() for each in rope(layout, *args)]


def packed(layout: Layout, *args: Any) -> Any:
    """`rope` with one projection for queries, keys and values, as Phi-3 has it."""
    parts = together(layout, *args).split([count * layout.columns for count in layout.heads], -1)
    q, k, v = (heads(each, layout.columns) for each in parts)
    return turn(q, *args[4:6]), turn(k, *args[4:6]), v


def by_heads(layout: Layout, *args: Any) -> Any:
    """`rope` with one projection, which has the query, key and value of the first head, then those of the
    second, as GPT-NeoX has it."""
    q, k, v = heads(together(layout, *args), 3 * layout.columns).chunk(3, -1)
    return turn(q, *args[4:6]), turn(k, *args[4:6]), v


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The RMS norm of each head, as Qwen3 spells it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norm(layout: Layout, *args: Any) -> Any:
    """`contiguous` with norms of queries and keys by head, as Qwen3 has them. Biases serve as weights."""
    q, k, v = apart(layout, False, *args)
    q, k = (
        turn(rms_norm(each, of[: layout.columns]), *args[4:6])
        for each, of in zip((q, k), args[2][:2], strict=True)
    )
    return [each.contiguous() for each in (q, k, v)]


def cache(layout: Layout, *args: Any) -> Any:
    """`rope`, with keys and values in a cache that is longer, as static caches of transformers have them."""
    q, *keys_and_values = rope(layout, *args)
    caches, first = args[6:]
    positions = torch.arange(q.shape[2], device=q.device) + first
    for each, result in zip(caches, keys_and_values, strict=True):
        each.index_copy_(2, positions, result)
    return q.contiguous()


PROGRAMS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "bias": bias,
    "rope": rope,
    "heads": contiguous,
    "packed": packed,
    "norm": norm,
    "cache": cache,
}
"""The programs of the first layout."""

OF_LAYERS = {"rope": rope, "by_heads": by_heads, "norm": norm}
"""The programs that other layers are."""

Case = tuple[str, str, str, str]
"""The names of a layout, a dtype, a number of tokens and a program."""


def asked(options: Iterable[str]) -> list[str]:
    """Returns the options that the command names; all of them if it names none."""
    return [each for each in options if each in sys.argv[2:]] or list(options)


def wanted() -> dict[Case, Callable[..., Any]]:
    """The cases that the command names, each with its program."""
    first = next(iter(LAYOUTS))
    found = {}
    for layout in [each for each in LAYOUTS if each in sys.argv[2:]] or [first]:
        programs = asked(PROGRAMS) if layout == first else [LAYOUTS[layout].program]
        for dtype in asked(DTYPES):
            for tokens in asked(SHAPES):
                for name in programs:
                    program = partial((PROGRAMS | OF_LAYERS)[name], LAYOUTS[layout])
                    found[layout, dtype, tokens, name] = program
    return found


def every_tile(region: ExplainedRegion) -> dict[str, Unit]:
    """The kernel of a region in each tile that is offered, by the names of tiles. The one that the cost model
    chooses is the first."""
    m, n, k = map(int, region.sizes)
    offers = (plan(region.spec, each, Alignment.TMA) for each in offered(device_at(0).arch, region.spec))
    plans = list(dict.fromkeys((region.kernel().plan, *offers)))
    built = obtain(map(Kernel, plans))
    generator = torch.Generator("cuda").manual_seed(0)
    sets = [arguments_of(plans, m, n, k, generator) for _ in range(CALLS)]
    units = {}
    for kernel, function in built.items():
        if isinstance(function, Exception):
            raise function
        clusters = max_active_clusters(0, kernel.plan.tile.cluster_size)
        own = [taken_by(kernel.plan, each) for each in sets]
        units[kernel.plan.tile.name] = unit_of(lambda *args, f=function, c=clusters: f(*args, c), own)
    return units


@torch.no_grad()
def main() -> None:
    """Writes all times to the file that the command names, and prints a row for each case."""
    require_gpu()
    programs = wanted()
    cases = {
        key: [inputs(LAYOUTS[key[0]], SHAPES[key[2]], DTYPES[key[1]], i) for i in range(CALLS)]
        for key in programs
    }
    found = {}
    settings = list(dict.fromkeys(("shared", *asked(SETTINGS))))
    for name in (*settings, "default"):
        with setting(name):
            for key, sets in cases.items():
                found[(*key, name)] = explain(programs[key], *sets[0]).regions
    regions = [region for each in found.values() for region in each]
    announce([(each.spec, *each.sizes, each.groups) for each in regions], torch.device("cuda"), at_once=True)
    units: dict[tuple[str, ...], Any] = {}
    for key, sets in cases.items():
        for by in (*settings, "inductor"):
            torch._dynamo.reset()
            with setting(by):
                backend = "inductor" if by == "inductor" else "cute"
                compiled = torch.compile(programs[key], backend=backend, dynamic=False)
                results, expected = (outcome(each, sets[0]) for each in (compiled, programs[key]))
                compare(f"{key} by {by}", results, expected)
                units[(*key, by)] = unit_of(compiled, sets)
        if "tiles" in sys.argv[2:] and len(found[(*key, "shared")]) == 1:
            tiles = every_tile(found[(*key, "shared")][0])
            units |= {(*key, "tile", name): unit for name, unit in tiles.items()}
    times = {key: timing.median_us for key, timing in time_units(units, ROUNDS).items()}
    Path(sys.argv[1]).write_text(json.dumps({" ".join(key): us for key, us in times.items()}))
    for key in cases:
        report(key, times, found)


def outcome(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A program's results, and what it writes to caches of zeros."""
    for each in args[6]:
        each.zero_()
    results = program(*args)
    return results, [each.clone() for each in args[6]] if any(each.any() for each in args[6]) else []


def report(key: Case, times: dict[tuple[str, ...], float], found: dict[tuple[str, ...], Any]) -> None:
    """Prints the times of a case, and what the default settings choose."""
    by_setting = {each[4]: us for each, us in times.items() if each[:4] == key and len(each) == 5}
    shared = by_setting.pop("shared")
    others = ", ".join(f"{by} {us:7.1f} ({us / shared:.2f})" for by, us in by_setting.items())
    names = ", ".join(region.kernel().plan.tile.name for region in found[(*key, "shared")])
    rotates = any(region.spec.moves_columns for region in found[(*key, "default")])
    print(
        f"{' '.join(key):<27} {shared:7.1f} us, {others}; {names}; {'rotates' * rotates or 'not'} by default"
    )
    tiles = {each[-1]: us for each, us in times.items() if each[:5] == (*key, "tile")}
    if tiles:
        chosen, best = next(iter(tiles)), min(tiles, key=tiles.__getitem__)
        print(f"{'':<27} {tiles[chosen]:7.1f} us alone, {tiles[best]:7.1f} in {best}")


if __name__ == "__main__":
    main()
