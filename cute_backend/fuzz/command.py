"""`python -m cute_backend fuzz`: judges many programs, in one process or several, and prints a report.

Standard output gets a runnable file for every failure, then the counts. Progress goes to standard error if
that is a terminal. The exit status is 0 if no program is wrong, 1 if one is, 2 for a request that cannot be
met, and 130 after an interruption, for which the counts so far are printed.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cute_backend import config
from cute_backend.errors import UsageError
from cute_backend.fuzz.attention import draw_attention
from cute_backend.fuzz.draw import draw
from cute_backend.fuzz.drawn_program import Program
from cute_backend.fuzz.forms import draw_form
from cute_backend.fuzz.judge import Verdict, judge, run_without_the_pass
from cute_backend.fuzz.shrink import shrink
from cute_backend.fuzz.weights import draw_weights
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.presentation import terminal

DRAWN = {"any": draw, "forms": draw_form, "attention": draw_attention, "weights": draw_weights}
"""The kinds of programs, each with the function that draws one."""


@dataclass(frozen=True)
class Job:
    """The programs of a seed from `first` to `last`, and how they are judged. With `emulate`, all of them are
    compiled with eager's roundings."""

    seed: int
    first: int
    last: int
    replay_only: bool = False
    device: str = "cpu"
    kind: str = "any"
    emulate: bool = False

    def program(self, index: int) -> Program:
        program = DRAWN[self.kind](self.seed, index)
        return replace(program, eager=True) if self.emulate else program

    def single(self) -> Iterator[Job]:
        """A job for each of its programs."""
        for index in range(self.first, self.last):
            yield replace(self, first=index, last=index + 1)


@dataclass(frozen=True)
class Failure:
    """A failure, and the smallest program found that fails in this way."""

    index: int
    program: Program
    message: str

    def text(self, job: Job) -> str:
        """A file that judges the program when it is run."""
        compilers = " --replay" * job.replay_only + f" --device {job.device}" * (job.device != "cpu")
        compilers += f" --{job.kind}" * (job.kind != "any") + " --emulate" * job.emulate
        found = f"python -m cute_backend fuzz --seed {job.seed} --first {self.index} --count 1{compilers}"
        return (
            f'"""Program {self.index} of seed {job.seed}, made smaller: {self.message}.\n\n{found}\n"""\n\n'
            f"{self.program.source()}\n\n"
            'if __name__ == "__main__":\n'
            f"{self._check()}"
        )

    def _check(self) -> str:
        patch = f"emulate_precision_casts={self.program.eager}"
        compiled = f'torch.compile(program, backend="cute", dynamic={self.program.dynamic})'
        return (
            f"    with torch.no_grad(), torch._inductor.config.patch({patch}):\n"
            "        wanted = program(*example_inputs())\n"
            f"        results = {compiled}(*example_inputs())\n"
            "    for result, expected in zip(results, wanted):\n"
            "        apart = (result.double() - expected.double()).abs()\n"
            '        print(f"largest difference from eager: {apart.max().item()}\\n{result}\\n{expected}")\n'
        )


@dataclass
class Tally:
    """The outcomes of programs, counted."""

    programs: int = 0
    elements: int = 0
    loose: int = 0
    counted: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.programs += other.programs
        self.elements += other.elements
        self.loose += other.loose
        self.counted += other.counted
        self.excluded += other.excluded
        self.failures += other.failures


def run(job: Job) -> Tally:
    """Judges every program of a job, and makes those that fail smaller."""
    tally = Tally()
    for index in range(job.first, job.last):
        program = job.program(index)
        verdict = judge(program, job.replay_only, job.device)
        tally.programs += 1
        tally.elements += verdict.elements
        tally.loose += verdict.loose
        tally.counted += verdict.counted
        if verdict.excluded:
            tally.excluded[verdict.excluded] += 1
        if verdict.failure:
            tally.failures.append(_smallest(job, index, program, verdict.kind))
    return tally


def _smallest(job: Job, index: int, program: Program, kind: str) -> Failure:
    def judged(smaller: Program) -> Verdict:
        return judge(smaller, job.replay_only, job.device)

    smallest = shrink(program, lambda smaller: judged(smaller).kind == kind)
    return Failure(index, smallest, judged(smallest).failure)


def main(arguments: argparse.Namespace) -> int:
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch finds none here")
    if arguments.device == "cuda" and arguments.replay:
        raise UsageError("--replay runs on the CPU: a GPU has kernels in place of the replay")
    last = arguments.first + arguments.count
    job = Job(
        seed=arguments.seed,
        first=arguments.first,
        last=last,
        replay_only=arguments.replay,
        device=arguments.device,
        kind=arguments.kind,
        emulate=arguments.emulate,
    )
    tally = Tally()
    console = Console(stderr=True)
    columns = (
        TextColumn("programs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[wrong]} wrong"),
        TimeRemainingColumn(),
    )
    unseen = config.quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=unseen) as progress:
        task = progress.add_task("", total=arguments.count, wrong=0)
        status = 0
        try:
            with closing(_parts(job, arguments.jobs)) as parts:
                for part in parts:
                    tally.add(part)
                    progress.update(task, completed=tally.programs, wrong=len(tally.failures))
                    for failure in part.failures:
                        print(failure.text(job), flush=True)
                        status = 1
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
    terminal.show(_summary(tally))
    return status


def _parts(job: Job, jobs: int) -> Generator[Tally, None, None]:
    """Yields the tallies of a job's programs as `jobs` processes finish them."""
    if jobs == 1:
        _quiet()
        yield from map(run, job.single())
        return
    with closing(outcomes(run, list(job.single()), jobs)) as judged:
        for single, tally in judged:
            yield tally or _of_one_that_ended_its_process(single)


def _of_one_that_ended_its_process(job: Job) -> Tally:
    """The outcome of a job whose only program ended its process. Inductor's own code for CPUs has been seen
    to write past the end of its memory, so the program runs again without the pass."""
    [(_, survived)] = outcomes(_run_without_the_pass, [job], 1)
    if survived is None:
        return Tally(programs=1, excluded=Counter({"Inductor's code alone ends its process": 1}))
    program = job.program(job.first)
    return Tally(programs=1, failures=[Failure(job.first, program, "cute ends its process")])


def _run_without_the_pass(job: Job) -> bool:
    run_without_the_pass(job.program(job.first), job.replay_only, job.device)
    return True


Item = TypeVar("Item")
Result = TypeVar("Result")


def outcomes(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Generator[tuple[Item, Result | None], None, None]:
    """The results of a function for each item, from `jobs` processes; None for an item that ends its process.

    When a process ends, it is not known which item ended it. So each item that may have been running at that
    time runs again in a process of its own.
    """
    pending = list(items)
    while pending:
        done = set()
        with _processes(jobs) as pool:
            # A terminal interrupts all processes. New ones block the signal, and this process ends them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                parts = {pool.submit(function, pending[index]): index for index in range(len(pending))}
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for part in as_completed(parts):
                if not isinstance(part.exception(), BrokenProcessPool):
                    done.add(parts[part])
                    yield pending[parts[part]], part.result()
        pending = [item for index, item in enumerate(pending) if index not in done]
        if pending and jobs == 1 and len(pending) == len(parts):
            yield pending.pop(0), None
        elif pending:
            suspects, pending = pending[: jobs + 1], pending[jobs + 1 :]
            for suspect in suspects:
                yield from outcomes(function, [suspect], 1)


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that are ended on leaving the context, even if their work is not done."""
    others = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_quiet)
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _quiet() -> None:
    """Uses one thread, as tensors are small, and suppresses torch's logs of errors that it also raises."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)


def _summary(tally: Tally) -> Table:
    table = terminal.light_table("", "count", right=1)
    counted = tally.counted
    table.add_row("programs", f"{tally.programs:,}")
    table.add_row("matrix products", f"{counted.pop('anchors', 0):,}")
    table.add_row("regions", f"{counted.pop('regions', 0):,}")
    table.add_row("elements judged", f"{tally.elements - tally.loose:,}")
    table.add_row("elements that may be anything", f"{tally.loose:,}")
    refusals = {reason.value for reason in Reason}
    for name, count in sorted(counted.items(), key=lambda each: (each[0] in refusals, each[0])):
        table.add_row(f"left out: {name}" if name in refusals else name.replace("_", " "), f"{count:,}")
    for why, count in sorted(tally.excluded.items()):
        table.add_row(f"not judged: {why}", f"{count:,}")
    table.add_row("wrong", f"{len(tally.failures):,}")
    return table
