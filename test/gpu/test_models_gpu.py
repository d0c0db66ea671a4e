"""The models of examples/ on a real GPU: as close to eager as Inductor's own code."""

from __future__ import annotations

import pytest
from model_files import NAMES, errors
from torch._dynamo.utils import counters

pytestmark = pytest.mark.gpu

SLACK = 2e-3
"""Half a unit in bf16's last place."""


@pytest.mark.parametrize("model", NAMES)
def test_a_model_is_as_close_to_eager_as_inductors_code(model: str, fresh_compiler: None) -> None:
    """Where activations are quantised to fp8, a rounding elsewhere moves some of them by a step: then both
    differ from eager by percents."""
    ours = errors(model, "cuda", "cute")
    counted = counters["cute_backend"]
    assert counted["regions"] and not counted["replayed"] and not counted["builds_failed"], dict(counted)
    theirs = errors(model, "cuda", "inductor")
    for index, (error, limit) in enumerate(zip(ours, theirs, strict=True)):
        assert error < 1.5 * limit + SLACK, f"result {index}: {error:.1e}, Inductor's {limit:.1e}"
