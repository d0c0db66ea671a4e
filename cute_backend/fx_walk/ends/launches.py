"""The launches of a region: one of its kernel, and a second one if another kernel finishes its
reductions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.static import Size, fake, usual
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.region import Region, stores_of
from cute_backend.planning import Arch, Sizes, bucket_of, needs_second_kernel
from cute_backend.spec import EpilogueSpec


def launches(region: Region, arch: Arch) -> int:
    """The kernels that a launch of a region starts on an architecture, not counting one that adds the sums of
    split-K."""
    return 1 + _is_apart(region.spec, region.problem, region.groups, (arch,))


def is_finished_apart(draft: Draft, member: fx.Node, plane: fx.Node | None) -> bool:
    """Whether a second kernel finishes a reduced member of a draft, if the kernel writes it and the member
    `plane`. Without a target, whether one does on some architecture."""
    first, written = draft.first, [member] if plane is None else [plane, member]
    stores, _ = stores_of(first, draft.chain, written, draft.values, draft.frames)
    groups = None if first.offsets is None else fake(first.offsets).shape[0]
    return _is_apart(draft.chain.build_needed(stores), (first.m, first.n, first.k), groups, draft.chain.archs)


def _is_apart(
    spec: EpilogueSpec, sizes: tuple[Size, Size, Size], groups: Size | None, archs: Iterable[Arch]
) -> bool:
    m, n, k = map(usual, sizes)
    rows = m if isinstance(sizes[0], int) else bucket_of(m)
    known = Sizes(rows, n, k, None if groups is None else usual(groups))
    return any(needs_second_kernel(arch, spec, known, config.batch_invariant) for arch in archs)
