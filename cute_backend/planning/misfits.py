"""The reason why a tile that a user names can't serve a spec, for the error that says so."""

from __future__ import annotations

import re

from cute_backend.planning.fitting import can_split, has_registers
from cute_backend.planning.rules import RULES
from cute_backend.planning.shared_memory import holds_planes
from cute_backend.planning.targets import Arch
from cute_backend.planning.tiles import TileConfig
from cute_backend.planning.transposing import Tiled, can_transpose
from cute_backend.spec import EpilogueSpec

_NAME = re.compile(r"(\d+)x(\d+)(?:x(\d+))?_(\d+)x(\d+)((?:_[a-z0-9]+)*)")

_FLAGS: dict[str, dict[str, int]] = {
    "2cta": {"ctas": 2},
    "pingpong": {"pingpong": True},
    "unrolled": {"unrolled": True},
    "transposed": {"transposed": True},
    "halves": {"column_groups": 2},
    "shallow": {"shallow": True},
}
_NUMBERS = {"by": "subtile_n", "split": "split_k", "occupancy": "occupancy"}


def tile_of(arch: Arch, name: str) -> TileConfig | None:
    """The tile with a name (`TileConfig.name`), whether or not anything can use it; None if the text is no
    such name. Raises ValueError if the architecture has no such tile."""
    shape = _NAME.fullmatch(name)
    if shape is None:
        return None
    tile_m, tile_n, products, cluster_m, cluster_n = (int(each or 1) for each in shape.groups()[:5])
    fields: dict[str, int] = {}
    for part in shape[6].split("_")[1:]:
        number = re.fullmatch(r"([a-z]+)(\d+)", part)
        if number is not None and number[1] in _NUMBERS:
            fields[_NUMBERS[number[1]]] = int(number[2])
        elif part in _FLAGS:
            fields |= _FLAGS[part]
        else:
            return None
    return TileConfig(arch, tile_m, tile_n, cluster_m, cluster_n, products=products, **fields)  # type: ignore[arg-type]


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


def misfit(arch: Arch, spec: EpilogueSpec, name: str) -> str:
    """A clause that says why the tile of this name can't serve a spec; empty if there is no such tile."""
    try:
        config = tile_of(arch, name)
    except ValueError as error:
        return str(error)
    if config is None:
        return ""
    if config.products != (products := len(spec.accumulators)):
        return f"it has accumulators for {config.products} products of one A, and here there are {products}"
    if config.transposed and not can_transpose(spec):
        return "what is computed can't be computed transposed"
    ruled, computed = config, Tiled(spec, config).computed
    for rule in RULES[1:]:  # the first one divides a tile among products, as it is already
        changed = rule(ruled, computed)
        if changed is None:
            return f"{rule.__name__} (planning/rules.py): {_first_sentence(rule.__doc__)}"
        ruled = changed
    if not holds_planes(ruled.summing, computed):
        return "shared memory has no room for its planes beside the stages of A and B"
    if not has_registers(ruled.summing, computed):
        return "its threads have too few registers for their accumulators and for what is read"
    if config.split_k > 1 and not can_split(ruled, spec):
        return f"K can't be in {config.split_k} parts here"
    if ruled.name != config.name:
        return f"the rules make {ruled.name} of it"
    return f"{arch.value} has no such tile or cluster in its tables"
