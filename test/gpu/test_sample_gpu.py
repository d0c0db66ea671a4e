"""Draws and reductions on a real GPU: statistics, the draws themselves, and what they ask of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import cute_backend
from cute_backend.fx_walk.collect import collect
from cute_backend.planning import Alignment, Constraints, plan, tile_table
from cute_backend.runtime.arguments.device import device_at
from cute_backend.runtime.arguments.operands import output_like, parse_spec
from cute_backend.runtime.calls import launch, spec_kernels
from cute_backend.runtime.calls import sample_op as op_module
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.reach import Problem, reachable_kernels
from support.draws import BF16, STEPS, draw_pairs, draw_steps, noise, p_value

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
F16, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")
ROWS, VOCABULARY, DEPTH = 130, 1000, 64


# What is drawn, as functions of nothing, so that it is known which kernels that takes


def integers(
    rows: int = ROWS, depth: int = DEPTH, dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16)
) -> tuple[Tensor, Tensor]:
    """Hidden states and weights whose logits are exact, whatever the order of their sums."""
    generator = torch.Generator().manual_seed(depth)
    hidden, weight = (
        torch.randint(-2, 3, (size, depth), generator=generator).to(dtype).to(DEVICE)
        for size, dtype in zip((ROWS, VOCABULARY), dtypes, strict=True)
    )
    return hidden[:rows], weight


def draw_one(rows: int = ROWS, depth: int = DEPTH, seed: int | Tensor | None = 7, **how: Any) -> Tensor:
    return cute_backend.sample(*integers(rows, depth), temperature=4.0, seed=seed, **how)


def temperatures() -> Tensor:
    """One a row: 0 here and there, and NaN in row 64."""
    heat = torch.linspace(0.5, 8.0, ROWS)
    heat[::7], heat[64] = 0.0, NAN
    return heat.to(DEVICE)


def draw_many() -> Tensor:
    """Twenty samples at temperatures of their own: three passes."""
    return cute_backend.sample(*integers(), temperature=temperatures(), num_samples=20, seed=2**40 + 3)


def scaled(dtypes: tuple[torch.dtype, torch.dtype]) -> dict[str, Any]:
    """Every operand that there is."""
    hidden, weight = integers(dtypes=dtypes)
    ramp = torch.arange(VOCABULARY, device=DEVICE)
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": (ramp % 5).to(BF16),
        "scale_hidden": 0.25 + torch.arange(ROWS, device=DEVICE) / ROWS,
        "scale_weight": 0.5 + ramp.float() / VOCABULARY,
    }


DTYPES = [(F16, F16), (E4M3, E4M3), (E5M2, E4M3)]


def draw_scaled(dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor]:
    return cute_backend.sample(**scaled(dtypes), num_samples=2, seed=3, return_logprob=True)


def draw_greedily() -> Tensor:
    return cute_backend.sample(*integers(), temperature=0, num_samples=2)


MILLIONS = 4096, 2448
"""Rows and samples: 10,027,008 draws, in whole passes of eight."""


def draw_millions() -> tuple[Tensor, Tensor]:
    """From a vocabulary of 128,256, and the counts to expect."""
    rows, samples = MILLIONS
    steps = torch.arange(128256, device=DEVICE) % 16 / 8
    weight = torch.zeros(128256, 8, dtype=BF16, device=DEVICE)
    weight[:, 0] = steps
    hidden = torch.ones(rows, 8, dtype=BF16, device=DEVICE)
    bias = torch.zeros(128256, device=DEVICE)
    tokens = cute_backend.sample(hidden, weight, num_samples=samples, seed=11, bias=bias)
    return tokens, torch.softmax(steps.double(), 0) * tokens.numel()


DRAWS: list[Callable[[], Any]] = [
    *(partial(draw_steps, *each, device=DEVICE) for each in STEPS[::2]),
    partial(draw_pairs, DEVICE),
    draw_millions,
    draw_one,
    partial(draw_one, rows=4),
    partial(draw_one, depth=100),
    partial(draw_one, depth=104),
    draw_many,
    *(partial(draw_scaled, each) for each in DTYPES),
    draw_greedily,
]


def problems_of(call: Callable[[], Any]) -> list[Problem]:
    """The problems that `call` would launch. Nothing is computed: every draw is token 0."""
    found: dict[Problem, None] = {}

    def note(
        a: list[Tensor], b: list[Tensor], loads: list[Tensor], spec: str, constraints: str
    ) -> list[Tensor]:
        (m, k), n = a[0].shape, b[0].shape[1]
        parsed = parse_spec(spec)
        found[Problem(parsed, m, n, k, None, Constraints.parse(constraints))] = None
        return [output_like(stores, a[0], m, n).zero_() for stores in parsed.results]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_module, "gemm_epilogue", note)
        call()
    return list(found)


# What is compiled


@dataclass(frozen=True)
class Program:
    """`dims` are the axes that are reduced."""

    dims: tuple[int, ...]

    def __call__(self, a: Tensor, b: Tensor, plane: Tensor) -> tuple[Tensor, ...]:
        return self.of(torch.mm(a, b).float() + plane)

    def of(self, value: Tensor) -> tuple[Tensor, ...]:
        """Every kind of reduction."""
        dim = self.dims[0] if len(self.dims) == 1 else None
        return (
            value.sum(self.dims),
            value.mean(self.dims),
            value.logsumexp(self.dims),
            value.amax(self.dims),
            value.amin(self.dims),
            value.abs().amax(self.dims),
            value.argmax(dim),
            value.argmin(dim),
        )


PROGRAMS = {"rows": Program((1,)), "columns": Program((0,)), "all": Program((0, 1))}
PLANES = [(200, 136), (1, 72), (130, 131)]


def difficult(m: int, n: int) -> Tensor:
    """Negative but for a few values, so that a zero from beyond the edge would win; ties everywhere."""
    generator = torch.Generator().manual_seed(m * n)
    plane = torch.randint(-40, -4, (m, n), generator=generator).float()
    if m > 1:
        plane[0, :] = -INF
        plane[m // 2, n // 3] = INF
        plane[m - 1, n // 2 :: 3] = NAN
        plane[:, n // 4] = -3.0  # the largest of most rows
    return plane


def reduction_inputs(m: int, n: int, negative: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B and a plane which with their product makes the last, exactly."""
    generator = torch.Generator().manual_seed(m + n)
    a, b = (torch.randint(-2, 3, (size, DEPTH), generator=generator).float() for size in (m, n))
    wanted = difficult(m, n)
    if negative:
        wanted = torch.where(wanted.isfinite(), wanted, -50.0)
    plane = wanted - a @ b.t()
    return a.to(BF16).to(DEVICE), b.to(BF16).to(DEVICE).t(), plane.to(DEVICE), wanted


def greedy(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.argmax(hidden @ weight.t(), -1)


def problems_of_program(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Problem]:
    regions = [region for report in collect(fn, args, dynamic=False) for region in report.regions]
    return [Problem(region.spec, *region.problem) for region in regions]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Every kernel, several at once: one after the other they would take minutes."""
    gpu = device_at(0)
    problems = [problem for call in DRAWS for problem in problems_of(call)]
    for program in PROGRAMS.values():
        for m, n in PLANES:
            problems += problems_of_program(program, reduction_inputs(m, n, False)[:3])
    for rows in (1, ROWS):
        problems += problems_of_program(greedy, integers(rows))
    kernels = [
        kernel for problem in problems for kernel in reachable_kernels(problem, gpu.arch, gpu.sm_count)
    ]
    obtain([*kernels, *kernels_of_one_draw()])


def kernels_of_one_draw() -> list[Kernel]:
    (problem,) = problems_of(draw_one)
    configs = tile_table(device_at(0).arch, problem.spec)
    return [Kernel(plan(problem.spec, config, Alignment.TMA)) for config in configs]


@pytest.fixture(autouse=True)
def kernels_ran(built: None) -> Iterator[None]:
    """No replay stands in for a kernel."""
    before = dict(counters["cute_backend"])
    yield
    for event in ("builds_failed", "replayed"):
        assert counters["cute_backend"][event] == before.get(event, 0), event


# Statistics


@pytest.mark.parametrize(("vocabulary", "rows", "descending"), STEPS)
def test_draws_follow_the_softmax(
    vocabulary: int, rows: int, descending: bool, record_property: Callable[[str, object], None]
) -> None:
    tokens, expected = draw_steps(vocabulary, rows, descending, DEVICE)
    p = p_value(torch.bincount(tokens.flatten(), minlength=vocabulary), expected)
    record_property("p", p)
    print(f"p = {p:.4f}")
    assert p > 0.001


def test_ten_million_draws_follow_the_softmax(record_property: Callable[[str, object], None]) -> None:
    tokens, expected = draw_millions()
    assert expected.min() > 5
    p = p_value(torch.bincount(tokens.flatten(), minlength=len(expected)), expected)
    record_property("p", p)
    print(f"p = {p:.4f} of {tokens.numel():,} draws")
    assert p > 0.001


def test_samples_rows_and_seeds_are_independent() -> None:
    """By the joint counts of two."""
    for name, (left, right) in draw_pairs(DEVICE).items():
        counts = torch.bincount(left * 8 + right, minlength=64)
        p = p_value(counts, torch.full((64,), len(left) / 64))
        print(f"{name}: p = {p:.4f}")
        assert p > 0.001, name


# The draws themselves


def assert_largest(scores: Tensor, tokens: Tensor) -> None:
    """That no score is larger than a chosen one's, but by the rounding of its noise. (H, V) and (H,)."""
    chosen = scores.gather(1, tokens.cpu()[:, None]).squeeze(1)
    torch.testing.assert_close(chosen, scores.amax(1), rtol=1e-5, atol=1e-5)


def test_a_draw_is_the_largest_logit_with_its_noise() -> None:
    """Of twenty samples, at every row's own temperature; 0 is greedy, NaN gives token 0."""
    hidden, weight = (each.float().cpu() for each in integers())
    tokens, heat = draw_many().cpu(), temperatures().cpu()
    assert tokens.shape == (ROWS, 20)
    assert (tokens[64] == 0).all()
    logits = hidden @ weight.t()
    cold = heat == 0
    assert torch.equal(tokens[cold], logits.argmax(1, keepdim=True).expand(-1, 20)[cold])
    warm = heat > 0
    for gumbel, drawn in zip(noise(2**40 + 3, ROWS, VOCABULARY, 20), tokens.unbind(1), strict=True):
        scores = logits + heat[:, None] * gumbel
        assert_largest(scores[warm], drawn[warm])


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_dtypes_scales_bias_and_log_probabilities(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    given = {name: tensor.float().cpu() for name, tensor in scaled(dtypes).items()}
    tokens, logprob = (each.cpu() for each in draw_scaled(dtypes))
    logits = given["hidden"] @ given["weight"].t()
    logits = logits * given["scale_hidden"][:, None] * given["scale_weight"] + given["bias"]
    for gumbel, drawn in zip(noise(3, ROWS, VOCABULARY, 2), tokens.unbind(1), strict=True):
        assert_largest(logits + gumbel, drawn)
    expected = logits.double().log_softmax(1).gather(1, tokens).float()
    torch.testing.assert_close(logprob, expected, rtol=1e-4, atol=1e-4)


def test_greedy_draws_are_the_argmax() -> None:
    hidden, weight = (each.float().cpu() for each in integers())
    expected = (hidden @ weight.t()).argmax(1, keepdim=True).expand(-1, 2)
    assert torch.equal(draw_greedily().cpu(), expected)


def test_seeds_rows_and_generators() -> None:
    draws = draw_one()
    assert torch.equal(draw_one(), draws)
    assert not torch.equal(draw_one(seed=8), draws) and not torch.equal(draw_one(seed=7 + 2**32), draws)
    assert torch.equal(draw_one(rows=4), draws[:4])  # in another tile
    generators = [torch.Generator(DEVICE).manual_seed(5) for _ in range(2)]
    first, second = (draw_one(seed=None, generator=each) for each in generators)
    assert torch.equal(first, second)
    assert not torch.equal(draw_one(seed=None, generator=generators[0]), first)
    seed = torch.tensor(7, device=DEVICE)
    assert torch.equal(draw_one(seed=seed), draws) and seed == 8
    assert torch.equal(draw_one(seed=seed), draw_one(seed=8)) and seed == 9


def test_every_tile_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are integers: where they are rounded, a tile may tip a near tie."""
    results = []
    for kernel in kernels_of_one_draw():
        monkeypatch.setattr(launch, "_launchers", {})
        monkeypatch.setattr(spec_kernels, "config_for", lambda *args, config=kernel.plan.tile: config)
        results.append(draw_one())
        (launcher,) = launch._launchers.values()
        assert [planned.tile for planned in launcher.kernels._kernels] == [kernel.plan.tile]
    assert len(results) > 1
    for result in results:
        assert torch.equal(result, results[0])


@pytest.mark.filterwarnings("ignore:cute_backend. sample copies")
def test_a_depth_that_tma_does_not_take() -> None:
    """D of 100, copied at each call; and the view of a padded weight that is not."""
    hidden, weight = integers(depth=100)
    expected = draw_one(depth=100)
    for gumbel, drawn in zip(noise(7, ROWS, VOCABULARY, 1), expected.unbind(1), strict=True):
        assert_largest(hidden.float().cpu() @ weight.float().cpu().t() + 4.0 * gumbel, drawn)
    hidden, weight = (torch.nn.functional.pad(each, (0, 4))[:, :100] for each in (hidden, weight))
    before = counters["cute_backend"]["operands_copied"]
    assert torch.equal(cute_backend.sample(hidden, weight, temperature=4.0, seed=7), expected)
    assert counters["cute_backend"]["operands_copied"] == before


# The host


def test_nothing_waits_for_the_host() -> None:
    seed = torch.tensor(7, device=DEVICE)
    operands, heat = integers(), temperatures()
    given = scaled((E4M3, E4M3))
    generator = torch.Generator(DEVICE)
    calls = (
        lambda: cute_backend.sample(*operands, temperature=4.0, seed=seed),
        lambda: cute_backend.sample(*operands, temperature=heat[1]),
        lambda: cute_backend.sample(*operands, temperature=4.0, generator=generator),
        lambda: cute_backend.sample(*operands, temperature=heat, num_samples=20, seed=3),
        lambda: cute_backend.sample(*operands, temperature=0, num_samples=2),
        lambda: cute_backend.sample(**given, num_samples=2, seed=seed, return_logprob=True),
    )
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_replay_of_a_cuda_graph_draws_anew() -> None:
    """With the seed and the temperature that are then on the device."""
    operands = integers()
    seed, heat = torch.tensor(100, device=DEVICE), torch.tensor(4.0, device=DEVICE)

    def draw(seed: int | Tensor) -> Tensor:
        return cute_backend.sample(*operands, temperature=heat, seed=seed)

    expected = [draw(100 + index) for index in range(3)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tokens = draw(seed)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(tokens.clone())
    assert seed == 103
    for replay, right in zip(replays, expected, strict=True):
        assert torch.equal(replay, right)
    assert not torch.equal(replays[0], replays[1]) and not torch.equal(replays[1], replays[2])
    heat.fill_(0.0)
    graph.replay()
    assert torch.equal(tokens, draw_greedily()[:, :1])


def test_compiled_it_draws_as_eager_does(fresh_compiler: None) -> None:
    operands = integers()

    def step(hidden: Tensor, weight: Tensor, seed: Tensor) -> Tensor:
        return cute_backend.sample(hidden, weight, temperature=4.0, seed=seed) * 2

    compiled = torch.compile(step, backend="cute", fullgraph=True, dynamic=False)
    seed = torch.tensor(7, device=DEVICE)
    for number in (7, 8):
        assert torch.equal(compiled(*operands, seed), 2 * draw_one(seed=number))
    assert seed == 9


# Reductions through torch.compile


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize(("m", "n"), PLANES)
def test_every_reduction_is_torchs(
    program: Program, m: int, n: int, fresh_compiler: None, free_launches: None
) -> None:
    """On planes cut by both edges: infinities, NaN and ties among their values, and all of them negative."""
    compiled = torch.compile(program.__call__, backend="cute", dynamic=False)
    for negative in (False, True):
        *args, wanted = reduction_inputs(m, n, negative)
        exact = program.of(wanted)
        rounded = program.of(wanted.double())
        for index, result in enumerate(compiled(*args)):
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if index < 3 else {"rtol": 0.0, "atol": 0.0}
            right = rounded[index].float() if index < 3 else exact[index]
            torch.testing.assert_close(
                result.cpu(), right, equal_nan=True, **tolerance, msg=lambda m, at=index: f"output {at}: {m}"
            )
    assert counters["cute_backend"]["regions"] == 1


@pytest.mark.parametrize("rows", [1, ROWS])
def test_greedy_decoding_is_torchs_argmax(rows: int, fresh_compiler: None) -> None:
    """Where bf16 holds the logits; called, and replayed by a CUDA graph."""
    compiled = torch.compile(greedy, backend="cute", dynamic=False)
    hidden, weight = integers(rows)
    tokens = compiled(hidden, weight)
    assert counters["cute_backend"]["regions"] == 1
    assert torch.equal(tokens.cpu(), torch.argmax(hidden.float().cpu() @ weight.float().cpu().t(), -1))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        again = compiled(hidden, weight)
    hidden.neg_()
    graph.replay()
    assert torch.equal(again.cpu(), torch.argmax(hidden.float().cpu() @ weight.float().cpu().t(), -1))
