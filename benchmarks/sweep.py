"""Times random problems: our kernels with default settings, Inductor's, and torch's bare product.

    python benchmarks/sweep.py benchmarks/results/GPU-DATE-sweep-SEED.csv --seed 2 --minutes 9

There are 150 problems, whose operands (fp8, bf16, fp16) and epilogues (full, gated, row maxima) alternate,
and after every five of them a bare product. A program is compiled with `backend="cute"` and with
`backend="inductor"`, and a bare product is a call of `gemm`; nothing is tuned. They run in CUDA graphs,
interleaved, from a cold L2; figures are medians in microseconds.

`--workers` processes compile and prepare problems at the same time, but only one of them times at a time, a
few problems in each turn. If ours is the slower one, the median of three such timings counts, and when all
processes have ended, one that has the GPU for itself chooses the tile and times again: others disturb what is
measured for the choice. A run adds missing problems to FILE, starts none after `--minutes`, and prints
geometric means and the worst problems in FILE. `--shown` only prints. `--problems` times problems by their
names, such as 200x12800x5120-bf16-full.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from problems import DRAWN, ROWS, Drawn, Epilogue, Operands, draw
from torch import Tensor

from cute_backend.bench.environment import Nvml
from cute_backend.bench.measure import Prepared, Run, prepare, relative_difference
from cute_backend.bench.program_timing import Turn, own_turn, require_gpu
from cute_backend.bench.results import Ceilings, Timing
from cute_backend.bench.table import Cell, Problem, Rate, Runner, Table, Workload
from cute_backend.errors import UsageError
from cute_backend.runtime.disk.cache import writable_cache

COLUMNS = ("m", "n", "k", "operands", "epilogue", "torch", "inductor", "cute", "agrees", "note")
WORST = 12
FUSED_EACH = 5
"""Fused problems for each bare product."""

IN_A_TURN = 2
"""Problems that a process prepares before it waits for its turn to time."""

TIMINGS = 3
"""Timings of a problem for which ours is slower. The medians of these count."""

UNIT_US = 400.0
"""Microseconds that the calls of a unit take together: fewer than elsewhere, so that the inputs of all
processes fit on the GPU."""

_TOLERANCE = 0.02
_NOMINAL = Ceilings(4e12, {Rate.FP8: 1.4e15, Rate.BF16: 0.7e15})
"""Speeds of a GPU by which the number of calls in a unit is chosen. They don't change any ratio."""
_DRAWN = tuple(each.value for each in DRAWN)
_BARE, _OURS = Cell("bare", Runner.EAGER), "ours"


def problems(seed: int, count: int, rows: tuple[int, int] = ROWS) -> list[Drawn]:
    """`count` fused problems, with a bare one after every five. `rows` are the least and the largest M."""
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
            check=lambda args, result: relative_difference(result, expected(drawn, *args)),
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


def expected(drawn: Drawn, x: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
    """torch's product, with which a bare product is compared: of operands in fp32 if they are fp16.

    For 2 x 352 x 26128 in fp16, torch's own product differed from float64 by 2.5 percent in norm, and ours by
    0.02 (H200, torch 2.11).
    """
    if drawn.operands is Operands.FP16:
        return torch.mm(x.float(), weight.float().t())
    return drawn.product(x, weight, *scales)


def row_of(drawn: Drawn, prepared: Prepared, turn: Turn, rounds: int) -> dict[str, object]:
    """The figures of one problem, timed in a turn."""
    ours = Cell(_OURS, Runner.EAGER if drawn.epilogue is Epilogue.BARE else Runner.CUTE)
    cells = {"torch": _BARE, "inductor": Cell(_OURS, Runner.INDUCTOR), "cute": ours}
    units = prepared.units
    timings = [turn.time(units, rounds)]
    while 1 <= len(timings) < TIMINGS and _is_slower(drawn.epilogue, cells, timings[0]):
        timings.append(turn.time(units, rounds))
    row: dict[str, object] = {"m": drawn.m, "n": drawn.n, "k": drawn.k}
    row |= {"operands": drawn.operands.value, "epilogue": drawn.epilogue.value}
    for column, cell in cells.items():
        taken = [timing[cell].median_us for timing in timings if cell in timing]
        row[column] = f"{statistics.median(taken):.2f}" if taken else ""
    measured = (each.measurement for each in prepared.variants)
    (found,) = (each for each in measured if each.cell == ours)
    return {**row, "agrees": found.agrees, "note": found.note}


def _is_slower(epilogue: Epilogue, cells: Mapping[str, Cell], timings: Mapping[Cell, Timing]) -> bool:
    other = cells["torch" if epilogue is Epilogue.BARE else "inductor"]
    known = other in timings and cells["cute"] in timings
    return known and timings[cells["cute"]].median_us > timings[other].median_us


def show(rows: Iterable[dict[str, str]]) -> None:
    """Prints geometric means and the worst problems, of fused programs against Inductor and of bare ones.

    The ceiling is the speed of a kernel that takes as long as torch's bare product, whose epilogue costs
    nothing.
    """
    rows = [row for row in rows if row["cute"]]
    for row in rows:
        if row["agrees"] != "True":
            print(f"WRONG: {_name(row)}")
    for kind, other in (("fused", "inductor"), ("bare", "torch")):
        of_kind = [row for row in rows if (row["epilogue"] == "bare") == (kind == "bare") and row[other]]
        for bits, names in (("fp8", ("fp8",)), ("16-bit", ("bf16", "fp16"))):
            group = [row for row in of_kind if row["operands"] in names]
            _print_means(f"{kind}, {bits}", other, group)
            for epilogue in dict.fromkeys(row["epilogue"] for row in group if kind == "fused"):
                _print_means(f"    {epilogue}", other, [row for row in group if row["epilogue"] == epilogue])
        ratios = {_name(row): _ratio(row, other, "cute") for row in of_kind}
        for name in sorted(ratios, key=ratios.__getitem__)[:WORST]:
            print(f"    {ratios[name]:.3f}  {name}")


def _print_means(of: str, other: str, rows: Sequence[dict[str, str]]) -> None:
    if not rows:
        return
    ratios = [_ratio(row, other, "cute") for row in rows]
    mean = statistics.geometric_mean(ratios)
    line = f"{of}: {len(rows)} problems, {other} / ours {mean:.3f}, least {min(ratios):.3f}"
    if other == "inductor":
        ceiling = statistics.geometric_mean(_ratio(row, other, "torch") for row in rows)
        line += f", below 0.97: {sum(ratio < 0.97 for ratio in ratios)}, ceiling {ceiling:.3f}"
    print(line)


def _ratio(row: dict[str, str], other: str, ours: str) -> float:
    return float(row[other]) / float(row[ours])


def picture(rows: Iterable[dict[str, str]], path: Path) -> None:
    """Draws the ratios over M: fused programs as dots, bare products as crosses. It needs matplotlib."""
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
    parser.add_argument(
        "--operands",
        nargs="+",
        default=_DRAWN,
        choices=_DRAWN,
        help="the operands of problems; others are left out",
    )
    parser.add_argument(
        "--problems", nargs="+", type=_named, metavar="NAME", help="time these problems, not those drawn"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=9.0, help="start no problem later than this")
    parser.add_argument("--workers", type=int, default=8, help="processes that prepare and time")
    parser.add_argument("--part", help=argparse.SUPPRESS)
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
        if arguments.part is not None:
            _measure(arguments, _missing(arguments))
            return
        before = _names(arguments.file)
        _share_out(arguments.workers)
        if slower := _slower(arguments.file, before):
            _time_alone(arguments.file, slower)
    with arguments.file.open() as file:
        rows = list(csv.DictReader(file))
    show(rows)
    if arguments.picture is not None:
        picture(rows, arguments.picture)


def _named(name: str) -> Drawn:
    """The problem with a name, as `Drawn.name` and the table write it."""
    sizes, operands, epilogue = name.split("-")
    m, n, k = map(int, sizes.split("x"))
    return Drawn(m, n, k, Operands(operands), Epilogue(epilogue))


def _names(path: Path) -> set[str]:
    """The names of the problems that a file has."""
    with path.open() as file:
        return {_name(row) for row in csv.DictReader(file)}


def _slower(path: Path, before: set[str]) -> list[str]:
    """The names of the problems that were added to those of `before` and for which ours is the slower one."""
    with path.open() as file:
        added = [row for row in csv.DictReader(file) if row["cute"] and _name(row) not in before]
    others = ((row, "torch" if row["epilogue"] == Epilogue.BARE.value else "inductor") for row in added)
    return [_name(row) for row, other in others if row[other] and _ratio(row, other, "cute") < 1]


def _time_alone(path: Path, names: Sequence[str]) -> None:
    """Times problems again in one process, and replaces their rows. It finds the kernels that were compiled,
    but neither choices of tiles nor Inductor's graphs, in which the pass would not run again."""
    with path.open() as file:
        kept = [row for row in csv.DictReader(file) if _name(row) not in names]
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        rows.writeheader()
        rows.writerows(kept)
    with tempfile.TemporaryDirectory() as folder:
        cache, graphs = Path(folder, "cache"), Path(folder, "inductor")
        shutil.copytree(writable_cache().root, cache, ignore=shutil.ignore_patterns("tuned.json"))
        command = [sys.executable, __file__, str(path), "--part", "0/1", "--problems", *names]
        folders = {"CUTE_BACKEND_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(graphs)}
        subprocess.run(command, env={**os.environ, **folders}, check=True)


def _missing(arguments: argparse.Namespace) -> list[Drawn]:
    """The problems of a part that the file does not have yet. Part "1/4" of the problems of a seed is every
    fourth one from the second on."""
    done = _names(arguments.file)
    first, step = map(int, arguments.part.split("/"))
    drawn = arguments.problems or problems(arguments.seed, arguments.count, tuple(arguments.rows))
    wanted = [each for each in drawn if each.operands.value in arguments.operands][first::step]
    return [each for each in wanted if each.name not in done]


def _share_out(workers: int) -> None:
    """Runs the parts of this program in processes."""
    commands = [[sys.executable, *sys.argv, "--part", f"{part}/{workers}"] for part in range(workers)]
    for part in [subprocess.Popen(command) for command in commands]:
        part.wait()


def _measure(arguments: argparse.Namespace, wanted: Sequence[Drawn]) -> None:
    until = time.monotonic() + 60 * arguments.minutes
    run = Run(_NOMINAL, {}, Nvml(), arguments.rounds, lambda what: None, UNIT_US)
    with arguments.file.open("a", newline="", buffering=1) as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        for first in range(0, len(wanted), IN_A_TURN):
            prepared = []
            for drawn in wanted[first : first + IN_A_TURN]:
                if time.monotonic() > until:
                    break
                try:
                    prepared.append((drawn, prepare(table_of(drawn).problems[0], run)))
                except UsageError as error:  # such as a lack of memory, which other processes use too
                    print(f"{drawn.name}: {error}", file=sys.stderr)
            if not prepared:
                continue
            with own_turn() as turn:
                for drawn, each in prepared:
                    row = row_of(drawn, each, turn, arguments.rounds)
                    if not any("OutOfMemory" in variant.measurement.note for variant in each.variants):
                        rows.writerow(row)
            del prepared, each
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
