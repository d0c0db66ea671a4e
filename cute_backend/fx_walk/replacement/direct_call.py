"""Makes Inductor's Python code call the op's implementation directly, on a GPU by a call site with a cache.

A call from Python through torch's dispatcher to an op that is implemented in Python costs as much as the rest
of a launch: lists and the spec's text are converted to C++ values and back, and the text is hashed again.
Code below autograd does not need the dispatcher. So if a graph's op runs on one device, Inductor's code calls
the implementation that is registered for that device. C++ code, as in AOTInductor's packages, calls the op by
its name like any other op. If the op has one result, Inductor allocates it. This
module imports Inductor, which an import of the pass must not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.runtime.arguments.operands import parse_spec
from cute_backend.runtime.calls.generated import expect, graph_name
from cute_backend.runtime.calls.op import gemm_epilogue, gemm_epilogue_into

THROUGH_THE_DISPATCHER = "the kernel is called through torch's dispatcher, which is slower"

_ON_CPU = "from cute_backend.runtime.calls.op import on_cpu as gemm_epilogue_on_cpu"
_ON_CUDA = "from cute_backend.runtime.calls.call_site import CallSite as GemmEpilogueOnCuda"
_ON_LOADING = "from cute_backend.runtime.calls.generated import loaded as report_regions"

_AS_A_PRODUCT = "extern_kernels.gemm_epilogue"
"""The name of a call until code is generated. Inductor's scheduler takes nodes with `extern_kernels` in their
names for products, which it does not move along with a collective."""

_WITH_FLOPS = (torch.float32, torch.float16, torch.bfloat16)

_reporting: WeakSet[Any] = WeakSet()
"""The graphs whose code reports its regions when it is loaded."""


class _DirectCall(ir.FallbackKernel):
    """A call of the op whose generated code names the implementation or, in C++ or after a failure, the
    op."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._origin = V.graph.current_node
        self.python_kernel_name = _AS_A_PRODUCT

    def get_origin_node(self) -> Any:
        """The graph's call, from which Inductor counts operations. It takes a `getitem` for the origin
        otherwise, or none."""
        return self._origin

    def maybe_get_dtype(self) -> torch.dtype | None:
        """The result's dtype, by which Inductor looks up a GPU's FLOPS. It is bf16 if there are several, and
        for dtypes of which not every GPU has FLOPS."""
        dtype = super().maybe_get_dtype()
        return dtype if dtype in _WITH_FLOPS else torch.bfloat16

    def codegen(self, wrapper: Any) -> None:
        self.name_function(wrapper)
        super().codegen(wrapper)

    def name_function(self, wrapper: Any) -> None:
        """Chooses the function that the code of `wrapper` calls."""
        self.set_python_kernel_name(None)  # the op
        if V.graph.cpp_wrapper:
            return
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


class _CallIntoBuffer(_DirectCall):
    """A call for one result, whose memory Inductor allocates: symmetric memory, which a collective reads, or
    the memory of an earlier buffer.

    The node has the op `gemm_epilogue` until code is generated. With the op that writes to its arguments, it
    would have side effects.
    """

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> _CallIntoBuffer:
        """The call with the arguments of `gemm_epilogue`."""
        with V.graph.fake_mode:
            processed: Any = cls.process_kernel(gemm_epilogue, *args, **kwargs)
        if not isinstance(processed, tuple):  # up to torch 2.13 it is one, in 2.15 an object
            names = ("example_output", "tensor_args", "non_tensor_args", "unflatten_args")
            processed = [getattr(processed, name) for name in names]
        (result,), tensors, others, unflatten, *_ = processed
        return cls(cls.tensor_to_layout(result), gemm_epilogue, tensors, others, unflatten)

    def should_allocate(self) -> bool:
        """True, but for a symbolic size only once the graph is scheduled: before, Inductor would place the
        result in symmetric memory, whose size it has to know, and raise an error."""
        return V.graph.scheduler is not None or bool(self.get_numel().is_number)

    def codegen(self, wrapper: Any) -> None:
        without_result = self.unflatten_args

        def with_result(tensors: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
            args, kwargs = without_result(tensors, others)
            return args, {**kwargs, "results": [self]}

        self.op_overload, self.unflatten_args = gemm_epilogue_into, with_result
        self.collect_arg_kwarg_properties()
        self.set_cpp_kernel_name(None)
        if V.graph.cpp_wrapper:
            super().codegen(wrapper)
        else:
            self.name_function(wrapper)
            self.codegen_comment(wrapper)
            arguments = ", ".join([*self.codegen_args(), *self.codegen_kwargs()])
            wrapper.writeline(f"{self.get_kernel_name()}({arguments})")
        self.op_overload, self.unflatten_args = gemm_epilogue, without_result
        self.kwargs.pop("results", None)  # else the node would be a part of its own text


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
    def lower(a: Any, b: Any, loads: Any, spec: str, constraints: str = "") -> list[ir.TensorBox]:
        outputs: Any
        try:
            outputs = _direct_call(a, b, loads, spec, constraints)
        except Exception as error:
            contain(error, THROUGH_THE_DISPATCHER)
            outputs = ir.FallbackKernel.create(gemm_epilogue, a, b, loads, spec, constraints)
        return [ir.TensorBox.create(output) for output in outputs]

    @lowering.register_lowering(gemm_epilogue_into, type_promotion_kind=None)
    def lower_into(*args: Any, **kwargs: Any) -> None:
        try:
            _DirectCall.create(gemm_epilogue_into, *args, **kwargs)
        except Exception as error:
            contain(error, THROUGH_THE_DISPATCHER)
            ir.FallbackKernel.create(gemm_epilogue_into, *args, **kwargs)


def _direct_call(a: Any, b: Any, loads: Any, spec: str, constraints: str) -> Sequence[Any]:
    """The buffers that a direct call gives."""
    if len(parse_spec(spec).results) == 1 and not V.graph.fx_wrapper:
        return [_CallIntoBuffer.of(a, b, loads, spec, constraints)]
    outputs: Any = _DirectCall.create(gemm_epilogue, a, b, loads, spec, constraints)
    for output in outputs:
        # The op's results agree with its fake ones. An assertion after each call would take a microsecond.
        output.skip_size_stride_alignment_checks = True
    return outputs
