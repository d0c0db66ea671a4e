"""The models of examples/ on a real GPU: as right as eager, or as Inductor's own code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._dynamo.utils import counters

from cute_backend import config
from support.model_files import NAMES, check

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def launches_as_shipped() -> Iterator[None]:
    with config.patch(shared_launches=True):  # type: ignore[attr-defined]
        yield


@pytest.mark.parametrize("model", NAMES)
def test_a_model_and_its_gradients_are_right(model: str, fresh_compiler: None) -> None:
    check(model, "cuda")
    counted = counters["cute_backend"]
    assert counted["regions"] and not counted["replayed"] and not counted["builds_failed"], dict(counted)
