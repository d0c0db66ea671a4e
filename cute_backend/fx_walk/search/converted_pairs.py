"""Pairs of products whose weights a kernel converts: whether one kernel of both is faster than one of each.

A tile of a pair converts the rows of both weights, of which a thread then has registers, so it has fewer rows
of D than a tile of one product. More tiles of rows convert the weights more often.
"""

from __future__ import annotations

from statistics import mean

from cute_backend.fx_walk.ends.boundary import LAUNCH_BYTES
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.search.predictions import CONVERTED_ROWS, planned_for, predicted
from cute_backend.fx_walk.search.walk import Walk
from cute_backend.planning import Arch, Sizes, choose
from cute_backend.planning.fitting import fits
from cute_backend.planning.transposing import Tiled, can_transpose
from cute_backend.spec import DType, EpilogueSpec, Store


def loss_together(walk: Walk, region: Region) -> str | None:
    """The reason why no kernel should compute a pair; None if by the cost model one takes no more time than a
    kernel for each product. These pass one plane of 16 bits between them. A thread has to have registers for
    a pair."""
    m, n, k = region.problem
    if not (isinstance(n, int) and isinstance(k, int)):
        return f"one kernel of both takes an N and a K that are numbers, and they are {n} and {k}"
    if not can_transpose(region.spec):
        return (
            "a kernel that converts weights computes the transposed product, and ops on indices, noise or "
            "blocks of columns follow both"
        )
    target = planned_for(walk, region)
    arch, bytes_per_us = Arch.of_name(target.name), target.timing.bytes_per_us
    assert arch is not None
    first, *_ = region.spec.accumulators
    bare = EpilogueSpec((first,), (), (), (Store("out0", first.name, first.a_dtype),))

    def ratio(rows: int) -> float:
        chosen = choose(arch, region.spec, Sizes(rows, n, k), target.sm_count)
        if not fits(Tiled(region.spec, chosen)):
            raise ValueError(
                f"for {rows} rows, one kernel of both has tiles {chosen.name}, which leave a thread too few "
                "registers; for fewer rows, tiles may be smaller"
            )
        passed = LAUNCH_BYTES + rows * n * DType.BF16.bits // 8
        apart = 2 * predicted(arch, bare, rows, n, k) + passed / bytes_per_us
        return predicted(arch, region.spec, rows, n, k) / apart

    try:
        together = mean(map(ratio, [m] if isinstance(m, int) else CONVERTED_ROWS))
    except ValueError as error:  # no tile serves both products
        return str(error)
    if together <= 1:
        return None
    return f"by the cost model, one kernel of both would take {together:.3f} times as long as one of each"
