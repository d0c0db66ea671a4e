"""Regions that come with generated code from Inductor's cache, where the pass does not run.

Generated code that calls the op reports its regions when it is loaded. Code that this process has just
generated was counted by the pass; all other code comes from a cache: Inductor's own on disk, or artifacts of
`torch.compiler.load_cache_artifacts`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence

from cute_backend.runtime.host.notices import count

log = logging.getLogger(__name__)

_generated: Counter[str] = Counter()
"""Graphs that this process has generated code for, until that code is loaded."""


def graph_name(parts: Sequence[str]) -> str:
    """A name for a graph, made of its own and of the specs of its regions: the same in every process."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def expect(graph: str) -> None:
    """Records that code for `graph` was generated here, so that its first loading does not count as
    cached."""
    _generated[graph] += 1


def loaded(graph: str, regions: int) -> None:
    """Counts and logs the regions of generated code that comes from a cache. Generated code calls this."""
    if _generated[graph]:
        _generated[graph] -= 1
        return
    count("cached_regions", regions)
    log.info("%d fused region%s, from Inductor's cache", regions, "" if regions == 1 else "s")
