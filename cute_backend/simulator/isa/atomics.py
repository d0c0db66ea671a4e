"""Atomic updates of memory (PTX ISA 9.7.13.8, 9.7.13.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.formats import decode, encode
from cute_backend.simulator.isa.common import types_of
from cute_backend.simulator.isa.loads_stores import (
    active,
    load_bytes,
    per_lane,
    raw_dtype,
    space_of,
    store_bytes,
    vector_length,
)
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.scopes import order_of
from cute_backend.simulator.syntax import Instruction, Sink, elements_of

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "min": lambda old, x: np.minimum(old, x),
    "max": lambda old, x: np.maximum(old, x),
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: np.where(old >= x, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - old.dtype.type(1)),
    "cas": lambda old, x, y: np.where(old == x, y, old),
}


def atomic_function(name: str, kind: str) -> Callable[..., Any]:
    """The update of one memory element: on raw bits for the 16-bit floats."""
    plain = ATOMICS[name]
    if kind not in ("bf16", "f16", "bf16x2", "f16x2") or name in ("exch", "cas"):
        if name in ("min", "max") and kind.startswith("f"):
            return np.fmin if name == "min" else np.fmax
        return plain
    element = kind.removesuffix("x2")

    def half(old: Any, x: Any) -> Any:
        if kind.endswith("x2"):
            old, x = (np.ascontiguousarray(v).view(np.uint16) for v in (old, x))
            a, b = decode(old, element), decode(x, element)
            return encode(plain(a, b), element).view(np.uint32)
        a, b = decode(old.view(np.uint16), element), decode(x.view(np.uint16), element)
        return encode(plain(a, b), element).view(old.dtype)

    return half


@opcode("atom", "red", section="9.7.13.8, 9.7.13.9", meaning="Atomic update, with and without its old value")
def bind_atomic(binder: Binder, instruction: Instruction) -> Step:
    name = next((p for p in instruction.parts[1:] if p in ATOMICS), None)
    if name is None or instruction.has("async"):
        raise unsupported(instruction, "this form")
    kind, count, space = types_of(instruction)[-1], vector_length(instruction), space_of(instruction)
    function = atomic_function(name, kind)
    returns = instruction.parts[0] == "atom"
    operands = list(instruction.operands)
    target = operands.pop(0) if returns else Sink()
    address = binder.address(operands.pop(0), instruction)
    targets = elements_of(target) if returns else (target,) * count
    puts = [binder.put(each, kind, instruction) for each in targets]
    sources = map(elements_of, operands[: 2 if name == "cas" else 1])
    gets = [[binder.get(each, kind, instruction) for each in group] for group in sources]
    dtype = raw_dtype(kind)
    nbytes = dtype.itemsize * count
    order = order_of(instruction, dtype.itemsize, updates=True)
    acquires = any(instruction.has(m) for m in ("acq_rel", "acquire", "release"))
    parameters = binder.parameters

    def update(w: Warp) -> None:
        lanes = active(w)
        addresses = per_lane(w, address(w), lanes)
        values = [
            np.stack([per_lane(w, g(w), lanes).astype(dtype, copy=False) for g in group], axis=1)
            for group in gets
        ]
        old = np.zeros((32, count), dtype)
        distinct = len(np.unique(addresses)) == len(lanes)
        batches = [np.arange(len(lanes))] if distinct else [np.array([i]) for i in range(len(lanes))]
        loads = w.report.loads_since_wait
        for batch in batches:
            raw = load_bytes(w, space, addresses[batch], lanes[batch], nbytes, parameters, order)
            before = np.ascontiguousarray(raw).view(dtype)
            after = np.asarray(function(before, *(v[batch] for v in values))).astype(dtype, copy=False)
            store_bytes(
                w, space, addresses[batch], lanes[batch], np.ascontiguousarray(after).view(np.uint8), order
            )
            old[lanes[batch]] = before
        if w.report.loads_since_wait is not None:
            w.report.loads_since_wait = loads
        for i, put in enumerate(puts):
            put(w, old[:, i])
        if acquires:
            w.release()

    return update
