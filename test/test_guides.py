"""The scripts of docs/guides.md, as they run on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from support.sweeps import EXHAUSTIVE

ROOT = Path(__file__).parents[1]

NEEDS = {"training_loop": "torch", "transformers_generate": "transformers", "diffusers_flux": "diffusers"}


@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=() if needs == "torch" else EXHAUSTIVE) for name, needs in NEEDS.items()],
)
def test_a_guide_is_right_and_fuses(
    script: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(NEEDS[script], reason="pip install '.[models]'")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert importlib.import_module(script).main() == 0


def test_the_page_shows_every_script_that_it_names() -> None:
    page = (ROOT / "docs" / "guides.md").read_text()
    for script in NEEDS:
        assert f"../examples/{script}.py" in page
