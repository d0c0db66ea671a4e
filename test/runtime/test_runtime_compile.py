"""Source to machine code without a GPU: what is compiled, for which layouts, and what is reported of it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_backend.errors import BuildError
from cute_backend.planning import Alignment, Arch
from cute_backend.runtime.compiling import compile as compiling
from cute_backend.runtime.kernels import host_code
from cute_backend.runtime.kernels.cubin import resources
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.source import text_of
from cute_backend.runtime.kernels.toolkit import cuda_major
from cute_backend.spec import Major, Order
from support.archs import COMPILED, FIRST
from support.compile_once import afresh as compile_kernel
from support.runtime.handmade import kernel_of, make_spec, source


def compile_text(
    text: str, folder: Path, alignment: Alignment = Alignment.TMA, arch: Arch = Arch.SM90A
) -> compiling.Built:
    kernel = kernel_of(make_spec(), alignment=alignment, arch=arch)
    path = folder / f"{kernel.name}.py"
    path.write_text(text)
    return compile_kernel(kernel, text, path)


@pytest.mark.parametrize("arch", COMPILED)
def test_a_kernel_compiles_for_each_architecture(arch: Arch, tmp_path: Path) -> None:
    built = compile_text(source(make_spec()), tmp_path, arch=arch)
    assert f".target {arch.value}" in built.ptx
    assert built.cubin[:4] == b"\x7fELF"
    assert 16 <= built.registers <= 255
    assert built.spill_bytes == 0
    assert built.smem_bytes == 0


def test_a_kernel_of_sm_80_compiles_for_a_later_gpu(tmp_path: Path) -> None:
    kernel, text = kernel_of(make_spec(), arch=Arch.SM80), source(make_spec())
    path = tmp_path / f"{kernel.name}.py"
    path.write_text(text)
    built = compiling.compile_for(Arch.SM90A, kernel, text, path)
    assert ".target sm_90a" in built.ptx and built.cubin[:4] == b"\x7fELF"


def test_host_code_is_not_loaded_where_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The DSL would load it, and compile it once more for that, if it could run here."""
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.cutlass_dsl import CuTeDSL

    asked: list[object] = []
    monkeypatch.setattr(CuTeDSL, "_runtime_can_run_compiled", lambda *archs: asked.append(archs) or True)
    monkeypatch.setattr(Compiler, "jit", lambda *how: pytest.fail("it is loaded"))
    assert compile_text(source(make_spec()), tmp_path).host_object[:4] == b"\x7fELF"
    assert asked, "the DSL decides so elsewhere"


def test_the_cuda_13_library_is_used_where_both_are_installed(tmp_path: Path) -> None:
    built = compile_text(source(make_spec()), tmp_path)
    from cutlass.base_dsl.version_info import CUDA_VERSION

    assert CUDA_VERSION.major == cuda_major() == 13
    assert "Cuda compilation tools, release 13." in built.ptx


@pytest.mark.parametrize("alignment", list(Alignment))
def test_operands_are_compiled_for_the_layouts_that_the_spec_states(alignment: Alignment) -> None:
    fakes = compiling.fake_operands(
        kernel_of(make_spec(order=Order.COLUMN, b_major=Major.MN), alignment=alignment).plan
    )
    assert list(fakes) == ["a", "b", "scalar0", "rowvec0", "colvec0", "exact0", "out0"]
    m, k = fakes["a"].shape
    n = fakes["b"].shape[1]
    assert len({id(m), id(n), id(k)}) == 3
    assert [[id(size) for size in fake.shape] for fake in fakes.values() if len(fake.shape) == 2] == [
        [id(m), id(k)],
        [id(k), id(n)],
        [id(m), id(n)],
        [id(m), id(n)],
    ]
    pitches = {
        name: (fake.stride.index(1), max(fake.stride, key=lambda s: s != 1), fake._assumed_align)
        for name, fake in fakes.items()
        if len(fake.shape) == 2
    }
    units = {name: unit for name, (unit, _, _) in pitches.items()}
    assert units == {"a": 1, "b": 1, "exact0": 1, "out0": 0}
    always, when_tma = (8, 16), (8, 16) if alignment is Alignment.TMA else (1, 2)
    promised = {name: (pitch.divisibility, align) for name, (_, pitch, align) in pitches.items()}
    assert promised == {"a": always, "b": always, "exact0": when_tma, "out0": when_tma}
    assert all(pitch.width == 64 for _, pitch, _ in pitches.values())
    assert fakes["scalar0"].shape == (1,) and fakes["rowvec0"].stride == (1,)
    assert fakes["colvec0"].stride[0].width == 64  # stride class OTHER: it arrives at launch


def test_dynamic_shared_memory_comes_from_the_launch(tmp_path: Path) -> None:
    assert compile_text(source(make_spec(), smem_bytes=100 * 1024), tmp_path).smem_bytes == 100 * 1024


@pytest.mark.parametrize("arch", COMPILED)
def test_what_the_system_keeps_of_shared_memory_is_not_the_kernels(arch: Arch, tmp_path: Path) -> None:
    allocating = source(make_spec()).replace(
        "value = acc",
        "scratch = cutlass.memory.SmemAllocator().allocate_array(Float32, 128)\n"
        "        scratch[thread] = acc\n"
        "        value = scratch[thread]",
    )
    assert compile_text(allocating, tmp_path, arch=arch).smem_bytes == 128 * 4


def test_static_figures_come_from_the_cubin(tmp_path: Path) -> None:
    indexed = source(make_spec()).replace(
        "value = acc",
        "scratch = cute.make_rmem_tensor(64, Float32)\n"
        "        for i in cutlass.range(64):\n"
        "            scratch[i] = acc + i\n"
        "        value = scratch[row % 64] + acc",
    )
    built = compile_text(indexed, tmp_path)
    assert built.spill_bytes >= 256  # an array indexed at run time lives in local memory
    assert resources(built.cubin).frame_bytes == built.spill_bytes


WIDE = re.compile(r"%[yz]mm\d+")
"""Registers of AVX and AVX-512, which no CPU of the baseline has."""


def disassembled(code: bytes, folder: Path) -> str:
    path = folder / "code.o"
    path.write_bytes(code)
    return subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 baselines")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="reads machine code with objdump")
def test_host_code_is_for_the_stated_baseline_not_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = disassembled(compile_text(source(make_spec()), tmp_path).host_object, tmp_path)
    assert "__tvm_ffi_gemm_epilogue" in baseline and "%xmm0" in baseline
    assert not WIDE.search(baseline) and not re.search(r"\tv(mov|xor|broadcast)\w+", baseline)
    monkeypatch.setattr(host_code, "host_cpu", lambda: "x86-64-v4")
    monkeypatch.setattr(host_code, "host_features", lambda: ("avx512f", "avx512vl"))
    assert WIDE.search(disassembled(compile_text(source(make_spec()), tmp_path).host_object, tmp_path))


def test_an_error_in_the_source_is_a_build_error_that_names_the_kernel(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cute_mm_\w+ does not compile: NameError: .*no_such_name") as error:
        compile_text(source(make_spec()) + "\nno_such_name\n", tmp_path)
    assert "\x1b" not in str(error.value)


def test_a_lack_of_memory_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So its process ends with an error that is none of a worker's, and the kernel is tried again."""

    def without_memory(*_: object) -> None:
        bytearray(1 << 60)

    monkeypatch.setattr(compiling, "_compile", without_memory)
    with pytest.raises(MemoryError):
        compile_text(source(make_spec()), tmp_path)


def test_an_interrupt_in_a_callback_of_mlir_stays_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLIR makes a RuntimeError of what its callbacks raise, and so of an interrupt between them and it."""
    from cutlass._mlir import ir

    def interrupted(*_: object) -> None:
        def visit(op: object) -> None:
            raise KeyboardInterrupt

        with ir.Context(), ir.Location.unknown():
            ir.Module.parse("module {}").operation.walk(visit)

    monkeypatch.setattr(compiling, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_text(source(make_spec()), tmp_path)


@pytest.mark.exhaustive
def test_threads_that_build_different_kernels_name_each_by_its_own(tmp_path: Path) -> None:
    kernels = [kernel_of(make_spec(exact=False), arch=arch) for arch in FIRST]

    def names(kernel: Kernel) -> list[str]:
        path = tmp_path / f"{kernel.name}.py"
        path.write_text(text_of(kernel))
        return re.findall(r"\.entry (\w+)\(", compile_kernel(kernel, path.read_text(), path).ptx)

    with ThreadPoolExecutor(len(kernels)) as pool:
        assert list(pool.map(names, kernels)) == [[f"{kernel.entry}_cutlass_0"] for kernel in kernels]


def test_arguments_that_are_not_the_specs_are_refused(tmp_path: Path) -> None:
    text = source(make_spec()).replace("rowvec0", "row")
    with pytest.raises(
        BuildError, match=r"launch takes \(a, b, scalar0, row, .* where the spec says .* rowvec0"
    ):
        compile_text(text, tmp_path)


@pytest.mark.parametrize("garbage", [b"", b"not an ELF file", b"\x7fELF\x02\x01" + bytes(58)])
def test_what_is_no_cubin_is_refused(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="cubin"):
        resources(garbage)
