"""The spec of a fused epilogue: the one structure that the walker, the emitter and the runtime share.

A spec is a DAG in SSA order. Its values are the accumulators, the loads and the results of the ops, each
known by its name; a store names the value that it writes. A spec holds no sizes except those of blocks of
columns, so one kernel serves every M, N and K, and its canonical JSON form is the key of every cache.

A floating-point value is held in fp32, an integer value in int32, a truth value as a bool, whatever dtype it
was loaded from, since widening is exact. `Op.dtype` says what the result has been rounded or wrapped to; only
`cast` may name a dtype narrower than the three register dtypes. A store rounds its value to `Store.dtype` as
a saturating cast would.

A store may reduce: then it has one element for each row, for each column, or for the whole plane. Reductions
are computed in fp32, over exactly the elements of the (M, N) plane. No op of the same spec can read their
results, since they are complete only when the kernel is done; ops on a result alone belong to its store. An
op may reduce too, over blocks of columns that a tile holds whole, and its result is a value like any other.

The files: `products`, `loads`, `chain_ops` and `stores` define the parts of a spec, and
`epilogue_spec` the whole. `block_passes` says which reductions come ahead of what reads them, `consistency`
checks a spec, and `canonical` converts it to JSON and back.
"""

from cute_backend.dtypes import PAIRED_DTYPES, PRODUCT_DTYPES, VALUE_DTYPES, DType
from cute_backend.errors import SpecError
from cute_backend.kinds.axes import SCALE_TILE, Order, Stride, padded
from cute_backend.kinds.loads import LoadKind
from cute_backend.kinds.reductions import BATCH_ROWS, Axis, Reduction
from cute_backend.kinds.scales import GROUP_SIZES, Scales, Scaling, WeightGroups
from cute_backend.kinds.tables import TABLE_COLUMNS, Blocks
from cute_backend.spec.block_passes import LEAST_AHEAD, BlockPasses, block_passes
from cute_backend.spec.canonical import SPEC_VERSION
from cute_backend.spec.chain_ops import (
    Const,
    Op,
    Operand,
    Overflow,
    Precision,
)
from cute_backend.spec.epilogue_spec import EpilogueSpec
from cute_backend.spec.loads import Load
from cute_backend.spec.products import (
    FP8_K_STEP,
    STORED_DTYPES,
    Accumulator,
    BColumns,
    Columns,
    Major,
    ProductKind,
)
from cute_backend.spec.stores import REDUCED, Store
