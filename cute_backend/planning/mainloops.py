"""Selects the mainloop of a kernel from a table of all."""

from __future__ import annotations

from cute_backend.planning.converting import Converting
from cute_backend.planning.mainloop import Mainloop
from cute_backend.planning.mma_scales import MmaScaled
from cute_backend.planning.promoting import Promoted
from cute_backend.planning.sum_scales import SumsInRegisters, SumsInTensorMemory
from cute_backend.planning.targets import Target
from cute_backend.spec import EpilogueSpec

MAINLOOPS = (Converting, MmaScaled, SumsInTensorMemory, SumsInRegisters, Promoted, Mainloop)
"""The first that serves a product is its mainloop."""


def mainloop_of(spec: EpilogueSpec, target: Target) -> Mainloop:
    """The mainloop of a spec: the one of the template's own, too, where a target can't serve the spec
    (`served.unserved`)."""
    product = spec.product
    return next(each for each in MAINLOOPS if each.serves(product, target))(spec, target)
