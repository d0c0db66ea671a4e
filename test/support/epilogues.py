"""Epilogues as the torch programs that people write, and inputs for them.

Each is a plain function of tensors. The name of a parameter decides the tensor that is made for it
(`MAKERS`), so `EPILOGUES[name].inputs(Problem(m, n, k))` serves golden modules, GPU tests and the simulator
alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from cute_backend.planning import Arch
from cute_backend.spec import DType

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Problem:
    """The sizes of one product, and the device and the seed of its inputs.

    Scales grow with their index, so that a read that is swapped, shifted or repeated changes the result.
    """

    m: int
    n: int
    k: int
    device: str = "cpu"
    seed: int = 0

    @property
    def head(self) -> int:
        """The columns of a head: the number that models have, if N allows."""
        return next(columns for columns in (128, 16, 4, 1) if self.n % columns == 0)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ends of groups of rows: no row, one row, half of them, no row, and the others by 32."""
        half = max(self.m // 2, 1)
        return (0, 1, half, half, *range(half + 32, self.m, 32), self.m)

    @property
    def k_ends(self) -> tuple[int, ...]:
        """The ends of groups of K: one, none, and all but the last three, which are in no group."""
        return (1, 1, max(self.k - 3, 1))

    @property
    def fp8_k_ends(self) -> tuple[int, ...]:
        """The ends of groups of K in fp8, all but the last multiples of 16: one, none, and all but three."""
        return (16, 16, max(self.k - 3, 16))

    def experts(
        self, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """(G, K, columns), K contiguous, as the transpose of the weights of experts."""
        shape = (len(self.ends), columns, self.k)
        return self.operand(*shape, dtype=dtype, generator=generator).transpose(1, 2)

    def randn(self, *shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, generator=generator, device=self.device).to(dtype)

    def operand(self, *shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Normal values rounded to halves, up to 3.5. They are exact in every dtype that is multiplied, and
        so are the sums of their products. Rounded sums could make comparisons come out differently in
        different places."""
        normal = torch.randn(*shape, generator=generator, device=self.device)
        return (normal * 2).round().clamp(-7, 7).div(2).to(dtype)

    def blocks(self, lines: int, blocks: int) -> Tensor:
        """(lines, blocks) fp32, contiguous along the lines. Adjacent values differ."""
        of_block = torch.arange(blocks, device=self.device)[:, None]
        return ((5 * of_block + 3 * torch.arange(lines, device=self.device)) % 13 + 1.0).t() / 8

    def fp4(self, lines: int, generator: torch.Generator) -> Tensor:
        """(lines, K / 2), two values of E2M1 in a byte: halves of `operand`, rounded to the nearest value."""
        halves = (self.operand(lines, self.k, dtype=torch.float32, generator=generator) * 2).round()
        codes = halves.abs().clamp(max=4).to(torch.uint8) + 8 * (halves < 0).to(torch.uint8)
        return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)

    def tiles(self, lines: int, block: int, dtype: torch.dtype) -> Tensor:
        """Scales of blocks of `block` values in tiles of 128 lines by 4 (cuBLAS, "1D Block Scaling").
        Adjacent values differ, and the padding is zeros."""
        count, first = -(-self.k // block), 124 if dtype is torch.float8_e8m0fnu else 0x28
        line, scale = torch.arange(lines)[:, None], torch.arange(count)
        codes = first + (5 * scale + 3 * line + line // 32 + scale // 4) % 7
        place = (line // 128 * -(-count // 4) + scale // 4) * 512
        place = place + line % 32 * 16 + line % 128 // 32 * 4 + scale % 4
        flat = torch.zeros(-(-lines // 128) * -(-count // 4) * 512, dtype=torch.uint8)
        flat = flat.scatter(0, place.flatten(), codes.to(torch.uint8).flatten())
        return flat.view(dtype).to(self.device)

    def tiles_of_groups(self) -> Tensor:
        """MX scales of rows in groups, (padded rows, padded blocks of K): each group has tiles of its own."""
        counts = [end - first for first, end in pairwise((0, *self.ends))]
        tiles = torch.cat([self.tiles(count, 32, torch.float8_e8m0fnu) for count in counts])
        return tiles.reshape(-1, -(-self.k // 128) * 4)

    def tiles_of_experts(self, columns: int) -> Tensor:
        """MX scales of the columns of each group's B, (G, scales): neighbouring groups have others."""
        whole = self.tiles(columns, 32, torch.float8_e8m0fnu).view(torch.uint8)
        steps = torch.arange(len(self.ends), device=self.device, dtype=torch.uint8)[:, None] % 3
        return (whole + steps * (whole > 0)).view(torch.float8_e8m0fnu)

    def ramp(self, count: int) -> Tensor:
        """(count,) fp32: (i + 1) / count."""
        return torch.arange(1, count + 1, device=self.device, dtype=torch.float32) / count


Maker = Callable[[Problem, torch.Generator], Tensor]


def _a(dtype: torch.dtype) -> Maker:
    return lambda p, g: p.operand(p.m, p.k, dtype=dtype, generator=g)


def _b(dtype: torch.dtype) -> Maker:
    """(K, N), K contiguous, as the transpose of a linear's weight."""
    return lambda p, g: p.operand(p.n, p.k, dtype=dtype, generator=g).t()


def _plane(dtype: torch.dtype) -> Maker:
    return lambda p, g: p.randn(p.m, p.n, dtype=dtype, generator=g)


def _doubled(scales: Tensor) -> Tensor:
    """Scales of E8M0 times two, and zeros as they are."""
    codes = scales.view(torch.uint8)
    return (codes + (codes > 0)).view(scales.dtype)


MAKERS: dict[str, Maker] = {
    "a": _a(E4M3),
    "a_e5m2": _a(E5M2),
    "a_bf16": _a(torch.bfloat16),
    "a_int8": lambda p, g: (p.operand(p.m, p.k, dtype=torch.float32, generator=g) * 2).to(torch.int8),
    "b_int8": lambda p, g: (p.operand(p.n, p.k, dtype=torch.float32, generator=g) * 2).to(torch.int8).t(),
    "w_int8": lambda p, g: (p.operand(p.n, p.k, dtype=torch.float32, generator=g) * 2).to(torch.int8),
    "w_keys": lambda p, g: (p.operand(p.n // 4, p.k, dtype=torch.float32, generator=g) * 2).to(torch.int8),
    "group_scales_keys": lambda p, g: 3 - p.blocks(p.n // 4, p.k // 128),
    "group_zeros_keys": lambda p, g: (p.blocks(p.n // 4, p.k // 128) * 3).to(torch.int8),
    "w_nibbles": lambda p, g: (p.operand(p.n, p.k // 2, dtype=torch.float32, generator=g) * 2).to(
        torch.uint8
    ),
    "group_scales": lambda p, g: p.blocks(p.n, p.k // 128),
    "group_zeros": lambda p, g: (p.blocks(p.n, p.k // 128) * 2).to(torch.int8),
    "w_nibbles_up": lambda p, g: (p.operand(p.n, p.k // 2, dtype=torch.float32, generator=g) * 2).to(
        torch.uint8
    ),
    "group_scales_up": lambda p, g: 3 - p.blocks(p.n, p.k // 128),
    "group_zeros_up": lambda p, g: (p.blocks(p.n, p.k // 128) * 3).to(torch.int8),
    "b": _b(E4M3),
    "b_up": _b(E4M3),
    "b_bf16": _b(torch.bfloat16),
    "x": lambda p, g: p.operand(2, p.m // 2, p.k, dtype=E4M3, generator=g),
    "weight": lambda p, g: p.operand(p.n, p.k, dtype=E4M3, generator=g),
    "scale_a": lambda p, g: p.ramp(p.m)[:, None],
    "scale_b": lambda p, g: p.ramp(p.n)[None, :],
    "scale_b_up": lambda p, g: 2 - p.ramp(p.n)[None, :],
    "scale_wide": lambda p, g: p.ramp(2 * p.n)[None, :],
    "b_wide": lambda p, g: p.operand(2 * p.n, p.k, dtype=E4M3, generator=g).t(),
    "b_wide_bf16": lambda p, g: p.operand(p.k, 2 * p.n, dtype=torch.bfloat16, generator=g),
    "bias_wide": lambda p, g: p.randn(2 * p.n, dtype=torch.bfloat16, generator=g),
    "blocks_a": lambda p, g: p.blocks(p.m, -(-p.k // 128)),
    "blocks_b": lambda p, g: p.blocks(-(-p.n // 128), -(-p.k // 128)).t(),
    "squares_a": lambda p, g: p.blocks(-(-p.m // 128), -(-p.k // 128)),
    "lines_b": lambda p, g: p.blocks(p.n, -(-p.k // 128)).t(),
    "a_fp4": lambda p, g: p.fp4(p.m, g),
    "b_fp4": lambda p, g: p.fp4(p.n, g).t(),
    "mx_a": lambda p, g: p.tiles(p.m, 32, torch.float8_e8m0fnu),
    "mx_b": lambda p, g: p.tiles(p.n, 32, torch.float8_e8m0fnu),
    "mx_b_up": lambda p, g: _doubled(p.tiles(p.n, 32, torch.float8_e8m0fnu)),
    "mx_groups": lambda p, g: p.tiles_of_groups(),
    "mx_experts": lambda p, g: p.tiles_of_experts(2 * p.n),
    "experts_fp8_wide": lambda p, g: p.experts(2 * p.n, g, E4M3),
    "nv_a": lambda p, g: p.tiles(p.m, 16, E4M3),
    "nv_b": lambda p, g: p.tiles(p.n, 16, E4M3),
    "scale_a_one": lambda p, g: torch.full((), 0.25, device=p.device),
    "scale_b_one": lambda p, g: torch.full((), 0.5, device=p.device),
    "scale_out": lambda p, g: torch.full((), 4.0, device=p.device),
    "bias": lambda p, g: p.randn(p.n, dtype=torch.bfloat16, generator=g),
    "row_bf16": lambda p, g: p.randn(p.n, dtype=torch.bfloat16, generator=g),
    "column_bf16": lambda p, g: p.randn(p.m, 1, dtype=torch.bfloat16, generator=g),
    "row": lambda p, g: p.ramp(p.n),
    "threshold": lambda p, g: p.ramp(p.n) - 0.1234567,  # no product of halves and the other ramps
    "scale_rows": lambda p, g: p.ramp(p.m),
    "scale_experts": lambda p, g: p.ramp(len(p.ends) * p.n).reshape(-1, p.n),
    "column": lambda p, g: p.ramp(p.m),
    "labels": lambda p, g: torch.arange(p.m, device=p.device) * 7 % p.n,
    "b_keys": lambda p, g: p.operand(p.n // 4, p.k, dtype=torch.bfloat16, generator=g).t(),
    "b_values": lambda p, g: p.operand(p.n // 4, p.k, dtype=torch.bfloat16, generator=g).t(),
    "bias_values": lambda p, g: p.randn(p.n // 4, dtype=torch.bfloat16, generator=g),
    "residual": _plane(torch.bfloat16),
    "other": _plane(torch.bfloat16),
    "residual_3d": lambda p, g: p.randn(2, p.m // 2, p.n, dtype=torch.bfloat16, generator=g),
    "shift_3d": lambda p, g: p.randn(2, 1, p.n, dtype=torch.bfloat16, generator=g),
    "a_3d_bf16": lambda p, g: p.operand(2, p.m // 2, p.k, dtype=torch.bfloat16, generator=g),
    "b_3d_bf16": lambda p, g: p.operand(2, p.n, p.k, dtype=torch.bfloat16, generator=g).transpose(1, 2),
    "ends": lambda p, g: torch.tensor(p.ends, device=p.device, dtype=torch.int32),
    "k_ends": lambda p, g: torch.tensor(p.k_ends, device=p.device, dtype=torch.int32),
    "fp8_k_ends": lambda p, g: torch.tensor(p.fp8_k_ends, device=p.device, dtype=torch.int32),
    "scale_rows_of_groups": lambda p, g: p.ramp(len(p.fp8_k_ends) * p.m),
    "scale_columns_of_groups": lambda p, g: p.ramp(len(p.fp8_k_ends) * p.n) + 1,
    "gradient": lambda p, g: p.operand(p.k, p.m, dtype=torch.bfloat16, generator=g),
    "layer_input": lambda p, g: p.operand(p.k, p.n, dtype=torch.bfloat16, generator=g),
    "main_gradient": lambda p, g: p.randn(len(p.k_ends), p.m, p.n, dtype=torch.float32, generator=g),
    "experts": lambda p, g: p.experts(p.n, g),
    "experts_fp8": lambda p, g: p.experts(p.n, g, E4M3),
    "experts_wide": lambda p, g: p.experts(2 * p.n, g),
    "router": lambda p, g: p.randn(p.m, len(p.ends), dtype=torch.float32, generator=g),
    "experts_bias": lambda p, g: p.randn(len(p.ends), 2 * p.n, dtype=torch.bfloat16, generator=g),
    "experts_wide_kn": lambda p, g: p.experts(2 * p.n, g).contiguous(),
    "position_3d": lambda p, g: p.randn(1, p.m // 2, p.n, dtype=torch.bfloat16, generator=g),
    "gate_3d": lambda p, g: torch.tensor([0.5, -2.0], device=p.device).reshape(2, 1, 1),
    "keep_3d": lambda p, g: p.ramp(p.m // 2).reshape(1, -1, 1),
    "head_row": lambda p, g: p.randn(p.head, dtype=torch.bfloat16, generator=g),
    "head_places": lambda p, g: p.randn(p.m // 2, p.head, dtype=torch.bfloat16, generator=g),
    "head_gate": lambda p, g: p.ramp(p.n // p.head).bfloat16()[:, None, None],
    "cos": lambda p, g: p.randn(1, p.m // 2, 64, dtype=torch.bfloat16, generator=g),
    "sin": lambda p, g: p.randn(1, p.m // 2, 64, dtype=torch.bfloat16, generator=g),
    "wide_cos": lambda p, g: p.randn(1, p.m // 2, 128, dtype=torch.bfloat16, generator=g),
    "wide_sin": lambda p, g: p.randn(1, p.m // 2, 128, dtype=torch.bfloat16, generator=g),
    "norm_row": lambda p, g: p.randn(128, dtype=torch.bfloat16, generator=g),
    "residual_t": lambda p, g: p.randn(p.n, p.m, dtype=torch.bfloat16, generator=g).t(),
}


@dataclass(frozen=True)
class Epilogue:
    """A program of one region, and the loads and stores that the region must have.

    `loads` gives the kind of each load by role; `stores` the dtype of each output.
    """

    fn: Callable[..., Any]
    loads: dict[str, str]
    stores: tuple[str, ...]
    square: bool = False

    @property
    def name(self) -> str:
        return self.fn.__name__

    def runs_on(self, arch: Arch) -> bool:
        """Whether an architecture has kernels for it: some have no products and casts of fp8, or no products
        of e5m2 or int8."""
        dtypes = {tensor.dtype for tensor in self.inputs(Problem(16, 16, 16))}
        multiplied = {E5M2: DType.E5M2, torch.int8: DType.I8}
        if not {multiplied[each] for each in dtypes & multiplied.keys()} <= arch.target.operands:
            return False
        return arch.target.fp8 or not (E4M3 in dtypes or {"e4m3", "e5m2"} & {*self.stores})

    def inputs(self, problem: Problem) -> tuple[Tensor, ...]:
        """Fresh arguments for `fn`. The same seed gives the same values on one device."""
        if self.square and problem.m != problem.n:
            raise ValueError(f"{self.name} is for M = N, not {problem.m} and {problem.n}")
        generator = torch.Generator(problem.device).manual_seed(problem.seed)
        return tuple(MAKERS[name](problem, generator) for name in inspect.signature(self.fn).parameters)


EPILOGUES: dict[str, Epilogue] = {}

ROWWISE = {"scale_a": "colvec", "scale_b": "rowvec"}


BLOCKWISE: dict[str, Epilogue] = {}
"""Epilogues of block-scaled products, which run only on Hopper."""

MMA_SCALED: dict[str, Epilogue] = {}
"""Epilogues of products whose blocks the MMA scales, which run only on data center Blackwell."""

TILED: dict[str, Epilogue] = {}
"""Epilogues that write the scales of the next product in tiles, which run only on data center Blackwell. N is
a multiple of 32."""

GROUPED: dict[str, Epilogue] = {}
"""Epilogues of grouped products, which run on Hopper and Blackwell."""

SEGMENTS: dict[str, Epilogue] = {}
"""Programs of several products of one A, which share a launch on Hopper and Blackwell."""

STORED: dict[str, Epilogue] = {}
"""Products of weights of 8 bits, which Hopper's kernels convert for few rows."""

BLOCKS: dict[str, Epilogue] = {}
"""Epilogues that reduce blocks of 64 columns, or rotate within them. N is a multiple of 64."""


def epilogue(
    loads: dict[str, str],
    *stores: str,
    square: bool = False,
    table: dict[str, Epilogue] = EPILOGUES,
) -> Callable[[Any], Any]:
    """Enters a program into a table."""

    def enter(fn: Any) -> Any:
        table[fn.__name__] = Epilogue(fn, loads, stores, square)
        return fn

    return enter


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rowwise or tensorwise fp8 product to bf16, as inference uses it."""
    return torch._scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=torch.bfloat16, use_fast_accum=True)


@epilogue(ROWWISE, "bf16")
def rowwise(a, b, scale_a, scale_b):
    return scaled_mm(a, b, scale_a, scale_b)


@epilogue({"scale_a": "scalar", "scale_b": "scalar"}, "bf16")
def tensorwise(a, b, scale_a_one, scale_b_one):
    return scaled_mm(a, b, scale_a_one, scale_b_one)


@epilogue({"colvec0": "colvec", "rowvec0": "rowvec", "rowvec1": "rowvec"}, "bf16")
def int8_dynamic(a_int8, b_int8, column, row, bias):
    """torchao's Int8DynamicActivationInt8Weight: scales of rows, of columns, and a bias."""
    y = (torch._int_mm(a_int8, b_int8) * column[:, None]).bfloat16()
    return (y * row + bias).bfloat16()


@epilogue({"rowvec0": "rowvec", "rowvec1": "rowvec"}, "bf16", table=STORED)
def int8_weight(a_bf16, b_int8, row, bias):
    """torchao's Int8WeightOnly: a scale of each column behind the product, a bias, and silu."""
    y = a_bf16 @ b_int8.to(a_bf16.dtype) * row + bias
    return F.silu(y).to(a_bf16.dtype)


@epilogue({"scale_b": "rowvec", "exact0": "exact"}, "bf16", table=STORED)
def float8_weight(a_bf16, b, scale_b, residual):
    """torchao's Float8WeightOnly: a scale of each column in front of the product, and a residual."""
    return a_bf16 @ (b.float() * scale_b).to(a_bf16.dtype) + residual


@epilogue({"rowvec0": "rowvec"}, "bf16", table=STORED)
def grouped_weight(a_bf16, w_int8, group_scales, group_zeros, bias):
    """torchao's Int8WeightOnly by groups of 128 of K: zeros of int8, scales in fp32, and a bias."""
    return by_groups(a_bf16, w_int8, group_scales, group_zeros) + bias


@epilogue({"rowvec0": "rowvec"}, "bf16", "bf16", table=STORED)
def queries_and_keys(
    a_bf16, w_int8, w_keys, group_scales, group_scales_keys, group_zeros, group_zeros_keys, bias
):
    """The same for queries, which have a bias, and keys, which have none."""
    keys = by_groups(a_bf16, w_keys, group_scales_keys, group_zeros_keys)
    return by_groups(a_bf16, w_int8, group_scales, group_zeros) + bias, keys


def by_groups(a, w, scales, zeros):
    wide = w.reshape(len(w), -1, 128).to(a.dtype) - zeros[..., None].to(a.dtype)
    return a @ (wide * scales[..., None]).reshape(w.shape).to(a.dtype).t()


@epilogue({"rowvec0": "rowvec"}, "bf16", table=STORED)
def nibble_weight(a_bf16, w_nibbles, group_scales, group_zeros, bias):
    """Two values in a byte, in groups of 128 of K: zeros of int8, scales in bf16, and a bias."""
    return by_nibbles(a_bf16, w_nibbles, group_scales, group_zeros) + bias


@epilogue({}, "bf16", table=STORED)
def gated_weights(
    a_bf16, w_nibbles, w_nibbles_up, group_scales, group_scales_up, group_zeros, group_zeros_up
):
    """Gate and up of two values in a byte."""
    gate = by_nibbles(a_bf16, w_nibbles, group_scales, group_zeros)
    return F.silu(gate) * by_nibbles(a_bf16, w_nibbles_up, group_scales_up, group_zeros_up)


def by_nibbles(a, w, scales, zeros):
    n, dtype = len(w), a.dtype
    w = torch.stack([w & 15, w >> 4], -1).view(n, -1, 128).to(dtype)
    w = (w - zeros[..., None].to(dtype)) * scales[..., None].to(dtype)
    return a @ w.view(n, -1).t()


@epilogue({**ROWWISE, "bias": "rowvec"}, "bf16")
def bias(a, b, scale_a, scale_b, bias):
    return scaled_mm(a, b, scale_a, scale_b, bias)


@epilogue({**ROWWISE, "bias": "rowvec", "exact0": "exact"}, "bf16")
def bias_gelu_residual(a, b, scale_a, scale_b, bias, residual):
    return F.gelu(scaled_mm(a, b, scale_a, scale_b, bias), approximate="tanh") + residual


@epilogue({**ROWWISE, "exact0": "exact", "scalar0": "scalar"}, "e4m3")
def silu_mul_quant(a, b, scale_a, scale_b, other, scale_out):
    return (F.silu(scaled_mm(a, b, scale_a, scale_b)) * other * scale_out).clamp(-448, 448).to(E4M3)


@epilogue({**ROWWISE, "exact0": "exact", "scalar0": "scalar"}, "bf16", "e4m3")
def two_outputs(a, b, scale_a, scale_b, residual, scale_out):
    hidden = scaled_mm(a, b, scale_a, scale_b) + residual
    return hidden, (hidden * scale_out).clamp(-448, 448).to(E4M3)


@epilogue({**ROWWISE, "colvec0": "colvec", "rowvec0": "rowvec"}, "bf16")
def bf16_vectors(a, b, scale_a, scale_b, column_bf16, row_bf16):
    return scaled_mm(a, b, scale_a, scale_b) * column_bf16 + row_bf16


@epilogue({**ROWWISE, "bias": "rowvec", "exact0": "exact"}, "bf16")
def linear_3d(x, weight, scale_a, scale_b, bias, residual_3d):
    y = scaled_mm(x.flatten(0, 1), weight.t(), scale_a, scale_b, bias)
    return y.unflatten(0, x.shape[:2]) + residual_3d


@epilogue({**ROWWISE, "rowvec0": "rowvec", "exact0": "exact"}, "bf16")
def clamp_where(a, b, scale_a, scale_b, threshold, residual):
    y = scaled_mm(a, b, scale_a, scale_b)
    return torch.where(y > threshold, y.clamp(-3.0, 3.0), residual)


@epilogue({"scale_a": "colvec", "scale_b": "rowvec"}, "bf16")
def e5m2_relu(a_e5m2, b, scale_a, scale_b):
    # Slow accumulation, which is _scaled_mm's default.
    return torch._scaled_mm(a_e5m2, b, scale_a, scale_b, out_dtype=torch.bfloat16).relu()


@epilogue({"bias": "rowvec"}, "bf16")
def addmm_relu(a_bf16, b_bf16, bias):
    return torch.addmm(bias, a_bf16, b_bf16).relu()


@epilogue({**ROWWISE, "colvec0": "colvec", "rowvec0": "rowvec", "exact0": "exact"}, "bf16", square=True)
def square(a, b, scale_a, scale_b, column, row, residual_t):
    # M = N: only the strides tell a column vector from a row vector, and a plane from its transpose.
    return (scaled_mm(a, b, scale_a, scale_b) * column[:, None] * row + residual_t).to(torch.bfloat16)


@epilogue(ROWWISE, "bf16", "bf16")
def row_maxima(a, b, scale_a, scale_b):
    # The next layer's input, and the maxima that its dynamic rowwise quantisation needs.
    y = F.silu(scaled_mm(a, b, scale_a, scale_b))
    return y, y.abs().amax(-1)


@epilogue({"bias": "rowvec"}, "i64")
def greedy_token(a_bf16, b_bf16, bias):
    return torch.argmax(torch.addmm(bias, a_bf16, b_bf16), -1)


@epilogue({"bias": "rowvec", "colvec0": "colvec"}, "bf16", "bf16")
def label_logit(a_bf16, b_bf16, bias, labels):
    # The two numbers of a row that its cross entropy needs.
    y = torch.addmm(bias, a_bf16, b_bf16)
    return y.gather(-1, labels[:, None]), y.logsumexp(-1)


@epilogue(ROWWISE, "f32", "f32")
def sums(a, b, scale_a, scale_b):
    y = scaled_mm(a, b, scale_a, scale_b).float()
    return y.sum(0), y.logsumexp(-1)


PAIR_ROWWISE = {"scale_a": "colvec", "scale_b0": "rowvec", "scale_b1": "rowvec"}


@epilogue(PAIR_ROWWISE, "bf16", "bf16")
def swiglu(a, b, b_up, scale_a, scale_b, scale_b_up):
    # Two products of one A, and the maxima that dynamic rowwise quantisation needs.
    y = F.silu(scaled_mm(a, b, scale_a, scale_b)) * scaled_mm(a, b_up, scale_a, scale_b_up)
    return y, y.abs().amax(-1)


@epilogue(PAIR_ROWWISE, "bf16")
def swiglu_chunk(a, b_wide, scale_a, scale_wide):
    # One product, whose halves are multiplied.
    gate, up = scaled_mm(a, b_wide, scale_a, scale_wide).chunk(2, -1)
    return F.silu(gate) * up


@epilogue({"bias0": "rowvec", "bias1": "rowvec"}, "bf16")
def swiglu7(a_bf16, b_wide_bf16, bias_wide):
    # One product, whose even and odd columns are combined; its B is contiguous along N.
    y = torch.addmm(bias_wide, a_bf16, b_wide_bf16)
    gate, linear = y[:, ::2].clamp(max=7), y[:, 1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


@epilogue({"bias": "rowvec", "rowvec0": "rowvec", "exact0": "exact", "rowvec1": "rowvec"}, "bf16")
def heads(a_bf16, b_bf16, bias, head_row, head_places, head_gate):
    # As in attention: operands that vary within a head, within a head and along places, and from head to
    # head.
    y = torch.addmm(bias, a_bf16, b_bf16).unflatten(0, (2, -1)).unflatten(-1, (-1, head_row.shape[0]))
    return (y.transpose(1, 2) * head_row + head_places) * head_gate


PER_BATCH = {"exact0": "exact", "colvec0": "colvec", "exact1": "exact", "colvec1": "colvec"}


@epilogue({**ROWWISE, **PER_BATCH}, "bf16", "f32")
def per_batch(x, weight, scale_a, scale_b, position_3d, gate_3d, shift_3d, keep_3d):
    # Operands that vary along some of the axes that M is made of, and not along the others.
    y = scaled_mm(x.flatten(0, 1), weight.t(), scale_a, scale_b).unflatten(0, x.shape[:2])
    y = (y + position_3d) * gate_3d + shift_3d
    return (y * keep_3d).to(torch.bfloat16), y.abs().amax(-1)


@epilogue({"bias": "colvec", "exact0": "exact", "rowvec0": "rowvec"}, "bf16", "f32")
def batched(a_3d_bf16, b_3d_bf16, gate_3d, residual_3d, row):
    # A product for each batch. The rows of all batches are the rows of the plane.
    y = torch.baddbmm(gate_3d.bfloat16(), a_3d_bf16, b_3d_bf16, alpha=0.5)
    y = F.silu(y.float() * row) + residual_3d
    return y.to(torch.bfloat16), y.amax(-1)


@epilogue({}, "bf16", table=BLOCKWISE)
def blockwise(a, b, blocks_a, blocks_b):
    # DeepSeek's recipe: 1 x 128 of A by 128 x 128 of B.
    return torch._scaled_mm(a, b, blocks_a, blocks_b, out_dtype=torch.bfloat16)


@epilogue({"bias": "rowvec", "exact0": "exact"}, "bf16", table=BLOCKWISE)
def blockwise_silu_residual(a, b, blocks_a, blocks_b, bias, residual):
    y = torch._scaled_mm(a, b, blocks_a, blocks_b, bias, out_dtype=torch.bfloat16)
    return F.silu(y) + residual


@epilogue({"exact0": "exact"}, "bf16", table=BLOCKWISE)
def blockwise_lines_gelu_mul(a, b, blocks_a, lines_b, other):
    # 1 x 128 of both, as for gradients of weights.
    y = torch._scaled_mm(a, b, blocks_a, lines_b, out_dtype=torch.bfloat16)
    return F.gelu(y, approximate="tanh") * other


@epilogue({}, "bf16", "f32", table=BLOCKWISE)
def blockwise_squares_amax(a, b, squares_a, lines_b):
    # 128 x 128 of A by 1 x 128 of B, and the maxima that dynamic rowwise quantisation needs.
    y = torch._scaled_mm(a, b, squares_a, lines_b, out_dtype=torch.bfloat16)
    return y, y.float().abs().amax(-1)


@epilogue({"bias": "rowvec", "exact0": "exact"}, "bf16", table=MMA_SCALED)
def mxfp8_silu_residual(a, b, mx_a, mx_b, bias, residual):
    y = torch._scaled_mm(a, b, mx_a, mx_b, bias, out_dtype=torch.bfloat16)
    return F.silu(y) + residual


@epilogue({"exact0": "exact"}, "bf16", "bf16", table=MMA_SCALED)
def mxfp4_residual_amax(a_fp4, b_fp4, mx_a, mx_b, residual):
    y = torch._scaled_mm(a_fp4, b_fp4, mx_a, mx_b, out_dtype=torch.bfloat16) + residual
    return y, y.abs().amax(-1)


@epilogue({"scale_a": "scalar", "scale_b": "scalar", "exact0": "exact"}, "bf16", table=MMA_SCALED)
def nvfp4_gelu_mul(a_fp4, b_fp4, nv_a, nv_b, scale_a_one, scale_b_one, other):
    # Scales of blocks, and a scale of each operand, as in NVIDIA's checkpoints.
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    of_a, of_b = [nv_a, scale_a_one], [nv_b, scale_b_one]
    y = F.scaled_mm(a_fp4, b_fp4, of_a, recipe, of_b, recipe, swizzle, swizzle)
    return F.gelu(y, approximate="tanh") * other


def in_tiles(scales: Tensor) -> Tensor:
    """(rows, scales) in tiles of 128 by 4, which zeros pad, in one vector: torchao's `to_blocked`."""
    rows, columns = (-(-size // tile) for size, tile in zip(scales.shape, (128, 4), strict=True))
    padded = torch.zeros(128 * rows, 4 * columns, dtype=scales.dtype, device=scales.device)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.view(rows, 128, columns, 4).permute(0, 2, 1, 3).reshape(-1, 4, 32, 4)
    return tiles.transpose(1, 2).reshape(-1, 32, 16).flatten()


def in_mxfp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values (M, N) in blocks of 1 x 32, and their scales, (M, N / 32)."""
    blocks = values.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (blocks / scale).flatten(-2).to(E4M3), scale.squeeze(-1).to(torch.float8_e8m0fnu)


@epilogue({}, "e4m3", "e8m0", table=TILED)
def mxfp8_swiglu_quantised(a, b, b_up, mx_a, mx_b, mx_b_up):
    # The first of the two kernels of an MLP in MXFP8.
    gate, up = (
        torch._scaled_mm(a, weight, mx_a, scales, out_dtype=torch.bfloat16)
        for weight, scales in ((b, mx_b), (b_up, mx_b_up))
    )
    values, scales = in_mxfp8(F.silu(gate) * up)
    return values, in_tiles(scales)


@epilogue({"colvec0": "colvec"}, "bf16", table=MMA_SCALED)
def grouped_mxfp8(a, experts_fp8_wide, mx_groups, mx_experts, ends, column):
    # Experts in MXFP8: the halves of one product, and routing weights.
    y = torch._scaled_grouped_mm(a, experts_fp8_wide, mx_groups, mx_experts, ends, out_dtype=torch.bfloat16)
    gate, up = y.chunk(2, -1)
    return (F.silu(gate) * up * column[:, None]).to(torch.bfloat16)


@epilogue({}, "bf16", table=GROUPED)
def grouped(a_bf16, experts_wide, ends):
    # As in Mixtral's experts: the halves of one product are multiplied.
    gate, up = F.grouped_mm(a_bf16, experts_wide, offs=ends).chunk(2, -1)
    return F.silu(gate) * up


@epilogue({"groupvec0": "groupvec", "groupvec1": "groupvec"}, "bf16", table=GROUPED)
def grouped_swiglu7(a_bf16, experts_wide_kn, router, experts_bias):
    # As in GPT-OSS: the even and the odd columns are combined. Weights are contiguous along N, and each
    # expert has a bias. Rows are sorted by expert.
    count = experts_bias.shape[0]
    of_rows, _ = torch.sort(router.argmax(-1))
    ends = torch.cumsum(torch.histc(of_rows.float(), count, 0, count - 1), 0, dtype=torch.int32)
    y = F.grouped_mm(a_bf16, experts_wide_kn, offs=ends) + experts_bias[of_rows]
    gate, linear = y[:, ::2].clamp(max=7), y[:, 1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


@epilogue({"colvec0": "colvec", "exact0": "exact"}, "bf16", "f32", table=GROUPED)
def grouped_routed(a_bf16, experts, ends, column, residual):
    # Routing weights, a plane, and the maxima that dynamic rowwise quantisation needs.
    y = F.grouped_mm(a_bf16, experts, offs=ends).float() * column[:, None] + residual
    return y.to(torch.bfloat16), y.abs().amax(-1)


@epilogue({"scale_a": "colvec", "scale_b": "groupvec", "colvec0": "colvec"}, "bf16", table=GROUPED)
def grouped_fp8(a, experts_fp8, scale_rows, scale_experts, ends, column):
    # Rowwise fp8, and routing weights.
    y = torch._scaled_grouped_mm(
        a, experts_fp8, scale_rows, scale_experts, ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return (y * column[:, None]).to(torch.bfloat16)


@epilogue({"colvec0": "colvec", "exact0": "exact"}, "bf16", "f32", table=GROUPED)
def grouped_columns(a_bf16, experts, ends, column, residual):
    # Columns in groups: weights times tokens, which are columns, and the largest value of each token.
    y = F.silu(F.grouped_mm(experts.mT, a_bf16.t(), offs=ends)) * column + residual.t()
    return y.to(torch.bfloat16), y.amax(0)


@epilogue({"exact0": "exact"}, "f32", table=GROUPED)
def grouped_k(gradient, layer_input, k_ends, main_gradient):
    # The gradient of experts' weights, added to the gradient of earlier steps.
    return F.grouped_mm(gradient.t(), layer_input, offs=k_ends).float() + main_gradient


@epilogue({"scale_a": "colvec", "scale_b": "groupvec", "exact0": "exact"}, "f32", table=GROUPED)
def grouped_k_fp8(a, b, scale_rows_of_groups, scale_columns_of_groups, fp8_k_ends, main_gradient):
    # The same gradient in fp8: both operands are contiguous along K, and groups have scales of their own.
    scales = scale_rows_of_groups, scale_columns_of_groups
    y = torch._scaled_grouped_mm(a, b, *scales, fp8_k_ends, out_dtype=torch.bfloat16, use_fast_accum=True)
    return y.float() + main_gradient


@epilogue({"rowvec0": "rowvec", "exact0": "exact", "exact1": "exact"}, "bf16", table=BLOCKS)
def qk_norm(a_bf16, b_bf16, norm_row, wide_cos, wide_sin):
    # As in Qwen3, which norms each head of queries and keys, rotates it, and stores it as (B, H, S, D).
    heads = torch.mm(a_bf16, b_bf16).unflatten(0, (2, -1)).unflatten(-1, (-1, norm_row.shape[0])).float()
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)
    heads = (norm_row * heads.to(torch.bfloat16)).transpose(1, 2)
    half = heads.shape[-1] // 2
    rotated = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * wide_cos.unsqueeze(1) + rotated * wide_sin.unsqueeze(1)).contiguous()


@epilogue({"exact0": "exact", "exact1": "exact"}, "bf16", table=BLOCKS)
def rotary(a_bf16, b_bf16, cos, sin):
    # As in transformers, which rotates each head of queries and keys, (B, H, S, D), by positions.
    heads = torch.mm(a_bf16, b_bf16).unflatten(0, (2, -1)).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    half = heads.shape[-1] // 2
    rotated = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)


@epilogue({"exact0": "exact", "exact1": "exact"}, "bf16", table=BLOCKS)
def rotary_neighbours(a_bf16, b_bf16, cos, sin):
    # As in GLM, which rotates each column of the first half of a head with the adjacent one.
    heads = torch.mm(a_bf16, b_bf16).unflatten(0, (2, -1)).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    turned, passed = heads.chunk(2, dim=-1)
    cos, sin = (each[..., : turned.shape[-1]].unsqueeze(1) for each in (cos, sin))
    rotated = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((turned * cos + rotated * sin, passed), dim=-1)


@epilogue({"exact0": "exact", "exact1": "exact"}, "bf16", table=BLOCKS)
def rotary_first(a_bf16, b_bf16, cos, sin):
    # As in GPT-NeoX-20B, which rotates the first quarter of a head by halves of 12 columns.
    heads = torch.mm(a_bf16, b_bf16).unflatten(0, (2, -1)).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    turned, passed = heads[..., :24], heads[..., 24:]
    cos, sin = (each[..., :24].unsqueeze(1) for each in (cos, sin))
    rotated = torch.cat((-turned[..., 12:], turned[..., :12]), dim=-1)
    return torch.cat((turned * cos + rotated * sin, passed), dim=-1)


@epilogue(
    {"exact0": "exact", "exact1": "exact", "exact2": "exact", "exact3": "exact", "bias0": "rowvec"},
    "bf16",
    "bf16",
    "bf16",
    table=SEGMENTS,
)
def grouped_query(a_bf16, b_bf16, b_keys, b_values, cos, sin, bias_values):
    # The projections of grouped-query attention: queries and keys rotated, values with a bias.
    def heads(product):
        return product.unflatten(0, (2, -1)).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)

    def rotated(x):
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    values = torch.addmm(bias_values, a_bf16, b_values)
    return rotated(heads(a_bf16 @ b_bf16)), rotated(heads(a_bf16 @ b_keys)), heads(values)


@epilogue({"exact0": "exact", "exact1": "exact"}, "bf16", "bf16", table=SEGMENTS)
def keys_and_values(a_bf16, b_bf16, b_values, cos, sin):
    # Keys, which are rotated, and values as attention reads them: (B, H, S, D) in memory.
    def heads(product):
        return product.unflatten(0, (2, -1)).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)

    keys, half = heads(a_bf16 @ b_bf16), cos.shape[-1] // 2
    turned = torch.cat((-keys[..., half:], keys[..., :half]), dim=-1)
    rotated = keys * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    return rotated.contiguous(), heads(a_bf16 @ b_values).contiguous()
