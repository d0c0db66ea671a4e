"""Results as a terminal shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cute_backend.bench.model_results import KernelKind, ModelResult, ModelTiming
from cute_backend.bench.table import Runner
from cute_backend.presentation.terminal import light_table

if TYPE_CHECKING:
    from cute_backend.bench.results import (
        Ceilings,
        FirstCalls,
        HostResult,
        Measurement,
        ProblemResult,
        Results,
        TableResult,
    )


def results(found: Results) -> RenderableType:
    """All results: each problem in detail, then each table's ratios, the host's times, and the machine."""
    parts: list[RenderableType] = []
    for table in found.tables:
        assert found.ceilings is not None
        for problem in table.problems:
            parts += [Text(problem.name + _clock(problem), style="bold"), detail(problem, found.ceilings)]
            parts += [*notes(problem), Text()]
    for table in found.tables:
        parts += [Text(table.title), Text("speed of one relative to another, medians"), ratios(table), Text()]
    if found.host is not None:
        parts += [host(found.host), Text()]
    if found.models:
        parts += [models(found), Text()]
    if found.first_calls is not None:
        parts += [first_calls(found.first_calls), Text()]
    parts += [Text(line, style="dim") for line in circumstances(found)]
    return Group(*parts)


def _clock(problem: ProblemResult) -> str:
    clock = problem.clock
    return f", SM clock {clock.low_mhz} to {clock.high_mhz} MHz" if clock else ""


def detail(problem: ProblemResult, ceilings: Ceilings) -> Table:
    """Every cell of a problem: its time and rate, the share of its limit, its difference from eager."""
    table = light_table("", "median us", "10% to 90%", "TFLOP/s", "of limit", "differs", right=5)
    for each in problem.measurements:
        work, timing = problem.work(each.cell), each.timing
        if timing is None:
            table.add_row(str(each.cell), "-", "-", "-", "-", "-")
            continue
        table.add_row(
            str(each.cell),
            f"{timing.median_us:.1f}",
            f"{timing.low_us:.1f} to {timing.high_us:.1f}",
            f"{work.operations / timing.median_us / 1e6:.0f}",
            plain(problem.share(each.cell, ceilings), ".0%"),
            _difference(each),
        )
    for work in problem.works:
        table.add_row(f"limit {work.workload}", f"{work.limit_us(ceilings):.1f}", "", "", "", "", style="dim")
    return table


def _difference(each: Measurement) -> Text:
    shown = "not finite" if each.difference is None else f"{each.difference:.2%}"
    return Text(shown) if each.agrees else Text(f"WRONG {shown}", style="bold red")


def notes(problem: ProblemResult) -> list[Text]:
    """Notes on single cells."""
    return [Text(f"{each.cell}: {each.note}") for each in problem.measurements if each.note]


def ratios(table: TableResult) -> Table:
    """A row for each problem and a column for each ratio. If a cell failed, its ratio is empty, and `notes`
    say why."""
    tried = {each.cell for problem in table.problems for each in problem.measurements}
    columns = [ratio for ratio in table.ratios if {ratio.of, ratio.to} <= tried]
    shown = light_table("", *map(str, columns), right=len(columns))
    shown.columns[0].no_wrap = True
    for problem in table.problems:
        shown.add_row(problem.name, *(_ratio(problem.ratio(each)) for each in columns))
    return shown


def _ratio(value: float | None) -> Text:
    return Text() if value is None else Text(f"{value:.2f}", style="green" if value >= 1 else "")


def models(found: Results) -> Group:
    """Two tables with a row for each model. The first has times and launches; the second has the times of
    kinds of kernels in a profile of Inductor's and of our program, the time in which a copy would move the
    bytes of Inductor's own kernels, and the predicted ceiling of `cute / inductor` (`ModelResult.most`)."""
    assert found.ceilings is not None
    times = light_table("", "eager us", "inductor", "cute", "cute / inductor", "kernels", "differs", right=6)
    parts = light_table(
        "us, inductor to cute",
        *(part.value for part in KernelKind),
        "other's bytes",
        "predicted ceiling",
        right=5,
    )
    notes = []
    for model in found.models:
        notes += [Text(f"{model.name}: {model.note}")] if model.note else []
        notes += [
            Text(f"{model.name}, {each.runner.value}: {each.note}") for each in model.timings if each.note
        ]
    for model, eager, *both in timed(found):
        cute = both[-1]
        times.add_row(
            model.name,
            *(f"{each.timing.median_us:.1f}" for each in (eager, *both)),
            _ratio(model.speed(Runner.CUTE, Runner.INDUCTOR)),
            change(each.launches for each in both),
            Text(f"{cute.difference:.2%}", style="" if model.agrees else "bold red"),
        )
        parts.add_row(
            model.name,
            *(change(each.us(part) for each in both) for part in KernelKind),
            change(least_us(found, each) for each in both),
            plain(model.most(found.ceilings.bandwidth), ".2f"),
        )
    return Group(times, Text(), parts, *notes)


def timed(found: Results) -> Iterator[tuple[ModelResult, ModelTiming, ModelTiming, ModelTiming]]:
    """The models that were timed, each as eager, Inductor and cute ran it."""
    for model in found.models:
        eager, inductor, cute = map(model.of, (Runner.EAGER, Runner.INDUCTOR, Runner.CUTE))
        if eager is not None and inductor is not None and cute is not None:
            yield model, eager, inductor, cute


def least_us(found: Results, timing: ModelTiming) -> float:
    """The microseconds in which a copy would move the bytes of Inductor's own kernels."""
    assert found.ceilings is not None
    return 1e6 * (timing.bytes or 0) / found.ceilings.bandwidth


def change(values: Iterable[float]) -> str:
    return " to ".join(f"{value:.0f}" for value in values)


def host(found: HostResult) -> Group:
    """Host time of one call, by the name of the program."""
    table = light_table("host time of one call", "median us", "10% to 90%", right=2)
    for name, timing in found.calls.items():
        table.add_row(name, f"{timing.median_us:.1f}", f"{timing.low_us:.1f} to {timing.high_us:.1f}")
    return Group(table, *map(Text, starts(found)))


def starts(found: HostResult) -> Iterator[str]:
    """The time to get a kernel in a new process, a line for each step."""
    imports = "imported" if found.warm_imports_cutlass else "did not import"
    yield f"a kernel that no cache has: {found.cold_s:.1f} s until it is loaded"
    yield (
        f"a kernel on disk, in a new process: {found.warm_load_s:.3f} s to load, after "
        f"{found.warm_import_s:.3f} s to import cute_backend"
    )
    yield f"(torch was imported before; loading {imports} cutlass)"


FIRST_CALLS = ("model", "cold: inductor", "cute", "warm: inductor", "cute", "processor", "kernels")


def first_calls(found: FirstCalls) -> Group:
    """A row for each model: the first call with empty caches and with filled ones, by Inductor and by cute,
    the processor time of the cold calls, and the number of our kernels that were compiled."""
    table = light_table("", *FIRST_CALLS[1:], right=len(FIRST_CALLS) - 1)
    for row in first_call_rows(found):
        table.add_row(*row)
    notes = (f"{each.model}, {each.runner.value}: {each.note}" for each in found.calls if each.note)
    return Group(Text(first_calls_title(found)), table, *map(Text, notes))


def first_calls_title(found: FirstCalls) -> str:
    of = "all" if found.layers is None else found.layers
    each = f", medians and ranges of {found.times}" if found.times > 1 else ""
    return f"first call of {of} layers in a new process, {found.cores} cores, seconds{each}"


def first_call_rows(found: FirstCalls) -> Iterator[list[str]]:
    """The cells of each model that both could run."""
    for inductor, cute in zip(found.calls[::2], found.calls[1::2], strict=True):
        both = (inductor, cute)
        if not any(each.note for each in both):
            cells = [_median(each.cold_s) for each in both]
            cells += [_median(each.warm_s) for each in both]
            cells += [" to ".join(f"{median(each.processor_s):.0f}" for each in both)]
            yield [cute.model, *cells, str(cute.kernels)]


def _median(seconds: Sequence[float]) -> str:
    """The median of times and, if there are several, the least and the most."""
    spread = f" ({min(seconds):.1f}-{max(seconds):.1f})" if len(seconds) > 1 else ""
    return f"{median(seconds):.1f}{spread}"


def circumstances(found: Results) -> Iterator[str]:
    """The machine, its ceilings and the command, each on a line."""
    machine = found.machine
    power = f", {machine.power_limit_w} W" if machine.power_limit_w else ""
    yield (
        f"{machine.gpu}{power}, driver {machine.driver or 'unknown'}, CUDA {machine.cuda}, torch "
        f"{machine.torch}, {found.date}"
    )
    if found.ceilings is not None:
        rates = ", ".join(f"{name.value} {rate / 1e12:.0f}" for name, rate in found.ceilings.rates.items())
        products = f"; torch's best product, {rates} TFLOP/s" if rates else ""
        yield f"rates: a copy's {found.ceilings.bandwidth / 1e12:.2f} TB/s, read and written{products}"
    yield found.command


def plain(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)
