"""The activation that `aten._addmm_activation` ends with.

Its gelu depends on the device: by erf on a CPU, by tanh on a GPU. This is how torch decomposes the op
(torch/_decomp/decompositions.py), and how ATen computes it (addmm_out_cuda_impl in ATen/native/cuda/Blas.cpp,
by an epilogue of cuBLASLt or by `gelu_(result, "tanh")`). cuBLASLt applies it to the sum as it was
accumulated, a CPU to the sum in the result's dtype.
"""

from __future__ import annotations

from enum import Enum
from math import pi, sqrt

import torch

from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.lower import lower_cast
from cute_backend.spec import Const, DType, Operand


class Activation(Enum):
    RELU = "relu"
    GELU = "gelu"
    TANH_GELU = "tanh_gelu"


def activated(
    chain: Chain, value: Operand, activation: Activation, out: DType, device: torch.device
) -> Operand:
    """An activation of a sum that becomes `out`, by the ops into which torch decomposes `gelu`."""
    if device.type == "cpu":
        value = lower_cast(chain, value, out)
    if activation is Activation.RELU:
        return chain.emit("relu", value)
    half = chain.emit("mul", value, Const(0.5))
    if activation is Activation.GELU:
        bent = chain.emit("erf", chain.emit("mul", value, Const(sqrt(0.5))))
    else:
        cube = chain.emit("mul", chain.emit("mul", value, value), value)
        inner = chain.emit("add", value, chain.emit("mul", cube, Const(0.044715)))
        bent = chain.emit("tanh", chain.emit("mul", inner, Const(sqrt(2 / pi))))
    return chain.emit("mul", half, chain.emit("add", bent, Const(1)))
