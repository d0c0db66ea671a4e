"""Runs of the benchmark, from the command line and from Python."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_backend import config
from cute_backend.bench import models, picture
from cute_backend.bench.block_scaled_mm import BLOCK_SCALED
from cute_backend.bench.decoding import SAMPLING
from cute_backend.bench.environment import Nvml, describe, now
from cute_backend.bench.first_call import measure_first_calls
from cute_backend.bench.gated import GATED
from cute_backend.bench.grouped import GROUPED
from cute_backend.bench.grouped_fp8 import GROUPED_FP8
from cute_backend.bench.host_time import measure_host
from cute_backend.bench.int8 import INT8
from cute_backend.bench.losses import LOSSES
from cute_backend.bench.measure import Run, build_kernels, measure_ceilings, measure_table, rate_of, steps
from cute_backend.bench.model_results import ModelResult
from cute_backend.bench.model_run import digest, measure_models
from cute_backend.bench.program_timing import require_gpu
from cute_backend.bench.results import Ceilings, Results, TableResult, raise_rates
from cute_backend.bench.row_maxima import ROW_MAXIMA
from cute_backend.bench.scaled_mm import SCALED_MM
from cute_backend.bench.table import Table, function_table, select
from cute_backend.bench.weights import WEIGHTS
from cute_backend.errors import UsageError
from cute_backend.presentation import terminal

TABLES = (SCALED_MM, SAMPLING, LOSSES, ROW_MAXIMA, GATED, BLOCK_SCALED, GROUPED, GROUPED_FP8, INT8, WEIGHTS)
"""The built-in tables, in the order in which they run; the names are those that `--rows` takes."""

ROUNDS = 50

_DEVICE = "cuda"


def compare(fn: Callable[..., Any], args: tuple[Any, ...], rounds: int = ROUNDS) -> Results:
    """Times `fn(*args)` as eager, Inductor and cute run it. The results print as a table."""
    require_gpu()
    return run([_table_of(fn, args, peers=False)], rounds)


def _table_of(
    fn: Callable[..., Any], args: tuple[Any, ...], peers: bool, kwargs: dict[str, Any] | None = None
) -> Table:
    name = getattr(fn, "__name__", type(fn).__name__)
    rate = rate_of(fn, (args, kwargs))
    return function_table(name, partial(fn, **kwargs) if kwargs else fn, args, rate, peers)


def run(
    tables: Sequence[Table], rounds: int = ROUNDS, save: Callable[[Results], Any] = lambda results: None
) -> Results:
    """Times the tables, interleaved within each problem; `save` is called with the results after each
    problem.

    Raises UsageError if there is no GPU, or a program fails in eager.
    """
    require_gpu()
    nvml = Nvml()
    results = _empty(nvml)
    rates = {each.rate for table in tables for problem in table.problems for each in problem.workloads}
    with _progress(steps(tables) + 2) as progress:
        progress("building kernels, several at once")
        notes = build_kernels(tables)
        progress("measuring the machine's limits")
        ceilings = measure_ceilings(sorted(rates), rounds)
        done: tuple[TableResult, ...] = ()
        for table in tables:
            for found in measure_table(table, Run(ceilings, notes, nvml, rounds, progress)):
                measured = (*done, found)
                results = replace(results, tables=measured, ceilings=raise_rates(ceilings, measured))
                save(results)
            done = results.tables
    return results


def run_host(rounds: int = ROUNDS) -> Results:
    """Times calls on the host, and the steps to a kernel in a new process. Raises UsageError without a
    GPU."""
    require_gpu()
    with _progress(3) as progress:
        return replace(_empty(Nvml()), host=measure_host(rounds, progress))


def run_models(
    patterns: Sequence[str],
    rounds: int,
    before: Results | None = None,
    save: Callable[[Results], Any] = lambda results: None,
) -> Results:
    """Times whole models, each of which is interleaved; `save` is called with the results after each model.

    Results in `before` are kept if they are of this machine and of the same sources of this package. Raises
    UsageError if there is no GPU, or a pattern names no model.
    """
    chosen = models.select(patterns)
    require_gpu()
    results, sources = _empty(Nvml()), digest()
    done: dict[str, ModelResult] = {}
    if before is not None and before.machine == results.machine:
        done = {each.name: each for each in before.models if each.sources == sources and each.timings}
    missing = [model for model in chosen if model.name not in done]
    with _progress(len(missing) + 2) as progress:
        progress("measuring the machine's limits")
        ceilings = measure_ceilings([], rounds)
        progress("compiling models, several at once")

        def add(found: ModelResult) -> None:
            done[found.name] = found.by(sources)
            progress(found.name)
            save(_of_models(results, ceilings, done))

        measure_models(missing, rounds, add)
    return _of_models(results, ceilings, done)


def run_first_calls(
    patterns: Sequence[str],
    layers: int | None,
    times: int = 1,
    save: Callable[[Results], Any] = lambda results: None,
) -> Results:
    """Times first calls of whole models in new processes, `times` times, at their real depth if `layers` is
    None; `save` is called with the results after each time. Raises UsageError if there is no GPU, or a
    pattern names no model."""
    chosen = models.select(patterns)
    require_gpu()
    results = _empty(Nvml())
    with _progress(2 * times * len(chosen)) as progress:
        found = measure_first_calls(
            chosen, layers, times, progress, lambda found: save(replace(results, first_calls=found))
        )
    return replace(results, first_calls=found)


def _of_models(results: Results, ceilings: Ceilings, done: dict[str, ModelResult]) -> Results:
    """The results of models, in the order of MODELS."""
    found = tuple(done[model.name] for model in models.MODELS if model.name in done)
    return replace(results, ceilings=ceilings, models=found)


def _empty(nvml: Nvml) -> Results:
    return Results(now(), _command(), describe(nvml))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that advances when the function it yields is called with the next step. If
    standard error is not a terminal, each step is a line; under `config.quiet` there is neither."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    unseen = config.quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=unseen) as bar:
        task, done = bar.add_task("", total=total), count()

        def advance(what: str) -> None:
            bar.update(task, completed=next(done), description=what)
            if unseen and not config.quiet:
                console.print(what)

        yield advance


def _command() -> str:
    """The command line, without the options that say where results go."""
    program, words = Path(sys.argv[0]), iter(sys.argv[1:])
    is_ours = program.parts[-2:] == ("cute_backend", "__main__.py") or program.name == "cute_backend"
    kept = ["python", *(["-m", "cute_backend"] if is_ours else [program.name])]
    for word in words:
        if word in ("--json", "--picture"):
            next(words, None)
        elif not word.startswith(("--json=", "--picture=")):
            kept.append(word)
    return " ".join(kept)


def main(arguments: argparse.Namespace, load: Callable[[str], Any]) -> int:
    """The command `bench`. Returns the exit status, which is 1 if a result was wrong. Raises UsageError.

    `load` returns the function of `FILE.py[:name]`, and a function that returns its arguments and keyword
    arguments.
    """
    _refuse_contradictions(arguments)
    if arguments.draw is not None:
        results = Results.load(arguments.draw)
    else:
        require_gpu()
        results = _measure(arguments, load)
    terminal.show(results)
    if arguments.picture is not None:
        picture.draw(results, arguments.picture)
    return 0 if results.agrees else 1


def _measure(arguments: argparse.Namespace, load: Callable[[str], Any]) -> Results:
    path: Path | None = arguments.json
    if path is not None and _is_folder(path):
        _make_folder(path)

    def save(results: Results) -> None:
        if path is not None:
            results.save(path / results.file_name if _is_folder(path) else path)

    if arguments.host:
        results = run_host(arguments.rounds)
        save(results)
        return results
    if arguments.first_call is not None:
        return run_first_calls(arguments.first_call, arguments.layers, arguments.times, save)
    if arguments.models is not None:
        return run_models(arguments.models, arguments.rounds, _earlier(path), save)
    if arguments.file is None:
        return run(select(TABLES, arguments.rows, arguments.peers), arguments.rounds, save)
    with torch.device(_DEVICE):
        fn, inputs = load(arguments.file)
        args, kwargs = inputs()
    return run([_table_of(fn, args, arguments.peers, kwargs)], arguments.rounds, save)


def _earlier(path: Path | None) -> Results | None:
    """The results of models that an earlier run has written to `path`: in a folder, the newest file."""
    if path is not None and _is_folder(path):
        path = max(path.glob("*-models.json"), default=None)
    return Results.load(path) if path is not None and path.exists() else None


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options that don't go together, and for errors that would show only after
    timing."""
    given = [
        name
        for name, value in (
            ("FILE", arguments.file),
            ("--rows", arguments.rows),
            ("--peers", arguments.peers),
            ("--json", arguments.json),
            ("--picture", arguments.picture),
            ("--host", arguments.host),
            ("--models", arguments.models is not None),
            ("--first-call", arguments.first_call is not None),
        )
        if value
    ]
    if arguments.draw is not None:
        _allow("--draw", given, ["--picture"])
    elif arguments.host:
        _allow("--host", given, ["--host", "--json"])
    elif arguments.models is not None:
        _allow("--models", given, ["--models", "--json"])
        models.select(arguments.models)
    elif arguments.first_call is not None:
        _allow("--first-call", given, ["--first-call", "--json"])
        models.select(arguments.first_call)
    elif arguments.file is not None:
        _allow("FILE", given, ["FILE", "--peers", "--json", "--picture"])
    else:
        select(TABLES, arguments.rows, arguments.peers)
    if arguments.layers is not None and arguments.layers < 1:
        raise UsageError(f"--layers is {arguments.layers}; a model has 1 or more, or all")
    if arguments.times < 1:
        raise UsageError(f"--times is {arguments.times}; a first call is timed once or more often")
    if arguments.rounds < 2:
        raise UsageError(f"--rounds is {arguments.rounds}; a median with its spread needs 2 or more")
    path: Path | None = arguments.json
    if path is not None and not _is_folder(path) and not path.absolute().parent.is_dir():
        raise UsageError(f"the folder of the results, {path.parent}, does not exist")
    if arguments.picture is not None:
        picture.check(arguments.picture)


def _is_folder(path: Path) -> bool:
    """Whether `path` is a folder, in which results get a name: an existing one, or a path not ending in
    .json."""
    return path.is_dir() or path.suffix != ".json"


def _make_folder(path: Path) -> None:
    """Makes a folder for results before anything is timed. Raises UsageError if it can't be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the results can't be written to the folder {path}: {error}") from error


def _allow(option: str, given: list[str], allowed: list[str]) -> None:
    for other in given:
        if other not in allowed:
            raise UsageError(f"bench {option} can't be combined with {other}")
