"""Every kernel that a spec could be given, run on a real GPU and compared with the replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

import torch
from torch import Tensor

from cute_backend.kinds.results import Heads
from cute_backend.planning import Alignment, TileConfig, offered, plan
from cute_backend.replay import replay
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.device import device_at, max_active_clusters
from cute_backend.runtime.arguments.operands import TORCH_DTYPES, blocks_of
from cute_backend.runtime.arguments.outputs import Outputs
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.spec import (
    FP8_K_STEP,
    PAIRED_DTYPES,
    BColumns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Order,
    ProductKind,
    Scaling,
    Stride,
)
from support.epilogues import Problem
from support.modes import with_modes
from support.reference import TOLERANCE, relative_error

SHAPES = [
    (256, 256, 256),
    (2, 128, 128),
    (40, 272, 2048),
    (200, 336, 144),
    (130, 272, 1024),
    (1000, 1040, 528),
    (4096, 512, 64),
]
"""(M, N, K): whole tiles; few rows; edges in both directions; few and many k tiles; many tiles per CTA."""

PARTS = range(30)
"""The parts of a spec's tiles, for tests that are sweeps of them."""

Operands = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""The operands of the op: A with its scales, every B with its scales, and the epilogue's loads."""


def check_kernels(
    spec: EpilogueSpec,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    configs: Sequence[TileConfig] | None = None,
) -> None:
    """Asserts that every kernel of `configs`, by default those of the table, in both alignments, gives the
    results of the replay."""
    if configs is None:
        configs = offered(device_at(0).arch, spec)
    kernels = [Kernel(plan(spec, config, alignment)) for config in configs for alignment in Alignment]
    check_functions(obtain(kernels), shapes)


def tiles_of(spec: EpilogueSpec, part: int) -> list[TileConfig]:
    """Every thirtieth tile that a spec could be given on this GPU, from that of index `part` on. All parts
    together have all tiles."""
    configs = offered(device_at(0).arch, spec)
    return list(configs[part % len(configs) :: len(PARTS)])


def check_functions(
    functions: Mapping[Kernel, KernelFunction], shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> None:
    """Asserts that every kernel gives the results of the replay. The kernels are of one spec."""
    spec = next(iter(functions)).plan.spec
    failures = []
    for shape in shapes:
        m, n, k = fitting(spec, shape)
        for aligned in (True, False):
            a, bs, loads = operands_of(spec, m, n, k, aligned=aligned)
            expected = replay(spec, a, bs, loads, accumulate=torch.float64)
            for kernel, function in functions.items():
                if aligned is not (kernel.plan.alignment is Alignment.TMA):
                    continue
                outputs = run_kernel(kernel, function, (a, bs, loads), plane_rows(spec, m), n)
                for actual, right in zip(outputs, expected, strict=True):
                    error = relative_error(actual, right)
                    if not error < TOLERANCE.get(actual.dtype, 1e-9):
                        name = f"{kernel.plan.tile.name} {kernel.plan.alignment.value}"
                        failures.append(f"{name} ({m}, {n}, {k}) {actual.dtype}: {error:.2e}")
    assert not failures, "\n".join(failures)


def fitting(spec: EpilogueSpec, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """A shape that a spec can have, with M and N rounded up: N to whole blocks of columns, M to the pitch of
    a transposed plane, and to the rows of whole batches where these are a constant. If columns are in
    segments, N is the sum of their widths."""
    m, n, k = shape
    blocks = lcm(*(columns for _, columns in blocks_of(spec)))
    n = -(-n // blocks) * blocks
    heads = (store.form.batch_rows or 1 for store in spec.stores if isinstance(store.form, Heads))
    batches = (each.rows or 1 for each in spec.reductions.values())
    rows = lcm(16 if _has_columns(spec) else 1, *heads, *batches)
    return -(-m // rows) * rows, spec.plane_n(n), k


def plane_rows(spec: EpilogueSpec, m: int) -> int:
    """The rows of the plane: M, or those of every group's product where K is in groups."""
    return m * len(Problem(m, 1, 1).ends) if spec.product.kind is ProductKind.K_GROUPED else m


def run_kernel(kernel: Kernel, function: KernelFunction, operands: Operands, m: int, n: int) -> list[Tensor]:
    """Runs a kernel on A, every B and loads for these M and N."""
    outputs, memory = outputs_of(kernel, m, n)
    clusters = max_active_clusters(0, kernel.plan.tile.cluster_size)
    function(*Binding(kernel.plan.spec).bind(*operands).tensors, *memory, clusters)
    return outputs


def operands_of(
    spec: EpilogueSpec, m: int, n: int, k: int, *, aligned: bool, device: str = "cuda"
) -> Operands:
    """A, every B and loads for a spec. Sums of products are exact. No load is aligned unless `aligned`.

    The B of different groups have different factors, and all rows are in one group. Scales of blocks are
    powers of two, and adjacent ones differ; if `aligned`, they are contiguous along rows and columns.
    """
    generator = torch.Generator(device).manual_seed(m + n + k)
    acc, columns = spec.product, 2 * n if spec.b_columns is BColumns.INTERLEAVED else n
    problem = Problem(m, n, k, device=device)

    def product(rows: int, columns: int, dtype: DType) -> Tensor:
        return problem.operand(rows, columns, dtype=TORCH_DTYPES[dtype], generator=generator)

    pad = 16  # so that K need not be a pitch that TMA accepts
    wide_m, wide_n = -(-m // pad) * pad, -(-columns // pad) * pad
    a = product(m, k, acc.a_dtype) if acc.a_major is Major.K else product(k, wide_m, acc.a_dtype).t()[:m]
    bs = [
        _of_heads(product(2 * each.width, k, acc.b_dtype), each.b_block)
        if each.b_block
        else product(each.width or columns, k // acc.packing, acc.b_dtype).t()
        if acc.b_major is Major.K
        else product(k, wide_n, acc.b_dtype)[:, : each.width or columns]
        for each in spec.first_of_each_b
    ]
    if acc.kind is ProductKind.BATCHED:
        count = next(count for count in (3, 2, 1) if m % count == 0)
        a = a.unflatten(0, (count, -1))
        bs = [_multiples(b, (1, -1, 1)[:count]) for b in bs]
        bs = [b.mT.contiguous().mT if acc.b_major is Major.K else b for b in bs]
    operands = [a]
    if acc.kind is ProductKind.K_GROUPED:
        step = 1 if acc.a_dtype.bits == 16 else FP8_K_STEP
        ends = [k * end // m // step * step for end in problem.ends]
        ends[-1] -= 3 if step > 1 else 0  # in fp8 too, the last group ends anywhere
        operands.append(torch.tensor(ends, dtype=torch.int32, device=device))
    if acc.kind is ProductKind.GROUPED:
        factors = [(1, -1, 2, -2)[i % 4] for i in range(len(problem.ends))]
        bs = [_multiples(b, factors) for b in bs]
        bs = [b.mT.contiguous().mT if acc.b_major is Major.K else b for b in bs]
        operands.append(torch.tensor(problem.ends, dtype=torch.int32, device=device))
    if acc.is_block_scaled:
        counts = acc.a_scaling.blocks(m), Scaling.SQUARE.blocks(k), acc.b_scaling.blocks(columns)
        of_a, of_b = _block_scales(counts[:2], device), _block_scales(counts[:0:-1], device).t()
        operands.append(of_a if aligned else of_a.contiguous())
        bs += [(of_b if aligned else of_b.contiguous()) * 2.0**i for i in range(spec.b_count)]
    loads = [
        _vectors_of_groups(load, len(problem.ends), n, generator)
        if load.kind is LoadKind.GROUPVEC
        else _load(load, plane_rows(spec, m), spec.width_of(load.name) or n, generator, aligned)
        for load in spec.loads
    ]
    return operands, bs, loads


def _multiples(b: Tensor, factors: Sequence[int]) -> Tensor:
    """B times each factor, stacked: exact for operands of `Problem.operand`. CUDA multiplies no fp8."""
    return torch.stack([b.float() * factor for factor in factors]).to(b.dtype)


def _of_heads(weight: Tensor, columns: int) -> Tensor:
    """B (K, N / columns, columns), of which the rows of `weight` (2 N, K) have every second block, as if the
    queries of each head were packed with its keys."""
    return weight.unflatten(0, (-1, 2 * columns))[:, :columns].permute(2, 0, 1)


def _block_scales(counts: tuple[int, int], device: str) -> Tensor:
    """(lines, blocks of K), contiguous along the lines."""
    lines, blocks = (torch.arange(count, device=device) for count in counts)
    return (2.0 ** ((lines + 2 * blocks[:, None]) % 5 - 2)).t()


def _vectors_of_groups(load: Load, groups: int, n: int, generator: torch.Generator) -> Tensor:
    step = 1 if load.stride_n is Stride.ONE else 2
    return _values((groups, step * n), load.dtype, generator, aligned=True)[:, ::step]


def _load(load: Load, m: int, n: int, generator: torch.Generator, aligned: bool) -> Tensor:
    if load.is_split:
        return with_modes(load, m, n, lambda shape: _values(shape, load.dtype, generator, aligned=aligned))
    if load.kind is not LoadKind.EXACT:
        size = {LoadKind.SCALAR: 1, LoadKind.ROWVEC: n, LoadKind.COLVEC: m}[load.kind]
        strided = Stride.OTHER in (load.stride_m, load.stride_n)
        vector = _values((size * (3 if strided else 1),), load.dtype, generator, aligned=True)
        return vector[::3] if strided else vector
    if load.stride_n is Stride.ONE:
        return _values((m, n), load.dtype, generator, aligned=aligned)
    if load.stride_m is Stride.ONE:
        return _values((n, m), load.dtype, generator, aligned=aligned).t()
    return _values((m, 2 * n), load.dtype, generator, aligned=aligned)[:, ::2]


def _values(shape: tuple[int, ...], dtype: DType, generator: torch.Generator, *, aligned: bool) -> Tensor:
    """Small random values. If they are not aligned, they begin one element past a boundary, with one element
    between rows."""
    random = torch.randn(shape, generator=generator, device=generator.device)
    if not dtype.is_float:
        random = (random * 3).clamp(0, 100) if dtype in (DType.U8, DType.BOOL) else random * 3
    values = (random > 1) if dtype is DType.BOOL else random.to(TORCH_DTYPES[dtype])
    return values if aligned else _unaligned_like(values).copy_(values)


def _unaligned_like(tensor: Tensor, *, dense: bool = False) -> Tensor:
    if dense:
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    *rows, columns = tensor.shape
    padded = (*rows, columns + 1)
    buffer = tensor.new_empty(torch.Size(padded).numel() + 1)
    return buffer[1:].unflatten(0, padded)[..., :columns]


def outputs_of(kernel: Kernel, m: int, n: int, device: str = "cuda") -> tuple[list[Tensor], list[Tensor]]:
    """The results, and all tensors that a kernel writes, full of NaN or of a value that no test computes.
    They are unaligned for a kernel that takes planes of any alignment, with an element between rows unless
    heads are stored. Counters of tiles are zeros, as a kernel expects them."""
    here = torch.empty(0, device=device)
    room = Outputs(kernel.plan).of_size(m, n)
    outputs, memory = room.allocate(here)
    place = 0
    for i, stores in enumerate(kernel.plan.spec.results):
        store = stores[0]
        if store.form.reduction is None and kernel.plan.alignment is Alignment.PLAIN:
            row = store.form.order is Order.ROW
            words = _as_memory(outputs[i], store.dtype)
            unaligned = _unaligned_like(words if row else words.t(), dense=isinstance(store.form, Heads))
            outputs[i] = (unaligned if row else unaligned.t()).view(outputs[i].dtype)
            parts = outputs[i].chunk(len(stores), 1) if len(stores) > 1 else [outputs[i]]
            memory[place : place + len(stores)] = (_as_memory(part, store.dtype) for part in parts)
        place += len(stores)
        outputs[i].fill_(float("nan") if store.dtype.is_float else 1 if store.dtype is DType.BOOL else 77)
    for workspace in memory[place:] if room.counters is None else memory[place:-1]:
        workspace.fill_(0xFF)
    return outputs, memory


def _as_memory(tensor: Tensor, dtype: DType) -> Tensor:
    """A result as a kernel writes it: truth values as bytes, and pairs of values as words of 4 bytes, to
    which memory is always aligned."""
    if dtype in PAIRED_DTYPES.values():
        return tensor.view(torch.int32)
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _has_columns(spec: EpilogueSpec) -> bool:
    loads = any(load.kind is LoadKind.EXACT and load.stride_n is not Stride.ONE for load in spec.loads)
    return loads or any(store.form.order is Order.COLUMN for store in spec.stores)
