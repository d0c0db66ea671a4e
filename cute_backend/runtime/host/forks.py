"""Locks after a fork: the child inherits locks that other threads of the parent hold, and nobody would
release them."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import TypeVar

_Lock = TypeVar("_Lock")


def free_in_children(lock: _Lock) -> _Lock:
    """Makes a lock of a module that is free in a forked child, even if another thread of the parent holds it.

    The data that such a lock guards must be consistent after every single step, since a fork may come after
    any of them.
    """
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def _free_properties() -> None:
    """Frees the locks of this package's cached properties in a child; before Python 3.12 each of them has a
    lock."""
    for name, module in list(sys.modules.items()):
        if name.startswith("cute_backend."):
            for each in vars(module).values():
                for value in vars(each).values() if isinstance(each, type) else ():
                    if isinstance(value, cached_property):
                        value.lock._at_fork_reinit()  # type: ignore[attr-defined]


if sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_free_properties)
