"""Helpers that tests of the walker share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_backend.fx_walk import boundary, crossings


@pytest.fixture
def free_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches that cost nothing, and second readings of rows that cost their bytes: what can be fused is
    shown on planes so small that a launch would decide what is."""
    boundary.choose.cache_clear()
    monkeypatch.setattr(boundary, "LAUNCH_BYTES", 0)
    monkeypatch.setattr(crossings, "ROW_HELD", 0)
    yield
    boundary.choose.cache_clear()
