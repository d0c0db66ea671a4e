"""Time problems that nobody chose: drawn sizes, ours by default beside Inductor and torch's bare product.

    python benchmarks/sweep.py benchmarks/results/GPU-DATE-sweep-SEED.csv --seed 2 --count 150 --minutes 9

Operands (fp8, bf16, fp16) and epilogues (full, gated, row maxima) alternate, and every fifth problem is bare.
Each program is compiled with `backend="cute"` and with `backend="inductor"`; nothing is tuned. Programs run
in CUDA graphs, interleaved, from a cold L2; microseconds, medians. A run adds to FILE what it lacks, and
prints the geometric means of the ratios and the worst problems of all that FILE has. `--shown` only prints.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from problems import ROWS, Drawn, Epilogue, Operands, draw

from cute_backend.bench.machine import Nvml
from cute_backend.bench.measure import Run, build_kernels, measure_ceilings, measure_table
from cute_backend.bench.table import Cell, Problem, Rate, Runner, Table, Workload
from cute_backend.bench.timing import require_gpu

COLUMNS = ("m", "n", "k", "operands", "epilogue", "torch", "inductor", "cute", "agrees", "note")
WORST = 12
BARE_EACH = 5


def problems(seed: int, count: int, rows: tuple[int, int] = ROWS) -> list[Drawn]:
    """`count` problems, of which a fifth are bare, every fifth of the list. `rows` are the least and the
    largest M."""
    bare = count // BARE_EACH
    fused = list(draw(seed, count - bare, rows=rows))
    for place, drawn in enumerate(draw(seed + 1_000_000, bare, (Epilogue.BARE,), rows)):
        fused.insert(BARE_EACH * place + BARE_EACH - 1, drawn)
    return fused


def table_of(drawn: Drawn) -> Table:
    """The table of one problem: torch's bare product, and the program as Inductor and as cute run it."""
    fp8 = drawn.operands is Operands.FP8
    rate, operations = (Rate.FP8 if fp8 else Rate.BF16), 2 * drawn.m * drawn.n * drawn.k
    bare = Workload("bare", drawn.product, drawn.product_inputs, rate, operations, (Runner.EAGER,), None)
    program = Workload(
        drawn.epilogue.value,
        drawn.program,
        lambda: (*drawn.product_inputs(), *drawn.extra_inputs()),
        rate,
        operations,
        (Runner.CUTE,) if drawn.epilogue is Epilogue.BARE else (Runner.INDUCTOR, Runner.CUTE),
        0.02,
    )
    return Table(
        drawn.name, drawn.name, Cell("bare", Runner.EAGER), (), (Problem(drawn.name, (bare, program)),)
    )


def row_of(drawn: Drawn, run: Run) -> dict[str, object]:
    """The figures of one problem."""
    (result,) = measure_table(table_of(drawn), run)
    (problem,) = result.problems
    found = {each.cell: each for each in problem.measurements}

    def us(workload: str, runner: Runner) -> str:
        timing = found[cell].timing if (cell := Cell(workload, runner)) in found else None
        return "" if timing is None else f"{timing.median_us:.2f}"

    cute = found[Cell(drawn.epilogue.value, Runner.CUTE)]
    return {
        "m": drawn.m,
        "n": drawn.n,
        "k": drawn.k,
        "operands": drawn.operands.value,
        "epilogue": drawn.epilogue.value,
        "torch": us("bare", Runner.EAGER),
        "inductor": us(drawn.epilogue.value, Runner.INDUCTOR),
        "cute": us(drawn.epilogue.value, Runner.CUTE),
        "agrees": cute.agrees,
        "note": cute.note,
    }


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
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--rows", type=int, nargs=2, default=ROWS, help="the least and the largest M drawn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=60.0, help="no problem is begun later")
    parser.add_argument("--shown", action="store_true", help="print what FILE has, and time nothing")
    parser.add_argument("--picture", type=Path, help="also draw the ratios, to this file")
    arguments = parser.parse_args()
    if not arguments.shown:
        require_gpu()
        _measure(arguments)
    with arguments.file.open() as file:
        rows = list(csv.DictReader(file))
    show(rows)
    if arguments.picture is not None:
        picture(rows, arguments.picture)


def _measure(arguments: argparse.Namespace) -> None:
    until = time.monotonic() + 60 * arguments.minutes
    done: set[str] = set()
    if arguments.file.exists():
        with arguments.file.open() as file:
            done = {_name(row) for row in csv.DictReader(file)}
    drawn = problems(arguments.seed, arguments.count, tuple(arguments.rows))
    wanted = [each for each in drawn if each.name not in done]
    notes = build_kernels([table_of(each) for each in wanted])
    ceilings = measure_ceilings([Rate.FP8, Rate.BF16], arguments.rounds)
    run = Run(ceilings, notes, Nvml(), arguments.rounds, lambda what: None)
    with arguments.file.open("a", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            rows.writeheader()
        for place, each in enumerate(wanted):
            if time.monotonic() > until:
                break
            rows.writerow(row_of(each, run))
            file.flush()
            print(f"{place + 1} of {len(wanted)}: {each.name}", file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
