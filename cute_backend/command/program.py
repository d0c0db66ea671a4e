"""The program of a command: `FILE.py[:name]` names a function or module, and FILE returns its arguments."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

import torch

from cute_backend.command.checks import target_of
from cute_backend.errors import UsageError, check_function, root_cause

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a function, and its keyword arguments."""


def load(target: str) -> tuple[Callable[..., Any], Callable[[], Inputs]]:
    """The function named by `FILE.py[:name]`, and a function that makes its example inputs.

    Without a name, FILE has to define exactly one function or module beside `example_inputs`; a name that
    starts with an underscore does not count. Raises UsageError otherwise.
    """
    path, name = target_of(target)
    module = _import_file(path)
    inputs = getattr(module, "example_inputs", None)
    if not callable(inputs):
        raise UsageError(
            f"{path} defines no example_inputs(), which has to return the arguments of the function"
        )
    candidates = dict(_candidates(module))
    if not name:
        if len(candidates) != 1:
            found = ", ".join(candidates) or "none"
            raise UsageError(f"{path} defines {found} beside example_inputs; name one function: {path}:name")
        (name,) = candidates
    fn = getattr(module, name, None)
    if not callable(fn):
        raise UsageError(f"{path} defines no function {name!r}; it defines {', '.join(candidates) or 'none'}")
    check_function(fn)
    return fn, lambda: _call_inputs(path, inputs)


def _import_file(path: Path) -> ModuleType:
    """The module of a file, whose folder is searched for what it imports. If another module has its name, as
    Python's own `random` has that of random.py, the file gets another, and its folder is searched last, so
    that all who import the other module still find it."""
    name, folder = path.stem, str(path.resolve().parent)
    if _is_taken(name, path):
        name = f"program_{name}"
        sys.path.append(folder)
    else:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _without_logs(logging.WARNING), _in_one_sentence(f"{path} cannot be imported", path):
        spec.loader.exec_module(module)
    return module


def _is_taken(name: str, path: Path) -> bool:
    """Whether a module of this name is imported, or would be found, that is not the file's."""
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None) or "built-in"
    elif "." in name or (spec := importlib.util.find_spec(name)) is None or spec.origin is None:
        return False
    else:
        origin = spec.origin
    return Path(origin).resolve() != path.resolve()


def _candidates(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        is_function = inspect.isfunction(value) and value.__module__ == module.__name__
        if (
            (is_function or isinstance(value, torch.nn.Module))
            and not name.startswith("_")
            and name != "example_inputs"
        ):
            yield name, value


def _call_inputs(path: Path, inputs: Callable[[], Any]) -> Inputs:
    with _without_logs(logging.WARNING), _in_one_sentence(f"example_inputs() of {path} failed", path):
        made = inputs()
    match made:
        case [tuple() | list() as args, dict() as kwargs] if all(isinstance(name, str) for name in kwargs):
            return tuple(args), kwargs
        case tuple() | list():
            return tuple(made), {}
    raise UsageError(
        f"example_inputs() of {path} returned a {type(made).__name__}, not a tuple of arguments, nor such a "
        "tuple and a dict of keyword arguments"
    )


@contextlib.contextmanager
def tracing(target: str, gradients: bool = False) -> Iterator[None]:
    """Runs a program on fake tensors, with gradients or without. Reports its errors in one sentence."""
    with (
        _without_logs(logging.ERROR),  # torch logs a traceback of the error that it then raises
        torch.set_grad_enabled(gradients),
        _in_one_sentence(f"{target} cannot be traced on its example inputs", target_of(target)[0]),
    ):
        yield


@contextlib.contextmanager
def _without_logs(level: int) -> Iterator[None]:
    """Runs code of other packages, and suppresses their logs up to a level, unless TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _in_one_sentence(what: str, path: Path) -> Iterator[None]:
    """Runs the user's code, which may raise any exception, or exit. Both are reported in one sentence, with
    the line of the file that raises, or calls what raises."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        root = root_cause(error)
        reason = next(iter(str(root).splitlines()), "no message")
        line = _line_in(path, root) or _line_in(path, error)
        where = f" ({path.name}:{line})" if line else ""
        raise UsageError(f"{what}: {type(root).__name__}: {reason}{where}") from error


def _line_in(path: Path, error: BaseException) -> int | None:
    """The innermost line of a file in an error's traceback, or None if no line of it is there."""
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if Path(frame.f_code.co_filename).resolve() == path.resolve()]
    return lines[-1] if lines else None
