"""The interface between a template and an epilogue.

A generated epilogue is a class with these attributes and hooks; the templates know nothing else of it.

    loads, stores                names of its operands and outputs, in the order of `launch`'s arguments
    staged                       rowvecs that a warp copies to shared memory ahead of the accumulator
    shared_loads, shared_stores  planes that the template copies to shared memory, or from it
    sweeps                       loops of the epilogue threads over subtiles, in order; the last is a `Visit`

Each sweep calls one method, as `drain.py` shows. There is a parameter for each accumulator, by its name.

    Keep(span, planes)           keep(sub, <accs>, glob, held, smem)
                                 for reductions of values that are computed from planes. Returns a value for
                                 each element, which later sweeps then have instead of accumulators
    Reduce(span)                 reduce_blocks(blocks, glob, held, smem)
                                 for reductions of blocks that several subtiles make up: once for each block.
                                 `read` of `blocks`, a `BlockSubtiles`, gives the subtiles and their
                                 accumulators. Returns what later sweeps hold, too
    Visit(planes)                visit(sub, <accs>, glob, held, smem)
                                 reads, computes, converts and writes

`span` is the columns of a block, all of which a sweep has passed before the next one begins. Without it, a
block is one subtile. `planes` are the names of `shared_loads` that the method reads. It calls
`smem.release()` once it has read them, so that their planes may be filled for a later subtile. A `Visit` that
`pads_rows` runs for all rows of a tile, and writes those beyond M, too, up to a multiple of 128.

These methods are called once for each tile:

    begin(tile, glob)            epilogue threads, before the accumulator wait: returns what they hold
    stage(tile, glob, smem)      with `staged`: one warp fills `smem` with those rowvecs of a tile
    end(tile, glob, held)        with `Visit(ends=True)`, for partials that a thread holds for a whole tile:
                                 epilogue threads, after the last subtile

The attributes of `glob` are the global tensors and those of `smem` the shared ones, by name. `tile` and
`sub`, a `Tile` and a `Subtile` of `tile.py`, have the rows and columns that a thread owns. Their indices into
global memory are clamped to the problem's last row and column, so that reads at an edge need no branch.
Values beyond the edge are never stored.

A module's header begins with the formula of its epilogue, whose words `formula.py` explains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.tensor_utils import LayoutEnum

from cute_backend.planning import Stages, TileConfig
from cute_backend.spec import Order

if TYPE_CHECKING:
    from cute_backend.templates.drain import Sweep


@dataclass(frozen=True)
class SmemOperand:
    """An operand or output with a place in shared memory."""

    name: str
    dtype: type[cutlass.Numeric]
    order: Order = Order.ROW
    repeats: bool = False
    """Whether the operand is a `table`, whose rows and columns repeat along those of the plane."""
    by_heads: bool = False
    """Whether the tensor is the view (B, H, S, D) that the function `by_heads` makes."""

    @property
    def layout(self) -> LayoutEnum:
        """The DSL's name for `order`."""
        return LayoutEnum.ROW_MAJOR if self.order is Order.ROW else LayoutEnum.COL_MAJOR

    def bytes(self, elements: int) -> int:
        """The bytes of shared memory that `elements` elements take."""
        return elements * self.dtype.width // 8


class Epilogue(Protocol):
    """The interface of a generated epilogue; the module's docstring describes each part."""

    loads: tuple[str, ...]
    stores: tuple[str, ...]
    staged: tuple[SmemOperand, ...]
    shared_loads: tuple[SmemOperand, ...]
    shared_stores: tuple[SmemOperand, ...]
    sweeps: tuple[Sweep, ...]

    def begin(self, tile: Any, glob: SimpleNamespace) -> SimpleNamespace: ...

    @property
    def visit(self) -> Callable[..., None]: ...


@dataclass(frozen=True)
class BlockSubtiles:
    """The subtiles of one block of columns in a thread's rows of a tile.

    `read(i)` gives the i-th of `subtiles` and, for each product, the thread's accumulators of it. They can be
    read any number of times. If the epilogue keeps a value, it comes in their place.
    """

    tile: Any
    subtiles: int
    read: Callable[[int], tuple[Any, ...]]


class Template(Protocol):
    """The interface of a template: the class that a target names, whose instances are kernels.

    A kernel computes D = epilogue(A B) for A (M, K) and each B (K, N). The loads and the stores are in the
    order of the epilogue's names. Further arguments are keywords with defaults. Raises ValueError if the
    epilogue can't run in the configuration with these stages.
    """

    config: TileConfig

    def __init__(self, epilogue: Epilogue, config: TileConfig, stages: Stages) -> None: ...

    def __call__(
        self,
        a: cute.Tensor,
        bs: Sequence[cute.Tensor],
        loads: Sequence[cute.Tensor],
        stores: Sequence[cute.Tensor],
        max_active_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel on a stream."""


def release_planes(loads: Any, state: Any) -> None:
    """Releases a stage of planes to TMA once all lanes of the warp have read their elements."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    loads.consumer_release(state)


def collapse_m(tensor: cute.Tensor, modes: int) -> cute.Tensor:
    """A view of an operand whose first axes make up M, with these as one mode: (B, S, N) as ((S, B), N),
    whose row b * S + s is row s of batch b."""
    order = [*reversed(range(modes)), *range(modes, cute.rank(tensor))]
    layout = cute.select(tensor.layout, order)
    return cute.make_tensor(tensor.iterator, cute.group_modes(layout, 0, modes))


def collapse_n(tensor: cute.Tensor) -> cute.Tensor:
    """A view of an operand whose last axes are (N / b, b), with these as one mode, (b, N / b), whose column i
    * b + j is column j of block i."""
    rank = cute.rank(tensor)
    layout = cute.select(tensor.layout, [*range(rank - 2), rank - 1, rank - 2])
    return cute.make_tensor(tensor.iterator, cute.group_modes(layout, rank - 2, rank))


def first_columns(tensor: cute.Tensor, period: int) -> cute.Tensor:
    """A view of an operand (M, (columns, N / period)) that has the first columns of each block of `period`
    columns, with `period` as the size of a third axis."""
    shape, stride = tensor.layout.shape, tensor.layout.stride
    layout = cute.make_layout((*shape, period), stride=(*stride, 0))
    return cute.make_tensor(tensor.iterator, layout)


def table(tensor: cute.Tensor) -> cute.Tensor:
    """A view (S, b) of an operand (..., S, N / b, b) whose elements all blocks of columns share, and all
    outer modes of M."""
    rank = cute.rank(tensor)
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [rank - 3, rank - 1]))


def pair_halves(tensor: cute.Tensor, block: int, width: int) -> cute.Tensor:
    """A view of a tensor whose last axis is N, in blocks, with the columns in another order: `width` columns
    of a block's first half, then those half a block behind them, and so on.

    Every tensor of a kernel that has columns is viewed in this way, also B, so every result has its right
    place. If N is two modes already, as (D, H) by heads, `block` divides D.
    """
    last, half = cute.rank(tensor) - 1, block // 2
    within = tensor.layout[last]
    if cute.rank(within) == 1:
        step, size, count, outer = within.stride, block, within.shape // block, within.stride * block
        if cutlass.const_expr(isinstance(count, int) and count == 1):
            count = cutlass.Int32(1)  # a static mode of one block has no coordinate, which TMA wants
    else:
        (step, outer), (size, count) = within.stride, within.shape
    shape: tuple = (width, 2, half // width)
    strides: tuple = (step, step * half, step * width)
    if cutlass.const_expr(size > block):
        shape, strides = (*shape, size // block), (*strides, step * block)
    columns = cute.make_layout((shape, count), stride=(strides, outer))
    shapes = (*(tensor.shape[axis] for axis in range(last)), columns.shape)
    every = (*(tensor.stride[axis] for axis in range(last)), columns.stride)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shapes, stride=every))


def by_heads(tensor: cute.Tensor, rows: int, columns: int) -> cute.Tensor:
    """A view ((S, B), (D, H)) of the memory of a contiguous tensor (M, N) as (B, H, S, D): S is `rows`, D is
    `columns`, M is B * S and N is H * D. Row b * S + s and column h * D + d are at [b, h, s, d]."""
    (m, n), (step, _) = tensor.shape, tensor.stride
    layout = cute.make_layout(
        ((rows, m // rows), (columns, n // columns)),
        stride=((columns, step * rows), (1, rows * columns)),
    )
    return cute.make_tensor(tensor.iterator, layout)


def heads_apart(tensor: cute.Tensor) -> cute.Tensor:
    """A plane ((S, B), (D, H)) as (S, D, B * H), from which TMA cuts boxes of one head. A box may end after
    the head's last row, where TMA cuts it off."""
    ((rows, batches), (columns, heads)), ((step, _), (within, outer)) = tensor.shape, tensor.stride
    layout = cute.make_layout((rows, columns, batches * heads), stride=(step, within, outer))
    return cute.make_tensor(tensor.iterator, layout)


def run_box(box: tuple[int, int], count: int, plane: cute.Tensor) -> tuple[tuple[int, int], int]:
    """The part of a box (rows, columns) whose columns are adjacent in a plane (M, N), and the number of such
    parts in `count` boxes. A box has one part, or two if `pair_halves` has ordered the columns."""
    rows, columns = box
    within = plane.shape[1][0] if isinstance(plane.shape[1], tuple) else columns
    run = within[0] if isinstance(within, tuple) else columns
    return (rows, run), count * (columns // run)


def of_runs(layout: cute.ComposedLayout, count: int) -> cute.ComposedLayout:
    """The layout (rows, columns, count) of boxes in shared memory that consist of the parts of `layout`, one
    after another: TMA swizzles each run of columns by itself."""
    rows, run, parts = layout.outer.shape
    runs = cute.size(parts) // count
    if runs == 1:
        return layout
    step_m, step_n, _ = layout.outer.stride
    part = cute.size(rows) * cute.size(run)
    outer = cute.make_layout((rows, (run, runs), count), stride=(step_m, (step_n, part), part * runs))
    return cute.make_composed_layout(layout.inner, layout.offset, outer)


def in_subtiles(box: cute.Tensor, width: int) -> cute.Tensor:
    """A box (rows, columns) in shared memory, with its columns in the order of subtiles of `width` columns. A
    box of two parts (`of_runs`) has equally many columns of both in each subtile."""
    rows, columns = box.shape
    if cute.size(columns) == width or cute.size(columns, mode=[0]) == cute.size(columns):
        return box
    run, half = cute.size(columns, mode=[0]), width // 2
    order = cute.make_layout((half, 2, run // half), stride=(1, run, half))
    return cute.composition(box, (cute.make_layout(cute.size(rows)), order))


def one_stage(layout: cute.ComposedLayout) -> cute.ComposedLayout:
    """The layout (rows, columns) of one of the stages of `layout` (rows, columns, stages). `cute.slice_`
    aborts for some of these, as that of 16 rows and 96 columns of fp32."""
    return cute.make_composed_layout(layout.inner, layout.offset, cute.select(layout.outer, [0, 1]))


def transpose(tensor: cute.Tensor) -> cute.Tensor:
    """A view of a tensor of two axes with the axes swapped."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))


def by_name(names: Sequence[str], values: Sequence[Any]) -> SimpleNamespace:
    """A namespace with the values as attributes."""
    return SimpleNamespace(**dict(zip(names, values, strict=True)))
