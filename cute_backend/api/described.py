"""Regions as users see them: their operands, outputs and kernels, made from the regions of the walker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import fx

from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.static import Size, fake, hint, target_name
from cute_backend.fx_walk.refusals.reasons import nearest_line, program_line
from cute_backend.fx_walk.region.flow import in_order, sources
from cute_backend.fx_walk.region.region import Region
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.planning import Alignment, Arch, Constraints, Plan, clustered, plan
from cute_backend.runtime.compiling.rungs import spill_bytes, standing
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.reach import Problem, launched, stores_aligned
from cute_backend.runtime.kernels.source import text_of
from cute_backend.runtime.tuning.winners import config_here, result_here
from cute_backend.signature import TMA_ALIGN, Argument, ArgumentAlignment
from cute_backend.spec import EpilogueSpec, Store

if TYPE_CHECKING:
    from cute_backend.runtime.kernels.built import Built


@dataclass(frozen=True)
class ExplainedLoad:
    """An operand of an epilogue.

    `name` is its name in the generated code and `label` its name in the program; `kind` is one of "exact",
    "rowvec", "colvec", "groupvec" and "scalar", `placement` one of "scalar", "row_read", "register_hoist",
    "smem_staged", "group_staged", "tma", "cp_async", "runs" and "vector", and `dtype` a spec dtype such as
    "bf16".
    """

    name: str
    label: str
    kind: str
    placement: str
    dtype: str


@dataclass(frozen=True)
class ExplainedStore:
    """An output of an epilogue.

    Its `kind` is its form in words, such as "output" for a plane by rows, "output, (B, H, 2048, 128)" for one
    by heads, "row_max", or "of 32 columns" for a value of each block of that many. A plane has the
    `placement` "tma", "smem" or "vector". A reduction has "last_tile" if the kernel itself combines the
    partials of tiles, and "two_stage" if a second kernel does.
    """

    name: str
    kind: str
    placement: str
    dtype: str


@dataclass(frozen=True)
class Product:
    """The B of an accumulator's product: its name in the program, and the line, as "model.py:12"."""

    label: str
    where: str


@dataclass(frozen=True)
class Source:
    """Another region whose results a region reads: its index, and the number of `ops` that Inductor computes
    between the two, not counting views."""

    region: int
    ops: int


@dataclass(frozen=True)
class ExplainedRegion:
    """Matrix products and the ops after them, which one kernel computes: a single product, a gated pair, or
    two to four products that share a launch.

    `anchor` is the product's aten target and `node` its name in the graph; `products` describes each
    accumulator; `sizes` are M, N and K, and a symbolic size is a string. `sources` are the regions of the
    same graph whose results it reads. `groups` is the number of groups of a grouped product (of rows, columns
    or K), or None. `is_backward` is whether it belongs to the graph of the gradients. `unshared` says why it
    shares no launch with another product of its A, or why its halves make no pair, or is empty. `labels` are
    the program's names of the loads, and `lines` its lines by the names of the spec's ops and stores. `hints`
    are M, N and K with example values for symbolic sizes, and `alignment` is the one that the arguments have.
    Properties that depend on an architecture are those for `arch`; methods accept another.
    """

    anchor: str
    node: str
    products: tuple[Product, ...]
    spec: EpilogueSpec
    sizes: tuple[int | str, int | str, int | str]
    arch: str
    labels: tuple[str, ...] = field(repr=False)
    hints: tuple[int, int, int] = field(repr=False)
    alignment: Alignment = field(repr=False)
    lines: Mapping[str, str] = field(repr=False, compare=False)
    groups: int | None = None
    sources: tuple[Source, ...] = ()
    is_backward: bool = False
    unshared: str = ""

    @property
    def formula(self) -> str:
        """The arithmetic of the epilogue, one assignment a line."""
        return kernel_formula(self.spec)

    @property
    def loads(self) -> tuple[ExplainedLoad, ...]:
        """The operands that the epilogue reads, in the order of the kernel's arguments."""
        placements = self._plan.placements
        return tuple(
            ExplainedLoad(load.name, label, load.kind.value, placements[load.name].name, load.dtype.value)
            for load, label in zip(self.spec.loads, self.labels, strict=True)
        )

    @property
    def stores(self) -> tuple[ExplainedStore, ...]:
        """The outputs, in the order of the kernel's arguments."""
        return tuple(self._store(store) for store in self.spec.stores)

    def _store(self, store: Store) -> ExplainedStore:
        form, shared = store.form, "tma" if self._plan.arch.target.planes_by_tma else "smem"
        placement = shared if store.name in self._plan.shared_stores else "vector"
        if form.reduction is not None:
            placement = "two_stage" if self._plan.finishes_apart(*self.hints[:2]) else "last_tile"
        return ExplainedStore(store.name, form.title(), placement, store.dtype.value)

    def kernel(self, arch: str | None = None) -> Kernel:
        """The kernel that a launch of these sizes and this alignment uses, as far as is known without
        compiling it: one that is known to spill has another one in its place. If the GPU of this machine has
        the architecture, results of tuning on it count. Raises UsageError for an unknown `arch`, and where
        `config.tile` or `config.rowvec_placement` can't be met."""
        return standing(self.first_rung(arch))

    @property
    def rung(self) -> str:
        """A sentence that says in whose place the kernel runs; empty if it is the first choice."""
        first = self.first_rung()
        if self.kernel() == first:
            return ""
        return f"in place of {first.plan.tile.name}, which spills {spill_bytes(first)} bytes a thread"

    def first_rung(self, arch: str | None = None) -> Kernel:
        """The kernel that was chosen, whether or not it is known to spill. Raises as `kernel` does."""
        tile = config_here(self._problem, self.alignment, Arch.parse(arch or self.arch))
        return Kernel.found(plan(self._problem.spec, tile, self.alignment))

    @property
    def timed(self) -> str:
        """The times, in microseconds, by which the tile was chosen on this machine's GPU: of its kernel and,
        if that was timed too, of Inductor's own code. It is empty if the cost model chose the tile."""
        found = result_here(self._problem, self.alignment, Arch.parse(self.arch))
        if found is None:
            return ""
        other = "" if found.unfused_us is None else f", Inductor's own code {found.unfused_us:.1f}"
        return f"timed on this GPU: {found.us:.1f} us{other}"

    @property
    def _problem(self) -> Problem:
        """The problem of the launch by which the region was traced."""
        varies = isinstance(self.sizes[0], str)
        (problem,) = launched(Problem(self.spec, *self.hints, self.groups, Constraints.from_config(), varies))
        return problem

    @property
    def tiles(self) -> tuple[str, ...]:
        """The names of all tiles that can serve the region on its architecture, as `config.tile` takes
        them."""
        arch = Arch.of_name(self.arch)
        assert arch is not None
        return tuple(sorted(tile.name for tile in clustered(arch, self.spec)))

    def source(self, arch: str | None = None) -> str:
        """The kernel's module, as CuTe DSL Python, for people to read.

        The comment after each statement of the epilogue has the line of the program that the statement
        computes. The text that is compiled, `build().source`, has no such comments, since several layers may
        share the kernel. Raises UsageError for an unknown architecture.
        """
        return text_of(self.kernel(arch), self.lines)

    def build(self, arch: str | None = None) -> Built:
        """The kernel, compiled afresh. Raises UsageError for an unknown architecture, UnavailableError if the
        CuTe DSL is not installed, and BuildError if compilation fails."""
        from cute_backend.runtime.compiling.build import build

        return build(self.kernel(arch))

    @cached_property
    def _plan(self) -> Plan:
        return self.kernel().plan


def default_arch() -> str:
    """The architecture of the current GPU; "sm_100a" without a GPU, or where no kernels exist for it."""
    here = Arch.of_capability(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return (here or Arch.SM100A).value


class _Results:
    """The results that the regions of one graph have written so far, for the regions that read them."""

    def __init__(self, first: int) -> None:
        self.count = first
        self.names: dict[fx.Node, str] = {}

    def labels(self, found: Region) -> tuple[str, ...]:
        """The program's names for the operands of the next region. Records the region's own results."""
        labels = tuple(
            self.names.get(view.node) or self.names.get(root(view.node), label)
            for view, label in zip(found.views, found.load_labels, strict=True)
        )
        for node, index in found.outputs.items():
            names = " and ".join(store.name for store in found.spec.results[index])
            self.names[node] = f"region {self.count}, {names}"
        self.count += 1
        return labels


def described(found: Sequence[Region], arch: str, first: int = 0) -> list[ExplainedRegion]:
    """Describes the regions of one graph, each behind those whose results it reads. They are numbered from
    `first` on."""
    found, results = in_order(found), _Results(first)
    return [
        replace(
            _region(each, results, arch),
            sources=tuple(Source(first + index, ops) for index, ops in read.items()),
        )
        for each, read in zip(found, sources(found), strict=True)
    ]


def _region(found: Region, results: _Results, arch: str) -> ExplainedRegion:
    m, n, k = found.problem
    return ExplainedRegion(
        anchor=target_name(found.products[0]),
        node=", ".join(node.name for node in found.products),
        products=tuple(
            Product(label, nearest_line(anchor.node))
            for label, anchor in zip(found.product_labels, found.anchors, strict=True)
        ),
        spec=found.spec,
        sizes=(_shown(m), _shown(n), _shown(k)),
        arch=arch,
        labels=results.labels(found),
        hints=(_hint(m), _hint(n), _hint(k)),
        alignment=_alignment(found, _hint(m), _hint(n)),
        lines=_lines(found),
        groups=None if found.groups is None else _hint(found.groups),
        unshared=found.unshared,
    )


def _lines(found: Region) -> dict[str, str]:
    """The program's line for each op and store of a region's spec, by name; those without a known line are
    left out."""
    nodes = dict(found.origins)
    for node, index in found.outputs.items():
        nodes |= {store.name: node for store in found.spec.results[index]}
    return {name: line for name, node in nodes.items() if (line := program_line(node))}


def _alignment(found: Region, m: int, n: int) -> Alignment:
    """The alignment of these arguments, from the sizes of outputs and the strides and offsets of exact
    loads."""
    aligned = stores_aligned(found.spec, m, n) is True
    for load, view in zip(found.spec.loads, found.views, strict=True):
        plane = Argument.of_load(load)
        if plane.alignment is ArgumentAlignment.PLANE:
            tensor = fake(view.node)
            pitch = tensor.stride(view.n_axes[0][-1] if plane.unit == 0 else view.m_axes[-1])
            first = 0 if view.columns is None else view.columns.start
            offset = _hint(tensor.storage_offset() + first) * tensor.element_size()
            aligned &= not (offset | _hint(pitch) * tensor.element_size()) % TMA_ALIGN
    return Alignment.TMA if aligned else Alignment.PLAIN


_UNKNOWN_SIZE = 4096
"""The assumed value of a symbolic size without an example."""


def _hint(size: Size) -> int:
    """A size, or the example that a symbolic size was made from."""
    example = hint(size)
    return _UNKNOWN_SIZE if example is None else example


def _shown(size: Size) -> int | str:
    return str(size) if isinstance(size, torch.SymInt) else size
