"""The tables of docs/benchmarks.md, from results of `bench --json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from cute_backend.bench import show
from cute_backend.bench.model_results import KernelKind
from cute_backend.bench.results import Results, TableResult
from cute_backend.bench.table import Ratio, Runner

MODEL_KERNELS = (KernelKind.PRODUCT, KernelKind.OTHER)
"""The kernels of models whose times the page has. Attention is the same kernel with both compilers."""


def newest(runs: Sequence[Results], order: Sequence[str]) -> list[Results]:
    """Each run with the tables that no other run has newer; runs without such a table are left out.

    The run with the table that `order` names first comes first.
    """
    of_table = {table.name: run for run in sorted(runs, key=attrgetter("date")) for table in run.tables}
    shown = [
        replace(run, tables=tuple(table for table in run.tables if of_table[table.name] is run))
        for run in runs
    ]
    return sorted(
        (run for run in shown if run.tables),
        key=lambda run: min(order.index(table.name) for table in run.tables),
    )


def measured(table: TableResult) -> list[Ratio]:
    """The ratios of a table that are known for at least one of its problems."""
    return [ratio for ratio in table.ratios if any(each.ratio(ratio) is not None for each in table.problems)]


def markdown(found: Results) -> str:
    """A run's tables in docs/benchmarks.md. Each has a heading, the run that it comes from, and its ratios.

    The heading is the first sentence of a table's title, and the rest of the title follows it. In brackets is
    the share of its limit that a ratio's first kernel reaches, once for each kernel.
    """
    assert found.ceilings is not None
    machine, rates, command = show.circumstances(found)
    run = f"One run of `{command}`, {machine}; {rates}."
    blocks = []
    for table in found.tables:
        columns = measured(table)
        first = {ratio.of: ratio for ratio in reversed(columns)}
        header = ["problem", *map(str, columns)]
        lines = [" | ".join(header), " | ".join("---" for _ in header)]
        for problem in table.problems:
            cells = []
            for ratio in columns:
                share = problem.share(ratio.of, found.ceilings) if first[ratio.of] is ratio else None
                cells.append(
                    show.plain(problem.ratio(ratio), ".2f")
                    + (f" ({share:.0%})" if share is not None and problem.ratio(ratio) is not None else "")
                )
            lines.append(" | ".join([problem.name, *cells]))
        heading, _, names = table.title.partition(". ")
        blocks += [f"### {heading}", *([f"{names}."] if names else []), run, _table(lines)]
    return "\n\n".join(blocks)


def models_markdown(found: Results) -> str:
    """The table in docs/benchmarks.md of a run that timed whole models."""
    assert found.ceilings is not None
    header = ["model", "eager us", "inductor us", "cute us", "cute / inductor", "predicted ceiling"]
    header += ["kernels", *(f"{part.value} us" for part in MODEL_KERNELS)]
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for model, eager, *both in show.timed(found):
        cells = [model.name, *(f"{each.timing.median_us:.0f}" for each in (eager, *both))]
        cells += [show.plain(model.speed(Runner.CUTE, Runner.INDUCTOR), ".2f")]
        cells += [show.plain(model.most(found.ceilings.bandwidth), ".2f")]
        cells += [show.change(each.launches for each in both)]
        cells += [show.change(each.us(part) for each in both) for part in MODEL_KERNELS]
        lines.append(" | ".join(cells))
    machine, rates, command = show.circumstances(found)
    title = """\
### Two layers of whole models

Times are in microseconds.

- `predicted ceiling`: the ratio `cute / inductor` of a program whose epilogues cost nothing, whose products
  take no longer than Inductor's bare ones, and whose other kernels move what our kernels leave to them at a
  copy's rate. It counts the times of kernels in a profile. A program with fewer launches also saves the gaps
  between kernels, so the measured ratio can exceed it.
- `kernels`: launches of a call. `39 to 32` means 39 by Inductor and 32 by cute, here and in the next columns.
- `product us`, `other us`: times in a profile of products with their epilogues, and of all other kernels but
  attention, which is the same kernel in both. A kernel of this package is counted from its start, which
  may lie before the end of the kernel ahead of it. `bench --draw` shows the rest."""
    versions = len({model.sources for model, *_ in show.timed(found)})
    run = f"Medians of `{command}`, {machine}; {rates}."
    if versions > 1:
        run += f" The rows are of {versions} versions of this package, whose digests the file of results has."
    return "\n\n".join([title, run, _table(lines)])


def first_calls_markdown(found: Results) -> str:
    """The table in docs/benchmarks.md of a run that timed first calls."""
    assert found.first_calls is not None
    lines = [" | ".join(show.FIRST_CALLS), " | ".join("---" for _ in show.FIRST_CALLS)]
    lines += [" | ".join(row) for row in show.first_call_rows(found.first_calls)]
    machine, command = show.circumstances(found)
    title = f"### {show.first_calls_title(found.first_calls).capitalize()}"
    run = (
        f"One run of `{command}`, {machine}. A cold call has empty caches, and\n"
        "a warm one those that it left. `processor` is the time of all processes of a cold call."
    )
    return "\n\n".join([title, run, _table(lines)])


def host_markdown(found: Results) -> str:
    """The table in docs/benchmarks.md of a run that timed the host."""
    assert found.host is not None
    lines = ["call | us | 10% to 90%", "--- | --- | ---"]
    for name, timing in found.host.calls.items():
        lines.append(f"{name} | {timing.median_us:.1f} | {timing.low_us:.1f} to {timing.high_us:.1f}")
    cold, warm, imports = show.starts(found.host)
    machine, command = show.circumstances(found)
    run = f"Medians of `{command}`, {machine}. {cold.capitalize()}; {warm} {imports}."
    return "\n\n".join(["### Host time of one call", run, _table(lines)])


def _table(lines: Iterable[str]) -> str:
    return "\n".join(f"| {line} |" for line in lines)
