"""A kernel's module: as it is generated, or as a person has edited it.

CUTE_BACKEND_SOURCES names a folder. A module in it, under the name that `file_name` gives, is compiled in
place of the one that would be generated, wherever its kernel is asked for. The text is part of the kernel's
name, so that neither is taken for the other; it is read when a process first asks for the kernel.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .kernel import Kernel

SOURCES_VARIABLE = "CUTE_BACKEND_SOURCES"

_TILE = re.compile(r"TileConfig\(Arch\.[^)]*\)")


def file_name(kernel: Kernel) -> str:
    """What an edited module of a kernel is called: its architecture, tile and alignment, and a digest of its
    spec."""
    return f"{kernel.arch.value}_{kernel.config.name}_{kernel.variant.value}_{kernel.spec.key}.py"


def edited_file(kernel: Kernel) -> Path | None:
    """The edited module of a kernel, if there is one."""
    folder = os.environ.get(SOURCES_VARIABLE)
    if not folder:
        return None
    path = Path(folder).expanduser() / file_name(kernel)
    return path if path.is_file() else None


def text_of(kernel: Kernel) -> str:
    """The module that is compiled. Raises UsageError where an edited one is of another tile: what a launch
    allocates, and how many clusters it starts, follow from the kernel's."""
    from ..memory_ops.emit import emit  # here, for a warm start has no need of the emitter

    generated = emit(kernel.spec, kernel.config, kernel.variant)
    path = edited_file(kernel)
    if path is None:
        return generated
    text = path.read_text()
    (tile,) = _TILE.findall(generated)
    found = _TILE.findall(text)
    if found != [tile]:
        raise UsageError(f"{path} has {' and '.join(found) or 'no TileConfig'}; its kernel is of {tile}")
    return text
