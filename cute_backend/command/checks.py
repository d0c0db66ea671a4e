"""Checks of a command's arguments that need no torch, whose import takes seconds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cute_backend.errors import UsageError
from cute_backend.planning import Arch


def check(arguments: argparse.Namespace) -> None:
    """Raises UsageError for an argument that can't be met, such as a file that does not exist."""
    for name, value in vars(arguments).items():
        if name in _CHECKS and value is not None:
            _CHECKS[name](value)


def target_of(text: str) -> tuple[Path, str]:
    """The file and the name of `FILE.py[:name]`; without a name, it is empty. Raises UsageError if there is
    no such Python file."""
    file, _, name = text.partition(":")
    path = Path(file)
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file; give FILE.py or FILE.py:name")
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    return path, name


def _check_archs(given: str | Sequence[str]) -> None:
    for name in [given] if isinstance(given, str) else given:
        Arch.parse(name)


def _check_files(targets: Sequence[str]) -> None:
    for target in targets:
        target_of(target)


def _check_page(path: Path) -> None:
    if path.suffix not in (".html", ".htm"):
        raise UsageError(f"a page is written as .html, not as {path.name}")
    _check_folder(path, "page")


def _check_folder(path: Path, what: str) -> None:
    if not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"the folder of the {what}, {path.parent}, does not exist or can't be written to")


def _check_timeline(path: Path) -> None:
    from cute_backend.simulator import timeline  # here, since it imports numpy

    timeline.check(path)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "file": target_of,
    "files": _check_files,
    "arch": _check_archs,
    "html": _check_page,
    "pack": lambda path: _check_folder(path, "pack"),
    "timeline": _check_timeline,
}
"""The check of each argument, by its name."""
