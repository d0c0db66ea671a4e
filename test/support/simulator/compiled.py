"""Functions from `cute.compile`, with and without TVM-FFI, on the simulated machine."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cute_backend.simulator.host import HostProgram
from cute_backend.simulator.report import Report
from cute_backend.simulator.simulation_errors import SimulationError

_EXPORTED = "simulated"


def launch(
    compiled: Any,
    args: Sequence[Any],
    *,
    async_seed: int | None = None,
) -> list[Report]:
    """Calls `compiled` (from `cute.compile` with `--keep-ptx`) on CPU tensors, with its kernels simulated.

    `args` are the arguments of one call. A TVM-FFI function takes torch CPU tensors and numbers, without its
    stream. A plain function takes `from_dlpack(device_tensor(t))` for a tensor t, and the stream
    `CUstream(0)`. `async_seed` is that of `HostProgram.launch`.
    """
    return host_program(compiled).launch(args, async_seed=async_seed)


class PlainHostProgram(HostProgram):
    """The host code of a function that was compiled without TVM-FFI. It takes packed arguments unchecked."""

    def __init__(self, ptx: str, host_object: bytes, symbol: str, compiled: Any) -> None:
        super().__init__(ptx, host_object, symbol)
        self._compiled = compiled

    def call(self, args: Sequence[Any]) -> None:
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
        function = self.host.library[f"_mlir_{self.symbol}_{name}"]
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
