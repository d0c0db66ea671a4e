"""Ops on the bits of values: tensors read as another dtype, and fp32 rounded up to the codes of E8M0."""

from __future__ import annotations

import torch
from torch import fx

from cute_backend.fx_walk.graph.static import fake, first_argument, target_name, tensor_of
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.spec import Const, DType, Operand

_AS_BITS = "aten.view.dtype"

_ROWS = {
    (torch.float32, torch.int32): "bits",
    (torch.int32, torch.float32): "of_bits",
    (torch.uint8, torch.float8_e8m0fnu): "of_e8m0",
}
"""The row of the op table that reads bits of the first dtype as the second. There is none for bf16 and fp16,
as their values may be kept in fp32."""

_CEILING = {
    "asm_str": "cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;",
    "constraints": "=h,r",
    "dtype": torch.uint16,
    "is_pure": True,
    "pack": 1,
}
"""torchao's inline PTX for data center Blackwell: the code of E8M0 that fp32 is rounded up to, in 16 bits."""


def reads_bits(node: fx.Node) -> bool:
    """Whether a call reads the bits of each element as an element of another dtype, or is torchao's
    conversion of fp32 to E8M0."""
    if node.op != "call_function":
        return False
    source, result = tensor_of(first_argument(node)), tensor_of(node)
    if source is None or result is None:
        return False
    if target_name(node) == _AS_BITS:
        return source.dtype.itemsize == result.dtype.itemsize
    return _is_ceiling(node) and source.dtype is torch.float32


def _is_ceiling(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or len(node.args) != 1:
        return False
    is_inline = node.target.name() == "inline_asm_elementwise"
    return is_inline and {"is_pure": True, "pack": 1, **node.kwargs} == _CEILING


def lower_bits(node: fx.Node, chain: Chain, value: Operand) -> Operand:
    """Appends a call of which `reads_bits` is true to the chain, and returns its value. Raises Refused if the
    op table has no row for the dtypes."""
    source, wanted = fake(first_argument(node)).dtype, fake(node).dtype
    if _is_ceiling(node):
        return _code_above(chain, value)
    if source is wanted:
        return value
    row = _ROWS.get((source, wanted))
    if row is None:
        raise Refused(Reason.UNSUPPORTED_OP, target=_AS_BITS, why=f"reads {source} as {wanted}")
    read = chain.emit(row, value)
    return chain.cast(read, DType.E8M0) if wanted is torch.float8_e8m0fnu else read


def _code_above(chain: Chain, value: Operand) -> Operand:
    """The code of the least power of two that is not below a magnitude: 255 for NaN, 254 beyond 2^127 (PTX
    ISA, cvt.rp.satfinite.ue8m0x2)."""
    bits = chain.emit("bits", chain.emit("abs", value))
    above = chain.emit("bitwise_right_shift", chain.emit("add", bits, Const(0x7FFFFF)), Const(23))
    finite = chain.emit("minimum", above, Const(254))
    # 2^-127, which has the bits 1 << 22, is the least power of two. Its code is 0.
    code = chain.emit("where", chain.emit("le", bits, Const(1 << 22)), Const(0), finite)
    return chain.emit("where", chain.emit("isnan", value), Const(255), code)
