"""The face of mainloops of products whose blocks of A and B have scales."""

from __future__ import annotations

from cute_backend.planning.mainloop import Mainloop
from cute_backend.planning.targets import Target
from cute_backend.spec import Accumulator, Scaling


class BlockScaled(Mainloop):
    """The work on scales makes its k tiles longer, so that planes don't wait: 4096 x 24576 x 768 with a bias
    and a residual took 207 us, and 219 with a stage of A and B less (H200)."""

    makes_planes_wait = False

    @classmethod
    def serves(cls, product: Accumulator, target: Target) -> bool:
        return product.is_block_scaled and {product.a_scaling, product.b_scaling} <= target.scalings

    @staticmethod
    def lacking(product: Accumulator, target: Target) -> str:
        if {product.a_scaling, product.b_scaling} <= target.scalings | {Scaling.NONE}:
            return ""
        blocks = f"{product.a_scaling.value} by {product.b_scaling.value}"
        return f"no mainloop of {target.name} scales blocks of {blocks}, as {product.name} has them"

    @property
    def leaves_sums(self) -> bool:
        return False
