"""Templates refuse tiles whose visits do not cover them, also where no plan was made."""

from __future__ import annotations

from typing import Any

import pytest

from cute_backend.planning import Arch, Stages, TileConfig
from cute_backend.templates.sm80 import Sm80Gemm
from cute_backend.templates.sm90 import Sm90Gemm
from cute_backend.templates.sm100 import Sm100Gemm
from support.bare_epilogue import Bare


@pytest.mark.parametrize(
    ("template", "config"),
    [
        (Sm80Gemm, TileConfig(Arch.SM80, 64, 88)),
        (Sm90Gemm, TileConfig(Arch.SM90A, 64, 88)),
        (Sm100Gemm, TileConfig(Arch.SM100A, 128, 88)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_no_template_drops_columns(template: Any, config: TileConfig) -> None:
    with pytest.raises(ValueError, match="has 88 columns for visits of 32, which leave 24 out"):
        template(Bare(), config, Stages(3, store=2))
