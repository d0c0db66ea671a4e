"""The simulator must find every fault that was planted, and none where there is none.

Which seeds show a race or a deadlock is a matter of luck; that at least one of eight does is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from cute_backend.simulator.simulation_errors import SimulationError
from support import archs
from support.simulator import mutants_sm80, mutants_sm90, mutants_sm100
from support.simulator.mutants import (
    ONE,
    PING_PONG,
    SUBJECTS,
    WARPS,
    InPtx,
    Mutant,
    Subject,
    WrongNumbers,
    built,
    sound,
    traced,
)
from support.simulator.planting import Wrong, check
from support.sweeps import EXHAUSTIVE, covering

MUTANTS = [*mutants_sm80.MUTANTS, *mutants_sm90.MUTANTS, *mutants_sm100.MUTANTS]
SEEDS = range(1, 9)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SUBJECTS)
def test_no_fault_is_found_in_a_sound_kernel(name):
    SUBJECTS[name].check(sound(SUBJECTS[name]), SEEDS[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SUBJECTS)
def test_no_order_of_completion_shows_a_fault_in_a_sound_kernel(name):
    program = sound(SUBJECTS[name])
    for seed in SEEDS[1:]:
        SUBJECTS[name].check(program, seed)


def cases() -> Iterator[ParameterSet]:
    """`make test` has a fault of every template and of every error, `make test-exhaustive` every fault."""
    kinds = [frozenset({mutant.subject.config.arch.target.template, mutant.error}) for mutant in MUTANTS]
    kept = covering(kinds)
    for i, mutant in enumerate(MUTANTS):
        yield pytest.param(mutant, id=mutant.name, marks=() if i in kept else EXHAUSTIVE)


@pytest.mark.parametrize("mutant", list(cases()))
def test_a_planted_fault_is_caught(mutant: Mutant, tmp_path: Path):
    program = mutant.program(tmp_path)
    others = []
    for seed in SEEDS:
        try:
            mutant.subject.check(program, seed)
        except (SimulationError, WrongNumbers) as error:
            if type(error) is mutant.error and re.search(mutant.message, str(error)):
                return
            others.append(f"seed {seed}: {type(error).__name__}: {error}")
    pytest.fail("\n".join(others) or f"no seed of {SEEDS} shows it")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_has_a_place(mutant: Mutant):
    if not isinstance(mutant.fault, InPtx):
        check(mutant.fault)


KERNELS = {mutant.subject: mutant.name for mutant in reversed(MUTANTS)}
"""The kernels that have a fault, and the name of the first."""


def wrongs_in(subject: Subject) -> list[Wrong]:
    """The calls that all faults of a kernel replace."""
    faults = [mutant.fault for mutant in MUTANTS if mutant.subject == subject]
    return [wrong for fault in faults if not isinstance(fault, InPtx) for wrong in fault]


def neutral(subject: Subject) -> tuple[Wrong, ...]:
    """All faults of a kernel, with each call replaced by itself."""
    return tuple(replace(wrong, effect=lambda call: call()) for wrong in wrongs_in(subject))


TRACED = 5
"""The kernels that `make test` traces, apart from those of the faults that it runs."""


def kernels() -> Iterator[ParameterSet]:
    """`make test` has the kernels that together have most of the calls that faults of a template replace."""
    calls = [
        frozenset((subject.config.arch.target.template, wrong.at) for wrong in wrongs_in(subject))
        for subject in KERNELS
    ]
    kept = covering(calls, TRACED)
    for i, (subject, name) in enumerate(KERNELS.items()):
        yield pytest.param(subject, id=name, marks=() if i in kept else EXHAUSTIVE)


@pytest.mark.parametrize("subject", list(kernels()))
def test_a_kernel_makes_the_calls_that_its_faults_replace(subject: Subject, tmp_path: Path):
    traced(subject.kernel, neutral(subject), tmp_path)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("subject", [WARPS, PING_PONG, ONE], ids=["warps", "ping-pong", "one"])
def test_calls_that_are_replaced_by_themselves_leave_a_kernel_as_it_is(subject: Subject, tmp_path: Path):
    assert traced(subject.kernel, neutral(subject), tmp_path).ptx == built(subject.kernel).ptx


def test_the_table_covers_every_template():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    per_arch = [sum(mutant.subject.config.arch is arch for mutant in MUTANTS) for arch in archs.FIRST]
    assert sum(per_arch) >= 25
    assert min(per_arch) >= 10


def test_ptx_without_the_text_that_a_fault_replaces_is_an_error():
    assert InPtx(r"b(\d)", r"c\1").apply("a b1 b2") == "a c1 c2"
    with pytest.raises(AssertionError, match="'b3' is nowhere"):
        InPtx("b3", "").apply("b1 b2")
