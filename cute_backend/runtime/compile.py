"""From a kernel's source text to machine code, on any machine: no GPU is needed.

A generated module defines `launch(a, <bs>, <loads>, <stores>, max_active_clusters, stream)`, with `workspace`
after the stores where some reduce. It is compiled for operands whose sizes are dynamic and whose strides are
what the spec says of them, through TVM-FFI, so that a launch checks its operands, takes the caller's current
stream and synchronises nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..memory_ops.emit import CUTE_TYPES, b_names
from ..memory_ops.partials import WORKSPACE
from ..planning import TileConfig, Variant, plane_order, subtiled
from ..spec import Axis, DType, EpilogueSpec, Load, LoadKind, Major, Order, Stride
from ..templates.workspace import ALIGN as WORKSPACE_ALIGN
from .cubin import resources
from .host_code import dynamic_smem_bytes, target_baseline
from .kernel import BuildError, Kernel, UnavailableError
from .link import SYMBOL
from .operands import TMA_ALIGN

_OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin"

_DSL = threading.Lock()
"""The DSL traces into state that its whole process shares."""


@dataclass(frozen=True)
class Built:
    """A kernel, compiled; with the one that finishes its reductions, where it has any.

    `registers` of a thread, `spill_bytes` of local memory that a thread spills to or indexes at run time,
    `smem_bytes` of a CTA, static and dynamic together: of two kernels the larger figures.
    """

    source: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    registers: int
    spill_bytes: int
    smem_bytes: int
    host_object: bytes = field(repr=False)
    """An ELF relocatable: the host code and, as data, the cubin."""


def compile_kernel(kernel: Kernel, source: str, path: Path) -> Built:
    """Compile the text of a generated module, already written to `path`, where tracebacks will find it.

    Raises BuildError for whatever goes wrong in the text or the compiler.
    """
    try:
        import cutlass  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            f"the CuTe DSL can't be imported ({error}): pip install 'nvidia-cutlass-dsl[cu13]==4.8.*'"
        ) from error
    with _DSL, tempfile.TemporaryDirectory(prefix="cute_backend_") as scratch:
        try:
            module = _import_source(kernel.name, path)
            compiled = _compile(kernel, module, scratch)
            return _collect(compiled, source, Path(scratch))
        except Exception as error:
            complaint = re.sub(r"\x1b\[\d+m", "", str(error)).strip()
            raise BuildError(
                f"{kernel.name} does not compile: {type(error).__name__}: {complaint}"
            ) from error


def _import_source(name: str, path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"cute_backend_kernel_{name}", path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module


def _compile(kernel: Kernel, module: ModuleType, scratch: str) -> Any:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    operands = fake_operands(kernel.spec, kernel.variant)
    expected = [*operands, "max_active_clusters", "stream"]
    parameters = list(inspect.signature(module.launch).parameters)
    if kernel.edited is not None and module.gemm.config != (tile := _tile(kernel)):
        has = module.gemm.config
        raise TypeError(f"gemm is of tile {has.name} ({has.words}), its kernel of {tile.name} ({tile.words})")
    if parameters != expected:
        raise TypeError(f"launch takes ({', '.join(parameters)}) where the spec says ({', '.join(expected)})")
    return cute.compile(
        module.launch,
        *operands.values(),
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {kernel.arch.value} {_OPTIONS} --dump-dir '{scratch}'",
    )


def _tile(kernel: Kernel) -> TileConfig:
    """The configuration that a kernel's module has: what a launch allocates and starts follows from it."""
    return subtiled(kernel.spec, kernel.config, kernel.variant)


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


def operand_names(spec: EpilogueSpec) -> list[str]:
    """The tensors of `launch`, in order: operands of the products, loads, stores, room for partials."""
    names = [load.name for load in spec.loads] + [store.name for store in spec.stores]
    return ["a", *b_names(spec), *names, *([WORKSPACE] if spec.reductions else [])]


def fake_operands(spec: EpilogueSpec, variant: Variant) -> dict[str, Any]:
    """A stand-in for each tensor of `launch`, by name: dynamic sizes that share symbols, strides by class."""
    import cutlass.cute as cute

    m, n, k = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()
    tma = variant is Variant.TMA
    fakes = []
    acc, columns = spec.product, cute.sym_int32(divisibility=2) if spec.neighbours else n
    a_unit, b_unit = int(acc.a_major is Major.K), int(acc.b_major is not Major.K)
    if acc.batched:
        batches, rows = cute.sym_int32(), cute.sym_int32()
        fakes.append(_batches(acc.a_dtype, batches, (rows, k), a_unit))
        fakes += [_batches(acc.b_dtype, batches, (k, columns), b_unit) for _ in range(spec.b_count)]
    else:
        fakes.append(_plane(acc.a_dtype, (m, k), a_unit, aligned=True))
        fakes += [_plane(acc.b_dtype, (k, columns), b_unit, aligned=True) for _ in range(spec.b_count)]
    fakes += [_fake_load(load, m, n, tma) for load in spec.loads]
    for store in spec.stores:
        if store.reduce is None:
            fakes.append(_plane(store.dtype, (m, n), 1 if store.order is Order.ROW else 0, aligned=tma))
        else:
            extent = {Axis.ROW: m, Axis.COLUMN: n, Axis.ALL: 1}[store.reduce.axis]
            fakes.append(_fake(store.dtype, (extent,), (1,)))
    if spec.reductions:
        fakes.append(_fake(DType.U8, (cute.sym_int64(),), (1,), WORKSPACE_ALIGN))
    return dict(zip(operand_names(spec), fakes, strict=True))


def _fake_load(load: Load, m: Any, n: Any, tma: bool) -> Any:
    if load.m_modes:
        return _fake_modes(load, n)
    if load.kind is LoadKind.EXACT:
        order = plane_order(load)
        if order is not None:
            return _plane(load.dtype, (m, n), 1 if order is Order.ROW else 0, aligned=tma)
        return _fake(load.dtype, (m, n), (_stride(load.stride_m), _stride(load.stride_n)))
    if load.kind is LoadKind.ROWVEC:
        return _fake(load.dtype, (n,), (_stride(load.stride_n),))
    if load.kind is LoadKind.COLVEC:
        return _fake(load.dtype, (m,), (_stride(load.stride_m),))
    return _fake(load.dtype, (1,), (1,))


def _fake_modes(load: Load, n: Any) -> Any:
    """(*modes, N), or (*modes,) for a colvec."""
    import cutlass.cute as cute

    shape = [cute.sym_int32() for _ in load.m_modes]
    strides = [_stride(mode) for mode in load.m_modes]
    if load.kind is LoadKind.EXACT:
        shape, strides = [*shape, n], [*strides, _stride(load.stride_n)]
    return _fake(load.dtype, tuple(shape), tuple(strides))


def _plane(dtype: DType, shape: tuple[Any, Any], unit: int, *, aligned: bool) -> Any:
    """A 2-D stand-in, contiguous along mode `unit`; `aligned` promises TMA's 16 bytes of base and pitch."""
    import cutlass.cute as cute

    pitch = cute.sym_int64(divisibility=TMA_ALIGN * 8 // dtype.bits if aligned else 1)
    stride = (pitch, 1) if unit == 1 else (1, pitch)
    return _fake(dtype, shape, stride, TMA_ALIGN if aligned else None)


def _batches(dtype: DType, batches: Any, shape: tuple[Any, Any], unit: int) -> Any:
    """A stand-in for operands of a batched product, each as `_plane` has it."""
    import cutlass.cute as cute

    step, pitch = (cute.sym_int64(divisibility=TMA_ALIGN * 8 // dtype.bits) for _ in range(2))
    stride = (pitch, 1) if unit == 1 else (1, pitch)
    return _fake(dtype, (batches, *shape), (step, *stride), TMA_ALIGN)


def _stride(stride: Stride) -> Any:
    import cutlass.cute as cute

    return cute.sym_int64() if stride is Stride.OTHER else int(stride.value)


def _fake(dtype: DType, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int | None = None) -> Any:
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(
        getattr(cutlass, CUTE_TYPES[dtype]), shape, stride, assumed_align=align or dtype.bits // 8
    )
