"""`sample`: tokens drawn from the logits of a vocabulary, without the logits."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from cute_backend.errors import UsageError
from cute_backend.runtime.calls.sample_op import sample_op
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.signature import TMA_ALIGN

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALF)
_ACCEPTED = "bfloat16 by bfloat16, float16 by float16, or fp8 of which one at least is float8_e4m3fn"


@overload
def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float | Tensor = ...,
    num_samples: int = ...,
    seed: int | Tensor | None = ...,
    generator: torch.Generator | None = ...,
    bias: Tensor | None = ...,
    scale_hidden: Tensor | None = ...,
    scale_weight: Tensor | None = ...,
    return_logprob: Literal[False] = ...,
) -> Tensor: ...


@overload
def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float | Tensor = ...,
    num_samples: int = ...,
    seed: int | Tensor | None = ...,
    generator: torch.Generator | None = ...,
    bias: Tensor | None = ...,
    scale_hidden: Tensor | None = ...,
    scale_weight: Tensor | None = ...,
    return_logprob: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    num_samples: int = 1,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    bias: Tensor | None = None,
    scale_hidden: Tensor | None = None,
    scale_weight: Tensor | None = None,
    return_logprob: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Tokens drawn from softmax((hidden @ weight.T * scales + bias) / temperature), in one kernel.

    `hidden` is (H, D) and `weight` (V, D), a vocabulary matrix as `nn.Linear` keeps it: bf16, fp16, or fp8
    with D contiguous. `bias` is (V,), in fp32, bf16 or fp16. The scales are fp32, and are taken for operands
    of every dtype: `scale_hidden` has one element, (H,) or (H, 1), and `scale_weight` one element, (V,), (V,
    1) or (1, V). All tensors are on one device. Returns int64 (H, num_samples). The logits are fp32 and never
    in memory: each draw adds Gumbel noise to them and takes the index of the largest. One pass over the
    weights draws up to eight samples, or seven with their log-probabilities; more samples take several
    passes.

    Kernels read tensors whose pitch is a multiple of 16 bytes and in which D, or in 16 bits either axis, is
    contiguous. Each call copies any other tensor: copies are not kept, since not every write to a tensor can
    be detected. Store a weight of odd D padded, as a view, which is read without a copy: `F.pad(weight, (0,
    -D % 8))[:, :D]` for 16-bit weights.

    `temperature` is a number, or a tensor, 0-d or with one value for each row, that is read on the device,
    without a synchronisation. At 0 the index of the largest logit is drawn, or the lowest index of equal
    ones. A row whose temperature tensor holds NaN gives index 0. A row with a NaN among its logits gives the
    index of the first NaN. A negative or infinite temperature gives any index.

    The noise of a draw depends only on the seed, the row, the token's index in the vocabulary and the number
    of the sample (Philox4x32-10; docs/guides.md says which word of which counter). `seed` is a number,
    which gives the same draws at each call, or an int64 tensor of one element on the device, which each call
    reads there and then increases by 1, so that a CUDA graph draws other tokens at every replay. Without one,
    it is drawn from `generator`, or from torch's own.

    With `return_logprob` the result is a pair: the tokens, and the logarithms of the probabilities that they
    were drawn with, fp32 (H, num_samples), 0 at temperature 0. The results have no derivative.

    Raises UsageError for arguments that contradict one another or that are not supported.

    >>> hidden, weight = torch.eye(2, 16, dtype=torch.bfloat16), torch.eye(40, 16, dtype=torch.bfloat16)
    >>> sample(hidden, weight, temperature=0.0).tolist()
    [[0], [1]]
    """
    _check_product(hidden, weight)
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    vectors = {
        "bias": _vector("bias", bias, hidden, ((vocabulary,),), _FLOATS),
        "scale_hidden": _vector("scale_hidden", scale_hidden, hidden, ((), (1,), (rows,), (rows, 1))),
        "scale_weight": _vector(
            "scale_weight",
            scale_weight,
            hidden,
            ((), (1,), (vocabulary,), (vocabulary, 1), (1, vocabulary)),
        ),
    }
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise UsageError(f"sample got num_samples={num_samples!r}; it draws 1 or more")
    heat = _temperature(temperature, hidden)
    _check_seed(seed, generator, hidden)
    greedy = not isinstance(temperature, Tensor) and temperature == 0
    key = None if greedy else _seed(seed, generator, hidden)
    operands = _readable("hidden", hidden), _readable("weight", weight)
    results = sample_op(*operands, heat, key, num_samples, *vectors.values(), return_logprob)
    if isinstance(seed, Tensor):
        seed.add_(1)
    return (results[0], results[1]) if return_logprob else results[0]


def _check_product(hidden: Tensor, weight: Tensor) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if not isinstance(tensor, Tensor):
            raise UsageError(f"sample got {name} of type {type(tensor).__name__}; it takes a tensor")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        is_transposed = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[0]
        raise UsageError(
            f"sample got hidden {_shape(hidden)} and weight {_shape(weight)}; it takes (H, D) and (V, D)"
            + (", the weight as nn.Linear keeps it, not its transpose" if is_transposed else "")
        )
    if weight.shape[0] == 0:
        raise UsageError(f"sample got weight {_shape(weight)}; there is nothing to draw from")
    fp8 = hidden.dtype in _FP8 and weight.dtype in _FP8
    if not (hidden.dtype is weight.dtype and hidden.dtype in _HALF) and not (
        fp8 and torch.float8_e4m3fn in (hidden.dtype, weight.dtype)
    ):
        raise UsageError(
            f"sample got hidden of {_name(hidden.dtype)} and weight of {_name(weight.dtype)}; "
            f"it multiplies {_ACCEPTED}"
        )
    _check_device("weight", weight, hidden)


def _readable(name: str, tensor: Tensor) -> Tensor:
    """The tensor, (rows, D), or a copy of it, with strides that a kernel reads by TMA."""
    elements = TMA_ALIGN // tensor.element_size()
    unit = 0 if tensor.stride(1) != 1 and elements < TMA_ALIGN else 1
    pitch, lines = tensor.stride(1 - unit), tensor.shape[1 - unit]
    if tensor.stride(unit) == 1 and (lines == 1 or (pitch > 0 and pitch % elements == 0)):
        return tensor
    if not torch.compiler.is_compiling():
        count("operands_copied")
        warn_once(
            ("sample", name),
            f"cute_backend: sample copies {name}, {_shape(tensor)} with strides {tensor.stride()}, at each "
            f"call: its kernel wants D contiguous and a pitch in multiples of {elements} elements.",
        )
    rows, depth = tensor.shape
    pitch = (depth + elements - 1) // elements * elements
    return tensor.new_empty((rows, pitch))[:, :depth].copy_(tensor)


def _vector(
    name: str,
    tensor: Tensor | None,
    hidden: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> Tensor | None:
    """An operand along one axis, unchanged. Raises UsageError for another shape or dtype."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise UsageError(f"sample got {name} of type {type(tensor).__name__}; it takes a tensor")
    if tuple(tensor.shape) not in shapes or tensor.dtype not in dtypes:
        wanted = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise UsageError(
            f"sample got {name} {_shape(tensor)} of {_name(tensor.dtype)}; it takes {wanted} of "
            f"{' or '.join(map(_name, dtypes))}"
        )
    _check_device(name, tensor, hidden)
    return tensor


def _temperature(temperature: float | Tensor, hidden: Tensor) -> Tensor | None:
    """The temperature on the device, fp32; None for the numbers 1 and 0, which need no scaling."""
    if isinstance(temperature, Tensor):
        rows = hidden.shape[0]
        tensor = _vector("temperature", temperature, hidden, ((), (1,), (rows,), (rows, 1)), _FLOATS)
        assert tensor is not None
        return tensor.to(torch.float32)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise UsageError(
            f"sample got temperature of type {type(temperature).__name__}; it takes a number or a tensor"
        )
    if not 0 <= temperature < math.inf:  # this also works for a traced number
        raise UsageError(f"sample got temperature={temperature}; it takes 0 or a positive finite number")
    if temperature in (0, 1):
        return None
    # A number is an operand too: as a constant of the kernel, each number would need a kernel of its own.
    return torch.full((1,), float(temperature), dtype=torch.float32, device=hidden.device)


def _check_seed(seed: int | Tensor | None, generator: torch.Generator | None, hidden: Tensor) -> None:
    if seed is not None and generator is not None:
        raise UsageError("sample got both seed and generator; it takes one of them")
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype is not torch.int64:
            raise UsageError(
                f"sample got seed {_shape(seed)} of {_name(seed.dtype)}; as a tensor it is one int64"
            )
        _check_device("seed", seed, hidden)
    elif seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64
    ):
        raise UsageError(f"sample got seed={seed!r}; it takes an integer of 64 bits")
    if generator is not None and generator.device.type != hidden.device.type:
        raise UsageError(
            f"sample got a generator on {generator.device} and hidden on {hidden.device}; it takes one device"
        )


def _seed(seed: int | Tensor | None, generator: torch.Generator | None, hidden: Tensor) -> Tensor:
    """The 64-bit key of the noise, one int64 on the device."""
    if isinstance(seed, Tensor):
        return seed
    if seed is not None:
        signed = seed - 2**64 if seed >= 2**63 else seed
        return torch.full((1,), signed, dtype=torch.int64, device=hidden.device)
    bounds = torch.iinfo(torch.int64)
    return torch.randint(
        bounds.min, bounds.max, (1,), dtype=torch.int64, device=hidden.device, generator=generator
    )


def _check_device(name: str, tensor: Tensor, hidden: Tensor) -> None:
    if tensor.device != hidden.device:
        raise UsageError(
            f"sample got hidden on {hidden.device} and {name} on {tensor.device}; it takes one device"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
