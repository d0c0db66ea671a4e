"""The programs of `scaled_mm`, spelled for QuACK; imported only if the package `quack` is installed.

The module is written for quack-kernels 0.6 on Hopper. QuACK promotes fp8 sums by default and offers no
argument for fast accumulation; its kernel objects have the switch `fp8_slow_accum`, which `EpiMod.gemm` sets
before it traces. Each call takes a tile, so the first call times a few, and the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quack.activation import gelu_tanh_approx
from quack.epilogue import gemm_epilogue
from quack.epilogue.ops import ColVecLoad, RowVecLoad
from torch import Tensor

from cute_backend.bench import scaled_mm
from cute_backend.bench.program_timing import time_units, unit_of

_SCALES = {"scale_a": ColVecLoad("scale_a"), "scale_b": RowVecLoad("scale_b")}
_FAST_ACCUMULATION = (("fp8_slow_accum", False),)

_TILES: tuple[dict[str, Any], ...] = (
    {"tile_M": 128, "tile_N": 256, "cluster_M": 2},
    {"tile_M": 256, "tile_N": 128, "cluster_M": 2},
    {"tile_M": 128, "tile_N": 192, "cluster_M": 2, "pingpong": True},
    {"tile_M": 128, "tile_N": 128, "cluster_M": 1, "pingpong": True},
    {"tile_M": 64, "tile_N": 256, "cluster_M": 1},
    {"tile_M": 64, "tile_N": 128, "cluster_M": 1},
)


@gemm_epilogue(ops=_SCALES)
def scaled(acc, scale_a, scale_b):
    return {"D": acc * scale_a * scale_b}


@gemm_epilogue(ops={**_SCALES, "bias": RowVecLoad("bias")})
def scaled_bias_gelu_residual(acc, c, scale_a, scale_b, bias):
    return {"D": gelu_tanh_approx(acc * scale_a * scale_b + bias) + c}


def _bare(tile: dict[str, Any], x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    return _gemm(scaled, tile, x, weight, None, {"scale_a": x_scale.view(1, -1), "scale_b": weight_scale})


def _full(
    tile: dict[str, Any],
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    residual: Tensor,
) -> Tensor:
    operands = {"scale_a": x_scale.view(1, -1), "scale_b": weight_scale, "bias": bias[None]}
    return _gemm(scaled_bias_gelu_residual, tile, x, weight, residual, operands)


def _gemm(
    epilogue: Any,
    tile: dict[str, Any],
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    operands: dict[str, Tensor],
) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    epilogue.gemm(x, weight, out, residual, epi_args=operands, post_init_attrs=_FAST_ACCUMULATION, **tile)
    return out


_SPELLINGS: dict[Callable[..., Any], Callable[..., Tensor]] = {scaled_mm.bare: _bare, scaled_mm.full: _full}


def spelling(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """`fn`, one of the programs of `scaled_mm`, as QuACK runs it with the best tile for its sizes."""
    run = _SPELLINGS[fn]
    best: dict[str, Any] | None = None

    def call(*args: Tensor) -> Tensor:
        nonlocal best
        if best is None:
            units = {
                index: unit_of(lambda *each, tile=tile: run(tile, *each), [args] * 10)
                for index, tile in enumerate(_TILES)
            }
            timings = time_units(units, rounds=10)
            best = _TILES[min(timings, key=lambda index: timings[index].median_us)]
        return run(best, *args)

    return call
