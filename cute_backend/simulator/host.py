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
from collections.abc import Sequence
from typing import Any

import torch

from cute_backend.simulator.linking import load_with_stub
from cute_backend.simulator.machine import Launch, Progress, run_kernel
from cute_backend.simulator.memory import GlobalMemory
from cute_backend.simulator.ptx_parser import parse
from cute_backend.simulator.report import Recorder, Report
from cute_backend.simulator.simulated_gpu import Device, Executor
from cute_backend.simulator.simulation_errors import SimulationError


class HostProgram:
    """The host code of a TVM-FFI function, linked with the runtime stub, and the PTX of its kernels.

    `host_object` is what `export_to_c` wrote under the name `symbol`.
    """

    def __init__(self, ptx: str, host_object: bytes, symbol: str) -> None:
        self._ptx = ptx
        self.symbol = symbol
        self._module = parse(ptx)
        self.host = load_with_stub(host_object)

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
                one,
                memory,
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
        attach = self.host.library.cute_simulator_attach
        attach(ctypes.byref(device.table))
        try:
            self.call(args)
        except Exception:
            if device.failure:
                raise device.failure from None
            raise
        finally:
            attach(None)
        return device.reports

    def call(self, args: Sequence[Any]) -> None:
        """Calls the exported function by TVM-FFI."""
        self.host.module[self.symbol](*map(_as_tvm_ffi, args))


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
