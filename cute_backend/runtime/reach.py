"""Which kernels a region can reach: a tile configuration for every M it may meet, by every alignment.

They are all built before the region's first launch, so their number is bounded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..memory_ops import Variant
from ..memory_ops.placement import plane_order
from ..spec import EpilogueSpec, LoadKind, Order
from ..templates.config import Arch, TileConfig, choose, table
from .kernel import Kernel
from .operands import TMA_ALIGN

MAX_KERNELS = 8
"""The most objects that a region may need, its alignments and tile choices together."""

_BUCKETS = tuple(1 << exponent for exponent in range(4, 17))


@dataclass(frozen=True)
class Problem:
    """A region as it is known before it runs: a size that is not static is None."""

    spec: EpilogueSpec
    m: int | None
    n: int | None
    k: int | None


def bucket_of(m: int) -> int:
    """The M that a configuration is chosen for in place of `m`: the next power of two, 16 to 65536.

    So a new M seldom means a new configuration, and the set of those that a region reaches is known.
    """
    return next((bucket for bucket in _BUCKETS if m <= bucket), _BUCKETS[-1])


def reachable_kernels(problem: Problem, arch: Arch, sm_count: int) -> list[Kernel]:
    """Every kernel that launches of `problem` can ask for, at most MAX_KERNELS."""
    variants = reachable_variants(problem)
    configs = _reachable_configs(problem, arch, sm_count)[: MAX_KERNELS // len(variants)]
    return [Kernel(problem.spec, config, variant) for config in configs for variant in variants]


def reachable_variants(problem: Problem) -> tuple[Variant, ...]:
    """The alignments that launches of `problem` can meet.

    The op allocates its outputs, so theirs follows from sizes alone. An exact load may begin anywhere:
    whether it is aligned is known only at launch.
    """
    stores = stores_aligned(problem.spec, problem.m, problem.n)
    if stores is False:
        return (Variant.PLAIN,)
    any_exact = any(
        load.kind is LoadKind.EXACT and plane_order(load) is not None for load in problem.spec.loads
    )
    if stores is True and not any_exact:
        return (Variant.TMA,)
    return (Variant.TMA, Variant.PLAIN)


def stores_aligned(spec: EpilogueSpec, m: int | None, n: int | None) -> bool | None:
    """Whether the pitch of every output is a multiple of TMA's 16 bytes; None where its size is unknown."""
    verdicts = []
    for store in spec.planes:
        extent = n if store.order is Order.ROW else m
        verdicts.append(None if extent is None else extent * store.dtype.bits // 8 % TMA_ALIGN == 0)
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _reachable_configs(problem: Problem, arch: Arch, sm_count: int) -> list[TileConfig]:
    """Those chosen for most sizes of M first."""
    spec, n, k = problem.spec, problem.n, problem.k
    if n is None or k is None:
        return list(table(arch, spec))
    buckets = _BUCKETS if problem.m is None else (bucket_of(problem.m),)
    chosen = Counter(choose(arch, spec, bucket, n, k, sm_count) for bucket in buckets)
    return [config for config, _ in chosen.most_common()]
