"""Draws programs of attention's projections: products of one A whose columns are heads.

Several linears of one input, or one linear whose columns are cut into parts, give planes (B, H, S, D). Work
on them includes rotations of columns, of halves of a head or of neighbours, reductions of heads that are
read again, operands that vary from head to head or within one, and copies that are contiguous as attention
reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from cute_backend.fuzz.draw import BF16, F16, F32, Drawing
from cute_backend.fuzz.drawn_program import Fill, Program, Rule

_HEADS = (".view(B, S, H, D)", ".unflatten(-1, (H, D))", ".reshape(B, S, -1, D)")
"""Views of (B, S, N) as heads."""

CUTS = (
    "{0}.chunk(P, -1)[#]",
    "{0}.split(N, -1)[#]",
    "{0}[..., N * # : N * (# + 1)]",
    "{0}.tensor_split(P, -1)[#]",
)
"""Parts (B, S, N) of P * N columns."""

PACKED = (
    "{0}.view(B, S, P, H, D)[:, :, #].transpose(1, 2)",
    "{0}.view(B, S, P, H, D).permute(2, 0, 3, 1, 4)[#]",
    "{0}.view(B, S, P, H, D).transpose(3, 1).unbind(2)[#]",
)
"""Heads (B, H, S, D) of a part of P * N columns."""

_CAT, _STACK = "torch.cat(({1}, {0}), -1)", "torch.stack(({1}, {0}), -1).flatten(-2)"

HALVES = (
    ("{0}[..., : D // 2]", "{0}[..., D // 2 :]", _CAT),
    ("{0}.chunk(2, -1)[0]", "{0}.chunk(2, -1)[1]", _CAT),
    ("{0}.split(D // 2, -1)[0]", "{0}.split(D // 2, -1)[1]", _CAT),
    ("{0}[..., ::2]", "{0}[..., 1::2]", _STACK),
    ("{0}.unflatten(-1, (-1, 2))[..., 0]", "{0}.unflatten(-1, (-1, 2))[..., 1]", _STACK),
)
"""Ways to rotate columns: the first of two parts, the second, which is negated, and how they are joined."""

LOADS = (
    (("D",), ""),
    (("S", "D"), ""),
    (("B", "1", "S", "D"), ""),
    (("B", "S", "D"), ".unsqueeze(1)"),
    (("H", "1", "1"), ""),
    (("H", "1", "D"), ""),
    (("S", "1"), ""),
    (("B", "H", "S", "D"), ""),
    (("B", "S", "N"), ".view(B, S, H, D).transpose(1, 2)"),
    ((), ""),
)
"""Operands of heads (B, H, S, D): shapes and views."""

COPIES = (".contiguous()", ".transpose(1, 2).contiguous()", ".transpose(1, 2).flatten(2)", ".flatten(0, 1)")
"""Copies and views whose values are results."""


def draw_attention(seed: int, index: int) -> Program:
    """The program at an index of the sequence of a seed."""
    return _Attention(Random(f"attention/{seed}/{index}")).program()


class _Attention(Drawing):
    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.scaled, self.deep, self.recipe = random.random() < 0.2, True, None
        b, s = random.choice(((1, 1), (1, 7), (2, 16), (3, 5), (2, 33), (8, 1)))
        heads, columns = random.choice((1, 2, 3, 4)), random.choice((16, 32, 32, 64))
        self.sizes = {"B": b, "S": s, "M": b * s, "N": heads * columns, "K": random.choice((16, 256))}
        self.sizes |= {"H": heads, "D": columns, "P": random.choice((2, 3, 3, 4))}

    @property
    def plane(self) -> torch.Size:
        return torch.Size([self.sizes[name] for name in ("B", "H", "S", "D")])

    def start(self) -> None:
        """Draws the projections."""
        while not self.planes:
            if self.random.random() < 0.5:
                self.packed()
            else:
                for _ in range(self.sizes["P"]):
                    self.heads(self.times("N"))

    @property
    def moves(self) -> list[tuple[Callable[[], None], int]]:
        return [
            (self.unary, 3),
            (self.binary, 4),
            (self.cast, 1),
            (self.rotate, 5),
            (self.reduce, 2),
            (self.norm, 2),
            (self.copy, 3),
        ]

    def times(self, columns: str) -> str | None:
        if self.scaled:
            return self.scaled_product(columns)
        dtype = self.values[self.factors[0]].dtype if self.factors else self.random.choice((BF16, BF16, F16))
        fill = Fill.INTEGERS if self.exact else self.fill()
        if not self.factors:
            self.factors.append(self.input((*self.lead, "K"), dtype, fill))
        weight = self.input((columns, "K"), dtype, fill)
        operands, text = [self.factors[0], weight], "F.linear({0}, {1})"
        if self.random.random() < 0.3:
            operands.append(self.input((columns,), dtype, fill))
            text = "F.linear({0}, {1}, {2})"
        return self.step(text, operands, Rule.PRODUCT)

    def heads(self, product: str | None) -> None:
        """Views (B, S, N) as a plane of heads."""
        if product is not None:
            view = self.random.choice(_HEADS)
            self.new_plane(self.step(f"{{0}}{view}.transpose(1, 2)", [product], Rule.VIEW))

    def packed(self) -> None:
        """Draws a product of P * N columns, and the heads of its parts."""
        product = self.times("P * N")
        if product is None:
            return
        cut, whole = self.random.choice([(cut, False) for cut in CUTS] + [(cut, True) for cut in PACKED])
        for part in range(self.sizes["P"]):
            name = self.step(cut.replace("#", str(part)), [product], Rule.VIEW)
            if whole:
                self.new_plane(name)
            else:
                self.heads(name)

    def load(self) -> str:
        if self.loads and self.random.random() < 0.4:
            return self.random.choice(self.loads)
        shape, view = self.random.choice(LOADS)
        self.loads.append(self.operand(shape, view))
        return self.loads[-1]

    def rotate(self) -> None:
        """Draws a rotary embedding, or a rotation alone."""
        first, second, joined = self.random.choice(HALVES)
        source = self.any_plane()
        parts = [self.step(text, [source], Rule.VIEW) for text in (first, second)]
        if None in parts:
            return
        negated = self.step("-{0}", [parts[1]], Rule.EXACT)  # type: ignore[list-item]
        turned = negated and self.step(joined, [parts[0], negated], Rule.JOIN)  # type: ignore[list-item]
        if turned and self.random.random() < 0.8:
            cos, sin = (
                self.input(("S", "D"), self.random.choice((BF16, F32)), self.fill()) for _ in range(2)
            )
            plain = self.step("{0} * {1}", [source, cos], Rule.EXACT)
            turned = self.step("{0} * {1}", [turned, sin], Rule.EXACT)
            turned = plain and turned and self.step("{0} + {1}", [plain, turned], Rule.EXACT)
        self.new_plane(turned)

    def norm(self) -> None:
        """Draws a norm or another reduction of each head, which is read again."""
        source = self.any_plane()
        if self.exact or not self.values[source].is_floating_point():
            return
        squares = self.step("{0}.float().square()", [source], Rule.COMPOSITE)
        mean = squares and self.step("{0}.mean(-1, keepdim=True)", [squares], Rule.SUM_IN_STEPS, dim=-1)
        scale = mean and self.step("torch.rsqrt({0} + 1)", [mean], Rule.COMPOSITE)
        self.new_plane(scale and self.step("{0} * {1}", [source, scale], Rule.EXACT))

    def copy(self) -> None:
        """Draws a copy in another layout, which is a result."""
        name = self.step(f"{{0}}{self.random.choice(COPIES)}", [self.any_plane()], Rule.VIEW)
        if name is not None:
            self.results.append(name)
