"""The simulator must find every fault that was planted, and none where there is none.

Which seeds show a race or a deadlock is a matter of luck; that at least one of eight does is not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from cute_backend.simulator.simulation_errors import SimulationError
from support import archs
from support.simulator import mutants_sm80, mutants_sm90, mutants_sm100
from support.simulator.mutants import SUBJECTS, Edit, Mutant, Text, WrongNumbers, sound
from support.simulator.planting import check
from support.sweeps import EXHAUSTIVE, covering

MUTANTS = [*mutants_sm80.MUTANTS, *mutants_sm90.MUTANTS, *mutants_sm100.MUTANTS]
SEEDS = range(1, 9)


@pytest.mark.sweep(8)
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
    """`make test` has every error of every template, and every module or ring that faults are planted in."""
    kinds = [
        frozenset({(mutant.subject.config.arch.target.template, mutant.error), mutant.place})
        for mutant in MUTANTS
    ]
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


PLANTED = [mutant for mutant in MUTANTS if mutant.is_planted]
EDITED = [mutant for mutant in MUTANTS if not mutant.is_planted and mutant.text is not Text.PTX]


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda mutant: mutant.name)
def test_a_planted_fault_has_a_place(mutant: Mutant):
    check(mutant.wrongs)


@pytest.mark.parametrize("mutant", EDITED, ids=lambda mutant: mutant.name)
def test_a_planted_fault_finds_the_text_that_it_replaces(mutant: Mutant):
    compile(mutant.faulty_text(), mutant.name, "exec")


def test_planted_faults_use_names_that_exist(tmp_path: Path):
    """A name that a change took away would end such a kernel before the simulator sees it."""
    for i, mutant in enumerate(EDITED):
        (tmp_path / f"fault_{i}.py").write_text(f"{mutant.faulty_text()}\n# {mutant.name}\n")
    command = (
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "F821",
        tmp_path,
    )
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_table_covers_every_template():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    per_arch = [sum(mutant.subject.config.arch is arch for mutant in MUTANTS) for arch in archs.FIRST]
    assert sum(per_arch) >= 25
    assert min(per_arch) >= 10


@pytest.mark.parametrize("text", ["nothing of the kind", "twice twice"])
def test_an_edit_that_misses_is_an_error(text):
    with pytest.raises(AssertionError, match="'twice' is there"):
        Edit("twice", "once").apply(text)
