"""The launches of a program and the bytes that it moves, from Inductor's schedule for a GPU, by its rules for
Triton. It takes CPU tensors, and compiles nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_backend.fx_walk.ends.launches import launches
from cute_backend.fx_walk.epilogue_pass import EpiloguePass
from cute_backend.fx_walk.products.capability import Capability, Named
from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.planning import Arch

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from models import scheduled


@dataclass(frozen=True)
class Traffic:
    """The kernels of a program, forward and backward, and the total of the bytes that they read and write.

    Regions are those for Hopper, and count as the kernels that they launch there. `regions` and `rejections`
    are empty for Inductor alone.
    """

    kernels: int
    bytes: int
    regions: tuple[Region, ...] = ()
    rejections: tuple[Rejection, ...] = ()


HOPPER = Named(Arch.SM90A)


class Recorder(EpiloguePass):
    """The pass, which records its regions and rejections."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self.rejections: list[Rejection] = []

    def analyse(self, graph: Any, capability: Capability = HOPPER) -> Any:
        found, refused = super().analyse(graph, capability)
        self.regions += found
        self.rejections += refused
        return found, refused


def alone(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traffic:
    """The traffic of a call of `fn` without the pass."""
    return Traffic(*scheduled(fn, args, None))


def fused(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traffic:
    """The traffic of a call of `fn` with the pass."""
    recorder = Recorder()
    kernels, moved = scheduled(fn, args, recorder)
    kernels += sum(launches(region, Arch.SM90A) - 1 for region in recorder.regions)
    return Traffic(kernels, moved, tuple(recorder.regions), tuple(recorder.rejections))
