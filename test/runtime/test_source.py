"""Modules that a person has edited: written by the command line, compiled, run, and told of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from cute_backend.__main__ import main
from cute_backend.api import explain
from cute_backend.runtime.build import obtain
from cute_backend.runtime.kernel import BuildError, Kernel
from cute_backend.runtime.source import SOURCES_VARIABLE, file_name, text_of
from cute_backend.simulator.api import Machine, run
from cute_backend.templates.config import Arch

PROGRAM = """
import torch
def product(a, b):
    return (a @ b).relu() * {factor}, (a @ b.flip(0)).neg()
def example_inputs():
    return torch.ones(64, 64, dtype=torch.bfloat16), torch.eye(64, dtype=torch.bfloat16)
"""
EYE = torch.eye(64, dtype=torch.bfloat16)


def kernel(factor: float) -> Kernel:
    """A kernel that no other test of this process asks for: names are remembered."""
    return explain(lambda a, b: (a @ b).relu() * factor, EYE, EYE, arch="sm_90a").first_region().kernel()


def edit(folder: Path, of: Kernel, old: str, new: str) -> Path:
    path = folder / file_name(of)
    text = text_of(of)
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return path


def test_an_edited_module_is_what_runs(tmp_path, monkeypatch):
    edit(tmp_path, kernel(3.0), "* 3.0\n", "* 5.0\n")
    monkeypatch.setenv(SOURCES_VARIABLE, str(tmp_path))
    simulation = run(lambda a, b: (a @ b).relu() * 3.0, (EYE, EYE), Machine(Arch.SM90A))
    assert torch.equal(simulation.outputs, EYE * 5)


def test_an_edited_kernel_has_a_name_of_its_own(tmp_path, monkeypatch):
    before = kernel(4.0).name
    path = edit(tmp_path, kernel(4.0), "* 4.0\n", "* 4.5\n")
    assert kernel(4.0).name == before
    monkeypatch.setenv(SOURCES_VARIABLE, str(tmp_path))
    first = kernel(4.0).name
    assert first != before
    path.write_text(path.read_text().replace("4.5", "4.75"))
    assert kernel(4.0).name not in (before, first)
    path.unlink()
    assert kernel(4.0).name == before


def test_a_process_that_loads_one_is_told(tmp_path, monkeypatch):
    path = edit(tmp_path, kernel(6.0), "* 6.0\n", "* 6.5\n")
    monkeypatch.setenv(SOURCES_VARIABLE, str(tmp_path))
    before = counters["cute_backend"]["kernels_edited"]
    edited = kernel(6.0)
    with pytest.warns(RuntimeWarning, match=f"{path} is used in place of what is generated"):
        (outcome,) = obtain([edited]).values()
    assert callable(outcome) and counters["cute_backend"]["kernels_edited"] == before + 1


def test_a_module_of_another_tile_is_refused(tmp_path, monkeypatch):
    edit(tmp_path, kernel(7.0), "TileConfig(Arch.SM90A, 64, 64", "TileConfig(Arch.SM90A, 64, 128")
    monkeypatch.setenv(SOURCES_VARIABLE, str(tmp_path))
    (outcome,) = obtain([kernel(7.0)]).values()
    assert isinstance(outcome, BuildError)
    assert "has TileConfig(Arch.SM90A, 64, 128" in str(outcome)
    assert "its kernel is of TileConfig(Arch.SM90A, 64, 64" in str(outcome)


def test_the_command_writes_a_region_where_it_is_found(tmp_path, monkeypatch, capsys):
    program, folder = tmp_path / "program.py", tmp_path / "edited"
    program.write_text(PROGRAM.format(factor=8.0))
    command = ["source", str(program), "--arch", "sm_90a", "-o", str(folder)]
    assert main(command) == 0
    (path,) = folder.iterdir()
    assert capsys.readouterr().out == f"{path}\n"
    path.write_text(path.read_text().replace("* 8.0\n", "* 9.0\n"))
    monkeypatch.setenv(SOURCES_VARIABLE, str(folder))
    assert main(command[:-2]) == 0
    assert "* 9.0\n" in capsys.readouterr().out
    assert main(command) == 2
    assert capsys.readouterr().err == f"cute_backend: {path} is there already, and is not overwritten\n"
    assert main([*command, "--region", "1"]) == 0
    second = Path(capsys.readouterr().out.strip())
    assert second.parent == folder and second != path and '"""out0 = bf16(-acc)' in second.read_text()
    assert main([*command, "--region", "2"]) == 2
    assert capsys.readouterr().err == "cute_backend: there is no region 2; the last is 1\n"
