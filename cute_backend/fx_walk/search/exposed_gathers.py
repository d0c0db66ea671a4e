"""Weights that arrive from other GPUs before the products that need them, as in fully sharded training.

torch's overlap scheduling hides the gather of a weight behind the products before it. One kernel of two
products with a weight each waits for both gathers, and the first product no longer hides the second gather.
Before a graph's first product, and wherever the products before can't hide both gathers, this wait may be
longer than what one kernel saves. Then the products are left apart.

Products and gathers have the times that torch's scheduler will assume, and it is followed: while a product
runs, gathers proceed in the order in which they are needed. If gathers take longer than all products, a later
product would make up for the wait by these times. That does not count, because more gathered weights would be
in memory, and because the times may be wrong: torch's analytical estimate of a product is two thirds of its
time at the peak of the GPU, so that products may in fact hide every gather that is started in time. Pointwise
work is ignored, and so is the limit that torch sets to the memory of gathered weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._inductor import config as inductor_config

from cute_backend import config
from cute_backend.fx_walk.ends.boundary import LAUNCH_BYTES
from cute_backend.fx_walk.graph.mutation import root
from cute_backend.fx_walk.graph.static import fake, target_name, usual
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.products.capability import Capability, target_of
from cute_backend.fx_walk.products.pairs import meet, unlike
from cute_backend.fx_walk.products.torch_times import assumed_ms
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.fx_walk.refusals.reasons import Refused
from cute_backend.planning import Arch

if TYPE_CHECKING:
    from cute_backend.fx_walk.search.walk import Walk


_GATHERS = (
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.all_gather_into_tensor_out.default",
)


def exposed_gather(walk: Walk, anchors: Sequence[Anchor]) -> str | None:
    """Why a kernel should not compute several products: it would wait for gathers that the first product
    could hide. None if nothing speaks against it."""
    return walk.apart.get(anchors[0].a) if len({_gather_of(each) for each in anchors} - {None}) > 1 else None


def products_apart(
    order: Iterable[fx.Node],
    anchors: Mapping[fx.Node, Anchor | Refused],
    of_one_a: Mapping[fx.Node, Sequence[Anchor]],
    capability: Capability,
) -> dict[fx.Node, str]:
    """The A of the products that are left apart because of their gathers, each with the reason.

    Empty unless torch's overlap scheduling is on, and if its estimates can't be had.
    """
    settings = getattr(inductor_config, "aten_distributed_optimizations", None)
    if not getattr(settings, "enable_overlap_scheduling", False):
        return {}
    try:
        candidates = {a: each for a, each in of_one_a.items() if _could_wait(each)}
        return dict(_apart(order, anchors, candidates, capability)) if candidates else {}
    except Exception as error:
        contain(error, "products that wait for several gathered weights share kernels")
        return {}


@dataclass(frozen=True)
class _Step:
    """A product, or several in one kernel, in milliseconds; and the gathers that it waits for."""

    ms: float
    gathers: tuple[fx.Node, ...]


def _could_wait(anchors: Sequence[Anchor]) -> bool:
    """Whether one kernel could compute several products of one A whose weights arrive separately."""
    return any(
        len({_gather_of(first), _gather_of(second)} - {None}) > 1
        and not _are_bucketed(first, second)
        and (config.shared_launches or _is_pair(first, second))
        for first, second in combinations(anchors, 2)
    )


def _is_pair(first: Anchor, second: Anchor) -> bool:
    return unlike(first, second) is None and meet(first.node, second.node, ())


def _gather_of(anchor: Anchor) -> fx.Node | None:
    """The collective that brings the weight of a product and no other one, if there is one."""
    wait = root(anchor.b)
    if target_name(wait) != "_c10d_functional.wait_tensor.default":
        return None
    gather = wait.args[0]
    return gather if isinstance(gather, fx.Node) and target_name(gather) in _GATHERS else None


def _are_bucketed(first: Anchor, second: Anchor) -> bool:
    """Whether torch makes one gather of those of two weights before it schedules them."""
    settings = inductor_config.aten_distributed_optimizations
    if not getattr(settings, "pre_bucketing_fsdp_collectives", False):
        return False
    from torch._inductor.fx_passes.fsdp import compute_pre_bucket_cap_mb

    weights = [fake(root(each.b)) for each in (first, second)]
    size = sum(usual(weight.numel()) * weight.element_size() for weight in weights)
    ranks = usual(weights[0].shape[0]) // usual(fake(_shard_of(first)).shape[0])
    cap = getattr(settings, "pre_bucketing_fsdp_collectives_bucket_cap_mb", None)
    return size <= compute_pre_bucket_cap_mb(ranks, cap) * 2**20


def _shard_of(anchor: Anchor) -> fx.Node:
    gather = _gather_of(anchor)
    assert gather is not None
    return gather.all_input_nodes[0]


def _apart(
    order: Iterable[fx.Node],
    anchors: Mapping[fx.Node, Anchor | Refused],
    candidates: Mapping[fx.Node, Sequence[Anchor]],
    capability: Capability,
) -> Iterator[tuple[fx.Node, str]]:
    """Decides from the first product to the last. Products of one A count in the place of the first."""
    from torch._inductor.fx_passes.overlap_scheduling import estimate_collective_time, is_compute_node

    hook: Any = inductor_config.aten_distributed_optimizations.custom_runtime_estimation
    groups: dict[fx.Node, list[_Step]] = {}
    times: dict[fx.Node, float] = {}
    for node in filter(is_compute_node, order):
        anchor = anchors.get(node)
        of = anchor if isinstance(anchor, Anchor) else None
        gather = None if of is None else _gather_of(of)
        if gather is not None and gather not in times:
            times[gather] = estimate_collective_time(gather, custom_runtime_estimation=hook)
        step = _Step(assumed_ms(node, of, capability), () if gather is None else (gather,))
        groups.setdefault(of.a if of is not None and of.a in candidates else node, []).append(step)
    gathers = _Gathers(times)
    for a, steps in groups.items():
        one = _Step(sum(step.ms for step in steps), tuple(each for step in steps for each in step.gathers))
        joined, apart = gathers.after([one]), gathers.after(steps)
        gathers = joined
        if a not in candidates:
            continue
        saved, cost = joined.exposed - apart.exposed, _cost_ms(candidates[a], capability)
        if saved > cost:
            gathers = apart
            yield a, _why(saved, cost)


def _why(saved: float, cost: float) -> str:
    return (
        f"their weights are gathered separately: while the first one runs, {saved * 1000:.0f} us of other "
        f"gathers are hidden by torch's estimates, and separate kernels take {cost * 1000:.0f} us more"
    )


class _Gathers:
    """The milliseconds that are left of each gather, in the order in which they are needed, and for which no
    product ran."""

    def __init__(self, left: dict[fx.Node, float], exposed: float = 0.0) -> None:
        self.left = left
        self.exposed = exposed

    def after(self, steps: Sequence[_Step]) -> _Gathers:
        """The state when products have run, each of which hides gathers of later ones."""
        left, exposed = dict(self.left), self.exposed
        for step in steps:
            exposed += sum(left.pop(gather, 0.0) for gather in step.gathers)
            budget = step.ms
            for gather, ms in left.items():
                left[gather] = max(ms - budget, 0.0)
                budget -= ms
                if budget <= 0:
                    break
        return _Gathers(left, exposed)


def _cost_ms(anchors: Sequence[Anchor], capability: Capability) -> float:
    """The time by which kernels of their own take longer for products of one A: a launch for each further
    one, and for a pair, a plane that one of them writes and the other reads."""
    first, *others = anchors
    target = target_of(first.device, capability) or next(iter(Arch)).target
    plane = fake(first.node)
    moved = LAUNCH_BYTES * len(others)
    if any(_is_pair(first, other) for other in others):
        moved += 2 * usual(plane.numel()) * plane.element_size()
    return moved / target.timing.bytes_per_us / 1000
