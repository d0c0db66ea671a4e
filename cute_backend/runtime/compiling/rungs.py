"""The kernel that runs in place of one whose threads spill, or that can't be compiled.

The compiler alone knows whether a thread has registers enough. So a kernel is compiled, and if its threads
spill, the next of its rungs is (`planning.rungs`). The first rung that spills nothing runs. If all spill, the
one that spills least runs, and is counted and named, since a replay of the epilogue would be far slower. What
a rung spilled is known from then on: a cache has it, or a pack. For shared epilogues a table has it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile

from cute_backend.errors import BuildError
from cute_backend.planning import Rowvecs, rungs
from cute_backend.runtime.compiling.build import (
    Outcome,
    begin,
    is_at_hand,
    is_begun,
    load_known,
    obtain,
    warn_of_packs,
)
from cute_backend.runtime.disk.cache import existing_caches
from cute_backend.runtime.disk.pack import packs
from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.verdicts import shipped_verdict

_failed: set[Kernel] = set()
"""The kernels that this process could not compile."""


@dataclass(frozen=True)
class Obtained:
    """The rung that runs in place of a kernel, which may be the kernel itself, and its function, or the error
    if no rung can be built."""

    kernel: Kernel
    outcome: Outcome


def spill_bytes(kernel: Kernel) -> int | None:
    """The bytes that each thread of a kernel spills, as a pack, a cache or the table of shipped verdicts has
    them; None if none of these has."""
    found = chain(
        (pack.spill_bytes(kernel) for pack in packs()),
        (cache.spill_bytes(kernel) for cache in existing_caches()),
    )
    known = next((each for each in found if each is not None), None)
    if known is None and kernel.edited is None and (verdict := shipped_verdict(kernel.plan)) is not None:
        return verdict.spill_bytes
    return known


def is_asked_for(kernel: Kernel) -> bool:
    """Whether a person asks for a kernel: one that a person has edited, or whose rowvecs are hoisted on
    request. No other kernel runs in its place, which would hide what the user wants to try."""
    return kernel.edited is not None or kernel.plan.tile.rowvecs is Rowvecs.REGISTER_HOIST


def ladder_of(kernel: Kernel) -> Iterator[Kernel]:
    """Yields a kernel and its further rungs. One that a person asks for has none."""
    yield kernel  # the others are planned only for a kernel that spills
    if not is_asked_for(kernel):
        yield from map(Kernel.found, rungs(kernel.plan)[1:])


def standing(kernel: Kernel, failed: Collection[Kernel] = ()) -> Kernel:
    """The rung that runs in place of a kernel, as far as is known: the first one that is not known to spill,
    or, of those that were compiled, the one that spills least. The kernel itself if no rung was compiled.
    `failed` are further kernels that can't be compiled."""
    compiled: dict[Kernel, int] = {}
    for rung in ladder_of(kernel):
        if rung in _failed or rung in failed:
            continue
        spilled = spill_bytes(rung)
        if not spilled:
            return rung
        compiled[rung] = spilled
    return min(compiled, key=compiled.__getitem__, default=kernel)


def load_standing(kernels: Iterable[Kernel]) -> dict[Kernel, Obtained]:
    """Loads the rungs of those of `kernels` that this process, a pack or a cache has; nothing is compiled."""
    rung_of = {kernel: standing(kernel) for kernel in kernels}
    loaded = load_known(rung_of.values())
    return {kernel: Obtained(rung, loaded[rung]) for kernel, rung in rung_of.items() if rung in loaded}


def begin_standing(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Begins to build the rungs that run in place of `kernels` while the program goes on: the next one after
    each that spills or can't be compiled. `obtain_standing` waits for them. Returns those of `kernels` whose
    rung was missing."""
    missing = [kernel for kernel in dict.fromkeys(kernels) if not is_at_hand(standing(kernel))]
    if missing:
        warn_of_packs(missing)
    for kernel in missing:
        _begin(kernel, {})
    return missing


def begin_alone(kernels: Iterable[Kernel]) -> None:
    """Begins to build `kernels` while the program goes on, and none in place of one that spills or can't be
    compiled."""
    for kernel in kernels:
        begin(kernel, partial(note, kernel))


def note(kernel: Kernel, outcome: Outcome | Exception | None) -> None:
    """Records that a kernel can't be compiled, if that is the outcome of its build. It is not built again."""
    if isinstance(outcome, BuildError):
        _failed.add(kernel)


def stands(kernel: Kernel) -> bool:
    """Whether a kernel is not known to spill, and not known to be one that can't be compiled."""
    return kernel not in _failed and not spill_bytes(kernel)


def _begin(kernel: Kernel, ended: Mapping[Kernel, Exception | None]) -> None:
    """Begins to build the rung that runs in place of a kernel, unless its build `ended`, with an error or
    None. It may be missing nevertheless: what was built may be gone from the cache."""
    failed = [rung for rung, error in ended.items() if isinstance(error, BuildError)]
    rung = standing(kernel, failed)

    def then(error: Exception | None) -> None:
        if error is None or isinstance(error, BuildError):
            _begin(kernel, {**ended, rung: error})

    if rung not in ended and not is_at_hand(rung):
        begin(rung, then)


def _due(kernel: Kernel) -> list[Kernel]:
    """The rung that runs in place of a kernel, as far as is known, and those before it that were begun."""
    rung = standing(kernel)
    return [*filter(is_begun, takewhile(rung.__ne__, ladder_of(kernel))), rung]


def obtain_standing(kernels: Iterable[Kernel]) -> dict[Kernel, Obtained]:
    """The rung that runs in place of each of `kernels`, which is built if necessary, as `obtain` does."""
    asked = list(dict.fromkeys(kernels))
    outcomes: dict[Kernel, Outcome] = {}
    while missing := [rung for rung in dict.fromkeys(chain(*map(_due, asked))) if rung not in outcomes]:
        outcomes |= obtain(missing)
        _failed.update(rung for rung in missing if isinstance(outcomes[rung], BuildError))
        if failed := sum(isinstance(outcomes[rung], Exception) for rung in missing):
            count("builds_failed", failed)
    found = {kernel: Obtained(rung := standing(kernel), outcomes[rung]) for kernel in asked}
    for kernel, each in found.items():
        if not isinstance(each.outcome, Exception):
            _tell(kernel, each.kernel, outcomes)
    return found


def _tell(kernel: Kernel, rung: Kernel, outcomes: Mapping[Kernel, Outcome]) -> None:
    """Counts a kernel in whose place another rung runs, and names those that could not be built. Counts and
    names a kernel that spills on each of its rungs."""
    if rung != kernel:
        count("lower_rungs")
    for each in takewhile(rung.__ne__, ladder_of(kernel)):
        if isinstance(error := outcomes.get(each), BuildError):
            message = f"cute_backend: {error}; tile {rung.plan.tile.name} runs in its place."
            warn_once(("failed", str(error)), message)
    if spilled := spill_bytes(rung):
        count("kernels_spilled")
        others = ", ".join(each.plan.tile.name for each in ladder_of(kernel) if each != rung)
        instead = f", which is the least of what it and the tiles {others} spill" if others else ""
        warn_once(
            ("spilled", rung),
            f"cute_backend: {rung.name} in tile {rung.plan.tile.name} spills {spilled} bytes a thread"
            f"{instead}.",
        )
