"""The constraints on a region's kernels: their text, and the settings that they come from."""

from __future__ import annotations

import pytest

from cute_backend import config
from cute_backend.planning import UNCONSTRAINED, Constraints, Rowvecs

TEXTS = {
    UNCONSTRAINED: "",
    Constraints(batch_invariant=True): '{"batch_invariant": true}',
    Constraints(tile="64x64_1x1, 128x128_1x1"): '{"tile": "64x64_1x1, 128x128_1x1"}',
    Constraints(True, '"', Rowvecs.SMEM_STAGED): (
        '{"batch_invariant": true, "tile": "\\"", "rowvecs": "smem_staged"}'
    ),
}


@pytest.mark.parametrize("constraints", TEXTS)
def test_the_text_names_what_is_not_the_default_and_reads_back(constraints: Constraints) -> None:
    assert constraints.text == TEXTS[constraints]
    assert Constraints.parse(constraints.text) == constraints


@pytest.mark.parametrize(
    "text",
    [
        "64x64_1x1",
        "{}",
        "[]",
        "[" * 10**5,
        '{"tile": null}',
        '{"tile": 64}',
        '{"batch_invariant": 1}',
        '{"batch_invariant": false}',
        '{"tile":"64x64_1x1"}',
        '{"tile": "64x64_1x1", "batch_invariant": true}',
        '{"rowvecs": "auto"}',
        '{"rowvecs": "registers"}',
        '{"raster": 8}',
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    """Also one that means the same: launchers are kept by the text."""
    with pytest.raises(ValueError, match=r"^constraints are '.* or the text of a .*Constraints, such as '"):
        Constraints.parse(text)


def test_settings_are_read_when_they_are_asked_for() -> None:
    assert Constraints.from_config() == UNCONSTRAINED
    with config.patch(tile="64x64_1x1", rowvec_placement="register_hoist"):
        assert Constraints.from_config() == Constraints(False, "64x64_1x1", Rowvecs.REGISTER_HOIST)
        with config.patch(batch_invariant=True, tile=None):
            assert Constraints.from_config() == Constraints(True, None, Rowvecs.REGISTER_HOIST)
    assert Constraints.from_config() == UNCONSTRAINED
