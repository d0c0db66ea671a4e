"""Placements: when and where a load is read, the resources that takes, and its description for people."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.spec import Load, LoadKind


@dataclass(frozen=True)
class Need:
    """The registers of a thread and the bytes of a CTA's shared memory that one load needs."""

    registers: int = 0
    smem_bytes: int = 0


@dataclass(frozen=True)
class Room:
    """The registers and shared memory that are left for the loads without a placement."""

    registers: int
    smem_bytes: int

    def holds(self, need: Need) -> bool:
        """Whether there is room; a load that takes nothing always has it."""
        registers = need.registers == 0 or need.registers <= self.registers
        return registers and (need.smem_bytes == 0 or need.smem_bytes <= self.smem_bytes)

    def without(self, need: Need) -> Room:
        """The room that is left after `need` is taken from it."""
        return Room(self.registers - need.registers, self.smem_bytes - need.smem_bytes)


@dataclass(frozen=True)
class ByElement:
    """Reads of global memory, an element at a time: how many, the name of their slot, and where each is.

    `count` and `index` are expressions of the generated text. In `begin` they may use `tile`, in `visit`
    `sub`: `Tile` and `Subtile` of `templates/tile.py` say what these have.
    """

    count: str
    slot: str
    index: str

    def names(self) -> set[str]:
        """The names that the expressions use besides the slot."""
        nodes = (node for text in (self.count, self.index) for node in ast.walk(ast.parse(text)))
        return {node.id for node in nodes if isinstance(node, ast.Name)} - {self.slot}


class Carrier(Enum):
    """Which of a template's rings of shared memory brings a load ahead of the accumulator wait."""

    ROW = "row"
    """A warp copies the tile's columns of a vector; a thread reads its columns of a subtile, as vectors."""
    PLANE = "plane"
    """TMA, or the warps themselves by cp.async, bring a subtile of a plane; a thread reads its elements of
    it, as vectors."""


Taking = Callable[[Load, TileConfig, Alignment], Need | None]


@dataclass(frozen=True)
class Placement:
    """When and where a load is read. Raises ValueError unless it is read in one of four ways, by expressions
    that use only the names that the generated method has.

    `begin` is for reads before the accumulator wait, whose registers a thread holds for the whole tile,
    `ring` for data that waits in shared memory, `visit` for reads when a subtile needs them, and `copy` for
    the method of `sub` that then copies all its elements. `element` is the expression, of the load's name, by
    which the chain then finds the value for element e of a subtile, in row slot r and column slot c. `takes`
    says what a load of `kind` needs in a configuration and alignment, or None if the placement can't serve
    the load.
    """

    name: str
    kind: LoadKind
    meaning: str
    """The description in the header of a kernel."""
    element: str
    takes: Taking
    begin: ByElement | None = None
    part: str | None = None
    """If `begin` reads for several visits: the expression, of the load's name, for the elements that one
    visit uses."""
    ring: Carrier | None = None
    visit: ByElement | None = None
    copy: str | None = None

    def __post_init__(self) -> None:
        ways = [way for way in ("begin", "ring", "visit", "copy") if getattr(self, way) is not None]
        if len(ways) != 1:
            raise ValueError(
                f"placement {self.name} is read by {' and '.join(ways) or 'nothing'}; it takes one of begin, "
                "ring, visit and copy"
            )
        if self.part is not None and self.begin is None:
            raise ValueError(
                f"placement {self.name} has a part for each visit, but no begin that reads what is divided"
            )
        for way, reads, given in (("begin", self.begin, "tile"), ("visit", self.visit, "sub")):
            if reads is not None and (strange := reads.names() - {given}):
                raise ValueError(
                    f"placement {self.name} uses {' and '.join(sorted(strange))} in {way}, whose expressions "
                    f"have {given} and the slot {reads.slot}"
                )


def takes_nothing(load: Load, config: TileConfig, alignment: Alignment) -> Need:
    """The need of a load that always has room: none."""
    return Need()
