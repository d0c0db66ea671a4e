"""Tests on a GPU run where the package is on the path, installed or not.

`backend="cute"` is found by the entry point of an installation, which a bare checkout lacks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cute_backend.registration  # noqa: F401
from cute_backend import config


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    """Every kernel runs in the model's tile, and no region is left to Inductor because it was the faster."""
    with config.patch(measure=False):
        yield
