"""The blocks of columns that a tile has to hold: the search asks the planner about them here.

Blocks are reduced, or their halves rotated. The planner gets the spec of what the chain has so far
(`Chain.provisional`), and answers whether a tile serves it.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.planning import held
from cute_backend.spec import EpilogueSpec, Major, Op


def check_blocks(chain: Chain) -> None:
    """Raises Refused if no tile holds the blocks that the chain reduces and rotates, all of them at once and
    beside the planes that it reads."""
    if chain.is_served():
        return
    sizes, rotated = held_sizes(chain), chain.provisional().halved_columns
    names = ", ".join(map(str, sizes))
    if rotated:
        seen = {view.blocks.columns for view in chain.views if view.blocks is not None}
        seen |= {op.columns_together for op in chain.block_ops}
        blocks = ", ".join(map(str, sorted(seen)))
        raise Refused(
            Reason.ROTATION_SIZE, columns=rotated, sizes=blocks, held=names or f"none {_why_none(chain)}"
        )
    reduced = {op.block for op in chain.block_ops if op.reduction is not None}
    whole = lcm(*(reduced or {op.block for op in chain.block_ops}))
    none = "none beside a weight that the kernel converts" if chain.accumulators[0].is_converted else "none"
    raise Refused(Reason.BLOCK_SIZE, columns=whole, held=names or none)


def check_places(chain: Chain) -> None:
    """Raises Refused for a region that reduces rows or columns, if the chain rotates blocks: the kernel then
    has the columns in another order."""
    if chain.block_ops and (columns := chain.provisional().reordered_columns):
        raise Refused(Reason.ROTATED_PLACES, columns=columns)


def held_sizes(chain: Chain, *further: Op) -> tuple[int, ...]:
    """The sizes that the blocks of a chain, with `further` ops at its end, could have instead, so that some
    tile serves them."""
    return _held(chain, chain.provisional(*further))


def _held(chain: Chain, spec: EpilogueSpec) -> tuple[int, ...]:
    return tuple(sorted({size for arch in chain.archs for size in held(arch, spec)}))


def _why_none(chain: Chain) -> str:
    """The kind of product of whose blocks no tile rotates the halves, whatever their size."""
    along_k = tuple(replace(acc, b_major=Major.K) for acc in chain.accumulators)
    if along_k != chain.accumulators and _held(chain, replace(chain.provisional(), accumulators=along_k)):
        return "if B is contiguous along N, as a (K, N) weight is; store it as (N, K), and multiply by w.t()"
    return "after this kind of product; one dense product without scales of blocks is supported"
