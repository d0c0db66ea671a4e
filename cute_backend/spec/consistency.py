"""The checks that a spec makes on construction: facts that contradict each other raise SpecError."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

from cute_backend.dtypes import PAIRED_DTYPES, PRODUCT_DTYPES, DType
from cute_backend.errors import SpecError
from cute_backend.kinds.axes import Order, Stride
from cute_backend.spec.chain_ops import Overflow
from cute_backend.spec.loads import Load
from cute_backend.spec.products import STORED_DTYPES, Accumulator, Columns, Major, ProductKind
from cute_backend.spec.stores import Store

if TYPE_CHECKING:
    from cute_backend.spec.epilogue_spec import EpilogueSpec


_MMA_DTYPES = (DType.E4M3, DType.E5M2, DType.E2M1X2, DType.I8, DType.BF16, DType.F16)


def validate(spec: EpilogueSpec) -> None:
    """Raises SpecError if the parts of a spec contradict each other."""
    if not spec.accumulators:
        raise SpecError("a spec needs at least one accumulator")
    if not spec.stores:
        raise SpecError("a spec needs at least one store")
    seen: set[str] = set()

    def define(name: str) -> None:
        if not name.isidentifier():
            raise SpecError(f"{name!r} is not an identifier, and value names appear in generated code")
        if name in seen:
            raise SpecError(f"two values are called {name!r}")
        seen.add(name)

    positions = {store.form.positions for store in spec.stores}
    compared = {operand for op in spec.ops if op.op == "eq" for operand in op.values}
    for acc in spec.accumulators:
        define(acc.name)
        _validate_accumulator(acc)
    _validate_together(spec.accumulators)
    for load in spec.loads:
        define(load.name)
        if not load.kind.allows(load.stride_m is not Stride.ZERO, load.stride_n is not Stride.ZERO):
            raise SpecError(
                f"{load.name} is called {load.kind.value} but has stride classes "
                f"({load.stride_m.value}, {load.stride_n.value})"
            )
        if load.dtype is DType.I64 and load.name not in positions | compared:
            raise SpecError(f"{load.name} is i64, which only places in a row or in a cache are loaded as")
        if load.kind.by_group:
            _validate_group_vectors(load, spec.product.kind)
        if load.m_modes:
            _validate_modes(load)
        if load.blocks is not None:
            of_rows, what = [load.stride_m, *load.m_modes], f"has blocks of {load.blocks.columns} columns"
            if rule := load.blocks.contradiction(of_rows, load.stride_n, load.kind.is_plane):
                raise SpecError(f"{load.name} {what}{rule}")
    for op in spec.ops:
        for operand in op.operands:
            if isinstance(operand, str) and operand not in seen:
                raise SpecError(f"{op.name} reads {operand!r} before it is made")
            if isinstance(operand, str) and spec.dtypes[operand] is DType.I64 and op.op != "eq":
                raise SpecError(
                    f"{op.name} reads {operand!r}, which is i64; only eq and stores to a cache do"
                )
        if op.op != "cast" and op.dtype is not op.dtype.register:
            raise SpecError(f"{op.name} = {op.op} has dtype {op.dtype.value}; only a cast may narrow")
        if op.dtype is DType.I64:
            raise SpecError(f"{op.name} has dtype i64, which only indices are stored as")
        if op.overflow is not Overflow.SATURATE and not (op.op == "cast" and op.dtype.is_fp8):
            raise SpecError(f"{op.name} = {op.op} to {op.dtype.value} has no overflow rule to state")
        define(op.name)
    for store in spec.stores:
        if store.value not in seen:
            raise SpecError(f"{store.name} stores {store.value!r}, which nothing computes")
        _validate_store(store, spec.dtypes[store.value])
        if store.form.positions:
            _validate_positions(spec, store)
        if spec.product.kind is not ProductKind.DENSE:
            _validate_several(store, spec.product.kind)
    _validate_parts(spec.stores)
    if spec.product.segment:
        _validate_segments(spec)
    names = [store.name for store in spec.stores]
    scales = {op.name for op in spec.ops if op.op == "cast" and op.dtype is DType.E8M0}
    scales |= {store.name for store in spec.stores if store.form.whole_columns and store.dtype is DType.E8M0}
    held: list[tuple[str, DType]] = [(load.name, load.dtype) for load in spec.loads]
    held += [(op.name, op.dtype) for op in spec.ops] + [(store.name, store.dtype) for store in spec.stores]
    for name, dtype in held:
        if dtype in PRODUCT_DTYPES and name not in scales:
            raise SpecError(f"{name} is {dtype.value}, which only operands of products are")
        if dtype in PAIRED_DTYPES.values() and name not in names:
            raise SpecError(f"{name} is {dtype.value}, which only stores are")
    if len(set(names)) != len(names) or seen & set(names):
        raise SpecError(f"the stores {names} clash among themselves or with values")


def _validate_group_vectors(load: Load, kind: ProductKind) -> None:
    if not kind.has_offsets:
        raise SpecError(
            f"{load.name} has a vector for each group, and the rows of a {kind.value} product are in none"
        )
    if load.is_split:
        raise SpecError(
            f"{load.name} has a vector for each group, and M or N in several modes; expected one of each"
        )


def _validate_modes(load: Load) -> None:
    modes = f"M modes ({', '.join(mode.value for mode in load.m_modes)})"
    if len(load.m_modes) == 1 or set(load.m_modes) not in ({Stride.OTHER}, {Stride.ZERO, Stride.OTHER}):
        raise SpecError(f"{load.name} has {modes}; expected two or more of 0 and s, and not 0 alone")
    if load.stride_m is not Stride.OTHER:
        raise SpecError(
            f"{load.name} has {modes} and a stride of class {load.stride_m.value} along all of M; expected s"
        )


def _validate_store(store: Store, value: DType) -> None:
    if store.dtype in PAIRED_DTYPES.values():
        _validate_pairs(store, value)
    what = f"{store.name}{store.form.described(store.value)}"
    if rule := store.form.contradiction(value, store.dtype):
        raise SpecError(f"{what} {rule}")
    if store.form.reduction is None and store.dtype is DType.I64:
        raise SpecError(f"{what} stores a plane as i64, which only indices are stored as")
    if store.form.reduction is None and store.after:
        raise SpecError(f"{what} stores a plane and has ops after it; only reductions have them")
    if store.after and not store.dtype.is_float:
        raise SpecError(f"{what} is stored as {store.dtype.value}; the result of ops after it is a float")


def _validate_positions(spec: EpilogueSpec, store: Store) -> None:
    load = next((load for load in spec.loads if load.name == store.form.positions), None)
    if load is None or load.kind.by_column or load.dtype not in (DType.I32, DType.I64):
        raise SpecError(
            f"{store.name}{store.form.described(store.value)} it is at {store.form.positions!r}; expected a "
            "scalar or a colvec of i32 or i64"
        )


def _validate_pairs(store: Store, value: DType) -> None:
    if value is not DType.I32:
        raise SpecError(f"{store.name} stores {value.value} as {store.dtype.value}; pairs are i32")
    if not store.form.holds_pairs:
        raise SpecError(f"{store.name} is stored as {store.dtype.value}; pairs are a whole plane by rows")


def _validate_parts(stores: tuple[Store, ...]) -> None:
    first = 0
    while first < len(stores):
        store, count = stores[first], stores[first].form.count
        group = stores[first : first + count]
        if [(each.form.index, each.form.count) for each in group] != [(i, count) for i in range(count)]:
            raise SpecError(
                f"{store.name}{store.form.described(store.value)} the parts of a result follow each other "
                "from 0 on"
            )
        if len({each.dtype for each in group}) > 1:
            raise SpecError(f"{store.name} is a part of a result; all parts have one dtype")
        first += count


def _validate_several(store: Store, kind: ProductKind) -> None:
    what = f"{store.name}{store.form.described(store.value)}"
    if store.form.needs_dense:
        raise SpecError(f"{what} no plane of a {kind.value} product may")
    if store.form.order is not Order.ROW and kind is not ProductKind.GROUPED:
        raise SpecError(
            f"{store.name} has order {store.form.order.value}; the planes of a {kind.value} product have rows"
        )
    if not store.form.rows_apart:
        raise SpecError(f"{what} is of several rows; {kind.value} products are reduced by row")


def _validate_together(accumulators: tuple[Accumulator, ...]) -> None:
    first = accumulators[0]
    for acc in accumulators[1:]:
        alike = replace(acc, name=first.name, columns=first.columns, width=first.width, height=first.height)
        if replace(alike, b_block=first.b_block) != first:
            raise SpecError(
                f"{first.name} and {acc.name} differ in dtypes, majors, mode of accumulation or scaling, and "
                "one MMA computes both"
            )
    for what, sizes in {
        "columns": [acc.width for acc in accumulators],
        "rows": [acc.height for acc in accumulators],
    }.items():
        if any(type(size) is not int or size < 0 for size in sizes) or len({*map(bool, sizes)}) > 1:
            raise SpecError(
                f"the accumulators have segments of {sizes} {what}; accepted are 0 for all, or those of each"
            )
    columns = [acc.columns for acc in accumulators]
    if columns != [Columns.EVEN, Columns.ODD] and set(columns) != {Columns.ALL}:
        raise SpecError(
            f"the accumulators have {', '.join(each.value for each in columns)} columns; expected all, "
            "or one of even and one of odd"
        )


def _validate_segments(spec: EpilogueSpec) -> None:
    product = spec.product
    lines = "columns" if product.width else "rows"
    if product.width and product.height:
        raise SpecError(f"{product.name} has a segment of {product.width} columns and {product.height} rows")
    if len(spec.accumulators) < 2 or product.kind is not ProductKind.DENSE or product.in_order:
        raise SpecError(
            f"{product.name} has a segment of {product.segment} {lines}; accepted are two or more dense "
            "products without block scales"
        )
    if product.columns is not Columns.ALL:
        raise SpecError(f"{product.name} has a segment and {product.columns.value} columns of a B")
    found = spec.segments_of
    for index, acc in enumerate(spec.accumulators):
        if found[acc.name] != {index}:
            others = ", ".join(spec.accumulators[each].name for each in sorted(found[acc.name] - {index}))
            raise SpecError(f"{acc.name} meets {others}, and each has a segment of {lines} of its own")
        if not any(found[store.value] == {index} for store in spec.stores):
            raise SpecError(f"nothing of {acc.name} is stored")
    for acc, segment in zip(spec.accumulators, spec.segments, strict=True):
        blocks = [segment.block_columns, *(load.blocks.step for load in segment.loads if load.blocks)]
        if acc.width % (columns := lcm(*blocks)):
            raise SpecError(f"{acc.name} has {acc.width} columns, and blocks of {columns}")
    shared = "colvec" if product.width else "rowvec"
    for load in spec.loads:
        has_lines = (load.stride_n if product.width else load.stride_m) is not Stride.ZERO
        if not found[load.name] or (len(found[load.name]) > 1 and has_lines):
            raise SpecError(
                f"{load.name} is a {load.kind.value} of {len(found[load.name])} segments; only a scalar or a "
                f"{shared} has several"
            )
    for store in spec.stores:
        paired = store.dtype in PAIRED_DTYPES.values()
        if not store.form.in_segments or paired or len(found[store.value]) != 1:
            raise SpecError(
                f"{store.name} is a part, a reduction, in pairs or of no segment; segments store planes"
            )


def _validate_accumulator(acc: Accumulator) -> None:
    a, b = acc.a_dtype, acc.b_dtype
    if a is b is DType.E2M1X2 and not acc.a_scaling.by_mma:
        raise SpecError(f"{acc.name} multiplies e2m1x2 without scales of 1x32 or 1x16 blocks")
    taken = (*_MMA_DTYPES, *STORED_DTYPES) if acc.is_converted else _MMA_DTYPES
    if a not in taken or b not in taken:
        raise SpecError(
            f"no MMA takes {a.value} times {b.value}; it takes e4m3, e5m2, e2m1x2, i8, bf16 and f16"
        )
    if acc.is_converted:
        _validate_converted(acc)
    elif a.is_fp8 != b.is_fp8 or (not a.is_fp8 and a is not b):
        raise SpecError(f"no MMA multiplies {a.value} by {b.value}")
    if a is DType.E5M2 and b is DType.E5M2:
        raise SpecError("e5m2 is accepted on one side only, as CUDA's scaled_mm has it")
    if a.bits == 8 and (acc.a_major is not Major.K or acc.b_major is not Major.K):
        raise SpecError("operands of 8 and 4 bits must both be K-major")
    if acc.dtype is DType.I32 and not acc.fast_accum:
        raise SpecError(f"{acc.name} has no fast_accum, and sums of i8 are exact")
    if acc.kind is ProductKind.K_GROUPED and a.bits == 16 and Major.K in (acc.a_major, acc.b_major):
        raise SpecError(
            f"{acc.name} has K in groups, and a 16-bit operand that is contiguous along K; neither may be"
        )
    for fault in (scales.fault(acc) for scales in acc.scales):
        if fault:
            raise SpecError(f"{acc.name} {fault}")
    if acc.b_block:
        _validate_b_block(acc)


def _validate_converted(acc: Accumulator) -> None:
    stored, other = sorted((acc.a_dtype, acc.b_dtype), key=lambda dtype: dtype.bits)
    if stored not in STORED_DTYPES or other.bits != 16:
        accepted = ", ".join(dtype.value for dtype in STORED_DTYPES)
        raise SpecError(
            f"{acc.name} multiplies {acc.a_dtype.value} by {acc.b_dtype.value}; converted to the bf16 or f16 "
            f"of the other operand are {accepted}"
        )
    along_k = acc.a_major is acc.b_major is Major.K
    if not along_k or acc.kind is not ProductKind.DENSE or acc.columns is not Columns.ALL or acc.b_block:
        raise SpecError(
            f"{acc.name} converts {stored.value} to {other.value}, which only a dense product does whose "
            "operands are both K-major, of all columns of B"
        )


def _validate_b_block(acc: Accumulator) -> None:
    plain = acc.kind is ProductKind.DENSE and not acc.in_order and acc.columns is Columns.ALL
    whole = type(acc.b_block) is int and acc.b_block > 0 and acc.width % acc.b_block == 0
    if not (plain and whole and acc.b_major is Major.K):
        raise SpecError(
            f"{acc.name} has columns of B in blocks of {acc.b_block}; accepted are blocks that divide all "
            "columns of a dense product without block scales, whose B is contiguous along K"
        )
