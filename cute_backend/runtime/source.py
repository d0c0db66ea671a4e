"""A kernel's module: as it is generated, or as a person has edited it.

CUTE_BACKEND_SOURCES names a folder. A module in it, under the name that `file_name` gives, is compiled in
place of the one that would be generated. Its text is part of the kernel, read once when the kernel is first
spoken of: so no cache, worker or pack takes one for the other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .notices import count, warn_once

if TYPE_CHECKING:
    from ..planning import TileConfig, Variant
    from ..spec import EpilogueSpec
    from .kernel import Kernel

SOURCES_VARIABLE = "CUTE_BACKEND_SOURCES"


def file_name(spec: EpilogueSpec, config: TileConfig, variant: Variant) -> str:
    """What an edited module of a kernel is called: its architecture, tile and alignment, and a digest of its
    spec."""
    return f"{config.arch.value}_{config.name}_{variant.value}_{spec.key}.py"


def edited_folder() -> Path | None:
    """The folder of edited modules, if there is to be one. Raises UsageError where it is no folder."""
    named = os.environ.get(SOURCES_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser().absolute()
    if not folder.is_dir():
        raise _refusal(f"{SOURCES_VARIABLE} is {named}, and {folder} is no folder")
    return folder


def edited_text(spec: EpilogueSpec, config: TileConfig, variant: Variant) -> str | None:
    """The edited module of a kernel, if there is one. Raises UsageError for what is no text in UTF-8."""
    folder = edited_folder()
    if folder is None:
        return None
    path = folder / file_name(spec, config, variant)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(f"{path} can't be read: {error}") from error


def _refusal(message: str) -> Exception:
    from ..errors import UsageError  # here, for a process that launches kernels raises none

    return UsageError(message)


def text_of(kernel: Kernel) -> str:
    """The module that is compiled."""
    if kernel.edited is not None:
        return kernel.edited
    from ..memory_ops.emit import emit  # here, for a warm start has no need of the emitter

    return emit(kernel.spec, kernel.config, kernel.variant)


def tell_if_edited(kernel: Kernel) -> None:
    """Count and warn of a kernel whose module was edited."""
    if kernel.edited is not None:
        count("kernels_edited")
        name = file_name(kernel.spec, kernel.config, kernel.variant)
        warn_once(("edited", kernel), f"cute_backend: {name} is used as {SOURCES_VARIABLE} has it, edited.")
