"""Starting a compiler leaves no socket and no pipe open, even if it fails."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cute_backend.planning import Arch
from cute_backend.runtime.compiling import workers
from support.runtime import small_server

ARCH = Arch.SM90A


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers without the DSL, whose workers run Python code."""
    workers.end_all()
    monkeypatch.setattr(workers, "command_of", small_server.command_of)
    yield
    workers.end_all()


@pytest.fixture
def left_open() -> Iterator[list[str]]:
    """The sockets and pipes that a test leaves to the garbage collector. It fails if there are any."""
    gc.collect()
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        gc.collect()
    found += [str(each.message) for each in caught if issubclass(each.category, ResourceWarning)]
    assert not found


def refused(*arguments: Any, **how: Any) -> NoReturn:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_where_no_process_can_be_started(
    left_open: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.subprocess, "Popen", refused)
    assert workers.forked(ARCH, [str(tmp_path)], "", 60) is None
    with pytest.raises(PermissionError):
        workers.started(ARCH, [str(tmp_path)], "", 60)


def test_where_a_server_takes_no_more_work(
    left_open: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.socket, "send_fds", refused)
    assert workers.forked(ARCH, [str(tmp_path)], "", 60) is None


def test_where_a_worker_hangs(left_open: list[str], tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        workers.started(ARCH, [str(tmp_path)], "import time; time.sleep(60)", 0.01)
