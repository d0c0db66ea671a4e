"""The reference interpreter: an EpilogueSpec computed with aten, on any device.

The op runs it on a CPU, and if a kernel can't be built, and every test compares kernels with it. Each step is
one row of the op table; every cast follows `numerics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from cute_backend import numerics
from cute_backend.kinds.blocks import BlockOp
from cute_backend.kinds.scales import Scales, sum_of_blocks
from cute_backend.ops import (
    COLUMN_INDEX,
    OPS,
    ROW_INDEX,
    check,
    effective_dtype,
    operand_dtypes,
    promote,
)
from cute_backend.spec import (
    FP8_K_STEP,
    REDUCED,
    BColumns,
    Const,
    DType,
    EpilogueSpec,
    Op,
    Operand,
    Overflow,
    ProductKind,
    Store,
)


def replay(
    spec: EpilogueSpec,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    loads: Sequence[Tensor],
    *,
    accumulate: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Computes the spec's results, in order: (M, N) tensors, dense in each store's order, or their
    reductions. A result of several parts is (M, parts * N). A result in a cache is a new one, (B * L, N), in
    which all bits of the other rows are set.

    `a` has one tensor, (M, K), and `b` one (K, N) for each accumulator, or one (K, 2 N) for even and odd
    columns. If the columns of B are blocks of b, it is (K, N / b, b). If an element of it has two values, it
    is (K / 2, N). If blocks of 128 have scales, these
    follow: (M, K / 128) or (M / 128, K / 128) for A, and (K / 128, N) or (K / 128, N / 128) for each B,
    rounded up. Scales in tiles follow in one axis (`Scaling.tiled`). If a weight is in groups of K, its
    scales, and its zeros, follow: (K / group, N). For a product with groups of rows, `a` has the offsets (G,)
    after A, each B is (G, K, N), and scales of B have a leading G. For one with groups
    of K, `a` has the offsets, and the plane is (G * M, N). `loads` follow the spec: (M, N) for an exact load,
    (N,) for a rowvec, (M,) for a colvec, (G, N) for a groupvec, one element for a scalar. If a load has
    several modes of M, it has an axis for each of them in place of M; if it has blocks of b columns, it has
    (N / b, b) in place of N. Products and reductions are summed in the dtype `accumulate`, in which the
    operands' values are exact, in the order of the device's own kernels. Choose float64 to keep the rounding
    of that order out of a test. Sums of int8 are exact, in int32. Everything else is fp32.

    Raises SpecError if an op and its operands contradict the op table, ValueError where the number of
    operands contradicts the spec, IndexError for an extremum of no elements.
    """
    check(spec)
    if spec.b_columns is BColumns.SEGMENTS:
        return _of_segments(spec, a, b, loads, accumulate)
    values: dict[str, Tensor] = {}
    exact = torch.float64 if spec.product.dtype is DType.I32 else accumulate
    sums = (product.flatten(0, -2) for product in _products(spec, a, b, exact))
    products = [numerics.convert(each, spec.product.dtype) for each in sums]
    if spec.b_columns is BColumns.INTERLEAVED:
        (both,) = products
        products = [both[:, ::2], both[:, 1::2]]
    values.update(zip((acc.name for acc in spec.accumulators), products, strict=True))
    for load, tensor in zip(spec.loads, loads, strict=True):
        by_row = _by_rows(spec, tensor, a) if load.kind.by_group else tensor
        values[load.name] = numerics.widen(load.over_plane(by_row), load.dtype)
    plane = (products[0].shape[0], products[0].shape[1])
    for op in spec.ops:
        if op.over_blocks is None:
            values[op.name] = _step(spec, op, values, plane)
        else:
            values[op.name] = _over_blocks(op, op.over_blocks, values, plane, accumulate)
    results, given = [], _by_name(spec, loads)
    for stores in spec.results:
        written = [
            _written(spec, store, values[store.value].expand(plane), given, accumulate) for store in stores
        ]
        results.append(written[0] if len(written) == 1 else torch.cat(written, 1))
    return results


def _by_name(spec: EpilogueSpec, loads: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip((load.name for load in spec.loads), loads, strict=True))


def _of_segments(
    spec: EpilogueSpec,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    loads: Sequence[Tensor],
    accumulate: torch.dtype,
) -> list[Tensor]:
    """The results of the segments, each by itself, in the spec's order."""
    given = _by_name(spec, loads)
    results: dict[str, Tensor] = {}
    for index, segment in enumerate(spec.segments):
        own = [given[load.name] for load in segment.loads]
        names, right = (store.name for store in segment.stores), b[index :: spec.b_count]
        results |= dict(zip(names, replay(segment, a, right, own, accumulate=accumulate), strict=True))
    return [results[store.name] for store in spec.stores]


def _products(
    spec: EpilogueSpec, a: Sequence[Tensor], b: Sequence[Tensor], accumulate: torch.dtype
) -> list[Tensor]:
    """Multiplies A by every B, with the vectors beside them."""
    product, count = spec.product, spec.b_count
    (a_side, of_a), (b_side, of_b) = spec.scaled
    of_spec = 1 + product.kind.has_offsets + len(of_a.beside(a_side)), count * (1 + len(of_b.beside(b_side)))
    if (len(a), len(b)) != of_spec:
        raise ValueError(f"got {len(a)} and {len(b)} tensors of A and B; the spec has {of_spec}")
    left, *beside = a
    ends = beside.pop(0) if product.kind.has_offsets else None
    every_b = [(b[i], b[i + count :: count]) for i in range(count)]

    def applied(scales: Scales, operand: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        return scales.applied(operand, vectors, product.multiplied, numerics.cast).to(accumulate)

    def values(right: Tensor) -> Tensor:
        return right if product.format is None else product.format.unpacked(right)

    if product.kind is ProductKind.K_GROUPED:
        assert ends is not None
        step = 1 if product.a_dtype.bits == 16 else FP8_K_STEP
        return [_by_groups_of_k(left, ends, right, accumulate, step) for right, _ in every_b]
    if ends is not None:
        rows = of_a.in_groups(left, ends.tolist(), beside, product.multiplied, numerics.cast)
        products = []
        for right, vectors in every_b:
            matrices = (applied(of_b, one, own) for one, *own in zip(right, *vectors, strict=True))
            products.append(_of_groups(rows, ends, matrices, right.shape[-1], accumulate))
        return products
    if of_a.scales_sums:
        scalings = product.a_scaling, product.b_scaling
        return [
            sum_of_blocks(left, right, scalings, (beside[0], own), accumulate) for right, (own,) in every_b
        ]
    rows = applied(of_a, left.mT, beside).mT
    joined = [(right.flatten(1) if product.b_block else values(right), vectors) for right, vectors in every_b]
    return [torch.matmul(rows, applied(of_b, right, vectors)) for right, vectors in joined]


def _of_groups(
    a: Tensor, offsets: Tensor, matrices: Iterable[Tensor], columns: int, accumulate: torch.dtype
) -> Tensor:
    """The rows of each group times its B, one of `matrices`. Rows beyond the last group, which no kernel
    writes, are zeros."""
    product, first = a.new_zeros((a.shape[0], columns), dtype=accumulate), 0
    for right, end in zip(matrices, offsets.tolist(), strict=True):
        torch.matmul(a[first:end].to(accumulate), right, out=product[first:end])
        first = end
    return product


def _by_groups_of_k(a: Tensor, offsets: Tensor, b: Tensor, accumulate: torch.dtype, step: int) -> Tensor:
    """(G, M, N): for each group, its columns of A times its rows of B. The product of an empty group is
    zeros. Ends are rounded down to multiples of `step`, except for that of a last group that is not empty."""
    products = a.new_zeros((len(offsets), a.shape[0], b.shape[1]), dtype=accumulate)
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        is_whole = group == len(offsets) - 1 and begin < end
        k = slice(begin // step * step, end if is_whole else end // step * step)
        torch.matmul(a[:, k].to(accumulate), b[k].to(accumulate), out=products[group])
        begin = end
    return products


def _by_rows(spec: EpilogueSpec, vectors: Tensor, a: Sequence[Tensor]) -> Tensor:
    """Returns (M, N): for each row of the plane, the vector of its group, from (G, N). Rows beyond the last
    group get the last vector."""
    rows, offsets = a[0].shape[0], a[1]
    if spec.product.kind is ProductKind.K_GROUPED:
        return vectors.repeat_interleave(rows, 0)
    groups = torch.searchsorted(
        offsets, torch.arange(rows, device=offsets.device, dtype=offsets.dtype), right=True
    )
    return vectors[groups.clamp(max=len(vectors) - 1)]


def _step(spec: EpilogueSpec, op: Op, values: dict[str, Tensor], plane: tuple[int, int]) -> Tensor:
    device = values[spec.accumulators[0].name].device
    row = OPS[op.op]
    if row is ROW_INDEX:
        return torch.arange(plane[0], dtype=torch.int32, device=device).unsqueeze(1)
    if row is COLUMN_INDEX:
        return torch.arange(plane[1], dtype=torch.int32, device=device)

    def fetch(operand: Operand, register: DType) -> Tensor:
        if isinstance(operand, Const):
            return torch.tensor(operand.value, dtype=numerics.TORCH_DTYPES[register], device=device)
        return numerics.convert(values[operand], register)

    registers = promote(row, operand_dtypes(spec, op))
    operands = [fetch(operand, register) for operand, register in zip(op.operands, registers, strict=True)]
    if op.op == "cast":
        return numerics.cast(operands[0], effective_dtype(op, spec.precision), op.overflow)
    return row.reference(*operands)


def _over_blocks(
    op: Op, kind: BlockOp, values: Mapping[str, Tensor], plane: tuple[int, int], accumulate: torch.dtype
) -> Tensor:
    """The result of an op over blocks, which kinds compute from fp32, or from the indices of columns."""
    _, n = plane
    if n % op.block:
        raise ValueError(f"{op.name} has blocks of {op.block} columns, and {n} columns are no multiple")
    device = next(iter(values.values())).device
    columns = torch.arange(n, dtype=torch.int32, device=device)
    if not kind.reads:
        return kind.reference(columns.view(-1, op.block), op.part_columns, accumulate).reshape(n)
    operand, *_ = op.operands
    value = torch.tensor(operand.value, device=device) if isinstance(operand, Const) else values[operand]
    rows = numerics.convert(value, DType.F32).expand(plane).reshape(-1, op.block)
    return kind.reference(rows, op.part_columns, accumulate).reshape(plane)


def _written(
    spec: EpilogueSpec,
    store: Store,
    value: Tensor,
    loads: Mapping[str, Tensor],
    accumulate: torch.dtype,
) -> Tensor:
    """The result of a store of an (M, N) value, always in new memory. `loads` are the operands by name."""
    form = store.form
    result = form.elements(value, accumulate)
    if store.after:
        result = _after(spec.finishing(store), result)
    if store.dtype is not DType.I64:
        result = packed(spec, store, result)
    rows = spec.rows_of_batch(store, {name: each.shape for name, each in loads.items()}, len(value))
    return form.placed(result, rows, loads.get(form.positions))


def _after(finishing: EpilogueSpec, result: Tensor) -> Tensor:
    """The value of the ops after a reduction with this result, as fp32."""
    values = {REDUCED: result}
    for op in finishing.ops:
        values[op.name] = _step(finishing, op, values, (1, 1))
    return numerics.convert(values[finishing.stores[0].value], DType.F32)


def packed(spec: EpilogueSpec, store: Store, value: Tensor) -> Tensor:
    """A value, or an element of it, in memory's dtype.

    A value that already has the store's dtype is stored as it is: an infinity of e5m2 stays one.
    """
    rounded = spec.dtypes[store.value] is store.dtype and store.form.is_element
    return numerics.store(value, store.dtype, Overflow.NONFINITE if rounded else Overflow.SATURATE)
