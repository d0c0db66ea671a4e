"""Comparison, selection and mov (PTX ISA 9.7.6, 9.7.9.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.isa.common import compute, straight, the_type, types_of
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import TYPE_BYTES, Instruction, Label, Pair, Register, Symbol, Vector

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp


def comparison(name: str, kind: str) -> Callable[[Any, Any], Any]:
    """The function of a comparison operator (PTX ISA 9.3.1): unordered forms are true if an operand is
    NaN.
    """
    plain: dict[str, Callable[[Any, Any], Any]] = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    }  # fmt: skip
    floating = kind in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if floating and name == "ne":
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    if name in plain:
        return plain[name]
    base = plain[name[:-1]] if name.endswith("u") else None
    if base is None:
        raise KeyError(name)
    return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs",
               "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")  # fmt: skip


@opcode("setp", "set", section="9.7.6.1, 9.7.6.2", meaning="Comparison, optionally combined with a predicate")
def bind_setp(binder: Binder, instruction: Instruction) -> Step:
    from cute_backend.simulator.isa.floating import float_values, flush_inputs

    parts = instruction.parts
    operator = next(p for p in parts[1:] if p in COMPARISONS)
    combine = next((p for p in parts[1:] if p in ("and", "or", "xor")), None)
    kinds = types_of(instruction)
    kind = kinds[-1]
    compare = comparison(operator, kind)
    decode = float_values(kind)
    ftz = flush_inputs(instruction)
    a, b = (binder.get(o, kind, instruction) for o in instruction.operands[1:3])
    third = binder.get(instruction.operands[3], "pred", instruction) if combine else None
    merge = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[combine]

    def both(w: Warp) -> tuple[Any, Any]:
        x, y = a(w), b(w)
        if decode is not None:
            x, y = decode(x), decode(y)
        if ftz is not None:
            x, y = ftz(x), ftz(y)
        found = np.asarray(compare(x, y))
        if merge is None:
            return found, None
        assert third is not None
        c = third(w)
        c = c[:, None] if found.ndim == 2 else c
        return merge(found, c), merge(~found, c)

    target = instruction.operands[0]
    if parts[0] == "set":
        result = kinds[0]
        put = binder.put(target, "b32" if result in ("f16x2", "bf16x2") else result, instruction)
        yes: Any = {"f32": np.float32(1), "f16": np.float16(1), "bf16": np.uint16(0x3F80)}.get(result)
        if kind.endswith("x2"):
            one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result, 0xFFFF)
            return lambda w: put(
                w,
                np.where(both(w)[0], np.uint16(one), np.uint16(0))
                .astype(np.uint16)
                .view(np.uint32)
                .reshape(-1),
            )
        if yes is None:
            width = TYPE_BYTES[result]
            yes = np.array((1 << (8 * width)) - 1, f"u{width}")[()]
        return lambda w: put(w, np.where(both(w)[0], yes, yes.dtype.type(0)))
    if isinstance(target, Pair):
        first, second = (binder.put(o, "pred", instruction) for o in (target.first, target.second))
        if kind.endswith("x2"):

            def step_packed(w: Warp) -> None:
                found = np.broadcast_to(both(w)[0], (32, 2))
                first(w, found[:, 0])
                second(w, found[:, 1])

            return step_packed

        def step_pair(w: Warp) -> None:
            found, opposite = both(w)
            first(w, found)
            second(w, ~found if opposite is None else opposite)

        return step_pair
    direct = isinstance(compare, np.ufunc) and isinstance(target, Register)
    if direct and decode is None and ftz is None and merge is None:
        return straight(binder, instruction, compare, (a, b), "pred")
    put = binder.put(target, "pred", instruction)
    return lambda w: put(w, both(w)[0])


@opcode("selp", section="9.7.6.3", meaning="a where the predicate is true, else b")
def bind_selp(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    return compute(binder, instruction, lambda a, b, p: np.where(p, a, b), [kind, kind, "pred"], kind)


@opcode("slct", section="9.7.6.4", meaning="a where c is not negative, else b")
def bind_slct(binder: Binder, instruction: Instruction) -> Step:
    kinds = types_of(instruction)
    return compute(
        binder, instruction, lambda a, b, c: np.where(c >= 0, a, b), [kinds[0], kinds[0], kinds[1]], kinds[0]
    )


@opcode("mov", section="9.7.9.2, 9.7.9.3", meaning="Copy; packs and unpacks vectors; takes addresses")
def bind_mov(binder: Binder, instruction: Instruction) -> Step:
    kind = the_type(instruction)
    target, source = instruction.operands
    if isinstance(source, Vector):
        return _pack(binder, instruction, kind, source)
    if isinstance(source, Label):
        raise unsupported(instruction, "the address of a label")
    put = binder.put(target, kind, instruction)
    if kind == "b128":
        if not isinstance(source, Register):
            raise unsupported(instruction, f"the source {source!r}")
        slot = source.slot
        return lambda w: put(w, w.u128[slot])
    if isinstance(source, Symbol) and kind not in ("u32", "u64", "b32", "b64"):
        raise unsupported(instruction, f"the address of a variable as {kind}")
    get = binder.get(source, kind, instruction)
    return lambda w: put(w, get(w))


def _pack(binder: Binder, instruction: Instruction, kind: str, source: Vector) -> Step:
    width = TYPE_BYTES[kind] // len(source.elements)
    gets = [binder.get(e, f"b{8 * width}", instruction) for e in source.elements]
    put = binder.put(instruction.operands[0], kind, instruction)
    if kind == "b128":

        def step_wide(w: Warp) -> None:
            raw = np.stack([np.broadcast_to(g(w), 32) for g in gets], axis=1).astype(f"u{width}")
            put(w, np.ascontiguousarray(raw).view(np.uint64).reshape(32, 2))

        return step_wide
    if width == 4 and len(gets) == 2:
        low, high = gets
        shift = np.uint64(32)

        def step_two(w: Warp) -> None:
            put(w, low(w).astype(np.uint64) | (high(w).astype(np.uint64) << shift))

        return step_two
    dtype = np.dtype(f"u{TYPE_BYTES[kind]}").type

    def step(w: Warp) -> None:
        total = dtype(0)
        for i, get in enumerate(gets):
            total = total | (get(w).astype(dtype) << dtype(8 * width * i))
        put(w, total)

    return step
