"""The search for a region's stores against trying all of them, on random values and consumers."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from cute_backend.fx_walk.ends import boundary
from cute_backend.fx_walk.ends.boundary import (
    LAST_TILE_BYTES,
    LAUNCH_BYTES,
    BoundaryValue,
    Choices,
    Limits,
    cheapest_stores,
)
from cute_backend.planning import LAST_TILE_RESULTS

PLANE = LAUNCH_BYTES // 4


def bits(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def with_sources(values: tuple[BoundaryValue, ...], place: int) -> set[int]:
    """A value and all that it is computed from."""
    return {place}.union(*(with_sources(values, source) for source in bits(values[place].sources)))


def cost(choices: Choices, stores: set[int]) -> int | None:
    """The bytes that cross with these stores, and launches; None if a product would be done again.

    Written from what the words mean: who computes what, who reads what, who writes what.
    """
    values = choices.values
    kernel = set().union(*(with_sources(values, place) for place in stores))
    written, read, computed = set[int](), [set[int]() for _ in choices.consumers], set[tuple[int, int]]()
    again = set[int]()

    def compute(consumer: int, place: int) -> bool:
        if (consumer, place) in computed:
            return True
        computed.add((consumer, place))
        return not values[place].product and all(get(consumer, each) for each in bits(values[place].sources))

    def get(consumer: int, place: int) -> bool:
        value = values[place]
        if place in stores:
            read[consumer].add(place)
            return True
        if not value.reduces and not value.in_memory:
            return compute(consumer, place)
        if consumer != value.home:
            written.add(place)
            read[consumer].add(place)
        else:
            again.add(place)
        return compute(value.home, place)

    for consumer, needs in enumerate(choices.consumers):
        if not all(get(consumer, place) for place in bits(needs)):
            return None
    for place, value in enumerate(values):
        if value.in_memory and place not in stores:
            written.add(place)
            if not compute(value.home, place):
                return None

    def loads(places: set[int], already: int = 0) -> int:
        operands = {load for place in places for load in bits(values[place].loads & ~already)}
        return sum(choices.loads[load] for load in operands)

    total = sum(values[place].size for place in stores | written) + loads(kernel)
    total += LAUNCH_BYTES * sum(values[place].followed for place in stores)
    reduced = [values[place] for place in stores if values[place].is_reduced]
    is_many = sum(value.planes for value in reduced) > LAST_TILE_RESULTS
    if reduced:  # one kernel finishes all, or the last tiles do
        total += LAUNCH_BYTES if is_many or any(value.apart for value in reduced) else LAST_TILE_BYTES
    total += sum(values[place].again for place in again)
    for consumer, places in enumerate(read):
        done = {place for by, place in computed if by == consumer}
        total += sum(values[place].size for place in places) + loads(done, choices.loaded[consumer])
        total += LAUNCH_BYTES * (bool(done) and not choices.consumers[consumer])
    return total


def fits(choices: Choices, room: Limits, stores: set[int]) -> bool:
    """Whether a kernel may have these stores: few results, and few loads or few bits."""
    values = choices.values
    kernel = set().union(*(with_sources(values, place) for place in stores))
    read = {load for place in kernel for load in bits(values[place].loads)}
    results = sum(values[place].planes for place in stores)
    planes = results - sum(values[place].is_reduced for place in stores)
    if results > room.results or planes > room.results - room.reductions:
        return False
    wide = sum(values[place].bits for place in stores) + sum(choices.load_bits[load] for load in read)
    return len(read) <= room.loads or wide <= room.bits


def every_choice(choices: Choices, room: Limits) -> list[set[int]]:
    storable = [place for place, value in enumerate(choices.values) if value.storable]
    return [
        set(chosen)
        for count in range(len(storable) + 1)
        for chosen in combinations(storable, count)
        if fits(choices, room, set(chosen))
    ]


def drawn(rng: random.Random, count: int) -> Choices:
    loads = tuple(rng.choice((PLANE, 2 * PLANE)) for _ in range(3))
    consumers = rng.randint(1, 3)
    values: list[BoundaryValue] = []
    for place in range(count):
        product = place == 0 or (place == 1 and rng.random() < 0.2)
        reduces = not product and rng.random() < 0.15
        reduced = [each for each, value in enumerate(values) if value.is_reduced]
        finishes = not product and not reduces and bool(reduced) and rng.random() < 0.3
        sources, is_small = 1 << rng.choice(reduced) if finishes else 0, reduces or finishes
        while not product and not sources:
            sources = sum(1 << each for each in rng.sample(range(place), min(place, rng.choice((1, 1, 2)))))
            sources &= ~sum(1 << each for each in reduced)
        values.append(
            BoundaryValue(
                size=PLANE // 64 * rng.choice((1, 2)) if is_small else PLANE // 2 * rng.choice((1, 2, 2, 4)),
                sources=sources,
                loads=0 if product or finishes or rng.random() < 0.6 else rng.randrange(8),
                storable=rng.random() < 0.9,
                product=product,
                reduces=reduces,
                finishes=finishes,
                apart=values[bits(sources)[0]].apart if finishes else rng.random() < 0.5,
                in_memory=rng.random() < 0.2,
                home=rng.randrange(consumers),
                followed=reduces and rng.random() < 0.3,
                again=reduces * rng.choice((0, PLANE)),
                planes=1 if is_small else rng.choice((1, 1, 1, 2)),
                bits=0 if is_small else rng.choice((8, 16, 32)),
            )
        )
    needs = tuple(
        sum(1 << each for each in range(count) if rng.random() < 0.25) if rng.random() < 0.8 else 0
        for _ in range(consumers)
    )
    loaded = tuple(rng.randrange(8) & rng.randrange(8) if each else 0 for each in needs)
    return Choices(tuple(values), loads, needs, loaded, tuple(rng.choice((16, 32)) for _ in loads))


def agrees(seed: int, count: int) -> None:
    rng = random.Random(seed)
    choices = drawn(rng, count)
    results = rng.randint(1, 4)
    room = Limits(rng.randint(0, 3), results, rng.randrange(results), rng.choice((0, 0, 48, 100)))
    costs = [each for chosen in every_choice(choices, room) if (each := cost(choices, chosen)) is not None]
    found = cheapest_stores(choices, room)
    if found is None:
        assert not costs
        return
    assert found.is_best and fits(choices, room, set(bits(found.stores)))
    assert cost(choices, set(bits(found.stores))) == min(costs)


def test_the_search_agrees_with_trying_all_stores() -> None:
    for seed in range(2000):
        agrees(seed, 2 + seed % 6)


@pytest.mark.parametrize("apart", [True, False])
def test_a_few_bytes_are_worth_a_reduction_that_takes_no_launch_and_no_other(apart: bool) -> None:
    """A kernel reads the plane 0 and its reduction 1; if it reduces the plane itself, it reads it twice."""
    plane = BoundaryValue(PLANE, product=True)
    reduction = BoundaryValue(PLANE // 64, sources=1, reduces=True, apart=apart, again=3 * PLANE)
    found = cheapest_stores(Choices((plane, reduction), (), (3,), (0,)), Limits(3, 4))
    assert found == boundary.Boundary(1 if apart else 3, is_best=True)


@pytest.mark.parametrize(
    ("reductions", "cost"), [(0, 0), (1, LAST_TILE_BYTES), (4, LAST_TILE_BYTES), (5, LAUNCH_BYTES)]
)
def test_the_last_tile_of_a_row_finishes_few_results(reductions: int, cost: int) -> None:
    values = (
        BoundaryValue(PLANE, product=True),
        *(BoundaryValue(1, sources=1, reduces=True, apart=False) for _ in range(5)),
    )
    assert Choices(values, (), (), ()).finish_bytes((2 << reductions) - 1) == cost


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [8, 9, 10, 11, 12])
def test_the_search_agrees_with_trying_all_stores_of_more_values(count: int) -> None:
    for seed in range(200):
        agrees(10_000 * count + seed, count)


def test_a_search_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best end so far, or else the latest possible one, leaves no product to be computed twice."""
    given_up = 0
    for seed in range(50):
        choices = drawn(random.Random(seed), 12)
        whole = cheapest_stores(choices, Limits(3, 4))
        if not all(value.storable for value in choices.values if value.product):
            continue
        for most in (0, 100):
            monkeypatch.setattr(boundary, "_MAX_WORK", most)
            cheapest_stores.cache_clear()
            found = cheapest_stores(choices, Limits(3, 4))
            assert (found is None) == (whole is None)
            if found is not None:
                given_up += not found.is_best
                assert cost(choices, set(bits(found.stores))) is not None
            monkeypatch.undo()
        cheapest_stores.cache_clear()
    assert given_up > 30


def test_thousands_of_values_are_not_searched() -> None:
    count = 3000
    chain = [
        BoundaryValue(PLANE, product=True),
        *(BoundaryValue(PLANE, sources=1 << place) for place in range(count)),
    ]
    read = Choices(tuple(chain), (), ((2 << count) - 1,), (0,))
    found = cheapest_stores(read, Limits(3, 4))
    assert found is not None and not found.is_best
    assert bits(found.stores) == [0, count - 2, count - 1, count]
    last = Choices(tuple(chain), (), (1 << count,), (0,))
    assert cheapest_stores(last, Limits(3, 4)) == boundary.Boundary(1 << count, is_best=True)
