"""Draws programs with weights that are stored in 8 or 4 bits, and converted in front of their products.

A weight (N, K) has scales for each column or for each group of K, in front of the product or behind it, and
maybe zeros. The views, the casts and the order in which they come are those of libraries and of people. Some
groups are not as kernels take them: of too few values, of a number that does not divide K, or with zeros of
another shape. Some bytes have two values of a weight, seldom in an order that kernels don't take, with axes
exchanged, of one row or column of bytes, or of two dtypes. Some values are converted by way of another dtype.
Some weights have several readers, and some products are pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

from cute_backend.fuzz.draw import BF16, E4M3, E5M2, F16, F32, Drawing
from cute_backend.fuzz.drawn_program import Fill, Input, Program, Rule, Step

STORED = (torch.int8, torch.int8, torch.uint8, E4M3, E5M2)

HALVES = (
    ("{0} & 15", "{0} >> 4"),
    ("{0} & 0xF", "({0} >> 4) & 15"),
    ("{0} % 16", "{0} // 16"),
    ("{0} >> 4", "{0} & 15"),
)
"""The two values of a byte. Kernels don't take the last order."""

MIXED_HALVES = (
    ("{0} & 15", "({0} >> 4).to(torch.int8)", ""),
    ("({0} & 15).to(torch.int8)", "({0} >> 4).to(torch.int16)", ""),
    ("{0}", "({0} >> 4).to(torch.int16)", "({0} << 4) >> 4"),
)
"""The two values of a byte in two dtypes, which their join promotes to int16, and ops behind that. The ops of
the last row leave the low 4 bits of a uint8, but all bits of a byte in int16."""

Shape = tuple[str, ...]

Join = tuple[Shape, str, str]
"""The shape of the bytes of values (@, K), a view of them, and a text that joins their halves."""

JOINED: tuple[Join, ...] = (
    (("@", "K // 2"), "", "torch.stack([{0}, {1}], -1).flatten(-2)"),
    (
        ("@", "K // 2"),
        "",
        "torch.cat([{0}.unsqueeze(2), {1}.unsqueeze(2)], -1).reshape({0}.shape[0], -1)",
    ),
)

OTHER_JOINED: tuple[Join, ...] = (
    # Neighbours along K.
    (("K // 2", "@"), "", "torch.stack([{0}, {1}], 1).flatten(0, 1).t()"),
    (("@", "K // 2"), ".t()", "torch.cat([{0}[:, None], {1}[:, None]], 1).reshape(K, @).t()"),
    # Half of K apart.
    (("K // 2", "@"), "", "torch.cat([{0}, {1}]).t()"),
    (("@", "K // 2"), "", "torch.stack([{0}, {1}], -1).transpose(1, 2).flatten(1)"),
    # Neighbours along N.
    (("@ // 2", "K"), ".t()", "torch.stack([{0}, {1}], -1).flatten(1).t()"),
    *2 * ((("@", "K // 2"), ".t()", "torch.stack([{0}, {1}], -1).reshape(K, @).t()"),),
    *2 * ((("@", "K // 2"), ".t()", "torch.cat([{0}.unsqueeze(2), {1}.unsqueeze(2)], 2).reshape(K, @).t()"),),
    # Axes that are exchanged on one side of the join, or in one half.
    (("@", "K // 2"), "", "torch.stack([{0}.t(), {1}.t()], -1).reshape(@, K)"),
    (("@", "K // 2"), "", "torch.stack([{0}, {1}], -1).reshape(K, @).t()"),
    (("@", "K // 2"), "", "torch.stack([{0}, {1}.t().reshape(@, -1)], -1).flatten(1)"),
    # One row of bytes for all, or one column.
    (("1", "K // 2"), ".expand(@, -1)", "torch.stack([{0}, {1}], -1).flatten(1)"),
    (("1", "K // 2"), "", "torch.stack([{0}, {1}], -1).flatten(1).expand(@, -1)"),
    (("@", "1"), ".expand(-1, K // 2)", "torch.stack([{0}, {1}], -1).flatten(1)"),
    (("@", "1"), "", "torch.stack([{0}, {1}], -1).expand(-1, K // 2, -1).flatten(1)"),
)
"""Joins that people seldom write. Kernels take one of the first two."""

OTHERS = 0.15
"""The share of values in bytes of two that are of mixed halves or joined in other ways, so that kernels take
most."""

OTHER_DTYPES = (
    F32,
    BF16,
    F16,
    torch.int32,
    torch.int16,
    torch.int8,
    E5M2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
)
"""Dtypes by way of which values are converted, which changes some of them."""

SIZES = (32, 64, 128, 256, 64, 128, 16, 512)
"""Values in a group, of which kernels take most."""


@dataclass(frozen=True)
class Grouping:
    """How a weight lies in groups of G values of K: the shape of what is stored, the view in which zeros and
    scales are applied, and the view of the result as (N, K). `vectors` are shapes of zeros and scales, each
    with the view that broadcasts it. `@` stands for the number of columns."""

    stored: Shape
    there: str
    back: str
    vectors: tuple[tuple[Shape, str], ...]


GROUPINGS = (
    Grouping(
        ("@", "K"),
        ".reshape(@, K // G, G)",
        ".reshape(@, K)",
        (
            (("@", "K // G"), ".unsqueeze(-1)"),
            (("@", "K // G"), ".reshape(@, K // G, 1)"),
            (("K // G", "@"), ".t()[..., None]"),
        ),
    ),
    Grouping(
        ("@ * (K // G)", "G"),
        "",
        ".reshape(@, K)",
        ((("@ * (K // G)", "1"), ""), (("@", "K // G"), ".reshape(-1, 1)")),
    ),
    Grouping(
        ("@", "K"),
        ".t().unflatten(0, (K // G, G))",
        ".flatten(0, 1).t()",
        ((("K // G", "1", "@"), ""), (("@", "K // G"), ".t().unsqueeze(1)")),
    ),
)
"""torchao's order of axes, HQQ's, and that of (K, N)."""

OTHER_VECTORS: tuple[tuple[Shape, str], ...] = (
    ((), ""),
    (("1", "1"), ""),
    (("@", "K // G", "G"), ".reshape({0}.shape)"),
)
"""Vectors that have no element for each group and column, or several."""

COLUMN_SCALES: tuple[tuple[Shape, str, str], ...] = (
    *2 * ((("@", "1"), "{0}", "{0}"),),
    *2 * ((("1", "@"), "{0}.t()", "{0}.t()"),),
    (("@",), "{0}.t()", "{0}.t()"),
    ((), "{0}", "{0}"),
    (("1", "K"), "{0}", "{0}"),
)
"""Scales in front of a product: the shape, and the views of a weight (N, K) there and back."""

SCALES_BEHIND: tuple[Shape, ...] = (("@",), ("@",), ("1", "@"), (), ("#", "1"))
"""Scales behind a product; `#` stands for the leading sizes."""

PRODUCTS = ("F.linear({0}, {1})", "{0} @ {1}.t()", "torch.matmul({0}, {1}.mT)")


def draw_weights(seed: int, index: int) -> Program:
    """The program at an index of the sequence of a seed."""
    return _Weights(Random(f"weights/{seed}/{index}")).program()


class _Weights(Drawing):
    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.scaled, self.recipe, self.special = False, None, False
        values = random.choice(SIZES)
        k = random.choice((values, 2 * values, 3 * values, 5 * values, 2 * values, 3 * values, 40))
        self.sizes |= {"N": random.choice((8, 16, 24, 48)), "K": k, "G": values}
        self.weights: list[tuple[str, str, torch.dtype]] = []
        """Weights, with their columns and dtypes."""

    @property
    def moves(self) -> list[tuple[Callable[[], None], int]]:
        moves: list[tuple[Callable[[], None], int]] = [
            (self.unary, 3),
            (self.binary, 3),
            (self.cast, 1),
            (self.keep, 1),
            (self.reduce, 1),
            (self.product, 3),
            (self.parts, 1),
            (self.beside, 2),
        ]
        return moves

    def times(self, columns: str) -> str | None:
        dtype = self.random.choice((BF16, BF16, F16))
        a = self.factor(self.lead, dtype, Fill.INTEGERS if self.exact else Fill.NORMAL)
        same = [name for name, of, kind in self.weights if (of, kind) == (columns, dtype)]
        if same and self.random.random() < 0.3:
            weight: str | None = self.random.choice(same)
        else:
            weight = (
                self.grouped(columns, dtype) if self.random.random() < 0.6 else self.whole(columns, dtype)
            )
        if weight is None:
            return None
        self.weights.append((weight, columns, dtype))
        text, operands = self.random.choice(PRODUCTS), [a, weight]
        if text.startswith("F.linear") and self.random.random() < 0.3:
            text, operands = (
                "F.linear({0}, {1}, {2})",
                [*operands, self.input((columns,), dtype, Fill.INTEGERS)],
            )
        product = self.step(text, operands, Rule.PRODUCT)
        if product is None or self.random.random() < 0.7:
            return product
        shape = self.of_columns(self.random.choice(SCALES_BEHIND), columns)
        shape = (*self.lead, *shape[1:]) if shape[:1] == ("#",) else shape
        scales = self.input(shape, self.random.choice((F32, dtype)), self.scale_fill)
        return self.step("{0} * {1}", [product, scales], Rule.EXACT)

    def beside(self) -> None:
        """Draws a product, and one or two of the same A and weights that are made in the same way. Two mostly
        meet in an op, as gate and up do, and three do not, as queries, keys and values."""
        steps, inputs = len(self.steps), len(self.inputs)
        first = self.times("N")
        if first is None:
            return
        made, given = self.steps[steps:], self.inputs[inputs:]
        others = [self.again(made, given, first) for _ in range(self.random.choice((1, 1, 2)))]
        for each in (first, *others):
            if each is None:
                return
            self.new_plane(each)
        second, *third = others
        if not third and second is not None and self.random.random() < 0.7:
            gate = "{0} * {1}" if self.exact else "F.silu({0}) * {1}"
            self.new_plane(self.step(gate, [first, second], Rule.EXACT if self.exact else Rule.COMPOSITE))

    def again(self, made: Sequence[Step], given: Sequence[Input], result: str) -> str | None:
        """Draws the steps that made a result once more, of new inputs in place of those `given` to them, but
        for the first factors of products."""
        names = {
            each.name: self.input(each.shape, each.dtype, each.fill, each.view)
            for each in given
            if each.name not in self.factors
        }
        for step in made:
            operands = [names.get(name, name) for name in step.operands]
            name = self.step(step.text, operands, step.rule, step.reference, step.dim, step.dtype)
            if name is None:
                return None
            names[step.name] = name
        return names[result]

    @property
    def scale_fill(self) -> Fill:
        return Fill.POWERS if self.exact else Fill.POSITIVE

    def of_columns(self, shape: Shape, columns: str) -> Shape:
        return tuple(self.text_of(size, columns) for size in shape)

    def text_of(self, text: str, columns: str) -> str:
        return text.replace("@", f"({columns})" if " " in columns and text != "@" else columns)

    def stored(self, shape: Shape) -> str:
        dtype = self.random.choice(STORED)
        fill = Fill.INTEGERS if self.exact and dtype.is_floating_point else Fill.BYTES
        return self.input(shape, dtype, Fill.NORMAL if dtype.is_floating_point and not self.exact else fill)

    def packed(self, shape: Shape) -> str | None:
        """Values of this shape, two in each byte of an input, as they are, or less 8 before or behind their
        join."""
        drawn, other = self.random.random(), self.random.random()
        before, behind, mixed = drawn < 0.35, 0.35 < drawn < 0.5, other < OTHERS / 3
        joins = OTHER_JOINED if OTHERS / 3 < other < OTHERS else JOINED
        data, text = self.bytes_of(self.random.choice(joins), shape)
        halves_of = (*self.random.choice((*HALVES, *HALVES[:2])), "")
        *of_byte, of_joined = self.random.choice(MIXED_HALVES) if mixed else halves_of
        halves = list[str]()
        for half_of in of_byte:
            half = data and self.step(half_of, [data], Rule.EXACT)
            half = self.less_8(half, torch.int8) if before and not mixed else half
            if half is None:
                return None
            halves.append(half)
        joined = self.step(text, halves, Rule.JOIN)
        if of_joined:
            joined = joined and self.step(of_joined, [joined], Rule.EXACT)
        return self.less_8(joined, self.random.choice((torch.int8, BF16, F32))) if behind else joined

    def bytes_of(self, join: Join, shape: Shape) -> tuple[str | None, str]:
        """The bytes of values of this shape, viewed inside the program or outside of it, and the text that
        joins their halves."""
        lines, along = shape
        sizes, view, text = join
        view, text, *of = (self.text_of(each.replace("K", along), lines) for each in (view, text, *sizes))
        inside = self.random.random() < 0.5
        data = self.input(of, torch.uint8, Fill.BYTES, "" if inside else view)
        return self.step(f"{{0}}{view}", [data], Rule.VIEW) if view and inside else data, text

    def less_8(self, name: str | None, dtype: torch.dtype) -> str | None:
        """A value less 8, in a dtype."""
        name = self.to(name, dtype)
        return name and self.step("{0} - 8", [name], Rule.EXACT)

    def codes(self, shape: Shape) -> str | None:
        """The values of a weight: stored, or in bytes of two."""
        return self.packed(shape) if self.random.random() < 0.4 else self.stored(shape)

    def to(self, name: str | None, dtype: torch.dtype) -> str | None:
        """A cast, which is sometimes one that changes nothing."""
        return name and self.step(f"{{0}}.to({dtype})", [name], Rule.CAST)

    def converted(self, name: str | None, dtype: torch.dtype) -> str | None:
        """Values of a weight in its dtype or in fp32, seldom by way of another dtype."""
        if self.random.random() < 0.1:
            name = self.to(name, self.random.choice(OTHER_DTYPES))
        return self.to(name, self.random.choice((dtype, dtype, F32)))

    def maybe(self, name: str | None, dtype: torch.dtype) -> str | None:
        """A value, sometimes cast to fp32 or to the dtype of the weight."""
        if self.random.random() < 0.75:
            return name
        return self.to(name, self.random.choice((F32, dtype)))

    def whole(self, columns: str, dtype: torch.dtype) -> str | None:
        """A weight whose scales, if there are any, are of columns."""
        weight = self.converted(self.codes((columns, "K")), dtype)
        if self.random.random() < 0.6:
            shape, there, back = self.random.choice(COLUMN_SCALES)
            scales: str | None = self.input(
                self.of_columns(shape, columns), self.random.choice((F32, dtype)), self.scale_fill
            )
            scales = self.maybe(scales, dtype)
            weight = weight and self.step(there, [weight], Rule.VIEW)
            weight = weight and scales and self.step("{0} * {1}", [weight, scales], Rule.EXACT)
            weight = weight and self.step(back, [weight], Rule.VIEW)
        return self.to(weight, dtype)

    def grouped(self, columns: str, dtype: torch.dtype) -> str | None:
        """A weight in groups of K. If they don't divide K, each value has a scale of its own."""
        if self.sizes["K"] % self.sizes["G"]:
            return self.by_repeated_scales(columns, dtype)
        grouping = self.random.choice(GROUPINGS)
        weight = self.codes(self.of_columns(grouping.stored, columns))
        there = self.text_of(f"{{0}}{grouping.there}", columns)
        first = self.random.random() < 0.5
        if first:
            weight = weight and self.step(there, [weight], Rule.VIEW)
        weight = self.converted(weight, dtype)
        if not first:
            weight = weight and self.step(there, [weight], Rule.VIEW)
        if self.random.random() < 0.7:
            zeros = self.vector(
                grouping, columns, dtype, (torch.int8, torch.uint8, dtype, F32), Fill.INTEGERS
            )
            text = self.random.choice(("{0} - {1}",) * 5 + ("{0} + {1}",))
            weight = weight and zeros and self.step(text, [weight, zeros], Rule.EXACT)
            weight = self.maybe(weight, dtype)
        scales = self.vector(grouping, columns, dtype, (F32, dtype, BF16), self.scale_fill)
        operands = [weight, scales] if self.random.random() < 0.8 else [scales, weight]
        weight = weight and scales and self.step("{0} * {1}", operands, Rule.EXACT)  # type: ignore[arg-type]
        back = self.text_of(f"{{0}}{grouping.back}", columns)
        if self.random.random() < 0.5:
            weight = self.to(weight, dtype)
            return weight and self.step(back, [weight], Rule.VIEW)
        weight = weight and self.step(back, [weight], Rule.VIEW)
        return self.to(weight, dtype)

    def vector(
        self,
        grouping: Grouping,
        columns: str,
        dtype: torch.dtype,
        dtypes: tuple[torch.dtype, ...],
        fill: Fill,
    ) -> str | None:
        """Zeros or scales, as they broadcast to a weight."""
        every = OTHER_VECTORS if self.random.random() < 0.1 else grouping.vectors
        shape, view = self.random.choice(every)
        kind = self.random.choice(dtypes)
        name: str | None = self.input(self.of_columns(shape, columns), kind, fill)
        if kind is not dtype and not kind.is_floating_point and self.random.random() < 0.7:
            name = self.to(name, dtype)
        name = self.maybe(name, dtype)
        if not view:
            return name
        return name and self.step(self.text_of(f"{{0}}{view}", columns), [name], Rule.VIEW)

    def by_repeated_scales(self, columns: str, dtype: torch.dtype) -> str | None:
        weight = self.to(self.stored((columns, "K")), dtype)
        scales = self.input((columns, "-(-K // G)"), dtype, self.scale_fill)
        repeated = self.step("{0}.repeat_interleave(G, 1)[:, :K]", [scales], Rule.VIEW)
        return weight and repeated and self.step("{0} * {1}", [weight, repeated], Rule.EXACT)
