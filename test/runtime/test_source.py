"""Modules that a person has edited: written by the command line, compiled, run, and reported."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.__main__ import main
from cute_backend.api import explain
from cute_backend.errors import BuildError, UsageError
from cute_backend.fx_walk.epilogue_pass import tuning_is_on
from cute_backend.planning import Arch
from cute_backend.runtime.calls.spec_kernels import SpecKernels
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.compiling.rungs import Obtained
from cute_backend.runtime.disk.cache import CACHE_DIR_VARIABLE, caches
from cute_backend.runtime.kernels.edited import file_name
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.source import text_of
from cute_backend.simulator.simulate import Machine, run
from cute_backend.variables import SOURCES_VARIABLE
from support.runtime.other_users import OTHER

PROGRAM = """
import torch
def product(a, b):
    return (a @ b).relu() * {factor}, (a @ b.flip(0)).neg()
def example_inputs():
    return torch.ones(64, 64, dtype=torch.bfloat16), torch.eye(64, dtype=torch.bfloat16)
"""
EYE = torch.eye(64, dtype=torch.bfloat16)


def kernel(factor: float) -> Kernel:
    """The kernel of a program, whose spec is another for each factor."""
    return explain(lambda a, b: (a @ b).relu() * factor, EYE, EYE, arch="sm_90a").first_region().kernel()


def edit(folder: Path, of: Kernel, old: str, new: str) -> Path:
    path = folder / file_name(of.plan)
    text = path.read_text() if path.exists() else text_of(of)
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where edited modules are found."""
    monkeypatch.setenv(SOURCES_VARIABLE, str(tmp_path))
    return tmp_path


def test_what_runs_is_the_module_as_it_was_last_saved(folder):
    def simulated() -> torch.Tensor:
        return run(lambda a, b: (a @ b).relu() * 3.0, (EYE, EYE), Machine(Arch.SM90A)).outputs

    assert torch.equal(simulated(), EYE * 3)
    path = edit(folder, kernel(3.0), "* 3.0\n", "* 5.0\n")
    with pytest.warns(RuntimeWarning, match=f"{path.name} is used .*edited"):
        assert torch.equal(simulated(), EYE * 5)
    edit(folder, kernel(3.0), "* 5.0\n", "* 6.0\n")
    assert torch.equal(simulated(), EYE * 6)
    path.unlink()
    assert torch.equal(simulated(), EYE * 3)


def test_only_a_kernel_that_is_found_reads_files_and_the_environment(folder, monkeypatch):
    original = kernel(7.0)
    path = edit(folder, original, "* 7.0\n", "* 7.5\n")
    assert Kernel(original.plan) == original and original.edited is None
    assert Kernel.found(original.plan).edited == path.read_text()
    monkeypatch.setenv(SOURCES_VARIABLE, str(path))
    assert Kernel(original.plan) == original
    with pytest.raises(UsageError, match="is not a folder"):
        Kernel.found(original.plan)


def test_no_kernel_is_cached_under_the_name_of_another(folder, tmp_path_factory, monkeypatch):
    """Though the file changes between the moment when a kernel is spoken of and when it is built."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    original = kernel(4.0)
    path = edit(folder, original, "* 4.0\n", "* 4.5\n")
    first = kernel(4.0)
    edit(folder, original, "* 4.5\n", "* 4.75\n")
    second = kernel(4.0)
    path.unlink()
    assert len({original.name, first.name, second.name}) == 3 and kernel(4.0) == original
    outcomes = obtain([original, first, second])
    assert all(map(callable, outcomes.values()))
    (cache,) = caches()
    for each, factor in ((original, "4.0"), (first, "4.5"), (second, "4.75")):
        assert f"* {factor}\n" in (cache.root / f"{each.name}.py").read_text()
    assert main(["cache", "verify"]) == 0


def test_a_process_that_loads_one_counts_it(folder):
    edit(folder, kernel(6.0), "* 6.0\n", "* 6.5\n")
    before = counters["cute_backend"]["kernels_edited"]
    with pytest.warns(RuntimeWarning, match="edited"):
        (outcome,) = obtain([kernel(6.0)]).values()
    assert callable(outcome) and counters["cute_backend"]["kernels_edited"] == before + 1


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("TileConfig(Arch.SM90A, 64, 64", "TileConfig(Arch.SM90A, 64, 32", "64x32.*, its kernel of 64x64"),
        (
            "Stages(ab=12",
            "Stages(ab=13",
            r"Stages\(ab=13, .* take \d+ bytes of shared memory, and a CTA has 232448",
        ),
        ("* 7.0\n", "* nothing\n", "nothing"),
        ("class Epilogue:", "class Epilogue", "SyntaxError"),
    ],
)
def test_one_that_can_not_serve_is_told_of_by_its_name(folder, old, new, complaint):
    path = edit(folder, kernel(7.0), old, new)
    (outcome,) = obtain([kernel(7.0)]).values()
    assert isinstance(outcome, BuildError)
    assert re.search(complaint, str(outcome)) and f"({path.name} was edited)" in str(outcome)
    with pytest.raises(BuildError, match="was edited"):
        SpecKernels.add(object.__new__(SpecKernels), kernel(7.0), Obtained(kernel(7.0), outcome))


def test_what_is_no_folder_or_no_text_is_refused(folder, monkeypatch):
    of = kernel(8.0)
    (folder / file_name(of.plan)).write_bytes(b"\xff")
    with pytest.raises(UsageError, match=f"{of.plan.spec.key}.py can't be read"):
        kernel(8.0)
    monkeypatch.setenv(SOURCES_VARIABLE, str(folder / "absent"))
    with pytest.raises(UsageError, match=f"{folder}/absent is not a folder"):
        kernel(8.0)


def test_a_folder_or_a_module_that_is_not_to_be_trusted_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    of = kernel(8.5)
    monkeypatch.setenv(SOURCES_VARIABLE, str(folder))
    path = folder / file_name(of.plan)
    path.write_text("edited")
    assert kernel(8.5).edited == "edited"
    for place in (path, folder, folder.parent):
        mode = place.stat().st_mode
        place.chmod(0o777)
        with pytest.raises(UsageError, match=f"can't be trusted: others may write {place} .mode 777"):
            kernel(8.5)
        place.chmod(mode)
    if os.geteuid() == 0:
        for place in (path, folder, folder.parent):
            os.chown(place, OTHER, OTHER)
            with pytest.raises(UsageError, match=f"can't be trusted: {place} belongs to user {OTHER}"):
                kernel(8.5)
            os.chown(place, 0, 0)


def test_nothing_is_tuned_or_packed_with_edited_modules(folder, tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(factor=2.0))
    with config.patch(max_autotune=True):
        assert not tuning_is_on()
    assert main(["aot", str(program), "-o", str(tmp_path / "x.cutepack")]) == 2
    assert SOURCES_VARIABLE in capsys.readouterr().err


@pytest.mark.settings(shared_launches=False)
def test_the_command_writes_a_region_where_it_is_found(tmp_path, monkeypatch, capsys):
    program, folder = tmp_path / "program.py", tmp_path / "edited"
    program.write_text(PROGRAM.format(factor=9.0))
    command = ["source", str(program), "--arch", "sm_90a", "-o", str(folder)]
    assert main(command) == 0
    (path,) = folder.iterdir()
    assert capsys.readouterr().out == f"{path}\n"
    path.write_text(path.read_text().replace("* 9.0\n", "* 9.5\n"))
    monkeypatch.setenv(SOURCES_VARIABLE, str(folder))
    assert main(command[:-2]) == 0
    assert "* 9.5\n" in capsys.readouterr().out
    assert main(command) == 2
    assert f"{path} exists already, and is not overwritten" in capsys.readouterr().err
    assert main([*command, "--region", "1"]) == 0
    second = Path(capsys.readouterr().out.strip())
    assert second.parent == folder and second != path and '"""out0 = bf16(-acc)' in second.read_text()
    assert main([*command, "--region", "2"]) == 2
    assert capsys.readouterr().err == "cute_backend: there is no region 2; the last is 1\n"
    path.write_text("")
    assert main([*command[:-1], str(path)]) == 2
    assert f"{path}" in capsys.readouterr().err
