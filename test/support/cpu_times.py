"""A pytest plugin that reports the processor time of every folder beside its budget, and the slowest tests.

Processor time, of the process and of the children that it has waited for, can be compared between runs on a
busy machine, where wall-clock time is not. `--cpu-times FILE` writes the seconds of every test as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import pytest

SHOWN = 10

LIMIT = 24.0
"""The minutes of one processor that the tests of `make test` may take if an earlier run has kept their
kernels: a run of twelve minutes on two. The first run in a clone compiles 250 kernels, for 8 minutes more."""

BUDGETS = {
    "test": 4.2,
    "test/bench": 0.5,
    "test/fx_walk": 5.8,
    "test/memory_ops": 2.0,
    "test/operators": 0.8,
    "test/ops": 0.2,
    "test/planning": 0.6,
    "test/runtime": 2.7,
    "test/simulator": 4.6,
    "test/templates": 0.4,
}
"""The minutes that the tests of a folder may take in `make test`, of one processor of an AMD EPYC server: all
of them no more than `LIMIT`.

A run that takes more passes, as a first run does, and other machines and busy ones: the line is marked. Who
adds tests to a folder moves as much to `make test-exhaustive`, or says in the commit why it may take more.
"""

_PROPERTY = "cpu_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times", type=Path, metavar="FILE", help="write each test's processor time as JSON"
    )


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measures setup and call. The time of a teardown is not charged."""
    item.stash[_started] = _cpu_seconds()
    return (yield)


_started = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, object, object]:
    if call.when == "call":
        item.user_properties.append((_PROPERTY, round(_cpu_seconds() - item.stash[_started], 2)))
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [each for outcome in ("passed", "failed") for each in terminalreporter.getreports(outcome)]
    seconds = {
        report.nodeid: value
        for report in reports
        for name, value in report.user_properties
        if name == _PROPERTY
    }
    if not seconds:
        return
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    total = sum(seconds.values())
    terminalreporter.section(f"{total / 60:.1f} minutes of processor time, by folder, and their budget")
    for line in by_folder(seconds):
        terminalreporter.write_line(line)
    terminalreporter.section(f"the slowest {SHOWN} tests")
    for name in slowest[:SHOWN]:
        terminalreporter.write_line(f"{seconds[name]:7.1f} s  {name}")
    path = config.getoption("--cpu-times")
    if path is not None:
        path.write_text(json.dumps({name: seconds[name] for name in slowest}, indent=1))


def by_folder(seconds: Mapping[str, float]) -> Iterator[str]:
    """A line for each folder: what its tests took, its budget if it has one, and whether it took more."""
    taken: Counter[str] = Counter()
    for name, value in seconds.items():
        taken[os.path.dirname(name.partition("::")[0])] += value / 60
    for folder, minutes in sorted(taken.items()):
        budget = BUDGETS.get(folder)
        beside = "       " if budget is None else f" of {budget:4.1f}"
        over = " over" if budget is not None and minutes > budget else ""
        yield f"{minutes:7.1f}{beside} min  {folder}{over}"
