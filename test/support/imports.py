"""Which files of the package others import, at any depth."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import cute_backend


def reached_from(paths: Iterable[Path]) -> set[Path]:
    """These files, and those that they import, directly or not."""
    reached, found = set[Path](), set(paths)
    while found:
        reached |= found
        found = {each for path in found for each in imported(path)} - reached
    return reached


def imported(path: Path) -> set[Path]:
    """The files of the package that one imports, anywhere in it, but for type checkers alone."""
    root = Path(cute_backend.__file__).parent
    tree = ast.parse(path.read_text())
    checked = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in checked:
            above = path.relative_to(root.parent).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    files = {root.parent.joinpath(*name.split(".")) for name in names if name.startswith("cute_backend.")}
    return {
        each for file in files for each in (file.with_suffix(".py"), file / "__init__.py") if each.exists()
    }
