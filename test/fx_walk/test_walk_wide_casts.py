"""Values cast from 16 bits to fp32 under `emulate_precision_casts`: ops after the cast compute in fp32.

In a chain such a cast is no step, as every 16-bit value is one of fp32 too. So whether an op rounds its steps
follows from the dtype that the op computes in. What eager casts was rounded before, even if torch decomposes
the op that it comes from.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
M, N, K = 24, 40, 16

Op = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of the product, a plane of its dtype, an fp32 vector, and bytes."""


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def divided(mode: str) -> Op:
    return lambda y, r, vector, bytes: torch.div(y.float(), r.float(), rounding_mode=mode)


PROGRAMS: dict[str, Op] = {
    "cube": lambda y, r, vector, bytes: y.float() ** 3,
    "power": lambda y, r, vector, bytes: (y.abs() / 64).float() ** 2.3,
    "trunc": divided("trunc"),
    "floor": divided("floor"),
    "cube_of_a_sum": lambda y, r, vector, bytes: (y + r).float() ** 3,
    "cube_of_a_maximum": lambda y, r, vector, bytes: y.amax(-1, keepdim=True).float() ** 3,
    "power_of_a_sum": lambda y, r, vector, bytes: ((y + r).abs() / 64).float() ** 2.3,
    "trunc_by_a_vector": lambda y, r, vector, bytes: torch.div(y, vector, rounding_mode="trunc"),
    "floor_by_a_number": lambda y, r, vector, bytes: torch.div(y.float(), 3.3, rounding_mode="floor"),
    "gelu_by_hand": lambda y, r, vector, bytes: gelu_by_hand((y / 2048).float()),
    "triple_of_a_decomposed_op": lambda y, r, vector, bytes: F.leaky_relu(y, 0.3).float() * 3,
    "cube_of_a_decomposed_op": lambda y, r, vector, bytes: F.hardswish(y).float() ** 3,
    "there_and_back": lambda y, r, vector, bytes: (y.float() ** 3).to(y.dtype) ** 3,
    "floor_in_16_bits_after_a_cast": lambda y, r, vector, bytes: torch.div(
        (y.float() * 1.1).to(y.dtype), r, rounding_mode="floor"
    ),
    "cube_in_16_bits": lambda y, r, vector, bytes: (y / 64) ** 3,
    "trunc_by_bytes": lambda y, r, vector, bytes: torch.div(y, bytes, rounding_mode="trunc"),
    "floor_by_bytes": lambda y, r, vector, bytes: torch.div(y, bytes, rounding_mode="floor"),
}


@pytest.mark.sweep(7)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_op_rounds_as_in_eager(name: str, dtype: torch.dtype, fresh_compiler: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, r = (
        (torch.randint(-6, 7, size, generator=generator) * scale).to(dtype)
        for size, scale in (((M, K), 37), ((K, N), 1), ((M, N), 1 / 32))
    )
    vector = torch.rand(N, generator=generator) + 0.1
    bytes = torch.randint(1, 100, (M, N), generator=generator).to(torch.int8)
    arguments = (x, w, torch.where(r == 0, 0.3, r).to(dtype), vector, bytes)

    def program(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        return PROGRAMS[name](x @ w, *others)

    with inductor_config.patch(emulate_precision_casts=True):
        result = torch.compile(program, backend="cute")(*arguments)
    assert counters["cute_backend"]["regions"] == 1
    wanted = program(*arguments)
    assert result.dtype is wanted.dtype
    assert torch.equal(result, wanted)
