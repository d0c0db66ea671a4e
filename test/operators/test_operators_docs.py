"""The sections of docs/api.md on operators show what the code is and does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ops = pytest.importorskip("cutlass.operators", reason="needs the extra `operators`: nvidia-cutlass-operators")

ROOT = Path(__file__).parents[2]


OURS = "Our kernels as CUTLASS Operators"
ONES_OWN = "Your own kernel as a CUTLASS Operator"


def blocks(heading: str, language: str) -> list[str]:
    page = (ROOT / "docs" / "api.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def test_the_page_on_ones_own_kernel_shows_what_the_example_prints():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "operators_fp64_gemm.py"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    (shown,) = blocks(ONES_OWN, "text")
    assert done.stdout == shown


def test_the_page_on_our_operators_runs_and_refuses_as_it_says(tmp_path, capsys):
    page = tmp_path / "page.py"  # the registry reads an epilogue's source from its file
    page.write_text("\n".join(blocks(OURS, "python")))
    names: dict[str, object] = {}
    exec(compile(page.read_text(), page, "exec"), names)
    (shown,) = blocks(OURS, "text")
    assert capsys.readouterr().out == shown
    for name in ("operators", "large", "pingpong", "promoted"):
        assert names[name], name
