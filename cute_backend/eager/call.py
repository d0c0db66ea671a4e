"""`gemm`: checks the operands of a call, and calls its program, which is remembered for equal calls."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
from torch import Tensor

from cute_backend.eager.trace import FP4, FP8, Epilogue, Program, trace
from cute_backend.errors import UsageError
from cute_backend.fx_walk.epilogue_pass import current_precision
from cute_backend.fx_walk.graph.static import DTYPES
from cute_backend.fx_walk.products.scaling_recipes import block_scaling, inferred
from cute_backend.planning import Constraints
from cute_backend.tracing.closure import Captured, capture

_HALF = (torch.bfloat16, torch.float16)
_ACCEPTED = (
    "float8_e4m3fn by float8_e4m3fn, float8_e4m3fn by float8_e5m2 (either way round), bfloat16 by bfloat16, "
    "float16 by float16 and, with scales in tiles, float4_e2m1fn_x2 by float4_e2m1fn_x2"
)

_PROGRAMS = 512
"""The number of traced programs that are remembered; the least recently used is forgotten first."""


@torch.compiler.disable
def gemm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
) -> Any:
    """Computes `epilogue(a @ b * scale_a * scale_b + bias)` in one kernel or, for CPU tensors, with aten.

    All tensors are on one device, and results are new tensors there, with planes in row-major order. `gemm`
    has no derivative: a tensor that requires one raises UsageError unless gradients are disabled.

    `a` is (M, K) and `b` (K, N): fp8 with K contiguous in both (`b` is a weight's transpose), bf16 or fp16
    with either axis contiguous. Scales of tensors, rows, columns and blocks of 128 are fp32: `scale_a` has
    one element, (M,) or (M, 1), `scale_b` one element, (N,) or (1, N). On Hopper and data center Blackwell,
    both scales of fp8 may belong to blocks, with any strides: `scale_a` (M, K / 128) or (M / 128, K / 128),
    `scale_b` (K / 128, N) or (K / 128, N / 128), rounded up; each block of K is scaled before it is added. On
    data center Blackwell, operands may be MXFP8, MXFP4 and NVFP4, with scales in tiles: float8_e8m0fnu for
    blocks of b = 32 values, or float8_e4m3fn for the blocks of b = 16 of NVFP4. `scale_a` then has 128 *
    ceil(M / 128) * 4 * ceil(K / 4 / b) elements, and `scale_b` as many with N in place of M, contiguous, in
    any shape (docs/numerics.md); an element of fp4 is two values. `bias` is (N,) or (1, N), of a float
    dtype. `use_fast_accum=False` adds fp8 sums in fp32 registers after each k tile; with scales of
    blocks, sums are always added so. An empty product runs as aten ops, without a kernel.

    `epilogue` gets the (M, N) fp32 result and returns one tensor or several: of (M, N), or reductions of such
    a plane over rows, columns or both. It may use pointwise ops and any tensors that it closes over, which
    are read at every call. It can return a reduction, or pointwise work on the result of one and on numbers;
    it can't use these for the plane. It is traced once for each set of shapes, strides, dtypes and Python
    values in its closure. If it closes over other objects, such as a module, it is traced at every call. A
    plane that it returns in fp32 is converted to `out_dtype`, by default that of 16-bit operands and
    otherwise bf16. It may be fp32, bf16, fp16, e4m3, e5m2, int8, uint8, int32 or bool. Reductions, and
    planes that it has cast itself, keep their dtype.

    Raises UsageError for operands that no kernel takes, and where the epilogue does not fuse.

    >>> a, b = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(32, 8, dtype=torch.bfloat16)
    >>> out, largest = gemm(a, b, epilogue=lambda acc: (acc - 1, acc.amax(-1)))
    >>> out.shape, out.dtype, largest[0].item()
    (torch.Size([16, 8]), torch.bfloat16, 32.0)
    """
    for name, tensor in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias)):
        if not (isinstance(tensor, Tensor) or (tensor is None and name not in ("a", "b"))):
            raise UsageError(f"gemm got {name} of type {type(tensor).__name__}; it takes a tensor")
    if epilogue is not None and not callable(epilogue):
        raise UsageError(
            f"gemm got an epilogue of type {type(epilogue).__name__}; it takes a function of the result"
        )
    if not isinstance(use_fast_accum, bool):
        raise UsageError(f"gemm got use_fast_accum={use_fast_accum!r}; it takes True or False")
    operands = _operands(a, b, scale_a, scale_b, bias)
    if out_dtype is None:
        out_dtype = a.dtype if a.dtype in _HALF else torch.bfloat16
    if not isinstance(out_dtype, torch.dtype):
        raise UsageError(f"gemm got out_dtype of type {type(out_dtype).__name__}; it takes a torch.dtype")
    if out_dtype not in DTYPES:
        raise UsageError(f"gemm got out_dtype={_name(out_dtype)}; it writes {', '.join(map(_name, DTYPES))}")
    captured = capture(epilogue)
    if torch.is_grad_enabled() and any(
        each.requires_grad for each in (*operands.values(), *captured.tensors)
    ):
        raise UsageError(
            "gemm has no derivative and got a tensor that requires one; call it under torch.no_grad()"
        )
    program = _program(operands, epilogue, captured, out_dtype, use_fast_accum)
    with torch.no_grad():
        return program(operands, captured)


_programs: OrderedDict[Any, Program] = OrderedDict()


def _program(
    operands: dict[str, Tensor],
    epilogue: Epilogue | None,
    captured: Captured,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Program:
    """The program of a call. It is traced unless an earlier call had the same key."""
    if captured.key is None:
        return trace(operands, epilogue, captured, out_dtype, fast_accum)
    layouts = tuple((name, _layout(tensor)) for name, tensor in operands.items())
    settings = current_precision(), Constraints.from_config().text
    key = (layouts, captured.key, out_dtype, fast_accum, *settings)
    program = _programs.get(key) or trace(operands, epilogue, captured, out_dtype, fast_accum)
    _programs.pop(key, None)
    _programs[key] = program  # the last one; another thread may have traced or dropped it meanwhile
    if len(_programs) > _PROGRAMS:
        _programs.popitem(last=False)
    return program


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _operands(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None
) -> dict[str, Tensor]:
    """The operands by name, in the shapes that the walker expects. Raises UsageError if they can't be
    multiplied."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise UsageError(f"gemm got a {_shape(a)} and b {_shape(b)}; it multiplies (M, K) by (K, N)")
    fp8 = a.dtype in FP8 and b.dtype in FP8 and torch.float8_e4m3fn in (a.dtype, b.dtype)
    fp4 = a.dtype is b.dtype is FP4
    if not fp8 and not fp4 and not (a.dtype in _HALF and a.dtype is b.dtype):
        raise UsageError(f"gemm got {_name(a.dtype)} by {_name(b.dtype)}; it multiplies {_ACCEPTED}")
    m, n = a.shape[0], b.shape[1]
    operands = {"a": a, "b": b}
    if (fp4 or fp8) and _are_in_tiles(a, b, scale_a, scale_b):
        operands |= {"scale_a": cast(Tensor, scale_a), "scale_b": cast(Tensor, scale_b)}
    elif fp8 and scale_a is not None and scale_b is not None and _are_of_blocks(a, b, scale_a, scale_b):
        operands |= {"scale_a": scale_a, "scale_b": scale_b}
    elif fp8 or scale_a is not None or scale_b is not None:
        operands["scale_a"] = _scale("scale_a", scale_a, a, (m, 1))
        operands["scale_b"] = _scale("scale_b", scale_b, a, (1, n))
        if operands["scale_a"].numel() == 1 != operands["scale_b"].numel():
            operands["scale_a"] = operands["scale_a"].expand(m, 1)
        elif operands["scale_b"].numel() == 1 != operands["scale_a"].numel():
            operands["scale_b"] = operands["scale_b"].expand(1, n)
    if bias is not None:
        if tuple(bias.shape) not in ((n,), (1, n)) or not bias.is_floating_point():
            raise UsageError(
                f"gemm got a {_name(bias.dtype)} bias {_shape(bias)}; it takes a float one of ({n},)"
            )
        operands["bias"] = bias.reshape(n)
    for name, tensor in operands.items():
        if tensor.device != a.device:
            raise UsageError(f"gemm got a on {a.device} and {name} on {tensor.device}; it takes one device")
    return operands


def _are_in_tiles(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> bool:
    """Whether scales are those of MXFP8, MXFP4 or NVFP4. Raises UsageError if only one is, if fp4 has others,
    or for an empty product."""
    given = [scale for scale in (scale_a, scale_b) if scale is not None]
    tiled = [scale for scale in given if inferred(scale) is not None]
    if not tiled and a.dtype is not FP4:
        return False
    if len(tiled) != 2 or tiled[0].dtype is not tiled[1].dtype:
        names = " and ".join(_name(scale.dtype) for scale in given) or "no scales"
        raise UsageError(
            f"gemm got {_name(a.dtype)} by {_name(b.dtype)} with {names}; both scales in tiles are "
            "float8_e8m0fnu or, for fp4, float8_e4m3fn"
        )
    if not a.numel() * b.numel():
        raise UsageError(f"gemm got an empty product of a {_shape(a)} and b {_shape(b)} with scales in tiles")
    return True


def _are_of_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Whether scales belong to blocks. Shapes that rowwise or tensorwise scales can have too do not count."""
    (m, k), n = a.shape, b.shape[1]
    vectors = scale_a.numel() == 1 or tuple(scale_a.shape) in ((m,), (m, 1))
    vectors = vectors and (scale_b.numel() == 1 or tuple(scale_b.shape) in ((n,), (1, n)))
    if vectors or m * n * k == 0 or block_scaling(a, b, scale_a, scale_b) is None:
        return False
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype is not torch.float32:
            raise UsageError(f"gemm got a {_name(scale.dtype)} {name}; scales are float32")
    return True


def _scale(name: str, scale: Tensor | None, a: Tensor, shape: tuple[int, int]) -> Tensor:
    """A scale in its rowwise shape, or as one element; a scale of 1 if none is given."""
    if scale is None:
        return torch.ones((1, 1), device=a.device)
    if scale.dtype is not torch.float32:
        raise UsageError(f"gemm got a {_name(scale.dtype)} {name}; scales are float32")
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    length = max(shape)
    if tuple(scale.shape) not in (shape, (length,)):
        raise UsageError(
            f"gemm got {name} {_shape(scale)}; it takes one element, ({length},) or {shape}, or both scales "
            "of blocks of fp8"
        )
    return scale.reshape(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
