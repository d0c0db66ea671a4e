"""The wheel: what is in it, and that it works from another folder, where the repository is not."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from support.page_commands import PROGRAM, commands

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing of it stays in the repository; without a network."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "cute_backend", source / "cute_backend", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", out, source], check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel]
    subprocess.run(pip, check=True, capture_output=True)
    return folder


def test_the_wheel_carries_all_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in (ROOT / "cute_backend").rglob("*") if path.suffix in (".py", ".c", ".typed"))
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    assert "cute_backend/py.typed" in names and "cute_backend/templates/sm100.py" in names
    assert not [name for name in names if not name.startswith(("cute_backend/", "cute_backend-"))]


@pytest.mark.exhaustive
def test_the_wheel_works_where_the_repository_is_not(site, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ROOT / "examples" / "small_linear.py", elsewhere)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
        ).stdout

    where = """
import cute_backend, importlib.metadata, torch
print(cute_backend.__file__, importlib.metadata.distribution("cute_backend").locate_file(""))
print("cute" in torch.compiler.list_backends())
"""
    assert run("-c", where).split() == [str(site / "cute_backend" / "__init__.py"), str(site), "True"]
    assert "exact0   residual         exact   tma" in run("-m", "cute_backend", "explain", "small_linear.py")
    assert "class Epilogue:" in run("-m", "cute_backend", "source", "small_linear.py", "--arch", "sm_90a")
    script = str(site / "bin" / "cute_backend")
    assert run(script, "--version") == run("-m", "cute_backend", "--version")
    assert run(script, "explain", "small_linear.py").startswith("1 region fused\n")


QUICK = ("explain", "source", "cache", "bench")

SHORTER = {"fuzz": ["--count", "3"], "aot": ["--m", "16:16"]}
"""Options that come after those of a page, and win."""

RUNS = """
import json, sys
from cute_backend.__main__ import main
print(json.dumps([main(argv) for argv in json.loads(sys.argv[1])]), file=sys.stderr)
"""


def page_commands() -> list[list[str]]:
    """The arguments of each command that the pages show, but for those that need a change of the package, a
    GPU or a reader's file that they do not describe."""
    found = []
    for _, line in commands():
        argv = shlex.split(line.rpartition(PROGRAM)[2])
        needs = [word for word in argv if re.match(r"docs/changes/|sm_110a$|FILE\.py|cuda$", word)]
        argv += SHORTER.get(argv[0], [])
        if not needs and argv not in found:
            found.append(argv)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="bench would time kernels on the GPU")
@pytest.mark.exhaustive
@pytest.mark.parametrize("quick", [True, False])
def test_the_commands_of_the_pages_run_as_installed(quick, site, tmp_path):
    """In a checkout without the package, in the order of the pages."""
    for folder in ("examples", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "examples" / "llama_mlp.py", tmp_path / "model.py")
    chosen = [argv for argv in page_commands() if (argv[0] in QUICK) is quick]
    assert len(chosen) >= 10
    environment = {**os.environ, "PYTHONPATH": str(site), "CUTE_BACKEND_CACHE_DIR": str(tmp_path / "kernels")}
    command = [sys.executable, "-c", RUNS, json.dumps(chosen)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *refused, statuses = done.stderr.splitlines()
    expected = {  # nothing was compiled where a kernel is asked for
        shlex.join(argv): 2 if argv[0] == "bench" and "--draw" not in argv else 0 for argv in chosen
    }
    assert dict(zip(expected, json.loads(statuses), strict=True)) == expected
    assert len(refused) == list(expected.values()).count(2)
    assert all(line.startswith("cute_backend: bench ") for line in refused)
    made = {"report.html", "edited"} if quick else {"timeline.png", "model.cutepack"}
    assert made <= {path.name for path in tmp_path.iterdir()}
