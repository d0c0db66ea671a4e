"""Locks after a fork: the child inherits those of threads that it does not have, and no one releases them."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import TypeVar

_Lock = TypeVar("_Lock")


def free_in_children(lock: _Lock) -> _Lock:
    """A lock of a module, which a child finds free that is forked while another thread holds it.

    The data that such a lock guards must be consistent after every single step, as the child may begin after
    any.
    """
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def _free_properties() -> None:
    """The same for the cached properties of this package, each of which has a lock before Python 3.12."""
    for name, module in list(sys.modules.items()):
        if name.startswith("cute_backend."):
            for each in vars(module).values():
                for value in vars(each).values() if isinstance(each, type) else ():
                    if isinstance(value, cached_property):
                        value.lock._at_fork_reinit()  # type: ignore[attr-defined]


if sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_free_properties)
