"""Makes a failing program smaller, as long as it fails in the same way.

The program itself is cut, not the random choices behind it: an operand or a new input replaces a step. So a
few dozen trials are enough, each of which compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cute_backend.fuzz.drawn_program import Fill, Input, Program, Step, is_write

TRIALS = 400

_SMALL = {"B": (1, 2), "S": (1, 2, 8), "N": (1, 8, 16), "K": (8, 16)}


def shrink(program: Program, fails: Callable[[Program], bool], trials: int = TRIALS) -> Program:
    """The smallest program found for which `fails` holds, as it does for `program`.

    `fails` is called at most `trials` times. Eager has to run every program for which it holds.
    """
    tried: set[str] = set()
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(program):
            text = f"{smaller.source()}{smaller.eager}{smaller.dynamic}"
            if text in tried:
                continue
            tried.add(text)
            if len(tried) > trials:
                return program
            if fails(smaller):
                program, improved = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield replace(program, outputs=(name,)).pruned()
        for name in program.outputs:
            yield replace(program, outputs=tuple(o for o in program.outputs if o != name)).pruned()
    values = _values(program)
    for output in program.outputs:
        yield from _earlier(program, output)
    for step in program.steps:
        for operand in step.operands:
            given, made = values[operand], values[step.name]
            if given.shape == made.shape and given.dtype is made.dtype:
                yield _without(program, step, operand)
        yield _cut(program, step, values[step.name])
        if is_write(step):
            yield replace(program, steps=tuple(s for s in program.steps if s is not step)).pruned()
    if program.dynamic:
        yield replace(program, dynamic=False)
    for name, sizes in _SMALL.items():
        yield from (_resized(program, name, size) for size in sizes if size < dict(program.sizes)[name])
    for each in program.inputs:
        for simpler in _simpler(each):
            yield replace(program, inputs=tuple(simpler if old is each else old for old in program.inputs))


def _values(program: Program) -> dict[str, Tensor]:
    """Every value as eager computes it."""
    _, example_inputs = program.load()
    values = {each.name: tensor for each, tensor in zip(program.inputs, example_inputs(), strict=True)}
    for step in program.steps:
        values[step.name] = step.eager([values[name] for name in step.operands], dict(program.sizes))
    return values


def _earlier(program: Program, output: str) -> Iterator[Program]:
    """Yields the program with an operand of an output in the output's place."""
    step = next((step for step in program.steps if step.name == output), None)
    for operand in step.operands if step is not None else ():
        outputs = tuple(dict.fromkeys(operand if name == output else name for name in program.outputs))
        yield replace(program, outputs=outputs).pruned()


def _without(program: Program, step: Step, operand: str) -> Program:
    """The program without a step, whose operand replaces its result."""

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(operand if name == step.name else name for name in names)

    steps = tuple(replace(s, operands=renamed(s.operands)) for s in program.steps if s is not step)
    return replace(program, steps=steps, outputs=tuple(dict.fromkeys(renamed(program.outputs)))).pruned()


def _cut(program: Program, step: Step, value: Tensor) -> Program:
    """The program with a new input in place of a step."""
    names = {size: name for name, size in program.sizes}
    shape = tuple(names.get(size, str(size)) if size > 1 else str(size) for size in value.shape)
    fill = Fill.BITS if value.dtype is torch.bool else Fill.INTEGERS if program.exact else Fill.NORMAL
    made = Input(f"x{1 + max(int(each.name[1:]) for each in program.inputs)}", shape, value.dtype, fill)
    return _without(replace(program, inputs=(*program.inputs, made)), step, made.name)


def _resized(program: Program, name: str, size: int) -> Program:
    sizes = {**dict(program.sizes), name: size}
    sizes["M"] = sizes["B"] * sizes["S"]
    return replace(program, sizes=tuple(sizes.items()))


def _simpler(each: Input) -> Iterator[Input]:
    if each.fill is Fill.FP4 or each.dtype is torch.float8_e8m0fnu:
        return  # Values of other fills are not represented.
    if each.fill is Fill.SPECIAL:
        yield replace(each, fill=Fill.NORMAL)
    if each.fill is not Fill.INTEGERS and each.dtype is not torch.bool:
        yield replace(each, fill=Fill.INTEGERS)
    if each.dtype not in (torch.bfloat16, torch.bool) and each.dtype.itemsize > 1:
        yield replace(each, dtype=torch.bfloat16)
