"""The times that torch's overlap scheduling takes products of torch's to need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config

from cute_backend.fx_walk.graph.static import DTYPES, usual
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.capability import Capability, target_of
from cute_backend.planning import Arch, Sizes, choose
from cute_backend.planning.cost import cost
from cute_backend.spec import EpilogueSpec, Store

ROOFLINE = "estimate_roofline_runtime_ms"
"""torch's estimate from operations and bytes, which 2.11 does not have."""


def assumed_ms(node: fx.Node, anchor: Anchor | None, capability: Capability) -> float:
    """The milliseconds that torch's overlap scheduling will take a product of torch's to need, which it knows
    only when it has benchmarked it."""
    own = option({}, "custom_runtime_estimation", None)
    given = None if own is None else own(node, None)
    if given is not None:
        return float(given)
    if anchor is not None and option({}, "compute_estimator", "benchmark") == "benchmark":
        predicted = _predicted_ms(anchor, capability)
        if predicted is not None:
            return predicted
    return by_torch(node)


def _predicted_ms(anchor: Anchor, capability: Capability) -> float | None:
    """The time of a product without work after it, by the cost model; None if no kernel computes it."""
    target = target_of(anchor.device, capability) or next(iter(Arch)).target
    arch, dtype = Arch.of_name(target.name), DTYPES.get(anchor.out_dtype)
    if arch is None or dtype is None:
        return None
    sizes = Sizes(usual(anchor.m), usual(anchor.n), usual(anchor.k))
    try:
        spec = EpilogueSpec((anchor.accumulator,), (), (), (Store("out", anchor.accumulator.name, dtype),))
        return cost(choose(arch, spec, sizes, target.sm_count), spec, sizes, target.sm_count) / 1000
    except ValueError:  # no tile serves it
        return None


def option(options: Mapping[str, Any], name: str, default: Any) -> Any:
    """An option of torch's distributed passes. Versions of torch have different ones."""
    settings = getattr(inductor_config, "aten_distributed_optimizations", None)
    return options.get(f"aten_distributed_optimizations.{name}", getattr(settings, name, default))


def by_torch(node: fx.Node) -> float:
    """torch's estimate of a node from the bytes that it moves and, in later versions than 2.11, from its
    operations."""
    from torch._inductor.fx_passes import overlap_scheduling

    names = (ROOFLINE, "estimate_mem_bound_runtime_ms")
    found: Any = next(filter(None, (getattr(overlap_scheduling, name, None) for name in names)))
    return float(found(node))
