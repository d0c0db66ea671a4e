"""`gemm`: one fused product, called eagerly.

The epilogue is traced once into the graph that torch.compile would have made of it, and goes through the same
walker to the same op. Tensors that it closes over become operands, read anew at every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cute_backend import config
from cute_backend.errors import UsageError
from cute_backend.fx_walk.anchors import is_anchor
from cute_backend.fx_walk.block_scales import block_scaling
from cute_backend.fx_walk.device import device_capability
from cute_backend.fx_walk.epilogue_pass import announce_regions, current_precision
from cute_backend.fx_walk.mutation import root
from cute_backend.fx_walk.questions import is_reduction
from cute_backend.fx_walk.reasons import Reason, of_one_kernel
from cute_backend.fx_walk.regions import find_regions
from cute_backend.fx_walk.rewrite import rewrite
from cute_backend.fx_walk.static import DTYPES
from cute_backend.runtime.op import gemm_epilogue
from cute_backend.tracing.closure import Captured, capture
from cute_backend.tracing.unlogged import unlogged

aten, prims = torch.ops.aten, torch.ops.prims

Epilogue = Callable[[Tensor], Any]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.bfloat16, torch.float16)
_ACCEPTED = (
    "float8_e4m3fn by float8_e4m3fn, float8_e4m3fn by float8_e5m2 (either way round), bfloat16 by bfloat16 "
    "and float16 by float16"
)

_PROGRAMS = 512
"""The number of traced programs that are remembered; the least recently used is forgotten first."""


@torch.compiler.disable
def gemm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
) -> Any:
    """`epilogue(a @ b * scale_a * scale_b + bias)` in one kernel; on CPU tensors, its replay.

    `a` is (M, K) and `b` (K, N): fp8 with K contiguous in both (`b` is a weight's transpose), bf16 or fp16
    with either mode contiguous. Scales are fp32: `scale_a` one element, (M,) or (M, 1), `scale_b` one
    element, (N,) or (1, N). On Hopper, both scales of fp8 may belong to blocks, with any strides: `scale_a`
    (M, K / 128) or (M / 128, K / 128), `scale_b` (K / 128, N) or (K / 128, N / 128), rounded up; each block
    of K is scaled before it is added. `bias` is (N,) or (1, N). `use_fast_accum=False` adds fp8 sums in fp32
    registers after each k tile, as sums of blocks always are. An empty product runs as aten ops, without a
    kernel.

    `epilogue` gets the (M, N) fp32 result and returns one tensor or several: of (M, N), or reductions of such
    a plane over rows, columns or both. It may use pointwise ops and any tensors that it closes over, which
    are read at every call; a reduction can only be returned. It is traced once for each set of shapes,
    strides, dtypes and Python values in its closure; where it closes over other objects, such as a module, at
    every call. A plane that it returns in fp32 is converted to `out_dtype`, by default bf16 for fp8 operands
    and otherwise the dtype of `a`; reductions, and planes that it has cast itself, keep their dtype.

    Raises UsageError for operands that no kernel takes, and where the epilogue does not fuse.

    >>> a, b = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(32, 8, dtype=torch.bfloat16)
    >>> out, largest = gemm(a, b, epilogue=lambda acc: (acc - 1, acc.amax(-1)))
    >>> out.shape, out.dtype, largest[0].item()
    (torch.Size([16, 8]), torch.bfloat16, 32.0)
    """
    for name, tensor in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias)):
        if not (isinstance(tensor, Tensor) or (tensor is None and name not in ("a", "b"))):
            raise UsageError(f"gemm got {name} of type {type(tensor).__name__}; it takes a tensor")
    if epilogue is not None and not callable(epilogue):
        raise UsageError(
            f"gemm got an epilogue of type {type(epilogue).__name__}; it takes a function of the result"
        )
    if not isinstance(use_fast_accum, bool):
        raise UsageError(f"gemm got use_fast_accum={use_fast_accum!r}; it takes True or False")
    operands = _operands(a, b, scale_a, scale_b, bias)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype in _FP8 else a.dtype
    if not isinstance(out_dtype, torch.dtype):
        raise UsageError(f"gemm got out_dtype of type {type(out_dtype).__name__}; it takes a torch.dtype")
    if out_dtype not in DTYPES:
        raise UsageError(f"gemm got out_dtype={_name(out_dtype)}; it writes {', '.join(map(_name, DTYPES))}")
    captured = capture(epilogue)
    if torch.is_grad_enabled() and any(
        each.requires_grad for each in (*operands.values(), *captured.tensors)
    ):
        raise UsageError(
            "gemm has no derivative and got a tensor that requires one; call it under torch.no_grad()"
        )
    program = _program(operands, epilogue, captured, out_dtype, use_fast_accum)
    with torch.no_grad():
        return program(operands, captured)


@dataclass(frozen=True)
class _Program:
    """A traced and rewritten call. `constants` are its further operands: the index of a captured tensor, or a
    tensor that the epilogue makes from constants."""

    graph: fx.GraphModule
    constants: tuple[int | Tensor, ...]

    def __call__(self, operands: dict[str, Tensor], captured: Captured) -> Any:
        constants = [captured.tensors[each] if isinstance(each, int) else each for each in self.constants]
        return self.graph(*operands.values(), *constants)


_programs: OrderedDict[Any, _Program] = OrderedDict()


def _program(
    operands: dict[str, Tensor],
    epilogue: Epilogue | None,
    captured: Captured,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> _Program:
    """The program of a call. It is traced unless an earlier call had the same key."""
    if captured.key is None:
        return _trace(operands, epilogue, captured, out_dtype, fast_accum)
    layouts = tuple((name, _layout(tensor)) for name, tensor in operands.items())
    settings = current_precision(), config.batch_invariant, config.tile, config.rowvec_placement
    key = (layouts, captured.key, out_dtype, fast_accum, *settings)
    if key in _programs:
        _programs.move_to_end(key)
    else:
        _programs[key] = _trace(operands, epilogue, captured, out_dtype, fast_accum)
        if len(_programs) > _PROGRAMS:
            _programs.popitem(last=False)
    return _programs[key]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _operands(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None
) -> dict[str, Tensor]:
    """The operands by name, in the walker's forms. Raises UsageError if they can't be multiplied."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise UsageError(f"gemm got a {_shape(a)} and b {_shape(b)}; it multiplies (M, K) by (K, N)")
    fp8 = a.dtype in _FP8 and b.dtype in _FP8 and torch.float8_e4m3fn in (a.dtype, b.dtype)
    if not fp8 and not (a.dtype in _HALF and a.dtype is b.dtype):
        raise UsageError(f"gemm got {_name(a.dtype)} by {_name(b.dtype)}; it multiplies {_ACCEPTED}")
    m, n = a.shape[0], b.shape[1]
    operands = {"a": a, "b": b}
    if fp8 and scale_a is not None and scale_b is not None and _are_of_blocks(a, b, scale_a, scale_b):
        operands |= {"scale_a": scale_a, "scale_b": scale_b}
    elif fp8 or scale_a is not None or scale_b is not None:
        operands["scale_a"] = _scale("scale_a", scale_a, a, (m, 1))
        operands["scale_b"] = _scale("scale_b", scale_b, a, (1, n))
        if operands["scale_a"].numel() == 1 != operands["scale_b"].numel():
            operands["scale_a"] = operands["scale_a"].expand(m, 1)
        elif operands["scale_b"].numel() == 1 != operands["scale_a"].numel():
            operands["scale_b"] = operands["scale_b"].expand(1, n)
    if bias is not None:
        if tuple(bias.shape) not in ((n,), (1, n)) or not bias.is_floating_point():
            raise UsageError(
                f"gemm got a {_name(bias.dtype)} bias {_shape(bias)}; it takes a float one of ({n},)"
            )
        operands["bias"] = bias.reshape(n)
    for name, tensor in operands.items():
        if tensor.device != a.device:
            raise UsageError(f"gemm got a on {a.device} and {name} on {tensor.device}; it takes one device")
    return operands


def _are_of_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Whether scales belong to blocks. Shapes that are also those of rowwise or tensorwise scales do not
    count."""
    (m, k), n = a.shape, b.shape[1]
    vectors = scale_a.numel() == 1 or tuple(scale_a.shape) in ((m,), (m, 1))
    vectors = vectors and (scale_b.numel() == 1 or tuple(scale_b.shape) in ((n,), (1, n)))
    if vectors or m * n * k == 0 or block_scaling(a, b, scale_a, scale_b) is None:
        return False
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype is not torch.float32:
            raise UsageError(f"gemm got a {_name(scale.dtype)} {name}; scales are float32")
    return True


def _scale(name: str, scale: Tensor | None, a: Tensor, shape: tuple[int, int]) -> Tensor:
    """A scale in its rowwise shape, or as one element; one if there is no scale."""
    if scale is None:
        return torch.ones((1, 1), device=a.device)
    if scale.dtype is not torch.float32:
        raise UsageError(f"gemm got a {_name(scale.dtype)} {name}; scales are float32")
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    length = max(shape)
    if tuple(scale.shape) not in (shape, (length,)):
        raise UsageError(
            f"gemm got {name} {_shape(scale)}; it takes one element, ({length},) or {shape}, or both scales "
            "of blocks of fp8"
        )
    return scale.reshape(shape)


def _trace(
    operands: dict[str, Tensor],
    epilogue: Epilogue | None,
    captured: Captured,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> _Program:
    """The call as a graph of one region, rewritten. Raises UsageError where it does not become one kernel."""
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
    builder.graph.output(fx.node.map_arg(outputs, lambda node: builder.finished(node, out_dtype)))
    if plane.numel() and operands["a"].shape[1]:
        _fuse(builder.graph)
    known = {id(tensor): index for index, tensor in enumerate(captured.tensors)}
    return _Program(
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
        with torch.no_grad(), unlogged():
            traced = trace(plane)
    except DataDependentOutputException as error:
        raise UsageError(
            f"gemm's epilogue asks for a value of the result ({error}), which is known only in the kernel; "
            "it may choose by torch.where"
        ) from error
    except (RuntimeError, IndexError) as error:  # IndexError is for a dimension that the result does not have
        given = " and ".join(f"{_shape(each)} on {each.device}" for each in captured.tensors)
        raise UsageError(
            f"gemm's epilogue fails on the product, {_shape(plane)} on {plane.device}, closing over "
            f"{given or 'no tensor'}: {str(error).splitlines()[0]}"
        ) from error
    for node in traced.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written = node.args[0]
            if not (isinstance(written, fx.Node) and written.op == "placeholder"):
                raise _written(node.target)
            traced.graph.erase_node(node)  # functionalize writes the argument back; no one reads it
    results = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    leaves = tree_leaves(results)
    if not leaves:
        raise UsageError(f"gemm's epilogue returned an empty {type(results).__name__}; it returns tensors")
    for result in leaves:
        if not isinstance(result, fx.Node):
            raise UsageError(f"gemm's epilogue returned a {type(result).__name__}; it returns tensors")
        if tuple(result.meta["val"].shape) not in _returnable(plane):
            given, wanted = _shape(result.meta["val"]), _shape(plane)
            raise UsageError(
                f"gemm's epilogue returned a tensor {given}; it returns {wanted}, the product's shape, or "
                "reductions of it over rows, columns or both"
            )
    return traced


def _returnable(plane: Tensor) -> list[tuple[int, ...]]:
    """The shapes of a plane and of its reductions, with and without `keepdim`."""
    m, n = plane.shape
    return [(m, n), (m,), (m, 1), (n,), (1, n), (), (1, 1)]


def _written(target: Any) -> UsageError:
    return UsageError(f"gemm's epilogue calls {target} on a tensor that is not made of the product")


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
        fp8 = a.meta["val"].dtype in _FP8
        if not (plane.numel() and a.meta["val"].numel()):
            # An empty product stays an aten op. aten has none for fp8.
            a, b = (self._converted(each, torch.float32) for each in (a, b))
            fp8 = False
        if fp8:
            result = self._call(
                plane, aten._scaled_mm.default, a, b, *scales, bias, None, torch.float32, fast_accum
            )
        elif bias is not None and not scales:
            result = self._call(plane, aten.addmm.default, bias, a, b)
        else:
            result = self._call(plane, aten.mm.default, a, b)
            for scale in scales:
                result = self._call(plane, aten.mul.Tensor, result, scale)
            if bias is not None:
                result = self._call(plane, aten.add.Tensor, result, bias)
        # Changes nothing, but the walker fuses an mm only with work after it.
        return self._call(plane, prims.convert_element_type.default, result, torch.float32)

    def finished(self, node: fx.Node, out_dtype: torch.dtype) -> fx.Node:
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


_FOREIGN = "a result is not made of the product"
_RETURN_IT = "the epilogue can return the reduction beside what it is made of, and the caller can apply it"


def _is_of_product(node: fx.Node) -> bool:
    return any(map(is_anchor, _ancestry(node)))


def _reduction_behind(node: fx.Node) -> fx.Node | None:
    """A reduction that a value is, or that it is computed from; None if there is none."""
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
        f"{reduction.name} is whole only when the kernel is done, and {node.name} is made of it: the "
        "epilogue can return a reduction, but not work on it"
    )


def _is_result(node: fx.Node) -> bool:
    return any(source.target is gemm_epilogue for source in (node, *node.all_input_nodes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
