"""Results of a run of the benchmark, as plain data: written as JSON, read back and shown without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cute_backend.bench.model_results import ModelResult, Timing, read
from cute_backend.bench.table import Cell, Rate, Ratio, Runner
from cute_backend.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

VERSION = 1


@dataclass(frozen=True)
class Ceilings:
    """The limits of the machine as measured in the same run.

    `bandwidth` is that of a large device copy, in bytes a second, reads and writes together. `rates` are the
    highest of torch's products in the run, in operations a second. They are not taken from a data sheet, so a
    kernel that is faster than torch may exceed its limit.
    """

    bandwidth: float
    rates: dict[Rate, float]


@dataclass(frozen=True)
class Work:
    """The least that a workload has to do: its products' operations, and each byte in and out moved once."""

    workload: str
    operations: int
    bytes: int
    rate: Rate

    def limit_us(self, ceilings: Ceilings) -> float:
        """The roofline: the longer of the times of arithmetic and of traffic, at the best rates that were
        measured."""
        return 1e6 * max(self.operations / ceilings.rates[self.rate], self.bytes / ceilings.bandwidth)


@dataclass(frozen=True)
class Measurement:
    """One cell of a problem.

    `timing` is None if it could not be run; `note` then says why. `calls` is the number of calls that were
    timed together. `difference` is that of the result from eager's, relative in norm, or the value of the
    workload's own check; None if it is not finite. `agrees` says whether it is small enough, and is also
    False if cute itself could not be run.
    """

    cell: Cell
    timing: Timing | None = None
    calls: int = 0
    difference: float | None = None
    agrees: bool = True
    note: str = ""


@dataclass(frozen=True)
class Clock:
    """The SM clock in MHz, sampled once a round while the GPU was at work."""

    low_mhz: int
    median_mhz: int
    high_mhz: int


@dataclass(frozen=True)
class ProblemResult:
    """The timings of one problem, all interleaved."""

    name: str
    works: tuple[Work, ...]
    measurements: tuple[Measurement, ...]
    clock: Clock | None

    def work(self, cell: Cell) -> Work:
        return next(work for work in self.works if work.workload == cell.workload)

    def median_us(self, cell: Cell) -> float | None:
        """The cell's median, or None if it was not measured."""
        return next(
            (each.timing.median_us for each in self.measurements if each.cell == cell and each.timing), None
        )

    def ratio(self, ratio: Ratio) -> float | None:
        """How many times faster `ratio.of` is, or None if either was not measured."""
        of, to = self.median_us(ratio.of), self.median_us(ratio.to)
        return None if of is None or to is None else to / of

    def share(self, cell: Cell, ceilings: Ceilings) -> float | None:
        """The share of its limit at which a cell runs, or None if it was not measured."""
        taken = self.median_us(cell)
        return None if taken is None else self.work(cell).limit_us(ceilings) / taken


@dataclass(frozen=True)
class TableResult:
    """The results of one table."""

    name: str
    title: str
    baseline: Cell
    ratios: tuple[Ratio, ...]
    problems: tuple[ProblemResult, ...]


@dataclass(frozen=True)
class HostResult:
    """Host time of one call, by the name of the program, and the time that a process needs to get a kernel.

    `cold_s` is from an empty cache to a loaded kernel, the import of the DSL included. In a new process with
    a warm cache and torch imported, `warm_import_s` imports cute_backend and `warm_load_s` loads the kernel.
    """

    calls: dict[str, Timing]
    cold_s: float
    warm_import_s: float
    warm_load_s: float
    warm_imports_cutlass: bool


@dataclass(frozen=True)
class FirstCall:
    """The first calls of a model in new processes, compiled by `runner`, in seconds, one after another.

    `cold_s` are with empty caches, and each of `warm_s` is in one more process that finds them filled.
    `processor_s` is the processor time of the cold ones, with all processes that they started. `phases` are
    the times that `torch._dynamo.utils.compile_times` has of each cold one: a phase may be part of another.
    `kernels` is the number of our kernels that a cold one compiled. If a call failed, `note` says why, and no
    more were made.
    """

    model: str
    runner: Runner
    cold_s: tuple[float, ...] = ()
    warm_s: tuple[float, ...] = ()
    processor_s: tuple[float, ...] = ()
    phases: tuple[dict[str, float], ...] = ()
    kernels: int | None = None
    note: str = ""


@dataclass(frozen=True)
class FirstCalls:
    """The first calls of models with a number of layers, or at their real depth if it is None, on a machine
    with a number of cores, each `times` times, or fewer times if the run was ended."""

    layers: int | None
    cores: int
    times: int
    calls: tuple[FirstCall, ...]


@dataclass(frozen=True)
class Machine:
    """The machine that a timing depends on; a field that could not be queried is None."""

    gpu: str
    sms: int
    power_limit_w: int | None
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    packages: dict[str, str]


@dataclass(frozen=True)
class Results:
    """A run: its date, command and machine, and its results."""

    date: str
    command: str
    machine: Machine
    ceilings: Ceilings | None = None
    tables: tuple[TableResult, ...] = ()
    host: HostResult | None = None
    models: tuple[ModelResult, ...] = ()
    first_calls: FirstCalls | None = None
    version: int = field(default=VERSION, init=False)

    @property
    def agrees(self) -> bool:
        """Whether every result was close enough to eager's, and every model that could be run was."""
        failed = self.first_calls is not None and any(each.note for each in self.first_calls.calls)
        return (
            not failed
            and all(model.agrees for model in self.models)
            and all(
                each.agrees
                for table in self.tables
                for problem in table.problems
                for each in problem.measurements
            )
        )

    @property
    def file_name(self) -> str:
        """`<gpu>-<date>.json`; if it has no table, a word for its contents follows the date."""
        gpu = "-".join(self.machine.gpu.lower().split())
        kinds = {"-host": self.host, "-models": self.models, "-first-call": self.first_calls}
        kind = next((word for word, found in kinds.items() if found), "")
        return f"{gpu}-{self.date[:10]}{kind}.json"

    def save(self, path: Path) -> None:
        """Writes the results as JSON. Raises UsageError if `path` can't be written."""
        try:
            path.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise UsageError(f"the results can't be written to {path}: {error}") from error

    @staticmethod
    def load(path: Path) -> Results:
        """Reads a file that `save` wrote. Raises UsageError if there is no such file, or it is of another
        kind."""
        try:
            data = json.loads(path.read_text())
            if data["version"] != VERSION:
                raise UsageError(f"{path} has version {data['version']}; this package reads {VERSION}")
            return read(Results, data)
        except OSError as error:
            raise UsageError(f"{path} can't be read: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{path} does not hold results of bench --json: {error!r}") from error

    def __str__(self) -> str:
        from cute_backend.presentation.terminal import to_text

        return to_text(self)

    def __rich__(self) -> RenderableType:
        from cute_backend.bench.show import results

        return results(self)


def raise_rates(ceilings: Ceilings, tables: Sequence[TableResult]) -> Ceilings:
    """The ceilings, raised to the rates that eager reached in the tables where those are higher."""
    rates = dict(ceilings.rates)
    for problem in (problem for table in tables for problem in table.problems):
        for work in problem.works:
            eager = problem.median_us(Cell(work.workload, Runner.EAGER))
            if eager is not None:
                rates[work.rate] = max(rates[work.rate], 1e6 * work.operations / eager)
    return replace(ceilings, rates=rates)
