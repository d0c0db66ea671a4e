"""Imports point downwards: the layers as the diagrams draw them are those of the import statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cute_backend"

LAYERS = ("fx_walk", "runtime", "memory_ops", "templates", "planning", "spec")
"""From the top. What is in none of them is either above all, or among `MEANING` or `LEAVES`."""

MEANING = ("signature", "ops", "numerics", "replay", "reduce", "caches", "formula", "philox")
"""Modules that define the meaning of an epilogue: beside `spec`, and above it."""

LEAVES = ("config", "options", "errors", "variables", "tracing", "__version__")
"""Of use anywhere; they import one another alone."""

HEIGHT = {name: height for height, name in enumerate((*LAYERS[:-1], "ops", "spec"))}
HEIGHT |= dict.fromkeys(MEANING, HEIGHT["ops"]) | dict.fromkeys(LEAVES, len(HEIGHT))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The line of each import in a file of the package, and the part of the package that it reaches for."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            targets = [f"{base}.{each.name}" for each in node.names]
        else:
            continue
        for target in targets:
            first, *rest = target.split(".")
            if first == "cute_backend" and rest:
                yield node.lineno, rest[0]


def part_of(path: Path) -> str:
    """The folder or module of the package that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("part", HEIGHT)
def test_a_layer_imports_what_is_below_it_alone(part: str) -> None:
    files = [path for path in PACKAGE.rglob("*.py") if part_of(path) == part]
    assert files or part == "__version__"
    upwards = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for path in files
        for line, target in imported(path)
        if target != part and HEIGHT.get(target, -1) < HEIGHT[part]
    ]
    assert not upwards


def test_planning_and_the_walker_import_no_cutlass() -> None:
    for path in PACKAGE.rglob("*.py"):
        if part_of(path) in ("fx_walk", "planning", *MEANING, "spec"):
            assert not re.search(r"^\s*(import|from) cutlass\b", path.read_text(), re.M), path


@pytest.mark.parametrize("page", ["docs/code.md", "CONTRIBUTING.md"])
def test_the_diagram_is_the_order_of_imports(page: str) -> None:
    blocks = (ROOT / page).read_text().split("```")[1::2]
    (diagram,) = (block for block in blocks if "fx_walk/" in block)
    drawn = (re.search(rf"\b({'|'.join(LAYERS)})(?:/|\.py)", line) for line in diagram.split("\n"))
    assert [match[1] for match in drawn if match] == list(LAYERS)


@pytest.mark.parametrize(
    "folder",
    ["fx_walk", "runtime", "memory_ops", "templates", "planning", "spec", "simulator", "bench", "fuzz"],
)
def test_a_folder_names_its_modules_by_subject(folder: str) -> None:
    """The docstring of a folder's `__init__` lists its modules in groups; a new one is added to its group."""
    listed = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
    modules = [path.stem for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"]
    assert modules and not [name for name in modules if f"`{name}`" not in listed]


def test_tests_import_their_helpers_alone() -> None:
    """A test module imports no other test module, and what tests share is in test/support."""
    for path in (ROOT / "test").rglob("*.py"):
        if "expected" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.rpartition(".")[2].startswith("test_") for name in names), path
    files = [path for path in (ROOT / "test").rglob("*.py") if not {"support", "expected"} & {*path.parts}]
    helpers = {path.name for path in files if not path.name.startswith("test_")}
    assert helpers == {"conftest.py", "compare_kernels.py", "record_graphs.py", "record_hardware.py"}


@pytest.mark.parametrize("folder", ["fx_walk", "runtime"])
def test_every_file_of_a_large_folder_is_in_one_group(folder: str) -> None:
    groups = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
    listed = [name for line in groups.split("\n- ")[1:] for name in re.findall(r"`(\w+)`", line)]
    assert sorted(listed) == sorted(path.stem for path in (PACKAGE / folder).glob("[!_]*.py"))
