"""Time random problems: our kernels with default settings, Inductor's, and torch's bare product.

    python benchmarks/sweep.py benchmarks/results/GPU-DATE-sweep-SEED.csv --seed 2 --minutes 9

150 problems, whose operands (fp8, bf16, fp16) and epilogues (full, gated, row maxima) alternate, and 30 bare
products: one behind every five. A program is compiled with `backend="cute"` and with `backend="inductor"`,
and a bare product is a call of `gemm`; nothing is tuned. All are compiled first, by `--jobs` processes. Then
they run in CUDA graphs, interleaved, from a cold L2; microseconds, medians. `--timers` processes prepare
problems side by side, and time one after the other. Of a problem where ours is slower than the other, the
median of three such timings counts. A run adds to FILE what it lacks and stops after `--minutes`, and prints
geometric means and the worst problems of all that FILE has. `--shown` only prints.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from problems import ROWS, Drawn, Epilogue, Operands, draw

from cute_backend.bench.machine import Nvml
from cute_backend.bench.measure import Run, compiled, measure_ceilings, measure_table, relative_difference
from cute_backend.bench.table import Cell, Problem, Rate, Runner, Table, Workload
from cute_backend.bench.timing import require_gpu
from cute_backend.errors import UsageError

COLUMNS = ("m", "n", "k", "operands", "epilogue", "torch", "inductor", "cute", "agrees", "note")
WORST = 12
FUSED_EACH = 5
"""Fused problems for each bare product."""

TIMINGS = 3
"""Timings of a problem where ours is slower; the medians of these count."""

_TOLERANCE = 0.02
_BARE, _OURS = Cell("bare", Runner.EAGER), "ours"


def problems(seed: int, count: int, rows: tuple[int, int] = ROWS) -> list[Drawn]:
    """`count` fused problems, with a bare one behind every five. `rows` are the least and the largest M."""
    bare = draw(seed + 1_000_000, count // FUSED_EACH, (Epilogue.BARE,), rows)
    mixed: list[Drawn] = []
    for place, fused in enumerate(draw(seed, count, rows=rows), 1):
        mixed.append(fused)
        if place % FUSED_EACH == 0:
            mixed.append(next(bare))
    return mixed


def table_of(drawn: Drawn) -> Table:
    """The table of one problem: torch's bare product, and the program as Inductor and as cute run it, or the
    product by `gemm`."""
    rate = Rate.FP8 if drawn.operands is Operands.FP8 else Rate.BF16
    operations = 2 * drawn.m * drawn.n * drawn.k
    bare = Workload("bare", drawn.product, drawn.product_inputs, rate, operations, (Runner.EAGER,), None)
    if drawn.epilogue is Epilogue.BARE:
        program = Workload(
            _OURS,
            drawn.by_gemm,
            drawn.product_inputs,
            rate,
            operations,
            (Runner.EAGER,),
            _TOLERANCE,
            check=lambda args, result: relative_difference(result, drawn.product(*args)),
            calls_kernels=True,
        )
    else:
        program = Workload(
            _OURS,
            drawn.program,
            lambda: (*drawn.product_inputs(), *drawn.extra_inputs()),
            rate,
            operations,
            (Runner.INDUCTOR, Runner.CUTE),
            _TOLERANCE,
        )
    return Table(drawn.name, drawn.name, _BARE, (), (Problem(drawn.name, (bare, program)),))


def row_of(drawn: Drawn, run: Run) -> dict[str, object]:
    """The figures of one problem."""
    timed = [_timed(drawn, run)]
    while 1 <= len(timed) < TIMINGS and _is_slower(timed[0], drawn.epilogue):
        timed.append(_timed(drawn, run))
    row = timed[0]
    for column in ("torch", "inductor", "cute"):
        taken = [each[column] for each in timed if each[column] is not None]
        row[column] = f"{statistics.median(taken):.2f}" if taken else ""
    return {"m": drawn.m, "n": drawn.n, "k": drawn.k, **row}


def _timed(drawn: Drawn, run: Run) -> dict[str, object]:
    (result,) = measure_table(table_of(drawn), run)
    (problem,) = result.problems
    found = {each.cell: each for each in problem.measurements}
    ours = Cell(_OURS, Runner.EAGER if drawn.epilogue is Epilogue.BARE else Runner.CUTE)
    cells = {"torch": _BARE, "inductor": Cell(_OURS, Runner.INDUCTOR), "cute": ours}
    timings = {name: found[cell].timing if cell in found else None for name, cell in cells.items()}
    return {
        "operands": drawn.operands.value,
        "epilogue": drawn.epilogue.value,
        **{name: timing and timing.median_us for name, timing in timings.items()},
        "agrees": found[ours].agrees,
        "note": found[ours].note,
    }


def _is_slower(row: dict[str, object], epilogue: Epilogue) -> bool:
    other, ours = row["torch" if epilogue is Epilogue.BARE else "inductor"], row["cute"]
    return isinstance(other, float) and isinstance(ours, float) and ours > other


def show(rows: Iterable[dict[str, str]]) -> None:
    """Prints geometric means and the worst problems, of fused programs against Inductor and of bare ones."""
    rows = [row for row in rows if row["cute"]]
    for row in rows:
        if row["agrees"] != "True":
            print(f"WRONG: {_name(row)}")
    for kind, other in (("fused", "inductor"), ("bare", "torch")):
        of_kind = [row for row in rows if (row["epilogue"] == "bare") == (kind == "bare") and row[other]]
        ratios = {_name(row): float(row[other]) / float(row["cute"]) for row in of_kind}
        for bits, names in (("fp8", ("fp8",)), ("16-bit", ("bf16", "fp16"))):
            group = [ratios[_name(row)] for row in of_kind if row["operands"] in names]
            if group:
                mean = math.exp(sum(map(math.log, group)) / len(group))
                found = f"{other} / ours {mean:.3f}, least {min(group):.3f}"
                print(f"{kind}, {bits}: {len(group)} problems, {found}")
        for name in sorted(ratios, key=ratios.__getitem__)[:WORST]:
            print(f"    {ratios[name]:.3f}  {name}")


def picture(rows: Iterable[dict[str, str]], path: Path) -> None:
    """Draws the ratios over M: fused programs as dots, bare products as crosses. It takes matplotlib."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 4), layout="constrained")).subplots()
    drawn = [row for row in rows if row["cute"]]
    colors = {Operands.FP8: "#00589b", Operands.BF16: "#e69f00", Operands.FP16: "#cc79a7"}
    for operands, color in colors.items():
        for marker, other, is_bare in (("o", "inductor", False), ("x", "torch", True)):
            points = [row for row in drawn if row["operands"] == operands.value and row[other]]
            points = [row for row in points if (row["epilogue"] == Epilogue.BARE.value) is is_bare]
            ratios = [float(row[other]) / float(row["cute"]) for row in points]
            label = f"{operands.value}, {'bare: torch' if is_bare else 'fused: Inductor'} / ours"
            axes.scatter([int(row["m"]) for row in points], ratios, 18, color, marker=marker, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="M", ylabel="speed of ours, 1 = theirs")
    axes.set_yticks([0.5, 0.7, 1, 1.5, 2, 3, 4], ["0.5", "0.7", "1", "1.5", "2", "3", "4"], minor=False)
    axes.legend(fontsize=7, ncols=3)
    figure.savefig(path, dpi=120)


def _name(row: dict[str, str]) -> str:
    return f"{row['m']}x{row['n']}x{row['k']}-{row['operands']}-{row['epilogue']}"


def main() -> None:
    """Adds rows to the file that the command names, and prints what it has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--count", type=int, default=150, help="fused problems; a fifth as many are bare")
    parser.add_argument("--rows", type=int, nargs=2, default=ROWS, help="the least and the largest M drawn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=9.0, help="no problem is timed later")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--timers", type=int, default=4, help="processes that prepare and time")
    parser.add_argument("--compile", action="store_true", help="only compile, and time nothing")
    parser.add_argument("--compiled", action="store_true", help="time without compiling ahead")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)
    parser.add_argument("--time-part", help=argparse.SUPPRESS)
    parser.add_argument("--shown", action="store_true", help="print what FILE has, and time nothing")
    parser.add_argument("--picture", type=Path, help="also draw the ratios, to this file")
    arguments = parser.parse_args()
    if not arguments.shown:
        try:
            require_gpu()
        except UsageError as error:
            sys.exit(str(error))
        if not arguments.file.exists():
            arguments.file.write_text(",".join(COLUMNS) + "\n")
        if arguments.compile_part is not None:
            _compile(_missing(arguments, arguments.compile_part))
            return
        if arguments.time_part is not None:
            _measure(arguments, _missing(arguments, arguments.time_part))
            return
        if not arguments.compiled:
            _aside("--compile-part", arguments.jobs)
        if arguments.compile:
            return
        _aside("--time-part", arguments.timers)
    with arguments.file.open() as file:
        rows = list(csv.DictReader(file))
    show(rows)
    if arguments.picture is not None:
        picture(rows, arguments.picture)


def _missing(arguments: argparse.Namespace, part: str) -> list[Drawn]:
    """The problems of a part that the file does not have yet. Part "1/4" of the problems of a seed is every
    fourth one from the second on."""
    with arguments.file.open() as file:
        done = {_name(row) for row in csv.DictReader(file)}
    first, step = map(int, part.split("/"))
    drawn = problems(arguments.seed, arguments.count, tuple(arguments.rows))[first::step]
    return [each for each in drawn if each.name not in done]


def _aside(flag: str, processes: int) -> None:
    """Runs the parts of this program in processes. The caches keep the kernels that these compile."""
    commands = [[sys.executable, *sys.argv, flag, f"{part}/{processes}"] for part in range(processes)]
    for part in [subprocess.Popen(command) for command in commands]:
        part.wait()


@torch.no_grad()
def _compile(wanted: Iterable[Drawn]) -> None:
    """Run every program once."""
    for drawn in wanted:
        for workload, runner in _programs(drawn):
            torch._dynamo.reset()
            with torch.device("cuda"):
                args = workload.inputs()
            try:
                compiled(runner, workload.fn)(*args)
            except Exception as error:  # its timing fails in the same way, and notes it
                print(f"{drawn.name}, {runner.value}: {type(error).__name__}: {error}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()


def _programs(drawn: Drawn) -> Iterator[tuple[Workload, Runner]]:
    for problem in table_of(drawn).problems:
        for workload in problem.workloads:
            yield from ((workload, runner) for runner in workload.runners)


def _measure(arguments: argparse.Namespace, wanted: list[Drawn]) -> None:
    until = time.monotonic() + 60 * arguments.minutes
    ceilings = measure_ceilings([Rate.FP8, Rate.BF16], arguments.rounds)
    run = Run(ceilings, {}, Nvml(), arguments.rounds, lambda what: None)
    with arguments.file.open("a", newline="", buffering=1) as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        for each in wanted:
            if time.monotonic() > until:
                break
            rows.writerow(row_of(each, run))
            print(each.name, file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
