"""From a kernel's source text to machine code, on any machine: no GPU is needed.

A generated module defines `launch`, which takes the arguments of the spec's signature, then
`max_active_clusters` and `stream`. It is compiled for operands whose sizes are dynamic and whose strides are
as the signature states, through TVM-FFI, so that a launch checks its operands, runs on the caller's current
stream and synchronises nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.kinds.axes import Extent
from cute_backend.memory_ops.emit import CUTE_TYPES
from cute_backend.planning import Alignment, Arch, Plan, Rowvecs
from cute_backend.planning.naming import FINISH
from cute_backend.runtime.disk.cache import scratch_folder
from cute_backend.runtime.host.forks import free_in_children
from cute_backend.runtime.host.space import check_room, out_of_space
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.cubin import resources
from cute_backend.runtime.kernels.host_code import dynamic_smem_bytes, target_baseline
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import SYMBOL
from cute_backend.signature import Argument
from cute_backend.spec import Stride

_OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin"

_DSL = free_in_children(threading.Lock())
"""A lock that is held while the DSL traces, since tracing changes global state of the process."""

_MARGIN = 1 << 20
"""The bytes that must be free on the disk after a kernel was compiled: on a full disk the DSL leaves
incomplete files without an error (4.8.1)."""


_INTERRUPTED = re.compile(r"^KeyboardInterrupt\b", re.MULTILINE)
"""A line in the text of a RuntimeError that a signal caused: MLIR turns the exceptions of its callbacks into
such text."""


def compile_kernel(kernel: Kernel, source: str, path: Path) -> Built:
    """Compiles the text of a generated module, already written to `path`, where tracebacks will find it.

    Raises BuildError for any error in the text or the compiler, OSError if the folder of `path`, which gets
    the compiler's files, has no space, and MemoryError.
    """
    return compile_for(kernel.arch, kernel, source, path)


def compile_for(gpu: Arch, kernel: Kernel, source: str, path: Path) -> Built:
    """Does the same as `compile_kernel`, for the architecture `gpu`. It may be later than the one that the
    kernel is planned for: a Hopper GPU has the instructions of sm_80 too, although it can't run machine code
    for sm_80."""
    try:
        import cutlass  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            f"the CuTe DSL can't be imported ({error}): pip install 'nvidia-cutlass-dsl[cu13]==4.8.*'"
        ) from error
    with _DSL, scratch_folder(path.parent) as scratch:
        try:
            module = _import_source(kernel.name, path)
            _name_entries(kernel, module)
            compiled = _compile(gpu, kernel, module, str(scratch))
            built = _collect(compiled, source, scratch)
            check_room(scratch, _MARGIN)
        except MemoryError:  # the fault is not the kernel's
            raise
        except Exception as error:
            if (full := out_of_space(error)) is not None:
                raise full from error
            check_room(scratch, _MARGIN)
            path.stat()  # it may have been removed meanwhile
            complaint = re.sub(r"\x1b\[\d+m", "", str(error)).strip()
            if _INTERRUPTED.search(complaint):
                raise KeyboardInterrupt from error
            raise BuildError(
                f"{kernel.name} does not compile: {type(error).__name__}: {complaint}"
            ) from error
    if built.spill_bytes and kernel.plan.tile.rowvecs is Rowvecs.REGISTER_HOIST:
        raise BuildError(
            f"{kernel.name} spills {built.spill_bytes} bytes a thread with its rowvecs in registers, as "
            "config.rowvec_placement asks; 'auto' and 'smem_staged' serve it"
        )
    return built


def _import_source(name: str, path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"cute_backend_kernel_{name}", path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module


def _name_entries(kernel: Kernel, module: ModuleType) -> None:
    """Gives the kernels of a module the kernel's name, which its text may lack."""
    for template, suffix in (("gemm", ""), ("finish", FINISH)):
        if hasattr(module, template):
            getattr(module, template).name = kernel.entry + suffix


def _compile(gpu: Arch, kernel: Kernel, module: ModuleType, scratch: str) -> Any:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    operands = fake_operands(kernel.plan)
    expected = [*operands, "max_active_clusters", "stream"]
    parameters = list(inspect.signature(module.launch).parameters)
    if kernel.edited is not None and module.gemm.config != (tile := kernel.plan.tile):
        has = module.gemm.config
        raise TypeError(f"gemm is of tile {has.name} ({has.words}), its kernel of {tile.name} ({tile.words})")
    if parameters != expected:
        raise TypeError(f"launch takes ({', '.join(parameters)}) where the spec says ({', '.join(expected)})")
    return cute.compile(
        module.launch,
        *operands.values(),
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        no_jit_engine=True,  # the host code is exported, and never runs in this process
        options=f"--gpu-arch {gpu.value} {_OPTIONS} --dump-dir '{scratch}'",
    )


def _collect(compiled: Any, source: str, scratch: Path) -> Built:
    cubin = compiled.__cubin__
    needs = resources(cubin)
    smem_bytes = needs.static_smem_bytes + dynamic_smem_bytes(compiled.ir_module)
    target_baseline(compiled.ir_module)
    compiled.export_to_c(str(scratch / "kernel.o"), SYMBOL, export_only_tvm_ffi_symbols=True)
    return Built(
        source=source,
        ptx=compiled.__ptx__,
        cubin=cubin,
        registers=needs.registers,
        spill_bytes=needs.frame_bytes,
        smem_bytes=smem_bytes,
        host_object=(scratch / "kernel.o").read_bytes(),
    )


def fake_operands(plan: Plan) -> dict[str, Any]:
    """A stand-in for each tensor of `launch`, by name: dynamic sizes that share symbols, strides by class."""
    import cutlass.cute as cute

    sizes = {extent: cute.sym_int32() for extent in Extent}
    sizes[Extent.COLUMNS] = cute.sym_int32(divisibility=2)
    sizes[Extent.BYTES] = cute.sym_int64()
    tma = plan.alignment is Alignment.TMA
    return {argument.name: _fake(argument, sizes, tma) for argument in plan.arguments}


def _fake(argument: Argument, sizes: Mapping[Extent, Any], tma: bool) -> Any:
    """A stand-in for one tensor. Each mode of M, and the number of blocks, has a size of its own. One element
    is a vector."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    align = argument.align(tma)
    steps = align * 8 // argument.dtype.bits if argument.is_plane else 1
    shape, strides = [], []
    for dim in argument.dims:
        own = dim.extent in (Extent.MODE, Extent.BLOCKS, Extent.TILES, Extent.CACHE_ROWS)
        shape.append(cute.sym_int32() if own else dim.size(sizes))
        fixed = dim.stride is not Stride.OTHER
        strides.append(int(dim.stride.value) if fixed else cute.sym_int64(divisibility=steps))
    return make_fake_tensor(
        getattr(cutlass, CUTE_TYPES[argument.dtype]),
        tuple(shape) or (1,),
        tuple(strides) or (1,),
        assumed_align=align,
    )
