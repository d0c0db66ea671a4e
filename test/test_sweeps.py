"""The part of a sweep that `make test` runs, and the targets that run the rest."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from support.sweeps import covering, in_parts, of_part

MAKEFILE = Path(__file__).parents[1] / "Makefile"


@pytest.mark.parametrize(("counts", "kept"), [((4,), 4), ((3, 5), 5), ((4, 4), 4), ((2, 3, 3), 3)], ids=str)
def test_every_value_is_in_a_case_that_is_kept(counts: tuple[int, ...], kept: int) -> None:
    cases = [frozenset(enumerate(map(str, places))) for places in product(*map(range, counts))]
    found = covering(cases)
    assert len(found) == kept
    for axis, count in enumerate(counts):
        assert {dict(cases[i])[axis] for i in found} == set(map(str, range(count)))


def test_cases_that_are_left_out_of_the_product_are_not_missed() -> None:
    assert covering([frozenset({(0, "a"), (1, "a")}), frozenset({(0, "b"), (1, "b")})]) == {0, 1}
    assert covering([frozenset({(0, "a")}), frozenset({(0, "a")})]) == {0}


def test_of_many_cases_few_are_kept_that_lie_far_apart() -> None:
    cases = [frozenset({(0, str(i))}) for i in range(9)]
    assert [covering(cases, most) for most in (0, 1, 2, 3, 20)] == [
        set(),
        {0},
        {0, 8},
        {0, 4, 8},
        {*range(9)},
    ]


def test_a_single_case_is_the_one_at_the_start() -> None:
    cases = [frozenset({(0, str(i))}) for i in range(9)]
    assert [covering(cases, 1, start) for start in range(9)] == [{i} for i in range(9)]
    assert covering(cases, 2, 3) == {3, 8}


@pytest.mark.sweep
@pytest.mark.parametrize("letter", "abcd")
@pytest.mark.parametrize("number", range(3))
def test_the_plugin_divides(letter: str, number: int, request: pytest.FixtureRequest) -> None:
    """A case of twelve, of which four are in `make test`: each letter in one, and each number."""
    left_out = request.node.get_closest_marker("exhaustive") is not None
    assert left_out == ((letter, number) not in {("a", 0), ("b", 1), ("c", 0), ("d", 2)})


@pytest.mark.sweep(2)
@pytest.mark.parametrize("number", [*range(9), pytest.param(9, marks=pytest.mark.exhaustive)])
def test_the_plugin_keeps_two_that_lie_apart(number: int, request: pytest.FixtureRequest) -> None:
    left_out = request.node.get_closest_marker("exhaustive") is not None
    assert left_out == (number not in (0, 8))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", range(4))
def test_one_case_is_kept(number: int, request: pytest.FixtureRequest) -> None:
    left_out = request.node.get_closest_marker("exhaustive") is not None
    assert left_out == (number != 2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", range(4))
def test_another_case_is_kept(number: int, request: pytest.FixtureRequest) -> None:
    """Of a test with another name."""
    left_out = request.node.get_closest_marker("exhaustive") is not None
    assert left_out == (number != 0)


def test_the_parts_of_a_test_are_the_whole() -> None:
    name, parts = in_parts(3).mark.args
    assert name == "part"
    assert sorted(i for part in parts for i in range(10)[part]) == list(range(10))


def test_no_part_of_a_case_is_empty() -> None:
    _, parts = in_parts(5).mark.args
    assert [of_part("abc", part) for part in parts] == [["a"], ["b"], ["c"], ["a"], ["b"]]
    assert [of_part("abcdefg", part) for part in parts] == [["a", "f"], ["b", "g"], ["c"], ["d"], ["e"]]


def test_every_mark_that_make_test_leaves_out_has_a_target() -> None:
    """A case is run by `make test`, or by the target of the mark that keeps it out."""
    commands = [line for line in MAKEFILE.read_text().splitlines() if "-m pytest -m" in line]
    [whole] = [command for command in commands if '"not ' in command]
    left_out = [part.removeprefix("not ") for part in whole.split('"')[1].split(" and ")]
    assert left_out == ["gpu", "sim", "exhaustive"]
    for mark in left_out:
        assert any(re.search(rf'-m pytest -m "?{mark}\b', command) for command in commands), mark
