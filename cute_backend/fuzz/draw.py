"""Draws random programs: the same for the same seed and index, on every machine and for every device.

Each step is run when it is drawn, which gives its shape and dtype, and shows whether torch accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from cute_backend.fuzz.block_scaled_products import RECIPES, Recipe
from cute_backend.fuzz.drawn_program import (
    INDICES,
    NOT_TAKEN,
    SUMS,
    Fill,
    Input,
    Program,
    Rule,
    Step,
    evaluate,
)
from cute_backend.fuzz.vocabulary import (
    CASTS,
    CHANGING,
    DEEP,
    DYADIC,
    FLAT,
    GATHERS,
    IN_STEPS,
    KEEPING,
    NUMBERS,
    PARTS,
    REDUCTIONS,
    WRITTEN,
    Gather,
    Pointwise,
    Spelling,
    table_ops,
    takes,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_ROWS = (1, 2, 3, 5, 7, 8, 16, 16, 17, 24, 33)
_COLUMNS = (1, 2, 6, 8, 16, 16, 32, 40)
_LEADING = ((1, 1), (1, 8), (2, 3), (2, 8), (3, 1), (4, 4), (3, 5))


def draw(seed: int, index: int) -> Program:
    """The program at an index of the sequence of a seed."""
    return Drawing(Random(f"{seed}/{index}")).program()


class Drawing:
    """A program that is being drawn. `random` makes every choice."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.exact = random.random() < 0.3
        self.eager = self.exact or random.random() < 2 / 7  # half of all programs
        self.deep = random.random() < 0.35
        self.scaled = random.random() < 0.35
        b, s = random.choice(_LEADING) if self.deep else (1, random.choice(_ROWS))
        self.recipe = random.choice(RECIPES) if self.scaled and random.random() < 0.4 else None
        k, n = random.choice((16, 32)), random.choice((16, 32, 48) if self.scaled else _COLUMNS)
        if self.recipe is not None:
            k, n = random.choice(self.recipe.depths), random.choice((16, 48, 144, 272))
        if random.random() < 0.15 and not self.scaled:
            n = b * s
        if random.random() < 0.02:
            s = 0
        self.sizes = {"B": b, "S": s, "M": b * s, "N": n, "K": k}
        self.special = not self.exact and random.random() < 0.2
        self.generator = torch.Generator().manual_seed(0)
        self.seed = random.randrange(2**16)
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: dict[str, Tensor] = {}
        self.planes: list[str] = []
        self.loads: list[str] = []
        self.results: list[str] = []
        self.factors: list[str] = []
        """Left operands of products, which further products may share."""

    @property
    def lead(self) -> tuple[str, ...]:
        return ("B", "S") if self.deep else ("M",)

    @property
    def plane(self) -> torch.Size:
        return torch.Size([*(self.sizes[name] for name in self.lead), self.sizes["N"]])

    def start(self) -> None:
        """Draws steps until there is a plane."""
        while not self.planes:
            self.product()

    @property
    def moves(self) -> list[tuple[Callable[[], None], int]]:
        """The steps that may be drawn next, each with its weight."""
        return [
            (self.unary, 5),
            (self.binary, 6),
            (self.ternary, 1),
            (self.in_steps, 2 if self.eager else 0),
            (self.cast, 2),
            (self.keep, 1),
            (self.change, 1),
            (self.there_and_back, 1),
            (self.reduce, 2),
            (self.pick, 1),
            (self.product, 1),
            (self.parts, 1),
            (self.chained, 1),
            (self.write, 1),
        ]

    def program(self) -> Program:
        self.start()
        moves = self.moves
        for _ in range(self.random.randint(1, 12)):
            (move,) = self.random.choices([move for move, _ in moves], [weight for _, weight in moves])
            move()
        known = [step.name for step in self.steps]
        last = self.planes[-1:] + self.results
        extra = self.random.sample(known, min(len(known), self.random.choice((0, 0, 1, 2))))
        return Program(
            sizes=tuple(self.sizes.items()),
            inputs=tuple(self.inputs),
            steps=tuple(self.steps),
            outputs=tuple(dict.fromkeys([*last, *extra])),
            seed=self.seed,
            eager=self.eager,
            dynamic=self.random.random() < 0.05,
            exact=self.exact,
        ).pruned()

    # Values

    def input(self, shape: Sequence[str], dtype: torch.dtype, fill: Fill, view: str = "") -> str:
        made = Input(f"x{len(self.inputs)}", tuple(shape), dtype, fill, view)
        self.values[made.name] = evaluate(made.text, [], {**self.sizes, "g": self.generator})  # type: ignore[dict-item]
        self.inputs.append(made)
        return made.name

    def step(
        self,
        text: str,
        operands: Sequence[str],
        rule: Rule,
        reference: str = "",
        dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> str | None:
        """Adds a step. Returns the name of its value, or None if torch does not accept the step."""
        step = Step(f"t{len(self.steps)}", text, tuple(operands), rule, reference, dim, dtype)
        try:
            self.values[step.name] = step.eager([self.values[name] for name in operands], self.sizes)
        except NOT_TAKEN:
            return None
        self.steps.append(step)
        return step.name

    def new_plane(self, name: str | None) -> None:
        """Adds a value to the planes if it is one, and to the results otherwise."""
        if name is not None:
            value = self.values[name]
            (self.planes if value.shape == self.plane else self.results).append(name)

    def any_plane(self) -> str:
        """A plane, often the newest."""
        return self.planes[-1] if self.random.random() < 0.5 else self.random.choice(self.planes)

    def fill(self) -> Fill:
        if self.exact:
            return Fill.INTEGERS
        if self.special and self.random.random() < 0.4:
            return Fill.SPECIAL
        return self.random.choice((Fill.NORMAL, Fill.NORMAL, Fill.INTEGERS, Fill.WIDE))

    def load(self) -> str:
        """An operand that broadcasts to the plane, often one that was drawn before."""
        if self.loads and self.random.random() < 0.35:
            return self.random.choice(self.loads)
        if self.random.random() < 0.1:
            return self.gathered(self.random.choice(GATHERS))
        return self.spelled(self.random.choice(DEEP if self.deep else FLAT))

    def spelled(self, spelling: Spelling) -> str:
        inside = bool(spelling.view) and self.random.random() < 0.5
        name = self.operand(spelling.shape, "" if inside else spelling.view)
        if inside:
            name = self.step(f"{{0}}{spelling.view}", [name], Rule.VIEW) or name
        self.loads.append(name)
        return name

    def gathered(self, gather: Gather) -> str:
        def sizes(names: tuple[str, ...]) -> list[str]:
            return [size for name in names for size in (self.lead if name == "#" else [name])]

        places = self.input(sizes(gather.places), torch.int64, Fill.INTEGERS)
        table = self.operand(sizes(gather.table))
        self.loads.append(self.step(gather.text, [table, places], Rule.VIEW) or self.operand(("N",)))
        return self.loads[-1]

    def operand(self, shape: Sequence[str], view: str = "") -> str:
        """An input of any dtype."""
        dtype = self.random.choices(
            [BF16, F32, F16, torch.int8, torch.uint8, torch.int32, torch.bool, torch.int64, torch.float64],
            [8, 8, 3, 1, 1, 1, 1, 0.3, 0.3],
        )[0]
        fill = self.fill() if dtype.is_floating_point else Fill.BITS if dtype is torch.bool else Fill.INTEGERS
        return self.input(shape, dtype, fill, view)

    # Products

    def product(self) -> None:
        self.new_plane(self.times("N"))

    def times(self, columns: str) -> str | None:
        if self.recipe is not None:
            return self.block_scaled_product(self.recipe, columns)
        if self.scaled:
            return self.scaled_product(columns)
        dtype = self.random.choices([BF16, F16, F32], [8, 3, 0.5])[0]
        fill = Fill.INTEGERS if self.exact else self.fill()
        shape, view = self.random.choice(
            (
                ((columns, "K"), ".t()"),
                ((columns, "K"), ".t()"),
                (("K", columns), ""),
                (("K", f"{columns} + 8"), f"[:, :{columns}]"),
            )
        )
        kind = self.random.choices(["mm", "addmm", "linear", "bmm", "int8"], [4, 3, 3, 0.3, 1])[0]
        if kind == "int8":
            return self.int8_product(columns)
        if kind == "bmm":
            a = self.input(("B", "S", "K"), dtype, fill)
            b = self.input(("B", "K", columns), dtype, fill)
            name = self.step("torch.bmm({0}, {1})", [a, b], Rule.PRODUCT)
            return name if self.deep else name and self.step("{0}.squeeze(0)", [name], Rule.VIEW)
        if kind == "linear":
            a = self.factor(self.lead, dtype, fill)
            w = self.input((columns, "K"), dtype, fill)
            if self.random.random() < 0.5:
                bias = self.input((columns,), dtype, fill)
                return self.step("F.linear({0}, {1}, {2})", [a, w, bias], Rule.PRODUCT)
            return self.step("F.linear({0}, {1})", [a, w], Rule.PRODUCT)
        if kind == "addmm":
            a = self.factor(("M",), dtype, fill)
            b = self.input(shape, dtype, fill, view)
            spelling = self.random.choice([(columns,), ("1", columns), ("M", columns), ("M", "1"), ("1",)])
            bias = self.input(spelling, dtype, fill)
            alpha, beta = (self.random.choice(("1", "2", "0.5")) for _ in range(2))
            how = "" if alpha == beta == "1" else f", beta={beta}, alpha={alpha}"
            name = self.step(
                f"torch.addmm({{0}}, {{1}}, {{2}}{how})",
                [bias, a, b],
                Rule.PRODUCT,
                f"torch.addmm({{0}}.expand(M, {columns}), {{1}}, {{2}}{how})",
            )
            return self.deepened(name, columns)
        a = self.factor(self.lead, dtype, fill)
        b = self.input(shape, dtype, fill, view)
        return self.step("{0} @ {1}", [a, b], Rule.PRODUCT)

    def factor(self, lead: Sequence[str], dtype: torch.dtype, fill: Fill) -> str:
        """A left operand, sometimes one of an earlier product."""
        shape = torch.Size([*(self.sizes[name] for name in lead), self.sizes["K"]])
        same = [
            name
            for name in self.factors
            if self.values[name].dtype is dtype and self.values[name].shape == shape
        ]
        if same and self.random.random() < 0.6:
            return self.random.choice(same)
        if len(lead) == 1 and not self.scaled and self.random.random() < 0.15:
            name = self.input(("K", *lead), dtype, fill, ".t()")
        else:
            name = self.input((*lead, "K"), dtype, fill)
        self.factors.append(name)
        return name

    def deepened(self, name: str | None, columns: str) -> str | None:
        if name is None or not self.deep:
            return name
        return self.step(f"{{0}}.view(B, S, {columns})", [name], Rule.VIEW)

    def scaled_product(self, columns: str) -> str | None:
        left, right = self.random.choice([(E4M3, E4M3), (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
        fill = Fill.INTEGERS if self.exact else Fill.NORMAL
        scale = Fill.POWERS if self.exact else Fill.POSITIVE
        a = self.factor(("M",), left, fill)
        b = self.input((columns, "K"), right, fill, ".t()")
        rowwise = self.random.random() < 0.6
        shapes: list[tuple[str, ...]] = [("M", "1"), ("1", columns)] if rowwise else [(), ()]
        operands = [a, b, *(self.input(shape, F32, scale) for shape in shapes)]
        out = BF16 if rowwise else self.random.choice((BF16, BF16, F16, F32))
        bias, reference = "", "({0} @ {1}) * {2} * {3}"
        if out is not F32 and self.random.random() < 0.35:
            operands.append(self.input((columns,), out, fill))
            bias, reference = ", bias={4}", f"{reference} + {{4}}"
        accumulate = ", use_fast_accum=True" if self.random.random() < 0.5 else ""
        text = f"torch._scaled_mm({{0}}, {{1}}, {{2}}, {{3}}{bias}, out_dtype={out}{accumulate})"
        return self.deepened(self.step(text, operands, Rule.PRODUCT, reference), columns)

    def int8_product(self, columns: str) -> str | None:
        """A product of int8, mostly with scales of rows, as libraries quantise. Eager's has two axes, and on
        a GPU more than 16 rows."""
        a = self.factor(("M",), torch.int8, Fill.INTEGERS)
        b = self.input((columns, "K"), torch.int8, Fill.INTEGERS, ".t()")
        name = self.step("torch._int_mm({0}, {1})", [a, b], Rule.PRODUCT, "{0} @ {1}")
        if name is not None and self.random.random() < 0.8:
            scales = self.input(("M", "1"), F32, Fill.POWERS if self.exact else Fill.POSITIVE)
            name = self.step("{0} * {1}", [name, scales], Rule.EXACT) or name
        return self.deepened(name, columns)

    def block_scaled_product(self, recipe: Recipe, columns: str) -> str | None:
        dtype, fill = (
            (F32, Fill.FP4) if recipe.is_fp4 else (E4M3, Fill.INTEGERS if self.exact else Fill.NORMAL)
        )
        a, b = self.factor(("M",), dtype, fill), self.input((columns, "K"), dtype, fill)
        scales = Fill.POWERS if self.exact else recipe.fill
        operands = [a, b]
        for of, rows in enumerate(("M", columns)):
            operands.append(self.input(recipe.scales_shape(rows, of), recipe.dtype, scales))
        out = self.random.choice((BF16, BF16, F16, F32))
        bias = ("", "")
        if out is not F32 and self.random.random() < 0.35:
            operands.append(self.input((columns,), out, fill))
            bias = ", bias={4}", " + {4}"
        text, reference = recipe.text(out, bias[0]), recipe.reference(bias[1])
        return self.deepened(self.step(text, operands, Rule.PRODUCT, reference, dtype=out), columns)

    def parts(self) -> None:
        """Draws two parts of a product of 2 N columns, which may meet in an op."""
        wide = self.times("2 * N")
        if wide is None or self.values[wide].shape[-1] != 2 * self.sizes["N"]:
            return
        if self.random.random() < 0.4:
            load = self.input(("2 * N",), self.random.choice((BF16, F32)), self.fill())
            wide = self.step("{0} + {1}", [wide, load], Rule.EXACT) or wide
        names = [self.step(text, [wide], Rule.VIEW) for text in self.random.choice(PARTS)]
        for name in names:
            self.new_plane(name)
        left, right = names
        if left is not None and right is not None and self.random.random() < 0.7:
            gate = "{0} * {1}" if self.exact else "F.silu({0}) * {1}"
            self.new_plane(self.step(gate, [left, right], Rule.EXACT if self.exact else Rule.COMPOSITE))

    def chained(self) -> None:
        """Draws a product whose left operand is a plane."""
        source = self.any_plane()
        dtype = self.values[source].dtype
        if dtype in (BF16, F16) and not self.exact:
            weight = self.input(("N", "N"), dtype, Fill.NORMAL)
            self.new_plane(self.step("{0} @ {1}", [source, weight], Rule.PRODUCT))

    # Pointwise work

    def unary(self) -> None:
        self.pointwise(1)

    def binary(self) -> None:
        self.pointwise(2)

    def ternary(self) -> None:
        self.pointwise(3)

    def in_steps(self) -> None:
        self.apply(self.random.choice(IN_STEPS))

    def pointwise(self, arity: int) -> None:
        table = [WRITTEN, WRITTEN, table_ops()][self.random.randrange(3)]
        ops = [op for op in table if op.arity == arity and (not self.exact or op.is_determined)]
        if ops:
            self.apply(self.random.choice(ops))

    def apply(self, op: Pointwise) -> None:
        text = op.text
        while "#" in text:
            text = text.replace("#", self.random.choice(DYADIC if self.exact else NUMBERS), 1)
        operands = [self.any_plane()]
        for _ in range(op.arity - 1):
            operands.append(self.load() if self.random.random() < 0.6 else self.any_plane())
        self.random.shuffle(operands)
        if self.eager:
            operands = self.cast_up(operands)
        if op.has_truth:
            operands[0] = self.truth(operands[0])
        name = self.step(text, operands, op.rule)
        if name is not None and not isinstance(self.values[name], Tensor):
            raise TypeError(f"{text} gives no tensor")
        self.new_plane(name)

    def cast_up(self, operands: list[str]) -> list[str]:
        """The operands, sometimes with all or some values of 16 bits cast to fp32."""
        chance = self.random.choice((0.0, 0.0, 0.5, 1.0))
        return [
            self.step("{0}.float()", [name], Rule.CAST) or name
            if self.values[name].dtype in (BF16, F16) and self.random.random() < chance
            else name
            for name in operands
        ]

    def truth(self, name: str) -> str:
        if self.values[name].dtype is torch.bool:
            return name
        return self.step("{0} > 0", [name], Rule.EXACT) or name

    def cast(self) -> None:
        target = self.random.choice(CASTS)
        source = self.any_plane()
        is_fp8 = target in (E4M3, E5M2)
        if is_fp8 and self.exact:
            source = self.step("{0}.clamp(-400, 400)", [source], Rule.EXACT) or source
        if target in (torch.int8, torch.uint8, torch.int32):
            source = self.step("{0}.clamp(0, 100)", [source], Rule.EXACT) or source
        name = self.step(f"{{0}}.to({target})", [source], Rule.CAST)
        if name is not None and is_fp8 and self.random.random() < 0.8:
            self.results += [name] * (self.random.random() < 0.3)
            back = self.random.choice(("torch.float32", "torch.bfloat16"))
            name = self.step(f"{{0}}.to({back})", [name], Rule.CAST)
        if name is not None and self.values[name].dtype in (E4M3, E5M2):
            self.results.append(name)
        else:
            self.new_plane(name)

    # Shapes

    def keep(self) -> None:
        self.new_plane(self.step(f"{{0}}{self.random.choice(KEEPING)}", [self.any_plane()], Rule.VIEW))

    def change(self) -> None:
        name = self.step(f"{{0}}{self.random.choice(CHANGING)}", [self.any_plane()], Rule.VIEW)
        if name is not None:
            self.results.append(name)

    def there_and_back(self) -> None:
        there, back = (".view(M, N)", ".view(B, S, N)") if self.deep else (".reshape(1, M, N)", "[0]")
        name = self.step(f"{{0}}{there}", [self.any_plane()], Rule.VIEW)
        name = name and self.step("{0} * 2", [name], Rule.EXACT)
        self.new_plane(name and self.step(f"{{0}}{back}", [name], Rule.VIEW))

    def reduce(self) -> None:
        """Draws a reduction, whose result may become an operand."""
        reduction = self.random.choice(REDUCTIONS)
        if self.exact and reduction.rule in SUMS:
            return
        axes = ["-1", "-1", "0", *(["(0, 1)", "1"] if self.deep else []), ""]
        axis = self.random.choice(axes)
        if not takes(reduction, axis):
            axis = "-1"
        keeps = axis != "" and takes(reduction, "-1, keepdim=True") and self.random.random() < 0.5
        text = reduction.text.replace("@", f"{axis}, keepdim=True" if keeps else axis)
        reference = reduction.extremum.replace("@, keepdim=True", f"{axis}, keepdim=True" if axis else "")
        dim = int(axis) if axis in ("-1", "0", "1") else None
        name = self.step(text, [self.any_plane()], reduction.rule, reference, dim)
        if name is None:
            return
        if reduction.rule not in INDICES and (keeps or self.values[name].shape == self.plane):
            self.loads.append(name)
        if self.random.random() < 0.7 or reduction.rule in INDICES:
            self.results.append(name)

    def pick(self) -> None:
        """Draws one element of each row of a plane, at a column that an input names."""
        places = self.input((*self.lead, "1"), torch.int64, Fill.INTEGERS)
        name = self.step("{0}.gather(-1, {1} % N)", [self.any_plane(), places], Rule.VIEW)
        if name is not None:
            self.results.append(name)

    def write(self) -> None:
        """Draws a write into an input of the plane's shape, which later operands read."""
        inputs = [
            each.name
            for each in self.inputs
            if each.name in self.loads and not each.view and self.values[each.name].shape == self.plane
        ]
        if inputs and self.random.random() < 0.5:
            target, source = self.random.choice(inputs), self.any_plane()
            if self.values[target].is_floating_point() and self.values[target].dtype.itemsize > 1:
                self.step("{0}.copy_({1})", [target, source], Rule.CAST)
