"""No kernel of the table touches memory that is not its own, as compute-sanitizer sees it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TEST = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "support.memcheck"]


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of the CUDA toolkit"
)
def test_memcheck_finds_nothing() -> None:
    subprocess.run([*PROGRAM, "build"], check=True, cwd=TEST)
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TEST)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
