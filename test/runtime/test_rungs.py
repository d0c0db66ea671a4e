"""The kernel that runs in place of one that spills, or that can't be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch._dynamo.utils import counters

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.planning import Plan
from cute_backend.runtime.compiling import rungs
from cute_backend.runtime.compiling.rungs import begin_alone, load_standing, obtain_standing, standing, stands
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels.kernel import Kernel
from support.runtime.handmade import kernel_of, make_spec

SPEC = make_spec()
FIRST, SECOND, LAST = (kernel_of(SPEC, index) for index in range(3))


@dataclass
class Compiler:
    """Builds kernels that spill as `spills` says, or fail, and remembers what was built."""

    spills: dict[Kernel, int | Exception]
    known: dict[Kernel, int] = field(default_factory=dict)
    batches: list[set[Kernel]] = field(default_factory=list)

    def obtain(self, kernels: Iterable[Kernel]) -> dict[Kernel, Any]:
        self.batches.append(set(kernels))
        outcomes: dict[Kernel, Any] = {}
        for kernel in self.batches[-1]:
            spilled = self.spills[kernel]
            if isinstance(spilled, Exception):
                outcomes[kernel] = spilled
            else:
                self.known[kernel] = spilled
                outcomes[kernel] = kernel.name
        return outcomes


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def ladder(plan: Plan) -> tuple[Plan, ...]:
        return (FIRST.plan, SECOND.plan, LAST.plan) if plan == FIRST.plan else (plan,)

    monkeypatch.setattr(rungs, "rungs", ladder)
    monkeypatch.setattr(rungs, "_failed", set())
    monkeypatch.setattr(notices, "_warned", set())
    counters.clear()
    yield
    counters.clear()


def compiler(monkeypatch: pytest.MonkeyPatch, *spills: int | Exception) -> Compiler:
    made = Compiler(dict(zip((FIRST, SECOND, LAST), spills, strict=True)))
    monkeypatch.setattr(rungs, "obtain", made.obtain)
    monkeypatch.setattr(rungs, "spill_bytes", made.known.get)
    monkeypatch.setattr(
        rungs, "load_known", lambda kernels: {each: each.name for each in kernels if each in made.known}
    )
    return made


def counted() -> dict[str, int]:
    return dict(counters["cute_backend"])


BROKEN = BuildError("the compiler was ended by SIGSEGV")


@pytest.mark.filterwarnings("ignore:cute_backend")
@pytest.mark.parametrize(
    ("spills", "wanted", "batches"),
    [
        ((0, 0, 0), FIRST, [{FIRST}]),
        ((8, 0, 0), SECOND, [{FIRST}, {SECOND}]),
        ((8, 16, 0), LAST, [{FIRST}, {SECOND}, {LAST}]),
        ((BROKEN, 0, 0), SECOND, [{FIRST}, {SECOND}]),
        ((8, BROKEN, 0), LAST, [{FIRST}, {SECOND}, {LAST}]),
        ((24, 8, 16), SECOND, [{FIRST}, {SECOND}, {LAST}]),
        ((24, BROKEN, 40), FIRST, [{FIRST}, {SECOND}, {LAST}]),
    ],
    ids=str,
)
def test_the_first_rung_that_spills_nothing_runs(
    spills: tuple[int | Exception, ...],
    wanted: Kernel,
    batches: list[set[Kernel]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = compiler(monkeypatch, *spills)
    found = obtain_standing([FIRST])[FIRST]
    assert (found.kernel, found.outcome) == (wanted, wanted.name)
    assert made.batches == batches
    assert standing(FIRST) == wanted, "what is known decides next time, and nothing is compiled"
    assert load_standing([FIRST, SECOND])[FIRST] == found
    assert counted().get("lower_rungs", 0) == (wanted != FIRST)


def test_a_rung_that_fails_is_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(monkeypatch, BROKEN, 0, 0)
    with pytest.warns(RuntimeWarning, match=f"SIGSEGV; tile {SECOND.plan.tile.name} runs in its place.$"):
        obtain_standing([FIRST])
    assert counted() == {"builds_failed": 1, "lower_rungs": 1}


def test_what_spills_on_every_rung_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(monkeypatch, 24, 8, 16)
    others = f"{FIRST.plan.tile.name}, {LAST.plan.tile.name}"
    said = f"in tile {SECOND.plan.tile.name} spills 8 bytes a thread, .* the tiles {others} spill.$"
    with pytest.warns(RuntimeWarning, match=said):
        obtain_standing([FIRST])
    assert counted() == {"lower_rungs": 1, "kernels_spilled": 1}


@pytest.mark.parametrize("error", [BROKEN, UnavailableError("no DSL")], ids=["fails", "no DSL"])
def test_an_error_is_returned_if_no_rung_can_be_built(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiler(monkeypatch, error, error, error)
    assert obtain_standing([FIRST])[FIRST] == rungs.Obtained(FIRST, error)
    assert len(made.batches) == (3 if error is BROKEN else 1), "without the DSL no rung can be built"
    assert load_standing([FIRST]) == {} and counted() == {"builds_failed": len(made.batches)}


def test_a_kernel_that_is_begun_alone_is_remembered_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other is begun in its place."""
    begun: dict[Kernel, Callable[[Exception | None], None]] = {}
    monkeypatch.setattr(rungs, "begin", begun.__setitem__)
    monkeypatch.setattr(rungs, "spill_bytes", {LAST: 8}.get)
    begin_alone([FIRST, SECOND, LAST])
    for kernel, error in ((FIRST, BROKEN), (SECOND, None), (LAST, UnavailableError("no DSL"))):
        begun[kernel](error)
    assert list(begun) == [FIRST, SECOND, LAST] and [*map(stands, begun)] == [False, True, False]
    assert standing(FIRST) == SECOND


def test_several_kernels_climb_down_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler(monkeypatch, 8, 0, 16)
    with pytest.warns(RuntimeWarning, match=f"{LAST.name} in tile .* spills 16 bytes a thread.$"):
        found = obtain_standing([FIRST, LAST, FIRST])
    assert {kernel: each.kernel for kernel, each in found.items()} == {FIRST: SECOND, LAST: LAST}
    assert made.batches == [{FIRST, LAST}, {SECOND}]


def test_what_a_person_edited_has_no_other_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    edited = replace(FIRST, edited="text")
    made = compiler(monkeypatch, 0, 0, 0)
    made.spills[edited] = 8
    with pytest.warns(RuntimeWarning, match="spills 8 bytes"):
        assert obtain_standing([edited])[edited].kernel == edited
