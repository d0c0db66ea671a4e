"""Reductions over blocks of columns, which a tile holds whole: the region may read their results again.

Examples are a norm by head, a softmax over groups of experts and the scales of quantised blocks. A block is
the last axes of the columns, such as the D of heads (B, S, H, D), or all columns of a narrow product. The
result is a value of the chain that all elements of a block share, and lies on the plane as `Frame.block`
says.
"""

from __future__ import annotations

from torch import fx

from cute_backend import config
from cute_backend.fx_walk.graph.axes import is_reduction
from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.static import Size, fake, known, tensor_of
from cute_backend.fx_walk.members.spelled_reductions import Found, feeds
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import supported_dtype
from cute_backend.fx_walk.values.held import check_blocks
from cute_backend.fx_walk.values.lower import is_pointwise, lower_cast
from cute_backend.kinds import reductions
from cute_backend.kinds.blocks import reducing
from cute_backend.planning import NARROW_SUBTILE_N
from cute_backend.spec import Const, DType, Op, Operand

WIDEST_ROW = 128
"""The most columns of a whole row that a kernel reduces and reads again. Rows of 256 columns were normed in
the kernel of a small Gemma 3, which then launched 23 kernels for Inductor's 22."""


_FEW_ROWS = 128
_MOST_IN_FEW_ROWS = 192
"""The most columns of the blocks of a single product that its kernel reduces for at most `_FEW_ROWS` rows.
Wider blocks take tiles of 256 columns, too few for all multiprocessors: q, k and v of a Gemma 3 4B layer,
whose heads of 256 columns are normed, took 31.6 us for 1 row in bf16, 29.1 for 64 and 31.9 for 512, and with
Inductor 24.4, 25.9 and 38.0 (H100, benchmarks/qkv.py)."""


def frame_of_blocks(found: Found, draft: Draft) -> Frame | None:
    """The frame of the result of a reduction whose source is on the plane of a draft. It is None for a
    reduction that is not over blocks, and for one over whole rows that nothing reads again together with the
    plane, that no tile holds, or that follows a single product, unless `config.block_reductions` says so:
    Inductor's kernel of such a norm often does more, such as the norm of the next layer."""
    source, frame, chain = fake(found.source), draft.frames[found.source], draft.chain
    left = frame.reduced(found.dims, fake(found.head).dim() == source.dim(), source.shape)
    if left is None or not (found.kind.of_blocks or found.kind is reductions.LOGSUMEXP):
        return None
    if left.n_axes:
        return left
    if config.block_reductions != "always" and len(chain.accumulators) == 1:
        return None
    value, *_ = draft.values[found.source].operands
    row = Op("row", reducing(reductions.SUM).name, (value,), DType.F32, block=left.block)
    fits = 1 < left.block <= WIDEST_ROW and chain.is_served(row)
    return left if fits and _is_read_again(found) else None


def _pays(chain: Chain, visited: int) -> bool:
    """Whether the kernel should reduce blocks of which a visit needs `visited` columns whole.

    A product whose visits have more than `NARROW_SUBTILE_N` columns for them was slower than one whose blocks
    were reduced by another kernel: a norm by head took 1.43 times as long as by Inductor, which took 1.07
    times as long as with passes (4096 cubed in bf16, H100). See `config.block_reductions`.
    """
    if config.block_reductions == "always" or len(chain.accumulators) > 1:
        return True
    return config.block_reductions == "auto" and visited <= NARROW_SUBTILE_N


def _is_read_again(found: Found) -> bool:
    """Whether work on a result of rows is combined with the plane, as in a softmax."""
    size = fake(found.source).numel()

    def meets(user: fx.Node) -> bool:
        planes = map(tensor_of, (user, *user.all_input_nodes))
        works = is_pointwise(user) or is_reduction(user)
        return works and any(plane is not None and known(plane.numel() == size) for plane in planes)

    return feeds(found.head, meets) is not None


def lower_blocks(found: Found, chain: Chain, value: Operand, columns: int, rows: Size) -> Operand:
    """Reduces each block of `columns` columns of `value`, which is the chain's value of `found.source` and
    has `rows` rows.

    Raises Refused for a size that no tile holds, for dtypes that no kernel reduces, and if it doesn't pay.
    """
    few = isinstance(rows, int) and rows <= _FEW_ROWS and columns > _MOST_IN_FEW_ROWS
    if few and config.block_reductions != "always" and len(chain.accumulators) == 1:
        raise Refused(Reason.BLOCK_COST)
    if found.dtype is not None:
        value = lower_cast(chain, value, supported_dtype(found.head, found.dtype))
    if chain.dtype(value) is DType.I32:
        raise Refused(Reason.UNSUPPORTED_DTYPE, operand=found.source, dtype=fake(found.source).dtype)
    dtype = supported_dtype(found.head, fake(found.head).dtype)
    if found.correction is not None:
        result = _variance(chain, value, columns, found.correction)
    elif found.kind is reductions.LOGSUMEXP:
        result = _logsumexp(chain, value, columns)
    else:
        result = chain.reduce_blocks(found.kind, value, columns)
    _check_fit(chain)
    return lower_cast(chain, result, dtype)


def unfit_blocks(chain: Chain) -> Refused | None:
    """The reason why a kernel should not reduce the blocks of a chain, if there is one."""
    try:
        _check_fit(chain)
    except Refused as refused:
        return refused
    return None


def _check_fit(chain: Chain) -> None:
    """Raises Refused if no tile holds the chain's blocks, or if it doesn't pay to reduce them."""
    check_blocks(chain)
    if chain.blocks and not _pays(chain, chain.visit_columns):
        raise Refused(Reason.BLOCK_COST)


def _variance(chain: Chain, value: Operand, columns: int, correction: float) -> Operand:
    """The variance by two sums, the second one of squared distances from the mean, so that a large mean costs
    no digits."""
    away = chain.emit("sub", value, chain.reduce_blocks(reductions.MEAN, value, columns))
    squares = chain.reduce_blocks(reductions.SUM, chain.emit("mul", away, away), columns)
    return chain.emit("div", squares, Const(float(max(columns - correction, 0))))


def _logsumexp(chain: Chain, value: Operand, columns: int) -> Operand:
    """The logsumexp as torch decomposes it. The shift is 0 where the largest element is infinite."""
    largest = chain.reduce_blocks(reductions.MAX, value, columns)
    infinite = chain.emit("eq", chain.emit("abs", largest), Const(float("inf")))
    shift = chain.emit("where", infinite, Const(0.0), largest)
    grown = chain.emit("exp", chain.emit("sub", value, shift))
    return chain.emit("add", chain.emit("log", chain.reduce_blocks(reductions.SUM, grown, columns)), shift)
