"""Contains errors of this package: a graph is compiled without the part that failed, and the user is warned.

The pass works on a copy of its graph, so a failure there leaves nothing behind. A later failure of a
rewritten graph, in Inductor's lowering or code generation, is contained by `backend="cute"`. The warning
names the package whose code failed, which need not be this one.
"""

from __future__ import annotations

from pathlib import Path
from traceback import walk_tb

import torch
from torch._dynamo.exc import BackendCompilerFailed

from cute_backend import config
from cute_backend.errors import REPORT, BuildError, UsageError
from cute_backend.fx_walk.refusals.reasons import Reason, Rejection
from cute_backend.runtime.host.notices import count, warn_once

_PACKAGE = Path(__file__).parents[2]
_INSTALLED = Path(torch.__file__).parent.parent

UNFUSED = "this graph is compiled as Inductor alone compiles it"


def is_contained(error: Exception) -> bool:
    """Whether a program is compiled in spite of an error.

    It is not compiled if `config.raise_errors` is set, nor after errors that the user has to correct: a
    setting that can't be met, or a module that was edited by hand and can't be built.
    """
    return not (config.raise_errors or isinstance(first_raised(error), (UsageError, BuildError)))


def contain(error: Exception, instead: str = UNFUSED) -> Rejection:
    """Counts an error, and warns of it once for each line that it comes from. Returns its rejection for
    `explain`.

    `instead` says what is done in its place. Raises the error itself where it is not contained.
    """
    if not is_contained(error):
        raise error
    original = first_raised(error)
    failed, where = _place(original)
    text = str(original).strip().splitlines()
    shown = f"{type(original).__name__}{f': {text[0]}' if text else ''}"
    refused = Reason.INTERNAL_ERROR.sentence.format(failed=failed, error=shown, where=where, instead=instead)
    count(Reason.INTERNAL_ERROR.value)
    warn_once((Reason.INTERNAL_ERROR, where, instead), f"{refused}; {REPORT}")
    return Rejection("graph", Reason.INTERNAL_ERROR, refused)


def first_raised(error: BaseException) -> BaseException:
    """The error that was raised first, under the errors that Inductor has wrapped it in."""
    while True:
        if isinstance(error, BackendCompilerFailed):
            error = error.inner_exception
        elif error.__suppress_context__ and error.__cause__ is None and error.__context__ is not None:
            error = error.__context__
        else:
            return error


def _place(error: BaseException) -> tuple[str, str]:
    """The name of what failed, and its line: this package and its innermost line in an error's traceback, as
    "fx_walk/products/anchors.py:12". If there is none, the package of the innermost line of all, or its file
    if it is in no installed package."""
    lines = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    lines = lines[1:] or lines  # without the place that contains it
    ours = [(path.relative_to(_PACKAGE), line) for path, line in lines if path.is_relative_to(_PACKAGE)]
    if ours or not lines:
        path, line = ours[-1] if ours else (Path("an unknown line"), 0)
        return _PACKAGE.name, f"{path}:{line}"
    path, line = lines[-1]
    path = path.relative_to(_INSTALLED) if path.is_relative_to(_INSTALLED) else Path(path.name)
    return path.parts[0], f"{path}:{line}, in a graph that {_PACKAGE.name} has changed,"
