"""Small kernels whose host code the simulator's tests run; device code must live in a file."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

THREADS = 128


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, alpha: cutlass.Float32):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + tid
    if i < cute.size(c):
        c[i] = a[i] + alpha * b[i]


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, alpha: cutlass.Float32, stream: cuda.CUstream):
    grid = (cute.ceil_div(cute.size(c), THREADS), 1, 1)
    add_kernel(a, b, c, alpha).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def tile_copy_kernel(
    load: cute.CopyAtom,
    source: cute.Tensor,
    store: cute.CopyAtom,
    target: cute.Tensor,
    dtype: cutlass.Constexpr,
    smem_layout: cute.ComposedLayout,
    tile: cutlass.Constexpr,
):
    """Each CTA moves one tile of `source` to `target`: TMA in, through shared memory, TMA out."""
    tid, _, _ = cute.arch.thread_idx()
    tile_m, tile_n, _ = cute.arch.block_idx()
    smem = SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    staged = smem.allocate_tensor(dtype, smem_layout.outer, byte_alignment=1024, swizzle=smem_layout.inner)
    if tid == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    here = (tile_m, tile_n)
    smem_in, gmem_in = cpasync.tma_partition(
        load,
        0,
        cute.make_layout(1),
        cute.group_modes(staged, 0, 2),
        cute.group_modes(cute.local_tile(source, tile, here), 0, 2),
    )
    smem_out, gmem_out = cpasync.tma_partition(
        store,
        0,
        cute.make_layout(1),
        cute.group_modes(staged, 0, 2),
        cute.group_modes(cute.local_tile(target, tile, here), 0, 2),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size(tile) * dtype.width // 8)
        cute.copy(load, gmem_in, smem_in, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        cute.copy(store, smem_out, gmem_out)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def tile_copy(
    source: cute.Tensor,
    target: cute.Tensor,
    swizzle: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    outer = cute.make_ordered_layout(tile, order=(1, 0))
    smem_layout = cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, outer)
    load, source_tma = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, smem_layout, tile
    )
    store, target_tma = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), target, smem_layout, tile
    )
    m, n = cute.ceil_div(source.shape[0], tile[0]), cute.ceil_div(source.shape[1], tile[1])
    tile_copy_kernel(load, source_tma, store, target_tma, source.element_type, smem_layout, tile).launch(
        grid=(m, n, 1), block=(THREADS, 1, 1), cluster=cluster, stream=stream
    )


@cute.kernel
def describe_kernel(load: cute.CopyAtom, source: cute.Tensor):
    cpasync.prefetch_descriptor(load)


@cute.jit
def describe(sources: tuple, boxes: cutlass.Constexpr, stream: cuda.CUstream):
    """One launch for each source, with a tensor map of it; `boxes` holds (box, swizzle, internal type)."""
    for i in cutlass.range_constexpr(len(boxes)):
        box, swizzle, internal = boxes[i]
        layout = cute.make_ordered_layout(box, order=tuple(reversed(range(len(box)))))
        if cutlass.const_expr(swizzle is not None):
            layout = cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, layout)
        load, source_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), sources[i], layout, box, internal_type=internal
        )
        describe_kernel(load, source_tma).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def fake_vector(dtype, length):
    return make_fake_compact_tensor(dtype, (length,), stride_order=(0,), assumed_align=16)


def fake_row_major(dtype, rank: int = 2):
    """Dynamic sizes, dynamic strides in multiples of 16 bytes, the last dimension contiguous."""
    strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(rank - 1))
    shape = tuple(cute.sym_int() for _ in range(rank))
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)


def compile_tvm_ffi(function, *args, options: str):
    return cute.compile(
        function, *args, make_fake_stream(use_tvm_ffi_env_stream=True), options=f"--enable-tvm-ffi {options}"
    )


def compile_add_plain(options: str):
    length = cute.sym_int()
    vectors = (fake_vector(cutlass.Float32, length) for _ in range(3))
    return cute.compile(add, *vectors, cutlass.Float32(0), cuda.CUstream(0), options=options)


def compile_add(options: str):
    length = cute.sym_int()
    vectors = (fake_vector(cutlass.Float32, length) for _ in range(3))
    return compile_tvm_ffi(add, *vectors, cutlass.Float32(0), options=options)
