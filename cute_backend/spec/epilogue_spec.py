"""`EpilogueSpec`: a region's products, loads, ops and stores, its JSON and its key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from typing import Any, Union

from cute_backend.dtypes import DType
from cute_backend.errors import SpecError
from cute_backend.kinds.axes import Extent
from cute_backend.kinds.blocks import BlockOp
from cute_backend.kinds.loads import LoadKind
from cute_backend.kinds.reductions import Reduction
from cute_backend.kinds.scales import Scales, Side
from cute_backend.spec.block_passes import LEAST_AHEAD, BlockPasses, block_passes
from cute_backend.spec.canonical import SPEC_VERSION, decode, encode
from cute_backend.spec.chain_ops import Op, Precision
from cute_backend.spec.consistency import validate
from cute_backend.spec.loads import Load
from cute_backend.spec.products import Accumulator, BColumns, Columns, ProductKind
from cute_backend.spec.stores import REDUCED, Store


@dataclass(frozen=True)
class EpilogueSpec:
    """A region: its matrix products, and the loads, ops and stores of the epilogue.

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
        if self.version != SPEC_VERSION:
            raise SpecError(f"the spec has version {self.version}; this package writes {SPEC_VERSION}")
        validate(self)
        for store in self.stores:
            if store.after:
                self.finishing(store)

    @property
    def product(self) -> Accumulator:
        """The first accumulator. Its dtypes, majors, kind and scalings are those of all."""
        return self.accumulators[0]

    @cached_property
    def scaled(self) -> tuple[tuple[Side, Scales], tuple[Side, Scales]]:
        """A and every B, with the scales beside each."""
        product, groups = self.product, (Extent.GROUPS,)
        in_rows = product.kind in (ProductKind.BATCHED, ProductKind.K_GROUPED)
        by_rows = product.kind is ProductKind.GROUPED
        columns = Extent.COLUMNS if self.b_columns is BColumns.INTERLEAVED else Extent.N
        a = Side("A", Extent.ROWS if in_rows else Extent.M, Extent.M_BLOCKS, Extent.A_SCALES, (), by_rows)
        b = Side("B", columns, Extent.N_BLOCKS, Extent.B_SCALES, groups if by_rows else ())
        return (a, product.a_scaling), (b, product.b_scales)

    @cached_property
    def widened(self) -> EpilogueSpec:
        """The spec of the same values, with the weights that a kernel converts stored in A's dtype."""
        return replace(self, accumulators=tuple(acc.widened for acc in self.accumulators))

    @cached_property
    def b_columns(self) -> BColumns:
        """How the columns of B are distributed among the accumulators."""
        if self.product.segment:
            return BColumns.SEGMENTS
        return BColumns.APART if self.product.columns is Columns.ALL else BColumns.INTERLEAVED

    @property
    def b_count(self) -> int:
        """The number of matrices B."""
        return 1 if self.b_columns is BColumns.INTERLEAVED else len(self.accumulators)

    @property
    def first_of_each_b(self) -> tuple[Accumulator, ...]:
        """The first accumulator of each B."""
        return self.accumulators[: self.b_count]

    def plane_n(self, columns: Any) -> Any:
        """N, if the first B has `columns` columns."""
        if self.b_columns is BColumns.SEGMENTS:
            return sum(acc.width for acc in self.accumulators)
        return columns // 2 if self.b_columns is BColumns.INTERLEAVED else columns

    @cached_property
    def dtypes(self) -> dict[str, DType]:
        """The dtype of every value, by name."""
        return {
            **{acc.name: acc.dtype for acc in self.accumulators},
            **{load.name: load.dtype for load in self.loads},
            **{op.name: op.dtype for op in self.ops},
        }

    @cached_property
    def producers(self) -> dict[str, Union[Accumulator, Load, Op]]:
        """The accumulator, load or op behind every value, by name."""
        values: tuple[Union[Accumulator, Load, Op], ...] = (*self.accumulators, *self.loads, *self.ops)
        return {value.name: value for value in values}

    @cached_property
    def segments(self) -> tuple[EpilogueSpec, ...]:
        """The spec of each segment by itself, with the same names: its product, and the loads, ops and stores
        that belong to it. The spec alone where it has no segments."""
        if self.b_columns is not BColumns.SEGMENTS:
            return (self,)
        return tuple(
            replace(
                self,
                accumulators=(replace(acc, width=0, height=0),),
                loads=tuple(load for load in self.loads if index in self.segments_of[load.name]),
                ops=tuple(op for op in self.ops if index in self.segments_of[op.name]),
                stores=tuple(store for store in self.stores if index in self.segments_of[store.value]),
            )
            for index, acc in enumerate(self.accumulators)
        )

    def finishing(self, store: Store) -> EpilogueSpec:
        """The ops after a reduction as a spec of their own, whose accumulator is the result REDUCED. Raises
        SpecError where they contradict each other or read anything else."""
        value = store.after[-1].name if store.after else REDUCED
        accumulator = Accumulator(REDUCED, DType.BF16, DType.BF16)
        return EpilogueSpec(
            (accumulator,), (), store.after, (Store(store.name, value, store.dtype),), self.precision
        )

    def width_of(self, value: str) -> int:
        """The columns of the segment that a value belongs to; 0 where there are no segments, and for a value
        without columns that several share."""
        if self.b_columns is not BColumns.SEGMENTS or len(self.segments_of[value]) > 1:
            return 0
        (index,) = self.segments_of[value]
        return self.accumulators[index].width

    @cached_property
    def segments_of(self) -> dict[str, frozenset[int]]:
        """The indices of the segments that each value belongs to. A value belongs to a segment if it is
        computed from the segment's accumulator, or if such a value is computed from it."""
        segments: dict[str, frozenset[int]] = dict.fromkeys(self.dtypes, frozenset())
        segments |= {acc.name: frozenset([index]) for index, acc in enumerate(self.accumulators)}
        for op in self.ops:
            segments[op.name] = segments[op.name].union(*(segments[each] for each in op.values))
        for op in reversed(self.ops):
            for each in op.values:
                segments[each] |= segments[op.name]
        for store in self.stores:
            if store.form.positions:
                segments[store.form.positions] |= segments[store.value]
        return segments

    def loads_with_batches(self, store: Store) -> tuple[Load, ...]:
        """The loads whose outer modes of M are the batches of a store, if their rows are known only at
        launch: those with modes that the value is computed from, such as cosines (1, S, D). If there are
        none, there is one batch."""
        if not store.form.batches_at_launch:
            return ()
        needed = {store.value}
        for op in reversed(self.ops):
            if op.name in needed:
                needed.update(op.values)
        return tuple(load for load in self.loads if load.m_modes and load.name in needed)

    def rows_of_batch(self, store: Store, shapes: Mapping[str, Sequence[Any]], m: Any) -> Any:
        """The rows of a batch of a store, in a launch of M rows with loads of these `shapes`, by name; 0 if
        it has no batches. Raises ValueError if the loads contradict each other."""
        if not store.form.batches_at_launch:
            return store.form.batch_rows
        outer = {load.name: len(load.m_modes) - 1 for load in self.loads_with_batches(store)}
        batches = {name: prod(shapes[name][:count]) for name, count in outer.items()}
        first, *others = batches.values() or [1]
        if any(other != first for other in others):
            sizes = ", ".join(f"{name} has {count}" for name, count in batches.items())
            of_all = store.form.batches("equally many")
            raise ValueError(f"{store.name} {of_all}, and the batches differ: {sizes}")
        return m // first

    @cached_property
    def block_columns(self) -> int:
        """A number of columns that divides N: the least common multiple of the blocks of ops and stores; 1
        without blocks, and with segments, whose widths a spec has checked."""
        if self.b_columns is BColumns.SEGMENTS:
            return 1
        of_ops, of_stores = {op.block for op in self.ops}, {store.form.block_columns for store in self.stores}
        return lcm(self.whole_columns, *((of_ops | of_stores) - {0}))

    @cached_property
    def whole_columns(self) -> int:
        """The number of columns that a tile needs whole: the least common multiple of the blocks that an op
        needs whole, or that a store has one element for; 1 without such blocks."""
        blocks = {op.whole_columns for op in self.ops}
        return lcm(*((blocks | {store.form.whole_columns for store in self.stores}) - {0}))

    def fits_visit(self, columns: int) -> bool:
        """Whether visits of this number of columns have what all ops and stores need of each block."""
        if self.pass_columns:  # they reduce all blocks, of ops and of stores
            return all(op.fits_visit(columns) for op in self.ops if op.reduction is None)
        stored = {store.form.whole_columns for store in self.stores} - {0}
        return columns % lcm(*stored) == 0 and all(op.fits_visit(columns) for op in self.ops)

    @cached_property
    def pass_columns(self) -> int:
        """The columns of the blocks that passes over narrower subtiles can reduce ahead of the visits; 0 if
        there are no such blocks."""
        found = self._passes
        return 0 if found is None or found.columns % LEAST_AHEAD else found.columns

    @property
    def kept(self) -> str:
        """The value that takes the place of an accumulator ahead of the passes, if planes are read before
        blocks are reduced (`block_passes`); empty otherwise."""
        return self._passes.kept if self._passes is not None and self.pass_columns else ""

    @property
    def early_planes(self) -> frozenset[str]:
        """The names of the planes that are read ahead of the passes; the visits read all others."""
        return self._passes.early if self._passes is not None and self.kept else frozenset()

    @property
    def visit_columns(self) -> int:
        """The number of columns that a visit needs whole, since passes can't reduce them: `whole_columns`
        or 1."""
        return 1 if self.pass_columns else self.whole_columns

    @property
    def by_visits(self) -> bool:
        """Whether only visits can reduce the blocks, whatever their sizes (`block_passes`)."""
        return self.whole_columns > 1 and self._passes is None

    @cached_property
    def _passes(self) -> BlockPasses | None:
        return block_passes(
            self.ops,
            self.accumulators,
            {load.name for load in self.loaded_planes},
            {store.value for store in self.stores},
            {store.form.whole_columns for store in self.stores} - {0},
        )

    @cached_property
    def block_ops(self) -> dict[BlockOp, tuple[Op, ...]]:
        """The ops over blocks of columns, by their kinds."""
        found: dict[BlockOp, list[Op]] = {}
        for op in self.ops:
            if op.over_blocks is not None:
                found.setdefault(op.over_blocks, []).append(op)
        return {kind: tuple(ops) for kind, ops in found.items()}

    @cached_property
    def halved_columns(self) -> int:
        """The columns of the largest blocks whose halves an op pairs; 0 without such blocks."""
        halved = (op.block for kind, ops in self.block_ops.items() if kind.pairs_halves for op in ops)
        return max(halved, default=0)

    @cached_property
    def narrow_visits(self) -> tuple[int, ...]:
        """The columns of visits that may have all that ops need of wider blocks; none if no op says so."""
        return tuple(sorted({columns for kind in self.block_ops for columns in kind.narrow_visits}))

    @cached_property
    def moves_columns(self) -> bool:
        """Whether elements of blocks go to other columns, as in rotations."""
        return any(kind.reads and kind.reduction is None for kind in self.block_ops)

    @property
    def reordered_columns(self) -> int:
        """The columns of the blocks whose halves are paired, unless they are pairs of neighbours. For such
        blocks kernels have the columns in another order; 0 without them."""
        return self.halved_columns if self.halved_columns > 2 else 0

    @cached_property
    def planes(self) -> tuple[Store, ...]:
        """The stores that write the whole (M, N) plane."""
        return tuple(store for store in self.stores if store.form.is_plane)

    @cached_property
    def cut_columns(self) -> tuple[int, ...]:
        """The columns of the blocks in which planes are stored in boxes, each box in one block."""
        forms = (store.form for store in self.planes)
        return tuple(form.block_columns for form in forms if form.block_columns and form.in_boxes)

    @cached_property
    def reductions(self) -> dict[str, Reduction]:
        """The reductions of the plane, by the names of their stores."""
        found = {store.name: store.form.reduction for store in self.stores}
        return {name: reduction for name, reduction in found.items() if reduction is not None}

    @property
    def reduces_rows(self) -> bool:
        """Whether a store reduces rows."""
        return any(reduction.axis.keeps_rows for reduction in self.reductions.values())

    @cached_property
    def results(self) -> tuple[tuple[Store, ...], ...]:
        """The stores of each tensor that the op returns: one store, or one for each part of the tensor."""
        starts = [i for i, store in enumerate(self.stores) if store.form.index == 0]
        ends = [*starts[1:], len(self.stores)]
        return tuple(self.stores[start:end] for start, end in zip(starts, ends, strict=True))

    @cached_property
    def loaded_planes(self) -> tuple[Load, ...]:
        """The loads that are planes."""
        return tuple(load for load in self.loads if load.kind.is_plane)

    @cached_property
    def staged_loads(self) -> tuple[Load, ...]:
        """The loads of which a warp may stage a tile's columns."""
        return tuple(load for load in self.loads if load.kind.is_staged)

    def loads_of(self, *kinds: LoadKind) -> tuple[Load, ...]:
        """The loads of some kinds, in the spec's order."""
        return tuple(load for load in self.loads if load.kind in kinds)

    def to_json(self) -> str:
        """The canonical form: sorted keys, no spaces, floats to the bit. Equal specs give equal text."""
        return self._json

    @cached_property
    def _json(self) -> str:
        return json.dumps(encode(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def key(self) -> str:
        """A short name for the spec: the first 16 hex digits of the SHA-256 of its JSON."""
        return hashlib.sha256(self._json.encode()).hexdigest()[:16]

    @staticmethod
    def from_json(text: str) -> EpilogueSpec:
        """The spec behind a canonical form. Raises SpecError on another version or anything malformed."""
        try:
            return EpilogueSpec(**decode(json.loads(text)))
        except SpecError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"not a canonical epilogue spec: {error!r}") from error
