"""The exceptions of the public functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REPORT = "please report it, with the output of `python -m cute_backend doctor`"
"""The end of a message about a defect of this package."""


class UsageError(ValueError):
    """A request that cannot be met: one sentence with what was given and what is accepted.

    The command line prints it and exits with status 2.
    """


class SpecError(ValueError):
    """A spec contradicts itself; the message names the facts that contradict."""


class UnavailableError(RuntimeError):
    """No kernel can be built or loaded on this machine; the message says what is missing."""


class BuildError(RuntimeError):
    """A kernel could not be built; the message names the kernel and the compiler's complaint."""


def meant(name: str, known: Iterable[str]) -> str:
    """The known name that is most similar to `name`, as a question; empty if none is similar."""
    from difflib import get_close_matches  # here, since every process imports this module

    close = get_close_matches(name, [*known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest(name: str, known: Iterable[str], count: int) -> str:
    """The `count` known names that are most similar to `name`, separated by commas."""
    from difflib import get_close_matches

    return ", ".join(get_close_matches(name, [*known], n=count, cutoff=0))


def check_function(fn: Any) -> None:
    """Raises UsageError unless `fn` is a function or an instance of a module."""
    if isinstance(fn, type):
        raise UsageError(f"{fn.__name__} is a class; give an instance of it, such as {fn.__name__}(...)")
    if not callable(fn):
        raise UsageError(f"the first argument is of type {type(fn).__name__}, not a function or a module")


def root_cause(error: BaseException) -> BaseException:
    """The exception that was raised first. Dynamo wraps a program's exceptions in its own."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error
