"""The effects of importing and installing the package."""

import subprocess
import sys
from importlib.metadata import entry_points
from importlib.resources import files

import pytest

import cute_backend


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_brings_the_op_and_the_pass_but_not_cutlass():
    code = """
import sys, cute_backend, torch
assert torch.ops.cute_backend.gemm_epilogue.default
assert callable(cute_backend.epilogue_pass)
print([name for name in ("cutlass", "torch._inductor.compile_fx", "rich") if name in sys.modules])
"""
    assert run_python(code) == "[]"


def test_import_brings_nothing_that_finding_a_kernel_does_not_need():
    code = """
import sys, cute_backend
names = ("memory_ops.emit", "runtime.compiling.compile", "replay", "ops", "fx_walk", "presentation")
print([name for name in names if f"cute_backend.{name}" in sys.modules])
print([name for name in ("filelock", "platformdirs") if name in sys.modules])
"""
    assert run_python(code).splitlines() == ["[]", "[]"]


def test_the_backend_is_found_without_an_import():
    code = "import torch; print('cute' in torch.compiler.list_backends())"
    assert run_python(code) == "True"
    (entry,) = entry_points(group="torch_dynamo_backends", name="cute")
    # The second until an editable installation is made anew; test_threads has what the sources declare.
    assert entry.value in ("cute_backend.registration:registered", "cute_backend.backend:cute")


def test_public_names_resolve():
    for name in cute_backend.__all__:
        assert getattr(cute_backend, name) is not None
        assert name in dir(cute_backend)
    with pytest.raises(AttributeError, match="no attribute 'explane'"):
        cute_backend.explane  # noqa: B018


def test_the_package_ships_its_type_marker():
    assert files("cute_backend").joinpath("py.typed").is_file()
