"""A kind of members that only this file and the tuple of all kinds know: what the search does with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from torch import fx

from cute_backend.fx_walk.graph.static import first_argument
from cute_backend.fx_walk.members import kinds
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.region.draft import Draft
from cute_backend.fx_walk.region.member import Member, Search
from cute_backend.fx_walk.region.value import Plane, Value
from support.fx_walk.synthetic import Graph, aten, walk

M, N, K = 64, 4096, 4096


@dataclass(frozen=True)
class Flip(Member):
    """A `flip`, after which the columns are taken to be as before."""

    source: fx.Node
    stays: bool
    needs_shared_launch: bool = False

    def joins(self, draft: Draft) -> bool:
        return self.source in draft.values

    def join(self, search: Search, draft: Draft) -> Value:
        if self.head in search.taken_back:
            raise search.taken_back[self.head]
        if self.needs_shared_launch and (why := search.unshared(draft.anchors)):
            raise Refused(Reason.ROTATION_COST, why=why)
        draft.frames[self.head] = draft.frames[self.source]
        return Plane(draft.read(self.source, self.head))

    def unfit(self, draft: Draft) -> Refused | None:
        return None if self.stays else Refused(Reason.BLOCK_COST)


def know_flips(
    monkeypatch: pytest.MonkeyPatch, stays: bool = True, needs_shared_launch: bool = False
) -> None:
    def find(nodes: Iterable[fx.Node]) -> Iterator[Member]:
        for node in nodes:
            if node.target is aten.flip.default:
                yield Flip(node, (), first_argument(node), stays, needs_shared_launch)

    monkeypatch.setattr(kinds, "FINDERS", (*kinds.FINDERS, find))


def flipped(products: int = 1) -> fx.Graph:
    """Products of one A, each with a sum, a `flip` of it and a relu."""
    made, results = Graph(), list[fx.Node]()
    a = made.input("a", (M, K))
    for index in range(products):
        product = made.call(aten.mm.default, a, made.input(f"b{index}", (K, N), strides=(1, K)))
        summed = made.call(aten.add.Tensor, product, product)
        results.append(made.call(aten.relu.default, made.call(aten.flip.default, summed, [1])))
    return made.output(*results)


def test_a_kind_that_is_not_known_ends_a_region() -> None:
    (region,), (rejection,) = walk(flipped())
    assert [node.name for node in region.nodes] == ["mm_default", "add_tensor"]
    assert (rejection.node, rejection.reason) == ("flip_default", Reason.NOT_POINTWISE)


def test_a_kind_in_the_tuple_joins_with_what_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    know_flips(monkeypatch)
    (region,), rejections = walk(flipped())
    assert [node.name for node in region.nodes] == [
        "mm_default",
        "add_tensor",
        "flip_default",
        "relu_default",
    ]
    assert not rejections


def test_a_member_that_is_unfit_is_taken_back_with_what_follows_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    know_flips(monkeypatch, stays=False)
    (region,), (rejection,) = walk(flipped())
    assert [node.name for node in region.nodes] == ["mm_default", "add_tensor"]
    assert (rejection.node, rejection.reason) == ("flip_default", Reason.BLOCK_COST)


@pytest.mark.settings(shared_launches=True)
@pytest.mark.parametrize(("products", "stay"), [(1, 0), (2, 2)])
def test_a_member_that_needs_a_shared_launch_stays_in_one_alone(
    monkeypatch: pytest.MonkeyPatch, products: int, stay: int
) -> None:
    know_flips(monkeypatch, needs_shared_launch=True)
    (region,), _ = walk(flipped(products))
    assert [node.target for node in region.nodes].count(aten.flip.default) == stay
    assert region.is_shared is (products > 1)
