"""Runs a compiled function's real host code on CPU tensors and hands its kernel launches to a simulated GPU.

`cute.compile` returns two things: the kernel's PTX, and an object with the host code, which checks the
arguments, builds the tensor maps and launches. The host code accesses the GPU only through the functions of
libcute_dsl_runtime.so. This module exports the object, links it with `runtime_stub.c` in place of that
library, and calls it; each launch calls back to Python with its configuration and parameters.

The stub's functions are linked with hidden visibility, so they are bound to this one object: the real runtime
library, which the DSL loads into the process for every compilation, is neither used nor disturbed, and a
process may compile, launch and simulate in any order. (`CUTE_DSL_LIBS` would not work: the DSL's JIT looks up
a symbol in the process before it searches the libraries in that variable.)
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cute_backend.simulator.linking import load_with_stub
from cute_backend.simulator.machine import Progress, run_kernel
from cute_backend.simulator.memory import GlobalMemory
from cute_backend.simulator.ptx_parser import parse
from cute_backend.simulator.report import Recorder, Report
from cute_backend.simulator.simulated_gpu import Device, Executor, Launch
from cute_backend.simulator.simulation_errors import SimulationError

_EXPORTED = "simulated"


def launch(
    compiled: Any,
    args: Sequence[Any],
    *,
    sm_count: int = 4,
    async_seed: int | None = None,
    observer: Recorder | None = None,
    progress: Progress | None = None,
) -> list[Report]:
    """Calls `compiled` (from `cute.compile` with `--keep-ptx`) on CPU tensors, with its kernels simulated.

    `args` are the arguments of one call. A TVM-FFI function takes torch CPU tensors and numbers, without its
    stream. A plain function takes `from_dlpack(device_tensor(t))` for a tensor t, and the stream
    `CUstream(0)`. The other parameters are those of `HostProgram.launch`.
    """
    return host_program(compiled).launch(
        args, sm_count=sm_count, async_seed=async_seed, observer=observer, progress=progress
    )


class HostProgram:
    """The host code of a TVM-FFI function, linked with the runtime stub, and the PTX of its kernels.

    `host_object` is what `export_to_c` wrote under the name `symbol`.
    """

    def __init__(self, ptx: str, host_object: bytes, symbol: str) -> None:
        self._ptx = ptx
        self._symbol = symbol
        self._module = parse(ptx)
        self._host = load_with_stub(host_object)

    def launch(
        self,
        args: Sequence[Any],
        *,
        sm_count: int = 4,
        async_seed: int | None = None,
        observer: Recorder | None = None,
        progress: Progress | None = None,
        most_instructions: int | None = None,
    ) -> list[Report]:
        """Calls the host code on `args` and runs the kernels that it launches on the simulated machine.

        Outputs are written in place. `sm_count` is the number of multiprocessors that the device claims to
        have. The other parameters are those of `run_kernel`; the observer receives events of the first kernel
        only. Returns one report for each kernel launch, in order. Raises SimulationError, and what the host
        code raises.
        """

        hearing = observer

        def execute(one: Launch, memory: GlobalMemory) -> Report:
            nonlocal hearing
            first, hearing = hearing, None
            return run_kernel(
                self._ptx,
                one.kernel,
                one.params,
                grid=one.grid,
                block=one.block,
                cluster=one.cluster,
                smem_bytes=one.smem_bytes,
                memory=memory,
                overlaps=one.overlaps,
                async_seed=async_seed,
                observer=first,
                progress=progress,
                most_instructions=most_instructions,
            )

        return self.run(args, execute, sm_count=sm_count)

    def run(self, args: Sequence[Any], execute: Executor, *, sm_count: int = 4) -> list[Report]:
        """Runs the host code on `args`. `execute` is called with each launch, while the host code waits."""
        device = Device(self._module, execute, sm_count)
        device.register(args)
        attach = self._host.library.cute_simulator_attach
        attach(ctypes.byref(device.table))
        try:
            self._call(args)
        except Exception:
            if device.failure:
                raise device.failure from None
            raise
        finally:
            attach(None)
        return device.reports

    def _call(self, args: Sequence[Any]) -> None:
        self._host.module[self._symbol](*map(_as_tvm_ffi, args))


class PlainHostProgram(HostProgram):
    """The host code of a function that was compiled without TVM-FFI. It takes packed arguments unchecked."""

    def __init__(self, ptx: str, host_object: bytes, symbol: str, compiled: Any) -> None:
        super().__init__(ptx, host_object, symbol)
        self._compiled = compiled

    def _call(self, args: Sequence[Any]) -> None:
        """Loads the library, then calls it with an array of pointers, as the DSL's own executor does."""
        library = ctypes.c_void_p()
        state, ordinal = ctypes.pointer(library), ctypes.c_int32(0)
        self._packed("cuda_init", [ctypes.addressof(state)])
        self._packed("cuda_load_to_device", [ctypes.addressof(state), ctypes.addressof(ordinal)])
        # The second value owns what the pointers point to.
        pointers, _adapted = self._compiled.execution_args.generate_execution_args(tuple(args), {})
        self._packed(f"_mlir_ciface_{self._compiled.function_name}", pointers)

    def _packed(self, name: str, pointers: Sequence[Any]) -> None:
        """Calls a function of the object in MLIR's packed form; the last pointer is that of the result."""
        error = ctypes.c_int32(0)
        packed = (ctypes.c_void_p * (len(pointers) + 1))(*pointers, ctypes.addressof(error))
        function = self._host.library[f"_mlir_{self._symbol}_{name}"]
        function.restype = None
        function(packed)
        if error.value:
            raise SimulationError(f"the host code's {name} returned CUDA error {error.value}")


def host_program(compiled: Any) -> HostProgram:
    """The host program of a function from `cute.compile`. Raises SimulationError if it has no PTX."""
    if not hasattr(compiled, "export_to_c"):
        raise SimulationError(f"expected a function from cute.compile, not a {type(compiled).__name__}")
    ptx = compiled.__ptx__ or ""  # a path if the DSL could not write the file
    if ".entry" not in ptx:
        raise SimulationError(
            "the function keeps no PTX: compile it with --keep-ptx, and any --dump-dir must exist"
        )
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{_EXPORTED}.o")
        if isinstance(compiled, TVMFFIJitCompiledFunctionBase):
            compiled.export_to_c(str(path), function_name=_EXPORTED)
            return HostProgram(ptx, path.read_bytes(), _EXPORTED)
        compiled.export_to_c(folder, _EXPORTED, _EXPORTED)
        return PlainHostProgram(ptx, path.read_bytes(), _EXPORTED, compiled)


class device_tensor:
    """A CPU tensor whose dlpack capsule claims to be on CUDA, for `cute.runtime.from_dlpack` and TVM-FFI.

    With a capsule that says CPU, the tensor would be in the generic address space, and TVM-FFI's check of the
    device would fail.
    """

    _DLPACK_CUDA = 2
    _DEVICE_TYPE_OFFSET = 8  # DLManagedTensor begins with a DLTensor: void *data; DLDevice {i32 type; i32 id}

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise SimulationError(f"the simulator takes CPU tensors, not one on {tensor.device}")
        self.tensor = tensor.detach()

    def __dlpack__(self, *, stream: object = None) -> object:
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + self._DEVICE_TYPE_OFFSET).value = self._DLPACK_CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._DLPACK_CUDA, 0


def _as_tvm_ffi(arg: Any) -> Any:
    import tvm_ffi

    if isinstance(arg, torch.Tensor):
        return tvm_ffi.from_dlpack(device_tensor(arg))
    if isinstance(arg, (tuple, list)):
        return type(arg)(map(_as_tvm_ffi, arg))
    return arg
