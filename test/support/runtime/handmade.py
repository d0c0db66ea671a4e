"""A kernel module written by hand for one small spec, so that tests of the runtime don't depend on templates.

It has the interface of a generated module and is as simple as a GEMM can be: each thread computes an element.
"""

from __future__ import annotations

from cute_backend.kinds.results import WholePlane
from cute_backend.planning import Alignment, Arch, TileConfig, plan, tile_table
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import (
    Accumulator,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Order,
    Store,
    Stride,
)


def make_spec(
    *,
    store: DType = DType.BF16,
    order: Order = Order.ROW,
    b_major: Major = Major.K,
    exact: bool = True,
    second_store: bool = False,
) -> EpilogueSpec:
    """acc * scalar0 + rowvec0 + colvec0 + exact0, in bf16 with fp32 vectors."""
    loads = [
        Load("scalar0", LoadKind.SCALAR, DType.F32, Stride.ZERO, Stride.ZERO),
        Load("rowvec0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE),
        Load("colvec0", LoadKind.COLVEC, DType.F32, Stride.OTHER, Stride.ZERO),
    ]
    ops = [
        Op("t0", "mul", ("acc", "scalar0"), DType.F32),
        Op("t1", "add", ("t0", "rowvec0"), DType.F32),
        Op("t2", "add", ("t1", "colvec0"), DType.F32),
    ]
    if exact:
        loads.append(Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE))
        ops.append(Op("t3", "add", ("t2", "exact0"), DType.F32))
    last = ops[-1].name
    stores = [Store("out0", last, store, WholePlane(order))]
    if second_store:
        stores.append(Store("out1", last, DType.F32))
    accumulator = Accumulator("acc", DType.BF16, DType.BF16, Major.K, b_major)
    return EpilogueSpec((accumulator,), tuple(loads), tuple(ops), tuple(stores))


def kernel_of(
    spec: EpilogueSpec, index: int = 0, alignment: Alignment = Alignment.TMA, arch: Arch = Arch.SM90A
) -> Kernel:
    """A kernel for `spec` with one of the architecture's configurations."""
    config: TileConfig = tile_table(arch, spec)[index]
    return Kernel(plan(spec, config, alignment))


SOURCE = """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.kernel
def kernel(a: cute.Tensor, b: cute.Tensor, {typed}):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    m, n, k = cute.size(a, mode=[0]), cute.size(b, mode=[1]), cute.size(a, mode=[1])
    index = block * 128 + thread
    if index < m * n:
        row, column = index // n, index % n
        acc = Float32(0.0)
        for i in cutlass.range(k):
            acc = acc + a[row, i].to(Float32) * b[i, column].to(Float32)
        value = acc * scalar0[0] + rowvec0[column] + colvec0[row]{exact}
{stores}

@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, {typed}, max_active_clusters: Int32, stream: cuda.CUstream):
    m, n = cute.size(a, mode=[0]), cute.size(b, mode=[1])
    kernel(a, b, {names}).launch(grid=((m * n + 127) // 128, 1, 1), block=(128, 1, 1), {smem}stream=stream)
"""


def source(spec: EpilogueSpec, smem_bytes: int | None = None) -> str:
    """The module for a spec that `make_spec` made."""
    names = [item.name for item in (*spec.loads, *spec.stores)]
    stores = [
        f"        {store.name}[row, column] = value.to({store.name}.element_type)\n" for store in spec.stores
    ]
    return SOURCE.format(
        typed=", ".join(f"{name}: cute.Tensor" for name in names),
        names=", ".join(names),
        exact=" + exact0[row, column].to(Float32)" if "exact0" in names else "",
        stores="".join(stores),
        smem="" if smem_bytes is None else f"smem={smem_bytes}, ",
    )
