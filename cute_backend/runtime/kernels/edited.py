"""Modules of kernels that a person has edited.

CUTE_BACKEND_SOURCES names a folder. A module in it, under the name that `file_name` gives, is compiled in
place of the one that would be generated. Its text is part of the key of the kernel, and is read once, when
the key is made. So caches, workers and packs never confuse an edited kernel with the generated one. The
module is code that will run, so it and the folder must be trusted (`trust`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cute_backend.errors import UsageError
from cute_backend.runtime.host.trust import UntrustedError, check_folder, read_trusted
from cute_backend.variables import SOURCES_VARIABLE

if TYPE_CHECKING:
    from cute_backend.planning import Plan

_MAX_SOURCE = 8 << 20
"""The most bytes of a module: hundreds of times more than any generated one has."""


def file_name(plan: Plan) -> str:
    """The file name of a kernel's edited module: its architecture, tile and alignment, and a digest of its
    spec."""
    return f"{plan.arch.value}_{plan.tile.name}_{plan.alignment.value}_{plan.spec.key}.py"


def edited_folder() -> Path | None:
    """The folder of edited modules, if the variable names one. Raises UsageError if it can't be used."""
    named = os.environ.get(SOURCES_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser().absolute()
    try:
        check_folder(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{SOURCES_VARIABLE} is {named}, and {folder} is not a folder") from error
    except OSError as error:
        raise UsageError(f"{SOURCES_VARIABLE} is {named}, which can't be read: {error.strerror}") from error
    except UntrustedError as error:
        raise UsageError(f"{SOURCES_VARIABLE} is {named}, which can't be trusted: {error}") from error
    return folder


def edited_text(plan: Plan) -> str | None:
    """The edited module of a kernel, if there is one.

    Raises UsageError if the file is not text in UTF-8, or is not trusted.
    """
    folder = edited_folder()
    if folder is None:
        return None
    path = folder / file_name(plan)
    try:
        content = read_trusted(path, _MAX_SOURCE).decode()
        return content.replace("\r\n", "\n").replace("\r", "\n")  # as Python itself reads a module
    except FileNotFoundError:
        return None
    except UntrustedError as error:
        raise UsageError(f"{path} can't be trusted: {error}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
