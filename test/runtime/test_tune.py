"""Tuning without a GPU: what is tried, what wins, what is remembered, and what a user sees of it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._dynamo.utils import counters

from cute_backend import config, planning
from cute_backend.errors import BuildError
from cute_backend.planning import (
    MAX_CANDIDATES,
    Alignment,
    Arch,
    Plan,
    Sizes,
    TileConfig,
    candidates,
    choose,
    doubted,
    plan,
)
from cute_backend.planning.doubt import DOUBTED
from cute_backend.runtime.arguments.device import Device
from cute_backend.runtime.compiling import rungs
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.tuning import timing, trials, tune
from cute_backend.runtime.tuning.jobs import Job
from cute_backend.runtime.tuning.timing import GpuTimer, Run, Timings
from cute_backend.runtime.tuning.tune import Tuner
from cute_backend.runtime.tuning.tuning_results import NOISE, Key, Records, Result, TunedFile
from cute_backend.signature import Use, signature
from cute_backend.spec import EpilogueSpec, ProductKind
from support.runtime.handmade import make_spec

GPU = Device(-1, Arch.SM90A, 132, "a GPU")
SPEC = make_spec()
SIZES = 4000, 4096, 512
JOB = Job(SPEC, *SIZES)
TRIED = candidates(Arch.SM90A, SPEC, Sizes(*SIZES), 132)
WINNER = TRIED[3]


def planned(tile: TileConfig, spec: EpilogueSpec = SPEC) -> Plan:
    return plan(spec, tile, Alignment.TMA)


@dataclass
class FakeTimer:
    """A timer with given results: every configuration takes 100 us, some another time, or fail."""

    times: dict[TileConfig, float] = field(default_factory=lambda: {WINNER: 70.0})
    failing: tuple[TileConfig, ...] = ()
    unfused: float | Exception | None = None
    products: float | None = None
    error: Exception | None = None
    asked: list[tuple[tuple[int, int, int], list[Kernel]]] = field(default_factory=list)
    groups: list[int | None] = field(default_factory=list)
    free: int = 1000

    def free_bytes(self) -> int:
        return self.free

    def __call__(
        self,
        sizes: tuple[int, int, int],
        functions: Mapping[Kernel, Any],
        unfused: Run | None,
        groups: int | None = None,
        products: bool = False,
    ) -> Timings:
        self.asked.append((sizes, list(functions)))
        self.groups.append(groups)
        if self.error is not None:
            raise self.error
        kernels = {
            kernel: {planned(tile): us for tile, us in self.times.items()}.get(kernel.plan, 100.0)
            for kernel in functions
            if kernel.plan not in map(planned, self.failing)
        }
        inductors = None if unfused is None else self.unfused
        if isinstance(inductors, Exception):
            raise inductors
        return Timings(kernels, inductors, self.products if products else None)


@dataclass
class FakeBuild:
    """Hands out functions, except for what is said not to compile."""

    broken: tuple[TileConfig, ...] = ()
    batches: list[list[Kernel]] = field(default_factory=list)

    def __call__(self, kernels: Sequence[Kernel], *, built: Callable[[], None]) -> dict[Kernel, Any]:
        self.batches.append(list(kernels))
        outcomes: dict[Kernel, Any] = {}
        for kernel in kernels:
            broken = kernel.plan in map(planned, self.broken)
            outcomes[kernel] = BuildError(f"{kernel.name} is broken") if broken else print
            built()
        return outcomes


@dataclass
class Background:
    """Builds that go on while the program does: what was begun, what is not at hand yet, and what of that is
    being built."""

    begun: list[Kernel] = field(default_factory=list)
    late: set[Plan] = field(default_factory=set)
    building: set[Plan] = field(default_factory=set)


@pytest.fixture(autouse=True)
def background(monkeypatch: pytest.MonkeyPatch) -> Background:
    found = Background()
    monkeypatch.setattr(rungs, "_failed", set())
    monkeypatch.setattr(trials, "begin_alone", found.begun.extend)
    monkeypatch.setattr(trials, "most_at_once", lambda: 16)
    for module in (tune, trials):
        monkeypatch.setattr(module, "is_at_hand", lambda kernel: kernel.plan not in found.late)
    monkeypatch.setattr(tune, "is_begun", lambda kernel: kernel.plan in found.building)
    return found


def memory_in(folder: Path) -> Records:
    return Records([TunedFile(KernelCache(folder))])


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notices, "_warned", set())
    counters.clear()
    yield
    counters.clear()


def tuner(folder: Path, timer: FakeTimer, build: FakeBuild | None = None, **how: Any) -> Tuner:
    return Tuner(GPU, timer, memory_in(folder), build or FakeBuild(), **how)


def counted() -> dict[str, int]:
    return dict(counters["cute_backend"])


# What wins


def test_the_fastest_candidate_wins_and_is_remembered(tmp_path: Path) -> None:
    timer, build = FakeTimer(), FakeBuild()
    (result,) = tuner(tmp_path, timer, build).tune([JOB])
    assert result == Result(WINNER, 70.0, None) and not result.unfused_wins
    ((sizes, timed),) = timer.asked
    assert sizes == SIZES
    assert [kernel.plan for kernel in timed] == list(dict.fromkeys(map(planned, TRIED))) and len(
        timed
    ) <= MAX_CANDIDATES
    assert {kernel.plan.alignment for kernel in timed} == {Alignment.TMA}
    assert build.batches == [
        [*timed, Kernel(plan(SPEC, TRIED[0], Alignment.PLAIN))]
    ]  # launches may also ask for these
    assert counted() == {"tuned": 1}

    again = FakeTimer()
    assert tuner(tmp_path, again, build).tune([JOB]) == [result]
    assert again.asked == [] and len(build.batches) == 1


def test_a_result_of_an_m_that_varies_serves_its_bucket(tmp_path: Path) -> None:
    timer = FakeTimer()
    tune = tuner(tmp_path, timer)
    (result,) = tune.tune([Job(SPEC, 4000, *SIZES[1:], dynamic=True)])
    assert tune.recall(Job(SPEC, 3585, *SIZES[1:], dynamic=True)) == result
    assert tune.recall(Job(SPEC, 4000, *SIZES[1:])) is None  # its tile may be as wide as its rows


def test_what_is_in_doubt_is_timed_unless_more_is_known(tmp_path: Path) -> None:
    sizes = 257, 5632, 2048
    job = Job(SPEC, *sizes)
    few = doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132)
    assert 1 < len(few) <= DOUBTED and few[0] == choose(Arch.SM90A, SPEC, Sizes(*sizes), 132)
    timer, build = FakeTimer({few[1]: 70.0}), FakeBuild()
    tune = tuner(tmp_path, timer, build)
    assert tune.measure([job, job]) == ([Result(few[1], 70.0, None, thorough=False)] * 2, [])
    assert [[kernel.plan for kernel in timed] for _, timed in timer.asked] == [[*map(planned, few)]]
    assert build.batches == [timer.asked[0][1]] and counted() == {"measured": 1}

    (result,) = tune.tune([job])
    assert len(timer.asked) == 2 and len(timer.asked[1][1]) > len(few)
    assert result is not None and result.thorough and tune.measure([job]) == ([result], [])
    assert len(timer.asked) == 2 and counted() == {"measured": 1, "tuned": 1}


@pytest.mark.parametrize(
    ("unfused", "wins"), [(70 * (1 - NOISE) - 0.1, True), (70 * (1 - NOISE) + 0.1, False)]
)
def test_inductors_own_code_wins_only_beyond_noise(tmp_path: Path, unfused: float, wins: bool) -> None:
    job = Job(SPEC, *SIZES, unfused=lambda: lambda: print)
    (result,) = tuner(tmp_path, FakeTimer(unfused=unfused)).tune([job])
    assert result is not None and result.unfused_us == unfused and result.unfused_wins is wins


@pytest.mark.parametrize(
    ("products", "compared"),
    [(None, True), (70 * (1 - NOISE) - 0.1, True), (70 * (1 - NOISE) + 0.1, False)],
    ids=["torch has none", "faster", "slower"],
)
def test_inductors_code_is_compiled_only_if_torchs_products_are_faster(
    tmp_path: Path, products: float | None, compared: bool
) -> None:
    """Measuring times these first. The second timing is of the best kernel."""
    sizes = 257, 5632, 2048
    best = doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132)[1]
    timer = FakeTimer({best: 70.0}, unfused=60.0, products=products)
    job = Job(SPEC, *sizes, unfused=lambda: lambda: print)
    ((result,), late) = tuner(tmp_path, timer).measure([job])
    assert result == Result(best, 70.0, 60.0 if compared else None, thorough=False) and late == []
    (_, first), *again = timer.asked
    assert len(first) > 1
    assert [[kernel.plan for kernel in timed] for _, timed in again] == [[planned(best)]] * compared


def test_what_inductors_code_has_no_memory_for_is_decided_without_it(tmp_path: Path) -> None:
    timer = FakeTimer(unfused=torch.OutOfMemoryError("no room"))
    job = Job(SPEC, 257, 5632, 2048, unfused=lambda: lambda: print)
    ((result,), _) = tuner(tmp_path, timer).measure([job])
    assert result is not None and result.unfused_us is None
    assert counted() == {"measured": 1, "unfused_not_timed": 1}


def test_several_regions_are_built_together_and_each_problem_once(tmp_path: Path) -> None:
    other = make_spec(second_store=True)
    timer, build = FakeTimer(), FakeBuild()
    results = tuner(tmp_path, timer, build).tune([JOB, Job(other, *SIZES), JOB, Job(SPEC, 64, *SIZES[1:])])
    assert all(results) and results[0] == results[2]
    assert len(build.batches) == 1
    assert [sizes for sizes, _ in timer.asked] == [SIZES, SIZES, (64, *SIZES[1:])]
    assert counted() == {"tuned": 3}


def test_a_problem_whose_outputs_no_tma_can_write_is_tuned_as_it_is_launched(tmp_path: Path) -> None:
    timer = FakeTimer()
    tuner(tmp_path, timer).tune([Job(SPEC, 4096, 4100, 512)])
    assert {kernel.plan.alignment for kernel in timer.asked[0][1]} == {Alignment.PLAIN}


def test_groups_of_rows_are_timed_in_two_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one size, and with half of the rows in one group; a time is the mean of both."""
    spec = replace(SPEC, accumulators=(replace(SPEC.product, kind=ProductKind.GROUPED),))
    kernel = Kernel(plan(spec, choose(Arch.SM90A, spec, Sizes(64, 128, 64, groups=4), 132), Alignment.TMA))
    place = next(i for i, each in enumerate(signature(spec)) if each.use is Use.OFFSETS)
    splits, generator = list[list[int]](), torch.Generator

    def medians(runs: Sequence[Run], device: torch.device) -> list[float]:
        for run in runs:
            run()
        return [10.0 * len(splits)]

    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(timing, "max_active_clusters", lambda index, size: 66)
    monkeypatch.setattr(timing, "_works", lambda run: True)
    monkeypatch.setattr(timing, "_medians", medians)
    functions: Any = {kernel: lambda *arguments: splits.append(arguments[place].tolist())}
    timed = GpuTimer(replace(GPU, index=0))._time((64, 128, 64), functions, None, groups=4)
    assert splits == [[16, 32, 48, 64], [32, 42, 53, 64]] and timed.kernels == {kernel: 15.0}


def test_groups_of_rows_are_tuned_by_their_number(tmp_path: Path) -> None:
    """The first candidate is what the model chooses for that number of groups; the result serves no other."""
    spec = replace(SPEC, accumulators=(replace(SPEC.product, kind=ProductKind.GROUPED),))
    few, many = (Job(spec, 4096, 4096, 512, groups=groups) for groups in (4, 512))
    timer = FakeTimer({})
    tune = tuner(tmp_path, timer)
    tune.tune([few, many])
    assert timer.groups == [4, 512]
    for job, (_, kernels) in zip((few, many), timer.asked, strict=True):
        chosen = choose(Arch.SM90A, spec, Sizes(4096, 4096, 512, groups=job.groups), 132)
        assert kernels[0].plan == plan(spec, chosen, Alignment.TMA)
    assert timer.asked[0][1][0] != timer.asked[1][1][0]
    keys = [Key(spec, Alignment.TMA, 4096, 4096, 512, GPU.model, groups) for groups in (4, 5)]
    assert [list(memory_in(tmp_path).winners([key])) for key in keys] == [[4096], []]


def test_what_another_process_timed_meanwhile_is_not_timed_again(tmp_path: Path) -> None:
    found = Result(TRIED[2], 50.0, None)

    def build(kernels: Sequence[Kernel], *, built: Callable[[], None]) -> dict[Kernel, Any]:
        tuner(tmp_path, FakeTimer({TRIED[2]: 50.0})).tune([JOB])
        return FakeBuild()(kernels, built=built)

    timer = FakeTimer()
    assert Tuner(GPU, timer, memory_in(tmp_path), build).tune([JOB]) == [found] and timer.asked == []


def test_what_another_process_timed_meanwhile_is_not_late(tmp_path: Path, background: Background) -> None:
    found = Result(TRIED[2], 50.0, None, thorough=False)
    memory = memory_in(tmp_path)

    def unfused() -> Callable[[], Run]:
        memory.put({Tuner(GPU, FakeTimer(), memory)._key(JOB): found})
        return lambda: print

    background.late |= set(map(planned, doubted(Arch.SM90A, SPEC, Sizes(*SIZES), 132)))
    assert tuner(tmp_path, FakeTimer()).measure([replace(JOB, unfused=unfused)]) == ([found], [])
    assert counted() == {}


def test_an_interrupt_does_not_wait_for_the_compiler(tmp_path: Path) -> None:
    ended, may_end = threading.Event(), threading.Event()

    def build(kernels: Sequence[Kernel], *, built: Callable[[], None]) -> dict[Kernel, Any]:
        may_end.wait(60)
        ended.set()
        return {}

    def interrupted() -> Callable[[], Run]:
        raise KeyboardInterrupt

    if_it_waits = threading.Timer(5.0, may_end.set)
    if_it_waits.start()
    with pytest.raises(KeyboardInterrupt):
        Tuner(GPU, FakeTimer(), memory_in(tmp_path), build).tune([replace(JOB, unfused=interrupted)])
    assert not ended.is_set()
    if_it_waits.cancel()
    may_end.set()


# What can't win


def test_what_does_not_build_or_spills_or_fails_to_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, spilling, failing = TRIED[3], TRIED[1], TRIED[2]
    monkeypatch.setattr(tune, "spill_bytes", lambda kernel: kernel.plan == planned(spilling))
    timer = FakeTimer({broken: 1.0, spilling: 2.0, failing: 3.0, TRIED[4]: 50.0}, failing=(failing,))
    with pytest.warns(RuntimeWarning, match="tuning leaves out a candidate: .* is broken"):
        (result,) = tuner(tmp_path, timer, FakeBuild(broken=(broken,))).tune([JOB])
    assert result == Result(TRIED[4], 50.0, None)
    assert counted() == {"tuned": 1, "candidates_failed": 1, "candidates_spilled": 1}


def spills(monkeypatch: pytest.MonkeyPatch, *tiles: TileConfig) -> None:
    for module in (rungs, tune):
        monkeypatch.setattr(module, "spill_bytes", lambda kernel: 8 * (kernel.plan in map(planned, tiles)))


def test_what_stands_of_the_tiles_in_doubt_is_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    """A program waits for no rungs while a tile stands."""
    sizes = 257, 5632, 2048
    spilling, sound, broken = doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132)
    spills(monkeypatch, spilling)
    monkeypatch.setattr(rungs, "_failed", {Kernel(planned(broken))})
    background.late |= {planned(sound)}
    timer = FakeTimer()
    measuring = tuner(tmp_path, timer)
    (none,), late = measuring.measure([Job(SPEC, *sizes)])
    measuring.begin(late)
    assert none is None and [kernel.plan for kernel in background.begun] == [planned(sound)]
    background.late.clear()
    (result,), _ = measuring.measure([Job(SPEC, *sizes)])
    ((_, timed),) = timer.asked
    assert [kernel.plan for kernel in timed] == [planned(sound)]
    assert result is not None and result.config == sound


def test_what_runs_in_place_of_a_tile_in_doubt_is_timed_if_none_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    sizes = 257, 5632, 2048
    broken, *spilling = tiles = doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132)
    spills(monkeypatch, *spilling)
    monkeypatch.setattr(rungs, "_failed", {Kernel(planned(broken))})
    lower = list(dict.fromkeys(planning.rungs(planned(tile))[1] for tile in tiles))
    background.late |= set(lower)
    timer = FakeTimer({lower[-1].tile: 70.0})
    measuring = tuner(tmp_path, timer)
    (none,), late = measuring.measure([Job(SPEC, *sizes)])
    measuring.begin(late)
    assert none is None and [kernel.plan for kernel in background.begun] == lower
    background.late.clear()
    (result,), _ = measuring.measure([Job(SPEC, *sizes)])
    ((_, timed),) = timer.asked
    assert [kernel.plan for kernel in timed] == lower
    assert result is not None and result.config in tiles and result.us == 70.0


def test_measuring_goes_on_without_kernels_that_are_late(tmp_path: Path, background: Background) -> None:
    """A region one of whose tiles is not built has the model's choice. Measuring begins no kernels: only who
    asks for them times them."""
    other = make_spec(second_store=True)
    sizes = 257, 5632, 2048
    jobs = [Job(spec, *sizes) for spec in (SPEC, other)]
    tiles = doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132)
    background.late |= {planned(tiles[1])}
    timer, build = FakeTimer(), FakeBuild()
    measuring = tuner(tmp_path, timer, build)
    (none, result), late = measuring.measure(jobs)
    assert none is None and result is not None and [job.spec for job in late] == [SPEC]
    assert counted() == {"measured": 1} and background.begun == []
    measuring.begin(late)
    assert [kernel.plan for kernel in background.begun] == [planned(tiles[1])]
    ((_, timed),) = timer.asked
    assert {kernel.plan.spec for kernel in timed} == {other}


def test_a_region_that_was_late_is_timed_once_its_kernels_are_built(
    tmp_path: Path, background: Background
) -> None:
    sizes = 257, 5632, 2048
    slow = doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132)[1]
    background.late |= {planned(slow)}
    kept, compilations = list[Run](), list[Run]()
    job = Job(
        SPEC, *sizes, unfused=lambda: kept.append(print) or (lambda: compilations.append(print) or print)
    )
    timer = FakeTimer({slow: 70.0}, unfused=90.0)
    measuring = tuner(tmp_path, timer)
    for _ in range(2):
        (none,), (job,) = measuring.measure([job])
        assert none is None and timer.asked == [] and len(kept) == 1, "the graph is there only now"
    background.late.clear()
    assert measuring.measure([job]) == ([Result(slow, 70.0, 90.0, thorough=False)], [])
    assert counted() == {"measured": 1} and len(compilations) == len(kept) == 1


def test_what_is_late_waits_for_the_kernels_that_were_begun(tmp_path: Path, background: Background) -> None:
    """And begins no others."""
    sizes = 257, 5632, 2048
    first, *others = map(planned, doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132))
    background.late |= {first, *others}
    batches: list[list[Plan]] = []

    def build(kernels: Sequence[Kernel], *, built: Callable[[], None]) -> dict[Kernel, Any]:
        batches.append([kernel.plan for kernel in kernels])
        background.late -= set(batches[-1])
        background.building.clear()
        return FakeBuild()(kernels, built=built)

    timer = FakeTimer()
    measuring = Tuner(GPU, timer, memory_in(tmp_path), build)
    background.building |= {*others}
    (none,), (job,) = measuring.measure_late([Job(SPEC, *sizes)])
    assert none is None and batches == [others] and timer.asked == [] and background.begun == []
    background.building |= {first}
    (result,), late = measuring.measure_late([job])
    assert result is not None and late == [] and batches[1:] == [[first], [first, *others]]


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_candidate_that_fails_is_named_and_the_others_are_timed(
    has_failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    """Measuring waits for it, or it has failed while Inductor worked. No launch builds it again."""
    sizes = 257, 5632, 2048
    first, second, *_ = doubted(Arch.SM90A, SPEC, Sizes(*sizes), 132)
    monkeypatch.setattr(rungs, "_failed", {Kernel(planned(second))} if has_failed else set())
    background.building |= {planned(second)}
    background.late |= {planned(second)}

    def build(kernels: Sequence[Kernel], *, built: Callable[[], None]) -> dict[Kernel, Any]:
        background.building.clear()
        return FakeBuild(broken=(second,))(kernels, built=built)

    timer = FakeTimer({first: 70.0})
    with pytest.warns(RuntimeWarning, match="leaves out a candidate: .* is broken"):
        (result,), late = Tuner(GPU, timer, memory_in(tmp_path), build).measure_late([Job(SPEC, *sizes)])
    assert result is not None and result.config == first and late == []
    assert planned(second) not in [kernel.plan for kernel in timer.asked[0][1]]
    assert counted() == {"candidates_failed": 1, "measured": 1}
    assert not rungs.stands(Kernel(planned(second)))


def test_candidates_are_begun_by_rank_and_for_no_more_regions_than_there_are_cores_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    sizes = [(m, 5632, 2048) for m in (257, 300, 513, 700)]
    tiles = [doubted(Arch.SM90A, SPEC, Sizes(*each), 132) for each in sizes]
    assert len(tiles[0]) == len(tiles[1]) == 3
    background.late |= {planned(tile) for each in tiles for tile in each}
    for cores, begun in ((1, 0), (2, 0), (3, 1), (4, 2)):
        background.begun.clear()
        monkeypatch.setattr(trials, "most_at_once", lambda cores=cores: cores)
        tuner(tmp_path, FakeTimer()).begin([Job(SPEC, *each) for each in sizes])
        ranks = zip(*tiles[:begun], strict=True)
        expected = dict.fromkeys(planned(tile) for rank in ranks for tile in rank)
        assert [kernel.plan for kernel in background.begun] == list(expected)


def test_measuring_waits_for_no_other_process_and_tuning_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that is left because another process times is timed once that has ended."""
    for name in ("_TUNING_LOCK_S", "_MEASURING_LOCK_S"):
        monkeypatch.setattr(tune, name, 0.05)
    timer = FakeTimer()
    measuring = tuner(tmp_path, timer)
    with memory_in(tmp_path).exclusively(0.0):
        (none,), late = measuring.measure([JOB])
    assert none is None and timer.asked == []
    assert measuring.measure(late)[1] == [] and len(timer.asked) == 1
    with memory_in(tmp_path).exclusively(0.0):
        (result,) = measuring.tune([JOB])
    assert result is not None and result.thorough and len(timer.asked) == 2


def test_a_kernel_that_spills_in_every_tile_is_timed_against_inductors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what would run, and may be slow."""
    for module in (rungs, tune):
        monkeypatch.setattr(module, "spill_bytes", lambda kernel: 8)
    job = Job(SPEC, 257, 5632, 2048, unfused=lambda: lambda: print)
    ((result,), _) = tuner(tmp_path, FakeTimer(unfused=60.0)).measure([job])
    assert result is not None and result.unfused_wins and counted() == {"measured": 1}


@pytest.mark.parametrize(
    ("timer", "build", "reason", "sentence"),
    [
        (FakeTimer(), FakeBuild(broken=TRIED), "untuned_failed", "none of its candidates runs"),
        (FakeTimer(failing=TRIED), FakeBuild(), "untuned_failed", "none of its candidates runs"),
    ],
    ids=["nothing builds", "nothing runs"],
)
@pytest.mark.filterwarnings("ignore:cute_backend. tuning leaves out a candidate")
def test_where_nothing_can_be_timed_it_is_counted_and_told_and_not_remembered(
    tmp_path: Path, timer: FakeTimer, build: FakeBuild, reason: str, sentence: str
) -> None:
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=sentence) if not counted() else _nothing():
            assert tuner(tmp_path, timer, build).tune([JOB]) == [None]
    assert counted()[reason] == 2


def test_what_does_not_fit_into_memory_is_tried_again_where_more_is_free(tmp_path: Path) -> None:
    timer, build = FakeTimer(error=torch.OutOfMemoryError("no room")), FakeBuild()

    def tuned() -> Result | None:
        """The result of another process."""
        (result,) = tuner(tmp_path, timer, build).tune([JOB])
        return result

    with pytest.warns(RuntimeWarning, match="do not fit"):
        assert tuned() is None
    timer.free = 1050
    assert tuned() is None
    assert counted() == {"untuned_memory": 2} and len(build.batches) == len(timer.asked) == 1
    timer.free, timer.error = 1200, None
    assert tuned() == Result(WINNER, 70.0, None)
    timer.free = 10
    assert tuned() == Result(WINNER, 70.0, None)
    assert counted() == {"untuned_memory": 2, "tuned": 1} and len(timer.asked) == 2


def test_a_result_is_kept_if_more_does_not_fit(tmp_path: Path) -> None:
    """Further candidates of tuning may have a workspace."""
    ((measured,), _) = tuner(tmp_path, FakeTimer()).measure([JOB])
    timer = FakeTimer(error=torch.OutOfMemoryError("no room"))
    with pytest.warns(RuntimeWarning, match="do not fit"):
        assert tuner(tmp_path, timer).tune([JOB]) == [measured]


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_inductors_code_that_does_not_compile_is_counted_and_told(tmp_path: Path) -> None:
    def unfused() -> Run:
        raise AssertionError("Inductor stumbles\nat length")

    with pytest.warns(RuntimeWarning, match="by itself: AssertionError: Inductor stumbles$"):
        (result,) = tuner(tmp_path, FakeTimer(unfused=1.0)).tune([Job(SPEC, *SIZES, unfused=unfused)])
    assert result == Result(WINNER, 70.0, None)
    assert counted() == {"tuned": 1, "unfused_not_timed": 1}


def test_nothing_is_found_out_by_asking_what_is_known(tmp_path: Path) -> None:
    timer, build = FakeTimer(), FakeBuild()
    asked = tuner(tmp_path, timer, build)
    assert asked.recall(JOB) is None and not timer.asked and not build.batches
    (result,) = asked.tune([JOB])
    assert asked.recall(JOB) == result


# What a user sees


def progress_of(folder: Path, console: Console, thorough: bool = True) -> None:
    tuning = tuner(folder, FakeTimer(), console=console)
    tuning.tune([JOB]) if thorough else tuning.measure([JOB])


@pytest.mark.parametrize(("thorough", "doing"), [(True, "tuning"), (False, "measuring")])
def test_progress_is_shown_on_a_terminal(thorough: bool, doing: str, tmp_path: Path) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    progress_of(tmp_path, console, thorough)
    assert f"{doing} 1 region: timing" in shown.getvalue()
    assert thorough or "tuning" not in shown.getvalue()


def test_no_progress_where_there_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tuner(tmp_path, FakeTimer()).tune([JOB])
    assert capfd.readouterr() == ("", "")


def test_no_progress_where_it_is_unwanted(tmp_path: Path) -> None:
    shown = io.StringIO()
    with config.patch(quiet=True):
        progress_of(tmp_path, Console(file=shown, force_terminal=True, width=100))
    assert shown.getvalue() == ""


def test_what_is_known_shows_no_progress(tmp_path: Path) -> None:
    progress_of(tmp_path, Console(file=io.StringIO(), force_terminal=True))
    shown = io.StringIO()
    progress_of(tmp_path, Console(file=shown, force_terminal=True))
    assert shown.getvalue() == ""


def test_keys_tell_problems_apart() -> None:
    key = Key(SPEC, Alignment.TMA, 4096, 4096, 512, GPU.model)
    others = [
        Key(make_spec(second_store=True), Alignment.TMA, 4096, 4096, 512, GPU.model),
        Key(SPEC, Alignment.PLAIN, 4096, 4096, 512, GPU.model),
        Key(SPEC, Alignment.TMA, 2048, 4096, 512, GPU.model),
        Key(SPEC, Alignment.TMA, 4096, 512, 4096, GPU.model),
        Key(SPEC, Alignment.TMA, 4096, 4096, 512, "a GPU, 66 SMs"),
        Key(SPEC, Alignment.TMA, 4096, 4096, 512, GPU.model, groups=8),
    ]
    assert key.text not in {other.text for other in others}
    assert (
        choose(Arch.SM90A, SPEC, Sizes(4096, 4096, 512), 132) != WINNER
    )  # else nothing above shows anything
