"""`make demo` on a terminal of 80 columns, and sources and explanations there and in pipes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend import api
from cute_backend.__main__ import main
from cute_backend.presentation.terminal import console

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "llama_mlp.py"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is a terminal of 80 columns."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(text: str) -> str:
    """The text as it stays on a screen: without colours, and without a line that was shown for a while."""
    shown_for_a_while = r"\x1b\[\?25l.*?\x1b\[\?25h\r?(\x1b\[1A\x1b\[2K)*"
    return re.sub(rf"{shown_for_a_while}|\x1b\[[0-9;?]*[A-Za-z]", "", text, flags=re.DOTALL)


@pytest.mark.usefixtures("terminal")
def test_the_demo_is_at_most_sixty_lines_and_says_what_is_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo

    monkeypatch.setattr(demo, "console", console())
    monkeypatch.setattr(demo, "gpu_name", lambda: None)
    figures = SimpleNamespace(registers=232, spill_bytes=0, smem_bytes=227 << 10)
    monkeypatch.setattr(api.ExplainedRegion, "build", lambda self, arch: figures)
    assert demo.main() == 0
    lines = plain(capsys.readouterr().out).splitlines()
    commands = [line for line in lines if " -m cute_backend " in line]  # as long as a path
    assert len(lines) <= 60 and max(len(line) for line in lines if line not in commands) <= 80
    (shown,) = (line for line in lines if line.startswith("Lines "))
    first, last, total = map(int, re.findall(r"\d+", shown))
    with torch.no_grad():
        source = cute_backend.explain(*demo.block(False)).regions[0].source().splitlines()
    visit = source[first - 1 : last]
    assert "def visit(" in visit[0] and "" not in visit and source[last] == "" and total == len(source)
    assert visit == lines[lines.index(visit[0]) :][: len(visit)]
    assert any(re.match(r"replayed on the CPU, .*", line) for line in lines)
    assert len(commands) == 2 and lines[-1] == commands[-1]
    assert commands[-1].endswith("-m cute_backend explain examples/llama_mlp.py:mlp")


@pytest.mark.usefixtures("terminal")
def test_a_terminal_shows_every_character_of_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", f"{PROGRAM}:mlp", "--arch", "sm_100a"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[" in shown and max(map(len, plain(shown).splitlines())) > 80  # the terminal wraps it
    assert plain(shown) == source()


def test_a_pipe_gets_a_module_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", f"{PROGRAM}:mlp", "--arch", "sm_100a"]) == 0
    assert capsys.readouterr().out == source()


def source() -> str:
    sys.path.insert(0, str(PROGRAM.parent))
    import llama_mlp

    with torch.no_grad():
        return cute_backend.generate(llama_mlp.mlp, *llama_mlp.example_inputs(), arch="sm_100a")


@pytest.mark.usefixtures("terminal")
def test_a_terminal_wraps_an_explanation_and_crops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(a: Tensor, b: Tensor, scale_of_the_first_operand: Tensor) -> Tensor:
        y = (a @ b) * scale_of_the_first_operand + torch.exp(a[:, :1]) * 3.14159 + torch.sigmoid(b[0])
        y = y.relu() * y.sigmoid() * y.tanh() * y.exp() * y.cos() * y.sin() * y.sqrt()
        return y.bfloat16().cumsum(-1)

    a = torch.zeros(64, 64, dtype=torch.bfloat16)
    explained = cute_backend.explain(program, a, a.clone(), torch.ones(64, 1), arch="sm_90a")
    (region,) = explained.regions
    assert max(map(len, region.formula.splitlines())) > 80
    for columns in (80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(explained).splitlines()
        assert max(map(len, lines)) <= columns
        folded = "".join("".join(lines).split())
        for text in (region.formula, region.kernel().entry, region.kernel().plan.tile.words):
            assert "".join(text.split()) in folded
        formula = [line for line in lines if set("*+") & set(line)]
        assert len(formula) > 1 and all(line.startswith("    ") for line in formula)
