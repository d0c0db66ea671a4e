"""The kernels that launches of a region can need: a tile configuration for every M and every alignment that
may occur.

They are all begun before the region's first launch, so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cute_backend.kinds.axes import Extent
from cute_backend.planning import (
    BUCKETS,
    MOST_CONVERTED_ROWS,
    UNCONSTRAINED,
    Alignment,
    Arch,
    Constraints,
    Sizes,
    TileConfig,
    bucket_of,
    covering,
    named,
    plan,
    tile_table,
    untuned,
    with_rowvecs,
)
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.signature import TMA_ALIGN, Argument, ArgumentAlignment, Use, of_use, signature
from cute_backend.spec import EpilogueSpec

MAX_KERNELS = 16
"""The most kernels that a region may need: one for each alignment and tile."""


@dataclass(frozen=True)
class Problem:
    """The facts about a region that are known before it runs. A size that is not static is None."""

    spec: EpilogueSpec
    m: int | None
    n: int | None
    k: int | None
    groups: int | None = None
    """The number of groups of rows of a grouped product, if it is known."""
    constraints: Constraints = UNCONSTRAINED
    varies: bool = False
    """Whether `m`, if it is known, is that of one launch among others, for which it is rounded up."""

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """The sizes besides M."""
        return self.n, self.k, self.groups


def launched(problem: Problem) -> list[Problem]:
    """The problems whose kernels the launches of a region run. A weight that a kernel converts for up to
    MOST_CONVERTED_ROWS rows is converted in memory for more, and another kernel reads it."""
    if not problem.spec.product.is_wideable:
        return [problem]
    widened = replace(problem, spec=problem.spec.widened)
    if problem.m is None:
        return [problem, widened]
    return [problem if problem.m <= MOST_CONVERTED_ROWS else widened]


Winners = Callable[[EpilogueSpec, Alignment, Sequence[int], int, int], Mapping[int, TileConfig]]
"""Configurations that were timed and found fastest for a spec, an alignment, some of several M, N and K, by
M."""


def no_winners(
    spec: EpilogueSpec, alignment: Alignment, ms: Sequence[int], n: int, k: int
) -> Mapping[int, TileConfig]:
    """No configurations: the winners of a process without tuning."""
    return {}


def config_for(
    problem: Problem, alignment: Alignment, arch: Arch, sm_count: int, winners: Winners = no_winners
) -> TileConfig:
    """The configuration that serves a problem of known sizes.

    With a constraint on rowvecs it is changed as `with_rowvecs` does, which may raise UsageError.

    The tile is the winner for M or, if M varies, for its bucket or for the next smaller or larger one; else
    the cost model's choice. A batch-invariant region has one tile for all M, and a region whose tile is named
    has that one. Raises UsageError if the named tile does not fit.
    """
    config = _without_rowvecs(problem, alignment, arch, sm_count, winners)
    return with_rowvecs(config, problem.spec, problem.constraints.rowvecs)


def _without_rowvecs(
    problem: Problem, alignment: Alignment, arch: Arch, sm_count: int, winners: Winners
) -> TileConfig:
    """The tile that `config_for` chooses, wherever rowvecs are kept."""
    spec, m, n, k, constraints = problem.spec, problem.m, problem.n, problem.k, problem.constraints
    if constraints.tile is not None:
        return named(arch, spec, constraints.tile)
    assert m is not None and n is not None and k is not None
    if not constraints.batch_invariant:
        near = _near(m) if problem.varies else (m,)
        won = winners(spec, alignment, near, n, k)
        if (found := next((each for each in near if each in won), None)) is not None:
            return won[found]
    sizes = Sizes(bucket_of(m) if problem.varies else m, n, k, problem.groups)
    return untuned(arch, spec, sizes, sm_count, constraints.batch_invariant)


def _near(m: int) -> tuple[int, ...]:
    """The bucket of an M that varies, and those next to it."""
    bucket = bucket_of(m)
    place = BUCKETS.index(bucket)
    return bucket, *BUCKETS[max(place - 1, 0) : place + 2]


def reachable_kernels(
    problem: Problem,
    arch: Arch,
    sm_count: int,
    winners: Winners = no_winners,
    buckets: Sequence[int] = BUCKETS,
) -> list[Kernel]:
    """Every kernel that launches of `problem` can ask for, at most MAX_KERNELS.

    If M is not static, it may be any M that is rounded up to one of `buckets`.
    """
    alignments = reachable_alignments(problem)
    plans = (
        plan(problem.spec, config, alignment)
        for alignment in alignments
        for config in _reachable_configs(
            problem, alignment, arch, sm_count, winners, buckets, MAX_KERNELS // len(alignments)
        )
    )
    return [Kernel.found(each) for each in dict.fromkeys(plans)]


def reachable_alignments(problem: Problem) -> tuple[Alignment, ...]:
    """The alignments that launches of `problem` can meet.

    The op allocates its outputs, so their alignment follows from sizes alone. An exact load may begin at any
    address, so its alignment is known only at launch.
    """
    stores = stores_aligned(problem.spec, problem.m, problem.n)
    if stores is False:
        return (Alignment.PLAIN,)
    if stores is True and not _planes(problem.spec, Use.LOAD):
        return (Alignment.TMA,)
    return (Alignment.TMA, Alignment.PLAIN)


def stores_aligned(spec: EpilogueSpec, m: int | None, n: int | None) -> bool | None:
    """Whether the pitch of every output is a multiple of TMA's 16 bytes; None if its size is unknown."""
    sizes = {Extent.M: m, Extent.N: n}
    verdicts = []
    for plane in _planes(spec, Use.STORE):
        assert plane.unit is not None
        extent = sizes[plane.dims[plane.unit].extent]
        verdicts.append(None if extent is None else extent * plane.dtype.bits // 8 % TMA_ALIGN == 0)
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _planes(spec: EpilogueSpec, role: Use) -> list[Argument]:
    """The planes of the epilogue in one role. Only the kernels of one alignment move them by TMA."""
    return [each for each in of_use(signature(spec), role) if each.alignment is ArgumentAlignment.PLANE]


def _reachable_configs(
    problem: Problem,
    alignment: Alignment,
    arch: Arch,
    sm_count: int,
    winners: Winners,
    buckets: Sequence[int],
    most: int,
) -> Sequence[TileConfig]:
    """The configurations that launches of one alignment can need, at most `most`: those that were timed
    first, then those that cover the buckets of M best."""
    spec, n, k, constraints = problem.spec, problem.n, problem.k, problem.constraints
    if constraints.tile is not None:
        return [with_rowvecs(named(arch, spec, constraints.tile), spec, constraints.rowvecs)]
    if n is None or k is None:
        return [with_rowvecs(config, spec, constraints.rowvecs) for config in tile_table(arch, spec)][:most]
    if problem.m is not None:
        return [config_for(problem, alignment, arch, sm_count, winners)]
    if spec.product.is_wideable:
        buckets = [m for m in buckets if m <= MOST_CONVERTED_ROWS]
    problems = {m: replace(problem, m=m, varies=True) for m in buckets}
    chosen = {m: config_for(each, alignment, arch, sm_count, winners) for m, each in problems.items()}
    timed = winners(spec, alignment, buckets, n, k) if constraints == UNCONSTRAINED else {}
    won = list(dict.fromkeys(timed.values()))[:most]
    rest = {m: config for m, config in chosen.items() if config not in won}
    return [*won, *covering(rest, spec, n, k, sm_count, most - len(won))]
