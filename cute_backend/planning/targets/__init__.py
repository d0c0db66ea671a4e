"""The architectures that kernels are made for. Each has a file of facts in this folder, and a row here."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from operator import attrgetter

from cute_backend.planning.targets import sm80, sm86, sm89, sm90a, sm100a, sm103a, sm120a, sm121a
from cute_backend.planning.targets.target import (
    Accumulators,
    Cut,
    Demand,
    Shape,
    Target,
    Tiles,
    TileTime,
    Timing,
)

__all__ = ["Accumulators", "Arch", "Cut", "Demand", "Shape", "Target", "TileTime", "Tiles", "Timing"]


class Arch(str, Enum):
    """The targets, by the names that the assembler knows; `target` has all facts about one."""

    _value_: str
    target: Target

    def __new__(cls, target: Target) -> Arch:
        arch = str.__new__(cls, target.name)
        arch._value_, arch.target = target.name, target
        return arch

    SM90A = sm90a.TARGET
    SM100A = sm100a.TARGET
    SM80 = sm80.TARGET
    SM86 = sm86.TARGET
    SM89 = sm89.TARGET
    SM103A = sm103a.TARGET
    SM120A = sm120a.TARGET
    SM121A = sm121a.TARGET

    @staticmethod
    def of_capability(capability: tuple[int, int]) -> Arch | None:
        """The target for a device, or None if there is none."""
        return next((arch for arch in Arch if arch.target.capability == capability), None)

    @staticmethod
    def of_name(name: str) -> Arch | None:
        """The target that the assembler knows by a name, or None if there is none."""
        return next((arch for arch in Arch if arch.value == name), None)

    @staticmethod
    def parse(name: str) -> Arch:
        """The target of the name that a user gives. Raises UsageError for a name for which no kernel is
        generated."""
        found = Arch.of_name(name)
        if found is None:
            from cute_backend.errors import UsageError  # here, since few processes raise it

            raise UsageError(f"arch is {name!r}; kernels are generated for {Arch.listed('and')}")
        return found

    @staticmethod
    def listed(joined: str, of: Callable[[Target], str] = attrgetter("name")) -> str:
        """The strings that `of` returns for all targets, listed for a sentence: `joined` is "and" or "or"."""
        *first, last = (of(arch.target) for arch in Arch)
        return f"{', '.join(first)} {joined} {last}" if first else last
