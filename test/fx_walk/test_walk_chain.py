"""The chain of a region's ops: what it forgets when a step is refused, and what it asks the planner."""

from __future__ import annotations

import pytest

from cute_backend.fx_walk.values import chain as chains
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.planning import Arch, serves
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Op, Precision, ReduceKind, Store

ACC = Accumulator("acc", DType.BF16, DType.BF16)


def test_an_op_that_was_forgotten_is_made_again() -> None:
    """Equal ops are one op, so the chain keeps what it made: a forgotten op must not be among them."""
    chain = Chain((ACC,), Precision.FUSED)
    mark = chain.mark()
    chain.emit("exp", "acc")
    chain.rollback(mark)
    again = chain.emit("exp", "acc")
    spec = chain.build([Store("out0", again, DType.BF16)])
    assert [op.op for op in spec.ops] == ["exp"]
    assert chain.emit("exp", "acc") == again


def test_the_planner_is_asked_again_only_if_blocks_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EpilogueSpec] = []

    def counted(arch: Arch, spec: EpilogueSpec) -> bool:
        asked.append(spec)
        return serves(arch, spec)

    monkeypatch.setattr(chains, "serves", counted)
    chain = Chain((ACC,), Precision.FUSED, Arch.SM90A.target)
    value = chain.emit("exp", "acc")
    assert chain.is_served() and not asked
    mark = chain.mark()
    mean = chain.reduce_blocks(ReduceKind.MEAN, value, 64)
    assert chain.is_served() and len(asked) == 1
    chain.emit("sub", value, mean)
    assert chain.is_served() and len(asked) == 1
    assert not chain.is_served(Op("row", "block_sum", (chain.last,), DType.F32, block=56)) and len(asked) == 2
    assert chain.is_served() and len(asked) == 2
    chain.rollback(mark)
    chain.reduce_blocks(ReduceKind.MEAN, value, 56)
    assert not chain.is_served() and len(asked) == 3


def test_a_provisional_spec_stores_one_plane_of_all_ends() -> None:
    """Whether passes can reduce blocks depends on all values that are stored, and how many planes these are
    is not known."""
    chain = Chain((ACC,), Precision.FUSED)
    chain.emit("exp", "acc")
    chain.reduce_blocks(ReduceKind.MEAN, "acc", 64)
    spec = chain.provisional()
    assert [(op.op, op.values) for op in spec.ops[2:]] == [("add", ("t0", "t1"))]
    assert [store.value for store in spec.stores] == [spec.ops[-1].name]
    chain.stored = frozenset({"t1"})
    assert [store.value for store in chain.provisional().stores] == ["t1"]
