"""The bounds within which every element of every value of a program may lie.

A fused kernel, Inductor's code and eager round in different places, and all are right. So a value is followed
in float64 as an interval that contains every result that they may compute. Each step is evaluated at the ends
of its operands' intervals, at their reference and, if an interval contains it, at zero of either sign. The
resulting interval is widened by the step's own error, and by a rounding to its dtype that an implementation
may or may not do. Elements for which no interval is known (a sum of infinities, an integer that overflows)
are `loose`: any value is right there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from cute_backend.fuzz.drawn_program import INDICES, SUMS, Program, Rule, Step, evaluate, is_write

_FP32 = 2.0**-20
"""The relative error of a function in fp32, and of fp32 sums of up to some hundred elements."""
_TINY = 2.0**-120
_TURNS = (-1.5, -1.278464542761074, -1.192431209088, -0.752461440, -0.751791524693)
"""The arguments at which functions of the vocabulary have a minimum: hardswish, silu, mish, tanh-gelu and
erf-gelu."""
_OPEN_BEYOND = 1e30
"""The magnitude beyond which functions may overflow in an intermediate fp32 value, though float64 doesn't."""
_PRODUCTS_AT_ONCE = 32
"""The number of fp8 products along K that one instruction of Hopper's tensor cores adds."""
_KEPT_BITS = 13
"""The fraction bits of each product that the instruction keeps."""


@dataclass
class Bounds:
    """A value: eager's result, the ends of its interval, its reference, and the elements that are loose.

    An index must be one of the `candidates`, along `dim` of the tensor that is searched.
    """

    eager: Tensor
    low: Tensor
    high: Tensor
    reference: Tensor
    loose: Tensor
    candidates: Tensor | None = None
    dim: int | None = None

    @staticmethod
    def exactly(value: Tensor) -> Bounds:
        wide = value.double()
        none = torch.zeros_like(wide, dtype=torch.bool)
        return Bounds(value, wide.clone(), wide.clone(), wide.clone(), none)

    def stored(self) -> Bounds:
        """The bounds of a value that every implementation rounds to its dtype, if that is a 16-bit float."""
        dtype = self.eager.dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return self
        low, high, reference = (
            each.to(torch.float32).to(dtype).double() for each in (self.low, self.high, self.reference)
        )
        return replace(self, low=low, high=high, reference=reference)

    @property
    def certain(self) -> Tensor:
        """The elements for which only eager's value is right."""
        same = (self.low == self.high) & (self.low == self.eager.double())
        return (same | (self.low.isnan() & self.eager.isnan())) & ~self.loose

    @property
    def magnitude(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    def wrong(self, got: Tensor) -> Tensor:
        """The elements of `got` that no correct implementation gives."""
        if self.candidates is not None:
            return ~_chosen(self.candidates, got, self.dim)
        value, dtype = got.double(), self.eager.dtype
        inside = (value >= self.low - 2 * unit(self.low, dtype)) & (
            value <= self.high + 2 * unit(self.high, dtype)
        )
        return ~(inside | self.loose | (value.isnan() & self.low.isnan()))

    def distance(self, got: Tensor) -> Tensor:
        """The distance of elements from the reference, in units in the last place; 0 if both are the same."""
        value = got.double()
        same = (value == self.reference) | (value.isnan() & self.reference.isnan())
        return torch.where(
            same, 0.0, (value - self.reference).abs() / unit(self.reference, got.dtype).clamp(min=_TINY)
        )


def unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A unit in the last place of `dtype` at a value; 0 for integers and for values that are not finite."""
    if not dtype.is_floating_point:
        return torch.zeros_like(value)
    info = torch.finfo(dtype)
    size = value.abs().clamp(min=info.smallest_normal)
    spacing = torch.exp2(torch.frexp(size)[1].double() - 1) * info.eps
    return torch.where(value.isfinite(), spacing, 0.0)


def follow(program: Program, inputs: Sequence[Tensor]) -> dict[str, Bounds]:
    """The bounds of every value. The program's writes change `inputs`.

    Under eager's roundings the result of every step is rounded to its dtype.
    """
    values = {each.name: Bounds.exactly(tensor) for each, tensor in zip(program.inputs, inputs, strict=True)}
    sizes = dict(program.sizes)
    for step in program.steps:
        found = bounds_of_step(step, [values[name] for name in step.operands], sizes)
        shares_memory = step.rule is Rule.VIEW or is_write(step)
        values[step.name] = found.stored() if program.eager and not shares_memory else found
    return values


def bounds_of_step(step: Step, operands: list[Bounds], sizes: dict[str, int]) -> Bounds:
    """The bounds of a step's result. Raises torch's exception if the step can't be computed."""
    eager = step.eager([each.eager for each in operands], sizes)

    def run(*samples: Tensor) -> Tensor:
        return evaluate(step.reference or step.text, list(samples), sizes).double()

    if is_write(step):
        return _written(operands, eager)
    if step.rule in (Rule.VIEW, Rule.JOIN):
        moved = operands if step.rule is Rule.JOIN else operands[:1]
        taken_at = [each.eager for each in operands[len(moved) :]]
        low, high, reference, loose = (
            evaluate(step.text, [*(getattr(each, kind) for each in moved), *taken_at], sizes)
            for kind in ("low", "high", "reference", "loose")
        )
        return Bounds(eager, low, high, reference, loose)
    if step.rule is Rule.PRODUCT:
        return _product(eager, run, operands)
    if step.rule in INDICES:
        return _index(eager, run, operands[0], step)
    if step.rule in (*SUMS, Rule.EXTREMUM):
        return _reduction(eager, run, operands[0], step)
    return _pointwise(eager, run, operands, step.rule)


def _pointwise(eager: Tensor, run: Callable[..., Tensor], operands: list[Bounds], rule: Rule) -> Bounds:
    loose = torch.zeros_like(eager, dtype=torch.bool)
    certain = ~loose
    for each in operands:
        loose = loose | each.loose
        certain = certain & each.certain
    cast = rule is Rule.CAST and eager.dtype is not torch.bool
    if cast:
        (source,) = operands
        return _cast(eager, source, loose)
    if not eager.dtype.is_floating_point and any(_is_integer(each.eager.dtype) for each in operands):
        value = eager.double()
        return Bounds(eager, value, value, value, loose | ~certain)
    results = torch.stack([run(*samples) for samples in product(*map(_samples, operands))])
    reference = run(*(_as(each.reference, each.eager.dtype) for each in operands))
    missing = results.isnan()
    loose = loose | (missing.any(0) & ~missing.all(0))
    if rule is Rule.SIGN:
        loose = loose | operands[-1].low.isnan()
    low = torch.where(missing, torch.inf, results).amin(0)
    high = torch.where(missing, -torch.inf, results).amax(0)
    low, high = (torch.where(missing.all(0), torch.nan, end) for end in (low, high))
    size = 1.0 + torch.maximum(low.abs(), high.abs())
    for each in operands:
        size = size + each.magnitude
    if rule in (Rule.FUNCTION, Rule.COMPOSITE):
        loose = loose | (size > _OPEN_BEYOND) & size.isfinite()
    if rule is Rule.CHOICE:
        for each in operands:
            open_ = ~each.certain
            low = torch.where(open_, torch.fmin(low, each.low), low)
            high = torch.where(open_, torch.fmax(high, each.high), high)
    elif rule is Rule.STEPPED:
        low, high = low - 1, high + 1
    elif rule is Rule.WAVE:
        far = high - low > 0.25
        for each in operands:
            far = far | (each.high - each.low > 0.5)
        low, high = _widened(low, high, _FP32 * size)
        low, high = torch.where(far, -1.0, low), torch.where(far, 1.0, high)
    elif rule is Rule.FUNCTION:
        low, high = _widened(low, high, _FP32 * torch.maximum(low.abs(), high.abs()) + _TINY)
    elif rule is Rule.COMPOSITE:
        dtypes = [each.eager.dtype for each in operands]
        eps = max(torch.finfo(dtype).eps for dtype in [*dtypes, torch.float32] if dtype.is_floating_point)
        low, high = _widened(low, high, 4 * max(eps, _FP32) * size)
    return _rounded(eager, low, high, reference, loose)


def _samples(value: Bounds) -> list[Tensor]:
    dtype = value.eager.dtype
    kinds = [value.reference]
    if not torch.equal(value.low, value.high):
        kinds += [value.low, value.high]
        kinds += [value.low.maximum(value.high.minimum(torch.tensor(turn))) for turn in _TURNS]
    zero = (value.low <= 0) & (value.high >= 0)
    if dtype.is_floating_point and zero.any():
        kinds += [torch.where(zero, signed, value.reference) for signed in (0.0, -0.0)]
    return [_as(each, dtype) for each in kinds]


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A sample of a value: truth values as bools, numbers in float64."""
    return value != 0 if dtype is torch.bool else value


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype is not torch.bool


def _cast(eager: Tensor, source: Bounds, loose: Tensor) -> Bounds:
    low, high, reference = source.low, source.high, source.reference
    if _is_integer(eager.dtype):
        info = torch.iinfo(eager.dtype)
        certain = source.certain if not source.eager.dtype.is_floating_point else torch.zeros_like(loose)
        outside = ~((low > info.min - 1) & (high < info.max + 1)) & ~certain
        low, high, reference = (
            torch.where(certain, eager.double(), end.trunc()) for end in (low, high, reference)
        )
        return Bounds(eager, low, high, reference, loose | outside)
    if eager.dtype.itemsize > 1:
        return _rounded(eager, low, high, reference, loose)
    largest = torch.finfo(eager.dtype).max
    if source.eager.dtype is eager.dtype:
        return Bounds(eager, low, high, reference, loose)
    # Beyond the range some casts saturate, and some do not.
    beyond = (low < -largest) | (high > largest)
    ends = [end.clamp(-largest, largest).to(eager.dtype).double() for end in (low, high, reference)]
    return Bounds(eager, ends[0], ends[1], ends[2], loose | beyond)


def _rounded(eager: Tensor, low: Tensor, high: Tensor, reference: Tensor, loose: Tensor) -> Bounds:
    """The bounds, with their ends rounded to fp32 and to the value's dtype."""
    if eager.dtype.is_floating_point:
        for dtype in (torch.float32, eager.dtype):
            low = torch.minimum(low, low.to(dtype).double())
            high = torch.maximum(high, high.to(dtype).double())
    return Bounds(eager, low, high, reference, loose)


def _widened(low: Tensor, high: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    by = torch.where(by.isfinite(), by, 0.0)
    return low - by, high + by


def _reduction(eager: Tensor, run: Callable[..., Tensor], source: Bounds, step: Step) -> Bounds:
    dtype = source.eager.dtype
    low, high, reference = (run(_as(end, dtype)) for end in (source.low, source.high, source.reference))
    unknown = torch.where(source.loose | (source.low.isnan() != source.high.isnan()), torch.nan, 0.0)
    loose = run(unknown)
    loose = loose != 0 if eager.dtype is torch.bool else loose.isnan()
    loose = loose | (low.isnan() != high.isnan()) | ((low == -torch.inf) & (high == torch.inf))
    if dtype is torch.bool or _is_integer(dtype):
        uncertain = run(torch.where(source.certain, 0.0, torch.nan)).isnan()
        if not eager.dtype.is_floating_point and step.rule in SUMS:
            value = eager.double()
            return Bounds(eager, value, value, value, loose | uncertain)
    if step.rule in SUMS:
        size = run(source.magnitude)
        narrow = step.rule is Rule.SUM_IN_STEPS
        if narrow or not _is_summable(source, size):
            eps = torch.finfo(eager.dtype).eps if narrow and eager.dtype.is_floating_point else 0.0
            low, high = _widened(low, high, max(16 * _FP32, 4 * eps) * size.abs() + _TINY)
    return _rounded(eager, low, high, reference, loose)


def _is_summable(source: Bounds, size: Tensor) -> bool:
    """Whether fp32 sums are exact in any order."""
    integral = source.reference == source.reference.round()
    return bool((source.certain & integral).all()) and bool((size < 2**24).all())


def _index(eager: Tensor, run: Callable[..., Tensor], source: Bounds, step: Step) -> Bounds:
    greatest = step.rule is Rule.GREATEST
    best = run(source.low if greatest else source.high)
    able = source.high >= best if greatest else source.low <= best
    candidates = able | source.low.isnan() | source.loose | best.isnan() & ~source.low.isfinite()
    found = Bounds.exactly(eager)
    if not bool(source.certain.all()):  # otherwise ties are decided too: the first one wins
        found.candidates, found.dim = candidates, step.dim
    return found


def _chosen(candidates: Tensor, got: Tensor, dim: int | None) -> Tensor:
    """Whether the elements at these places are candidates."""
    if dim is None:
        flat = candidates.flatten()
        inside = (got >= 0) & (got < flat.numel())
        return inside & flat[got.clamp(0, flat.numel() - 1)]
    extent = candidates.shape[dim]
    index = got if got.dim() == candidates.dim() else got.unsqueeze(dim)
    inside = (index >= 0) & (index < extent)
    chosen = inside & candidates.gather(dim, index.clamp(0, extent - 1))
    return chosen if got.dim() == candidates.dim() else chosen.squeeze(dim)


def _product(eager: Tensor, run: Callable[..., Tensor], operands: list[Bounds]) -> Bounds:
    reference = run(*(each.reference for each in operands))
    sizes = run(*(each.magnitude.nan_to_num(0.0, 0.0, 0.0) for each in operands))
    loose = run(*(torch.where(each.loose, torch.nan, 0.0) for each in operands)).isnan()
    spread = torch.zeros_like(reference)
    if not all(torch.equal(each.low.nan_to_num(), each.high.nan_to_num()) for each in operands):
        # f is linear in each operand, so |d| <= r implies |f(c + d) - f(c)| <= f(|c| + r) - f(|c|).
        centres = [each.reference for each in operands]
        radii = [
            torch.maximum(each.high - each.reference, each.reference - each.low).nan_to_num(0.0, torch.inf)
            for each in operands
        ]
        spread = run(*(c.abs() + r for c, r in zip(centres, radii, strict=True))) - run(
            *(c.abs() for c in centres)
        )
        loose = loose | ~spread.isfinite()
    fp8 = _is_fp8_on_a_gpu(operands[0].eager)
    exact = sizes < (2**_KEPT_BITS if fp8 else 2**24)
    for each in operands:
        exact = exact & bool((each.certain & (each.reference == each.reference.round())).all())
    error = 16 * _FP32 * sizes
    if fp8:
        error = error + _fp8_error(run, operands, sizes)
    spread = spread + torch.where(exact, 0.0, error)
    finite = reference.isfinite()
    low = torch.where(finite, reference - spread, reference)
    high = torch.where(finite, reference + spread, reference)
    return _rounded(eager, low, high, reference, loose)


def _is_fp8_on_a_gpu(a: Tensor) -> bool:
    return a.is_cuda and a.is_floating_point() and a.dtype.itemsize == 1


def _fp8_error(run: Callable[..., Tensor], operands: list[Bounds], sizes: Tensor) -> Tensor:
    """The largest error of fp8 tensor cores in a product whose terms' magnitudes add up to `sizes`.

    Hopper's tensor cores shift the products of an instruction, and the sum so far, to the exponent of the
    largest. They keep 13 fraction bits of each, add these exactly, and keep 13 fraction bits of the sum.
    Further bits are cut off (DeepSeek-V3 Technical Report, arXiv 2412.19437, 3.5.2, counts 14 bits with the
    leading one; results of an H200 agree with this to fp32's last bits). So the error of every term, and of
    the sum, is less than 2^-13 of the largest product or sum. The largest product is bounded by the 4-norm of
    the products, which `run` computes from fourth powers since it is linear in each operand; sums are bounded
    by `sizes`.
    """
    depth = operands[0].eager.shape[-1]
    instructions = -(-depth // _PRODUCTS_AT_ONCE)
    largest = sizes
    if instructions == 1:
        largest = run(*(each.magnitude.nan_to_num(0.0, 0.0, 0.0) ** 4 for each in operands)) ** 0.25
    return instructions * 2.0**-_KEPT_BITS * ((min(depth, _PRODUCTS_AT_ONCE) + 1) * largest + sizes)


def _written(operands: list[Bounds], eager: Tensor) -> Bounds:
    """A copy into the first operand, and so into all tensors that share its memory."""
    target, source = operands
    new = _pointwise(eager.clone(), lambda value: value.double(), [source], Rule.CAST)
    for name in ("low", "high", "reference", "loose"):
        getattr(target, name).copy_(getattr(new, name))
    return target
