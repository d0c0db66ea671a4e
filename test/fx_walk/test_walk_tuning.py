"""Tuning inside torch.compile: when it is asked for, what is tuned, and what is left to Inductor for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.compiler._cache import CacheArtifactManager
from torch.torch_version import TorchVersion

import cute_backend
from cute_backend import backend, config
from cute_backend.backend import _RaisingPass, cute, epilogue_pass
from cute_backend.fx_walk import epilogue_pass as epilogue_pass_module
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.replacement import tuning_jobs
from cute_backend.fx_walk.replacement.unfused import extract, unfused
from cute_backend.planning import Alignment, Arch, TileConfig, choose, plan
from cute_backend.planning import Sizes as Extents
from cute_backend.runtime.arguments.device import Device
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels.reach import Problem as Sizes
from cute_backend.runtime.tuning.jobs import Job
from cute_backend.runtime.tuning.timing import arguments_of, torchs_products
from cute_backend.runtime.tuning.tuning_results import Result
from support.epilogues import EPILOGUES, Problem

BF16 = torch.bfloat16
M, N, K = 64, 48, 32
CONFIG = TileConfig(Arch.SM90A, 64, 64)
GPU = Device(0, Arch.SM90A, 132, "a GPU")


class FakeTuner:
    """A tuner of a GPU that the CPU stands for. Its kernels take 10 us; it runs what it compares them with
    where its `results` are wanted."""

    def __init__(self, unfused_us: float | None) -> None:
        self.unfused_us = unfused_us
        self.jobs: list[Job] = []
        self.thorough: list[bool] = []
        self.results: list[Any] | None = None
        self.known: dict[tuple[int, int, int], Result] = {}

    def tune(self, jobs: Sequence[Job]) -> list[Result | None]:
        self.jobs += jobs
        self.thorough.append(True)
        return self.found(jobs)

    def measure(self, jobs: Sequence[Job]) -> tuple[list[Result | None], list[Job]]:
        new = [job for job in jobs if self.recall(job) is None]
        self.jobs += new
        self.thorough.append(False)
        self.found(new)
        return list(map(self.recall, jobs)), []

    def found(self, jobs: Sequence[Job]) -> list[Result | None]:
        for job in jobs:
            if self.results is not None:
                assert job.unfused is not None
                self.results.append(job.unfused()()())
            self.known[job.m, job.n, job.k] = Result(CONFIG, 10.0, self.unfused_us)
        return [self.recall(job) for job in jobs]

    def recall(self, job: Job) -> Result | None:
        return self.known.get((job.m, job.n, job.k))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> Iterator[None]:
    monkeypatch.setattr(notices, "_warned", set())
    yield


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    fake = FakeTuner(9.0)
    monkeypatch.setattr(tuning_jobs, "gpu_of", lambda device: 0)
    monkeypatch.setattr(tuning_jobs, "tuner_for", lambda index: fake)
    monkeypatch.setattr(tuning_jobs, "device_at", lambda index: GPU)
    return fake


def counted() -> dict[str, int]:
    return dict(counters["cute_backend"])


def inputs(m: int = M) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    made = [torch.randn(*shape, generator=generator).to(BF16) for shape in ((m, K), (N, K), (N,))]
    return made[0], made[1] / 6, made[2]


def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def check(**how: Any) -> None:
    args = inputs()
    result = torch.compile(program, backend=cute, **how)(*args)
    torch.testing.assert_close(result, program(*args), rtol=0.02, atol=0.02)


# When


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("ours", "options", "asked"),
    [
        (None, {}, False),
        (None, {"max_autotune": True}, True),
        (None, {"max_autotune_gemm": True}, True),
        (None, {"max_autotune_pointwise": True}, False),
        (True, {}, True),
        (False, {"max_autotune": True}, False),
    ],
)
def test_tuning_is_inductors_setting_unless_ours_says_otherwise(
    tuner: FakeTuner, ours: bool | None, options: dict[str, bool], asked: bool
) -> None:
    with config.patch(max_autotune=ours):
        check(options=options)
    assert tuner.thorough == [asked]


def test_what_is_in_doubt_is_measured_where_nobody_asks_for_tuning(tuner: FakeTuner) -> None:
    check()
    (job,) = tuner.jobs
    assert (job.m, job.n, job.k) == (M, N, K) and job.unfused is not None and tuner.thorough == [False]
    assert counted() == {"anchors": 1, "regions": 0, "unfused_faster": 1}
    assert len(cute_backend.explain(program, *inputs()).regions) == 0
    with config.patch(measure=False):
        assert len(cute_backend.explain(program, *inputs()).regions) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"measure": False},
        {"tile": "64x64_1x1"},
        {"batch_invariant": True},
        {"rowvec_placement": "smem_staged"},
    ],
)
def test_nothing_is_measured_where_a_setting_decides(tuner: FakeTuner, settings: dict[str, Any]) -> None:
    with config.patch(settings):
        check()
    assert not tuner.jobs and counted()["regions"] == 1


def test_nothing_is_measured_where_results_have_to_repeat(tuner: FakeTuner) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not tuner.jobs and counted()["regions"] == 1


def test_ranks_measure_nothing(tuner: FakeTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not epilogue_pass_module.measuring_is_on()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not epilogue_pass_module.measuring_is_on()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert epilogue_pass_module.measuring_is_on()


def test_a_symbolic_m_is_not_measured_and_nobody_is_warned(
    tuner: FakeTuner, recwarn: pytest.WarningsRecorder
) -> None:
    args = inputs(40)
    torch._dynamo.mark_dynamic(args[0], 0)
    torch.compile(program, backend=cute)(*args)
    assert not tuner.jobs and counted() == {"anchors": 1, "regions": 1, "untuned_symbolic": 1}
    assert not [each for each in recwarn if "cute_backend" in str(each.message)]


def test_what_a_pack_has_kernels_for_is_not_measured(
    tuner: FakeTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compile others. Who asks for tuning gets it."""
    asked: list[tuple[int | None, ...]] = []

    def is_packed(problem: Sizes, arch: Arch) -> bool:
        asked.append((problem.m, problem.n, problem.k))
        return arch is Arch.SM90A

    monkeypatch.setattr(tuning_jobs, "is_packed", is_packed)
    check()
    assert asked == [(M, N, K)] and not tuner.jobs
    assert counted() == {"anchors": 1, "regions": 1, "untuned_packed": 1}
    tuner.known[M, N, K] = Result(CONFIG, 10.0, 9.0)  # as a pack may have it
    torch._dynamo.reset()
    check(options={"cute_backend.max_stores": 5})
    assert not tuner.jobs and counted()["unfused_faster"] == 1
    torch._dynamo.reset()
    check(options={"max_autotune": True})
    assert len(tuner.jobs) == 1


def test_torchs_product_is_of_a_with_the_columns_of_all_b() -> None:
    """It is one product, since Inductor's code has one where all are parts of one weight. There is none of a
    converted weight."""

    def gated(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
        return F.silu(x @ weight.t()) * (x @ up.t())

    def packed(x: Tensor, both: Tensor) -> Tensor:
        gate, up = (x @ both.t()).chunk(2, -1)
        return F.silu(gate) * up

    def by_rows(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
        return F.silu(x @ weight) * (x @ up)

    def converted(x: Tensor, weight: Tensor) -> Tensor:
        return F.relu(x @ weight.to(BF16).t())

    x, weight, _ = inputs()
    rows = weight.t().contiguous()
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], int]] = [
        (gated, (x, weight, weight), 2),
        (packed, (x, torch.cat([weight, weight])), 2),
        (by_rows, (x, rows, rows), 2),
        (program, inputs(), 1),
        (converted, (x, torch.ones(N, K, dtype=torch.int8)), 0),
    ]
    for fn, args, count in cases:
        (report,) = collect(fn, args, dynamic=False)
        (region,) = report.regions
        kernel = plan(region.spec, choose(Arch.SM90A, region.spec, Extents(M, N, K), 132), Alignment.TMA)
        arguments = arguments_of([kernel], M, N, K, torch.Generator())
        run = torchs_products(region.spec, arguments)
        assert (run is None) is (count == 0)
        if run is not None:
            right = torch.cat([arguments[0] @ b for b in arguments[1 : 1 + count]], -1)
            assert right.shape == (M, count * N)
            torch.testing.assert_close(run(), right, rtol=0.02, atol=0.02)


def test_inductors_code_is_measured_in_16_bits_alone(tuner: FakeTuner) -> None:
    """In fp8 it was never the faster."""
    tuner.unfused_us = None
    epilogue = EPILOGUES["bias_gelu_residual"]
    torch.compile(epilogue.fn, backend=cute)(*epilogue.inputs(Problem(64, 64, 64)))
    (job,) = tuner.jobs
    assert job.spec.product.a_dtype.bits == 8 and job.unfused is None


def test_where_measuring_fails_the_model_decides(tuner: FakeTuner) -> None:
    def fail(jobs: Sequence[Job]) -> tuple[list[Result | None], list[Job]]:
        raise RuntimeError("the GPU fell off")

    tuner.measure = fail  # type: ignore[method-assign]
    with (
        config.patch(raise_errors=False),
        pytest.warns(RuntimeWarning, match="fell off.*the cost model decides alone"),
    ):
        check()
    assert counted() == {"anchors": 1, "regions": 1, "internal_error": 1}


class SlowTuner(FakeTuner):
    """A tuner whose kernels are built while Inductor works."""

    def __init__(self, unfused_us: float | None) -> None:
        super().__init__(unfused_us)
        self.begun: list[Job] = []
        self.later: list[Job] = []

    def measure(self, jobs: Sequence[Job]) -> tuple[list[Result | None], list[Job]]:
        self.jobs += jobs
        results = list(map(self.recall, jobs))
        return results, [job for job, result in zip(jobs, results, strict=True) if result is None]

    def begin(self, jobs: Sequence[Job]) -> None:
        self.begun += jobs

    def measure_late(self, jobs: Sequence[Job]) -> tuple[list[Result | None], list[Job]]:
        torch.empty(1).data_ptr()  # a fake tensor has none, and nothing can be timed with it
        self.later += jobs
        return self.found(jobs), []


@pytest.fixture
def slow_tuner(tuner: FakeTuner, monkeypatch: pytest.MonkeyPatch) -> SlowTuner:
    slow = SlowTuner(11.0)
    monkeypatch.setattr(tuning_jobs, "tuner_for", lambda index: slow)
    return slow


def test_what_is_late_is_measured_after_inductor_has_compiled_the_graph(
    slow_tuner: SlowTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass alone does not learn when that is, and begins no kernels for it."""
    steps = []
    inner = compile_fx.compile_fx_inner

    def compiled(*args: Any, **how: Any) -> Any:
        result = inner(*args, **how)
        steps.append(("compiled", len(slow_tuner.later)))
        return result

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiled)
    check()
    (job,) = slow_tuner.jobs
    assert slow_tuner.later == slow_tuner.begun == [job] and steps[-1] == ("compiled", 0)

    torch._dynamo.reset()
    for each in (slow_tuner.begun, slow_tuner.later):
        each.clear()
    torch.compile(program, options={"post_grad_custom_pre_pass": epilogue_pass})(*inputs(2 * M))
    assert len(slow_tuner.jobs) == 2 and slow_tuner.later == slow_tuner.begun == []


def test_what_is_late_in_subgraphs_is_measured_too(slow_tuner: SlowTuner) -> None:
    def branches(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        gelu, relu = (lambda x, f=f: f(F.linear(x, weight, bias)) for f in (F.gelu, F.relu))
        return torch.cond(x.sum() > 0, gelu, relu, (x,))

    with torch.no_grad():
        torch.compile(branches, backend=cute)(*inputs())
    assert len(slow_tuner.jobs) == 2 and slow_tuner.later == slow_tuner.jobs


def test_what_was_late_is_forgotten_once_it_is_measured(slow_tuner: SlowTuner) -> None:
    """A job has a copy of a region, and the pass lives as long as a backward graph may be compiled."""
    run = _RaisingPass({}, lambda regions, rejections: None)
    check()
    (job,) = slow_tuner.later
    run.leave([(0, job)])
    run.measure_late()
    assert slow_tuner.later == [job, job] and run.late == []


KEPT = {"anchors": 1, "regions": 1}
LEFT = {"anchors": 1, "regions": 0, "unfused_faster": 1}


@pytest.mark.parametrize(
    ("unfused_us", "brief_s", "counts"),
    [
        (9.0, 0.0, [KEPT, LEFT, {}]),
        (9.0, 60.0, [LEFT, {}]),
        (11.0, 60.0, [KEPT, {"cached_regions": 1}]),
    ],
    ids=["long", "brief", "kernels are faster"],
)
def test_a_graph_is_compiled_again_if_inductors_code_was_the_faster(
    slow_tuner: SlowTuner,
    unfused_us: float,
    brief_s: float,
    counts: list[dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once if that is brief, or by the next process: Inductor's cache would keep the kernel."""
    monkeypatch.setattr(backend, "_BRIEF_S", brief_s)
    slow_tuner.unfused_us = unfused_us
    for expected in counts:
        check()
        assert counted() == expected
        torch._dynamo.reset()
        counters.clear()


def test_a_graph_that_is_compiled_again_counts_each_region_once(slow_tuner: SlowTuner) -> None:
    def programs(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return program(x, weight, bias), F.relu(y @ weight.t())

    slow_tuner.unfused_us = 9.0
    (x, *others), (y, *_) = inputs(), inputs(40)
    torch._dynamo.mark_dynamic(y, 0)
    torch.compile(programs, backend=cute)(x, y, *others)
    assert counted() == {"anchors": 2, "regions": 1, "unfused_faster": 1, "untuned_symbolic": 1}


def test_a_graph_in_a_bundle_is_compiled_again_at_once(
    slow_tuner: SlowTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd's cache has the code in it, so the next process would not compile it."""
    monkeypatch.setattr(backend, "_BRIEF_S", 0.0)
    slow_tuner.unfused_us = 9.0
    with functorch_config.patch(bundled_autograd_cache=True):
        check()
    assert counted() == LEFT


@pytest.mark.parametrize("brief_s", [0.0, 60.0], ids=["long", "brief"])
def test_saved_artifacts_have_no_graph_with_a_region_that_inductor_won(
    slow_tuner: SlowTuner, brief_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_BRIEF_S", brief_s)
    slow_tuner.unfused_us = 9.0
    with CacheArtifactManager.with_fresh_cache():
        check()
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    assert len(saved[1].inductor_artifacts) == (brief_s > 0)


def test_a_graph_that_a_cache_keeps_is_compiled(
    slow_tuner: SlowTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may rename what has no public name."""
    monkeypatch.delattr(CacheArtifactManager, "_new_cache_artifacts")
    slow_tuner.unfused_us = 9.0
    with (
        config.patch(raise_errors=False),
        pytest.warns(RuntimeWarning, match="Inductor's cache keeps a graph"),
    ):
        check()


def test_a_graph_in_a_wrapper_of_torchs_minifier_is_compiled(slow_tuner: SlowTuner) -> None:
    """It has no key in Inductor's cache."""
    slow_tuner.unfused_us = 9.0
    with torch._dynamo.config.patch(repro_after="aot"):
        check()
    assert len(slow_tuner.later) == 1


def test_what_is_late_at_the_end_is_counted(slow_tuner: SlowTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_tuner, "measure_late", lambda jobs: ([None for _ in jobs], list(jobs)))
    check()
    assert counted() == {"anchors": 1, "regions": 1, "untuned_late": 1}

    torch._dynamo.reset()
    torch.compile(program, options={"post_grad_custom_pre_pass": epilogue_pass})(*inputs(2 * M))
    assert counted() == {"anchors": 2, "regions": 2, "untuned_late": 2}


@pytest.mark.parametrize("step", ["begin", "found"])
def test_what_is_late_is_left_where_measuring_it_fails(
    slow_tuner: SlowTuner, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(jobs: Sequence[Job]) -> list[Result | None]:
        raise RuntimeError("the GPU fell off")

    monkeypatch.setattr(slow_tuner, step, fail)
    with config.patch(raise_errors=False), pytest.warns(RuntimeWarning, match="the cost model decides alone"):
        check()
    assert counted()["regions"] == 1


def test_max_autotune_is_a_mode(tuner: FakeTuner) -> None:
    check(mode="max-autotune-no-cudagraphs")
    (job,) = tuner.jobs
    assert (job.m, job.n, job.k, job.dynamic) == (M, N, K, False)


def test_nothing_is_tuned_or_counted_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_jobs, "tuner_for", lambda index: pytest.fail("there is no GPU"))
    check(options={"max_autotune": True})
    assert counted() == {"anchors": 1, "regions": 1}


# What


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("bias_gelu_residual", False),
        ("two_outputs", False),
        pytest.param(
            "linear_3d",
            True,
            marks=pytest.mark.skipif(
                TorchVersion(torch.__version__) < "2.12",
                reason="torch 2.11 doesn't record that scale_a has A's rows: refused as mixed_scales",
            ),
        ),
        ("square", True),
        ("swiglu", False),
        ("swiglu_chunk", False),
    ],
)
def test_what_is_timed_beside_our_kernels_computes_the_same(name: str, dynamic: bool) -> None:
    epilogue = EPILOGUES[name]
    (report,) = collect(epilogue.fn, epilogue.inputs(Problem(64, 64, 64)), dynamic=dynamic)
    alone = extract(report.regions[0])
    results = unfused(report.regions[0], tuned=False)()()
    for result, expected in zip(results, alone.module(*alone.inputs()), strict=True):
        assert result.stride() == expected.stride() and result.dtype is expected.dtype
        step = 0.13 if result.dtype.itemsize == 1 else 0.05
        torch.testing.assert_close(result.double(), expected.double(), rtol=step, atol=step, equal_nan=True)


def test_a_region_by_itself_does_the_work_that_the_kernel_does_on_its_operands() -> None:
    def with_work(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return F.linear(x, weight).relu() * gate.sigmoid().exp()

    args = (*inputs()[:2], torch.randn(M, N).to(BF16))
    (report,) = collect(with_work, args)
    alone = extract(report.regions[0])
    assert len(alone.layouts) == 3
    assert "aten.exp.default" in {str(node.target) for node in alone.module.graph.nodes}


def test_a_symbolic_m_is_tuned_at_its_example(tuner: FakeTuner) -> None:
    tuner.unfused_us, tuner.results = 50.0, []
    args = inputs(40)
    torch._dynamo.mark_dynamic(args[0], 0)
    compiled = torch.compile(program, backend=cute, options={"max_autotune": True})
    compiled(*args)
    (job,) = tuner.jobs
    assert (job.m, job.n, job.k, job.dynamic) == (40, N, K, True)
    ((result,),) = tuner.results
    assert result.shape == (40, N)
    compiled(*inputs(56))  # a new M tunes nothing
    assert len(tuner.jobs) == 1 and counted()["regions"] == 1


def test_a_symbolic_n_is_not_tuned_and_counted(tuner: FakeTuner) -> None:
    x, weight, bias = inputs()
    torch._dynamo.mark_dynamic(weight, 0)
    torch._dynamo.mark_dynamic(bias, 0)
    with pytest.warns(RuntimeWarning, match="its N, K or groups are not static"):
        torch.compile(program, backend=cute, options={"max_autotune": True})(x, weight, bias)
    assert not tuner.jobs
    assert counted() == {"anchors": 1, "regions": 1, "untuned_symbolic": 1}


def test_batch_invariant_regions_are_not_tuned_and_counted(tuner: FakeTuner) -> None:
    with (
        config.patch(batch_invariant=True),
        pytest.warns(RuntimeWarning, match="one configuration for all M"),
    ):
        check(options={"max_autotune": True})
    assert not tuner.jobs
    assert counted() == {"anchors": 1, "regions": 1, "untuned_batch_invariant": 1}


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight, offs=ends).relu()


def test_groups_of_rows_are_tuned_without_inductors_code(tuner: FakeTuner) -> None:
    x, weight, ends = torch.randn(24, 16).to(BF16), torch.randn(2, 16, 40).to(BF16), torch.tensor([3, 24])
    torch.compile(grouped, backend=cute, options={"max_autotune": True})(x, weight, ends.int())
    (job,) = tuner.jobs
    assert (job.m, job.n, job.k, job.groups, job.unfused) == (24, 40, 16, 2, None)


def test_columns_packed_head_by_head_are_tuned_without_inductors_code(tuner: FakeTuner) -> None:
    """Inductor would copy the weight's columns in every call, which a timing of its products leaves out."""
    heads, columns, k = 4, 64, 256

    def packed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        query, key, value = F.linear(x, weight).view(M, heads, 3 * columns).chunk(3, dim=-1)
        return rotated(query), rotated(key), value

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1) * 0.5 + x

    given = torch.randn(M, k).bfloat16(), torch.randn(3 * heads * columns, k).bfloat16()
    with config.patch(max_autotune=True, shared_launches=True):
        torch.compile(packed, backend=cute)(*given)
    (job,) = tuner.jobs
    assert [acc.b_block for acc in job.spec.accumulators] == [columns] * 3 and job.unfused is None


def test_groups_of_k_are_not_tuned_and_counted(tuner: FakeTuner) -> None:
    x, y, ends = torch.randn(24, 16).to(BF16).t(), torch.randn(24, 40).to(BF16), torch.tensor([3, 24])
    with pytest.warns(RuntimeWarning, match="how its K is split into groups is known to the device alone"):
        torch.compile(grouped, backend=cute, options={"max_autotune": True})(x, y, ends.int())
    assert not tuner.jobs
    assert counted() == {"anchors": 1, "regions": 1, "untuned_grouped": 1}


# What comes of it


def test_a_region_that_inductor_does_faster_is_left_to_it(tuner: FakeTuner) -> None:
    called: list[str] = []

    def see(graph: torch.fx.Graph) -> None:
        called.extend(str(node.target) for node in graph.nodes if node.op == "call_function")

    tuner.results = []
    with inductor_config.patch(post_grad_custom_post_pass=see):
        check(options={"max_autotune": True})
    assert counted() == {"anchors": 1, "regions": 0, "unfused_faster": 1}
    assert "cute_backend.gemm_epilogue.default" not in called
    assert called  # and the pass of the user saw the graph, not the region by itself
    assert sum("addmm" in name or name == "aten.mm.default" for name in called) == 1


def test_a_region_that_is_about_as_fast_is_fused(tuner: FakeTuner) -> None:
    tuner.unfused_us = 9.9
    check(options={"max_autotune": True})
    assert counted() == {"anchors": 1, "regions": 1}


def test_of_two_regions_one_may_be_left(tuner: FakeTuner) -> None:
    def two(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = program(x, weight, bias)
        return F.linear(hidden, weight.t()).relu() + x

    args = inputs()
    tuner.known[M, N, K] = Result(CONFIG, 10.0, 5.0)
    tuner.known[M, K, N] = Result(CONFIG, 10.0, 50.0)
    tuner.tune = lambda jobs: [tuner.recall(job) for job in jobs]  # type: ignore[method-assign]
    result = torch.compile(two, backend=cute, options={"max_autotune": True})(*args)
    assert counted() == {"anchors": 2, "regions": 1, "unfused_faster": 1}
    torch.testing.assert_close(result, two(*args), rtol=0.02, atol=0.02)


def test_what_was_found_is_kept_in_inductors_cache(tuner: FakeTuner) -> None:
    check(options={"max_autotune": True})
    torch._dynamo.reset()
    check(options={"max_autotune": True})
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert len(tuner.jobs) == 1 and counted()["unfused_faster"] == 1


def test_explain_shows_what_tuning_found(tuner: FakeTuner) -> None:
    args = inputs()
    with config.patch(max_autotune=True):
        assert (
            len(cute_backend.explain(program, *args).regions) == 1
        )  # nothing is known, and nothing is tuned
        assert not tuner.jobs
        check()
        explanation = cute_backend.explain(program, *args)
    assert explanation.regions == ()
    (rejection,) = explanation.rejections
    assert rejection.reason.value == "unfused_faster"
    assert "9.0 us" in rejection.message and "10.0" in rejection.message
    with config.patch(measure=False):
        assert len(cute_backend.explain(program, *args).regions) == 1


# Settings and caches


def test_the_uuid_follows_what_decides_and_nothing_else() -> None:
    plain = epilogue_pass.uuid()
    with config.patch(max_autotune=True):
        assert epilogue_pass.uuid() != plain
    with config.patch(batch_invariant=True):
        assert epilogue_pass.uuid() != plain
    with config.patch(tile="64x64_1x1"):
        assert epilogue_pass.uuid() != plain
    with config.patch(quiet=True):
        assert epilogue_pass.uuid() == plain


def test_the_op_of_a_batch_invariant_program_says_so() -> None:
    asked: list[tuple[Any, ...]] = []

    def see(graph: torch.fx.Graph) -> None:
        asked.extend(node.args[4:] for node in graph.nodes if "gemm_epilogue" in str(node.target))

    for invariant in (False, True):
        torch._dynamo.reset()
        with config.patch(batch_invariant=invariant), inductor_config.patch(post_grad_custom_post_pass=see):
            check()
    assert asked == [("",), ('{"batch_invariant": true}',)]


def test_the_op_of_a_program_with_a_tile_names_it_and_nothing_is_tuned(tuner: FakeTuner) -> None:
    asked: list[tuple[Any, ...]] = []

    def see(graph: torch.fx.Graph) -> None:
        asked.extend(node.args[4:] for node in graph.nodes if "gemm_epilogue" in str(node.target))

    for settings in ({"tile": "64x64_1x1"}, {"tile": "64x64_1x1", "batch_invariant": True}):
        torch._dynamo.reset()
        options = {f"cute_backend.{name}": value for name, value in settings.items()}
        with inductor_config.patch(post_grad_custom_post_pass=see):
            check(options={**options, "max_autotune": True})
    assert asked == [('{"tile": "64x64_1x1"}',), ('{"batch_invariant": true, "tile": "64x64_1x1"}',)]
    assert not tuner.jobs and counted() == {"anchors": 2, "regions": 2}


def test_the_op_says_where_rowvecs_are_and_nothing_is_tuned(tuner: FakeTuner) -> None:
    asked: list[tuple[Any, ...]] = []

    def see(graph: torch.fx.Graph) -> None:
        asked.extend(node.args[4:] for node in graph.nodes if "gemm_epilogue" in str(node.target))

    options = {"cute_backend.rowvec_placement": "smem_staged", "cute_backend.max_autotune": True}
    with inductor_config.patch(post_grad_custom_post_pass=see):
        check(options=options)
    assert asked == [('{"rowvecs": "smem_staged"}',)]
    assert not tuner.jobs


def test_gemm_has_the_tile_that_is_set() -> None:
    from cute_backend.eager import call as eager

    a, b, _ = inputs()
    with config.patch(tile="64x64_1x1"):
        cute_backend.gemm(a, b.t())
    program = list(eager._programs.values())[-1]
    (arguments,) = (
        node.args[4:] for node in program.graph.graph.nodes if "gemm_epilogue" in str(node.target)
    )
    assert arguments == ('{"tile": "64x64_1x1"}',)
    cute_backend.gemm(a, b.t())
    assert list(eager._programs.values())[-1] is not program


def test_gemm_is_batch_invariant_where_that_is_set() -> None:
    from cute_backend.eager import call as eager

    a, b, _ = inputs()
    with config.patch(batch_invariant=True):
        cute_backend.gemm(a, b.t())
    cute_backend.gemm(a, b.t())
    programs = list(eager._programs.values())[-2:]
    arguments = [
        node.args[4:]
        for each in programs
        for node in each.graph.graph.nodes
        if "gemm_epilogue" in str(node.target)
    ]
    assert arguments == [('{"batch_invariant": true}',), ("",)]
