"""Runs a command. Nothing is imported before the command is known, and torch only by commands that use it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from cute_backend.errors import BuildError, UnavailableError, UsageError
from cute_backend.runtime.host import progress
from cute_backend.variables import of_settings

_HOMES = {
    "explain": "command.commands:explain",
    "source": "command.commands:source",
    "build": "command.commands:build",
    "simulate": "command.commands:simulate",
    "bench": "command.commands:bench",
    "aot": "command.commands:aot",
    "cache": "command.cache_command:main",
    "fuzz": "fuzz.command:main",
    "doctor": "command.doctor:main",
}
"""The function of each command, which takes the parsed arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command that is named. Returns the exit status: 1 for a faulty kernel or result, 130 where
    `fuzz` was interrupted. Raises UsageError."""
    try:
        with _plain_warnings():
            with progress.starting():
                command = _function(_HOMES[arguments.command])
                if of_settings():
                    import_module("cute_backend.config")  # checks them
            return command(arguments) or 0
    except (BuildError, UnavailableError) as error:
        raise UsageError(str(error)) from error


def _function(home: str) -> Callable[[argparse.Namespace], int | None]:
    module, _, name = home.partition(":")
    found: Callable[[argparse.Namespace], int | None] = getattr(import_module(f"cute_backend.{module}"), name)
    return found


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows warnings of this package as one line, without the place in the package that issues them."""
    shown = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = str(message)
        if text.startswith("cute_backend: "):
            return f"{text}\n"
        return shown(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = shown
