"""The host side alone: real host code runs, and a recorder stands where the simulated machine would."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_backend.errors import UnavailableError
from cute_backend.simulator import linking
from cute_backend.simulator.host import device_tensor
from cute_backend.simulator.machine import Launch
from cute_backend.simulator.ptx_parser import parse
from cute_backend.simulator.simulated_gpu import Device, DeviceAttribute, _check_launch, _Kernel
from cute_backend.simulator.simulation_errors import SimulationError
from cute_backend.simulator.tensormap import Swizzle, decode
from support.simulator import host_kernels
from support.simulator.compiled import host_program, launch

EMPTY_PTX = ".version 9.4\n.target sm_90a\n.address_size 64\n"


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return f"--keep-ptx --gpu-arch sm_100a --dump-dir={tmp_path_factory.mktemp('kept')}"


@pytest.fixture(scope="module")
def add(options):
    return host_kernels.compile_add(options)


def compile_tile_copy(options, cluster):
    matrices = (host_kernels.fake_row_major(cutlass.BFloat16) for _ in range(2))
    return host_kernels.compile_tvm_ffi(
        host_kernels.tile_copy, *matrices, (3, 4, 3), (32, 64), cluster, options=options
    )


class Recorder:
    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, launch, memory):
        self.launches.append(launch)
        self.memory = memory
        return f"report {len(self.launches)}"


def vectors(length=300):
    return [torch.arange(length, dtype=torch.float32) + i for i in range(3)]


def check_add_launch(one: Launch, tensors):
    assert one.kernel.startswith("kernel_cutlass_add_kernel")
    assert (one.grid, one.block, one.cluster) == ((3, 1, 1), (128, 1, 1), (1, 1, 1))
    assert one.smem_bytes == 0
    assert [len(p) for p in one.params] == [16, 16, 16, 4]
    for param, tensor in zip(one.params, tensors, strict=False):
        assert struct.unpack("<QI", param[:12]) == (tensor.data_ptr(), 300)
    assert struct.unpack("<f", one.params[3]) == (2.5,)


def test_a_tvm_ffi_launch_arrives_with_its_parameters(add):
    record, tensors = Recorder(), vectors()
    assert host_program(add).run((*tensors, 2.5), record) == ["report 1"]
    check_add_launch(record.launches[0], tensors)


def test_a_plain_launch_arrives_with_its_parameters(options):
    record, tensors = Recorder(), vectors()
    compiled = host_kernels.compile_add_plain(options)
    wrapped = [from_dlpack(device_tensor(t), assumed_align=16).mark_layout_dynamic() for t in tensors]
    host_program(compiled).run((*wrapped, 2.5, cuda.CUstream(0)), record)
    check_add_launch(record.launches[0], tensors)
    assert record.memory.read(tensors[1].data_ptr(), 1200).tobytes() == tensors[1].numpy().tobytes()


def test_a_tma_launch_arrives_with_its_maps_cluster_and_shared_memory(options):
    record = Recorder()
    source, target = (torch.zeros(70, 200, dtype=torch.bfloat16) for _ in range(2))
    host_program(compile_tile_copy(options, (1, 2, 1))).run((source, target), record)
    [one] = record.launches
    assert (one.grid, one.cluster, one.smem_bytes) == ((3, 4, 1), (1, 2, 1), 1024 + 32 * 64 * 2)
    maps = [decode(param) for param in one.params if len(param) == 128]
    assert [m.address for m in maps] == [source.data_ptr(), target.data_ptr()]
    assert {(m.sizes, m.strides_bytes, m.box, m.swizzle) for m in maps} == {
        ((200, 70), (400,), (64, 32), Swizzle.B128)
    }


def test_the_tensors_of_the_call_and_nothing_else_are_registered(add):
    memories = []
    tensors = [torch.arange(600.0)[100:400] for _ in range(3)]
    host_program(add).run((*tensors, 1.0), lambda launch, memory: memories.append(memory))
    for tensor in tensors:
        assert memories[0].read(tensor.data_ptr(), 1200).tobytes() == tensor.numpy().tobytes()
        for outside in (tensor.data_ptr() - 1, tensor.data_ptr() + 1200):
            with pytest.raises(SimulationError):
                memories[0].read(outside, 1)


def test_views_of_one_memory_are_registered_as_one_range():
    device = Device(parse(EMPTY_PTX), Recorder(), sm_count=1)
    base = torch.arange(1000.0)
    outer, inner, later, apart = base[100:400], base[200:250], base[300:500], base[600:700]
    strided = base[700:1000].view(100, 3)[:, 1]  # from element 701 up to and with 998
    device.register([later, inner, [outer, torch.empty(0)], apart, strided, 3, None])
    first = base.data_ptr()
    assert device.memory.read(first + 100 * 4, 400 * 4).tobytes() == base[100:500].numpy().tobytes()
    device.memory.read(first + 600 * 4, 400)
    device.memory.read(first + 701 * 4, 298 * 4)
    for outside in (99, 500, 599, 700, 999):
        with pytest.raises(SimulationError):
            device.memory.read(first + outside * 4, 4)
    with pytest.raises(SimulationError, match=r"argument 2 0, float32\[300\]"):
        device.memory.read(first + 400, 1601)


def test_nested_arguments_are_taken(options):
    record = Recorder()
    matrices = tuple(torch.zeros(8, 64, dtype=torch.bfloat16) for _ in range(2))
    boxes = (((8, 64), None, None), ((8, 32), None, None))
    compiled = host_kernels.compile_tvm_ffi(
        host_kernels.describe,
        tuple(host_kernels.fake_row_major(cutlass.BFloat16) for _ in matrices),
        boxes,
        options=options,
    )
    assert host_program(compiled).run((matrices,), record) == ["report 1", "report 2"]
    assert [decode(one.params[0]).address for one in record.launches] == [m.data_ptr() for m in matrices]


def test_what_the_host_code_refuses_is_the_callers_error(add):
    a, b, c = vectors()
    with pytest.raises(ValueError, match="expected dtype=float32"):
        host_program(add).run((a, b.int(), c, 1.0), Recorder())


@pytest.mark.parametrize("error", [SimulationError("a race"), KeyboardInterrupt()])
def test_an_error_of_the_machine_passes_through_the_host_code(add, error):
    def execute(launch, memory):
        raise error

    with pytest.raises(type(error)) as caught:
        host_program(add).run((*vectors(), 1.0), execute)
    assert caught.value is error


def test_a_grid_that_clusters_do_not_divide_is_refused(options):
    tensors = [torch.zeros(70, 200, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(SimulationError, match=r"grid \(3, 4, 1\) is not a multiple of cluster \(2, 1, 1\)"):
        host_program(compile_tile_copy(options, (2, 1, 1))).run(tensors, Recorder())


def test_a_function_without_ptx_says_how_to_keep_it(tmp_path):
    with pytest.raises(SimulationError, match="--keep-ptx"):
        host_program(host_kernels.compile_add("--gpu-arch sm_100a"))
    nowhere = host_kernels.compile_add(f"--keep-ptx --gpu-arch sm_100a --dump-dir={tmp_path / 'absent'}")
    with pytest.raises(SimulationError, match="any --dump-dir must exist"):
        host_program(nowhere)


def test_only_compiled_functions_and_cpu_tensors(add):
    with pytest.raises(SimulationError, match=r"not a function"):
        host_program(vectors)
    with pytest.raises(SimulationError, match="CPU tensors, not one on meta"):
        host_program(add).run((*(t.to("meta") for t in vectors()), 1.0), Recorder())


def test_the_stub_stays_inside_its_own_library(add, options):
    program = host_program(add)
    program.run((*vectors(), 1.0), Recorder())
    everyone = ctypes.CDLL(None)
    assert not hasattr(everyone, "cute_simulator_attach")
    assert not hasattr(program.host.library, "cuda_dialect_init_library_once")
    # A compilation afterwards gets the real runtime: without a GPU, its launch fails as it does without us.
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"[Cc]uda"):
            tensors = (from_dlpack(device_tensor(t), enable_tvm_ffi=True) for t in vectors())
            host_kernels.compile_add(options)(*tensors, 1.0)


def test_the_simulated_machine_computes_what_the_host_code_launches(add):
    a, b, c = vectors()
    [report] = launch(add, (a, b, c, 2.5))
    assert torch.equal(c, a + 2.5 * b)
    assert report.grid == (3, 1, 1)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_tiles_travel_by_tma_for_every_seed(arch, tmp_path):
    matrices = (host_kernels.fake_row_major(cutlass.BFloat16) for _ in range(2))
    compiled = host_kernels.compile_tvm_ffi(
        *(host_kernels.tile_copy, *matrices, (3, 4, 3), (32, 64), (1, 1, 1)),
        options=f"--keep-ptx --gpu-arch {arch} --dump-dir={tmp_path}",
    )
    source = torch.randn(70, 200).bfloat16()
    for seed in (None, *range(8)):
        target = torch.zeros_like(source)
        launch(compiled, (source, target), async_seed=seed)
        assert torch.equal(source, target)


# The rest of the stub, called from C as host code would.

EXERCISE = """
#include <stddef.h>
int _cudaMalloc(void **, size_t); int _cudaFree(void *); int _cudaMemset(void *, int, size_t);
int _cudaMemcpy(void *, const void *, size_t, int); int _cudaDeviceGetAttribute(int *, int, int);
int _cudaGetDeviceCount(int *);
int allocate(void **a, size_t n) { return _cudaMalloc(a, n); }
int release(void *a) { return _cudaFree(a); }
int fill(void *a, int v, size_t n) { return _cudaMemset(a, v, n); }
int copy(void *to, void *from, size_t n) { return _cudaMemcpy(to, from, n, 4); }
int attribute(int *value, int id) { return _cudaDeviceGetAttribute(value, id, 0); }
int devices(int *count) { return _cudaGetDeviceCount(count); }
"""


def host_object(tmp_path, source: str) -> bytes:
    path = tmp_path / "host.c"
    path.write_text(source)
    subprocess.run(["cc", "-c", "-fPIC", str(path), "-o", str(tmp_path / "host.o")], check=True)
    return (tmp_path / "host.o").read_bytes()


@pytest.fixture
def runtime(tmp_path):
    library = linking.load_with_stub(host_object(tmp_path, EXERCISE)).library
    device = Device(parse(EMPTY_PTX), Recorder(), sm_count=6)
    library.cute_simulator_attach(ctypes.byref(device.table))
    yield library, device
    library.cute_simulator_attach(None)


def test_memory_functions_work_on_registered_host_memory(runtime):
    library, device = runtime
    address, other = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.allocate(ctypes.byref(address), 1000) == 0
    assert library.allocate(ctypes.byref(other), 10) == 0
    assert address.value % 256 == 0
    assert library.fill(other, 7, 10) == 0
    assert library.copy(ctypes.c_void_p(address.value + 990), other, 10) == 0
    assert device.memory.read(address.value + 988, 12).tolist() == [255] * 2 + [7] * 10
    with pytest.raises(SimulationError, match="1000 bytes that the host code allocated"):
        device.memory.read(address.value + 996, 8)
    assert library.release(address) == 0
    with pytest.raises(SimulationError):
        device.memory.read(address.value, 1)
    assert library.allocate(ctypes.byref(other), 0) == 0
    assert other.value is None
    assert library.release(other) == 0
    assert library.release(address) != 0
    assert "has not allocated" in str(device.failure)


def test_the_device_answers_for_itself(runtime):
    library, device = runtime
    value = ctypes.c_int(-1)
    for attribute, expected in {
        DeviceAttribute.MULTIPROCESSOR_COUNT: 6,
        DeviceAttribute.COMPUTE_CAPABILITY_MAJOR: 9,
        DeviceAttribute.COMPUTE_CAPABILITY_MINOR: 0,
        DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
    }.items():
        assert library.attribute(ctypes.byref(value), attribute) == 0
        assert value.value == expected
    assert library.devices(ctypes.byref(value)) == 0
    assert value.value == 1
    assert library.attribute(ctypes.byref(value), 9999) != 0
    assert "device attribute 9999" in str(device.failure)


def test_a_device_has_the_shared_memory_of_its_capability():
    device = Device(parse(EMPTY_PTX.replace("sm_90a", "sm_86")), Recorder(), sm_count=1)
    device_shared = device._attributes[DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN]
    assert device_shared == 99 * 1024
    one = Launch("big", (1, 1, 1), (32, 1, 1), (1, 1, 1), device_shared + 16, (), False)
    kernel = _Kernel(b"big", one.smem_bytes, 0)
    with pytest.raises(SimulationError, match="101392 bytes of shared memory; this device has 101376 for a"):
        _check_launch(one, kernel, device_shared)
    _check_launch(replace(one, smem_bytes=device_shared), kernel, device_shared)
    with pytest.raises(
        SimulationError, match=r"for sm_75; devices of compute capability 8\.0, 8\.6, .* are simulated"
    ):
        Device(parse(EMPTY_PTX.replace("sm_90a", "sm_75")), Recorder(), sm_count=1)


def test_a_runtime_function_that_the_stub_lacks_is_named(tmp_path):
    calls = "int _cudaGraphLaunch(void); int f(void) { return _cudaGraphLaunch(); }"
    with pytest.raises(SimulationError, match=r"host code calls _cudaGraphLaunch, .*runtime_stub\.c$"):
        linking.load_with_stub(host_object(tmp_path, calls))


def test_without_a_compiler_one_sentence(add, tmp_path, monkeypatch):
    monkeypatch.setattr(linking, "_loaded", {})
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnavailableError, match=r"^the simulator needs a C compiler: .*CC$"):
        host_program(add)
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(UnavailableError, match="/nowhere/cc could not be run"):
        host_program(add)


def test_the_stub_is_built_once_into_a_private_folder(add, tmp_path, monkeypatch):
    monkeypatch.setattr(linking, "_loaded", {})
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path))
    host_program(add)
    folder = tmp_path / "simulator"
    [stub] = folder.iterdir()  # what was linked is gone once it is loaded
    assert folder.stat().st_mode & 0o777 == 0o700
    built = stub.stat().st_mtime_ns
    monkeypatch.setattr(linking, "_loaded", {})
    host_program(add)
    assert stub.stat().st_mtime_ns == built


def test_a_cache_folder_that_cannot_be_made_is_named(add, tmp_path, monkeypatch):
    monkeypatch.setattr(linking, "_loaded", {})
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match=r"can't build in .*file/simulator: Not a directory"):
        host_program(add)
