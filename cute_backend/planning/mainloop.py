"""The face of mainloops: all that planning asks about how a target multiplies the operands of a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cute_backend.planning.stage_scales import NO_SCALES, StageScales
from cute_backend.planning.targets import Cut, Demand, Target
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import Accumulator, EpilogueSpec


@dataclass(frozen=True)
class Constructor:
    """A class of the templates, by its module and name, and the arguments of its constructor, as Python
    source."""

    module: str
    name: str
    arguments: str = ""

    @property
    def names(self) -> set[str]:
        """The names of `cute_backend.spec` in its arguments: those of calls and of enumerations."""
        return set(re.findall(r"\b([A-Z]\w+)[.(]", self.arguments))


@dataclass(frozen=True)
class Mainloop:
    """The mainloop of a spec on a target: that of the target's template. Each subclass is another one, and
    answers for the products that it multiplies. Where tiles are transposed, both specs have the same one."""

    spec: EpilogueSpec
    target: Target

    demand: ClassVar[Demand | None] = None
    """The kind of specs whose tiles it has if sizes are unknown; None if planes decide."""
    is_fitted = True
    """Whether the cost model was fitted to its products."""
    frees_epilogue = True
    """Whether the warps of the epilogue have nothing to do for it, so that it can hide what they do."""
    makes_planes_wait = True
    """Whether it may be so short that the epilogue waits for planes (`shallow`)."""
    untimed_error = 0.0
    """The relative error of the time of a tile that is not in `timed`, if others are."""
    splits = True
    """Whether CTAs may each have a part of K."""

    @classmethod
    def serves(cls, product: Accumulator, target: Target) -> bool:
        """Whether it multiplies such products on a target."""
        return True

    @staticmethod
    def lacking(product: Accumulator, target: Target) -> str:
        """The reason why a target that needs it for such a product has none, for people; empty otherwise."""
        return ""

    @property
    def product(self) -> Accumulator:
        return self.spec.product

    @property
    def leaves_sums(self) -> bool:
        """Whether the sums of parts of K may go through memory."""
        return self.splits

    @property
    def stacks(self) -> bool:
        """Whether the rows of several products may lie below each other in the MMA."""
        return self.target.by_wgmma

    @property
    def scales(self) -> StageScales:
        """The scales that come with a k tile."""
        return NO_SCALES

    @property
    def timed(self) -> Mapping[Cut, float]:
        """How many times as long its k tiles take as those of the constants of a tile, for each tile that was
        timed with it; none if the constants hold for it."""
        return {}

    def suited(self, config: TileConfig) -> TileConfig | None:
        """The tile as it is for this mainloop, or None if it can't be."""
        return config

    def registers(self, config: TileConfig) -> int:
        """Registers of a thread beside accumulators while k tiles are multiplied."""
        return 0

    def k_times(self, config: TileConfig) -> float:
        """How many times as long a k tile takes, where that follows from the tile."""
        return 1.0

    def microseconds(self, config: TileConfig) -> float:
        """How long a multiprocessor works on operands of a tile before the MMA takes them, for each KiB of
        K."""
        return 0.0

    def constructor(self, config: TileConfig) -> Constructor | None:
        """Its class in kernels; None if the template makes it."""
        return None
