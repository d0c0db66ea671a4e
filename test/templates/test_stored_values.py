"""Which class makes numbers of stored values."""

from __future__ import annotations

import pytest

from cute_backend.dtypes import DType
from cute_backend.kinds.stored import STORED
from cute_backend.templates.stored_values import stored_pairs


@pytest.mark.parametrize("by_bits", [False, True])
def test_a_format_has_a_class_or_is_named(by_bits: bool) -> None:
    """Another dtype is not taken for the nearest one's."""
    assert {type(stored_pairs(dtype, by_bits=by_bits)).__name__ for dtype in STORED} == {
        "Float8",
        "Integers",
        "Nibbles",
    }
    with pytest.raises(ValueError, match=r"no class of templates/stored_values\.py makes numbers of e2m1x2"):
        stored_pairs(DType.E2M1X2, by_bits=by_bits)
