"""The chain of a region's ops: what it forgets when a step is refused."""

from __future__ import annotations

from cute_backend.fx_walk.values.chain import Chain
from cute_backend.spec import Accumulator, DType, Precision, Store


def test_an_op_that_was_forgotten_is_made_again() -> None:
    """Equal ops are one op, so the chain keeps what it made: a forgotten op must not be among them."""
    chain = Chain((Accumulator("acc", DType.BF16, DType.BF16),), Precision.FUSED)
    mark = chain.mark()
    chain.emit("exp", "acc")
    chain.rollback(mark)
    again = chain.emit("exp", "acc")
    spec = chain.build([Store("out0", again, DType.BF16)])
    assert [op.op for op in spec.ops] == ["exp"]
    assert chain.emit("exp", "acc") == again
