"""The mechanism that plants faults: which calls it replaces, and that no fault is lost without an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import cutlass.pipeline as pipeline
import pytest

from cute_backend.templates import crew, rings, tma_feed
from cute_backend.templates.fragment_tile import FragmentTile
from support.simulator.mutants import ROWS_BESIDE_TMA, WARPS, Mutant, WrongNumbers, traced
from support.simulator.planting import NeverReached, Wrong, check, instead, late, planted, without

ROLE = crew.Role("work", 0, 4, "what a test does", print)
ARRIVALS = crew.Arrivals(ROLE, 4, 1)


def two_more(call: Any) -> Any:
    return call() + 2


def test_a_call_is_made_with_other_arguments_and_the_module_is_left_as_it_was():
    with planted(instead("crew.one", lambda call: call(role=crew.Role(call.role.name, 7, 1, "", print)))):
        assert crew.one(ROLE).role.first == 7
    assert crew.one(ROLE).role is ROLE


def test_a_function_is_replaced_in_every_module_that_imports_it():
    with planted(without("rings.check_stage")):
        assert tma_feed.stages_of is rings.stages_of  # watched, in both
        rings.check_stage(None, 0)
    with planted(instead("rings.consumer_state", lambda call: call.stages)):
        assert tma_feed.consumer_state(3) == 3


def test_properties_and_constants_have_other_values():
    tile = object.__new__(FragmentTile)
    with planted(
        (
            *instead("crew.Arrivals.count", two_more),
            *instead("fragment_tile.FragmentTile.row_lanes", lambda call: (8,)),
        )
    ):
        assert ARRIVALS.count == 6
        assert tile.row_lanes == (8,)
    assert (ARRIVALS.count, tile.row_lanes) == (4, (1, 2))


@pytest.mark.parametrize(
    ("where", "counts"),
    [
        ({}, [6, 6, 6, 6]),
        ({"inside": "crew.Arrivals.__str__"}, [4, 4, 6, 4]),
        ({"outside": ("crew.Arrivals.__str__",)}, [6, 6, 4, 6]),
        ({"before": "crew.Arrivals.__str__"}, [6, 6, 6, 4]),
        ({"after": "crew.Arrivals.__str__"}, [4, 4, 4, 6]),
        ({"when": lambda call: call.self.warps == 2}, [4, 4, 6, 4]),
        ({"call": 2}, [4, 6, 4, 4]),
    ],
    ids=["all", "inside", "outside", "before", "after", "when", "call"],
)
def test_the_calls_that_are_wrong(where, counts):
    """`count` is read twice before `str`, which reads it, too, and once after it."""
    wrong = instead("crew.Arrivals.count", two_more, **where)

    def read() -> list[int]:
        first = [ARRIVALS.count, ARRIVALS.count]
        arrivals = crew.Arrivals(ROLE, 2, 2)
        return [*first, int(str(arrivals).rpartition("= ")[2]), ARRIVALS.count]

    with planted(wrong):
        assert read() == counts


def test_each_call_of_another_place_is_followed_by_one_that_is_wrong():
    with planted(instead("crew.Arrivals.count", two_more, after="crew.one")):
        crew.one(ROLE)
        assert [ARRIVALS.count, ARRIVALS.count] == [6, 4]
        crew.one(ROLE)
        assert [ARRIVALS.count, ARRIVALS.count] == [6, 4]


def test_a_late_call_is_made_after_the_next_call_of_another_place():
    made: list[str] = []
    order = (
        instead("crew.one", lambda call: made.append(call.role)),
        late("crew.one", "crew.Arrivals.__str__"),
    )
    with planted(tuple(wrong for each in order for wrong in each)):
        crew.one("first")
        made.append("between")
        str(ARRIVALS)
    assert made == ["between", "first"]


def test_the_pipelines_of_rings_are_known_by_name(tmp_path):
    found: dict[str, set[Any]] = defaultdict(set)

    def seen(place: str, of: Callable[[Any], Any]) -> tuple[Wrong, ...]:
        def see(call: Any) -> Any:
            found[place].add(of(call))
            return call()

        return instead(place, see)

    kernel = ROWS_BESIDE_TMA.kernel
    wrongs = [seen(f"{ring}.consumer_wait", lambda call: type(call.self)) for ring in ("ab", "row")]
    wrongs += [seen(f"{ring}.create", lambda call: call.num_stages) for ring in ("ab", "row")]
    wrongs += [seen(f"ab.{side}.wait", lambda call: call.self.arrive_count) for side in ("full", "empty")]
    traced(kernel, tuple(wrong for each in wrongs for wrong in each), tmp_path)
    stages = kernel.plan.stages
    assert found == {
        "ab.consumer_wait": {pipeline.PipelineTmaAsync},
        "row.consumer_wait": {pipeline.PipelineAsync},
        "ab.create": {stages.ab},
        "row.create": {stages.row},
        "ab.full.wait": {1},  # the warp that loads
        "ab.empty.wait": {4},  # the warps that multiply
    }


def test_a_fault_that_no_call_of_a_kernel_fits_is_an_error(tmp_path):
    """The warps of this kernel copy all operands themselves, so that it has no ring."""
    mutant = Mutant("no such wait", WARPS, without("ab.consumer_wait"), WrongNumbers, "")
    with pytest.raises(NeverReached, match=r"fits: ab\.consumer_wait"):
        mutant.program(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong("ab.consumer_waits", two_more),
        Wrong("ab.full.waits", two_more),
        Wrong("arch.sync_warps", two_more),
        Wrong("crew.Arrivals.counts", two_more),
        Wrong("crew.one", two_more, inside="crew.Crews.one"),
    ],
    ids=lambda wrong: str(wrong),
)
def test_a_place_that_does_not_exist_is_an_error(wrong):
    with pytest.raises(AttributeError):
        check((wrong,))
