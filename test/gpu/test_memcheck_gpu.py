"""No kernel of the table touches memory that is not its own, as compute-sanitizer sees it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.memcheck import PARTS
from support.sweeps import EXHAUSTIVE

pytestmark = pytest.mark.gpu

TEST = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "support.memcheck"]


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of the CUDA toolkit"
)
@pytest.mark.parametrize("part", [pytest.param(part, marks=EXHAUSTIVE if part else ()) for part in PARTS])
def test_memcheck_finds_nothing(part: int) -> None:
    """A third of the tiles in ten minutes beside the tuner's tests; the others are for a change of
    templates."""
    program = [*PROGRAM, str(part)]
    subprocess.run([*program, "build"], check=True, cwd=TEST)
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TEST)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
