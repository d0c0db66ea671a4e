"""Inductor's code calls the op's implementation itself, on a GPU through a call site that remembers.

Through torch's dispatcher a call from Python to an op that is implemented in Python costs as much as all the
rest of a launch: lists and the spec's text are turned into C++ values and back, and the text is hashed anew.
Code generated below autograd gains nothing from that. So where a graph's op runs on one device, Inductor is
told to call what is registered for that device. Imports Inductor, which importing the pass must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch._inductor import ir, lowering

from cute_backend.runtime.op import gemm_epilogue

_ON_CPU = "from cute_backend.runtime.op import on_cpu as gemm_epilogue_on_cpu"
_ON_CUDA = "from cute_backend.runtime.call_site import CallSite as GemmEpilogueOnCuda"


class _DirectCall(ir.FallbackKernel):
    """A call of the op whose generated code names the implementation."""

    def codegen(self, wrapper: Any) -> None:
        device = self.get_device_or_error().type
        self.set_python_kernel_name(_implementation(wrapper, device, self.get_name()))
        super().codegen(wrapper)


def _implementation(wrapper: Any, device: str, buffer: str) -> str:
    """What the code of `wrapper` calls for the result `buffer`, by a name that it defines."""
    if device != "cuda":
        wrapper.add_import_once(_ON_CPU)
        return "gemm_epilogue_on_cpu"
    wrapper.add_import_once(_ON_CUDA)
    name = f"gemm_epilogue_of_{buffer}"
    wrapper.add_import_once(f"{name} = GemmEpilogueOnCuda()")
    return name


@cache
def register() -> None:
    """Have Inductor lower the op so, from now on in this process."""
    lowering.add_needs_realized_inputs(gemm_epilogue)

    @lowering.register_lowering(gemm_epilogue, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> list[ir.TensorBox]:
        outputs: Sequence[Any] = _DirectCall.create(gemm_epilogue, *args, **kwargs)  # type: ignore[assignment]
        for output in outputs:
            # The op makes what its fake says. To assert that after each call takes a microsecond.
            output.skip_size_stride_alignment_checks = True
        return [ir.TensorBox.create(output) for output in outputs]
