"""Processes of our own: what they import, and that none of it lies in the current folder.

A small package in the place of the real one, with the real `interpreter` and `start`, makes a process take
milliseconds; one test has the real worker.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cute_backend.planning import Arch
from cute_backend.runtime.compiling import workers
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.host import interpreter
from cute_backend.runtime.host.interpreter import command_of, environment_of

HOST = Path(interpreter.__file__).parent

PYTHON = getattr(sys, "_base_executable", sys.executable)
"""The interpreter of this one's virtual environment, for in one the user's site is off."""

PROBE = """
import sys
def main():
    import json
    from importlib import import_module
    found = {}
    for name in sys.argv[2:]:
        try:
            found[name] = getattr(import_module(name), "__file__", None)
        except ImportError:
            found[name] = None
    found |= {"cute_backend": sys.modules["cute_backend"].__file__, "path": sys.path, "argument": sys.argv[1]}
    print(json.dumps(found))
"""

PARENT = """
import json, os, subprocess, sys
from cute_backend.runtime.host.interpreter import command_of, environment_of
exec(os.environ.get("FIRST", ""))
for name in ("json", "torch", "sitecustomize", "optional"):
    with open(name + ".py", "w") as file:
        file.write("print('planted')")
if not os.path.exists("cute_backend"):
    os.mkdir("cute_backend")
    with open("cute_backend/__init__.py", "w") as file:
        file.write("print('planted')")
done = subprocess.run(
    command_of("cute_backend.probe", "an argument", *os.environ["NAMES"].split()),
    env=environment_of(), cwd=os.environ.get("CWD"), capture_output=True, text=True,
)
print(done.stdout or json.dumps(done.stderr))
"""
"""Imports what it needs, finds the current folder planted with files, and starts a process."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package of the same name, that has `interpreter`, `start` and something to run."""
    home = tmp_path / "installed"
    host = home / "cute_backend" / "runtime" / "host"
    host.mkdir(parents=True)
    for name in ("interpreter.py", "start.py"):
        shutil.copy(HOST / name, host)
    for folder in (host, host.parent):
        (folder / "__init__.py").touch()
    (home / "cute_backend" / "__init__.py").touch()
    (home / "cute_backend" / "probe.py").write_text(PROBE)
    return home


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The current folder of the process that starts another."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def probe(here: Path, *command: str, names: str = "json optional", **variables: str) -> dict[str, Any]:
    """The findings of a process that was started by a process with this command and current folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "PYTHONDONTWRITEBYTECODE": "1", "NAMES": names, **variables}
    done = subprocess.run([PYTHON, *command], cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict), found
    assert found["argument"] == "an argument"
    return found


def tidy(here: Path) -> None:
    """Remove what was planted: the next process that starts another imports before it plants."""
    for name in ("json", "torch", "sitecustomize", "optional"):
        (here / f"{name}.py").unlink()
    shutil.rmtree(here / "cute_backend")


def is_clean(found: dict[str, Any], here: Path) -> bool:
    """Whether Python's own `json` was found, and the folder is nowhere on the path."""
    return found["json"].endswith("/json/__init__.py") and str(here) not in json.dumps(found)


def test_a_script_elsewhere(package: Path, here: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    found = probe(here, str(script), PYTHONPATH=str(package))
    assert is_clean(found, here) and found["cute_backend"].startswith(str(package))
    assert found["optional"] is None


@pytest.mark.parametrize("named", ["{}", ":{}", "{}:", "{}:.", ".:{}"])
def test_empty_and_relative_entries_of_pythonpath(named: str, package: Path, here: Path) -> None:
    found = probe(here, "-c", PARENT, PYTHONPATH=named.format(package))
    assert is_clean(found, here) and found["optional"] is None


def test_a_module_and_a_script_of_the_current_folder(package: Path, here: Path) -> None:
    (here / "parent.py").write_text(PARENT)
    for command in (["-m", "parent"], ["parent.py"], [str(here / "parent.py")]):
        found = probe(here, *command, PYTHONPATH=str(package))
        assert is_clean(found, here) and found["optional"] is None
        tidy(here)


def test_a_current_folder_that_is_another_by_then(package: Path, here: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    change = f"os.chdir({str(here)!r})"
    found = probe(first, "-c", PARENT, PYTHONPATH=f":{package}", FIRST=change)
    assert is_clean(found, here) and found["optional"] is None


def test_a_current_folder_that_is_gone(package: Path, here: Path, tmp_path: Path) -> None:
    code = PARENT[: PARENT.index("for name")] + PARENT[PARENT.index("done =") :]
    gone = f"os.rmdir({str(here)!r})"
    found = probe(here, "-c", code, PYTHONPATH=str(package), FIRST=gone, CWD=str(tmp_path))
    assert found["cute_backend"].startswith(str(package))


def test_the_package_of_the_current_folder(package: Path, tmp_path: Path) -> None:
    """A checkout, or a folder that has all that a program needs: then it is where everything lies."""
    (package / "needed.py").touch()
    for command, variables in (
        (["-c", PARENT], {}),
        (["-c", PARENT], {"PYTHONPATH": "."}),
        (["-c", PARENT], {"PYTHONPATH": str(package)}),
    ):
        names = "needed"
        (package / "json.py").unlink(missing_ok=True)
        found = probe(package, *command, names=names, CWD=str(tmp_path), FIRST=NOT_JSON, **variables)
        assert found["cute_backend"] == str(package / "cute_backend" / "__init__.py")
        assert found["needed"] == str(package / "needed.py")


NOT_JSON = "open = lambda *a: __import__('io').StringIO()"
"""Has the parent plant nothing: what it plants in its package's own folder would be imported."""


def test_a_folder_that_pythonpath_names(package: Path, here: Path) -> None:
    (here / "needed.py").touch()
    found = probe(
        here, "-c", PARENT, names="needed", PYTHONPATH=f"{package}:{here}", FIRST=NOT_JSON, CWD=str(package)
    )
    assert found["needed"] == str(here / "needed.py")


def test_folders_that_the_program_added(package: Path, here: Path, tmp_path: Path) -> None:
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "needed.py").touch()
    add = f"import pathlib; sys.path += [{str(tmp_path / 'added')!r}, 'relative', pathlib.Path('x'), b'y']"
    found = probe(here, "-c", PARENT, names="json needed", PYTHONPATH=str(package), FIRST=add)
    assert found["needed"] == str(tmp_path / "added" / "needed.py")
    assert all(os.path.isabs(entry) for entry in found["path"]) and is_clean(found, here)


@pytest.mark.parametrize("style", ["path", "finder"])
def test_editable_installs_and_the_users_site(style: str, package: Path, here: Path, tmp_path: Path) -> None:
    checkout, base = tmp_path / "checkout", tmp_path / "base"
    checkout.mkdir()
    (checkout / "editable.py").touch()
    site = base / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (site / "of_the_user.py").touch()
    if style == "path":
        (site / "editable.pth").write_text(f"{checkout}\n")
    else:
        (site / "editable.pth").write_text("import finder_of_editable\n")
        (site / "finder_of_editable.py").write_text(
            "import sys\nfrom importlib.util import spec_from_file_location as spec\n"
            "class Finder:\n    def find_spec(name, path=None, target=None):\n"
            f"        return spec(name, {str(checkout / 'editable.py')!r}) if name == 'editable' else None\n"
            "sys.meta_path.append(Finder)\n"
        )
    variables = {"PYTHONPATH": str(package), "PYTHONUSERBASE": str(base)}
    names = "json editable of_the_user optional"
    found = probe(here, "-c", PARENT, names=names, **variables)
    assert found["editable"] == str(checkout / "editable.py")
    assert found["of_the_user"] == str(site / "of_the_user.py")
    assert is_clean(found, here) and found["optional"] is None
    tidy(here)
    found = probe(here, "-s", "-c", PARENT, names=names, **variables)
    assert found["of_the_user"] is None  # as in the process that starts it


@pytest.mark.sweep(1)
@pytest.mark.parametrize("module", [workers.SERVER, workers.WORKER])
def test_the_worker_is_this_package_and_runs_in_the_cache(
    module: str, tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one, forked or started, given nothing to build: it says so with Python's own `json`."""
    marker = tmp_path / "planted"
    for name in ("json.py", "torch.py", "cute_backend/__init__.py", "sitecustomize.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", ":")
    monkeypatch.syspath_prepend("")
    seen: list[dict[str, Any]] = []

    class Watched(subprocess.Popen[str]):
        def __init__(self, command: list[str], **how: Any) -> None:
            seen.append({**how, "command": command})
            super().__init__(command, **how)

    monkeypatch.setattr(workers.subprocess, "Popen", Watched)
    cache = KernelCache(tmp_path / "kernels")
    workers.end_all()
    run = workers.forked if module == workers.SERVER else workers.started
    ended = run(Arch.SM90A, [str(cache.root)], "nothing", 60)
    workers.end_all()
    assert ended is not None and ended.crashed
    assert ended.message.startswith("json.decoder.JSONDecodeError")
    assert not marker.exists()
    (how,) = seen
    assert module in how["command"] and str(here) not in str(how["command"])
    assert how["cwd"] == ("/" if module == workers.SERVER else str(cache.root))
    assert "PYTHONPATH" not in how["env"]


def test_flags_that_keep_things_out_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from cute_backend.runtime.host.interpreter import command_of; print(command_of('m')[1])"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.append({str(HOST.parents[2])!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "-I"
    assert command_of("m")[1] == str(HOST / "start.py")
    monkeypatch.setenv("PYTHONPATH", "/absolute::relative:/other")
    assert environment_of(MORE="1")["PYTHONPATH"] == "/absolute:/other"
    assert environment_of(MORE="1")["MORE"] == "1"
