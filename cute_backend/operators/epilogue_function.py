"""Converts the epilogue of CUTLASS Operators' arguments, a Python function of named operands, to our spec.

The function is called once, on stand-ins without values, and the recorded ops go through the walker of
torch.compile, so the same ops fuse. The result holds no sizes, so it serves every M, N and K.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from cutlass.operators import Transport
from cutlass.operators import arguments as operator_arguments
from cutlass.operators.fusion import trace_in_out
from cutlass.operators.fusion.ir import TopoVisitorNode
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from cute_backend.errors import UsageError
from cute_backend.fx_walk.epilogue_pass import current_precision
from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.products.capability import device_capability
from cute_backend.fx_walk.refusals.reasons import of_one_kernel
from cute_backend.fx_walk.search.regions import find_regions
from cute_backend.fx_walk.values.classify import LoadView
from cute_backend.kinds.results import ordered
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.operators.epilogue_names import VOCABULARY, Reduced
from cute_backend.operators.tensor_arguments import Layout
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Order, Store
from cute_backend.tracing.alone import traced_alone
from cute_backend.tracing.closure import capture


class EpilogueArguments(operator_arguments.EpilogueArguments):
    """An epilogue for these operators alone, which may use all ops that torch.compile would fuse.

    The arguments are those of `cutlass.operators.EpilogueArguments`: a function whose first parameter is
    `accum` and whose others are named operands, and a tensor for each operand and for each variable that it
    returns. That class parses the function, and raises for anything that it does not know, such as an output
    in fp8. This class calls the function on `accum`, (M, N) in fp32, and on its operands, broadcast to (M,
    N). The function may use torch functions and methods of tensors in addition to the vocabulary of the other
    class, whose names it may redefine. Only the return statement is restricted, to names::

        def quantized(accum, scale, gate):
            D = torch.nn.functional.silu(accum * scale) * gate
            peak = D.abs().amax(-1)
            return D, peak

        EpilogueArguments(quantized, scale=scale, gate=gate, D=out, peak=torch.zeros(M, device="cuda"))

    Operators of other packages do not take it.
    """

    def trace(self, accumulator_shape: tuple[int, ...], accumulator_type: Any) -> None:
        """Sets a trace that makes other operators refuse the epilogue. `convert` reads the function
        itself."""
        self.traced_epilogue = _Unreadable()

    def to_tensor_wrappers(self, permute: list[int] | None = None) -> None:
        """Leaves the tensors as they are."""


class _Unreadable:
    """A trace with one node, of a kind that other operators refuse."""

    @property
    def dag_ir(self) -> _Unreadable:
        return self

    def node_metas_topological_order(self) -> list[TopoVisitorNode]:
        return [TopoVisitorNode.__new__(TopoVisitorNode)]


@dataclass(frozen=True)
class Input:
    """A load of the spec: its operand, and the axes of (M, N) that it varies along."""

    name: str
    axes: tuple[int, ...]

    def view(self, tensor: Tensor, m: int, n: int) -> Tensor:
        """The operand as the kernel takes it: (M, N), (M,), (N,) or 0-d."""
        plane = tensor.expand(m, n)
        for axis in (1, 0):
            if axis not in self.axes:
                plane = plane.select(axis, 0)
        return plane


@dataclass(frozen=True)
class Epilogue:
    """A converted epilogue. Its spec has an accumulator that stands for any product; `inputs` and `outputs`
    are the operands and results of the function that became the spec's loads and stores, in their order."""

    spec: EpilogueSpec
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]

    def of(self, product: Accumulator) -> EpilogueSpec:
        """The spec of a product."""
        return replace(self.spec, accumulators=(product,))


STAND_IN = Accumulator("acc", DType.BF16, DType.BF16)
"""The product whose epilogue is converted. Its dtypes don't matter, since an epilogue gets fp32."""


def plain(dtype: DType, order: Order) -> Epilogue:
    """The epilogue that only converts the product to a dtype."""
    spec = EpilogueSpec((STAND_IN,), (), (), (Store("out0", STAND_IN.name, dtype, ordered(order)),))
    return Epilogue(spec, (), ())


_converted: WeakKeyDictionary[Any, Epilogue | UsageError] = WeakKeyDictionary()
_programs: dict[Any, Epilogue | UsageError] = {}

_MAX_PROGRAMS = 512
"""The number of conversions that are kept after their arguments are gone."""


def convert(arguments: operator_arguments.EpilogueArguments, m: int, n: int) -> Epilogue:
    """The epilogue of arguments for a product of (m, n). Equal arguments share one conversion.

    Raises UsageError for an epilogue that can't be one kernel.
    """
    outcome = _converted.get(arguments)
    if outcome is None:
        outcome = _converted[arguments] = _outcome(arguments, m, n)
    if isinstance(outcome, UsageError):
        raise outcome
    return outcome


def _outcome(arguments: operator_arguments.EpilogueArguments, m: int, n: int) -> Epilogue | UsageError:
    try:
        function = _Function.of(arguments)
        layouts = {
            name: None if isinstance(value, (int, float)) else Layout.of(name, value)
            for name, value in arguments.tensors.items()
        }
    except UsageError as error:
        return error
    if function.key is None:  # it depends on values that may change undetected
        return _attempt(function, layouts, m, n)
    described = tuple((name, each and replace(each, offset=0)) for name, each in layouts.items())
    key = (function.key, described, m, n, current_precision())
    if key not in _programs:
        if len(_programs) >= _MAX_PROGRAMS:
            _programs.clear()
        _programs[key] = _attempt(function, layouts, m, n)
    return _programs[key]


def _attempt(function: _Function, layouts: dict[str, Layout | None], m: int, n: int) -> Epilogue | UsageError:
    try:
        return _convert(function, layouts, m, n)
    except UsageError as error:
        return error


@dataclass(frozen=True)
class _Function:
    """The epilogue function of the arguments, the names of its operands and those of its results."""

    call: Callable[..., Any]
    name: str
    key: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @staticmethod
    def of(arguments: operator_arguments.EpilogueArguments) -> _Function:
        given = arguments.epilogue_fn
        inputs, outputs = trace_in_out(given)
        asked = [name for name, each in arguments.transports.items() if each.via is not Transport.TMA]
        if asked:  # TMA is also the default of a tensor without a transport
            names = ", ".join(asked)
            raise UsageError(f"{names} have a transport, but these kernels choose their own: leave it out")
        if isinstance(given, str):
            call = _defined(given)
            key: Any = given
        elif isinstance(given, types.FunctionType):
            captured = capture(given)
            if captured.tensors:
                raise UsageError(
                    f"the epilogue {given.__name__} closes over a tensor; tensors must be named operands"
                )
            defined = given.__globals__
            ours = isinstance(arguments, EpilogueArguments)
            call = types.FunctionType(
                given.__code__,
                {**VOCABULARY, **defined} if ours else {**defined, **VOCABULARY},
                given.__name__,
                given.__defaults__,
                given.__closure__,
            )
            key = captured.key and (ours, captured.key)
        else:
            raise UsageError(f"the epilogue is a {type(given).__name__}; expected a function or its source")
        return _Function(call, call.__name__, key, tuple(inputs), tuple(outputs))


def _defined(source: str) -> types.FunctionType:
    """The one function that a source text defines."""
    namespace: dict[str, Any] = {"torch": torch, **VOCABULARY}
    before = set(namespace)
    exec(source, namespace)
    functions = [
        value
        for name, value in namespace.items()
        if name not in before and isinstance(value, types.FunctionType)
    ]
    if len(functions) != 1:
        raise UsageError(f"the epilogue's source defines {len(functions)} functions; expected one")
    return functions[0]


def _convert(function: _Function, layouts: dict[str, Layout | None], m: int, n: int) -> Epilogue:
    mode = FakeTensorMode()
    with traced_alone(), mode:
        plane = torch.empty(m, n)
        operands = [_stand_in(name, layouts[name], m, n) for name in function.inputs]
    traced = _trace(mode, function, layouts, plane, operands)
    graph = fx.Graph()

    def placeholder(name: str, value: Tensor) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(value: Tensor, target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    with mode:
        a, b = torch.empty(m, 16, dtype=torch.bfloat16), torch.empty(n, 16, dtype=torch.bfloat16).t()
    product = call(plane, torch.ops.aten.mm.default, placeholder("a", a), placeholder("b", b))
    # This op changes no value, but the walker fuses an mm only with work after it.
    product = call(plane, torch.ops.prims.convert_element_type.default, product, torch.float32)
    names = {
        placeholder(f"operand_{name}", value): name
        for name, value in zip(function.inputs, operands, strict=True)
    }
    arguments = [node for node in traced.graph.nodes if node.op == "placeholder"]
    results = graph.graph_copy(traced.graph, dict(zip(arguments, [product, *names], strict=True)))
    assert isinstance(results, tuple)
    graph.output(results)

    regions, rejections = find_regions(graph, current_precision(), device_capability)
    reasons = "; ".join(of_one_kernel(rejections))
    if len(regions) != 1:
        raise UsageError(f"the epilogue {function.name} can't be one kernel: {reasons}")
    (region,) = regions
    stores = []
    for index, (name, result) in enumerate(zip(function.outputs, results, strict=True)):
        place = region.outputs.get(result, region.outputs.get(root(result)))
        if place is None or len(region.spec.results[place]) > 1:
            raise UsageError(
                f"{name} of the epilogue {function.name} can't be written by the kernel of the product: "
                f"{reasons or 'it does not depend on the product'}"
            )
        (store,) = region.spec.results[place]
        stores.append(_store(store, f"out{index}", name, layouts[name], m, n))
    inputs = tuple(_input(function, view, names) for view in region.views)
    accumulator = replace(STAND_IN, name=region.spec.product.name)
    return Epilogue(
        replace(region.spec, accumulators=(accumulator,), stores=tuple(stores)), inputs, function.outputs
    )


def _stand_in(name: str, layout: Layout | None, m: int, n: int) -> Tensor:
    """A fake tensor with the layout of an operand, broadcast to (M, N), so that the walker also fuses work on
    operands alone. A number becomes one element in fp32."""
    if layout is None:
        return torch.empty(()).expand(m, n)
    try:
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype).expand(m, n)
    except RuntimeError as error:
        raise UsageError(
            f"{name} is {layout.shape}, which does not broadcast to {(m, n)}; a value per row is (M, 1)"
        ) from error


def _trace(
    mode: FakeTensorMode,
    function: _Function,
    layouts: dict[str, Layout | None],
    plane: Tensor,
    operands: list[Tensor],
) -> fx.GraphModule:
    """The function as a graph of aten calls. It returns a tuple, in the dtypes of the tensors that the
    results are written to."""

    def called(accum: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        results = function.call(accum, *given)
        several = results if isinstance(results, (tuple, list)) else (results,)
        return tuple(
            _result(name, layouts[name], result, plane)
            for name, result in zip(function.outputs, several, strict=True)
        )

    tracer = make_fx(functionalize(called), decomposition_table=select_decomp_table(), tracing_mode="real")
    try:
        with torch.no_grad(), traced_alone(), mode:
            traced = tracer(plane, *operands)
    except UsageError:
        raise
    except DataDependentOutputException as error:
        raise UsageError(
            f"the epilogue {function.name} branches on a value ({error}), which is known only in the kernel; "
            "use torch.where"
        ) from error
    except Exception as error:  # the user's function may raise anything
        complaint = (str(error).strip().splitlines() or ["no message"])[0]
        raise UsageError(
            f"the epilogue {function.name} fails on ({', '.join(('accum', *function.inputs))}): "
            f"{type(error).__name__}: {complaint}"
        ) from error
    for node in traced.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise UsageError(f"the epilogue {function.name} writes to an operand with {node.target}")
    output = next(node for node in traced.graph.nodes if node.op == "output")
    for name, result in zip(function.outputs, output.args[0], strict=True):
        if not isinstance(result, fx.Node):
            raise UsageError(f"{name} of the epilogue {function.name} does not depend on the product")
    return traced


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that a reduction in fp32 may be written in."""


def _result(name: str, layout: Layout | None, value: Any, plane: Tensor) -> Tensor:
    """The value that the function returned for a destination: a plane in its dtype, a reduction unchanged."""
    if layout is None:
        raise UsageError(f"{name} is returned, but its argument is a number; results need a tensor")
    if layout.dtype not in TORCH_DTYPES.values():
        raise UsageError(f"{name} is {layout.dtype}, which these kernels do not write")
    m, n = plane.shape
    if isinstance(value, Reduced):
        value = value.to(name, layout.shape, (m, n))
    if not isinstance(value, Tensor):
        raise UsageError(f"{name} is a {type(value).__name__}; the epilogue returns tensors")
    if _long(value.shape) != _long(layout.shape):
        raise UsageError(
            f"{name} is computed as {tuple(value.shape)}, but its tensor is {layout.shape}; the plane is "
            f"{(m, n)}"
        )
    if tuple(value.shape) != (m, n):
        return value
    return value if value.dtype is layout.dtype else value.to(layout.dtype)


def _long(shape: tuple[int, ...] | torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


def _store(store: Store, key: str, name: str, layout: Layout | None, m: int, n: int) -> Store:
    """A store of the walker, adapted to the tensor that it writes."""
    assert layout is not None
    if store.form.block_columns:
        raise UsageError(f"{name} is {store.form.title()}; operators write whole planes")
    if store.form.reduction is not None:
        accepted = _FLOATS if store.dtype.is_float else (TORCH_DTYPES[store.dtype],)
        if layout.dtype not in accepted:
            raise UsageError(
                f"{name} is {layout.dtype}, and a {store.form.reduction.kind.name} here is written as "
                f"{', '.join(map(str, accepted))}"
            )
        return replace(store, name=key, dtype=DType.F32 if store.dtype.is_float else store.dtype)
    if layout.unit is None or layout.shape != (m, n):
        raise UsageError(
            f"{name} is {layout.shape} with strides {layout.strides}, contiguous along neither mode"
        )
    return replace(store, name=key, form=ordered(Order.ROW if layout.unit == 1 else Order.COLUMN))


def _input(function: _Function, view: LoadView, names: dict[fx.Node, str]) -> Input:
    name = names.get(view.node)
    if name is None:
        raise UsageError(
            f"the epilogue {function.name} reads the result of {view.node.target}; kernels read whole "
            "operands, broadcast"
        )
    if view.blocks is not None:
        raise UsageError(
            f"the epilogue {function.name} reads {name} by blocks of {view.blocks.columns} columns; kernels "
            "read whole operands, broadcast"
        )
    return Input(name, (*view.m_axes, *chain(*view.n_axes)))
