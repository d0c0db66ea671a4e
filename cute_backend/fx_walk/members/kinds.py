"""All kinds of members: no other module names one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from cute_backend.fx_walk.members import (
    block_parts,
    concatenation,
    picked,
    reductions,
    rotations,
    tiled_scales,
)
from cute_backend.fx_walk.region.member import Member

FINDERS = (
    reductions.find,
    rotations.find,
    block_parts.find,
    tiled_scales.find,
    concatenation.find,
    picked.find,
)
"""Functions that find the members of each kind in all nodes of a graph, in graph order. Where a node may join
as several kinds, the first one wins."""


def find_members(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[Member]]:
    """The members of a graph by their heads, those of a node in the order of `FINDERS`."""
    every, members = list(nodes), dict[fx.Node, list[Member]]()
    for find in FINDERS:
        for member in find(every):
            members.setdefault(member.head, []).append(member)
    return members
