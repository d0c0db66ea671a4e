"""Makes Inductor's Python code call the op's implementation directly, on a GPU by a call site with a cache.

A call from Python through torch's dispatcher to an op that is implemented in Python costs as much as the rest
of a launch: lists and the spec's text are converted to C++ values and back, and the text is hashed again.
Code below autograd does not need the dispatcher. So if a graph's op runs on one device, Inductor's code calls
the implementation that is registered for that device. C++ code, as in AOTInductor's packages, calls the op by
its name like any other op. This module imports Inductor, which an import of the pass must not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from cute_backend.fx_walk.containment import contain
from cute_backend.runtime.generated import expect, graph_name
from cute_backend.runtime.op import gemm_epilogue, gemm_epilogue_into

THROUGH_THE_DISPATCHER = "the kernel is called through torch's dispatcher, which is slower"

_ON_CPU = "from cute_backend.runtime.op import on_cpu as gemm_epilogue_on_cpu"
_ON_CUDA = "from cute_backend.runtime.call_site import CallSite as GemmEpilogueOnCuda"
_ON_LOADING = "from cute_backend.runtime.generated import loaded as report_regions"

_reporting: WeakSet[Any] = WeakSet()
"""The graphs whose code reports its regions when it is loaded."""


class _DirectCall(ir.FallbackKernel):
    """A call of the op whose generated code names the implementation or, in C++ or after a failure, the
    op."""

    def codegen(self, wrapper: Any) -> None:
        if not V.graph.cpp_wrapper:
            self._name_implementation(wrapper)
        super().codegen(wrapper)

    def _name_implementation(self, wrapper: Any) -> None:
        try:
            device = self.get_device_or_error().type
            self.set_python_kernel_name(_implementation(wrapper, device, self.get_name()))
            if V.graph not in _reporting:
                _reporting.add(V.graph)
                _report_on_loading(wrapper)
        except Exception as error:
            contain(error, THROUGH_THE_DISPATCHER)

    @property
    def spec(self) -> str:
        """The JSON of its spec, which is the first argument that is not a tensor."""
        return next(argument for argument in self.constant_args if isinstance(argument, str))


def _report_on_loading(wrapper: Any) -> None:
    """Makes the code of `wrapper` report the regions of the current graph whenever it is loaded.

    Graphs that one wrapper calls may have equal regions, so the report includes the name of the graph.
    """
    specs = [call.spec for call in V.graph.operations if isinstance(call, _DirectCall)]
    graph = graph_name([V.graph.name or "", *specs])
    expect(graph)
    wrapper.add_import_once(_ON_LOADING)
    wrapper.add_import_once(f"report_regions({graph!r}, {len(specs)})")


def _implementation(wrapper: Any, device: str, buffer: str) -> str:
    """The name of the function that the code of `wrapper` calls for the result `buffer`, or for results that
    it is given. The function is defined in that code."""
    if device != "cuda":
        wrapper.add_import_once(_ON_CPU)
        return "gemm_epilogue_on_cpu"
    wrapper.add_import_once(_ON_CUDA)
    name = f"gemm_epilogue_of_{buffer}"
    wrapper.add_import_once(f"{name} = GemmEpilogueOnCuda()")
    return name


@cache
def register() -> None:
    """Makes Inductor lower the op in this way, from now on in this process."""
    lowering.add_needs_realized_inputs([gemm_epilogue, gemm_epilogue_into])

    @lowering.register_lowering(gemm_epilogue, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> list[ir.TensorBox]:
        outputs: Any
        try:
            outputs = _direct_call(*args, **kwargs)
        except Exception as error:
            contain(error, THROUGH_THE_DISPATCHER)
            outputs = ir.FallbackKernel.create(gemm_epilogue, *args, **kwargs)
        return [ir.TensorBox.create(output) for output in outputs]

    @lowering.register_lowering(gemm_epilogue_into, type_promotion_kind=None)
    def lower_into(*args: Any, **kwargs: Any) -> None:
        try:
            _DirectCall.create(gemm_epilogue_into, *args, **kwargs)
        except Exception as error:
            contain(error, THROUGH_THE_DISPATCHER)
            ir.FallbackKernel.create(gemm_epilogue_into, *args, **kwargs)


def _direct_call(*args: Any, **kwargs: Any) -> Sequence[Any]:
    """The buffers that a direct call gives."""
    outputs: Any = _DirectCall.create(gemm_epilogue, *args, **kwargs)
    for output in outputs:
        # The op's results agree with its fake ones. An assertion after each call would take a microsecond.
        output.skip_size_stride_alignment_checks = True
    return outputs
