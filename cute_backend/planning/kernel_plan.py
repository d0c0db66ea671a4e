"""The plan of a kernel: all that is decided about it before its text is written, made once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from cute_backend.planning.ladder import first_rung, lower_rungs
from cute_backend.planning.last_tile import counters_needed, may_finish_rows
from cute_backend.planning.mainloop import Constructor
from cute_backend.planning.mainloops import mainloop_of
from cute_backend.planning.placements import Carrier, Placement
from cute_backend.planning.placing import Placing, placed
from cute_backend.planning.rung import Rung
from cute_backend.planning.shared_memory import Rings
from cute_backend.planning.stages import Stages
from cute_backend.planning.targets import Arch
from cute_backend.planning.tiles import Alignment, TileConfig
from cute_backend.signature import Argument, signature
from cute_backend.spec import EpilogueSpec


@dataclass(frozen=True)
class Plan:
    """One kernel. Two plans are equal if spec, tile and alignment are: all else follows from these.

    `spec` is what a region computes, `tile` the tile that runs, after all rules, and `alignment` that of the
    operands.
    """

    spec: EpilogueSpec
    tile: TileConfig
    alignment: Alignment
    computed: EpilogueSpec = field(compare=False, repr=False)
    """The spec that the kernel computes: `spec` or, if the tile is transposed, the transposed one."""
    segments: tuple[Placing, ...] = field(compare=False, repr=False)
    """The places of operands, for each segment of columns of `computed`."""
    stages: Stages = field(compare=False)
    mainloop: Constructor | None = field(compare=False)
    """None stands for the template's own."""
    finishes_rows: bool = field(compare=False)
    """Whether the last tile of a row may finish its reductions, so that `counters` follow the workspace."""

    @staticmethod
    def of(spec: EpilogueSpec, tile: TileConfig, alignment: Alignment) -> Plan:
        """The plan for a tile that no rule changes any more. Raises ValueError if visits do not cover it."""
        for each in (tile, tile.summing):
            each.check_visits()
        rung = Rung(spec, tile, alignment)
        computed = rung.computed
        segments = tuple(placed(each, tile.summing, rung.moves) for each in computed.segments)
        mainloop = mainloop_of(computed, tile.target)
        stages = Stages.of(tile.summing, _rings(computed, tile.summing, segments), mainloop.scales)
        if tile.sums_in_memory:
            parts = Stages.of(tile, Rings())
            stages = Stages(parts.ab, stages.exact, stages.row, stages.store)
        counts = may_finish_rows(computed, tile)
        made = mainloop.constructor(tile)
        return Plan(spec, tile, alignment, computed, segments, stages, made, counts)

    @property
    def arch(self) -> Arch:
        return self.tile.arch

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of `launch`, with their roles."""
        return signature(self.spec, self.tile.sums_in_memory, self.finishes_rows)

    @property
    def placements(self) -> dict[str, Placement]:
        """The placement of every load. If segments read the same load, that of the last one."""
        return {name: place for each in self.segments for name, place in each.placements.items()}

    @property
    def shared_stores(self) -> tuple[str, ...]:
        """The stores that go through shared memory."""
        return tuple(name for each in self.segments for name in each.shared_stores)

    def counters(self, m: int, n: int) -> int:
        """The counters that a launch on a plane of (m, n) needs; 0 if a second kernel finishes reductions."""
        return counters_needed(self.spec.product.kind, self.tile, m, n) if self.finishes_rows else 0

    def finishes_apart(self, m: int, n: int) -> bool:
        """Whether a launch on a plane of (m, n) has reductions that a second kernel finishes."""
        return bool(self.spec.reductions) and not self.counters(m, n)

    def to_dict(self) -> dict[str, Any]:
        """The canonical form, as plain values: `Plan.from_dict` is the inverse."""
        return {
            "spec": json.loads(self.spec.to_json()),
            "tile": self.tile.to_dict(),
            "alignment": self.alignment.value,
            **self._decisions(),
        }

    def _decisions(self) -> dict[str, Any]:
        """The decisions that follow from the spec, the tile and the alignment, as plain values."""
        return {
            "arguments": [argument.name for argument in self.arguments],
            "stages": asdict(self.stages),
            "placements": [
                {name: place.name for name, place in each.placements.items()} for each in self.segments
            ],
            "shared_stores": [list(each.shared_stores) for each in self.segments],
            "mainloop": None if self.mainloop is None else asdict(self.mainloop),
            "finishes_rows": self.finishes_rows,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Plan:
        """The plan of such values. Raises ValueError if they contradict each other."""
        spec = EpilogueSpec.from_json(json.dumps(data["spec"]))
        plan = Plan.of(spec, TileConfig.from_dict(data["tile"]), Alignment(data["alignment"]))
        for name, decided in plan._decisions().items():
            if data[name] != decided:
                raise ValueError(
                    f"a plan of tile {plan.tile.name} has {name} {data[name]}, but its spec, tile and "
                    f"alignment {plan.alignment.value} give {decided}"
                )
        return plan


@lru_cache(maxsize=4096)
def plan(spec: EpilogueSpec, config: TileConfig, alignment: Alignment) -> Plan:
    """The plan for a tile that was chosen for a spec, after the rules that fit it to an alignment, or for a
    smaller tile if a thread lacks registers by the estimate."""
    return Plan.of(spec, first_rung(spec, config, alignment), alignment)


def rungs(plan: Plan) -> tuple[Plan, ...]:
    """A plan, and those that may take its place if its kernel's threads spill, in the order in which they are
    tried."""
    lower = lower_rungs(plan.spec, plan.tile, plan.alignment)
    return plan, *(Plan.of(plan.spec, tile, plan.alignment) for tile in lower)


def _rings(spec: EpilogueSpec, config: TileConfig, segments: tuple[Placing, ...]) -> Rings:
    """The rings that the operands of segments pass through."""
    pairs = list(zip(segments, spec.segments, strict=True))
    planes, rows = (
        [[load.dtype for load in each.in_ring(ring, segment)] for each, segment in pairs]
        for ring in (Carrier.PLANE, Carrier.ROW)
    )
    written = [
        [store.dtype for store in segment.planes if store.name in each.shared_stores]
        for each, segment in pairs
    ]
    return Rings.of(config, planes, rows, written)
