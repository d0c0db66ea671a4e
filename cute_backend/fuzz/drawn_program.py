"""A drawn program: its inputs, steps in SSA order, and outputs. The text that runs is the text that is
printed.

Sizes are names (`M`, `N`, ...) in the texts of shapes and steps, so that a program can be tried with other
sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.fuzz.block_formats import fp4, scaled, tiled

NOT_TAKEN = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""The exceptions that torch raises for an op that is not defined on these dtypes or sizes."""


class Fill(Enum):
    """The content of an input, as an expression of a shape `{0}` and a generator `g`."""

    INTEGERS = "torch.randint(-7, 8, {0}, generator=g)"
    """Integers small enough for a product's sums to be exact."""
    BYTES = "torch.randint(0, 256, {0}, generator=g)"
    """Integers that a cast to 8 bits makes all values of."""
    NORMAL = "torch.randn({0}, generator=g)"
    WIDE = "torch.randn({0}, generator=g) * 100"
    BITS = "torch.randint(0, 2, {0}, generator=g)"
    POWERS = "torch.exp2(torch.randint(-2, 3, {0}, generator=g))"
    """Positive powers of two, which multiply exactly: scales."""
    POSITIVE = "torch.rand({0}, generator=g) + 0.5"
    FP4 = (
        "torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])"
        "[torch.randint(0, 15, {0}, generator=g)]"
    )
    """The values of E2M1."""
    SPECIAL = (
        "torch.tensor([0.0, -0.0, 1.0, -2.5, 0.3, 300.0, 7e4, float('inf'), -float('inf'), float('nan')])"
        "[torch.randint(0, 10, {0}, generator=g)]"
    )


class Rule(Enum):
    """The results that a correct implementation of a step may give, in terms of the exact result."""

    EXACT = "exact"
    """Pointwise and correctly rounded."""
    CHOICE = "choice"
    """One of the operands or a number, by a comparison of operands."""
    FUNCTION = "function"
    """Pointwise, with an error of some units in fp32's last place before it is rounded."""
    WAVE = "wave"
    """Like FUNCTION, but not monotone: any value between -1 and 1 if the argument's interval is wide."""
    COMPOSITE = "composite"
    """Pointwise, with several intermediate roundings to its own dtype."""
    STEPPED = "stepped"
    """Pointwise, with a quotient that is rounded before it becomes an integer, so that it may be one off."""
    SIGN = "sign"
    """Exact, with the sign of its last operand, where the sign of NaN is not defined."""
    CAST = "cast"
    VIEW = "view"
    JOIN = "join"
    """Every element is one of an operand, at a place that no value decides."""
    SUM = "sum"
    """A reduction that grows with every element, whose rounding depends on the order."""
    EXTREMUM = "extremum"
    """A reduction that grows with every element and returns one of them."""
    SUM_IN_STEPS = "sum in steps"
    """Like SUM, with several intermediate roundings to its own dtype."""
    GREATEST = "greatest"
    """The index of a row's greatest element: any index at which that may be."""
    LEAST = "least"
    """The index of a row's least element, likewise."""
    PRODUCT = "product"
    """Linear in each operand, with no negative coefficient."""
    ANY = "any"
    """Not followed: its values are not judged."""


SUMS = (Rule.SUM, Rule.SUM_IN_STEPS)
INDICES = (Rule.GREATEST, Rule.LEAST)


@dataclass(frozen=True)
class Input:
    """A dense tensor of shape `shape`. The program is called with its `view`, such as ".t()"."""

    name: str
    shape: tuple[str, ...]
    dtype: torch.dtype
    fill: Fill
    view: str = ""

    @property
    def text(self) -> str:
        shape = f"({', '.join(self.shape)}{',' if len(self.shape) == 1 else ''})"
        return f"{_bracketed(self.fill.value.format(shape))}.to({self.dtype}){self.view}"


def _bracketed(text: str) -> str:
    return f"({text})" if " * " in text or " + " in text else text


@dataclass(frozen=True)
class Step:
    """`name = text`, where `{0}`, `{1}`, ... in the text are operands: inputs and earlier steps.

    `reference` is a text that computes the same in float64, if `text` can't. For an index it returns the
    extremum that is searched, along `dim`, or over all elements if that is None. If torch has no kernel for
    the step, its result in eager is the reference in `dtype`.
    """

    name: str
    text: str
    operands: tuple[str, ...]
    rule: Rule
    reference: str = ""
    dim: int | None = None
    dtype: torch.dtype | None = None

    def eager(self, operands: list[Tensor], sizes: dict[str, int]) -> Any:
        """The result on these operands. Raises torch's exception if the step can't be computed."""
        if self.dtype is None:
            return evaluate(self.text, operands, sizes)
        return evaluate(self.reference, [each.double() for each in operands], sizes).to(self.dtype)


@dataclass(frozen=True)
class Program:
    """A program, and the options that it is compiled with.

    `eager` asks for eager's roundings (`emulate_precision_casts`), `dynamic` for symbolic sizes. The results
    of an `exact` program are determined to the bit under eager's roundings.
    """

    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    seed: int
    eager: bool = False
    dynamic: bool = False
    exact: bool = False

    @property
    def is_followed(self) -> bool:
        """Whether bounds are known for all of its values."""
        return all(step.rule is not Rule.ANY for step in self.steps)

    @property
    def has_kernels(self) -> bool:
        """Whether torch has a kernel for every step."""
        return all(step.dtype is None for step in self.steps)

    def eager_results(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the steps in eager, and returns the outputs. Writes change `inputs`."""
        values = dict(zip((each.name for each in self.inputs), inputs, strict=True))
        for step in self.steps:
            values[step.name] = step.eager([values[name] for name in step.operands], dict(self.sizes))
        return tuple(values[name] for name in self.outputs)

    def source(self) -> str:
        """A module that defines the sizes, `example_inputs` and `program`."""
        sizes = ", ".join(name for name, _ in self.sizes), ", ".join(str(size) for _, size in self.sizes)
        inputs = "".join(f"        {each.text},\n" for each in self.inputs)
        steps = "".join(f"    {step.name} = {_text(step)}\n" for step in self.steps)
        results = ", ".join(self.outputs)
        helpers = "" if self.has_kernels else "from cute_backend.fuzz.block_formats import fp4, tiled\n\n"
        return (
            f"import torch\nimport torch.nn.functional as F\n\n{helpers}"
            f"{sizes[0]} = {sizes[1]}\n\n\n"
            f"def example_inputs():\n    g = torch.Generator().manual_seed({self.seed})\n"
            f"    return (\n{inputs}    )\n\n\n"
            f"def program({', '.join(each.name for each in self.inputs)}):\n"
            f"{steps}    return ({results},)\n"
        )

    def load(self) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]:
        """The function `program`, and `example_inputs`."""
        namespace: dict[str, Any] = {}
        exec(compile(self.source(), "<fuzz>", "exec"), namespace)
        return namespace["program"], namespace["example_inputs"]

    def pruned(self) -> Program:
        """The program without the steps and inputs that no output needs."""
        needed = set(self.outputs)
        for step in reversed(self.steps):
            if step.name in needed or is_write(step):
                needed.update(step.operands)
                needed.add(step.name)
        return replace(
            self,
            inputs=tuple(each for each in self.inputs if each.name in needed),
            steps=tuple(step for step in self.steps if step.name in needed),
        )

    def evaluate(self, step: Step, operands: list[Any]) -> Any:
        """Evaluates the text of a step on these operands."""
        return evaluate(step.text, operands, dict(self.sizes))


def is_write(step: Step) -> bool:
    """Whether a step writes into its first operand."""
    return step.text.startswith("{0}") and _WRITES.search(step.text) is not None


_WRITES = re.compile(r"\.[a-z]+_\(")


_NAMES = {"torch": torch, "F": F, "fp4": fp4, "tiled": tiled, "scaled": scaled}


def evaluate(text: str, operands: list[Any], sizes: dict[str, int]) -> Any:
    names = [f"v{index}" for index in range(len(operands))]
    namespace = {**_NAMES, **sizes, **dict(zip(names, operands, strict=True))}
    return eval(_compiled(text.format(*names)), namespace)


_CODES: dict[str, Any] = {}


def _compiled(text: str) -> Any:
    if text not in _CODES:
        _CODES[text] = compile(text, "<step>", "eval")
    return _CODES[text]


def _text(step: Step) -> str:
    return step.text.format(*step.operands)
