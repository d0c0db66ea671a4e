"""Launches without a GPU: which kernel serves which operands, what is copied, and that nothing is compiled.

The compiler is replaced by one that hands out Python functions, and the GPU by a description of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend.errors import BuildError
from cute_backend.kinds import reductions
from cute_backend.planning import (
    BUCKETS,
    MOST_CONVERTED_ROWS,
    UNCONSTRAINED,
    Alignment,
    Arch,
    Constraints,
    Plan,
    Sizes,
    TileConfig,
    bucket_of,
    choose,
    covering,
    fastest,
    named,
    plan,
    rungs,
    tile_table,
)
from cute_backend.replay import replay
from cute_backend.runtime.arguments import bind, outputs
from cute_backend.runtime.arguments.device import Device, Grid, UnsupportedDeviceError
from cute_backend.runtime.arguments.operands import check_operands, parse_spec
from cute_backend.runtime.calls import launch as launching
from cute_backend.runtime.calls import op, spec_kernels
from cute_backend.runtime.calls import prepare as preparing
from cute_backend.runtime.calls.call_site import CallSite
from cute_backend.runtime.calls.launch import launch
from cute_backend.runtime.calls.launcher import _LOOKS
from cute_backend.runtime.calls.prepare import prepare
from cute_backend.runtime.compiling import rungs as standing_rungs
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.reach import (
    MAX_KERNELS,
    Problem,
    config_for,
    launched,
    reachable_kernels,
)
from cute_backend.runtime.tuning import winners
from cute_backend.runtime.tuning.tuning_results import Key
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Op,
    Order,
    ProductKind,
    Reduction,
    Store,
    Stride,
    WeightGroups,
)
from support.runtime import launches
from support.runtime.handmade import make_spec
from support.runtime.layouts import check_layouts
from support.runtime.warned import runtime_warnings

GPU = Device(-1, Arch.SM90A, 132, "a GPU")
"""Stands for the CPU, whose index torch gives as -1."""


@dataclass
class Compiler:
    """Records the kernels that were begun or built, the kernels that were waited for, and the kernels and
    operands of every launch."""

    built: list[Kernel] = field(default_factory=list)
    awaited: list[Kernel] = field(default_factory=list)
    batches: int = 0
    launches: list[tuple[Kernel, tuple[Any, ...]]] = field(default_factory=list)
    broken: Callable[[Kernel], bool] = lambda kernel: False
    spilled: dict[Plan, int] = field(default_factory=dict)
    """The bytes that kernels spill once they are built."""

    def begin_batch(self) -> None:
        self.batches += 1

    def begin(self, kernel: Kernel, then: Any) -> None:
        self.built.append(kernel)

    def obtain(self, kernels: Any) -> dict[Kernel, Any]:
        kernels = list(dict.fromkeys(kernels))
        new = [kernel for kernel in kernels if kernel not in self.built]
        self.batches += bool(new)
        self.built += new
        self.awaited += kernels
        outcomes: dict[Kernel, Any] = {}
        for kernel in kernels:
            broken = self.broken(kernel)
            outcomes[kernel] = BuildError(f"{kernel.name} is broken") if broken else self._function(kernel)
        return outcomes

    def _function(self, kernel: Kernel) -> Callable[..., None]:
        """Obeys the contract of a compiled `launch`, on CPU tensors."""

        def function(*arguments: Any) -> None:
            *tensors, clusters = arguments
            assert isinstance(clusters, int)
            check_layouts(kernel, tensors)
            self.launches.append((kernel, arguments))
            spec = kernel.plan.spec
            first_b = 2 if spec.product.kind is ProductKind.GROUPED else 1
            groups = spec.product.weight_groups
            first = first_b + 1 + (0 if groups is None else len(groups.vectors))
            loads = list(tensors[first : first + len(spec.loads)])
            for i, load in enumerate(spec.loads):
                if load.dtype is DType.BOOL:
                    loads[i] = loads[i].view(torch.bool)
            results = replay(spec, tensors[:first_b], tensors[first_b:first], loads)
            for out, result in zip(tensors[first + len(loads) :], results, strict=True):
                out.copy_(result.view(torch.uint8) if result.dtype is torch.bool else result)

        return function

    @property
    def alignments(self) -> list[Alignment]:
        return [kernel.plan.alignment for kernel, _ in self.launches]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    fake = Compiler()
    launches.on(GPU, monkeypatch)
    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr(standing_rungs, "obtain", fake.obtain)
    monkeypatch.setattr(standing_rungs, "begin", fake.begin)
    monkeypatch.setattr(standing_rungs, "is_at_hand", fake.built.__contains__)
    monkeypatch.setattr(standing_rungs, "warn_of_packs", lambda missing: fake.begin_batch())
    monkeypatch.setattr(standing_rungs, "spill_bytes", lambda kernel: fake.spilled.get(kernel.plan))
    monkeypatch.setattr(standing_rungs, "_failed", set())
    for module in (spec_kernels, standing_rungs):
        monkeypatch.setattr(module, "load_known", lambda kernels: {})
    counters.clear()
    yield fake
    counters.clear()


def operands(m: int = 6, n: int = 16, k: int = 8) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(m * 100 + n)
    a = torch.randn(m, k).bfloat16()
    b = torch.randn(n, k).bfloat16().t()
    loads = [torch.randn(()), torch.randn(n), torch.randn(m, 3)[:, 0], torch.randn(m, n).bfloat16()]
    return [a], [b], loads


SPEC = make_spec(second_store=True)


def check(given: tuple[list[Tensor], list[Tensor], list[Tensor]], spec: EpilogueSpec = SPEC) -> list[Tensor]:
    """Launch and compare with the replay of the operands as they were given."""
    results = launch(*given, spec.to_json())
    for result, expected in zip(results, replay(spec, *given), strict=True):
        assert torch.equal(result, expected)
        assert result.dtype is expected.dtype and result.stride() == expected.stride()
    return results


def shifted(tensor: Tensor) -> Tensor:
    """The same values and strides, one element off any alignment."""
    memory = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return memory.copy_(tensor)


# What is compiled, and when


def test_no_launch_compiles_after_the_first(compiler: Compiler) -> None:
    check(operands())
    assert compiler.batches == 1 and 0 < len(compiler.built) <= MAX_KERNELS
    for m in (1, 3, 17, 100, 129, 700, 5000):
        for n in (8, 12, 16, 72):
            check(operands(m, n))
            given = operands(m, n)
            given[2][3] = shifted(given[2][3])
            check(given)
    assert compiler.batches == 1
    assert set(compiler.alignments) == set(Alignment)


def test_an_announced_region_compiles_only_what_it_reaches_and_nothing_at_its_launch(
    compiler: Compiler,
) -> None:
    prepare([Problem(SPEC, 4096, 4096, 512)], -1)
    expected = choose(Arch.SM90A, SPEC, Sizes(4096, 4096, 512), GPU.sm_count)
    assert {kernel.plan for kernel in compiler.built} == {
        plan(SPEC, expected, alignment) for alignment in Alignment
    }
    check(operands(40, 16))  # a size that was not announced is served by what is there
    assert compiler.batches == 1


def test_a_region_that_nobody_announced_compiles_nothing_if_its_kernels_are_at_hand(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that serves a pack for sizes that are not known. No tile of the pack is the one that is
    chosen for these sizes."""
    at_hand = set(reachable_kernels(Problem(SPEC, None, None, None), Arch.SM90A, GPU.sm_count))
    wanted = config_for(Problem(SPEC, 20_000, 16, 8), Alignment.TMA, Arch.SM90A, GPU.sm_count)
    assert wanted not in {kernel.plan.tile for kernel in at_hand}
    functions = {kernel: compiler._function(kernel) for kernel in at_hand}
    for module in (spec_kernels, standing_rungs):
        monkeypatch.setattr(
            module, "load_known", lambda kernels: {k: functions[k] for k in kernels if k in functions}
        )
    monkeypatch.setattr(standing_rungs, "is_at_hand", at_hand.__contains__)
    check(operands(20_000))
    assert compiler.built == [] and compiler.launches[0][0] in at_hand


def of_6_rows(varies: bool) -> TileConfig:
    """The tile for 6 rows: one of 8 rows of the transposed product if M is known, else that of 16 rows."""
    problem = Problem(SPEC, 6, 16, 8, varies=varies)
    return config_for(problem, Alignment.TMA, Arch.SM90A, GPU.sm_count)


@pytest.mark.parametrize("varies", [False, True])
def test_an_m_that_varies_gets_the_kernel_of_its_bucket(varies: bool, compiler: Compiler) -> None:
    assert (of_6_rows(False).tile_n, of_6_rows(True).tile_n) == (8, 64)
    prepare([Problem(SPEC, None if varies else 6, 16, 8)], -1)
    check(operands())
    ((kernel, _),) = compiler.launches
    assert kernel.plan == plan(SPEC, of_6_rows(varies), Alignment.TMA) and compiler.batches == 1


def test_a_region_of_known_m_that_nothing_announced_finds_its_kernel_on_disk(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's cache has the code of a graph, which runs without the pass in another process."""
    there = Kernel(plan(SPEC, of_6_rows(False), Alignment.TMA))
    on_disk = {there: compiler._function(there)}
    monkeypatch.setattr(
        standing_rungs, "load_known", lambda asked: {each: on_disk[each] for each in asked if each in on_disk}
    )
    check(operands())
    assert [kernel for kernel, _ in compiler.launches] == [there] and compiler.batches == 0


def test_several_regions_are_built_in_one_batch(compiler: Compiler) -> None:
    other = make_spec()
    prepare([Problem(SPEC, 64, 4096, 512), Problem(other, 64, 4096, 512), Problem(SPEC, 64, 4096, 512)], -1)
    assert compiler.batches == 1
    assert {kernel.plan.spec for kernel in compiler.built} == {SPEC, other}
    assert len(compiler.built) == len(set(compiler.built))


@pytest.mark.filterwarnings("ignore:cute_backend")
@pytest.mark.parametrize("broken", [False, True])
def test_a_region_that_is_announced_again_builds_nothing(broken: bool, compiler: Compiler) -> None:
    compiler.broken = lambda kernel: broken
    prepare([Problem(SPEC, 64, 4096, 512)], -1)
    assert len({kernel.plan.alignment for kernel in compiler.built}) == 2
    built = list(compiler.built)
    prepare([Problem(SPEC, 64, 4096, 512)], -1)
    assert compiler.built == built


@pytest.mark.sweep(16)
@pytest.mark.parametrize("arch", list(Arch))
@pytest.mark.parametrize(
    "problem",
    [
        (None, None, None),
        (None, 4096, 512),
        (777, 4096, 512),
        (None, 4100, None),
        (None, 1024, 8192),
        (None, 2048, 16384),
    ],
)
def test_a_region_reaches_the_kernels_that_cover_all_sizes(
    arch: Arch, problem: tuple[int | None, int | None, int | None]
) -> None:
    kernels = reachable_kernels(Problem(SPEC, *problem), arch, 132)
    assert len(kernels) == len(set(kernels)) <= MAX_KERNELS
    alignments = {kernel.plan.alignment for kernel in kernels}
    m, n, k = problem
    if n is not None and k is not None:
        chosen = {
            rows: choose(arch, SPEC, Sizes(rows, n, k), 132) for rows in (BUCKETS if m is None else (m,))
        }
        covered = covering(chosen, SPEC, n, k, 132, MAX_KERNELS // len(alignments))
        assert {kernel.plan for kernel in kernels} == {
            plan(SPEC, config, each) for config in covered for each in alignments
        }


def test_alignments_that_cannot_occur_are_not_built() -> None:
    def alignments(spec: EpilogueSpec, n: int | None) -> set[Alignment]:
        return {
            kernel.plan.alignment for kernel in reachable_kernels(Problem(spec, None, n, 64), Arch.SM90A, 132)
        }

    alone = make_spec(exact=False)
    assert alignments(alone, 4096) == {Alignment.TMA}  # bf16 rows of 8192 bytes
    assert alignments(alone, 4100) == {Alignment.PLAIN}  # rows of 8200 bytes
    assert alignments(alone, None) == set(Alignment)
    assert alignments(SPEC, 4096) == set(Alignment)  # the exact load may begin anywhere
    assert alignments(make_spec(exact=False, order=Order.COLUMN), 4096) == set(
        Alignment
    )  # M decides, and is unknown


def test_a_bucket_is_never_smaller_than_m() -> None:
    found = [bucket_of(m) for m in (1, 16, 17, 129, 257, 513, 4096, 4097, 65536, 10**6)]
    assert found == [16, 16, 32, 160, 320, 576, 4096, 5120, 65536, 65536]
    assert all(m <= bucket_of(m) <= max(m + 63, 5 * m // 4, 16) for m in range(1, 65537))


# What tuning has found


WINNER = TileConfig(Arch.SM90A, 64, 256, pingpong=True)
SMALL = plan(SPEC, TileConfig(Arch.SM90A, 64, 64), Alignment.TMA)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Alignment, int, int], dict[int, TileConfig]]:
    """The remembered results, by alignment, N and K; a test may add to them."""
    results: dict[tuple[Alignment, int, int], dict[int, TileConfig]] = {}

    class Remembered:
        def winners(self, keys: Iterable[Key]) -> dict[int, TileConfig]:
            return {
                key.m: known[key.m]
                for key in keys
                if (key.spec, key.device, key.groups) == (SPEC, GPU.model, None)
                and key.m in (known := results.get((key.alignment, key.n, key.k), {}))
            }

    monkeypatch.setattr(winners, "remembered", Remembered)
    return results


Found = dict[tuple[Alignment, int, int], dict[int, TileConfig]]


def test_results_for_some_groups_serve_as_many(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    class Remembered:
        def winners(self, keys: Iterable[Key]) -> dict[int, TileConfig]:
            return {key.m: WINNER for key in keys if key.groups == 2}

    monkeypatch.setattr(winners, "remembered", Remembered)
    spec = replace(SPEC, accumulators=(replace(SPEC.product, kind=ProductKind.GROUPED),))
    for groups, tuned in ((2, True), (3, False)):
        prepare([Problem(spec, 6, 16, 8, groups=groups)], -1)
        assert compiler.built
        tiles = {plan(spec, WINNER, alignment).tile for alignment in Alignment}
        assert all((kernel.plan.tile in tiles) is tuned for kernel in compiler.built)
        compiler.built.clear()


def reached(problem: Problem, found: Found) -> list[Kernel]:
    def winners(
        spec: EpilogueSpec, alignment: Alignment, ms: Sequence[int], n: int, k: int
    ) -> dict[int, TileConfig]:
        known = found.get((alignment, n, k), {})
        return {m: known[m] for m in ms if m in known}

    return reachable_kernels(problem, Arch.SM90A, 132, winners)


def test_a_tuned_configuration_takes_the_place_of_the_heuristics(compiler: Compiler, found: Found) -> None:
    found[Alignment.TMA, 16, 8] = {6: WINNER}
    heuristic = choose(Arch.SM90A, SPEC, Sizes(6, 16, 8), GPU.sm_count)
    prepare([Problem(SPEC, 6, 16, 8)], -1)
    expected = [
        plan(SPEC, WINNER, Alignment.TMA),
        plan(SPEC, heuristic, Alignment.PLAIN),  # this one was not timed
    ]
    assert [kernel.plan for kernel in compiler.built] == expected
    check(operands())
    given = operands()
    given[2][3] = shifted(given[2][3])
    check(given)
    assert [kernel.plan for kernel, _ in compiler.launches] == expected
    assert compiler.batches == 1


def test_what_was_tuned_serves_the_next_buckets_and_no_further(compiler: Compiler, found: Found) -> None:
    found[Alignment.TMA, 16, 8] = {64: WINNER}
    prepare([Problem(SPEC, None, 16, 8)], -1)
    served = {}
    for m in (16, 17, 64, 65, 128, 129, 192, 1000):
        check(operands(m))
        served[m] = compiler.launches[-1][0].plan == plan(SPEC, WINNER, Alignment.TMA)
    assert served == {16: False, 17: True, 64: True, 65: True, 128: True, 129: False, 192: False, 1000: False}
    assert compiler.batches == 1


def test_a_dynamic_region_reaches_what_was_tuned_for_it_and_few_kernels() -> None:
    tuned = {16 << i: TileConfig(Arch.SM90A, 64, 64, raster_m=i) for i in range(13)}
    for count in (1, 3, 13):
        winners = dict(list(tuned.items())[:count])
        kernels = reached(Problem(SPEC, None, 512, 512), {(Alignment.TMA, 512, 512): winners})
        assert len(kernels) == len(set(kernels)) <= MAX_KERNELS
        tma = {kernel.plan.tile for kernel in kernels if kernel.plan.alignment is Alignment.TMA}
        won = {plan(SPEC, winner, Alignment.TMA).tile for winner in winners.values()}
        assert len(tma & won) == min(count, MAX_KERNELS // 2)


def test_a_launch_does_not_build_what_was_tuned_meanwhile(compiler: Compiler, found: Found) -> None:
    prepare([Problem(SPEC, None, 16, 8)], -1)
    found[Alignment.TMA, 16, 8] = {16: WINNER}
    check(operands())
    assert compiler.batches == 1 and compiler.launches[0][0].plan != plan(SPEC, WINNER, Alignment.TMA)


# One configuration for all M

INVARIANT = Constraints(batch_invariant=True)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("arch", list(Arch))
@pytest.mark.parametrize(("n", "k"), [(512, 8192), (8192, 512), (8192, 8192)])
def test_a_batch_invariant_region_has_one_configuration(arch: Arch, n: int, k: int) -> None:
    ms = [None, 1, 16, 300, 5000, 10**6]
    invariant = [reachable_kernels(Problem(SPEC, m, n, k, None, INVARIANT), arch, 132) for m in ms]
    assert all(kernels == invariant[0] for kernels in invariant)
    alignments = {kernel.plan.alignment for kernel in invariant[0]}
    assert len(invariant[0]) == len(alignments)
    others = {config_for(Problem(SPEC, m, n, k), Alignment.TMA, arch, 132) for m in ms if m is not None}
    # Few columns with a long K have one tile for every M on RTX Blackwell.
    assert len(others) > 1 or (arch is Arch.SM120A and n < k)


def test_a_batch_invariant_launch_takes_that_one_whatever_is_there(compiler: Compiler, found: Found) -> None:
    found[Alignment.TMA, 16, 8] = {16: WINNER}
    prepare([Problem(SPEC, None, None, None, None, INVARIANT), Problem(SPEC, None, 16, 8)], -1)
    for m in (1, 6, 100, 1000, 4000):
        given = operands(m)
        for constraints in (INVARIANT, UNCONSTRAINED):
            results = launch(*given, SPEC.to_json(), constraints.text)
            for result, expected in zip(results, replay(SPEC, *given), strict=True):
                assert torch.equal(result, expected)
    batch_invariant = compiler.launches[::2]
    assert len({kernel.plan.tile for kernel, _ in batch_invariant}) == 1
    assert len({kernel.plan.tile for kernel, _ in compiler.launches}) > 1


@pytest.mark.filterwarnings("ignore:cute_backend")
def test_a_batch_invariant_region_takes_no_other_configuration_for_one_that_does_not_build(
    compiler: Compiler,
) -> None:
    wanted = config_for(Problem(SPEC, 6, 16, 8, None, INVARIANT), Alignment.TMA, Arch.SM90A, GPU.sm_count)
    every = {rung for each in Alignment for rung in rungs(plan(SPEC, wanted, each))}
    compiler.broken = lambda kernel: kernel.plan in every
    given = operands()
    launch(*given, SPEC.to_json(), INVARIANT.text)
    assert compiler.launches == [] and counters["cute_backend"]["replayed"] == 1


# A tile by name


def test_a_launch_takes_the_tile_that_is_named_for_every_m(compiler: Compiler, found: Found) -> None:
    found[Alignment.TMA, 16, 8] = {16: WINNER}
    name = "128x64_2x1"
    (tile,) = {named(Arch.SM90A, SPEC, name)} - {WINNER, *tile_table(Arch.SM90A, SPEC)}
    constraints = Constraints(tile=name)
    prepare([Problem(SPEC, None, 16, 8, None, constraints)], -1)
    assert compiler.batches == 1
    for m in (1, 6, 100, 1000, 4000):
        given = operands(m)
        for result, expected in zip(
            launch(*given, SPEC.to_json(), constraints.text), replay(SPEC, *given), strict=True
        ):
            assert torch.equal(result, expected)
    assert {kernel.plan for kernel, _ in compiler.launches} == {plan(SPEC, tile, Alignment.TMA)}
    assert compiler.batches == 1
    launch(*operands(), SPEC.to_json())  # what names none has its own
    assert compiler.launches[-1][0].plan.tile != compiler.launches[0][0].plan.tile


def test_a_launch_that_no_one_announced_has_its_tile_too(compiler: Compiler) -> None:
    launch(*operands(), SPEC.to_json(), Constraints(tile="nowhere, 64x64_1x1").text)
    assert {kernel.plan for kernel, _ in compiler.launches} == {SMALL}


def test_a_rung_that_runs_in_place_of_a_tile_that_is_named_is_said(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints = Constraints(tile="128x64_2x1")
    tile = named(Arch.SM90A, SPEC, "128x64_2x1")
    first, lower, *_ = rungs(plan(SPEC, tile, Alignment.TMA))
    compiler.spilled = {first: 8}
    monkeypatch.setattr(spec_kernels, "spill_bytes", lambda kernel: compiler.spilled.get(kernel.plan))
    said = rf"^cute_backend: tile 128x64_2x1, .* spills 8 bytes a thread; {lower.tile.name} runs in its place"
    with pytest.warns(RuntimeWarning, match=said):
        launch(*operands(), SPEC.to_json(), constraints.text)
    assert {kernel.plan for kernel, _ in compiler.launches} == {lower}


@pytest.mark.filterwarnings("ignore:cute_backend")
def test_no_other_tile_serves_for_one_that_does_not_build(compiler: Compiler) -> None:
    prepare([Problem(SPEC, None, None, None)], -1)
    every = {rung for each in Alignment for rung in rungs(plan(SPEC, SMALL.tile, each))}
    compiler.broken = lambda kernel: kernel.plan in every
    launch(*operands(), SPEC.to_json(), Constraints(tile="64x64_1x1").text)
    assert compiler.launches == [] and counters["cute_backend"]["replayed"] == 1


def test_a_text_that_is_no_constraint_is_refused_at_every_launch(compiler: Compiler) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^constraints are '64x64_1x1'; they are '' or the text of a "):
            launch(*operands(), SPEC.to_json(), "64x64_1x1")
    assert not compiler.launches and not launching._launchers


# Which kernel serves which operands


@pytest.fixture
def prepared(compiler: Compiler) -> Compiler:
    """A compiler that has done its work: launches choose from what there is."""
    prepare([Problem(SPEC, None, None, None)], -1)
    return compiler


def test_aligned_operands_go_to_the_tma_variant_as_they_are(prepared: Compiler) -> None:
    given = operands()
    check(given)
    assert prepared.alignments == [Alignment.TMA]
    passed = prepared.launches[0][1]
    addresses = [t.data_ptr() for side in given for t in side]
    assert [t.data_ptr() for t in passed[: len(addresses)]] == addresses
    assert counters["cute_backend"]["operands_copied"] == 0


def test_an_exact_load_at_an_odd_address_goes_to_the_plain_variant(prepared: Compiler) -> None:
    given = operands()
    given[2][3] = shifted(given[2][3])
    check(given)
    assert prepared.alignments == [Alignment.PLAIN]
    assert counters["cute_backend"]["operands_copied"] == 0


def test_an_exact_load_of_odd_pitch_goes_to_the_plain_variant(prepared: Compiler) -> None:
    given = operands()
    wide = torch.randn(6, 19).bfloat16()
    given[2][3] = wide[:, :16]
    check(given)
    assert prepared.alignments == [Alignment.PLAIN]


def test_an_exact_load_that_repeats_one_row_goes_to_the_plain_variant(prepared: Compiler) -> None:
    given = operands()
    given[2][3] = torch.randn(1, 16).bfloat16().expand(6, 16)
    check(given)
    assert prepared.alignments == [Alignment.PLAIN]


def test_operands_of_one_size_may_lie_differently_from_call_to_call(prepared: Compiler) -> None:
    even, odd = operands(), operands()
    odd[2][3] = shifted(odd[2][3])
    for given in (even, even, odd, even, odd, odd, even):
        check(given)
    tma, plain = Alignment.TMA, Alignment.PLAIN
    assert prepared.alignments == [tma, tma, plain, tma, plain, plain, tma]


def test_operands_that_lie_as_before_are_not_looked_at(
    prepared: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(operands())
    monkeypatch.setattr(bind.Binding, "bind", lambda *arguments: pytest.fail("looked at"))
    check(operands())


def test_outputs_of_odd_pitch_go_to_the_plain_variant(compiler: Compiler) -> None:
    a, b, loads = operands(n=12)
    check((a, b, loads[:3]), make_spec(exact=False))
    assert compiler.alignments == [Alignment.PLAIN]


def test_an_exact_load_in_another_order_is_copied_and_counted(prepared: Compiler) -> None:
    given = operands()
    given[2][3] = torch.randn(16, 6).bfloat16().t()
    with pytest.warns(RuntimeWarning, match="exact0, .* is copied at each call"):
        check(given)
    assert prepared.alignments == [Alignment.TMA]  # the copy is aligned
    assert counters["cute_backend"]["operands_copied"] == 1


@pytest.mark.parametrize("side", [0, 1])
def test_a_product_that_tma_cannot_read_is_copied_counted_and_warned_of_once(
    prepared: Compiler, side: int
) -> None:
    given = operands(k=7)  # a pitch of 14 bytes
    given[1 - side][0] = operands()[1 - side][0][:7] if side == 0 else operands()[0][0][:, :7]
    with pytest.warns(
        RuntimeWarning, match=f"{'AB'[side]} of acc, .* base and pitch in multiples of 16"
    ) as warned:
        check(given)
        check(given)
    assert len(runtime_warnings(warned)) == 1
    assert counters["cute_backend"]["operands_copied"] == 2
    copy = prepared.launches[0][1][side]
    assert copy.data_ptr() % 16 == 0 and max(copy.stride()) * 2 % 16 == 0


def test_a_stride_that_no_element_uses_costs_no_copy(prepared: Compiler) -> None:
    given = operands(m=1)
    given[0][0] = torch.randn(3).bfloat16().new_empty(11)[:8].as_strided((1, 8), (3, 1)).fill_(0.5)
    given[2][3] = given[2][3].as_strided((1, 16), (5, 1))
    check(given)
    assert prepared.alignments == [Alignment.TMA]
    assert counters["cute_backend"]["operands_copied"] == 0


def test_a_vector_of_another_stride_than_the_spec_says_is_copied(prepared: Compiler) -> None:
    given = operands()
    given[2][1] = torch.randn(16, 2)[:, 1]
    check(given)
    assert counters["cute_backend"]["operands_copied"] == 1
    assert prepared.launches[0][1][3].stride() == (1,)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scalar_may_have_any_shape_of_one_element(prepared: Compiler, shape: tuple[int, ...]) -> None:
    given = operands()
    given[2][0] = torch.randn(9)[4].reshape(shape)
    check(given)
    passed = prepared.launches[0][1][2]
    assert (passed.shape, passed.stride()) == ((1,), (1,))


def test_bools_travel_as_bytes(prepared: Compiler) -> None:
    spec = EpilogueSpec(
        (Accumulator("acc", DType.BF16, DType.BF16),),
        (Load("exact0", LoadKind.EXACT, DType.BOOL, Stride.OTHER, Stride.ONE),),
        (Op("t0", "cast", ("exact0",), DType.F32), Op("t1", "mul", ("acc", "t0"), DType.F32)),
        (Store("out0", "exact0", DType.BOOL), Store("out1", "t1", DType.F32)),
    )
    a, b, _ = operands()
    check((a, b, [torch.randn(6, 16) > 0]), spec)
    passed = prepared.launches[0][1]
    assert passed[2].dtype is passed[3].dtype is torch.uint8


def of_modes(load: Load, *modes: Stride) -> Load:
    return replace(load, stride_m=Stride.OTHER, m_modes=modes)


PER_BATCH = replace(
    SPEC,
    loads=(
        *SPEC.loads[:2],
        of_modes(SPEC.loads[2], Stride.ZERO, Stride.OTHER),
        of_modes(SPEC.loads[3], Stride.OTHER, Stride.ZERO),
    ),
)
"""A number for each place of a batch, and a row for each batch."""


def batches(count: int, rows: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    a, b, loads = operands(count * rows)
    place, row = torch.randn(rows, 3)[:, 0], torch.randn(count, 1, 16).bfloat16()
    return a, b, [*loads[:2], place.expand(count, -1), row.expand(-1, rows, -1)]


def test_operands_for_each_batch_go_as_they_are(compiler: Compiler) -> None:
    for given in (batches(2, 3), batches(2, 3), batches(3, 2), batches(1, 6), batches(6, 1)):
        check(given, PER_BATCH)
        place, row = compiler.launches[-1][1][4:6]
        assert place.data_ptr() == given[2][2].data_ptr() and row.data_ptr() == given[2][3].data_ptr()
    assert counters["cute_backend"]["operands_copied"] == 0


def test_operands_for_each_batch_that_lie_otherwise_are_made_to_fit(prepared: Compiler) -> None:
    a, b, loads = batches(2, 3)
    check((a, b, [*loads[:3], loads[3].contiguous()]), PER_BATCH)
    assert counters["cute_backend"]["operands_copied"] == 0
    apart = torch.randn(2, 1, 16, 2).bfloat16()[..., 0].expand(-1, 3, -1)
    check((a, b, [*loads[:3], apart]), PER_BATCH)
    assert counters["cute_backend"]["operands_copied"] == 1


def test_batches_that_are_not_all_rows_are_refused_at_every_launch(compiler: Compiler) -> None:
    a, b, loads = batches(2, 3)
    short = [*loads[:3], loads[3][:, :2]]
    wanted = "exact0 is a load of kind exact and wants 2 sizes that multiply to 6, then 16, not shape"
    for _ in range(2):
        with pytest.raises(ValueError, match=wanted):
            launch(a, b, short, PER_BATCH.to_json())
        check((a, b, loads), PER_BATCH)
    assert len(compiler.launches) == 2


GROUPED = replace(SPEC, accumulators=(replace(SPEC.product, kind=ProductKind.GROUPED),))


def test_groups_go_with_their_offsets(compiler: Compiler) -> None:
    a, b, loads = operands(40)
    weights = torch.stack([b[0], b[0] + 1]).transpose(1, 2).contiguous().transpose(1, 2)
    for ends in ((3, 40), (0, 40)):
        offsets = torch.tensor(ends, dtype=torch.int32)
        check(([*a, offsets], [weights], loads), GROUPED)
        assert compiler.launches[-1][1][1] is offsets
    apart = torch.tensor([3, 0, 40, 0], dtype=torch.int32)[::2]
    check(([*a, apart], [weights], loads), GROUPED)
    assert compiler.launches[-1][1][1].is_contiguous()
    assert counters["cute_backend"]["operands_copied"] == 1


CONVERTED = replace(SPEC, accumulators=(replace(SPEC.product, b_dtype=DType.I8),))


def test_a_stored_weight_of_many_rows_is_converted_in_memory(compiler: Compiler) -> None:
    """A launch of more rows than the kernel converts a weight for has the kernel of a weight in 16 bits."""
    n, k = 16, 32
    prepare([Problem(CONVERTED, None, n, k)], -1)
    assert {kernel.plan.spec for kernel in compiler.built} == {CONVERTED, CONVERTED.widened}
    built = list(compiler.built)
    stored = torch.randint(-128, 128, (n, 2 * k), dtype=torch.int8)[:, :k].t()
    for m in (6, MOST_CONVERTED_ROWS, MOST_CONVERTED_ROWS + 1, 6):
        a, _, loads = operands(m, n, k)
        check((a, [stored], loads), CONVERTED)
        is_converted = m <= MOST_CONVERTED_ROWS
        (kernel, arguments) = compiler.launches[-1]
        assert kernel.plan.spec == (CONVERTED if is_converted else CONVERTED.widened)
        assert arguments[1].dtype is (torch.int8 if is_converted else torch.bfloat16)
    assert compiler.built == built and counters["cute_backend"]["weights_widened"] == 1


def test_a_weight_in_groups_is_never_converted_without_its_scales(compiler: Compiler) -> None:
    groups = WeightGroups(32, DType.F32, DType.F32, DType.I8, DType.BF16)
    spec = replace(SPEC, accumulators=(replace(SPEC.product, b_dtype=DType.I8, weight_groups=groups),))
    for m in (None, MOST_CONVERTED_ROWS + 1):
        assert launched(Problem(spec, m, 16, 32)) == [Problem(spec, m, 16, 32)]
    a, _, loads = operands(MOST_CONVERTED_ROWS + 1, 16, 32)
    stored = torch.randint(-128, 128, (16, 32), dtype=torch.int8).t()
    check((a, [stored, torch.rand(1, 16), torch.ones(1, 16, dtype=torch.int8)], loads), spec)


@pytest.mark.parametrize(
    ("m", "is_converted"), [(MOST_CONVERTED_ROWS, True), (MOST_CONVERTED_ROWS + 1, False)]
)
def test_a_known_m_needs_one_kernel_of_a_stored_weight(
    m: int, is_converted: bool, compiler: Compiler
) -> None:
    prepare([Problem(CONVERTED, m, 16, 32)], -1)
    (spec,) = {kernel.plan.spec for kernel in compiler.built}
    assert spec.product.is_converted is is_converted


def test_the_tile_goes_by_how_many_groups_there_are(compiler: Compiler) -> None:
    sizes = 512, 1024, 64
    a, b, loads = operands(*sizes)
    prepare([Problem(GROUPED, *sizes, groups=groups) for groups in (1, 64)], -1)
    chosen: dict[int, set[Plan]] = {}
    for groups in (1, 64, 1):
        offsets = torch.tensor([*range(groups - 1), 512], dtype=torch.int32)
        weights = b[0].expand(groups, 64, 1024)
        launch(
            [*a, offsets], [weights.transpose(1, 2).contiguous().transpose(1, 2)], loads, GROUPED.to_json()
        )
        chosen.setdefault(groups, set()).add(compiler.launches[-1][0].plan)
    wanted = {
        groups: {
            plan(
                GROUPED,
                choose(Arch.SM90A, GROUPED, Sizes(*sizes, groups=groups), GPU.sm_count),
                Alignment.TMA,
            )
        }
        for groups in (1, 64)
    }
    assert chosen == wanted and wanted[1] != wanted[64]


def test_without_a_group_there_is_no_launch(compiler: Compiler) -> None:
    a, b, loads = operands(40)
    offsets = torch.empty(0, dtype=torch.int32)
    check(([*a, offsets], [b[0][None][:0]], loads), GROUPED)
    assert not compiler.launches


OF_BLOCKS = replace(
    SPEC,
    loads=(
        SPEC.loads[0],
        replace(SPEC.loads[1], stride_n=Stride.OTHER, blocks=Blocks(8, Stride.ZERO, Stride.ONE)),
        SPEC.loads[2],
        of_modes(
            replace(SPEC.loads[3], stride_n=Stride.OTHER, blocks=Blocks(4, Stride.ZERO, Stride.ONE)),
            Stride.ZERO,
            Stride.OTHER,
        ),
    ),
)
"""A vector for all blocks of 8 columns, and 4 numbers for each place of a batch."""


def test_operands_of_blocks_go_as_they_are(compiler: Compiler) -> None:
    a, b, loads = operands(6)
    vector = torch.randn(8).expand(2, 8)
    for rows in (3, 2):
        place = torch.randn(rows, 1, 4).bfloat16().expand(6 // rows, rows, 4, 4)
        check((a, b, [loads[0], vector, loads[2], place]), OF_BLOCKS)
        assert [compiler.launches[-1][1][index].data_ptr() for index in (3, 5)] == [
            vector.data_ptr(),
            place.data_ptr(),
        ]
    assert counters["cute_backend"]["operands_copied"] == 0


def test_blocks_that_are_not_all_columns_are_refused_at_every_launch(compiler: Compiler) -> None:
    a, b, loads = operands(6)
    vector, place = torch.randn(8).expand(2, 8), torch.randn(6, 1, 4).bfloat16().expand(1, 6, 4, 4)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"rowvec0 is a load of kind rowvec and wants shape \(2, 8\), not"
        ):
            launch(a, b, [loads[0], vector[:1], loads[2], place], OF_BLOCKS.to_json())
        with pytest.raises(ValueError, match="multiply to 6, then 4, then 4, not shape"):
            launch(a, b, [loads[0], vector, loads[2], place[:, :, :2]], OF_BLOCKS.to_json())
        check((a, b, [loads[0], vector, loads[2], place]), OF_BLOCKS)
    with pytest.raises(ValueError, match="rowvec0 has blocks of 8 columns, and 20 columns are no multiple"):
        check_operands(OF_BLOCKS, a, [torch.randn(b[0].shape[0], 20).to(b[0].dtype)], loads)


BATCHED = replace(SPEC, accumulators=(replace(SPEC.product, kind=ProductKind.BATCHED),))


def products(count: int, rows: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    a, _, loads = operands(count * rows)
    b = torch.randn(count, 16, 8).bfloat16().transpose(1, 2)
    return [a[0].unflatten(0, (count, rows))], [b], loads


def test_a_batch_of_products_goes_as_it_is(compiler: Compiler) -> None:
    for given in (products(2, 3), products(3, 2), products(1, 6), products(6, 1)):
        check(given, BATCHED)
        assert compiler.launches[-1][1][0].data_ptr() == given[0][0].data_ptr()
    assert counters["cute_backend"]["operands_copied"] == 0


def test_batches_that_tma_cannot_step_over_are_copied(compiler: Compiler) -> None:
    a, b, loads = products(2, 3)
    check((a, b, loads), BATCHED)
    apart = torch.randn(2, 25).bfloat16()[:, :24].unflatten(1, (3, 8))
    with pytest.warns(RuntimeWarning, match="A of acc, .* is copied at each call"):
        check(([apart], b, loads), BATCHED)
    with pytest.warns(RuntimeWarning, match="B of acc, .* is copied at each call"):
        check((a, [b[0][:1].expand(2, -1, -1)], loads), BATCHED)
    assert counters["cute_backend"]["operands_copied"] == 2
    copied = compiler.launches[-1][1][1]
    assert copied.stride() == (128, 1, 8)


def test_two_results_of_one_shape_live_apart(prepared: Compiler) -> None:
    first, second = check(operands()), check(operands())
    addresses = {out.data_ptr() for out in (*first, *second)}
    assert len(addresses) == 4


# Nothing to do, nothing to do it with


@pytest.mark.parametrize(("m", "n"), [(0, 16), (6, 0), (0, 0)])
def test_an_empty_output_launches_nothing(compiler: Compiler, m: int, n: int) -> None:
    assert [out.shape for out in check(operands(m, n))] == [(m, n), (m, n)]
    assert compiler.launches == [] and compiler.built == []


def test_reductions_of_an_empty_plane_are_those_of_nothing(compiler: Compiler) -> None:
    """Memory that no kernel would have written: a column of no rows sums to 0."""
    spec = replace(
        SPEC,
        stores=tuple(replace(store, form=Reduction(Axis.COLUMN, reductions.SUM)) for store in SPEC.stores),
    )
    assert all(torch.equal(out, torch.zeros_like(out)) for out in check(operands(m=0), spec))
    assert compiler.launches == [] and compiler.built == []


def test_an_empty_sum_is_the_epilogue_of_zeros(compiler: Compiler) -> None:
    out = check(operands(k=0))[1]
    _, _, (_, row, column, plane) = operands(k=0)
    assert torch.equal(out, row + column[:, None] + plane.float())
    assert compiler.launches == []


def test_a_kernel_that_does_not_build_is_replayed_counted_and_explained(compiler: Compiler) -> None:
    compiler.broken = lambda kernel: True
    with pytest.warns(RuntimeWarning) as warned:
        check(operands())
        batches = compiler.batches
        check(operands())
        check(operands(m=7))
    messages = [str(warning.message) for warning in warned]
    assert sum("is replayed with aten" in message for message in messages) == 1
    assert any("is broken" in message for message in messages)
    assert counters["cute_backend"]["replayed"] == 3
    assert counters["cute_backend"]["builds_failed"] == len(compiler.awaited)
    assert compiler.batches == batches, "it is not tried again"


def test_where_the_tma_variant_does_not_build_the_plain_one_serves(compiler: Compiler) -> None:
    compiler.broken = lambda kernel: kernel.plan.alignment is Alignment.TMA
    with pytest.warns(RuntimeWarning, match="is broken"):
        check(operands())
    assert compiler.alignments == [Alignment.PLAIN]


def test_where_a_configuration_does_not_build_the_fastest_other_serves(compiler: Compiler) -> None:
    """For these rows, another tile than the most similar one is predicted to be the fastest."""
    m = 20_000
    wanted = config_for(Problem(SPEC, m, 16, 8), Alignment.TMA, Arch.SM90A, GPU.sm_count)
    compiler.broken = lambda kernel: kernel.plan == plan(SPEC, wanted, Alignment.TMA)
    with pytest.warns(RuntimeWarning, match="is broken"):
        check(operands(m))
    others = {kernel.plan.tile for kernel in compiler.built if kernel.plan.alignment is Alignment.TMA}
    others -= {plan(SPEC, wanted, Alignment.TMA).tile}
    assert compiler.launches[0][0].plan.tile == fastest(others, SPEC, Sizes(m, 16, 8), GPU.sm_count)


def test_operands_that_contradict_the_spec_are_refused_before_anything_is_built(compiler: Compiler) -> None:
    a, b, loads = operands()
    with pytest.raises(ValueError, match=r"rowvec0 .* wants shape"):
        launch(a, b, [loads[0], loads[1][:5], *loads[2:]], SPEC.to_json())
    assert compiler.built == []
    check(operands())
    with pytest.raises(ValueError, match=r"exact0 .* wants shape"):
        launch(a, b, [*loads[:3], loads[3][0]], SPEC.to_json())


def test_another_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_backend.runtime.arguments import device

    class Properties:
        name, major, minor, multi_processor_count = "Tesla V100", 7, 0, 80

    device.device_at.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    with pytest.raises(
        UnsupportedDeviceError, match=r"Tesla V100 has compute capability 7.0; .* 9.0 .* 8.0 \(Ampere\)"
    ):
        device.device_at(0)
    device.device_at.cache_clear()


# A call in generated code


def check_site(site: CallSite, given: tuple[list[Tensor], list[Tensor], list[Tensor]], text: str) -> None:
    spec = parse_spec(text)
    for result, expected in zip(site(*given, text), replay(spec, *given), strict=True):
        assert torch.equal(result, expected) and result.stride() == expected.stride()


def test_a_call_site_looks_nothing_up_for_sizes_that_it_had(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, text = CallSite(), SPEC.to_json()
    for m in (6, 7):
        check_site(site, operands(m), text)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_launchers", {})
        for m in (6, 7, 6):
            check_site(site, operands(m), text)
        assert not launching._launchers
        check_site(site, operands(m=8), text)
        assert len(launching._launchers) == 1


def test_a_call_site_chooses_again_where_there_is_more_to_choose_from(compiler: Compiler) -> None:
    site, text = CallSite(), SPEC.to_json()
    large = (4096, 4096)
    compiler.broken = lambda kernel: kernel.plan.tile.tile_m > 64
    with pytest.warns(RuntimeWarning, match="is broken"):
        check_site(site, operands(*large), text)
    (launcher,) = launching._launchers.values()
    best = Kernel(
        plan(SPEC, config_for(Problem(SPEC, *large, 8), Alignment.TMA, GPU.arch, GPU.sm_count), Alignment.TMA)
    )
    assert compiler.launches[-1][0].plan.tile.tile_m == 64 < best.plan.tile.tile_m
    launcher.kernels.add(best, standing_rungs.Obtained(best, compiler._function(best)))
    check_site(site, operands(*large), text)
    assert compiler.launches[-1][0] == best


def test_a_call_site_serves_what_is_not_as_before(compiler: Compiler) -> None:
    site, text = CallSite(), SPEC.to_json()
    other = make_spec(second_store=False).to_json()
    for m, n in ((6, 16), (6, 16), (9, 16), (6, 24), (6, 16)):
        check_site(site, operands(m, n), text)
        uneven = operands(m, n)
        uneven[2][3] = shifted(uneven[2][3])
        check_site(site, uneven, text)
        check_site(site, operands(m, n), other)
    a, b, loads = operands()
    with pytest.raises(ValueError, match="colvec0"):
        site(a, b, [loads[0], loads[1], loads[2][:5], loads[3]], text)


def test_a_call_site_with_a_size_of_nothing_launches_nothing(compiler: Compiler) -> None:
    site, text = CallSite(), SPEC.to_json()
    for m in (6, 0, 6):
        check_site(site, operands(m), text)
    assert len(compiler.launches) == 2


def test_a_failure_that_refuses_no_operand_is_raised_once(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, text = CallSite(), SPEC.to_json()
    check_site(site, operands(), text)
    attempts = []

    def exhausted(*_: Any) -> Any:
        attempts.append(1)
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(outputs.Memory, "allocate", exhausted)
        for call in (site, launch):
            with pytest.raises(torch.OutOfMemoryError):
                call(*operands(), text)
    assert len(attempts) == 2
    (launcher,) = launching._launchers.values()
    assert all(choice.fitted is not None for choice in launcher.kernels.choices.values())


def test_operands_that_once_lay_otherwise_are_looked_at_for_some_launches_only(compiler: Compiler) -> None:
    uneven = operands()
    uneven[2][3] = shifted(uneven[2][3])
    check(uneven)
    check(operands())
    (launcher,) = launching._launchers.values()
    (choice,) = launcher.kernels.choices.values()
    check(operands())
    check(uneven)
    for _ in range(_LOOKS):
        assert choice.fitted is None
        check(operands())
    check(operands())
    assert choice.fitted is not None


def test_while_kernels_are_built_others_are_launched(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(operands())
    waits, done = Event(), Event()

    def obtain(kernels: Any) -> dict[Kernel, Any]:
        waits.set()
        assert done.wait(60)
        return compiler.obtain(kernels)

    monkeypatch.setattr(standing_rungs, "obtain", obtain)
    other = make_spec(second_store=False)
    prepare([Problem(other, 6, 16, 8)], -1)
    waiter = Thread(target=lambda: launch(*operands(), other.to_json()))
    waiter.start()
    try:
        assert waits.wait(60)
        check(operands())
        assert waiter.is_alive() and len(compiler.launches) == 2
    finally:
        done.set()
        waiter.join()
    assert compiler.launches[-1][0].plan.spec == other, (
        "it ran when its kernel was built, and was not replayed"
    )
    assert "replayed" not in counters["cute_backend"]


def test_a_launch_waits_for_its_kernel_alone(compiler: Compiler) -> None:
    """One kernel of the many that a region of any size can need."""
    prepare([Problem(SPEC, None, None, None)], -1)
    assert len(compiler.built) > 4 and compiler.awaited == []
    check(operands())
    uneven = operands()
    uneven[2][3] = shifted(uneven[2][3])
    check(uneven)
    assert [kernel.plan.alignment for kernel in compiler.awaited] == [Alignment.TMA, Alignment.PLAIN]
    assert compiler.batches == 1


@pytest.mark.parametrize(
    ("devices", "cores", "has_kernels", "packed", "started"),
    [
        (["cuda:0", "cpu"], 2, False, [], [Arch.SM90A]),
        (["cpu"], 2, False, [], []),
        (["cuda:0"], 1, False, [], []),
        (["cuda:0"], 2, True, [], []),
        (["cuda:0"], 2, False, [Arch.SM100A], [Arch.SM90A]),
        (["cuda:0"], 2, False, [Arch.SM100A, Arch.SM90A], []),
    ],
)
def test_compilers_are_started_where_kernels_are_likely_to_be_needed(
    devices: list[str],
    cores: int,
    has_kernels: bool,
    packed: list[Arch],
    started: list[Arch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Arch] = []
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(preparing, "device_at", lambda index: GPU)
    monkeypatch.setattr(preparing, "start_early", asked.append)
    installed = [SimpleNamespace(installed=True, archs={arch}) for arch in packed]
    monkeypatch.setattr(preparing, "packs", lambda: installed)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    if has_kernels:
        (tmp_path / "cute_mm_relu_128x128_0.json").touch()
    preparing.expect(map(torch.device, devices))
    assert asked == started


def test_where_all_kernels_are_wanted_at_once_none_is_left(compiler: Compiler) -> None:
    """As for a package of AOTInductor, whose process may end before the first launch."""
    prepare([Problem(SPEC, None, 16, 8)], -1, at_once=True)
    assert set(compiler.awaited) == set(compiler.built)


# What a caller gives


def test_an_absent_list_of_operands_is_an_empty_one(compiler: Compiler) -> None:
    store = replace(SPEC.stores[0], value="t0")
    spec = replace(SPEC, loads=(), ops=(Op("t0", "relu", ("acc",), DType.F32),), stores=(store,))
    a, b, _ = operands()
    (expected,) = replay(spec, a, b, [])
    site = CallSite()
    for call in (launch, site, site, op.on_cpu):
        (result,) = call(a, b, None, spec.to_json())
        assert torch.equal(result, expected)
        given = torch.empty_like(expected)
        (returned,) = call(a, b, None, spec.to_json(), results=[given])
        assert returned is given and torch.equal(given, expected)
    op._fake(a, b, None, spec.to_json())


def test_results_that_are_given_are_written_and_checked(compiler: Compiler) -> None:
    a, b, loads = given = operands()
    site, text = CallSite(), SPEC.to_json()
    expected = replay(SPEC, *given)
    for call in (launch, site, site, op.on_cpu):
        results = [torch.empty_like(each) for each in expected]
        call(a, b, loads, text, results=results)
        assert all(map(torch.equal, results, expected))
    first, second = expected
    wrong = [
        ([first], "got 1 results; the spec has 2"),
        ([first.double(), second], "got a result of torch.float64"),
        ([first[:3], second], r"got a result of .* shape \(3, 16\)"),
        ([torch.empty(16, 6, dtype=first.dtype).t(), second], r"and strides \(1, 6\); expected"),
    ]
    for results, message in wrong:
        for call in (launch, op.on_cpu):
            launching._launchers.clear()
            with pytest.raises(ValueError, match=message):
                call(a, b, loads, text, results=results)


# SMs that are left to other kernels


@pytest.fixture
def carveout() -> Iterator[Callable[[int | None], None]]:
    yield torch._C._set_sm_carveout_experimental
    torch._C._set_sm_carveout_experimental(None)


def test_a_grid_leaves_sms_to_other_kernels(carveout: Callable[[int | None], None]) -> None:
    grid = Grid(30, 4, 132)  # three SMs of some GPCs are in no cluster of four
    started = {}
    for left in (None, 0, 12, 13, 100, 131, 132, 500):
        carveout(left)
        started[left] = grid.clusters()
    assert started == {None: 30, 0: 30, 12: 30, 13: 29, 100: 8, 131: 1, 132: 1, 500: 1}


def test_a_kernel_that_was_launched_leaves_sms_from_then_on(
    compiler: Compiler, carveout: Callable[[int | None], None]
) -> None:
    site, text = CallSite(), SPEC.to_json()
    given = operands()
    results = [torch.empty_like(each) for each in replay(SPEC, *given)]
    unaligned = [*given[:2], [*given[2][:3], shifted(given[2][3])]]
    for left in (None, 20, 60, None):
        carveout(left)
        for _ in range(3):
            compiler.launches.clear()
            site(*given, text)
            site(*given, text, results=results)
            launch(*given, text)
            launch(*unaligned, text)
            for kernel, arguments in compiler.launches:
                assert arguments[-1] == (132 - (left or 0)) // kernel.plan.tile.cluster_size
            assert len(compiler.launches) == 4
