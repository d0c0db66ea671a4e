"""The nodes that a search for dependences may leave out: none of them leads to the node it starts from."""

from __future__ import annotations

from random import Random

import pytest

from cute_backend.fx_walk.search.stretches import Stretches

NODES = 24


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_the_earliest_node_from_which_kernels_lead_on(seed: int) -> None:
    random = Random(seed)
    kernels, stretches = list[tuple[int, int]](), Stretches()
    for _ in range(8):
        first = random.randrange(NODES)
        kernels.append((first, min(first + random.randrange(-2, 4), NODES - 1)))
        stretches.add(*kernels[-1])
        for position in range(NODES):
            assert stretches.bound(position) == _earliest(position, kernels)


def _earliest(position: int, kernels: list[tuple[int, int]]) -> int:
    """Follows kernels, from an operand at `position` or after it to the first member, and on from there."""
    while (least := min([position, *(first for first, last in kernels if last >= position)])) < position:
        position = least
    return position
