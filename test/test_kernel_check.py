"""The operands that GPU tests give to kernels, made without a GPU: compiled host code takes them."""

from __future__ import annotations

import pytest

from cute_backend.ops import PAIRINGS
from cute_backend.planning import Alignment, Arch, offered, plan
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.operands import check_operands
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import Accumulator, Columns, DType, EpilogueSpec, Op, Store
from support.epilogues import BLOCKS, EPILOGUES, SEGMENTS, Problem
from support.golden_regions import the_region
from support.kernel_check import SHAPES, fitting, operands_of, outputs_of
from support.runtime.layouts import check_layouts
from support.shipped import epilogue_spec


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", EPILOGUES)
def test_a_kernel_takes_the_operands_of_every_shape(name: str) -> None:
    """Few rows, and columns that are no multiple of a head, among them."""
    check_operands_of(epilogue_spec(name, True), EPILOGUES[name].square)


@pytest.mark.parametrize("name", BLOCKS | SEGMENTS)
def test_a_kernel_of_heads_takes_the_operands_of_every_shape(name: str) -> None:
    """M is rows of whole batches, tables may have the first columns of heads alone, and products that share a
    launch have widths of their own."""
    check_operands_of(the_region(name, "sm_90a", Problem(512, 512, 512)).spec)


def test_a_kernel_takes_memory_that_is_aligned_to_pairs_alone() -> None:
    even, odd = (
        Accumulator(name, DType.BF16, DType.BF16, columns=columns)
        for name, columns in (("acc0", Columns.EVEN), ("acc1", Columns.ODD))
    )
    pair = Op("pair", PAIRINGS[DType.BF16], ("acc0", "acc1"), DType.I32)
    check_operands_of(EpilogueSpec((even, odd), (), (pair,), (Store("out0", "pair", DType.BF16X2),)))


def check_operands_of(spec: EpilogueSpec, is_square: bool = False) -> None:
    for shape in SHAPES[:5]:
        m, n, k = fitting(spec, (max(shape[:2]), *shape[1:]) if is_square else shape)
        for alignment in Alignment:
            kernel = Kernel(plan(spec, offered(Arch.SM90A, spec)[-1], alignment))
            given = operands_of(spec, m, n, k, aligned=alignment is Alignment.TMA, device="cpu")
            check_operands(spec, *given)
            _, memory = outputs_of(kernel, m, n, "cpu")
            check_layouts(kernel, [*Binding(spec).bind(*given).tensors, *memory])
