"""The operands that GPU tests give to kernels, made without a GPU: compiled host code takes them."""

from __future__ import annotations

import pytest

from cute_backend.planning import Alignment, Arch, offered
from cute_backend.runtime.bind import Binding
from cute_backend.runtime.kernel import Kernel
from cute_backend.runtime.operands import check_operands
from support.epilogues import EPILOGUES
from support.kernel_check import SHAPES, fitting, operands_of, outputs_of
from support.runtime.layouts import check_layouts
from support.shipped import epilogue_spec


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_kernel_takes_the_operands_of_every_shape(name: str) -> None:
    """Few rows, and columns that are no multiple of a head, among them."""
    spec = epilogue_spec(name, True)
    for shape in SHAPES[:5]:
        m, n, k = fitting(spec, (max(shape[:2]), *shape[1:]) if EPILOGUES[name].square else shape)
        for alignment in Alignment:
            kernel = Kernel(spec, offered(Arch.SM90A, spec)[-1], alignment)
            given = operands_of(spec, m, n, k, aligned=alignment is Alignment.TMA, device="cpu")
            check_operands(spec, *given)
            _, memory = outputs_of(kernel, m, n, "cpu")
            check_layouts(kernel, [*Binding(spec).bind(*given).tensors, *memory])
