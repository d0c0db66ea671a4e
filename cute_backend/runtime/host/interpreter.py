"""Python processes of our own: they import what this process imports, and nothing from the current folder.

`python -m` and `python -c` look into the current folder first, where a file of another user may have the name
of a package or of a module of Python's library. Python 3.11 has `-P` against it. On 3.10 there is `-I`, which
drops PYTHONPATH and the user's site as well. So `start` is run by its path, is given the search path, and
imports nothing before it has set it. The search path consists of the absolute entries of this process's own.
Empty and relative entries are left out, and so is the current folder, unless

- this package itself is there (as for a program that runs in a checkout),
- PYTHONPATH names it as an absolute path, or
- it is a folder of Python's own library or of installed packages.

The environment's PYTHONPATH, which Python's start-up reads, also keeps only its absolute entries. The process
runs in a folder that the caller names, so that an empty entry of LD_LIBRARY_PATH does not name a folder of
others either. Packages that were installed in editable mode are still found, since Python's start-up reads
their `.pth` files.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

_INIT = Path(os.path.abspath(__file__)).parents[2] / "__init__.py"


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that runs `main` of a module of this package, with these arguments in `sys.argv`. Raises
    OSError if there is no interpreter to run, as in a program that embeds Python or was frozen."""
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would run itself again
        raise OSError("sys.executable names no interpreter")
    start = Path(__file__).with_name("start.py")
    path = search_path()
    passed = [str(_INIT), module, str(len(path)), *path, *arguments]
    return [sys.executable, *_flags(), os.path.abspath(start), *passed]


def environment_of(**changes: str) -> dict[str, str]:
    """This process's environment for another one, with changes."""
    environment = {**os.environ, **changes}
    named = _named_by_environment()
    if named:
        environment["PYTHONPATH"] = os.pathsep.join(named)
    else:
        environment.pop("PYTHONPATH", None)
    return environment


def search_path() -> list[str]:
    """The search path of the process, without the current folder except in the cases above."""
    kept = _kept_folders()
    path = []
    for entry in sys.path:
        if not isinstance(entry, str):
            continue  # Python skips it too
        if not os.path.isabs(entry):
            # A relative entry names another folder whenever the process changes its own.
            home = str(_INIT.parent.parent)
            if _is_same(entry or os.curdir, home):
                path.append(home)
        elif not _is_same(entry, os.curdir) or any(_is_same(entry, folder) for folder in kept):
            path.append(entry)
    return path


def _kept_folders() -> list[str]:
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [str(_INIT.parent.parent), *_named_by_environment(), *libraries, site.getusersitepackages()]


def _named_by_environment() -> list[str]:
    named = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    return [each for each in named.split(os.pathsep) if os.path.isabs(each)]


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _flags() -> list[str]:
    """The flags of this process that make Python ignore parts of the environment or the user's site."""
    if sys.flags.isolated:
        return ["-I"]
    flags = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site, "-S": sys.flags.no_site}
    return [flag for flag, is_set in flags.items() if is_set]
