"""The counters and the warnings of the runtime, which report every fallback."""

from __future__ import annotations

import warnings
from collections.abc import Hashable

_warned: set[Hashable] = set()


def count(event: str, amount: int = 1) -> None:
    """Adds `amount` to an event of `torch._dynamo.utils.counters["cute_backend"]`."""
    from torch._dynamo.utils import counters

    counters["cute_backend"][event] += amount


def warn_once(about: Hashable, message: str) -> None:
    """Warns once in a process for each value of `about`."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
