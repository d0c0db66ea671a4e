"""A call of `gemm` as a graph: the product, the traced epilogue and one call of the op.

The epilogue is traced once into the graph that torch.compile would have made of it, and goes through the same
walker to the same op. Tensors that it closes over become operands, which every call reads again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cute_backend.errors import UsageError
from cute_backend.fx_walk.epilogue_pass import announce_regions, current_precision
from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.capability import device_capability
from cute_backend.fx_walk.refusals.reasons import Reason, of_one_kernel
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.fx_walk.search.regions import find_regions
from cute_backend.runtime.calls.op import gemm_epilogue
from cute_backend.tracing.alone import traced_alone
from cute_backend.tracing.closure import Captured

aten, prims = torch.ops.aten, torch.ops.prims

Epilogue = Callable[[Tensor], Any]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = torch.float4_e2m1fn_x2


@dataclass(frozen=True)
class Program:
    """A traced and rewritten call. `constants` are its other operands, each the index of a captured tensor,
    or a tensor that the epilogue makes from constants."""

    graph: fx.GraphModule
    constants: tuple[int | Tensor, ...]

    def __call__(self, operands: dict[str, Tensor], captured: Captured) -> Any:
        constants = [captured.tensors[each] if isinstance(each, int) else each for each in self.constants]
        return self.graph(*operands.values(), *constants)


@_disable_current_modes()  # FlopCounterMode, for one, would count what is traced
def trace(
    operands: dict[str, Tensor],
    epilogue: Epilogue | None,
    captured: Captured,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Program:
    """Traces a call as a graph of one region, and rewrites the graph. Raises UsageError if it does not become
    one kernel."""
    builder = _Builder()
    with builder.mode:
        shape = operands["a"].shape[0], operands["b"].shape[1]
        plane = torch.empty(shape, dtype=torch.float32, device=operands["a"].device)
    with builder.mode, _ReadOnly():
        traced = _trace_epilogue(epilogue or (lambda result: result), plane, captured)
    constants = [
        (node, getattr(traced, str(node.target))) for node in traced.graph.nodes if node.op == "get_attr"
    ]

    nodes = {name: builder.placeholder(name, tensor) for name, tensor in operands.items()}
    values = {
        node: builder.placeholder(f"captured{index}", tensor)
        for index, (node, tensor) in enumerate(constants)
    }
    (argument,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    values[argument] = builder.product(nodes, plane, fast_accum)
    outputs = builder.graph.graph_copy(traced.graph, values)
    builder.graph.output(fx.node.map_arg(outputs, lambda node: builder.output(node, out_dtype)))
    if plane.numel() and operands["a"].shape[1]:
        _fuse(builder.graph)
    known = {id(tensor): index for index, tensor in enumerate(captured.tensors)}
    return Program(
        fx.GraphModule(torch.nn.Module(), builder.graph),
        tuple(known.get(id(tensor), tensor) for _, tensor in constants),
    )


def _trace_epilogue(epilogue: Epilogue, plane: Tensor, captured: Captured) -> fx.GraphModule:
    """The epilogue as aten calls on the fp32 result; the tensors that it closes over are attributes."""
    trace = make_fx(
        functionalize(lambda result: epilogue(result)),  # tracing also counts parameters with defaults
        decomposition_table=select_decomp_table(),
        tracing_mode="real",
        _allow_non_fake_inputs=True,
    )
    try:
        with traced_alone(), torch.no_grad():
            traced = trace(plane)
    except DataDependentOutputException as error:
        raise UsageError(
            f"gemm's epilogue makes a Python number of an element of a tensor ({error}), but it is traced "
            "without values, which differ from call to call; it may use the tensor itself, and torch.where"
        ) from error
    except (RuntimeError, IndexError) as error:  # IndexError is for a dimension that the result does not have
        given = " and ".join(f"{tuple(each.shape)} on {each.device}" for each in captured.tensors)
        raise UsageError(
            f"gemm's epilogue fails on the product, {tuple(plane.shape)} on {plane.device}, closing over "
            f"{given or 'no tensor'}: {str(error).splitlines()[0]}"
        ) from error
    for node in traced.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written = node.args[0]
            if not (isinstance(written, fx.Node) and written.op == "placeholder"):
                raise _written(node.target)
            traced.graph.erase_node(node)  # functionalize writes the argument back, but nothing reads it
    results = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    leaves = tree_leaves(results)
    if not leaves:
        raise UsageError(f"gemm's epilogue returned an empty {type(results).__name__}; it returns tensors")
    for result in leaves:
        if not isinstance(result, fx.Node):
            raise UsageError(f"gemm's epilogue returned a {type(result).__name__}; it returns tensors")
        if tuple(result.meta["val"].shape) not in _returnable(plane):
            found, wanted = tuple(result.meta["val"].shape), tuple(plane.shape)
            raise UsageError(
                f"gemm's epilogue returned a tensor {found}; it returns {wanted}, the product's shape, or "
                "reductions of it over rows, columns or both"
            )
    return traced


def _returnable(plane: Tensor) -> list[tuple[int, ...]]:
    """The shapes of a plane and of its reductions, with and without `keepdim`."""
    m, n = plane.shape
    return [(m, n), (m,), (m, 1), (n,), (1, n), (), (1, 1)]


def _written(target: Any) -> UsageError:
    return UsageError(f"gemm's epilogue calls {target} on a tensor that does not depend on the product")


class _ReadOnly(TorchDispatchMode):
    """Keeps an epilogue that is being traced from writing to the real tensors that it closes over."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and type(args[0]) in (Tensor, torch.nn.Parameter):
            raise _written(func)
        return func(*args, **(kwargs or {}))


class _Builder:
    """Builds a graph, with the fake tensors that the walker reads."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def placeholder(self, name: str, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(tensor.detach(), static_shapes=True)
        return node

    def product(self, nodes: dict[str, fx.Node], plane: Tensor, fast_accum: bool) -> fx.Node:
        """The product with its scales and bias. The calls are declared to return fp32, even where eager's
        would not."""
        a, b, bias = nodes["a"], nodes["b"], nodes.get("bias")
        scales = [nodes[name] for name in ("scale_a", "scale_b") if name in nodes]
        scaled = a.meta["val"].dtype in (*FP8, FP4)
        if not (plane.numel() and a.meta["val"].numel()):
            # An empty product stays an aten op. aten has none for fp8.
            a, b = (self._converted(each, torch.float32) for each in (a, b))
            scaled = False
        if scaled:
            result = self._call(
                plane, aten._scaled_mm.default, a, b, *scales, bias, None, torch.float32, fast_accum
            )
        elif bias is not None and not scales and bias.meta["val"].dtype is a.meta["val"].dtype:
            result = self._call(plane, aten.addmm.default, bias, a, b)
        else:
            result = self._call(plane, aten.mm.default, a, b)
            for scale in scales:
                result = self._call(plane, aten.mul.Tensor, result, scale)
            if bias is not None:
                result = self._call(plane, aten.add.Tensor, result, bias)
        # Changes nothing, but the walker fuses an mm only with work after it.
        return self._call(plane, prims.convert_element_type.default, result, torch.float32)

    def output(self, node: fx.Node, out_dtype: torch.dtype) -> fx.Node:
        """An output: a plane is converted from fp32 to `out_dtype`, a reduction is left as it is."""
        dtype = node.meta["val"].dtype
        if dtype is not torch.float32 or out_dtype is torch.float32 or _reduction_behind(node) is not None:
            return node
        return self._converted(node, out_dtype)

    def _converted(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        with self.mode:
            value = node.meta["val"].to(dtype)
        return self._call(value, prims.convert_element_type.default, node, dtype)

    def _call(self, value: Tensor, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node


def _fuse(graph: fx.Graph) -> None:
    """Makes the product and its epilogue one call of the op. Raises UsageError if other calls remain."""
    if not all(map(_is_of_product, _outputs(graph))):
        raise UsageError(f"gemm can't do this in one kernel: {_FOREIGN}")
    behind = {output: _reduction_behind(output) for output in _outputs(graph)}
    regions, rejections = find_regions(graph, current_precision(), device_capability)
    if regions:
        rewrite(graph, regions)
    strangers = [output for output in _outputs(graph) if not _is_result(root(output))]
    if len(regions) != 1 or strangers:
        reasons = of_one_kernel(rejections) or [_excuse(each, behind[each]) for each in strangers]
        if any(each.reason is Reason.FEEDBACK for each in rejections):
            reasons.append(_RETURN_IT)
        raise UsageError(f"gemm can't do this in one kernel: {'; '.join(reasons)}")
    announce_regions(regions)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return next(node for node in graph.nodes if node.op == "output").all_input_nodes


_FOREIGN = "a result does not depend on the product"
_RETURN_IT = "the epilogue can return the reduction together with its operand, and the caller can apply it"


def _is_of_product(node: fx.Node) -> bool:
    return any(map(is_anchor, _ancestry(node)))


def _reduction_behind(node: fx.Node) -> fx.Node | None:
    """The reduction that a value is, or is computed from; None if there is none."""
    return next(filter(is_reduction, _ancestry(node)), None)


def _ancestry(node: fx.Node) -> Iterator[fx.Node]:
    """A value and all values that it is computed from."""
    stack, seen = [node], {node}
    while stack:
        current = stack.pop()
        yield current
        new = [each for each in current.all_input_nodes if each not in seen]
        seen.update(new)
        stack.extend(new)


def _excuse(node: fx.Node, reduction: fx.Node | None) -> str:
    if reduction is None or reduction is node:
        return _FOREIGN
    return (
        f"{reduction.name} is complete only when the kernel has ended, and {node.name} depends on it: the "
        "epilogue can return a reduction, and work on the result of one, but not on those of several"
    )


def _is_result(node: fx.Node) -> bool:
    return any(source.target is gemm_epilogue for source in (node, *node.all_input_nodes))
