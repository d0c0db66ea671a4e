"""Which mainloops a template refuses, and why; what they compute is simulated elsewhere."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import pytest

from cute_backend.planning import Arch, TileConfig
from cute_backend.templates.mainloop import Sm90Plain, Sm100Plain
from cute_backend.templates.sm90 import Sm90Gemm
from cute_backend.templates.sm100 import Sm100Gemm
from support.bare_epilogue import Bare, stages_for

HOPPER, BLACKWELL = TileConfig(Arch.SM90A, 64, 64), TileConfig(Arch.SM100A, 128, 64)


class Sm90Traced(Sm90Plain):
    @cute.jit
    def step(self, operands: Any, acc: Any, held: Any, state: Any, release: Any, count: int) -> Any:
        return super().step(operands, acc, held, state, release, count)


class Sm90Endless(Sm90Plain):
    end = None


class Sm90Unstored(Sm90Plain):
    converts = True


class Sm90InPieces(Sm90Plain):
    pieces = 2


def test_a_template_takes_mainloops_of_its_own() -> None:
    assert isinstance(Sm90Gemm(Bare(), HOPPER, stages_for(Bare(), HOPPER), Sm90Traced()).mainloop, Sm90Traced)
    assert isinstance(
        Sm100Gemm(Bare(), BLACKWELL, stages_for(Bare(), BLACKWELL), Sm100Plain()).mainloop, Sm100Plain
    )


def test_a_template_refuses_the_mainloops_of_another() -> None:
    with pytest.raises(ValueError, match=r"Sm90Plain is no Sm100Mainloop, whose begin .* with mma; the row"):
        Sm100Gemm(Bare(), BLACKWELL, stages_for(Bare(), BLACKWELL), Sm90Plain())
    with pytest.raises(ValueError, match=r"Sm100Plain is no Sm90Mainloop, whose begin .* with tile, oper"):
        Sm90Gemm(Bare(), HOPPER, stages_for(Bare(), HOPPER), Sm100Plain())
    with pytest.raises(ValueError, match=r"Sm90Endless is no Sm90Mainloop, whose end .* with operands, acc"):
        Sm90Gemm(Bare(), HOPPER, stages_for(Bare(), HOPPER), Sm90Endless())
    with pytest.raises(ValueError, match=r"Sm90Unstored is no Sm90Converting, whose stored .* with s_a, f"):
        Sm90Gemm(Bare(), HOPPER, stages_for(Bare(), HOPPER), Sm90Unstored())


def test_pieces_of_columns_are_refused_beside_several_blocks_of_rows() -> None:
    low, high = TileConfig(Arch.SM90A, 128, 256), TileConfig(Arch.SM90A, 256, 128)
    assert not Sm90Gemm(Bare(), low, stages_for(Bare(), low), Sm90InPieces()).by_rows
    assert Sm90Gemm(Bare(), high, stages_for(Bare(), high), Sm90InPieces()).by_rows
    alone = TileConfig(Arch.SM90A, 256, 64, pingpong=True)
    with pytest.raises(ValueError, match=r"a warpgroup 4 blocks of 64 rows, and .* 2 pieces: .* or blocks"):
        Sm90Gemm(Bare(), alone, stages_for(Bare(), alone), Sm90InPieces())
