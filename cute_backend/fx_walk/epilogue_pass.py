"""The pass that Inductor runs over every post-grad graph, forward and backward."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dynamo.utils import counters, dynamo_timed
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

import cute_backend
from cute_backend import config
from cute_backend.fx_walk.graph.working_copy import WorkingCopy
from cute_backend.fx_walk.preparation.async_tp import is_on as async_tp_is_on
from cute_backend.fx_walk.preparation.async_tp import multiply_while_moving
from cute_backend.fx_walk.preparation.broadcast import join_batches
from cute_backend.fx_walk.preparation.free_strides import lay_in_rows
from cute_backend.fx_walk.preparation.gated_units import divide_gated_units
from cute_backend.fx_walk.preparation.gathers import take_from_products
from cute_backend.fx_walk.preparation.interleaved import join_interleaved
from cute_backend.fx_walk.preparation.log_softmax import separate_logsumexps
from cute_backend.fx_walk.preparation.packed import divide_packed
from cute_backend.fx_walk.preparation.padding import take_padding_back
from cute_backend.fx_walk.preparation.row_slices import slice_before_products
from cute_backend.fx_walk.preparation.weight_views import bring_weights_to_products
from cute_backend.fx_walk.products.anchors import is_anchor
from cute_backend.fx_walk.products.capability import Capability, device_capability
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.replacement.cache_writes import write_to_caches
from cute_backend.fx_walk.replacement.product_times import give_times
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.fx_walk.search.regions import find_regions
from cute_backend.options import check_settings
from cute_backend.planning.naming import words
from cute_backend.runtime.calls.prepare import announce
from cute_backend.runtime.kernels.edited import edited_folder
from cute_backend.spec import Precision

if TYPE_CHECKING:
    from typing_extensions import Self

    from cute_backend.fx_walk.replacement.tuning_jobs import Late

log = logging.getLogger(__name__)

Observer = Callable[[Sequence[Region], Sequence[Rejection]], None]
"""Receives the regions and rejections of a graph, whose nodes still exist."""


class EpiloguePass(CustomGraphPass):
    """Fuses every matrix product of a graph with the pointwise work after it.

    It is a pass for `torch._inductor.config.post_grad_custom_pre_pass`. It counts per compilation, in
    `torch._dynamo.utils.counters["cute_backend"]`, `anchors`, `regions`, and each `Reason` by its value. A
    graph on which it fails stays unchanged. `settings` are the settings of `cute_backend.config` that this
    pass overrides. `observe` is called with the results, and does not affect them.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, observe: Observer | None = None) -> None:
        self.settings = dict(settings or {})
        self.observe = observe

    def with_settings(self, **settings: Any) -> Self:
        """A pass with its own settings, which take precedence over those of `cute_backend.config` and are
        part of the keys of Inductor's caches. Raises UsageError for an unknown setting and for a value that a
        setting doesn't accept.

        >>> from cute_backend import epilogue_pass
        >>> tuned = epilogue_pass.with_settings(max_autotune=True, max_stores=2)
        >>> tuned.uuid() == epilogue_pass.uuid()
        False
        """
        check_settings(settings)
        return type(self)({**self.settings, **settings}, self.observe)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.settings == self.settings

    def __hash__(self) -> int:
        return hash((type(self), *sorted(self.settings)))

    def in_force(self) -> AbstractContextManager[None]:
        """A context with the settings of this pass in `cute_backend.config`, for this thread."""
        return config.patch(self.settings)  # type: ignore[attr-defined]

    def __call__(self, graph: fx.Graph) -> None:
        try:
            self.fuse(graph)
        except Exception as error:
            with self.in_force():
                self.show([], [contain(error)])

    def show(self, regions: Sequence[Region], rejections: Sequence[Rejection]) -> None:
        """Passes the regions and rejections of a graph to all observers."""
        if self.observe is not None:
            self.observe(regions, rejections)

    def leave(self, late: Late) -> None:
        """Called with the regions that are not measured yet, for want of kernels. The pass alone does not
        learn when Inductor has compiled a graph, so they keep the cost model's tiles in this process."""
        from cute_backend.runtime.tuning.jobs import Untuned

        for _ in late:
            Untuned.LATE.note(warns=False)

    def fuse(self, graph: fx.Graph) -> None:
        """Fuses a graph, or raises and leaves the graph, its nodes and their metas unchanged, apart from what
        async tensor parallelism replaces. `torch._dynamo.utils.compile_times` has the time that it takes."""
        with self.in_force(), dynamo_timed("cute_backend.pass"):
            left_out = multiply_while_moving(graph)
            copy = WorkingCopy(graph)
            regions = self._fuse(copy.graph, left_out)
        if regions:
            copy.commit()

    def _fuse(self, graph: fx.Graph, left_out: Sequence[Rejection]) -> list[Region]:
        """Fuses all regions of a graph, which the caller discards if something fails. `left_out` are
        rejections of earlier steps."""
        prepare(graph, device_capability)
        regions, rejections = self.analyse(graph)
        if tuning_is_on() or measuring_is_on():
            # They import all of Inductor, which an import of the pass must not do.
            from cute_backend.fx_walk.replacement.tuning_jobs import measure, tune

            late: Late = []
            regions, slower = tune(regions) if tuning_is_on() else measure(regions, late)
            rejections += slower
            self.leave(late)
        self.show(regions, [*left_out, *rejections])
        anchors = sum(is_anchor(node) for node in graph.nodes)
        if regions:
            # It is here for the same reason as tuning. Inductor is imported by now.
            from cute_backend.fx_walk.replacement.direct_call import register

            register()
            rewrite(graph, regions)
            give_times()
            announce_regions(regions)
        for region in regions:
            what = words(region.spec)
            log.info("fused %s of M, N, K %s: %s %s", _names(region), region.problem, what, region.spec.key)
        for rejection in rejections:
            log.info("left %s to Inductor, %s: %s", rejection.node, rejection.reason.value, rejection.message)
        tally = counters["cute_backend"]
        tally["anchors"] += anchors
        tally["regions"] += len(regions)
        tally.update(Counter(rejection.reason.value for rejection in rejections))
        return regions

    def analyse(
        self, graph: fx.Graph, capability: Capability = device_capability
    ) -> tuple[list[Region], list[Rejection]]:
        """Returns the regions and rejections that the pass finds in a graph, without changing it."""
        unreachable = _unreachable()
        if unreachable is not None:
            refused = Refused(unreachable)
            return [], [refused.rejection(node) for node in graph.nodes if is_anchor(node)]
        return find(graph, capability)

    def uuid(self) -> Any:
        """A key of everything that a cached graph depends on: sources, versions, and every setting that
        changes a decision."""
        with self.in_force():
            settings = config.save_config_portable()  # type: ignore[attr-defined]
        return (
            "cute_backend",
            cute_backend.__version__,
            _dsl_version(),
            _source_hash(),
            current_precision().value,
            async_tp_is_on(),
            tuple(sorted(settings.items())),
        )


def prepare(graph: fx.Graph, capability: Capability) -> None:
    """Rewrites what Inductor and programs write around products to forms in which regions are found, and
    divides products with packed columns."""
    if _unreachable() is None:
        divide_gated_units(graph)
        take_padding_back(graph)
        slice_before_products(graph)
        lay_in_rows(graph)
        join_batches(graph)
        join_interleaved(graph)
        bring_weights_to_products(graph, capability)
        separate_logsumexps(graph)
        take_from_products(graph)
        divide_packed(graph, lambda graph: find_regions(graph, current_precision(), capability)[0])


def find(graph: fx.Graph, capability: Capability) -> tuple[list[Region], list[Rejection]]:
    """The regions and rejections of a graph that `prepare` has rewritten, with results in caches."""
    regions, rejections = find_regions(graph, current_precision(), capability)
    regions, left = write_to_caches(regions, _why_not_to_caches())
    written = {node.name for region in regions for write in region.caches.values() for node in write.nodes}
    settled = written | {rejection.node for rejection in left}
    return regions, [*(rejection for rejection in rejections if rejection.node not in settled), *left]


def _why_not_to_caches() -> str:
    """Why no kernel writes to caches, or an empty string."""
    if V.aot_compilation:
        return "AOTInductor's code calls kernels that return results"
    return "" if config.cache_writes else "config.cache_writes is off"


def _names(region: Region) -> str:
    return ", ".join(node.name for node in region.products)


def _unreachable() -> Reason | None:
    """The reason why compiled code can't call the op. None if it can, as AOTInductor's code can."""
    return Reason.CPP_WRAPPER if inductor_config.cpp_wrapper and not V.aot_compilation else None


def announce_regions(regions: list[Region]) -> None:
    """Begins to build the kernels of a graph together, before it runs. A process that makes a package of
    AOTInductor may end without a launch, so it builds them at once."""
    by_device = defaultdict(list)
    for region in regions:
        by_device[region.first.device].append((region.spec, *region.problem, region.groups))
    for device, problems in by_device.items():
        announce(problems, device, at_once=V.aot_compilation)


def tuning_is_on() -> bool:
    """Whether to tune the graph that is being compiled, by `config.max_autotune` or else by Inductor's
    setting."""
    if not _may_be_timed():
        return False
    if config.max_autotune is not None:
        return config.max_autotune
    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


def measuring_is_on() -> bool:
    """Whether to time what the cost model leaves open in the graph that is being compiled, by
    `config.measure`. Ranks that measured alone might compile different graphs."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    launched = os.environ.get("WORLD_SIZE", "1") != "1"  # by torchrun, which sets it before there is a group
    return (
        config.measure
        and _may_be_timed()
        and not (V.aot_compilation or torch.are_deterministic_algorithms_enabled())
        and not (torch.distributed.get_world_size() > 1 if grouped else launched)
    )


def _may_be_timed() -> bool:
    """Whether timings could decide: `config.tile` names no tile and `config.rowvec_placement` no placement,
    and no module was edited, whose times would be taken for those of generated modules."""
    return config.tile is None and config.rowvec_placement == "auto" and edited_folder() is None


def current_precision() -> Precision:
    """Eager's rounding if the user has asked Inductor for it, otherwise that of fused kernels."""
    return Precision.EAGER if inductor_config.emulate_precision_casts else Precision.FUSED


_NO_SAY = ("__main__", "aot", "bench", "command", "fuzz", "operators", "simulator")
"""Modules and packages that neither the pass nor the code of a rewritten graph imports."""


def deciding_sources() -> list[Path]:
    """Every Python file of the package that may affect the result of the pass."""
    root = Path(cute_backend.__file__).parent
    paths = sorted(root.rglob("*.py"))
    return [path for path in paths if path.relative_to(root).with_suffix("").parts[0] not in _NO_SAY]


@cache
def _source_hash() -> str:
    """SHA-256 of `deciding_sources`, by path."""
    root = Path(cute_backend.__file__).parent
    digest = hashlib.sha256()
    for path in deciding_sources():
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _dsl_version() -> str:
    try:
        return metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return "none"
