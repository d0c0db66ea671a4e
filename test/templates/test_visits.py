"""The visits of a tile: that they cover it, also where no plan was made, and how many are traced."""

from __future__ import annotations

from typing import Any

import pytest

from cute_backend.planning import Alignment, Arch, Stages, TileConfig, named, plan
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import DType
from cute_backend.templates.fragment_tile import FragmentSubtile
from cute_backend.templates.sm80 import Sm80Gemm
from cute_backend.templates.sm90 import Sm90Gemm
from cute_backend.templates.sm100 import Sm100Gemm
from support.bare_epilogue import Bare
from support.compile_once import FOLDER
from support.simulator.exact import scaled_residual


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


@pytest.mark.parametrize(
    ("name", "stored", "traced"),
    [
        ("64x128_2x1_pingpong", DType.BF16, 1),
        ("128x128_2x1_pingpong", DType.BF16, 2),
        ("128x128_1x1_split8", DType.BF16, 6),
        ("64x64_1x1_transposed", DType.I8, 2),
    ],
    ids=["by_tma", "two_blocks_of_rows", "parts_of_k", "converted"],
)
def test_one_visit_is_traced_if_outputs_leave_by_tma(
    name: str, stored: DType, traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing each of them took a fifth to two fifths of a kernel's compilation. A kernel that converts its
    weight and traced one spilled."""
    monkeypatch.delenv(FOLDER, raising=False)
    visits, make = list[FragmentSubtile](), FragmentSubtile.__init__

    def noted(self: FragmentSubtile, *given: Any, **named: Any) -> None:
        visits.append(self)
        make(self, *given, **named)

    monkeypatch.setattr(FragmentSubtile, "__init__", noted)
    spec = scaled_residual(DType.BF16, stored)
    build(Kernel(plan(spec, named(Arch.SM90A, spec, name), Alignment.TMA)))
    assert len(visits) == traced
