"""The bytes that Inductor's own kernels read and write for a graph: by the model of
`fx_walk/ends/consumers.py`, and by its real schedule.

The search for a region's end asks the model for the kernels around one region. Here the same rules are
applied to a whole graph, with some rules of Inductor's in addition that the search does without:

- A pointwise value that several ops read is written if it takes more than four reads.
- Each part of a join of tensors is read and written by itself.
- Pointwise work and reductions of rows are left to a later round that reads them, if nothing reads them
  before.
- Rows that are looked up in a table are read, and not the table. A reduction that is written out reads its
  input once for each element.
- A tensor that is added to a product is the product's.
- A scan and a sort write their results.
- The operands of a convolution are copied to channels-last order unless they are in it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor.dependencies import Dep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode

from cute_backend.fx_walk.ends.consumers import InductorKernel, Rounds, is_generated, reduces
from cute_backend.fx_walk.ends.launches import launches
from cute_backend.fx_walk.graph.axes import is_concatenation, is_reduction
from cute_backend.fx_walk.graph.mutation import is_view
from cute_backend.fx_walk.graph.static import fake, first_argument, tensor_of
from cute_backend.fx_walk.values.lower import is_pointwise, is_reshape
from cute_backend.planning import Arch
from support.traffic import Recorder, scheduled

_READS = 4
"""Reads beyond which Inductor writes a value that several ops read (`realize_reads_threshold`)."""

_WRITTEN = {"cat", "constant_pad_nd", "cumsum", "sort", "topk"}
"""Ops whose results are written, whatever reads them."""


@dataclass(frozen=True)
class Counts:
    """The kernels of a program, and the bytes that all of them read and write, as Inductor schedules it; of
    these, the bytes of kernels that Inductor itself makes, and those that the model predicts for them."""

    kernels: int
    bytes: int
    own: int
    predicted: int

    @property
    def error(self) -> float:
        """The difference of the model, relative to the schedule; of a KiB or less, 0."""
        return 0.0 if abs(self.predicted - self.own) <= 1024 else self.predicted / max(self.own, 1) - 1


class _Passing(Recorder):
    """The pass, if it `fuses`, and then the bytes that the model predicts for the graph."""

    def __init__(self, fuses: bool) -> None:
        super().__init__()
        self.fuses, self.predicted = fuses, 0

    def __call__(self, graph: fx.Graph) -> None:
        if self.fuses:
            super().__call__(graph)
        self.predicted += predicted(graph)


def counted(fn: Callable[..., Any], args: tuple[Any, ...], fuses: bool) -> Counts:
    """Counts for a call of `fn` and its gradients, with the pass if it `fuses`. Regions count as the
    kernels that they launch on Hopper."""
    own: list[int] = []
    update = GraphLowering._update_scheduler

    def updated(graph: GraphLowering) -> None:
        update(graph)
        for each in graph.scheduler.nodes:
            if not isinstance(each, (NopKernelSchedulerNode, ExternKernelSchedulerNode)):
                own.append(_scheduled_bytes(graph, each))

    passing = _Passing(fuses)
    with mock.patch.object(GraphLowering, "_update_scheduler", updated):
        kernels, moved = scheduled(fn, args, passing)
    kernels += sum(launches(region, Arch.SM90A) - 1 for region in passing.regions)
    return Counts(kernels, moved, sum(own), passing.predicted)


def _scheduled_bytes(graph: GraphLowering, kernel: BaseSchedulerNode) -> int:
    """The bytes that a kernel of the schedule reads and writes: of each buffer what its loops access, and no
    more than there is. (`get_read_write_buffers_sizes` counts whole buffers where a kernel has several loops,
    such as whole tables where it reads some rows.)"""
    loops = kernel.get_nodes()
    accessed = defaultdict[str, dict[Dep, int]](dict)
    for loop in loops:
        elements = prod(int(size) for sizes in loop.get_ranges() for size in sizes)
        for dep in (*loop.read_writes.reads, *loop.read_writes.writes):
            accessed[dep.name][dep] = elements
    written = {dep.name for dep in kernel.read_writes.writes}
    moved = 0
    for name, elements_of in accessed.items():
        users = {user.node for user in graph.scheduler.name_to_buf[name].users} if name in written else set()
        buffer = graph.try_get_buffer(name)
        if buffer is not None and (name not in written or users - set(loops)):
            size = buffer.get_dtype().itemsize
            moved += size * min(sum(elements_of.values()), prod(map(int, buffer.get_size())))
    return moved


def predicted(graph: fx.Graph) -> int:
    """The bytes that Inductor's own kernels read and write for a post-grad graph, by the model."""
    own = _Own(graph)
    outputs = defaultdict[tuple[InductorKernel, int], list[fx.Node]](list)
    for node in own.written:
        outputs[own.kernels[node]].append(node)
    layouts = [each for node in graph.nodes for each in _copied_to_channels_last(node)]
    moved = sum(own.bytes_of(nodes, elements) for (_, elements), nodes in outputs.items())
    return moved + sum(2 * _bytes(each) for each in layouts)


@dataclass(frozen=True)
class _Read:
    """A view of memory that a kernel reads. Its elements are read more than once if a reduction is written
    out, and only in part if the kernel needs only a part of the value that it computes from them."""

    view: fx.Node
    times: int = 1
    part: fx.Node | None = None


class _Own:
    """The nodes that Inductor computes itself, the kernel of each with the elements that it runs over, and
    the nodes that are written, in order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: set[fx.Node] = set()
        self.kernels: dict[fx.Node, tuple[InductorKernel, int]] = {}
        self.written: dict[fx.Node, None] = {}
        self.rounds, reduced = Rounds(graph.nodes), set[fx.Node]()
        for node in graph.nodes:
            if _is_own(node, self.nodes):
                self.nodes.add(node)
                self.kernels[node] = self._kernel(node, reduced)
        for node in reversed(self.kernels):
            self._put_off(node)
        for node in self.kernels:
            if tensor_of(node) is not None and self._is_written(node):
                self.written[node] = None

    def _kernel(self, node: fx.Node, reduced: set[fx.Node]) -> tuple[InductorKernel, int]:
        if node.target is operator.getitem:
            reduced.add(node)
            return self.kernels[node.all_input_nodes[0]]
        if reduces(node) or tensor_of(node) is None:
            reduced.add(node)
            return self.rounds.kernel_of(node), _elements(node.all_input_nodes[0])
        kernel = self.rounds.kernel_of(node)
        for source in self._sources(node) if is_pointwise(node) or is_reduction(node) else ():
            follows = source in reduced and _elements(source) == _elements(node)
            if follows and self.kernels[source][0].round == kernel.round:
                reduced.add(node)
                return self.kernels[source]
        return kernel, _elements(node)

    def _put_off(self, node: fx.Node) -> None:
        """Moves pointwise work, and reductions of rows, to the kernel of a later round that reads them, if
        nothing reads them before."""
        kernel, elements = self.kernels[node]
        if kernel.by_columns or _name(node) in _WRITTEN:
            return
        first = min((self._round(reader) for reader in self._readers(node)), default=0)
        for reader in self._readers(node):
            later = self.kernels.get(reader)
            if later is not None and kernel.round < later[0].round == first and later[1] == elements:
                self.kernels[node] = later

    def _round(self, node: fx.Node) -> int:
        return self.kernels[node][0].round if node in self.kernels else self.rounds.kernel_of(node).round

    def _is_written(self, node: fx.Node) -> bool:
        readers = list(self._readers(node))
        if any(reader not in self.nodes for reader in readers) or _name(node) in _WRITTEN:
            return True
        leaves = any(self.kernels[reader] != self.kernels[node] for reader in readers)
        if reduces(node) or node.target is operator.getitem:
            return leaves
        many = len({each.view for each in self._read(self._sources(node))}) > _READS
        return leaves and is_pointwise(node) and len(node.users) > 1 and many

    def bytes_of(self, outputs: list[fx.Node], elements: int) -> int:
        """The bytes that the kernel which writes `outputs` reads and writes, if it runs over `elements`
        elements."""
        parts = [part for node in outputs if is_concatenation(node) for part in self._sources(node)]
        whole = [each for node in outputs if not is_concatenation(node) for each in self._sources(node)]
        joined = sum(self._bytes_read([part], outputs, _elements(part)) for part in parts)
        times = max(map(_written_out, outputs))
        return sum(map(_bytes, outputs)) + self._bytes_read(whole, outputs, times * elements) + joined

    def _bytes_read(self, operands: list[fx.Node], outputs: list[fx.Node], most: int) -> int:
        """The bytes that are read for operands of a kernel, at most `most` elements of each view."""
        views = defaultdict[fx.Node, set[_Read]](set)
        for read in self._read(operands):
            views[self._memory(read.view)].add(read)
        return sum(
            min(_bytes(buffer), sum(self._narrowest(each.view, each.times * most) for each in reads))
            for buffer, reads in views.items()
            if buffer not in outputs
        )

    def _read(self, operands: Iterable[fx.Node]) -> Iterator[_Read]:
        """The views of memory that are read for operands of a kernel."""
        stack, seen = [_Read(operand) for operand in operands], set[_Read]()
        while stack:
            read = stack.pop()
            buffer = self._memory(read.view)
            if buffer not in self.nodes or buffer in self.written:
                yield read
            elif read not in seen:
                seen.add(read)
                takes_part = _elements(read.view) < _elements(buffer)
                part, times = read.view if takes_part else read.part, read.times * _written_out(buffer)
                stack += [_Read(each, times, part) for each in self._sources(buffer)]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if tensor_of(each) is not None or each in self.nodes]

    def _memory(self, view: fx.Node) -> fx.Node:
        """The node whose memory or value a node is a view of."""
        while view not in self.nodes and _is_view(view):
            if view.target is operator.getitem and not _is_view(view.all_input_nodes[0]):
                break
            view = view.all_input_nodes[0]
        return view

    def _narrowest(self, view: fx.Node, most: int) -> int:
        """The bytes of the part of a buffer that a view reads, of at most `most` elements."""
        buffer, value = self._memory(view), tensor_of(view)
        least = 0 if value is None else most * value.element_size()
        least = min(least, _bytes(view))
        while view is not buffer:
            view = view.all_input_nodes[0]
            least = min(least, _bytes(view) or least)
        return least

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that read a node, or a view of it."""
        for user in node.users:
            if user not in self.nodes and _is_view(user):
                yield from self._readers(user)
            else:
                yield user


def _written_out(node: fx.Node) -> int:
    """The elements of a reduction that is written out as pointwise work, 1 for all else."""
    if reduces(node) or not is_reduction(node):
        return 1
    return _elements(first_argument(node)) // _elements(node)


def _is_own(node: fx.Node, own: set[fx.Node]) -> bool:
    if node.op != "call_function" or (tensor_of(node) is None and not _gives_several(node)):
        return False
    if node.target is operator.getitem:
        return node.all_input_nodes[0] in own
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return not _is_called(node) and not _is_view(node)


def _gives_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _is_called(node: fx.Node) -> bool:
    """Whether a library does an op, or Inductor has no code for it, as for complex numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not is_generated(target) or _is_addmm(node) or any(map(_is_complex, (node, *node.all_input_nodes)))


def _is_complex(node: fx.Node) -> bool:
    dtype = _dtype(node)
    return dtype is not None and dtype.is_complex


def _is_addmm(node: fx.Node) -> bool:
    """Whether an op adds a tensor to a product: Inductor then makes `addmm` of the two."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    products = [each for each in node.all_input_nodes if _name(each) == "mm" and len(each.users) == 1]
    others = [each for each in node.all_input_nodes if each not in products]
    return bool(products) and all(_dtype(each) == _dtype(node) for each in others)


def _is_view(node: fx.Node) -> bool:
    """Whether an op makes a view, or a copy of what lies in its order already."""
    if node.op != "call_function" or _is_called(node):
        return False
    if _name(node) == "clone":
        return fake(node).stride() == fake(node.all_input_nodes[0]).stride()
    return is_view(node) or is_reshape(node)


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def _elements(node: fx.Node) -> int:
    value = tensor_of(node)
    return int((node.meta["val"][0] if value is None else value).numel())


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype


def _bytes(node: fx.Node) -> int:
    value = tensor_of(node)
    return 0 if value is None else value.numel() * value.element_size()


def _copied_to_channels_last(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of a convolution of images that are in another order."""
    for operand in node.all_input_nodes[:2] if _name(node) == "convolution" else ():
        value = tensor_of(operand)
        is_image = value is not None and value.dim() == 4
        if is_image and not value.is_contiguous(memory_format=torch.channels_last):
            yield operand
