"""Functions that run as another user, for tests that run as root, as continuous integration does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OTHER = 54321
"""A user whom no machine has."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others, and runs as them")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of root's that everybody can enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def run_as(user: int, what: Callable[[], object]) -> str:
    """The result of a function, or the text of its exception, in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            told = str(what())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told
