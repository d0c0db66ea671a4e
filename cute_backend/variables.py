"""The environment variables of this package: CUTE_BACKEND_ and a setting's name, and three that are no
settings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches

PREFIX = "CUTE_BACKEND_"

CACHE_DIR_VARIABLE = "CUTE_BACKEND_CACHE_DIR"
PACK_VARIABLE = "CUTE_BACKEND_PACK"
SOURCES_VARIABLE = "CUTE_BACKEND_SOURCES"

_NO_SETTINGS = (CACHE_DIR_VARIABLE, PACK_VARIABLE, SOURCES_VARIABLE)


def variable_of(setting: str) -> str:
    """The variable of a setting."""
    return PREFIX + setting.upper()


def of_settings() -> list[str]:
    """The variables in the environment that are, or should be, those of settings."""
    return [name for name in os.environ if name.startswith(PREFIX) and name not in _NO_SETTINGS]


def misspelt(settings: Iterable[str]) -> list[str]:
    """A sentence for each variable in the environment that has our prefix, and that nothing here reads."""
    known = {name.removeprefix(PREFIX): name for name in (*map(variable_of, settings), *_NO_SETTINGS)}
    found = []
    for name in of_settings():
        if name not in known.values():
            near = get_close_matches(name.removeprefix(PREFIX).upper(), known, n=1)
            meant = f" (did you mean {known[near[0]]!r}?)" if near else ""
            found.append(f"{name} is set in the environment, and cute_backend has no such setting{meant}")
    return found
