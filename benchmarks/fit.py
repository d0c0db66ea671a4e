"""Fits the cost model (`planning/cost.py`) to timings of `tiles.py`, and writes its constants.

    python benchmarks/fit.py benchmarks/results/GPU-DATE-drawn-tiles.csv [more files]

The command writes `cute_backend/planning/targets/h200.py`. With `--only PATTERN` it only fits the tiles
whose names match, and leaves the constants of all others as they are. For problems that were left out of a
fit, it prints how much slower the model's tile is than the fastest one. It needs no GPU, and takes a minute.

The fit should find the order of a problem's tiles, above all of the fast ones. So errors that all tiles of a
problem share have a tenth of the weight, and a problem counts by the logarithm of its time.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from problems import Drawn, Epilogue, Operands
from torch import Tensor
from torch.nn.functional import huber_loss

from cute_backend.planning import Arch, TileConfig, offered
from cute_backend.planning.cost import Work, time_of, work_of
from cute_backend.planning.search import clustered
from cute_backend.planning.targets import Cut, TileTime, h200
from cute_backend.spec import EpilogueSpec

ARCH = Arch.SM90A
TARGET_FILE = Path(__file__).parents[1] / "cute_backend" / "planning" / "targets" / "h200.py"
STEPS = 600
DELTA = 0.1
"""The relative error above which errors count linearly, and not by their square."""
SHARED_WEIGHT = 0.1
LAST = "Don't edit it by hand."
"""The last sentence of the docstring of the module with the constants."""
Problem = tuple[int, int, int, str, str]
"""M, N, K, operands, epilogue."""


@dataclass(frozen=True)
class Timed:
    """One timing: of a problem, with a tile."""

    problem: Problem
    tile: str
    cut: Cut
    work: Work
    us: float


@cache
def spec_of(operands: str, epilogue: str) -> EpilogueSpec:
    """The spec that `tiles.py` times."""
    return Drawn(256, 512, 256, Operands(operands), Epilogue(epilogue)).spec()


def read(paths: Iterable[Path]) -> list[Timed]:
    """All timings of files by tiles that exist."""
    found = []
    for path in paths:
        with path.open() as file:
            for row in csv.DictReader(file):
                epilogue = row.get("epilogue", Epilogue.FULL.value)  # older files have no such column
                kind = row["operands"], epilogue
                m, n, k = (int(row[axis]) for axis in "mnk")
                drawn = Drawn(m, n, k, Operands(kind[0]), Epilogue(kind[1]))
                config = _configs(*kind).get(row["tile"])
                if config is not None:
                    sizes = drawn.m, drawn.columns, drawn.k
                    work = work_of(config, spec_of(*kind), *sizes, ARCH.target.sm_count)
                    found.append(Timed((m, n, k, *kind), config.name, config.cut, work, float(row["us"])))
    return found


@cache
def _configs(operands: str, epilogue: str) -> dict[str, TileConfig]:
    spec = spec_of(operands, epilogue)
    return {config.name: config for config in (*clustered(ARCH, spec), *offered(ARCH, spec))}


class Fit:
    """The constants, as logarithms, so that they stay positive. Their initial values are the target's."""

    def __init__(self, cuts: Sequence[Cut], kept: Collection[Cut] = ()) -> None:
        """The constants of the tiles in `kept`, and those of memory where there are any, stay as they
        are."""
        self.kept = kept
        self.index = {cut: place for place, cut in enumerate(cuts)}
        known = zip(*(time_of(ARCH, cut) for cut in cuts), strict=True)
        first = [torch.tensor(part).clamp(min=0.02) for part in known]
        self.tiles = [part.log().requires_grad_() for part in first]
        timing = ARCH.target.timing
        memory = (timing.beyond_us, timing.bytes_per_us) if kept else (0.006, 4.0e6)
        self.beyond, self.bandwidth = (
            torch.tensor(math.log(each), requires_grad=not kept) for each in memory
        )
        free = torch.tensor([float(cut not in kept) for cut in cuts])
        for part in self.tiles:
            part.register_hook(free.mul)

    def predicted(self, timed: Sequence[Timed]) -> Tensor:
        """Logarithms of the microseconds."""
        place = torch.tensor([self.index[each.cut] for each in timed])
        work = Work(*(torch.tensor([float(x) for x in field]) for field in zip(*(t.work for t in timed))))  # noqa: B905
        tile = TileTime(*(part.exp()[place] for part in self.tiles))
        return work.microseconds(
            tile, self.beyond.exp(), self.bandwidth.exp(), ARCH.target.timing.l2_bytes_per_us
        ).log()

    def learn(self, timed: Sequence[Timed]) -> Fit:
        """Fits the constants to timings."""
        problems = {problem: place for place, problem in enumerate(dict.fromkeys(t.problem for t in timed))}
        group = torch.tensor([problems[each.problem] for each in timed])
        us = torch.tensor([each.us for each in timed])
        fastest = torch.full((len(problems),), math.inf).scatter_reduce(0, group, us, "amin")
        weight = (fastest[group] / us) ** 2 * (fastest[group] / 2).log2()
        total = torch.zeros(len(problems)).index_add(0, group, weight)
        memory = [] if self.kept else [self.beyond, self.bandwidth]
        constants = [*self.tiles, *memory]
        optimizer = torch.optim.Adam(constants, 0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, STEPS * 6 // 10, 0.25)
        for _ in range(STEPS):
            error = self.predicted(timed) - us.log()
            shared = torch.zeros(len(problems)).index_add(0, group, error * weight) / total
            loss = _weighted(error - shared[group], weight) + SHARED_WEIGHT * _weighted(error, weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        return self

    def loss(self, timed: Sequence[Timed]) -> float:
        """The geometric mean of the ratio of the chosen tile's time to that of the fastest tile that is
        offered."""
        with torch.no_grad():
            predicted = self.predicted(timed)
        chosen: dict[Problem, tuple[float, float]] = {}
        fastest: dict[Problem, float] = {}
        kinds = {each.problem[3:] for each in timed}
        cuts = {kind: {each.cut for each in offered(ARCH, spec_of(*kind))} for kind in kinds}
        for each, us in zip(timed, predicted.tolist(), strict=True):
            fastest[each.problem] = min(each.us, fastest.get(each.problem, math.inf))
            if each.cut in cuts[each.problem[3:]]:
                chosen[each.problem] = min((us, each.us), chosen.get(each.problem, (math.inf, 0.0)))
        return math.exp(sum(math.log(chosen[p][1] / fastest[p]) for p in chosen) / len(chosen))


def _weighted(error: Tensor, weight: Tensor) -> Tensor:
    return (huber_loss(error, torch.zeros_like(error), delta=DELTA, reduction="none") * weight).mean()


def sources(files: Sequence[str], problems: int, only: str | None) -> list[str]:
    """The docstring of the module with the constants. If only some tiles were fitted, it keeps the files that
    it lists."""
    if only:
        before = (h200.__doc__ or "").removesuffix(f" {LAST}\n").splitlines()
        return [
            *before,
            f"The tiles {only} are fitted to",
            *_listed(files),
            f"{problems} problems. {LAST}",
        ]
    first = "The cost model of an H200, as `benchmarks/fit.py` writes it. It is fitted to"
    return [first, *_listed(files), f"{problems} problems in fp8 and bf16, most of them drawn. {LAST}"]


def _listed(files: Sequence[str]) -> list[str]:
    return [f"benchmarks/results/{name}," for name in files]


def text_of(fit: Fit, docstring: Sequence[str]) -> str:
    """The module with the constants."""
    tiles = [part.exp().tolist() for part in fit.tiles]
    lines = []
    for cut, place in sorted(fit.index.items()):
        names = [f"{cut.cta_rows}, {cut.mma_n}"]
        names += [
            f"{name}={value}"
            for name, value in cut._asdict().items()
            if name in Cut._field_defaults and value != Cut._field_defaults[name]
        ]
        times = ", ".join(f"{part[place]:.3f}" for part in tiles)
        lines.append(f"        Cut({', '.join(names)}): TileTime({times}),")
    return "\n".join(
        [
            f'"""{docstring[0]}',
            *docstring[1:],
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "from cute_backend.planning.targets.target import Cut, TileTime, Timing",
            "",
            "H200 = Timing(",
            "    tiles={",
            *lines,
            "    },",
            "    # It has room for 132, 66, 39 and 30 clusters of 1, 2, 3 and 4 CTAs.",
            "    reached={3: 117 / 132, 4: 120 / 132},",
            f"    beyond_us={fit.beyond.exp().item():.5f},",
            f"    bytes_per_us={fit.bandwidth.exp().item():.4g},",
            "    # CTAs received up to 12.2 TB/s on an H200, up to 11.1 on an H100 "
            "(benchmarks/findings/tiles.md).",
            f"    l2_bytes_per_us={ARCH.target.timing.l2_bytes_per_us:.4g},",
            ")",
            "",
        ]
    )


def main() -> None:
    """Fits, validates on halves, and writes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--only", metavar="PATTERN", help="fit only tiles whose names match")
    arguments = parser.parse_args()
    timed = read(arguments.files)
    kept: set[Cut] = set()
    if arguments.only:
        fitted = {each.cut for each in timed if re.fullmatch(arguments.only, each.tile)}
        kept = set(ARCH.target.timing.tiles) - fitted
        timed = [each for each in timed if each.cut in kept | fitted]
    cuts = sorted({each.cut for each in timed} | kept)
    problems = list(dict.fromkeys(each.problem for each in timed))
    for half in (0, 1):
        left_out = set(problems[half::2])
        fit = Fit(cuts, kept).learn([each for each in timed if each.problem not in left_out])
        loss = fit.loss([each for each in timed if each.problem in left_out])
        print(f"half {half}: the model's tile takes {loss:.3f} times the fastest's, of problems left out")
    fit = Fit(cuts, kept).learn(timed)
    print(f"all {len(problems)} problems: {fit.loss(timed):.3f}")
    names = [path.name for path in arguments.files]
    TARGET_FILE.write_text(text_of(fit, sources(names, len(problems), arguments.only)))
    print(f"written: {TARGET_FILE.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
