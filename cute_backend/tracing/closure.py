"""Finds the values that a function depends on in addition to its arguments: the tensors, and a key for all
others."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Captured:
    """The tensors that a function closes over, in a fixed order, and a key for its code and everything else.

    Two functions with equal keys do the same with tensors of equal shapes, strides, dtypes and devices. The
    key is None if the function reaches an object whose state is unknown, such as a module or a list.
    """

    key: tuple[Any, ...] | None
    tensors: tuple[Tensor, ...]


class _Opaque(Exception):
    """Raised for a value that may change without changing the key."""


def capture(fn: Callable[..., Any] | None) -> Captured:
    """The values that `fn` closes over: free variables, defaults and globals of its code, and those of
    functions among them."""
    if fn is None:
        return Captured((), ())
    tensors: list[Tensor] = []
    try:
        key = _key(fn, tensors, set())
    except _Opaque:
        return Captured(None, tuple(tensors))
    return Captured(key, tuple(tensors))


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_FIXED = (types.BuiltinFunctionType, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_LIBRARIES = ("torch", math.__name__)


def _key(value: Any, tensors: list[Tensor], seen: set[int]) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # 1, 1.0 and True are equal, as are 0.0 and -0.0
    if isinstance(value, tuple):
        return type(value), *(_key(item, tensors, seen) for item in value)
    if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in _LIBRARIES:
        return ("module", value.__name__)
    if isinstance(value, _FIXED) or _is_library_function(value):
        return ("object", value)
    if isinstance(value, types.FunctionType):
        if id(value) in seen:
            return ("again", value.__code__)
        seen.add(id(value))
        return (value.__code__, *(_key(item, tensors, seen) for item in _dependencies(value)))
    raise _Opaque


def _is_library_function(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return isinstance(value, types.FunctionType) and module.partition(".")[0] in _LIBRARIES


def _dependencies(fn: types.FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError as error:  # an empty cell, assigned later
            raise _Opaque from error
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    for name in sorted(_global_names(fn.__code__)):
        if name in fn.__globals__:
            yield fn.__globals__[name]


def _global_names(code: types.CodeType) -> set[str]:
    """Names that the code, or a function inside it, may look up; it includes names of attributes, which does
    no harm."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names
