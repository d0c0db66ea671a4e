"""The kernels of the shared epilogues, as text that a person has read, and compiled from that text."""

import ast
import re
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from cute_backend.api import Region
from cute_backend.runtime.compiling.compile import compile_kernel
from cute_backend.runtime.kernels.source import text_of
from support.golden import EXPECTED, assert_expected
from support.golden_regions import ARCHS, NAMES, OTHER_SIZES, PROGRAMS, file_name, the_region
from support.sweeps import EXHAUSTIVE

CASES = [pytest.param(name, arch, id=f"{name}-{arch}") for arch in ARCHS for name in NAMES[arch]]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_region_is_the_whole_program(name, arch):
    region = the_region(name, arch)
    assert {load.name: load.kind for load in region.loads} == PROGRAMS[name].loads
    assert tuple(store.dtype for store in region.stores) == PROGRAMS[name].stores


def compiled() -> Iterator[ParameterSet]:
    """Every module. Of a program `make test` compiles one, for its architectures in rotation, and of every
    architecture at least one."""
    seen = set()
    for i, name in enumerate(PROGRAMS):
        archs = [arch for arch in ARCHS if name in NAMES[arch]]
        for arch in archs:
            kept = arch == archs[i % len(archs)] or arch not in seen
            seen.add(arch)
            yield pytest.param(name, arch, id=f"{name}-{arch}", marks=() if kept else EXHAUSTIVE)


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_module_is_as_expected(name, arch):
    assert_expected(file_name(name, arch), text_of(the_region(name, arch).kernel()))


@pytest.mark.parametrize(("name", "arch"), list(compiled()))
def test_the_module_compiles(name, arch):
    check_module(file_name(name, arch), the_region(name, arch), arch)


@pytest.mark.parametrize("file", OTHER_SIZES)
def test_a_module_of_other_sizes_is_as_expected_and_compiles(file):
    name, arch, problem, shown = OTHER_SIZES[file]
    region = the_region(name, arch, problem)
    assert shown in text_of(region.kernel())
    check_module(file, region, arch)


def check_module(file: str, region: Region, arch: str) -> None:
    """The text is the file's, compiles without a spill, and its kernels have their names."""
    path = assert_expected(file, text_of(region.kernel()))
    built = compile_kernel(region.kernel(), path.read_text(), path)
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
    assert {path.name for path in EXPECTED.glob("*_sm*.py")} == expected
