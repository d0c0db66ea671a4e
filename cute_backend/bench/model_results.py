"""Measurements of whole models, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from cute_backend.bench.table import Runner


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the rounds, and their 10th and 90th percentiles."""

    median_us: float
    low_us: float
    high_us: float

    @staticmethod
    def of(times: Sequence[float]) -> Timing:
        """The summary of two or more rounds."""
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        return Timing(statistics.median(times), deciles[0], deciles[-1])


class KernelKind(str, Enum):
    """The purpose of a kernel of a model."""

    PRODUCT = "product"
    """A matrix product, with or without an epilogue."""
    ATTENTION = "attention"
    OTHER = "other"


@dataclass(frozen=True)
class KernelTime:
    """A kernel by the profiler's name, its launches in one call of the model, and the sum of their
    microseconds. Profiled calls are slower than timed ones, so these sums exceed the median."""

    name: str
    part: KernelKind
    launches: float
    us: float


@dataclass(frozen=True)
class ModelTiming:
    """A model as `runner` runs it. `timing` is of one call.

    `kernels` is empty for eager. `bytes` is the number of bytes that Inductor's own kernels read and write in
    a call, according to its schedule, without products, attention and our regions. `difference` is that of
    the result from eager's, relative in norm. Both are None for eager.
    """

    runner: Runner
    timing: Timing
    kernels: tuple[KernelTime, ...]
    bytes: int | None = None
    difference: float | None = None
    note: str = ""

    @property
    def launches(self) -> int:
        """The kernels of one call."""
        return round(sum(each.launches for each in self.kernels))

    def us(self, part: KernelKind) -> float:
        """The microseconds of the kernels of one part."""
        return sum(each.us for each in self.kernels if each.part is part)


@dataclass(frozen=True)
class ModelResult:
    """The timings of one model, all interleaved. If it could not be timed, there are none, and `note` says
    why.

    `sources` is a digest of the package that measured it.
    """

    name: str
    timings: tuple[ModelTiming, ...] = ()
    agrees: bool = True
    note: str = ""
    sources: str = ""

    def of(self, runner: Runner) -> ModelTiming | None:
        return next((each for each in self.timings if each.runner is runner), None)

    def speed(self, runner: Runner, baseline: Runner) -> float | None:
        """How many times faster `runner` is than `baseline`, or None if either was not timed."""
        of, to = self.of(runner), self.of(baseline)
        return to.timing.median_us / of.timing.median_us if of and to else None

    def most(self, bandwidth: float) -> float | None:
        """The largest speedup over Inductor that `cute` could reach with these regions, or None without both.

        It assumes that epilogues cost nothing, so that a product takes no longer than Inductor's bare one,
        and that Inductor's own kernels move their bytes at `bandwidth`, in bytes per second.
        """
        inductor, cute = self.of(Runner.INDUCTOR), self.of(Runner.CUTE)
        if inductor is None or cute is None:
            return None
        products = inductor.us(KernelKind.PRODUCT) - cute.us(KernelKind.PRODUCT)
        others = inductor.us(KernelKind.OTHER) - 1e6 * (cute.bytes or 0) / bandwidth
        whole = inductor.timing.median_us
        return whole / (whole - max(products, 0.0) - max(others, 0.0))

    def by(self, sources: str) -> ModelResult:
        """The same, with the digest of the package."""
        return replace(self, sources=sources)


def read(kind: Any, data: Any) -> Any:
    """The object of type `kind` that `dataclasses.asdict` and JSON have made `data` of. Fields that `data`
    lacks have their defaults. Raises the error that Python raises where the data doesn't fit."""
    origin, of = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if data is None else read(of[0], data)
    if origin is tuple:
        return tuple(read(of[0], each) for each in data)
    if origin is dict:
        return {read(of[0], name): read(of[1], each) for name, each in data.items()}
    if is_dataclass(kind):
        types = get_type_hints(kind)
        made = (each.name for each in fields(kind) if each.init)
        return cast(Any, kind)(**{name: read(types[name], data[name]) for name in made if name in data})
    return kind(data)
