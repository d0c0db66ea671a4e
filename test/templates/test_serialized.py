"""Products of wgmma that the compiler makes wait for each other, and that ours don't."""

from __future__ import annotations

import pytest

from cute_backend.planning import Alignment, Arch, named, plan
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Major, Op, Store
from cute_backend.templates.tile import FragmentSubtile
from support.compile_once import FOLDER
from support.serialized import has_serialized_products


def kernel(tile: str) -> Kernel:
    product = Accumulator("acc", DType.BF16, DType.BF16, Major.K, Major.K)
    relu = Op("t0", "relu", ("acc",), DType.F32)
    spec = EpilogueSpec((product,), (), (relu,), (Store("out0", "t0", DType.BF16),))
    return Kernel(plan(spec, named(Arch.SM90A, spec, tile), Alignment.TMA))


@pytest.mark.parametrize("tile", ["128x128_2x1_pingpong", "128x160_2x1_transposed"])
def test_products_overlap(tile: str) -> None:
    assert not has_serialized_products(build(kernel(tile)).cubin)


def test_the_compiler_serializes_products_behind_which_bf16_is_stored_by_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the check finds what it is for, and stmatrix is what prevents it."""
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(FragmentSubtile, "_transposes", lambda self, plane: None)
    assert has_serialized_products(build(kernel("128x160_2x1_transposed")).cubin)
