"""The chain of a region's ops: what it forgets when a step is refused, and what it asks the planner."""

from __future__ import annotations

import pytest
from torch import fx

from cute_backend.fx_walk.values import chain as chains
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.fx_walk.values.classify import LoadView
from cute_backend.kinds import reductions
from cute_backend.planning import Arch, serves
from cute_backend.spec import (
    Accumulator,
    DType,
    EpilogueSpec,
    LoadKind,
    Op,
    Precision,
    Store,
    Stride,
)

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
    mean = chain.reduce_blocks(reductions.MEAN, value, 64)
    assert chain.is_served() and len(asked) == 1
    chain.emit("sub", value, mean)
    assert chain.is_served() and len(asked) == 1
    assert not chain.is_served(Op("row", "block_sum", (chain.last,), DType.F32, block=56)) and len(asked) == 2
    assert chain.is_served() and len(asked) == 2
    chain.rollback(mark)
    chain.reduce_blocks(reductions.MEAN, value, 56)
    assert not chain.is_served() and len(asked) == 3


def test_a_provisional_spec_stores_one_plane_of_all_ends() -> None:
    """Whether passes can reduce blocks depends on all values that are stored, and how many planes these are
    is not known."""
    chain = Chain((ACC,), Precision.FUSED)
    chain.emit("exp", "acc")
    chain.reduce_blocks(reductions.MEAN, "acc", 64)
    spec = chain.provisional()
    assert [(op.op, op.values) for op in spec.ops[2:]] == [("add", ("t0", "t1"))]
    assert [store.value for store in spec.stores] == [spec.ops[-1].name]
    chain.stored = frozenset({"t1"})
    assert [store.value for store in chain.provisional().stores] == ["t1"]


def vector(node: fx.Node) -> LoadView:
    return LoadView(node, LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE, (), ((0,),))


def test_a_chain_of_some_members_is_numbered_by_them_alone() -> None:
    """The first member leaves: its load and its op go, and what it shares with the second becomes that
    one's."""
    graph = fx.Graph()
    gone, kept, wide, row, bias = (
        graph.placeholder(name) for name in ("gone", "kept", "wide", "row", "bias")
    )
    chain = Chain((ACC,), Precision.FUSED)
    biased = chain.emit("add", "acc", chain.load(vector(bias), "bias"))
    with chain.lowering(gone):
        shared = chain.emit("exp", biased)
        left = chain.emit("mul", shared, chain.load(vector(wide)))
    with chain.lowering(kept):
        value = chain.emit("mul", chain.emit("exp", biased), chain.load(vector(row)))
    fewer, names = chain.kept({kept: (value,)}, {gone})
    spec = fewer.build([Store("out0", str(names[value]), DType.F32)])
    assert [(load.name, node) for load, node in zip(spec.loads, fewer.nodes(), strict=True)] == [
        ("bias", bias),
        ("rowvec0", row),
    ]
    assert [(op.name, op.op, op.operands) for op in spec.ops] == [
        ("t0", "add", ("acc", "bias")),
        ("t1", "exp", ("t0",)),
        ("t2", "mul", ("t1", "rowvec0")),
    ]
    assert fewer.origins == {"t0": kept, "t1": kept, "t2": kept}
    assert left not in names and chain.emit("exp", biased) == shared
