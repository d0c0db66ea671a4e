"""Which mainloop a kernel has: a row for each that is not its template's plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..planning import TileConfig
from ..planning.registers import is_promoted
from ..spec import EpilogueSpec


@dataclass(frozen=True)
class Mainloop:
    """A class of the templates, by its module and name, and which kernels have it."""

    module: str
    name: str
    serves: Callable[[TileConfig, EpilogueSpec], bool]


MAINLOOPS = (Mainloop("cute_backend.templates.mainloop", "Sm90Promoted", is_promoted),)
"""The first row that serves a kernel is its mainloop."""


def mainloop(spec: EpilogueSpec, config: TileConfig) -> Mainloop | None:
    """The mainloop that a kernel is given, or None where its template's own serves."""
    return next((row for row in MAINLOOPS if row.serves(config, spec)), None)
