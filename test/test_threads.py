"""Threads that ask for the backend first, all at once: each gets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import cute_backend

ROOT = Path(__file__).parents[1]

EIGHT = """
import threading, torch
ready, failures = threading.Barrier(8), []
def ask(number):
    ready.wait()
    try:
        compiled = torch.compile(lambda x: x + number, backend="cute")
        assert torch.equal(compiled(torch.ones(number)), torch.ones(number) + number)
    except BaseException as error:
        failures.append(repr(error))
threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 10)]
for thread in threads: thread.start()
for thread in threads: thread.join()
from torch._dynamo.backends.registry import lookup_backend
print(failures, lookup_backend("cute").__module__)
"""


eight_compile = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12",
    reason="torch 2.11 ends with a segmentation fault where eight threads compile, by backend='inductor' too",
)

(DECLARED,) = re.findall(r'^cute = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def installed(folder: Path, entry: str = DECLARED) -> Path:
    """An installation's metadata with the entry points of the sources, whatever is installed here."""
    info = folder / f"cute_backend-{cute_backend.__version__}.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\ncute = {entry}\n")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: cute-backend\nVersion: {cute_backend.__version__}\n"
    )
    return folder


def run(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@eight_compile
@pytest.mark.parametrize("first", ["", "import torch; torch.compiler.list_backends()"])
def test_eight_threads_that_ask_first(first: str, tmp_path: Path) -> None:
    assert run(f"{first}\n{EIGHT}", installed(tmp_path)) == "[] cute_backend.backend"


@pytest.mark.exhaustive
@eight_compile
def test_one_line_before_the_threads_where_an_older_installation_is(tmp_path: Path) -> None:
    older = installed(tmp_path, "cute_backend.backend:cute")
    assert run(f"import cute_backend.registration\n{EIGHT}", older) == "[] cute_backend.backend"


@pytest.mark.exhaustive
def test_what_the_entry_point_names_registers_once_and_is_nothing_itself(tmp_path: Path) -> None:
    code = """
from importlib.metadata import entry_points
from torch._dynamo.backends import registry
(entry,) = entry_points(group="torch_dynamo_backends", name="cute")
print(entry.value, entry.load(), entry.load(), registry.lookup_backend("cute").__name__)
print("cute" in registry.list_backends(exclude_tags=()))
"""
    assert run(code, installed(tmp_path)).split() == [
        "cute_backend.registration:registered",
        "None",
        "None",
        "cute",
        "True",
    ]
