"""Products that are computed transposed: D^T = B^T A^T, whose rows are the columns of D.

A tile has a multiple of 64 rows, but any multiple of 8 columns. A product of some hundred rows thus wastes
less of its tiles if these rows lie along the columns of the MMA: 146 rows fill 76 percent of three blocks of
64, but 91 percent of 160 columns. Only the kernel's host code differs: it takes the same arguments, and
passes transposed views of them to the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from cute_backend.planning.registers import long_ops
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import (
    Accumulator,
    BColumns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    ProductKind,
    Store,
)

_INDICES = ("row_index", "column_index")


def can_transpose(spec: EpilogueSpec) -> bool:
    """Whether a spec can be transposed.

    It must have one dense product, or a pair of products with a B each, and no scales that leave it in order,
    no blocks of columns of B, no ops on indices or on blocks of columns, no draws of noise, no loads whose M
    or N is several modes, and stores only of forms that the transposed plane has, too (`Form.transposed`).
    Each segment must be such a spec.
    """
    return all(map(_can_be_alone, spec.segments))


def _can_be_alone(spec: EpilogueSpec) -> bool:
    product = spec.product
    return (
        spec.b_columns is BColumns.APART
        and product.kind is ProductKind.DENSE
        and not product.in_order
        and not product.b_block
        and not any(load.is_split for load in spec.loads)
        and spec.block_columns == 1
        and all(store.form.transposed is not None for store in spec.stores)
        and not any(op.op in _INDICES for op in spec.ops)
        and not long_ops(spec)
    )


@lru_cache(maxsize=1024)
def transposed(spec: EpilogueSpec) -> EpilogueSpec:
    """Returns the spec of D^T, with the same names. Raises ValueError unless `can_transpose`."""
    if not can_transpose(spec):
        raise ValueError(f"the spec {spec.key} has no transposed one: see `can_transpose`")
    stores = tuple(map(_flipped_store, spec.stores))
    loads = tuple(map(_flipped, spec.loads))
    return replace(spec, accumulators=tuple(map(_turned, spec.accumulators)), loads=loads, stores=stores)


@dataclass(frozen=True)
class Tiled:
    """A spec, and a tile in which it is computed."""

    spec: EpilogueSpec
    tile: TileConfig

    @cached_property
    def computed(self) -> EpilogueSpec:
        """The spec that the kernel computes: `spec` or, if the tile is transposed, the transposed one."""
        return transposed(self.spec) if self.tile.transposed else self.spec


def _turned(acc: Accumulator) -> Accumulator:
    return replace(
        acc,
        a_dtype=acc.b_dtype,
        b_dtype=acc.a_dtype,
        a_major=acc.b_major,
        b_major=acc.a_major,
        width=acc.height,
        height=acc.width,
    )


def _flipped_store(store: Store) -> Store:
    """The store of the transposed plane. Pairs of columns are the integers that kernels take them for."""
    form, dtype = store.form.transposed, store.dtype
    assert form is not None
    return replace(store, form=form, dtype=dtype if dtype.part is dtype else DType.I32)


def _flipped(load: Load) -> Load:
    kind = LoadKind.of(by_row=load.kind.by_column, by_column=load.kind.by_row)
    return replace(load, kind=kind, stride_m=load.stride_n, stride_n=load.stride_m)
