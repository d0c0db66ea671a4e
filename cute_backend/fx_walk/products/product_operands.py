"""The operands of a product: their dtypes, layouts and devices, and the accumulator that they determine."""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import DTYPES, describe, fake, known
from cute_backend.fx_walk.products.anchor import Addend
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, user_label
from cute_backend.fx_walk.values.classify import classify
from cute_backend.spec import Accumulator, DType, Major, ProductKind


def accumulator_of(
    node: fx.Node, a: fx.Node, b: fx.Node, a_dtype: DType, b_dtype: DType, fast_accum: bool
) -> Accumulator:
    (m, k), n = fake(a).shape[-2:], fake(b).shape[-1]
    if any(known(size == 0) for size in (*fake(a).shape, n)):
        raise Refused(Reason.EMPTY, m=m, n=n, k=k)
    for operand in (a, b):
        if fake(operand).device != fake(node).device:
            raise Refused(
                Reason.OPERAND_DEVICE,
                operand=user_label(operand),
                device=fake(operand).device,
                anchor=fake(node).device,
            )
    kinds = {(2, 2): ProductKind.DENSE, (3, 3): ProductKind.BATCHED}
    kind = kinds.get((fake(a).dim(), fake(b).dim()), ProductKind.GROUPED)
    if kind is ProductKind.DENSE and fake(node).dim() == 3:
        kind = ProductKind.K_GROUPED
    majors = tuple(Major)
    if a_dtype.bits == 8:
        majors = (Major.K,)
    elif kind is ProductKind.K_GROUPED:
        majors = (Major.MN,)
    return Accumulator(
        name="acc",
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        a_major=_major(a, -1, majors),
        b_major=_major(b, -2, majors),
        fast_accum=fast_accum,
        kind=kind,
    )


def operand_dtypes(a: fx.Node, b: fx.Node, accepted: tuple[DType, ...]) -> tuple[DType, DType]:
    a_dtype, b_dtype = DTYPES.get(fake(a).dtype), DTYPES.get(fake(b).dtype)
    if a_dtype not in accepted or b_dtype not in accepted:
        raise unmultiplied(a, b)
    return a_dtype, b_dtype


def unmultiplied(a: fx.Node, b: fx.Node) -> Refused:
    """The refusal of operands that no target multiplies."""
    taken = "bf16, fp16, int8 and fp8, and fp4 with scales of blocks"
    return Refused(Reason.OPERAND_DTYPE, where="kernels", a=fake(a).dtype, b=fake(b).dtype, taken=taken)


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES or not DTYPES[dtype].is_float:
        raise Refused(Reason.OUT_DTYPE, dtype=dtype)
    return dtype


def bias_of(node: fx.Node, bias: fx.Node | None) -> Addend | None:
    return None if bias is None else Addend(classify(bias, fake(node).shape, fake(node).device), 1)


def check_devices(scales: tuple[fx.Node, fx.Node], anchor: torch.device) -> None:
    for scale in scales:
        if (device := fake(scale).device) != anchor:
            raise Refused(Reason.OPERAND_DEVICE, operand=user_label(scale), device=device, anchor=anchor)


def _major(operand: fx.Node, k_axis: int, majors: tuple[Major, ...]) -> Major:
    """The contiguous mode of a 2-D operand, or of each matrix of a batch, among the supported ones. It is K
    if both could be, because one has size 1."""
    tensor = fake(operand)
    if tensor.dim() == 3:
        _check_step(operand, tensor)
    for major, axis in ((Major.K, k_axis), (Major.MN, -3 - k_axis)):
        if major not in majors:
            continue
        if known(tensor.stride(axis) == 1) or known(tensor.shape[axis] == 1):
            leading = tensor.stride(-3 - axis)
            if known(tensor.shape[-3 - axis] == 1):
                return major
            if known(leading == 0):
                continue
            if known((leading * tensor.element_size()) % 16 != 0):
                raise Refused(
                    Reason.OPERAND_ALIGNMENT,
                    operand=user_label(operand),
                    bytes=leading * tensor.element_size(),
                    elements=16 // tensor.element_size(),
                )
            return major
    accepted = "one of its two modes has to be contiguous"
    if majors == (Major.MN,):
        accepted = "where K lies in groups only the other mode may be contiguous, as of (K, M).t() and (K, N)"
    if majors == (Major.K,):
        form = "weight.t() of a row-major (N, K) weight" if k_axis == -2 else "a row-major (M, K) tensor"
        accepted = f"int8, fp8 and fp4 want K contiguous, as in {form}"
    raise Refused(
        Reason.OPERAND_LAYOUT,
        operand=user_label(operand),
        strides=describe(tensor.stride()),
        accepted=accepted,
    )


def _check_step(operand: fx.Node, tensor: torch.Tensor) -> None:
    """Refuses a batch whose stride TMA does not support, or whose matrices are all the same."""
    step = tensor.stride(0)
    if known(tensor.shape[0] == 1) or not (known(step == 0) or known(step * tensor.element_size() % 16 != 0)):
        return
    raise Refused(
        Reason.OPERAND_LAYOUT,
        operand=user_label(operand),
        strides=describe(tensor.stride()),
        accepted="TMA requires strides from batch to batch that are multiples of 16 bytes and not 0; torch "
        "gives a linear's weight the stride 0 in a bmm if the leading axes of the input do not collapse",
    )
