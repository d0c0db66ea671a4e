"""A search leaves no trace of a trial that was refused, and takes out a reduction that does not pay."""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from typing import Any

import pytest
from torch import fx

from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.search import regions
from cute_backend.fx_walk.search.walk import State, Walk
from cute_backend.fx_walk.values.chain import Chain
from cute_backend.spec import Precision
from support.fx_walk.synthetic import Graph, aten, walk


def pair_and_another() -> fx.Graph:
    """A pair, and a product after which nothing can be fused."""
    made = Graph()
    a = made.input("a", (64, 32))
    gate, up, other = (
        made.call(aten.mm.default, a, made.input(name, (32, 48), strides=(1, 32))) for name in ("g", "u", "o")
    )
    both = made.call(aten.mul.Tensor, made.call(aten.relu.default, gate), up)
    return made.output(both, made.call(aten.cumsum.default, other, 1))


def test_a_refused_trial_leaves_no_trace() -> None:
    graph = pair_and_another()
    found = Walk(graph, Precision.FUSED, lambda device: (9, 0))
    first, node, *_ = graph.nodes
    refused = Refused(Reason.NOTHING_TO_FUSE, refused="")
    found.redone.add(first)
    found.taken_back[first] = refused
    found.rejections[first] = refused.rejection(first)
    before = found.state()
    with found.trial():
        found.owner[node] = Draft((), Chain((), Precision.FUSED))
        found.reads.add(node)
        found.redone.add(node)
        found.taken_back[node] = refused
        found.rejections[node] = refused.rejection(node)
        found.span([first], [node])
        raise refused
    assert found.state() == before
    assert (found.outside.owner, found.outside.reads, found.outside.redone) == ({}, set(), {first})


def test_a_trial_keeps_what_is_not_refused() -> None:
    found = Walk(pair_and_another(), Precision.FUSED, lambda device: (9, 0))
    with found.trial():
        found.redone.update(found.order)
    assert found.redone == found.order.keys()


def test_all_that_a_search_changes_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Walk, dict[str, Any]]] = []

    def observed(*args: Any) -> Walk:
        made = Walk(*args)
        begun.append((made, {name: copy(value) for name, value in vars(made).items()}))
        return made

    monkeypatch.setattr(regions, "Walk", observed)
    assert [len(region.anchors) for region in walk(pair_and_another())[0]] == [2]
    ((after, before),) = begun
    facts = before.keys() - {field.name for field in fields(State)} - {"outside", "mutations"}
    assert {name: before[name] for name in facts} == {name: vars(after)[name] for name in facts}
    assert {"owner", "reads", "rejections", "stretches"} <= before.keys() - facts


@pytest.mark.settings(block_reductions="auto")
def test_a_region_shrinks_by_a_reduction_that_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 96 columns are reduced in passes until a plane is read after them. Without the reduction the
    region keeps the first sum, for which it is not grown from its product again."""
    made, grown = Graph(), list[int]()
    plane, other = (made.input(name, (8, 288)) for name in ("plane", "other"))
    y = made.call(aten.add.Tensor, made.mm(8, 288, 16), plane)
    heads = made.call(aten.reshape.default, y, [8, 3, 96])
    away = made.call(aten.sub.Tensor, heads, made.call(aten.amax.default, heads, [2], True))
    last = made.call(aten.add.Tensor, made.call(aten.reshape.default, away, [8, 288]), plane)
    graph = made.output(y, made.call(aten.cumsum.default, made.call(aten.mul.Tensor, last, other), 0))

    def noted(found: Walk, draft: Draft) -> Draft:
        grown.append(len(draft.values))
        return regions_grown(found, draft)

    regions_grown = regions.grown
    monkeypatch.setattr(regions, "grown", noted)
    (region,), rejections = walk(graph)
    assert grown == [1, 3]
    assert [node.name for node in region.nodes] == ["mm_default", "add_tensor"]
    reasons = {rejection.node: rejection.reason for rejection in rejections}
    assert (reasons["amax_default"], reasons["sub_tensor"]) == (Reason.BLOCK_COST, Reason.FEEDBACK)
