"""Models by Inductor alone and with the pass: kernels, bytes, and the rules that regions end by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from support.inductor_model import counted
from support.model_files import ARCHITECTURES, NAMES, load, load_architecture
from support.sweeps import EXHAUSTIVE

QUICK = ("torchao_fp8.py:mlp_per_row", "training.py:gelu", "training.py:swiglu")


def models() -> Iterator[ParameterSet]:
    """Every model of docs/models.md; `make test` counts few of them."""
    for name in (*NAMES, *ARCHITECTURES):
        yield pytest.param(name, marks=() if name in QUICK else EXHAUSTIVE)


@pytest.mark.parametrize("model", models())
def test_regions_move_and_launch_no_more_and_their_model_is_right_within_a_tenth(model: str) -> None:
    fn, args = load(model) if model in NAMES else load_architecture(model)
    alone, ours = (counted(fn, args, fuses) for fuses in (False, True))
    assert ours.kernels <= alone.kernels
    assert ours.bytes <= alone.bytes
    assert [abs(each.error) < 0.1 for each in (alone, ours)] == [True, True], (alone, ours)
