"""Hypothesis strategies for epilogue specs, at the level of the spec itself.

Specs that they draw are valid and agree with the op table. Sizes and operands are drawn separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from cute_backend.kinds.blocks import BLOCK_OPS
from cute_backend.kinds.forms import EVERY
from cute_backend.kinds.reductions import REDUCTIONS
from cute_backend.kinds.results import Form
from cute_backend.ops import CAST, OPS, OperandError, PointwiseOp, promote, result_dtype
from cute_backend.spec import (
    REDUCED,
    VALUE_DTYPES,
    Accumulator,
    Blocks,
    Columns,
    Const,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Operand,
    Overflow,
    Precision,
    Scaling,
    Store,
    Stride,
)

_NONZERO = (Stride.ONE, Stride.OTHER)
_MODES = (
    (),
    (Stride.OTHER, Stride.ZERO),
    (Stride.ZERO, Stride.OTHER),
    (Stride.OTHER, Stride.OTHER),
    (Stride.ZERO, Stride.OTHER, Stride.ZERO),
)
BLOCK = 4
"""Columns of every block that is drawn; N is a multiple of it."""

_BLOCKS_OF_NO_UNIT = (
    None,
    Blocks(BLOCK, Stride.OTHER, Stride.ZERO),
    Blocks(BLOCK, Stride.ZERO, Stride.OTHER),
)
_BLOCKS_OF_ANY = (
    *_BLOCKS_OF_NO_UNIT,
    Blocks(BLOCK, Stride.ZERO, Stride.ONE),
    Blocks(BLOCK, Stride.OTHER, Stride.ONE),
)
_BLOCKS = {stride_m: _BLOCKS_OF_NO_UNIT if stride_m is Stride.ONE else _BLOCKS_OF_ANY for stride_m in Stride}
"""Blocks of columns that a load may have, by the class of its stride along M."""
_KINDS = sorted(kind for kind in LoadKind if not kind.by_group)
"""The kinds of loads that a dense product may have."""
_ROWS = tuple(name for name in OPS if name not in BLOCK_OPS)
"""The rows of the op table, except for ops of blocks, whose sizes tiles have to hold."""
_SIGNED_ZERO_IS_OPEN = ("maximum", "minimum", "fmax", "fmin", "relu")
"""Ops whose result on -0 and +0 is open in torch: its own vectorised and scalar loops differ."""

NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-4, 4),
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, float("inf"), float("-inf"), float("nan")]),
)


_SCALINGS = (
    (Scaling.NONE, Scaling.NONE),
    (Scaling.LINE, Scaling.SQUARE),
    (Scaling.LINE, Scaling.LINE),
    (Scaling.SQUARE, Scaling.LINE),
)
"""The scalings of A and B that fp8 products have."""


@st.composite
def accumulators(draw: st.DrawFn) -> tuple[Accumulator, ...]:
    """One product, two of one A, or the even and the odd columns of one."""
    columns = draw(st.sampled_from([(Columns.ALL,), (Columns.ALL, Columns.ALL), (Columns.EVEN, Columns.ODD)]))
    acc = draw(_accumulator())
    if len(columns) == 1:
        return (acc,)
    return tuple(replace(acc, name=f"acc{i}", columns=each) for i, each in enumerate(columns))


@st.composite
def _accumulator(draw: st.DrawFn) -> Accumulator:
    pairs = [(DType.E4M3, DType.E4M3), (DType.E5M2, DType.E4M3), (DType.E4M3, DType.E5M2)]
    pairs += [(DType.BF16, DType.BF16), (DType.F16, DType.F16), (DType.I8, DType.I8)]
    a, b = draw(st.sampled_from(pairs))
    majors = st.just(Major.K) if a.bits == 8 else st.sampled_from(Major)
    promotes = st.just(True) if a is DType.I8 else st.booleans()
    acc = Accumulator("acc", a, b, draw(majors), draw(majors), draw(promotes))
    of_a, of_b = draw(st.sampled_from(_SCALINGS)) if a.is_fp8 else _SCALINGS[0]
    if of_a is Scaling.NONE:
        return acc
    return replace(acc, fast_accum=False, a_scaling=of_a, b_scaling=of_b)


@st.composite
def _load(draw: st.DrawFn, index: int) -> Load:
    kind = draw(st.sampled_from(_KINDS))
    stride_m = draw(st.sampled_from(_NONZERO)) if kind.by_row else Stride.ZERO
    stride_n = draw(st.sampled_from(_NONZERO)) if kind.by_column else Stride.ZERO
    return Load(
        name=f"{kind.value}{index}",
        kind=kind,
        dtype=draw(st.sampled_from(VALUE_DTYPES)),
        stride_m=stride_m,
        stride_n=stride_n,
        blocks=draw(st.sampled_from(_BLOCKS[stride_m])) if stride_n is Stride.OTHER else None,
        m_modes=draw(st.sampled_from(_MODES)) if stride_m is Stride.OTHER else (),
    )


class _Chain:
    """Ops drawn so far and the dtypes of all values that an op may read."""

    def __init__(self, dtypes: dict[str, DType]) -> None:
        self.dtypes = dtypes
        self.ops: list[Op] = []

    def add(self, op: str, operands: tuple[Operand, ...], dtype: DType, overflow: Overflow) -> None:
        name = f"t{len(self.ops)}"
        self.ops.append(Op(name, op, operands, dtype, overflow))
        self.dtypes[name] = dtype

    def operand(self) -> st.SearchStrategy[Operand]:
        return st.one_of(
            st.sampled_from(sorted(self.dtypes)), st.sampled_from(sorted(self.dtypes)), NUMBERS.map(Const)
        )

    def dtype_of(self, operand: Operand) -> DType:
        return operand.dtype if isinstance(operand, Const) else self.dtypes[operand]


def _draw_step(draw: st.DrawFn, chain: _Chain, row: PointwiseOp) -> None:
    operands = tuple(draw(chain.operand()) for _ in range(row.arity))
    dtypes = [chain.dtype_of(operand) for operand in operands]
    if row is CAST:
        target = draw(st.sampled_from(VALUE_DTYPES))
        overflow = draw(st.sampled_from(Overflow)) if target.is_fp8 else Overflow.SATURATE
        chain.add("cast", operands, target, overflow)
        return
    try:
        promote(row, dtypes)
    except OperandError:
        return
    chain.add(row.name, operands, result_dtype(row, dtypes), Overflow.SATURATE)
    if row.name in _SIGNED_ZERO_IS_OPEN and chain.ops[-1].dtype is DType.F32:
        chain.add("add", (chain.ops[-1].name, Const(0.0)), DType.F32, Overflow.SATURATE)
        del chain.dtypes[chain.ops[-2].name]


@st.composite
def specs(
    draw: st.DrawFn, rows: Sequence[str] = _ROWS, max_ops: int = 10, reductions: bool = False
) -> EpilogueSpec:
    """A spec whose ops are drawn from the named rows of the table.

    Every fourth op is a cast. If torch leaves the sign of a zero open, 0.0 is added, which makes it positive.
    """
    accs = draw(accumulators())
    loads = tuple(draw(_load(index)) for index in range(draw(st.integers(0, 4))))
    chain = _Chain({**{acc.name: acc.dtype for acc in accs}, **{load.name: load.dtype for load in loads}})
    names = st.sampled_from([*rows, *["cast"] * (len(rows) // 3)])
    for _ in range(draw(st.integers(0, max_ops))):
        _draw_step(draw, chain, OPS[draw(names)])
    kinds = [form for form in EVERY if form.drawn(BLOCK, REDUCTIONS) and (reductions or form.is_plane)]
    stores = tuple(
        draw(_store(f"out{index}", chain, draw(st.sampled_from(kinds))))
        for index in range(draw(st.integers(1, 3)))
    )
    return EpilogueSpec(accs, loads, tuple(chain.ops), stores, draw(st.sampled_from(Precision)))


@st.composite
def _store(draw: st.DrawFn, name: str, chain: _Chain, kind: type[Form]) -> Store:
    """A store of a form. A value that the form does not have is rounded to fp32 first."""
    value, block = draw(_value(chain)), draw(st.sampled_from([BLOCK, 32]))
    form = draw(st.sampled_from(kind.drawn(block, REDUCTIONS)))
    if not form.stored_as(chain.dtypes[value]):
        chain.add("cast", (value,), DType.F32, Overflow.SATURATE)
        value = chain.ops[-1].name
    dtype = draw(st.sampled_from(form.stored_as(chain.dtypes[value])))
    after = draw(st.sampled_from([(), _SCALE])) if form.reduction is not None and dtype.is_float else ()
    return Store(name, value, dtype, form, after)


_SCALE = (
    Op("t0", "maximum", (REDUCED, Const(1e-3)), DType.F32),
    Op("t1", "div", ("t0", Const(448.0)), DType.F32),
)
"""The scale of a quantisation, from an amax."""


def _value(chain: _Chain) -> st.SearchStrategy[str]:
    """Any value; that of the last op is drawn as often as all others together."""
    values = st.sampled_from(sorted(chain.dtypes))
    last = [op.name for op in chain.ops if op.name in chain.dtypes][-1:]
    return st.one_of(st.sampled_from(last), values) if last else values
