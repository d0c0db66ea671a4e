"""The loop in which a kernel computes each value, where ops reduce blocks of columns."""

from __future__ import annotations

from cute_backend.kinds.blocks import PART
from cute_backend.memory_ops.schedule import schedule
from cute_backend.spec import Accumulator, Const, DType, EpilogueSpec, Op, Store


def test_an_index_is_computed_in_the_loop_that_reads_it() -> None:
    """An index depends on no loop. Computed in the first one, it would be kept until the second one."""
    spec = EpilogueSpec(
        (Accumulator("acc", DType.BF16, DType.BF16),),
        (),
        (
            Op("index", PART.name, (Const(32),), DType.I32, block=64),
            Op("first", "eq", ("index", Const(0)), DType.BOOL),
            Op("mean", "block_mean", ("acc",), DType.F32, block=64),
            Op("chosen", "where", ("first", "mean", "acc"), DType.F32),
        ),
        (Store("out0", "chosen", DType.BF16),),
    )
    found = schedule(spec)
    assert [op.name for op in found.ops] == ["mean", "index", "first", "chosen"]
    assert found.loops == {"acc": 0, "mean": 1, "index": 1, "first": 1, "chosen": 1}
