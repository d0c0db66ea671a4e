"""The operator behind `cute_backend.sample`: draws from softmax(hidden @ weight.T / temperature).

    sample(Tensor hidden, Tensor weight, Tensor? temperature, Tensor? seed, int num_samples, Tensor? bias,
           Tensor? scale_hidden, Tensor? scale_weight, bool return_logprob) -> Tensor[]

`hidden` is (H, D), `weight` (V, D); `temperature` is fp32, one element or (H,); `seed` int64, one element;
`bias`, `scale_hidden` and `scale_weight` are vectors, or scales of one element. Without a temperature it is
1. Without a seed the op is greedy, whatever the temperature is. The results are the tokens, int64 (H,
num_samples), and, if asked for, their log-probabilities, fp32 of the same shape.

By the Gumbel-max trick, a draw is the index with the largest logit / temperature + noise. The op takes the
largest logit + temperature * noise, which has the same index for any temperature above 0, and also works at
0. So the logits never leave the kernel: they are reduced to one index for each row and sample.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cute_backend import config
from cute_backend.kinds import reductions
from cute_backend.planning import Constraints
from cute_backend.runtime.calls.op import gemm_epilogue
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
    Reduction,
    Store,
    Stride,
)

SAMPLES_PER_PASS = 8
"""The most draws from one pass over the weights. Each draw keeps a value and an index in registers for each
of a thread's rows. A logsumexp keeps as much, and takes the place of one draw. More draws need more
passes."""


def passes_of(num_samples: int, normaliser: bool) -> int:
    """The passes over the weights that draws take, with a logsumexp or without."""
    return -(-(num_samples + normaliser) // SAMPLES_PER_PASS)


_BATCH_INVARIANT = Constraints(batch_invariant=True).text
"""A tile by name and a place for rowvecs are for regions: draws are never under these constraints."""

_DTYPES = {
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.float8_e4m3fn: DType.E4M3,
    torch.float8_e5m2: DType.E5M2,
    torch.int32: DType.I32,
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
    hidden: Tensor, _weight: Tensor, _temperature: Any, _seed: Any, num_samples: int, *others: Any
) -> list[Tensor]:
    return_logprob = others[-1]
    dtypes = (torch.int64, torch.float32) if return_logprob else (torch.int64,)
    return [hidden.new_empty((hidden.shape[0], num_samples), dtype=dtype) for dtype in dtypes]


def run_sample(
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
    """The op, on any device: products through `gemm_epilogue` and aten ops."""
    given = {"scale_a": scale_hidden, "scale_b": scale_weight, "bias": bias, "temperature": temperature}
    vectors = {name: tensor.reshape(-1).contiguous() for name, tensor in given.items() if tensor is not None}
    if seed is None:
        vectors.pop("temperature", None)
        (token,) = _run(hidden, weight, vectors, 0, False)
        tokens = token.unsqueeze(1).expand(-1, num_samples).contiguous()
        return [tokens, torch.zeros_like(tokens, dtype=torch.float32)] if return_logprob else [tokens]

    words = seed.reshape(1).view(torch.int32)
    low, high = words.narrow(0, 0, 1), words.narrow(0, 1, 1)
    drawn: list[Tensor] = []
    normalisers: list[Tensor] = []
    while (first := len(drawn)) < num_samples:
        normaliser = return_logprob and first == 0
        count = min(SAMPLES_PER_PASS - normaliser, num_samples - first)
        operands = vectors | {"seed_low": low, "seed_high": high}
        if first:
            operands["first_sample"] = torch.full_like(low, first)
        results = _run(hidden, weight, operands, count, normaliser)
        drawn += results[:count]
        normalisers += results[count:]
    tokens = drawn[0].unsqueeze(1) if num_samples == 1 else torch.stack(drawn, 1)
    if not return_logprob:
        return [tokens]
    with torch.no_grad():
        logits, shift = _logits_of(tokens, hidden, weight, vectors), normalisers[0].unsqueeze(1)
        if "temperature" not in vectors:
            return [tokens, logits - shift]
        heat = vectors["temperature"].unsqueeze(1)
        return [tokens, torch.where(heat == 0, 0.0, logits / heat - shift)]


torch.library.register_fake("cute_backend::sample", _fake, lib=_LIBRARY)
_LIBRARY.impl("sample", run_sample, "CPU")
_LIBRARY.impl("sample", run_sample, "CUDA")
_LIBRARY.impl("sample", torch.library.fallthrough_kernel, "Autograd")

sample_op = torch.ops.cute_backend.sample.default


def _run(
    hidden: Tensor, weight: Tensor, operands: dict[str, Tensor], samples: int, normaliser: bool
) -> list[Tensor]:
    """`samples` draws for each row, or for 0 the most likely token, and the logsumexp if asked for."""
    signature = tuple((name, tensor.dtype, tensor.numel() == 1) for name, tensor in operands.items())
    spec = _spec(_layout(hidden), _layout(weight), signature, samples, normaliser)
    constraints = _BATCH_INVARIANT if config.batch_invariant else ""
    return gemm_epilogue([hidden], [weight.t()], list(operands.values()), spec, constraints)


_Layout = tuple[torch.dtype, Major]
_Signature = tuple[tuple[str, torch.dtype, bool], ...]
"""Name, dtype, and whether it is of one element."""


def _layout(operand: Tensor) -> _Layout:
    """The layout that a kernel is compiled for: D contiguous, unless only the other mode is. fp8 always has D
    contiguous."""
    only_other = operand.stride(1) != 1 and operand.stride(0) == 1 and operand.element_size() > 1
    return operand.dtype, Major.MN if only_other else Major.K


@cache
def _spec(hidden: _Layout, weight: _Layout, operands: _Signature, samples: int, normaliser: bool) -> str:
    """The spec as JSON. It is cached, because making it costs more than a launch."""
    accumulator = Accumulator("acc", _DTYPES[hidden[0]], _DTYPES[weight[0]], hidden[1], weight[1])
    loads = _loads(operands)
    steps = _Steps(loads)
    best = [_store(0, steps.logits, reductions.ARGMAX)]
    stores = _draws(steps, loads, samples, normaliser) if samples else best
    return EpilogueSpec((accumulator,), loads, tuple(steps.ops), tuple(stores)).to_json()


def _loads(operands: _Signature) -> tuple[Load, ...]:
    """The epilogue's operands: over the vocabulary, N, or over the rows, M, where they have many elements."""
    over_n = ("scale_b", "bias")
    loads = []
    for name, dtype, single in operands:
        vector = LoadKind.ROWVEC if name in over_n else LoadKind.COLVEC
        kind = LoadKind.SCALAR if single and name != "bias" else vector
        loads.append(Load(name, kind, _DTYPES[dtype], *_STRIDES[kind]))
    return tuple(loads)


class _Steps:
    """A chain of ops that is being built."""

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


def _store(index: int, value: Operand, kind: reductions.ReductionKind) -> Store:
    assert isinstance(value, str)
    dtype = kind.stored_as(DType.F32)[0]
    return Store(f"out{index}", value, dtype, Reduction(Axis.ROW, kind))


def _draws(steps: _Steps, loads: tuple[Load, ...], samples: int, normaliser: bool) -> list[Store]:
    """`samples` argmaxima over the vocabulary, each with noise of its own, and the logsumexp if asked for."""
    names = [load.name for load in loads]
    row, column = (steps.emit(f"{axis}_index", dtype=DType.I32) for axis in ("row", "column"))
    stores = []
    for index in range(samples):
        number: Operand = Const(index)
        if "first_sample" in names:
            number = steps.emit("add", "first_sample", number, dtype=DType.I32)
        noise = steps.emit("gumbel", "seed_low", "seed_high", column, row, number)
        if "temperature" in names:
            noise = steps.emit("mul", "temperature", noise)
        stores.append(_store(index, steps.emit("add", steps.logits, noise), reductions.ARGMAX))
    if normaliser:
        scaled = steps.logits
        if "temperature" in names:
            scaled = steps.emit("div", scaled, "temperature")
        stores.append(_store(samples, scaled, reductions.LOGSUMEXP))
    return stores


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
