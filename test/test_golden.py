"""The kernels of the shared epilogues, as text that a person has read, and compiled from that text.

A program has a file for the first of its architectures, and for each other one whose text differs in more
than its tile. The tiles of all others are in `tiles.txt`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from cute_backend.api import ExplainedRegion
from cute_backend.runtime.compiling.compile import compile_kernel
from cute_backend.runtime.kernels.source import text_of
from support.epilogues import (
    BLOCKS,
    BLOCKWISE,
    EPILOGUES,
    GROUPED,
    MMA_SCALED,
    SEGMENTS,
    STORED,
    TILED,
)
from support.golden import EXPECTED, assert_expected, assert_unexpected
from support.golden_regions import (
    ARCHS,
    NAMES,
    OTHER_SIZES,
    PROGRAMS,
    file_name,
    the_region,
)
from support.sweeps import EXHAUSTIVE, covering

CASES = [pytest.param(name, arch, id=f"{name}-{arch}") for arch in ARCHS for name in NAMES[arch]]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_region_is_the_whole_program(name, arch):
    region = the_region(name, arch)
    assert {load.name: load.kind for load in region.loads} == PROGRAMS[name].loads
    assert tuple(store.dtype for store in region.stores) == PROGRAMS[name].stores


TABLES = (EPILOGUES, BLOCKWISE, MMA_SCALED, TILED, GROUPED, BLOCKS, SEGMENTS, STORED)


def compiled() -> Iterator[ParameterSet]:
    """Every module. `make test` compiles some, of different architectures and tables of programs; tests of
    simulated kernels compile those of every architecture."""
    kinds = [
        frozenset({arch, *(i for i, table in enumerate(TABLES) if name in table)})
        for name, arch in (case.values for case in CASES)
    ]
    kept = covering(kinds, 6)
    for i, case in enumerate(CASES):
        yield pytest.param(*case.values, id=case.id, marks=() if i in kept else EXHAUSTIVE)


OF_TILE = (
    r"cute_\w+:$",
    r"sm_\d+a?, tile ",
    r"(\d+ accumulators of )?\d+ by \d+,",
    r"gemm = ",
    r"from cute_backend.templates.(sm\d+|block_scaled|partial_sums) import ",
)
"""Lines of a module that name its tile, or the template of its architecture."""


def body(text: str) -> list[str]:
    """The lines of a module that its tile does not decide."""
    return [line for line in text.splitlines() if not any(re.match(each, line) for each in OF_TILE)]


def has_own_text(name: str, arch: str) -> bool:
    """Whether the module differs in more than its tile from that of the program's first architecture."""
    first = next(each for each in ARCHS if name in NAMES[each])
    text, other = (body(text_of(the_region(name, each).kernel())) for each in (arch, first))
    return arch == first or text != other


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_module_is_as_expected(name, arch):
    if has_own_text(name, arch):
        assert_expected(file_name(name, arch), text_of(the_region(name, arch).kernel()))
    else:
        assert_unexpected(file_name(name, arch), "it has the text of another architecture: see tiles.txt")


def test_the_tiles_of_modules_without_a_file_are_as_expected():
    rows = []
    for name, arch in (case.values for case in CASES):
        if not has_own_text(name, arch):
            lines = text_of(the_region(name, arch).kernel()).splitlines()
            rows += [f"{name}, {arch}:", *(f"    {line}" for line in lines if line.startswith("gemm = "))]
    assert_expected("tiles.txt", "\n".join(rows) + "\n")


@pytest.mark.parametrize(("name", "arch"), list(compiled()))
def test_the_module_compiles(name, arch, tmp_path):
    check_module(the_region(name, arch), arch, tmp_path)


@pytest.mark.parametrize("file", OTHER_SIZES)
def test_a_module_of_other_sizes_is_as_expected(file):
    name, arch, problem, shown = OTHER_SIZES[file]
    text = text_of(the_region(name, arch, problem).kernel())
    assert shown in text
    assert_expected(file, text)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("file", OTHER_SIZES)
def test_a_module_of_other_sizes_compiles(file, tmp_path):
    name, arch, problem, _ = OTHER_SIZES[file]
    check_module(the_region(name, arch, problem), arch, tmp_path)


def check_module(region: ExplainedRegion, arch: str, folder: Path) -> None:
    """The text compiles without a spill, and its kernels have their names."""
    path, text = folder / file_name("module", arch), text_of(region.kernel())
    path.write_text(text)
    built = compile_kernel(region.kernel(), text, path)
    assert built.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in built.ptx
    assert built.spill_bytes == 0
    entry = region.kernel().entry
    names = [f"{entry}_cutlass_0", f"{entry}_finish_cutlass_1"][: 2 if region.spec.reductions else 1]
    if region.kernel().plan.tile.sums_in_memory:
        names = [f"{entry}_parts_cutlass_0", f"{entry}_cutlass_1"]
    assert re.findall(r"\.entry (\w+)\(", built.ptx) == names
    assert all(name.encode() in built.cubin and name.encode() in built.host_object for name in names)
    assert f"\n{entry}:\n" in built.source


@pytest.mark.parametrize("path", EXPECTED.glob("*_sm*.py"), ids=lambda path: path.stem)
def test_no_method_binds_a_name_twice(path):
    classes = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    for method in (node for each in classes for node in each.body if isinstance(node, ast.FunctionDef)):
        assigned = [statement.targets for statement in method.body if isinstance(statement, ast.Assign)]
        names = [target.id for targets in assigned for target in targets if isinstance(target, ast.Name)]
        assert len(set(names)) == len(names), (method.name, names)


@pytest.mark.parametrize("path", EXPECTED.glob("*_sm*.py"), ids=lambda path: path.stem)
def test_values_are_numbered_in_the_order_of_their_statements(path):
    numbers = [int(number) for number in re.findall(r"^ {8,16}t(\d+) = ", path.read_text(), re.MULTILINE)]
    assert numbers == list(range(len(numbers)))


def test_every_expected_module_has_an_epilogue():
    expected = {file_name(name, arch) for arch in ARCHS for name in NAMES[arch]} | OTHER_SIZES.keys()
    assert {path.name for path in EXPECTED.glob("*_sm*.py")} <= expected
