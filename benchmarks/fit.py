"""Fits the cost model (`planning/cost.py`) to timings of `tiles.py`, and writes its constants.

    python benchmarks/fit.py benchmarks/results/GPU-DATE-drawn-tiles.csv [more files]
    python benchmarks/fit.py FILES --only PATTERN   the tiles whose names match; all others stay as they are
    python benchmarks/fit.py FILES --errors         the errors alone, of all tiles that the files have
    python benchmarks/fit.py FILES --judge          writes nothing

The first three commands write `cute_backend/planning/targets/h200.py`. The last one prints for each file how
many times as long the chosen tile takes as the fastest one, with the errors that are written, and with errors
that the other half of the problems gave. No command needs a GPU. With twenty files, the second one took three
minutes, and the others less than half a minute.

The fit should find the order of a problem's tiles, above all of the fast ones. So errors that all tiles of a
problem share have a tenth of the weight, and a problem counts by the logarithm of its time. A tile's own
error is what is left: the root of the mean square of what its timings differ from the prediction, beside what
the problem's tiles share.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from problems import Drawn, Epilogue, Operands
from torch import Tensor
from torch.nn.functional import huber_loss

from cute_backend.planning import Arch, Sizes, TileConfig, fastest, offered
from cute_backend.planning.cost import Work, nearest, time_of, work_of
from cute_backend.planning.search import clustered
from cute_backend.planning.targets import Cut, TileTime, h200
from cute_backend.planning.transposing import Tiled
from cute_backend.spec import EpilogueSpec

ARCH = Arch.SM90A
TARGET_FILE = Path(__file__).parents[1] / "cute_backend" / "planning" / "targets" / "h200.py"
STEPS = 600
DELTA = 0.1
"""The relative error above which errors count linearly, and not by their square."""
SHARED_WEIGHT = 0.1
SIMILAR_WEIGHT = 0.1
"""The weight of the squared logarithm by which a constant differs from its initial value, beside that of
one timing. It decides about constants that the timings don't tell apart."""
NEAR = 1.3
"""Timings count for a tile's error by how near they are to the problem's fastest one, and not at all from
this many times its time on: the choice is among the fast ones."""
SEVERAL = 20
"""The fewest timings in several waves, of those that are `NEAR` the fastest, by which a tile's time in
several waves is known."""
USUAL_ERROR, USUAL_COUNT = 0.08, 4
"""A few timings may agree by chance. So each tile's error is that of its timings and this many of this
error."""
LAST = "Don't edit it by hand."
"""The last sentence of the docstring of the module with the constants."""
ERRORS = "The errors are of"
"""The beginning of its paragraph about errors."""


@dataclass(frozen=True)
class Problem:
    """A problem whose tiles were timed together."""

    drawn: Drawn
    file: str

    @property
    def spec(self) -> EpilogueSpec:
        return spec_of(self.drawn.operands, self.drawn.epilogue)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.drawn.m, self.drawn.columns, self.drawn.k)


@dataclass(frozen=True)
class Timed:
    """One timing: of a problem, with a tile."""

    problem: Problem
    config: TileConfig
    work: Work
    us: float
    slower: float
    """How many times as long it takes as the fastest tile of its problem."""

    @property
    def cut(self) -> Cut:
        return self.config.cut


@cache
def spec_of(operands: Operands, epilogue: Epilogue) -> EpilogueSpec:
    """The spec that `tiles.py` times."""
    return Drawn(256, 512, 256, operands, epilogue).spec()


@cache
def _offered(spec: EpilogueSpec) -> tuple[TileConfig, ...]:
    return offered(ARCH, spec)


@cache
def _named(spec: EpilogueSpec) -> dict[str, TileConfig]:
    return {config.name: config for config in (*clustered(ARCH, spec), *_offered(spec))}


def read(paths: Iterable[Path]) -> list[Timed]:
    """All timings of files by tiles that exist."""
    times: dict[Problem, dict[str, float]] = defaultdict(dict)
    for path in paths:
        with path.open() as file:
            for row in csv.DictReader(file):
                # Older files have no epilogue.
                kind = Operands(row["operands"]), Epilogue(row.get("epilogue", Epilogue.FULL))
                problem = Problem(Drawn(*(int(row[axis]) for axis in "mnk"), *kind), path.name)
                if row["tile"] != "torch":
                    times[problem][row["tile"]] = float(row["us"])
    found = []
    for problem, by_tile in times.items():
        for tile, us in by_tile.items():
            if (config := _named(problem.spec).get(tile)) is not None:
                work = work_of(Tiled(problem.spec, config), problem.sizes, ARCH.target.sm_count)
                found.append(Timed(problem, config, work, us, us / min(by_tile.values())))
    return found


class Fit:
    """The constants, as logarithms, so that they stay positive, and the errors. Their initial values are the
    target's or, if some tiles are kept, those of the most similar kept tile."""

    def __init__(self, cuts: Sequence[Cut], kept: Collection[Cut] = ()) -> None:
        """The constants of the tiles in `kept`, and those of memory where there are any, stay as they
        are."""
        self.kept = kept
        self.index = {cut: place for place, cut in enumerate(cuts)}
        first = [self._first(cut) for cut in cuts]
        *known, errors, in_waves = zip(*first, strict=True)
        self.errors = {cut: error or USUAL_ERROR for cut, error in zip(cuts, errors, strict=True)}
        self.in_waves = torch.tensor(in_waves)
        self.tiles = [torch.tensor(part).clamp(min=0.02).log().requires_grad_() for part in known]
        self.similar = [part.detach().clone() for part in self.tiles]
        timing = ARCH.target.timing
        memory = (timing.beyond_us, timing.bytes_per_us) if kept else (0.006, 4.0e6)
        self.beyond, self.bandwidth = (
            torch.tensor(math.log(each), requires_grad=not kept) for each in memory
        )
        free = torch.tensor([float(cut not in kept) for cut in cuts])
        for part in self.tiles:
            part.register_hook(free.mul)

    def _first(self, cut: Cut) -> TileTime:
        if cut in self.kept:
            return time_of(ARCH, cut)
        if not self.kept:
            return time_of(ARCH, cut)._replace(in_waves=1.0)
        similar = time_of(ARCH, near := nearest(self.kept, cut))
        time = similar.of_area(cut.mma_m * cut.mma_n / (near.mma_m * near.mma_n))
        return time._replace(in_waves=1.0)

    def predicted(self, timed: Sequence[Timed], careful: bool = False) -> Tensor:
        """Logarithms of the microseconds. With `careful`, the constants of tiles are too short by their
        errors."""
        place = torch.tensor([self.index[each.cut] for each in timed])
        work = Work(*(torch.tensor([float(x) for x in field]) for field in zip(*(t.work for t in timed))))  # noqa: B905
        times = torch.tensor([1 + self.errors[each.cut] if careful else 1.0 for each in timed])
        parts = [times * part.exp()[place] for part in self.tiles]
        tile = TileTime(*parts, in_waves=self.in_waves[place])
        return work.microseconds(
            tile, self.beyond.exp(), self.bandwidth.exp(), ARCH.target.timing.l2_bytes_per_us
        ).log()

    def learn(self, timed: Sequence[Timed]) -> Fit:
        """Fits the constants to timings, and then the errors."""
        group = _places(timed)
        us, slower = (torch.tensor([getattr(each, name) for each in timed]) for name in ("us", "slower"))
        weight = slower**-2 * (us / slower / 2).log2()
        total = torch.zeros(len(timed)).index_add(0, group, weight)
        memory = [] if self.kept else [self.beyond, self.bandwidth]
        constants = [*self.tiles, *memory]
        optimizer = torch.optim.Adam(constants, 0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, STEPS * 6 // 10, 0.25)
        for _ in range(STEPS):
            error = self.predicted(timed) - us.log()
            shared = torch.zeros(len(timed)).index_add(0, group, error * weight) / total
            loss = _weighted(error - shared[group], weight) + SHARED_WEIGHT * _weighted(error, weight)
            moved = sum(
                ((part - first) ** 2).sum() for part, first in zip(self.tiles, self.similar, strict=True)
            )
            loss += SIMILAR_WEIGHT / len(timed) * moved
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        return self.take_errors(timed)

    @torch.no_grad()
    def take_errors(self, timed: Sequence[Timed], kept: Collection[Cut] | None = None) -> Fit:
        """Takes the errors of tiles from timings, those in `kept` excepted."""
        kept = self.kept if kept is None else kept
        cuts = {each.cut for each in timed}.difference(kept)
        timed = [each for each in timed if each.slower < NEAR]
        group = _places(timed)
        error = torch.tensor([each.us for each in timed]).log() - self.predicted(timed)
        weight = torch.tensor([(NEAR - each.slower) / (NEAR - 1) for each in timed])
        shared, total = (
            torch.zeros(len(timed)).index_add(0, group, each) for each in (weight * error, weight)
        )
        squares = weight * (error - (shared / total)[group]) ** 2
        for cut in cuts:
            own = torch.tensor([each.cut == cut for each in timed])
            square = squares[own].sum() + USUAL_COUNT * USUAL_ERROR**2
            self.errors[cut] = math.sqrt(square / (weight[own].sum() + USUAL_COUNT))
        self._limit(timed, kept)
        return self

    def _limit(self, timed: Sequence[Timed], kept: Collection[Cut]) -> None:
        """Sets `in_waves` of tiles that were seldom timed in several waves, those in `kept` excepted: none
        may be predicted to take less time there, for each element, than all that were."""
        _, _, k, busy, _ = (part.exp() for part in self.tiles)
        rate = (k + busy) / torch.tensor([cut.mma_m * cut.mma_n for cut in self.index])
        waves = Counter(each.cut for each in timed if each.work.waves > 1)
        fixed = torch.tensor([cut in kept for cut in self.index])
        often = torch.tensor([waves[cut] >= SEVERAL for cut in self.index])
        known = torch.where(fixed, self.in_waves == 1, often)
        limit = (rate[known].min() / rate).clamp(min=1.0)
        self.in_waves = torch.where(fixed, self.in_waves, torch.where(known, 1.0, limit))

    @torch.no_grad()
    def chosen(self, timed: Sequence[Timed]) -> dict[Problem, float]:
        """How many times as long the chosen tile takes as the fastest one."""
        found: dict[Problem, tuple[float, float]] = {}
        for each, us in zip(timed, self.predicted(timed, careful=True).tolist(), strict=True):
            if each.config in _offered(each.problem.spec):
                found[each.problem] = min((us, each.slower), found.get(each.problem, (math.inf, 0.0)))
        return {problem: slower for problem, (_, slower) in found.items()}


def _places(timed: Sequence[Timed]) -> Tensor:
    """For each timing, the number of its problem."""
    places = {problem: place for place, problem in enumerate(dict.fromkeys(each.problem for each in timed))}
    return torch.tensor([places[each.problem] for each in timed])


def _weighted(error: Tensor, weight: Tensor) -> Tensor:
    return (huber_loss(error, torch.zeros_like(error), delta=DELTA, reduction="none") * weight).mean()


def mean(ratios: Collection[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def halves(timed: Sequence[Timed]) -> Iterator[tuple[list[Timed], list[Timed]]]:
    """Both halves of the problems, each beside the other half. Problems of equal sizes are in one half."""
    sizes = list(dict.fromkeys(each.problem.drawn for each in timed))
    for half in (0, 1):
        left_out = set(sizes[half::2])
        yield (
            [each for each in timed if each.problem.drawn not in left_out],
            [each for each in timed if each.problem.drawn in left_out],
        )


def judge(timed: Sequence[Timed], cuts: Sequence[Cut]) -> None:
    """Prints how many times as long the chosen tile takes as the fastest one."""
    by_problem: dict[Problem, dict[TileConfig, float]] = defaultdict(dict)
    for each in timed:
        by_problem[each.problem][each.config] = each.slower
    written = {}
    for problem, slower in by_problem.items():
        if able := [config for config in _offered(problem.spec) if config in slower]:
            written[problem] = slower[fastest(able, problem.spec, problem.sizes, ARCH.target.sm_count)]
    left_out: dict[Problem, float] = {}
    for others, half in halves(timed):
        left_out |= Fit(cuts, cuts).take_errors(others, kept=()).chosen(half)
    for file in sorted({problem.file for problem in written}):
        own = [problem for problem in written if problem.file == file]
        means = (mean([ratios[problem] for problem in own]) for ratios in (written, left_out))
        print(f"{file}: {len(own)} problems,", *(f"{ratio:.4f}" for ratio in means))
    print(f"all {len(written)}:", *(f"{mean(ratios.values()):.4f}" for ratios in (written, left_out)))


def sources(files: Sequence[str], problems: int, only: str | None, errors: bool) -> str:
    """The docstring of the module with the constants. It keeps the files whose constants and errors are
    kept."""
    own = "\n".join([*(f"benchmarks/results/{name}," for name in files), f"{problems} problems"])
    before = (h200.__doc__ or "").removesuffix(f" {LAST}\n")
    if only:
        return f"{before}\nThe tiles {only} are fitted to\n{own}. {LAST}"
    if errors:
        fitted = re.sub(rf"\n{ERRORS}( these\.|\n(.+,\n)+\d+ problems\.)", "", before)
        of = " these" if fitted.endswith(f"{own}.") else f"\n{own}"
        return f"{fitted}\n{ERRORS}{of}. {LAST}"
    first = "The cost model of an H200, as `benchmarks/fit.py` writes it. It is fitted to"
    return f"{first}\n{own} in fp8 and bf16, most of them drawn. {LAST}"


def text_of(fit: Fit, docstring: str) -> str:
    """The module with the constants."""
    tiles = [part.exp().tolist() for part in fit.tiles]
    lines = []
    for cut, place in sorted(fit.index.items()):
        names = [f"{cut.mma_m}, {cut.mma_n}"]
        names += [
            f"{name}={value}"
            for name, value in cut._asdict().items()
            if name in Cut._field_defaults and value != Cut._field_defaults[name]
        ]
        times = ", ".join(f"{part:.3f}" for part in (*(part[place] for part in tiles), fit.errors[cut]))
        if (in_waves := fit.in_waves[place].item()) > 1:
            times += f", in_waves={in_waves:.3g}"
        lines.append(f"        Cut({', '.join(names)}): TileTime({times}),")
    return "\n".join(
        [
            f'"""{docstring}',
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
            "    # CTAs received up to 12.2 TB/s on an H200, up to 11.1 on an H100 (benchmarks/findings.md).",
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
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--only", metavar="PATTERN", help="fit only tiles whose names match")
    how.add_argument(
        "--errors", action="store_true", help="leave the constants, and write the errors of tiles"
    )
    how.add_argument("--judge", action="store_true", help="print how good the choice is")
    arguments = parser.parse_args()
    timed = read(arguments.files)
    listed = set(ARCH.target.timing.tiles)
    if arguments.judge:
        judge(timed, sorted({each.cut for each in timed} | listed))
        return
    kept: set[Cut] = set()
    if arguments.only:
        fitted = {each.cut for each in timed if re.fullmatch(arguments.only, each.config.name)}
        kept = listed - fitted
        timed = [each for each in timed if each.cut in kept | fitted]
    if arguments.errors:
        kept = listed
        timed = [each for each in timed if each.cut in kept]
    cuts = sorted({each.cut for each in timed} | kept)
    problems = len({each.problem.drawn for each in timed})
    if arguments.errors:
        fit = Fit(cuts, kept).take_errors(timed, kept=())
    else:
        for half, (others, own) in enumerate(halves(timed)):
            loss = mean(Fit(cuts, kept).learn(others).chosen(own).values())
            print(f"half {half}: the model's tile takes {loss:.3f} times the fastest's, of problems left out")
        fit = Fit(cuts, kept).learn(timed)
        print(f"all {problems} problems: {mean(fit.chosen(timed).values()):.3f}")
    names = [path.name for path in arguments.files]
    TARGET_FILE.write_text(text_of(fit, sources(names, problems, arguments.only, arguments.errors)))
    print(f"written: {TARGET_FILE.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
