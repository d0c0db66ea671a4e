"""The wheel: what is in it, and that it works from another folder, where the repository is not."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def test_the_wheel_carries_all_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in (ROOT / "cute_backend").rglob("*") if path.suffix in (".py", ".c", ".typed"))
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    assert "cute_backend/py.typed" in names and "cute_backend/templates/sm100.py" in names
    assert not [name for name in names if not name.startswith(("cute_backend/", "cute_backend-"))]


def test_the_wheel_works_where_the_repository_is_not(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ROOT / "examples" / "small_linear.py", elsewhere)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel]
    subprocess.run(pip, check=True, capture_output=True)
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
