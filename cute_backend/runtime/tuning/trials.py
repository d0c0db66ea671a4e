"""The kernels that tuning and measuring try for a problem, and when those of measuring are built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, zip_longest

from cute_backend.planning import Alignment, Arch, Sizes, TileConfig, plan
from cute_backend.runtime.compiling.build import is_at_hand, most_at_once
from cute_backend.runtime.compiling.rungs import begin_alone, standing, stands
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import EpilogueSpec

Tiles = Mapping[Kernel, TileConfig]
"""Kernels, the best by the model first, each with the tile that it was planned for."""

Configurations = Callable[[Arch, EpilogueSpec, Sizes, int], Iterable[TileConfig]]
"""The configurations to try for a problem on a number of SMs, best first."""

_AHEAD = 4
"""The number of kernels for measuring that each core begins to compile: about as many as it compiles while
Inductor works on a graph. Two cores are left to Inductor and its own compilers."""


def kernels_of(spec: EpilogueSpec, configs: Iterable[TileConfig], alignment: Alignment) -> Tiles:
    """The kernels of configurations."""
    found: dict[Kernel, TileConfig] = {}
    for config in configs:
        found.setdefault(Kernel.found(plan(spec, config, alignment)), config)
    return found


def standing_of(tiles: Tiles) -> Tiles:
    """The kernels that stand, as far as is known. If none does, the kernels that run in their place."""
    if sound := {kernel: tile for kernel, tile in tiles.items() if stands(kernel)}:
        return sound
    found: dict[Kernel, TileConfig] = {}
    for kernel, tile in tiles.items():
        found.setdefault(standing(kernel), tile)
    return found


def by_rank(kernels: Iterable[Iterable[Kernel]]) -> list[Kernel]:
    """The kernels of several problems: the first of each, then the second of each, and so on."""
    ranks = chain.from_iterable(zip_longest(*kernels))
    return list(dict.fromkeys(kernel for kernel in ranks if kernel is not None))


def begin_few(problems: Iterable[Tiles]) -> None:
    """Begins to build the kernels of as many problems as there are idle cores for."""
    room, begun = _AHEAD * (most_at_once() - 2), list[list[Kernel]]()
    for tiles in problems:
        missing = [kernel for kernel in standing_of(tiles) if not is_at_hand(kernel)]
        if len(missing) <= room:
            room -= len(missing)
            begun.append(missing)
    begin_alone(by_rank(begun))
