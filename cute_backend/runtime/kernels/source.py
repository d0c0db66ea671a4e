"""A kernel's module: as it is generated, or as a person has edited it (`edited`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.kernels.edited import file_name
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.variables import SOURCES_VARIABLE


def text_of(kernel: Kernel, lines: Mapping[str, str] = MappingProxyType({})) -> str:
    """The text of the module that is compiled. With `lines`, which `emit` describes, it has comments that
    name lines of the program, for people to read. A module that a person has edited is returned unchanged."""
    if kernel.edited is not None:
        return kernel.edited
    from cute_backend.memory_ops.emit import emit  # here, since a warm start needs no emitter

    return emit(kernel.plan, lines)


def warn_if_edited(kernel: Kernel) -> None:
    """Counts a kernel whose module was edited, and warns once that it is used."""
    if kernel.edited is not None:
        count("kernels_edited")
        name = file_name(kernel.plan)
        message = f"cute_backend: {name} is used as edited in the folder of {SOURCES_VARIABLE}."
        warn_once(("edited", kernel), message)
