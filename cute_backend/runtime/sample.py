"""The operator behind `cute_backend.sample`: draws from softmax(hidden @ weight.T / temperature).

    sample(Tensor hidden, Tensor weight, Tensor? temperature, Tensor? seed, int num_samples, Tensor? bias,
           Tensor? scale_hidden, Tensor? scale_weight, bool return_logprob) -> Tensor[]

`hidden` is (H, D), `weight` (V, D); `temperature` is fp32, one element or (H,); `seed` int64, one element;
`bias`, `scale_hidden` and `scale_weight` are vectors, or scales of one element. Without a temperature it is
greedy and needs no seed. The results are the tokens, int64 (H, num_samples), and, if asked for, their
log-probabilities, fp32 of the same shape.

By the Gumbel-max trick a draw is the largest of logit + temperature * noise: for any temperature above 0 that
is where logit / temperature + noise is largest, and at 0 the noise is gone. So the logits never leave the
kernel: they are reduced to one index for each row and sample.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cute_backend import config
from cute_backend.runtime.op import gemm_epilogue
from cute_backend.spec import (
    Accumulator,
    Axis,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Operand,
    ReduceKind,
    Reduction,
    Store,
    Stride,
)

SAMPLES_PER_PASS = 8
"""Draws from one pass over the weights: each keeps a value and an index in registers for each of a thread's
rows. More draws are more passes."""

_DTYPES = {
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.float8_e4m3fn: DType.E4M3,
    torch.float8_e5m2: DType.E5M2,
}
_STRIDES = {
    LoadKind.SCALAR: (Stride.ZERO, Stride.ZERO),
    LoadKind.ROWVEC: (Stride.ZERO, Stride.ONE),
    LoadKind.COLVEC: (Stride.ONE, Stride.ZERO),
}

_LIBRARY = torch.library.Library("cute_backend", "FRAGMENT")
_LIBRARY.define(
    "sample(Tensor hidden, Tensor weight, Tensor? temperature, Tensor? seed, int num_samples, Tensor? bias, "
    "Tensor? scale_hidden, Tensor? scale_weight, bool return_logprob) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _fake(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor | None,
    seed: Tensor | None,
    num_samples: int,
    bias: Tensor | None,
    scale_hidden: Tensor | None,
    scale_weight: Tensor | None,
    return_logprob: bool,
) -> list[Tensor]:
    dtypes = (torch.int64, torch.float32) if return_logprob else (torch.int64,)
    return [hidden.new_empty((hidden.shape[0], num_samples), dtype=dtype) for dtype in dtypes]


@torch.no_grad()
def _sample(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor | None,
    seed: Tensor | None,
    num_samples: int,
    bias: Tensor | None,
    scale_hidden: Tensor | None,
    scale_weight: Tensor | None,
    return_logprob: bool,
) -> list[Tensor]:
    given = {"scale_a": scale_hidden, "scale_b": scale_weight, "bias": bias, "temperature": temperature}
    vectors = {name: tensor.reshape(-1).contiguous() for name, tensor in given.items() if tensor is not None}
    accumulator = Accumulator(
        "acc", _DTYPES[hidden.dtype], _DTYPES[weight.dtype], _major(hidden), _major(weight)
    )
    if temperature is None or seed is None:
        spec = _greedy_spec(accumulator, _loads(vectors))
        (token,) = _run(spec, hidden, weight, vectors)
        tokens = token.unsqueeze(1).repeat(1, num_samples)
        return [tokens, torch.zeros_like(tokens, dtype=torch.float32)] if return_logprob else [tokens]

    low, high = seed.reshape(1).view(torch.int32).split(1)
    drawn: list[Tensor] = []
    normalisers: list[Tensor] = []
    for first in range(0, num_samples, SAMPLES_PER_PASS):
        count = min(SAMPLES_PER_PASS, num_samples - first)
        words = {"seed_low": low, "seed_high": high, "first_sample": torch.full_like(low, first)}
        operands = vectors | words
        spec = _sampling_spec(accumulator, _loads(operands), count, return_logprob and first == 0)
        results = _run(spec, hidden, weight, operands)
        drawn += results[:count]
        normalisers += results[count:]
    tokens = torch.stack(drawn, 1)
    if not return_logprob:
        return [tokens]
    scaled = _logits_of(tokens, hidden, weight, vectors) / vectors["temperature"].unsqueeze(1)
    logprob = scaled - normalisers[0].unsqueeze(1)
    return [tokens, torch.where(vectors["temperature"].unsqueeze(1) == 0, 0.0, logprob)]


torch.library.register_fake("cute_backend::sample", _fake, lib=_LIBRARY)
_LIBRARY.impl("sample", _sample, "CPU")
_LIBRARY.impl("sample", _sample, "CUDA")
_LIBRARY.impl("sample", torch.library.fallthrough_kernel, "Autograd")

sample_op = torch.ops.cute_backend.sample.default


def _run(spec: EpilogueSpec, hidden: Tensor, weight: Tensor, operands: dict[str, Tensor]) -> list[Tensor]:
    loads = list(operands.values())
    return gemm_epilogue([hidden], [weight.t()], loads, spec.to_json(), config.batch_invariant)


def _major(operand: Tensor) -> Major:
    """What a kernel is compiled for: D contiguous, unless only the other mode is. fp8 is always so."""
    only_other = operand.stride(1) != 1 and operand.stride(0) == 1 and operand.element_size() > 1
    return Major.MN if only_other else Major.K


def _loads(operands: dict[str, Tensor]) -> tuple[Load, ...]:
    """The epilogue's operands: over the vocabulary, N, or over the rows, M, where they have many elements."""
    over_n = ("scale_b", "bias")
    loads = []
    for name, tensor in operands.items():
        vector = LoadKind.ROWVEC if name in over_n else LoadKind.COLVEC
        kind = LoadKind.SCALAR if tensor.numel() == 1 and name != "bias" else vector
        dtype = DType.I32 if tensor.dtype is torch.int32 else _DTYPES[tensor.dtype]
        loads.append(Load(name, kind, dtype, *_STRIDES[kind]))
    return tuple(loads)


class _Steps:
    """A chain in the making."""

    def __init__(self, loads: tuple[Load, ...]) -> None:
        self.ops: list[Op] = []
        self.logits: Operand = "acc"
        names = [load.name for load in loads]
        for name, op in (("scale_a", "mul"), ("scale_b", "mul"), ("bias", "add")):
            if name in names:
                self.logits = self.emit(op, self.logits, name)

    def emit(self, op: str, *operands: Operand, dtype: DType = DType.F32) -> str:
        name = f"t{len(self.ops)}"
        self.ops.append(Op(name, op, operands, dtype))
        return name


def _store(index: int, value: Operand, kind: ReduceKind) -> Store:
    assert isinstance(value, str)
    dtype = DType.I64 if kind.is_index else DType.F32
    return Store(f"out{index}", value, dtype, reduce=Reduction(Axis.ROW, kind))


@cache
def _greedy_spec(accumulator: Accumulator, loads: tuple[Load, ...]) -> EpilogueSpec:
    steps = _Steps(loads)
    stores = (_store(0, steps.logits, ReduceKind.ARGMAX),)
    return EpilogueSpec((accumulator,), loads, tuple(steps.ops), stores)


@cache
def _sampling_spec(
    accumulator: Accumulator, loads: tuple[Load, ...], samples: int, normaliser: bool
) -> EpilogueSpec:
    """So many argmaxima over the vocabulary, each with noise of its own, and the logsumexp if asked for."""
    steps = _Steps(loads)
    row, column = (steps.emit(f"{axis}_index", dtype=DType.I32) for axis in ("row", "column"))
    stores = []
    for index in range(samples):
        number = steps.emit("add", "first_sample", Const(index), dtype=DType.I32)
        noise = steps.emit("gumbel", "seed_low", "seed_high", column, row, number)
        score = steps.emit("add", steps.logits, steps.emit("mul", "temperature", noise))
        stores.append(_store(index, score, ReduceKind.ARGMAX))
    if normaliser:
        scaled = steps.emit("div", steps.logits, "temperature")
        stores.append(_store(samples, scaled, ReduceKind.LOGSUMEXP))
    return EpilogueSpec((accumulator,), loads, tuple(steps.ops), tuple(stores))


def _logits_of(tokens: Tensor, hidden: Tensor, weight: Tensor, vectors: dict[str, Tensor]) -> Tensor:
    """The logits (H, num_samples) of a few tokens, in fp32, a sample at a time: no (H, V) tensor."""
    rows = weight.view(torch.uint8) if weight.element_size() == 1 else weight
    wide = hidden.to(torch.float32)
    logits = []
    for picked in tokens.unbind(1):
        logit = (wide * rows[picked].view(weight.dtype).to(torch.float32)).sum(1)
        for name, index in (("scale_a", None), ("scale_b", picked)):
            if name in vectors:
                scale = vectors[name]
                logit = logit * (scale if index is None or scale.numel() == 1 else scale[index])
        logits.append(logit + vectors["bias"][picked] if "bias" in vectors else logit)
    return torch.stack(logits, 1)
