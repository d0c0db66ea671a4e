"""The kernels of the shared epilogues, as text that a person has read, and compiled from that text."""

import re

import pytest
import torch
import torch.nn.functional as F
from epilogues import BLOCKWISE, EPILOGUES, Problem
from golden import EXPECTED, assert_expected
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend.api import Region
from cute_backend.planning import Arch
from cute_backend.runtime.compile import compile_kernel

ARCHS = ("sm_90a", "sm_100a", "sm_80")
PROGRAMS = EPILOGUES | BLOCKWISE
NAMES = {arch: [name for name in EPILOGUES if EPILOGUES[name].runs_on(Arch.of_name(arch))] for arch in ARCHS}
NAMES["sm_90a"] += BLOCKWISE
CASES = [pytest.param(name, arch, id=f"{name}-{arch}") for arch in ARCHS for name in NAMES[arch]]


SMALL = {"rowwise_few_rows_sm90a.py": ("rowwise", "sm_90a", Problem(16, 1024, 8192), "register_hoist")}
"""Modules of other sizes, by file, and what each is there to show: without ping-pong, as where K is split,
sm_90a hoists rowvecs."""


LARGE = Problem(4096, 4096, 4096)


def the_region(name: str, arch: str, problem: Problem = LARGE) -> Region:
    """The one region of an epilogue."""
    epilogue = PROGRAMS[name]
    with FakeTensorMode():
        inputs = epilogue.inputs(problem)
    explained = cute_backend.explain(epilogue.fn, *inputs, arch=arch)
    assert not explained.rejections
    (region,) = explained.regions
    return region


def file_name(name: str, arch: str) -> str:
    return f"{name}_{arch.replace('_', '')}.py"


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_region_is_the_whole_program(name, arch):
    region = the_region(name, arch)
    assert {load.name: load.kind for load in region.loads} == PROGRAMS[name].loads
    assert tuple(store.dtype for store in region.stores) == PROGRAMS[name].stores


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_module_is_as_expected_and_compiles(name, arch):
    check_module(file_name(name, arch), the_region(name, arch), arch)


@pytest.mark.parametrize("file", SMALL)
def test_a_module_of_other_sizes_is_as_expected_and_compiles(file):
    name, arch, problem, shown = SMALL[file]
    region = the_region(name, arch, problem)
    assert shown in region.source()
    check_module(file, region, arch)


def check_module(file: str, region: Region, arch: str) -> None:
    """The text is the file's, compiles without a spill, and its kernels have their names."""
    path = assert_expected(file, region.source())
    built = compile_kernel(region.kernel(), path.read_text(), path)
    assert built.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in built.ptx
    assert built.spill_bytes == 0
    entry = region.kernel().entry
    names = [f"{entry}_cutlass_0", f"{entry}_finish_cutlass_1"][: 2 if region.spec.reductions else 1]
    assert re.findall(r"\.entry (\w+)\(", built.ptx) == names
    assert all(name.encode() in built.cubin and name.encode() in built.host_object for name in names)
    assert f"\n{entry}:\n" in built.source


def experts(x: Tensor, gate_up: Tensor, ends: Tensor) -> Tensor:
    gate, up = F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    return F.silu(gate) * up


GROUPED = {file_name("grouped", arch): arch for arch in ("sm_90a", "sm_100a")}
"""Modules of a product whose groups of rows only the device knows, by file."""


@pytest.mark.parametrize("file", GROUPED)
def test_a_module_of_groups_is_as_expected_and_compiles(file):
    with FakeTensorMode():
        x, gate_up = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4096, 2048), (128, 1536, 2048)))
        explained = cute_backend.explain(
            experts, x, gate_up, torch.empty(128, dtype=torch.int32), arch=GROUPED[file]
        )
    (region,) = explained.regions
    check_module(file, region, GROUPED[file])


def test_every_expected_module_has_an_epilogue():
    expected = (
        {file_name(name, arch) for arch in ARCHS for name in NAMES[arch]} | SMALL.keys() | GROUPED.keys()
    )
    assert {path.name for path in EXPECTED.glob("*_sm*.py")} == expected
