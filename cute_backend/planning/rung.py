"""A tile as it runs for operands of one alignment, and what follows from the spec that it serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from cute_backend.planning.registers import leaves_registers
from cute_backend.planning.subtiles import moved, subtiled, with_half_subtiles
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.planning.transposing import Tiled
from cute_backend.spec import EpilogueSpec


@dataclass(frozen=True)
class Rung(Tiled):
    """A tile with which a kernel of a region can be compiled: no rule changes it any more."""

    alignment: Alignment

    @staticmethod
    def of(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Rung:
        """The rung of a tile that was chosen, with the subtiles that the alignment gets."""
        chosen = Rung(spec, config, alignment)
        return replace(chosen, tile=subtiled(config, chosen.computed, chosen.moves))

    @cached_property
    def moves(self) -> Alignment:
        """The alignment that decides how planes move."""
        return moved(self.computed, self.alignment)

    @property
    def fits(self) -> bool:
        """Whether a thread has registers enough, by the estimate."""
        return leaves_registers(self.tile, self.computed, self.moves)

    def with_half_subtiles(self) -> Rung:
        """The rung with subtiles of half the columns, or this one if not all segments can have these."""
        every = {with_half_subtiles(self.tile, each, self.moves) for each in self.computed.segments}
        narrower = every.pop()
        return self if narrower is None or every else Rung.of(self.spec, narrower, self.alignment)
