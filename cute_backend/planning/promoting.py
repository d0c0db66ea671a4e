"""The mainloop of fp8 products whose sums are promoted to fp32 as they grow, where the MMA drops bits of
them."""

from __future__ import annotations

from cute_backend.planning.mainloop import Constructor, Mainloop
from cute_backend.planning.targets import Demand, Target
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import Accumulator


class Promoted(Mainloop):
    """With two sets of sums, a thread adds one to its accumulators while wgmma works on the other."""

    demand = Demand.PROMOTED
    is_fitted = False

    @classmethod
    def serves(cls, product: Accumulator, target: Target) -> bool:
        return target.promotes and not product.fast_accum and not product.is_block_scaled

    @property
    def leaves_sums(self) -> bool:
        return not self.target.clusters

    def registers(self, config: TileConfig) -> int:
        return (2 if self.target.by_wgmma else 1) * config.thread_accumulators

    def constructor(self, config: TileConfig) -> Constructor:
        if self.target.by_wgmma:
            return Constructor("cute_backend.templates.mainloop", "Sm90Promoted")
        return Constructor("cute_backend.templates.warp_mainloop", "Sm80Promoted")
