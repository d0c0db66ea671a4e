"""The tiles between which the model can't decide."""

from __future__ import annotations

import pytest

from cute_backend.planning import Arch, Sizes, choose, doubted
from cute_backend.planning.cost import cost
from cute_backend.planning.doubt import DOUBT, DOUBTED
from support.epilogues import EPILOGUES
from support.shipped import epilogue_spec

SIZES = [
    Sizes(1, 4096, 4096),
    Sizes(257, 5632, 2048),
    Sizes(500, 1536, 8960),
    Sizes(4096, 14336, 4096),
]


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A, Arch.SM80], ids=lambda arch: arch.value)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_choice_comes_first_and_no_other_is_predicted_to_be_much_slower(arch: Arch, sizes: Sizes) -> None:
    spec, count = epilogue_spec("addmm_relu", True), arch.target.sm_count
    first, *others = doubted(arch, spec, sizes, count)
    assert first == choose(arch, spec, sizes, count)
    assert len(others) < DOUBTED and first not in others
    most = DOUBT * cost(first, spec, sizes, count)
    assert all(cost(each, spec, sizes, count) < 1.02 * most for each in others)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_epilogue_has_something_to_time(name: str) -> None:
    spec = epilogue_spec(name, True)
    assert doubted(Arch.SM90A, spec, Sizes(256, 512, 256), 132)
