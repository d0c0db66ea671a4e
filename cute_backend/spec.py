"""The spec of a fused epilogue: the one structure that the walker, the emitter and the runtime share.

A spec is a DAG in SSA order. Its values are the accumulators, the loads and the results of the ops, each
known by its name; a store names the value that it writes. A spec holds no sizes but those of blocks of
columns, so one kernel serves every M, N and K, and its canonical JSON form is the key of every cache.

Where values live. A floating-point value is held in fp32, an integer value in int32, a truth value as a
bool, whatever dtype it was loaded from: widening is exact. `Op.dtype` says what the result has been rounded
or wrapped to; only `cast` may name a dtype narrower than the three register dtypes. A store rounds its value
to `Store.dtype` as a saturating cast would.

A store may reduce: then it has one element for each row, for each column, or for the whole plane. Reductions
are computed in fp32, over the elements of the (M, N) plane and no others. Their results can't be read in the
same spec, as they are whole only when the kernel is done. An op may reduce too, over blocks of columns that a
tile holds whole, and its result is a value like any other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import lcm
from typing import Any, Union

SPEC_VERSION = 10


class SpecError(ValueError):
    """A spec contradicts itself; the message names the facts that contradict."""


class DType(str, Enum):
    """Element types of operands, loads, stores and cast results."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    I8 = "i8"
    U8 = "u8"
    I32 = "i32"
    I64 = "i64"
    """Indices, as torch stores them; held in int32."""
    BOOL = "bool"

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.BF16, DType.F16, DType.E4M3, DType.E5M2)

    @property
    def is_fp8(self) -> bool:
        return self in (DType.E4M3, DType.E5M2)

    @property
    def bits(self) -> int:
        """Bits of one element in memory; a bool takes a byte, as in torch."""
        return {DType.I64: 64, DType.F32: 32, DType.I32: 32, DType.BF16: 16, DType.F16: 16}.get(self, 8)

    @property
    def register(self) -> DType:
        """The dtype in which a value of this dtype is held inside the epilogue."""
        if self.is_float:
            return DType.F32
        return DType.BOOL if self is DType.BOOL else DType.I32


VALUE_DTYPES = tuple(dtype for dtype in DType if dtype is not DType.I64)
"""The dtypes of operands, loads, casts and stored planes: all but that of indices."""


class LoadKind(str, Enum):
    """How an operand varies over the (M, N) plane: which of its strides are zero, or by groups of rows."""

    SCALAR = "scalar"
    ROWVEC = "rowvec"
    COLVEC = "colvec"
    EXACT = "exact"
    GROUPVEC = "groupvec"
    """A rowvec for each group of a grouped product, as the biases of experts are."""


class Stride(str, Enum):
    """A stride's class, which a kernel is compiled for; the stride itself arrives at launch."""

    ZERO = "0"
    ONE = "1"
    OTHER = "s"


class Major(str, Enum):
    """The mode of a GEMM operand that is contiguous: A is (M, K), B is (K, N)."""

    K = "k"
    MN = "mn"


class ProductKind(str, Enum):
    """The matrices of a product, and the rows of it that are the plane of the epilogue."""

    DENSE = "dense"
    """A (M, K) times B (K, N): (M, N) is the plane."""
    BATCHED = "batched"
    """A (B, M, K) times B (B, K, N), one for each batch: their rows, (B * M, N), are the plane."""
    GROUPED = "grouped"
    """A (M, K), whose rows lie in groups that follow each other, times B (G, K, N), one for each group: the
    plane is (M, N). An argument of the kernel, the offsets (G,), says where each group ends; rows beyond the
    last one are not written."""


class Columns(str, Enum):
    """The columns of B that an accumulator is the product with."""

    ALL = "all"
    EVEN = "even"
    ODD = "odd"


class BColumns(str, Enum):
    """How columns of B are dealt out among the accumulators."""

    APART = "apart"
    """Each has a B of its own."""
    INTERLEAVED = "interleaved"
    """Two share one B, (K, 2 N): the even columns are the first one's, the odd ones the second one's."""


SCALE_BLOCK = 128
"""Elements of K, and where a block has several also rows of A or columns of B, that share a block's scale."""


class Scaling(str, Enum):
    """How an operand of a product is scaled: by its blocks, each with an fp32 number of its own.

    The names are those of `_scaled_mm`'s recipes: rows of A, or columns of B, by elements of K.
    """

    NONE = "none"
    """By none. A scale of the tensor, of rows or of columns doesn't vary along K: it is a load."""
    LINE = "1x128"
    SQUARE = "128x128"

    @property
    def lines(self) -> int:
        """Rows of A, or columns of B, in one block."""
        return 1 if self is Scaling.LINE else SCALE_BLOCK

    def blocks(self, lines: Any) -> Any:
        """The number of blocks in `lines` rows of A, or columns of B."""
        return (lines + self.lines - 1) // self.lines


class Order(str, Enum):
    """Memory order of a stored (M, N) plane."""

    ROW = "row"
    COLUMN = "column"


class Axis(str, Enum):
    """The axis that a reduction keeps: it has one result for each row or column, or one for the plane."""

    ROW = "row"
    """Each row, reduced over N: (M,)."""
    COLUMN = "column"
    """Each column, reduced over M: (N,)."""
    ALL = "all"
    """The plane: 0-d."""


class ReduceKind(str, Enum):
    """How a reduction combines elements: as torch does, ties and NaN included."""

    SUM = "sum"
    MEAN = "mean"
    """A sum, divided by how many there were when it is finished."""
    MAX = "max"
    """NaN where there is one, else the largest; +0 is larger than -0."""
    MIN = "min"
    """NaN where there is one, else the smallest; -0 is smaller than +0."""
    ARGMAX = "argmax"
    """Where the largest is, or the first NaN; of equals, which zeros are, the lowest index.

    The column for each row, the row for each column, row * N + column for the plane.
    """
    ARGMIN = "argmin"
    """As ARGMAX, of the smallest."""
    LOGSUMEXP = "logsumexp"
    """log(sum(exp(x))), shifted by the largest so that nothing overflows."""

    @property
    def is_index(self) -> bool:
        return self in (ReduceKind.ARGMAX, ReduceKind.ARGMIN)

    @property
    def is_extremum(self) -> bool:
        """Whether the result is one of the elements."""
        return self in (ReduceKind.MAX, ReduceKind.MIN)


class Overflow(str, Enum):
    """The result of a cast to fp8 of a finite value beyond the largest finite one."""

    SATURATE = "saturate"
    NONFINITE = "nonfinite"
    """NaN in e4m3 (beyond 464), infinity in e5m2 (from 61440 on): torch's casts that do not saturate."""


class Precision(str, Enum):
    """The casts inside the chain that round."""

    FUSED = "fused"
    """Casts to fp8 and to integers round; a trip through bf16 or fp16 does not, as in Inductor's kernels."""
    EAGER = "eager"
    """Every cast rounds, as eager does (`torch._inductor.config.emulate_precision_casts`)."""


@dataclass(frozen=True)
class Const:
    """A number in the chain. Its Python type is part of it: `Const(1)` and `Const(1.0)` differ."""

    value: Union[bool, int, float]

    @property
    def dtype(self) -> DType:
        if isinstance(self.value, bool):
            return DType.BOOL
        return DType.I32 if isinstance(self.value, int) else DType.F32


Operand = Union[str, Const]
"""The name of an earlier value, or a number."""


@dataclass(frozen=True)
class Accumulator:
    """One matrix product of A and B, accumulated in fp32; `kind` has their shapes.

    The accumulators of a spec share one A, and one MMA computes them all. Accumulators of EVEN and ODD
    columns come as a pair, in this order, and share a B of (K, 2 N) as well.

    `fast_accum` is `_scaled_mm`'s `use_fast_accum`: without it, Hopper's fp8 MMA promotes its partial sums to
    fp32 registers at intervals. It has no meaning for 16-bit operands, where it is True.

    With `a_scaling` and `b_scaling` it is the sum over K's blocks b of A_b B_b * (scale_a[m, b] * scale_b[b,
    n]), each term in fp32: the MMA adds up no more than a block, and `fast_accum` is False.
    """

    name: str
    a_dtype: DType
    b_dtype: DType
    a_major: Major = Major.K
    b_major: Major = Major.K
    fast_accum: bool = True
    columns: Columns = Columns.ALL
    kind: ProductKind = ProductKind.DENSE
    a_scaling: Scaling = Scaling.NONE
    b_scaling: Scaling = Scaling.NONE

    @property
    def is_block_scaled(self) -> bool:
        """Whether its operands have scales that vary along K."""
        return self.a_scaling is not Scaling.NONE


@dataclass(frozen=True)
class Blocks:
    """How an operand varies over columns in blocks: N is the two modes (N / columns, columns).

    `outer` is the class of the stride from one block to the next, `inner` of that within a block; not both
    are ZERO. The columns of a block are the one size that a spec holds: a kernel divides columns by it, and
    a division by what is known when it is compiled takes few instructions.
    """

    columns: int
    outer: Stride
    inner: Stride


@dataclass(frozen=True)
class Load:
    """An epilogue operand, by role.

    The tensor given at launch has shape (M, N) for an exact load, (N,) for a rowvec, (M,) for a colvec,
    (G, N) for a groupvec and one element for a scalar, with the strides classed here.

    Where M is no single mode of the operand, as that of (B, 1, N) over a plane (B * S, N) is not, `stride_m`
    is OTHER and `m_modes` has the class of every mode that M is made of, outermost first: ZERO or OTHER. The
    tensor has an axis for each in place of M, (B, S, N) here, and of an axis of class ZERO the elements at
    index 0 are meant. Their sizes multiply to M.

    Where N is no single mode of it, as that of a vector (b,) for all blocks is not, nor that of (S, b) over a
    plane (S, N / b, b), `stride_n` is OTHER and `blocks` has the classes. The tensor then has the axes
    (N / b, b) in place of N; of an axis of class ZERO the elements at index 0 are meant.
    """

    name: str
    kind: LoadKind
    dtype: DType
    stride_m: Stride
    stride_n: Stride
    m_modes: tuple[Stride, ...] = ()
    blocks: Union[Blocks, None] = None

    @property
    def is_split(self) -> bool:
        """Whether M or N is several axes of its tensor. Such a plane is read by element."""
        return bool(self.m_modes) or self.blocks is not None

    @property
    def in_runs(self) -> bool:
        """Whether the columns of a block lie side by side in memory."""
        return self.blocks is not None and self.blocks.inner is Stride.ONE

    @property
    def order(self) -> Union[Order, None]:
        """The memory order of an exact load; None where neither of its strides is known to be 1, or M or N
        is several modes, and for every other kind."""
        if self.kind is not LoadKind.EXACT or self.is_split:
            return None
        if self.stride_n is Stride.ONE:
            return Order.ROW
        return Order.COLUMN if self.stride_m is Stride.ONE else None


ROTATE_HALF = "block_rotate_half"
"""The op that gives (-y, x) of each block of columns (x, y), in two halves, as rotary embeddings have it."""


@dataclass(frozen=True)
class Op:
    """One step of the chain: `name = op(*operands)`, rounded to `dtype`.

    An op that reduces blocks of columns has their size in `block`, which divides N: in every row the elements
    of a block have what the operand's elements of that block are reduced to. So has ROTATE_HALF, whose block
    is even.
    """

    name: str
    op: str
    operands: tuple[Operand, ...]
    dtype: DType
    overflow: Overflow = Overflow.SATURATE
    block: int = 0


@dataclass(frozen=True)
class Reduction:
    """The reduction of a stored value: one element along `axis` in place of the plane.

    Two stores of one value, MAX and ARGMAX, are what torch calls `max` with a dimension.
    """

    axis: Axis
    kind: ReduceKind


@dataclass(frozen=True)
class Store:
    """An output: the value `value`, converted to `dtype`.

    The (M, N) plane, written in `order`; or its reduction, (M,), (N,) or 0-d, rounded to `dtype` when it is
    whole. Indices are i64, and nothing else is. Extrema of integers keep their dtype; other reductions give
    floats.

    Or, with a `block`, a size in columns, (M, N / block) in `order`: of every block the value at its first
    column, as is meant for what blocks are reduced to, and for what follows from that alone.
    """

    name: str
    value: str
    dtype: DType
    order: Order = Order.ROW
    reduce: Union[Reduction, None] = None
    block: int = 0


@dataclass(frozen=True)
class EpilogueSpec:
    """A region: its matrix products, what the epilogue loads, what it computes and what it stores.

    Raises SpecError on construction where names clash, a value is used before it is made, a stride class
    contradicts its kind, or a dtype has no meaning at its place.
    """

    accumulators: tuple[Accumulator, ...]
    loads: tuple[Load, ...]
    ops: tuple[Op, ...]
    stores: tuple[Store, ...]
    precision: Precision = Precision.FUSED
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def product(self) -> Accumulator:
        """The first accumulator: its dtypes, majors and mode are those of all."""
        return self.accumulators[0]

    @cached_property
    def b_columns(self) -> BColumns:
        """How columns of B are dealt out among the accumulators."""
        return BColumns.APART if self.product.columns is Columns.ALL else BColumns.INTERLEAVED

    @property
    def b_count(self) -> int:
        """How many B there are."""
        return 1 if self.b_columns is BColumns.INTERLEAVED else len(self.accumulators)

    @property
    def first_of_each_b(self) -> tuple[Accumulator, ...]:
        """The first accumulator of each B."""
        return self.accumulators[: self.b_count]

    def plane_n(self, columns: Any) -> Any:
        """N, if the first B has `columns` columns."""
        return columns // 2 if self.b_columns is BColumns.INTERLEAVED else columns

    @cached_property
    def dtypes(self) -> dict[str, DType]:
        """The dtype of every value, by name; accumulators are fp32."""
        return {
            **{acc.name: DType.F32 for acc in self.accumulators},
            **{load.name: load.dtype for load in self.loads},
            **{op.name: op.dtype for op in self.ops},
        }

    @cached_property
    def producers(self) -> dict[str, Union[Accumulator, Load, Op]]:
        """The accumulator, load or op behind every value, by name."""
        values: tuple[Union[Accumulator, Load, Op], ...] = (*self.accumulators, *self.loads, *self.ops)
        return {value.name: value for value in values}

    @cached_property
    def block_columns(self) -> int:
        """Columns that divide N, since ops or stores have blocks of them; 1 where none has."""
        return lcm(self.whole_columns, self.rotated_columns or 1)

    @cached_property
    def whole_columns(self) -> int:
        """Columns that a visit needs whole, since ops reduce blocks of them or stores have one element for
        each; 1 where none does."""
        blocks = {op.block for op in self.ops if op.op != ROTATE_HALF}
        return lcm(*((blocks | {store.block for store in self.stores}) - {0}))

    @cached_property
    def rotated_columns(self) -> int:
        """Columns of the blocks whose halves are rotated; 0 where none are."""
        return max((op.block for op in self.ops if op.op == ROTATE_HALF), default=0)

    @cached_property
    def planes(self) -> tuple[Store, ...]:
        """The stores that write the whole (M, N) plane."""
        return tuple(store for store in self.stores if store.reduce is None and not store.block)

    @cached_property
    def reductions(self) -> tuple[Store, ...]:
        """The stores that reduce it."""
        return tuple(store for store in self.stores if store.reduce is not None)

    def loads_of(self, *kinds: LoadKind) -> tuple[Load, ...]:
        """The loads of some kinds, in the spec's order."""
        return tuple(load for load in self.loads if load.kind in kinds)

    def to_json(self) -> str:
        """The canonical form: sorted keys, no spaces, floats to the bit. Equal specs give equal text."""
        return self._json

    @cached_property
    def _json(self) -> str:
        return json.dumps(_encode(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def key(self) -> str:
        """A short name for the spec: the first 16 hex digits of the SHA-256 of its JSON."""
        return hashlib.sha256(self._json.encode()).hexdigest()[:16]

    @staticmethod
    def from_json(text: str) -> EpilogueSpec:
        """The spec behind a canonical form. Raises SpecError on another version or anything malformed."""
        try:
            data = json.loads(text)
            if data["version"] != SPEC_VERSION:
                raise SpecError(f"the spec has version {data['version']}; this package reads {SPEC_VERSION}")
            return EpilogueSpec(
                accumulators=tuple(_decode_accumulator(item) for item in data["accumulators"]),
                loads=tuple(_decode_load(item) for item in data["loads"]),
                ops=tuple(_decode_op(item) for item in data["ops"]),
                stores=tuple(_decode_store(item) for item in data["stores"]),
                precision=Precision(data["precision"]),
            )
        except SpecError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"not a canonical epilogue spec: {error!r}") from error


def _encode(value: Any) -> Any:
    if isinstance(value, Const):
        number = value.value
        if isinstance(number, bool):
            return {"bool": number}
        return {"int": number} if isinstance(number, int) else {"float": number.hex()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _encode(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def _decode_operand(item: Any) -> Operand:
    if isinstance(item, str):
        return item
    ((kind, number),) = item.items()
    if kind == "float":
        return Const(float.fromhex(number))
    if type(number) is not {"bool": bool, "int": int}[kind]:
        raise SpecError(f"the constant {item} is not a {kind}")
    return Const(item[kind])


def _decode_accumulator(item: Any) -> Accumulator:
    return Accumulator(
        name=item["name"],
        a_dtype=DType(item["a_dtype"]),
        b_dtype=DType(item["b_dtype"]),
        a_major=Major(item["a_major"]),
        b_major=Major(item["b_major"]),
        fast_accum=bool(item["fast_accum"]),
        columns=Columns(item["columns"]),
        kind=ProductKind(item["kind"]),
        a_scaling=Scaling(item["a_scaling"]),
        b_scaling=Scaling(item["b_scaling"]),
    )


def _decode_blocks(item: Any) -> Union[Blocks, None]:
    return None if item is None else Blocks(item["columns"], Stride(item["outer"]), Stride(item["inner"]))


def _decode_load(item: Any) -> Load:
    return Load(
        name=item["name"],
        kind=LoadKind(item["kind"]),
        dtype=DType(item["dtype"]),
        stride_m=Stride(item["stride_m"]),
        stride_n=Stride(item["stride_n"]),
        m_modes=tuple(Stride(mode) for mode in item["m_modes"]),
        blocks=_decode_blocks(item["blocks"]),
    )


def _decode_op(item: Any) -> Op:
    return Op(
        name=item["name"],
        op=item["op"],
        operands=tuple(_decode_operand(operand) for operand in item["operands"]),
        dtype=DType(item["dtype"]),
        overflow=Overflow(item["overflow"]),
        block=int(item["block"]),
    )


def _decode_store(item: Any) -> Store:
    dtype, order, reduce = DType(item["dtype"]), Order(item["order"]), item["reduce"]
    return Store(
        name=item["name"],
        value=item["value"],
        dtype=dtype,
        order=order,
        reduce=None if reduce is None else Reduction(Axis(reduce["axis"]), ReduceKind(reduce["kind"])),
        block=int(item["block"]),
    )


_MMA_DTYPES = (DType.E4M3, DType.E5M2, DType.BF16, DType.F16)

_ZERO_STRIDES = {
    LoadKind.SCALAR: (True, True),
    LoadKind.ROWVEC: (True, False),
    LoadKind.COLVEC: (False, True),
    LoadKind.EXACT: (False, False),
    LoadKind.GROUPVEC: (False, False),
}


def _validate(spec: EpilogueSpec) -> None:
    if spec.version != SPEC_VERSION:
        raise SpecError(f"the spec has version {spec.version}; this package writes {SPEC_VERSION}")
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

    for acc in spec.accumulators:
        define(acc.name)
        _validate_accumulator(acc)
    _validate_together(spec.accumulators)
    for load in spec.loads:
        define(load.name)
        zeros = (load.stride_m is Stride.ZERO, load.stride_n is Stride.ZERO)
        if zeros != _ZERO_STRIDES[load.kind]:
            raise SpecError(
                f"{load.name} is called {load.kind.value} but has stride classes "
                f"({load.stride_m.value}, {load.stride_n.value})"
            )
        if load.dtype is DType.I64:
            raise SpecError(f"{load.name} is i64, which only indices are stored as")
        if load.kind is LoadKind.GROUPVEC:
            _validate_groupvec(load, spec.product.kind)
        if load.m_modes:
            _validate_modes(load)
        if load.blocks is not None:
            _validate_blocks(load, load.blocks)
    for op in spec.ops:
        for operand in op.operands:
            if isinstance(operand, str) and operand not in seen:
                raise SpecError(f"{op.name} reads {operand!r} before it is made")
        if op.op != "cast" and op.dtype is not op.dtype.register:
            raise SpecError(f"{op.name} = {op.op} has dtype {op.dtype.value}; only a cast may narrow")
        if op.dtype is DType.I64:
            raise SpecError(f"{op.name} has dtype i64, which only indices are stored as")
        if op.overflow is not Overflow.SATURATE and not (op.op == "cast" and op.dtype.is_fp8):
            raise SpecError(f"{op.name} = {op.op} to {op.dtype.value} has no overflow rule to state")
        define(op.name)
    for store in spec.stores:
        if store.value not in seen:
            raise SpecError(f"{store.name} stores {store.value!r}, which no one makes")
        _validate_store(store, spec.dtypes[store.value])
        if spec.product.kind is not ProductKind.DENSE:
            _validate_several(store, spec.product.kind)
    names = [store.name for store in spec.stores]
    if len(set(names)) != len(names) or seen & set(names):
        raise SpecError(f"the stores {names} clash among themselves or with values")


def _validate_groupvec(load: Load, kind: ProductKind) -> None:
    if kind is not ProductKind.GROUPED:
        raise SpecError(
            f"{load.name} has a vector for each group, and the rows of a {kind.value} product are in none"
        )
    if load.is_split:
        raise SpecError(
            f"{load.name} has a vector for each group, and M or N in several modes; accepted is one"
        )


def _validate_modes(load: Load) -> None:
    modes = f"M modes ({', '.join(mode.value for mode in load.m_modes)})"
    if len(load.m_modes) == 1 or set(load.m_modes) not in ({Stride.OTHER}, {Stride.ZERO, Stride.OTHER}):
        raise SpecError(f"{load.name} has {modes}; accepted are two or more of 0 and s, and not 0 alone")
    if load.stride_m is not Stride.OTHER:
        raise SpecError(f"{load.name} has {modes} and over them one stride, of class {load.stride_m.value}")


def _validate_blocks(load: Load, blocks: Blocks) -> None:
    what = f"{load.name} has blocks of {blocks.columns} columns"
    if type(blocks.columns) is not int or blocks.columns < 2:
        raise SpecError(f"{what}; a block has two or more")
    if blocks.outer is blocks.inner is Stride.ZERO:
        raise SpecError(f"{what} and strides of class 0 along both of their axes, which are one mode then")
    if load.stride_n is not Stride.OTHER:
        raise SpecError(f"{what} and over them one stride, of class {load.stride_n.value}")
    if [load.stride_m, *load.m_modes, blocks.outer, blocks.inner].count(Stride.ONE) > 1:
        raise SpecError(f"{what} and strides of 1 along two axes; one of them is contiguous, or none")


def _validate_store(store: Store, value: DType) -> None:
    if store.block and (type(store.block) is not int or store.block < 2 or store.reduce is not None):
        raise SpecError(
            f"{store.name} has one element for each {store.block} columns; a block has two or more, and a "
            "store that reduces has none"
        )
    if store.reduce is None:
        if store.dtype is DType.I64:
            raise SpecError(f"{store.name} stores a plane as i64, which only indices are stored as")
        return
    kind = store.reduce.kind
    what = f"{store.name}, the {store.reduce.axis.value} {kind.value} of {store.value!r},"
    if store.order is not Order.ROW:
        raise SpecError(f"{what} has order {store.order.value}, which only planes have")
    if value is DType.I32:
        raise SpecError(f"{what} reduces i32, which fp32 does not hold")
    if kind.is_index != (store.dtype is DType.I64):
        raise SpecError(f"{what} is stored as {store.dtype.value}; indices are i64, and nothing else is")
    kept = kind.is_extremum and store.dtype is value
    if not (kind.is_index or store.dtype.is_float or kept):
        raise SpecError(f"{what} is stored as {store.dtype.value}; it is a float")


def _validate_several(store: Store, kind: ProductKind) -> None:
    if store.order is not Order.ROW:
        raise SpecError(
            f"{store.name} has order {store.order.value}; the planes of a {kind.value} product have rows"
        )
    if store.reduce is not None and store.reduce.axis is not Axis.ROW:
        raise SpecError(
            f"{store.name} reduces along axis {store.reduce.axis.value}; {kind.value} products are reduced "
            "by row"
        )


def _validate_together(accumulators: tuple[Accumulator, ...]) -> None:
    first = accumulators[0]
    for acc in accumulators[1:]:
        if replace(acc, name=first.name, columns=first.columns) != first:
            raise SpecError(
                f"{first.name} and {acc.name} differ in dtypes, majors, mode of accumulation or scaling, and "
                "one MMA computes both"
            )
    columns = [acc.columns for acc in accumulators]
    if columns != [Columns.EVEN, Columns.ODD] and set(columns) != {Columns.ALL}:
        raise SpecError(
            f"the accumulators have {', '.join(each.value for each in columns)} columns; accepted are all, "
            "or one of even and one of odd"
        )


def _validate_accumulator(acc: Accumulator) -> None:
    a, b = acc.a_dtype, acc.b_dtype
    if a not in _MMA_DTYPES or b not in _MMA_DTYPES:
        raise SpecError(f"no MMA takes {a.value} times {b.value}; it takes e4m3, e5m2, bf16 and f16")
    if a.is_fp8 != b.is_fp8 or (not a.is_fp8 and a is not b):
        raise SpecError(f"no MMA multiplies {a.value} by {b.value}")
    if a is DType.E5M2 and b is DType.E5M2:
        raise SpecError("e5m2 is accepted on one side only, as CUDA's scaled_mm has it")
    if a.is_fp8 and (acc.a_major is not Major.K or acc.b_major is not Major.K):
        raise SpecError("fp8 operands must both be K-major")
    if {acc.a_scaling, acc.b_scaling} != {Scaling.NONE}:
        _validate_scaling(acc)


def _validate_scaling(acc: Accumulator) -> None:
    what = f"{acc.name} has scales by blocks, {acc.a_scaling.value} of A and {acc.b_scaling.value} of B,"
    if Scaling.NONE in (acc.a_scaling, acc.b_scaling):
        raise SpecError(f"{what} and both have them or none")
    if not acc.a_dtype.is_fp8:
        raise SpecError(f"{what} and dtype {acc.a_dtype.value}; they scale e4m3 and e5m2")
    if acc.fast_accum:
        raise SpecError(f"{what} and fast_accum, but its sums are scaled, and so promoted, block by block")
    if acc.kind is not ProductKind.DENSE:
        raise SpecError(f"{what} and is {acc.kind.value}; only a dense product has them")
