"""Tables of the benchmark: problems, the programs that run them, and the ratios that are computed.

A built-in table is one `Table` object, listed in `command.TABLES`; everything else here is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from cute_backend.errors import UsageError


class Runner(str, Enum):
    """The ways to run a program. All but eager compile it first."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    MAX_AUTOTUNE = "max-autotune"
    """Inductor with Triton's products among those that it times. Its CUDA graphs are off, as they would time
    host work."""
    QUACK = "quack"
    CUTE = "cute"


PEERS = (Runner.MAX_AUTOTUNE, Runner.QUACK)
"""The runners that compile for long. They run only if `--peers` is given."""


class Rate(str, Enum):
    """The arithmetic that bounds a workload."""

    FP8 = "fp8"
    BF16 = "bf16"


@dataclass(frozen=True)
class Cell:
    """One timing of a problem: a workload and its runner."""

    workload: str
    runner: Runner

    def __str__(self) -> str:
        return f"{self.runner.value} {self.workload}"


@dataclass(frozen=True)
class Ratio:
    """A ratio of speeds: how many times faster `of` is than `to`."""

    of: Cell
    to: Cell

    def __str__(self) -> str:
        return f"{self.of} / {self.to}"


@dataclass(frozen=True)
class Workload:
    """A program of one problem.

    `inputs()` makes its arguments on torch's default device. `operations` are those of its matrix products, 2
    M N K for each; if it is None, they are counted. `tolerance` is the largest difference from eager's result
    that is allowed, relative in norm; None accepts anything. If values can't be compared, as those of a
    program that draws, `check` computes a result's error from the arguments as they are after the call.
    `calls_kernels` is true for a program that calls our ops itself, so that there is nothing to fuse.
    `unread` is the number of bytes of its arguments that it need not read, such as those of experts without
    rows.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    rate: Rate
    operations: int | None
    runners: tuple[Runner, ...]
    tolerance: float | None = 0.01
    check: Callable[[tuple[Any, ...], Any], float] | None = None
    calls_kernels: bool = False
    unread: int = 0


@dataclass(frozen=True)
class Problem:
    """Workloads of the same sizes, timed interleaved."""

    name: str
    workloads: tuple[Workload, ...]


@dataclass(frozen=True)
class Table:
    """Problems and the ratios to be shown of each. Pictures show speeds relative to `baseline`."""

    name: str
    title: str
    baseline: Cell
    ratios: tuple[Ratio, ...]
    problems: tuple[Problem, ...]


def _listed(tables: Sequence[Table]) -> str:
    """The names of the tables and of their rows."""
    each = [f"{table.name} ({table.problems[0].name} to {table.problems[-1].name})" for table in tables]
    return f"the tables, with their rows, are {', '.join(each)}"


def select(tables: Sequence[Table], patterns: Sequence[str], peers: bool) -> list[Table]:
    """The tables with the problems that match a pattern, by shell wildcards, and with or without peers.

    A pattern names a problem or a whole table; without a pattern, all are selected. Raises UsageError if a
    pattern names none.
    """
    names = [name for table in tables for name in (table.name, *(problem.name for problem in table.problems))]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"no table or row is called {pattern!r}; {_listed(tables)}")

    def named(*candidates: str) -> bool:
        return not patterns or any(fnmatchcase(name, each) for name in candidates for each in patterns)

    chosen = []
    for table in tables:
        problems = tuple(
            problem if peers else _without_peers(problem)
            for problem in table.problems
            if named(table.name, problem.name)
        )
        if problems:
            chosen.append(replace(table, problems=problems))
    return chosen


def _without_peers(problem: Problem) -> Problem:
    return replace(
        problem,
        workloads=tuple(
            replace(workload, runners=tuple(each for each in workload.runners if each not in PEERS))
            for workload in problem.workloads
        ),
    )


def function_table(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], rate: Rate, peers: bool = False
) -> Table:
    """A table of a user's program, as eager, Inductor and cute run it."""
    runners = (Runner.EAGER, Runner.INDUCTOR, *((Runner.MAX_AUTOTUNE,) if peers else ()), Runner.CUTE)
    cute = Cell(name, Runner.CUTE)
    return Table(
        name,
        title=name,
        baseline=Cell(name, Runner.EAGER),
        ratios=tuple(Ratio(cute, Cell(name, runner)) for runner in runners if runner is not Runner.CUTE),
        problems=(Problem(name, (Workload(name, fn, lambda: args, rate, None, runners, None),)),),
    )
