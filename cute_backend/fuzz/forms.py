"""Draws programs of many forms that a user may compile, with a matrix product or without.

`draw` uses only steps whose bounds can be followed. These programs also have reductions with and without
dims, norms, writes into buffers, gradients that are clipped and applied, `vmap`, `cond`, autocast, and 0-d
operands. They are checked less strictly: nothing may raise, and shapes and dtypes must be eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from cute_backend.fuzz.draw import Drawing
from cute_backend.fuzz.drawn_program import Fill, Program, Rule

BF16, F32 = torch.bfloat16, torch.float32

NORMS = (
    "{0}.norm()",
    "{0}.norm(p=1)",
    "{0}.norm(dim=-1)",
    "{0}.norm(p=3, dim=0, keepdim=True)",
    "torch.linalg.vector_norm({0})",
    "torch.linalg.vector_norm({0}, ord=float('inf'))",
    "torch.linalg.vector_norm({0}, ord=0, dim=-1, keepdim=True)",
    "torch.linalg.matrix_norm({0})",
    "torch.nn.utils.get_total_norm([{0}])",
    "F.normalize({0}, dim=-1)",
    "F.layer_norm({0}, {0}.shape[-1:])",
    "F.rms_norm({0}, {0}.shape[-1:])",
    "F.batch_norm({0}.flatten(0, -2), None, None, training=True).view({0}.shape)",
    "F.softmax({0}, -1)",
    "F.log_softmax({0}, 0)",
    "F.cosine_similarity({0}, {0} + 1, dim=-1)",
)

REDUCTIONS = (
    "{0}.sum()",
    "{0}.sum(dim=None, keepdim=True)",
    "{0}.sum(dim=[])",
    "{0}.sum(dim=(), keepdim=True)",
    "{0}.sum(dtype=torch.float64)",
    "{0}.sum((0, -1), keepdim=True)",
    "{0}.mean()",
    "{0}.mean(dim=None, keepdim=True)",
    "{0}.mean(dim=(0,), dtype=torch.float32)",
    "{0}.amax()",
    "{0}.amin(dim=(), keepdim=True)",
    "{0}.amax(dim=(-1,))",
    "{0}.max()",
    "{0}.min()",
    "{0}.max(0).values",
    "{0}.min(-1, keepdim=True).indices",
    "{0}.aminmax().max",
    "{0}.prod()",
    "{0}.prod(-1)",
    "{0}.any()",
    "{0}.all()",
    "({0} > 0).all(-1, keepdim=True)",
    "{0}.argmax()",
    "{0}.argmin(keepdim=True)",
    "{0}.argmax(-1)",
    "{0}.count_nonzero()",
    "{0}.count_nonzero(dim=0)",
    "{0}.nanmean()",
    "{0}.nanmean(dim=-1)",
    "{0}.nansum()",
    "torch.logsumexp({0}, 0)",
    "torch.logsumexp({0}, (0, -1))",
    "torch.logsumexp({0}, -1, keepdim=True)",
    "{0}.std()",
    "{0}.var(dim=0)",
    "{0}.var(unbiased=False)",
    "torch.var_mean({0}, dim=-1)[0]",
    "{0}.median()",
    "{0}.sort(-1).values",
    "{0}.topk(1).values",
    "{0}.cumsum(0)",
    "{0}.sum_to_size({0}.shape[-1])",
    "({0}.amax(-1, keepdim=True) - {0}).exp().sum(-1).log() + 1.0",
)

WITH_SCALARS = (
    "{0} * {1}",
    "{1} - {0}",
    "{0} / {1}",
    "{0} // {1}",
    "{1} ** {0}",
    "torch.where({0} > {1}, {0}, {1})",
    "torch.clamp({0}, max={1})",
    "torch.maximum({0}, {1})",
    "{0}.masked_fill({0} > {1}, 0)",
    "torch.addcmul({0}, {0}, {1})",
    "torch.full_like({0}, 2.0) * {1}",
    "torch.lerp({0}, {1}.to({0}.dtype), 0.5)",
    "({1} + 1).to({0}.dtype) * {0}",
    "{0} + torch.tensor(2)",
    "{0}.fill_(1) * {1}",
)

WRITES = (
    "{0}.add_({1})",
    "{0}.add_({1}, alpha=0.1)",
    "{0}.mul_(0.9).add_({1})",
    "{0}.copy_({1})",
    "{0}.sub_({1} * 0.1)",
    "{0}.lerp_({1}.to({0}.dtype), 0.1)",
    "{0}.clamp_(-1, 1)",
    "{0}.zero_()",
    "{0}[:1].add_(1)",
    "{0}.t().mul_(2)",
    "{0}.div_({1}.norm())",
)

OTHERS = (
    "F.dropout({0}, 0.5)",
    "torch.rand_like({0}) * {0}",
    "torch.cat([{0}, {0}], -1)",
    "torch.stack([{0}, {0}]).sum(0)",
    "{0}.repeat(2, *[1] * ({0}.dim() - 1))",
    "{0}.triu()",
    "F.pad({0}, (0, 3))",
    "F.pad({0}, (0, 3, 0, 5), value=1.0)[..., : {0}.shape[-1]]",
    "{0}.unfold(-1, 2, 2)",
    "{0}[..., torch.arange({0}.shape[-1]).flip(0)]",
    "{0}.view(torch.int16)",
    "torch.complex({0}.float(), {0}.float()).abs()",
    "{0}.to(torch.float64) * 2",
    "{0}.expand(2, *{0}.shape)",
    "torch.broadcast_to({0}.sum(), (3,))",
    "{0}.sin().chunk(2, -1)[0]",
    "torch.empty_like({0}).normal_() + {0}",
    "torch.zeros((), dtype={0}.dtype) + {0}",
    "torch.scalar_tensor(3.0) * {0}",
    "{0}.is_floating_point() + {0}",
    "{0} * {0}.shape[0]",
    "{0} / {0}.numel()",
)

MAPPED = (
    "torch.vmap(lambda r: F.silu(r) * 2)({0})",
    "torch.vmap(lambda r: (r * r).sum())({0})",
    "torch.vmap(lambda r: r.norm(), in_dims=-1)({0})",
    "torch.vmap(lambda r: r.amax(), out_dims=0)({0})",
    "torch.vmap(torch.func.grad(lambda r: r.square().sum()))({0})",
    "torch.func.jvp(torch.tanh, ({0},), ({0},))[1]",
    "torch.cond({0}.sum() > 0, lambda a: F.relu(a) + 1, lambda a: a * 2, ({0},))",
)
"""Functions of a value that torch decomposes, or that a higher-order operator calls."""

PRODUCTS = (
    "torch.vmap(lambda r: F.relu(r @ {1}))({0})",
    "torch.vmap(torch.matmul, in_dims=(0, None))({0}, {1}) + 1",
    "torch.vmap(lambda c: F.relu({0} @ c), in_dims=-1, out_dims=-1)({1})",
    "torch.vmap(lambda s: ({0} @ {1}) * s)({0}.flatten()[:2])",
    "torch.cond({0}.sum() > 0, lambda a, b: F.relu(a @ b), lambda a, b: (a @ b) * 2, ({0}, {1}))",
    'torch.autocast("cpu", torch.bfloat16)(lambda a, b: F.relu(a @ b))({0}.float(), {1}.float())',
    'torch.autocast("cpu", torch.bfloat16)(lambda a, b: F.softmax(a @ b, -1) @ b.mT)({0}, {1})',
    'torch.autocast("cpu", torch.float16)(lambda a, b: F.linear(a, b.mT).norm(dim=-1))({0}, {1})',
    "torch.einsum('...k,kn->...n', {0}, {1}).norm()",
    "torch.tensordot({0}, {1}, 1).relu()",
    "F.pad({0} @ {1}, (0, 2)).relu()",
    "torch.dot({0}.flatten(), {0}.flatten())",
    "torch.mv({0}.flatten(0, -2), {1}[:, 0]).relu()",
    "({0} @ {1}[:, 0]).sum()",
    "torch.addmm({1}[0], {0}.flatten(0, -2), {1}, beta=0).sum(dim=None, keepdim=True)",
    "({0} @ {1}).std(unbiased=False)",
    "({0}.double() @ {1}.double()).relu()",
    "torch.outer({0}.flatten(), {1}[0]).relu().sum(0)",
    "F.scaled_dot_product_attention({0}, {0}, {0})",
    "F.bilinear({0}, {0}, {1}.mT.unsqueeze(1).expand(-1, {0}.shape[-1], -1).contiguous())",
    "torch.cumsum(F.gelu({0} @ {1}), -1)",
    "F.pad({0}, (0, 0, 0, 3)).matmul({1})[..., : {0}.shape[-2], :].relu()",
    "F.pad({0}, (0, 2)) @ F.pad({1}, (0, 3, 0, 2))",
)
"""Texts over a left operand, (..., K), and a right one, (K, N)."""

LOSSES = (
    "F.linear({0}, w).relu().square().mean()",
    "F.gelu(F.linear({0}, w)).sum()",
    "F.silu({0} @ w.t()).norm()",
    "F.softmax(F.linear({0}, w), -1).logsumexp(-1).mean()",
    "F.cross_entropy(F.linear({0}, w).flatten(0, -2), torch.zeros_like({0}[..., 0]).long().flatten())",
    "(F.linear({0}, w) - F.linear({0}, {1})).abs().amax()",
    'torch.autocast("cpu", torch.bfloat16)(lambda: F.linear({0}, w).float().tanh().mean())()',
    "F.mse_loss(F.linear(F.linear({0}, w).relu(), w.t()), {0})",
    "w.norm(p=1) + w.count_nonzero()",
)
"""Texts over an operand, (..., K), and a weight `w`, (N, K)."""


def draw_form(seed: int, index: int) -> Program:
    """The program at an index of the sequence of a seed."""
    return _Forms(Random(f"forms/{seed}/{index}")).program()


class _Forms(Drawing):
    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.exact = self.scaled = False
        self.recipe = None
        self.scalars: list[str] = []
        self.weights: list[str] = []
        self.gradients: list[tuple[str, str]] = []
        """A weight and its gradient."""

    def start(self) -> None:
        if self.random.random() < 0.4:
            self.product()
        if not self.planes:
            self.planes.append(self.input((*self.lead, "N"), self.dtype(), self.fill()))

    @property
    def moves(self) -> list[tuple[Callable[[], None], int]]:
        return [
            (self.unary, 3),
            (self.binary, 3),
            (self.cast, 1),
            (self.change, 1),
            (self.product, 1),
            (lambda: self.one_of(NORMS), 3),
            (lambda: self.one_of(REDUCTIONS), 4),
            (lambda: self.one_of(OTHERS), 2),
            (lambda: self.one_of(MAPPED), 1),
            (self.with_scalar, 3),
            (self.product_in_a_form, 2),
            (self.buffer, 2),
            (self.gradient, 2),
            (self.clip, 2),
        ]

    def dtype(self) -> torch.dtype:
        return self.random.choice((BF16, BF16, F32, torch.float16))

    def add(self, text: str, *operands: str) -> str | None:
        """Adds a step, whose value later steps may read."""
        name = self.step(text, operands, Rule.ANY)
        if name is None:
            return None
        value = self.values[name]
        if value.dim() == 0:
            self.scalars.append(name)
        elif value.shape != self.plane and self.random.random() < 0.3:
            self.loads.append(name)
        self.new_plane(name)
        return name

    def value(self) -> str:
        """A value of any kind: a plane, a result or a scalar."""
        drawn = self.random.random()
        others = self.results if drawn < 0.25 else self.scalars if drawn < 0.35 else []
        return self.random.choice(others or [self.any_plane()])

    def one_of(self, texts: tuple[str, ...]) -> None:
        self.add(self.random.choice(texts), self.value())

    def with_scalar(self) -> None:
        if not self.scalars or self.random.random() < 0.3:
            dtype = self.random.choice((F32, BF16, torch.float64, torch.int64, torch.int32, torch.bool))
            fill = Fill.NORMAL if dtype.is_floating_point else Fill.BITS
            self.scalars.append(self.input((), dtype, fill))
        operands = [self.value(), self.random.choice(self.scalars)]
        self.random.shuffle(operands)
        self.add(self.random.choice(WITH_SCALARS), *operands)

    def product_in_a_form(self) -> None:
        dtype = self.dtype()
        a = self.factor(self.lead, dtype, Fill.NORMAL)
        view = self.random.choice(("", ".t()"))
        b = self.input(("N", "K") if view else ("K", "N"), dtype, Fill.NORMAL, view)
        self.add(self.random.choice(PRODUCTS), a, b)

    def buffer(self) -> None:
        """Draws a write into an input, which may be read later."""
        shape: tuple[str, ...] = self.random.choice(((*self.lead, "N"), ("N",), ()))
        buffer = self.input(shape, self.random.choice((self.dtype(), F32)), Fill.NORMAL)
        if self.random.random() < 0.3:
            self.loads.append(buffer)
        source = self.random.choice([self.value(), *self.scalars])
        if self.step(self.random.choice(WRITES), [buffer, source], Rule.ANY) and self.random.random() < 0.5:
            self.loads.append(buffer)

    def gradient(self) -> None:
        """Draws the gradient of a loss with respect to a weight."""
        dtype = self.dtype()
        x, weight = self.factor(self.lead, dtype, Fill.NORMAL), self.input(("N", "K"), dtype, Fill.NORMAL)
        loss = self.random.choice(LOSSES)
        name = self.step(f"torch.func.grad(lambda w: {loss})({{1}})", [x, weight], Rule.ANY)
        if name is not None:
            self.gradients.append((weight, name))
            self.results.append(name)

    def clip(self) -> None:
        """Draws steps that clip gradients to a norm, and apply them."""
        if not self.gradients:
            return self.gradient()
        names = list(dict.fromkeys(name for _, name in self.gradients))
        listed = ", ".join(f"{{{index}}}" for index in range(len(names)))
        text = f"torch.nn.utils.get_total_norm([{listed}])"
        total = self.step(text, names, Rule.ANY)
        if total is None:
            return None
        self.scalars.append(total)
        for weight, gradient in self.gradients:
            text = "{1} * torch.clamp(0.5 / ({2} + 1e-6), max=1.0)"
            clipped = self.step(text, [weight, gradient, total], Rule.ANY)
            if clipped is not None:
                self.step("{0}.sub_(0.1 * {1})", [weight, clipped], Rule.ANY)
        self.gradients.clear()
        return None
