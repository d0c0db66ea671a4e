"""Imports point downwards: the layers as the diagrams draw them are those of the import statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from cute_backend.kinds import blocks
from cute_backend.kinds.axes import Order
from cute_backend.kinds.loads import LoadKind
from cute_backend.kinds.reductions import Axis
from cute_backend.planning.mainloops import MAINLOOPS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cute_backend"

LAYERS = ("fx_walk", "runtime", "memory_ops", "templates", "planning", "spec", "kinds")
"""From the top. What is in none of them is either above all, or among `MEANING` or `LEAVES`."""

MEANING = ("signature", "ops", "numerics", "replay", "formula", "philox")
"""Modules that define the meaning of an epilogue: beside `spec`, and above it."""

LEAVES = ("config", "dtypes", "options", "errors", "variables", "tracing", "__version__")
"""Of use anywhere; they import one another alone."""

HEIGHT = {name: height for height, name in enumerate((*LAYERS[:-2], "ops", "spec", "kinds"))}
HEIGHT |= dict.fromkeys(MEANING, HEIGHT["ops"]) | dict.fromkeys(LEAVES, len(HEIGHT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The line of each import in a file of the package, and the part of the package that it reaches for."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes_of(path):
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
        if part_of(path) in ("fx_walk", "planning", *MEANING, "spec", "kinds"):
            assert not re.search(r"^\s*(import|from) cutlass\b", path.read_text(), re.M), path


@pytest.mark.parametrize("page", ["docs/code.md", "CONTRIBUTING.md"])
def test_the_diagram_is_the_order_of_imports(page: str) -> None:
    blocks = (ROOT / page).read_text().split("```")[1::2]
    (diagram,) = (block for block in blocks if "fx_walk/" in block)
    drawn = (re.search(rf"\b({'|'.join(LAYERS)})(?:/|\.py)", line) for line in diagram.split("\n"))
    assert [match[1] for match in drawn if match] == list(LAYERS)


@pytest.mark.parametrize(
    "folder",
    ["memory_ops", "templates", "planning", "spec", "simulator", "bench", "fuzz"],
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
        for node in nodes_of(path):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.rpartition(".")[2].startswith("test_") for name in names), path
    files = [path for path in (ROOT / "test").rglob("*.py") if not {"support", "expected"} & {*path.parts}]
    helpers = {path.name for path in files if not path.name.startswith("test_")}
    assert helpers == {
        "conftest.py",
        "compare_kernels.py",
        "record_graphs.py",
        "record_hardware.py",
        "record_verdicts.py",
    }


ROOMS = ("fx_walk", "runtime")
"""Parts of the package that are folders of folders; their docstrings list these from the top."""


def rooms_of(part: str) -> list[str]:
    docstring = ast.get_docstring(ast.parse((PACKAGE / part / "__init__.py").read_text())) or ""
    return re.findall(r"^- `(\w+)`$", docstring, re.M)


@pytest.mark.parametrize("part", ROOMS)
def test_the_docstring_of_a_part_lists_its_rooms(part: str) -> None:
    folders = {path.parent.name for path in (PACKAGE / part).glob("*/__init__.py")}
    assert sorted(rooms_of(part)) == sorted(folders)
    assert len([*(PACKAGE / part).glob("[!_]*.py")]) <= 12
    page = (ROOT / "docs" / "code.md").read_text()
    for folder in folders:
        belongs = ast.get_docstring(ast.parse((PACKAGE / part / folder / "__init__.py").read_text()))
        assert f"| `{folder}/` | {belongs} |" in page


@pytest.mark.parametrize("part", ROOMS)
def test_a_room_imports_its_own_modules_and_those_below(part: str) -> None:
    """Imports for types count, too."""
    rooms = rooms_of(part)
    upwards = [
        f"{path.relative_to(ROOT)} imports {module}"
        for height, room in enumerate(rooms)
        for path in (PACKAGE / part / room).glob("*.py")
        for module in modules_imported(path)
        if (parts := module.split("."))[1:2] == [part] and (parts[2:3] or [""])[0] not in rooms[height:]
    ]
    assert not upwards


def test_the_search_for_regions_asks_the_planner_and_not_the_runtime() -> None:
    """So what is fused depends on no device and on no result of tuning."""
    rooms = rooms_of("fx_walk")
    searching = [room for room in rooms[rooms.index("search") :] if room != "refusals"]
    assert {"ends", "graph"} <= {*searching}
    found = {
        path: modules_imported(path) for room in searching for path in PACKAGE.glob(f"fx_walk/{room}/*.py")
    }
    assert found
    assert not [path for path, modules in found.items() if any(".runtime." in each for each in modules)]


def test_a_kind_of_members_is_named_in_its_own_files_and_one_tuple() -> None:
    """All else asks members by their protocol. A kind has the files that the file of its finder reaches."""
    room, every = "cute_backend.fx_walk.members.", "cute_backend.fx_walk.members.kinds"
    named = {
        module_at(path): {each for each in modules_imported(path) if each.startswith(room)}
        for path in PACKAGE.rglob("*.py")
    }
    kinds = named.pop(every)
    files = {module for module in named if module.startswith(room)} - {f"{room}__init__"}
    assert not {module: of for module, of in named.items() if module not in files and of - {every}}
    of_kinds = []
    for kind in kinds:
        stack, reached = [kind], set[str]()
        while stack:
            module = stack.pop()
            stack += named[module] - reached
            reached.add(module)
        of_kinds += reached
    assert len(kinds) > 1 and sorted(of_kinds) == sorted(files)


def test_a_kind_of_blocks_is_named_where_programs_spell_it_alone() -> None:
    """All else asks the ops of a spec for their kinds. The walker's members find what programs spell."""
    kinds = {name for name in vars(blocks) if name.isupper()} - {"BLOCK_OPS"}
    assert len(kinds) > 2
    assert {path.rpartition("/")[0] for path in importing(kinds)} == {"fx_walk/members"}


def test_kinds_of_loads_are_named_where_one_is_made_or_placed_alone() -> None:
    """The walker and sampling make loads, and planning places them. All else asks a load for its kind."""
    assert {path.partition("/")[0] for path in naming(LoadKind)} == {"fx_walk", "runtime", "planning"}


def test_axes_of_reductions_are_named_where_one_is_made_alone() -> None:
    """The walker and sampling make reductions. All else asks a reduction for its axis."""
    assert {path.partition("/")[0] for path in naming(Axis)} == {"fx_walk", "runtime"}


def test_forms_of_results_are_named_where_one_is_made_alone() -> None:
    """The walker makes them. All else asks a store for its form."""
    forms = {"Heads", "Cache", "PartOf", "OfBlocks", "TiledScales"}
    walker = {"members/tiled_scales.py", "region/region.py", "replacement/cache_writes.py"}
    found = importing(forms) | naming([Order.TILED])
    outside = {path for path in found if not path.startswith("kinds/")}
    assert outside == {f"fx_walk/{path}" for path in walker}


def test_scales_are_named_where_a_product_gets_or_applies_them_alone() -> None:
    """The walker finds them, mainloops apply them, targets have them. All else asks a product for its own,
    and its mainloop for what a kernel needs."""
    found = importing({"Scaling", "WeightGroups"}) - {"spec/products.py"}
    assert {path.partition("/")[0] for path in found} == {"fx_walk", "kinds", "planning", "templates"}
    planning = {path.partition("/")[2] for path in found if path.startswith("planning/")}
    mainloops = {f"{name}.py" for name in ("block_scaled", "converting", "mma_scales", "sum_scales")}
    assert {path for path in planning if not path.startswith("targets/")} == mainloops


def test_mainloops_are_named_in_their_table_alone() -> None:
    """All other files ask the one of a spec."""
    assert importing({each.__name__ for each in MAINLOOPS} - {"Mainloop"}) == {"planning/mainloops.py"}


def importing(names: set[str]) -> set[str]:
    """The files of the package that import one of these names, except for those that only pass them on."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names}
        if path.name != "__init__.py"
    }


def naming(members: Iterable[Enum]) -> set[str]:
    """The files of the package that name one of these members of an enumeration."""
    names = {f"{type(member).__name__}.{member.name}" for member in members}
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if f"{node.value.id}.{node.attr}" in names
    }


def modules_imported(path: Path, types: bool = True) -> set[str]:
    """The modules of the package that a file imports, with or without those that it needs for types alone."""
    found = set()
    stack: list[ast.AST] = [parsed(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and not types and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        stack += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cute_backend"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if is_module(inner) else node.module or "")
    return found


def module_at(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_no_module_reaches_itself_by_imports_that_run() -> None:
    """`cute_backend` itself is the face of the package, and is imported before all of them."""
    arrows = {
        module_at(path).removesuffix(".__init__"): modules_imported(path, types=False) - {"cute_backend"}
        for path in PACKAGE.rglob("*.py")
    }
    del arrows["cute_backend"]
    order = TopologicalSorter(arrows)
    order.prepare()  # raises CycleError with the modules of a circle


def test_no_handler_does_what_its_try_does() -> None:
    """It would be dead code: what fails is done again, and fails again."""
    folders = ("cute_backend", "test", "benchmarks", "wheels")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    found = 0
    for path in paths:
        if "expected" in path.parts or "except " not in path.read_text():
            continue
        for node in (each for each in nodes_of(path) if isinstance(each, ast.Try)):
            body, *handlers = (ast.dump(ast.Module(each.body, [])) for each in (node, *node.handlers))
            assert body not in handlers, f"{path}:{node.lineno}"
            found += 1
    assert found


@pytest.mark.parametrize("page", sorted([*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]), ids=str)
def test_pages_name_files_that_exist(page: Path) -> None:
    """In backquotes, with a folder: `fx_walk/search/walk.py` is relative to the package or to the project."""
    named = re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+\.(?:py|md|csv))`", page.read_text())
    assert not [name for name in named if not any((root / name).is_file() for root in (PACKAGE, ROOT))]
