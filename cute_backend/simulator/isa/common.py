"""Functions that the binders of several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.opcodes import Step, unsupported
from cute_backend.simulator.syntax import FILE_BYTES, TYPE_BYTES, Instruction, Operand, Register

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

TYPES = frozenset(TYPE_BYTES)


def types_of(instruction: Instruction) -> list[str]:
    """The type modifiers, in order."""
    return [p for p in instruction.parts[1:] if p in TYPES]


def the_type(instruction: Instruction) -> str:
    """The one type modifier. Raises `UnknownOpcode` if there are none or several."""
    found = types_of(instruction)
    if len(found) != 1:
        raise unsupported(instruction, f"the type {'.'.join(found) or '(none)'}")
    return found[0]


def compute(
    binder: Binder, instruction: Instruction, function: Callable[..., Any], kinds: list[str], result: str
) -> Step:
    """A step that applies `function` to the source operands and writes the destination, operand 0."""
    sources = instruction.operands[1:]
    if len(sources) != len(kinds):
        raise unsupported(instruction, f"{len(sources)} source operands")
    gets = [binder.get(s, k, instruction) for s, k in zip(sources, kinds, strict=False)]
    if _is_direct(instruction, function, kinds, result):
        return straight(binder, instruction, function, gets, result)
    put = binder.put(instruction.operands[0], result, instruction)
    if len(gets) == 1:
        (a,) = gets
        return lambda w: put(w, function(a(w)))
    if len(gets) == 2:
        a, b = gets
        return lambda w: put(w, function(a(w), b(w)))
    if len(gets) == 3:
        a, b, c = gets
        return lambda w: put(w, function(a(w), b(w), c(w)))
    return lambda w: put(w, function(*(g(w) for g in gets)))


def _is_direct(
    instruction: Instruction, function: Callable[..., Any], kinds: Sequence[str], result: str
) -> bool:
    """Whether numpy's `function` gives results of the destination's dtype, so that it can write them."""
    target = instruction.operands[0]
    if not isinstance(function, np.ufunc) or not isinstance(target, Register) or len(kinds) > 2:
        return False
    return {*kinds} == {result} and FILE_BYTES[target.file] == TYPE_BYTES[result]


def straight(
    binder: Binder,
    instruction: Instruction,
    function: Callable[..., Any],
    gets: Sequence[Callable[[Warp], Any]],
    result: str,
) -> Step:
    """A step of one or two sources in which `function` itself writes the destination, if all lanes run."""
    put = binder.put(instruction.operands[0], result, instruction)
    to = binder.get(instruction.operands[0], result, instruction)
    if len(gets) == 1:
        (only,) = gets

        def one(w: Warp) -> None:
            if w.full:
                function(only(w), out=to(w))
            else:
                put(w, function(only(w)))

        return one
    a, b = gets

    def two(w: Warp) -> None:
        if w.full:
            function(a(w), b(w), out=to(w))
        else:
            put(w, function(a(w), b(w)))

    return two


def scalar(binder: Binder, operand: Operand, kind: str, instruction: Instruction) -> Callable[[Warp], int]:
    """A function that returns an operand, which must be the same in all active lanes, as a Python int."""
    get = binder.get(operand, kind, instruction)
    return lambda w: of_all(w, get(w))


def of_all(w: Warp, value: Any) -> int:
    """A getter's value, which must be the same in all active lanes, as a Python int."""
    lanes = np.asarray(value)
    return int(lanes) if lanes.ndim == 0 else int(lanes[int(w.mask.argmax())])


def lane_by_lane(function: Callable[..., int], bits: int) -> Callable[..., Any]:
    """Applies a function of Python ints lane by lane: for rare instructions."""

    def lanes(*operands: Any) -> Any:
        columns = [np.broadcast_to(o, 32).tolist() for o in operands]
        return np.array([function(*row) for row in zip(*columns, strict=False)], f"u{bits // 8}")

    return lanes


def scalar_address(binder: Binder, operand: Any, instruction: Instruction) -> Any:
    """An address that all lanes share, as an int."""
    get = binder.address(operand, instruction)
    return lambda w: of_all(w, get(w))
