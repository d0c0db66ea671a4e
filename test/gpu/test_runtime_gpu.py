"""Launches on a real GPU: streams, graphs, devices, processes, and operands that don't lie as expected.

Inputs are small integers, so results are exact and compared to the bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend.runtime.arguments.device import device_at, max_active_clusters
from cute_backend.runtime.calls.prepare import prepare
from cute_backend.runtime.kernels.reach import Problem
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Load, LoadKind, Op, Store, Stride

pytestmark = pytest.mark.gpu

SPEC = EpilogueSpec(
    (Accumulator("acc", DType.BF16, DType.BF16),),
    (
        Load("scalar0", LoadKind.SCALAR, DType.F32, Stride.ZERO, Stride.ZERO),
        Load("rowvec0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE),
        Load("colvec0", LoadKind.COLVEC, DType.F32, Stride.ONE, Stride.ZERO),
        Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE),
    ),
    (
        Op("t0", "mul", ("acc", "scalar0"), DType.F32),
        Op("t1", "add", ("t0", "rowvec0"), DType.F32),
        Op("t2", "add", ("t1", "colvec0"), DType.F32),
        Op("t3", "add", ("t2", "exact0"), DType.F32),
    ),
    (Store("out0", "t3", DType.F32), Store("out1", "acc", DType.F32)),
)

Operands = tuple[list[Tensor], list[Tensor], list[Tensor]]


def operands(m: int, n: int, k: int, seed: int = 0, device: str = "cuda") -> Operands:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator, device=device).float()

    a, b = draw(m, k).bfloat16(), draw(n, k).bfloat16().t()
    return [a], [b], [torch.full((), 2.0, device=device), draw(n), draw(m), draw(m, n).bfloat16()]


def run(given: Operands) -> list[Tensor]:
    return torch.ops.cute_backend.gemm_epilogue(*given, SPEC.to_json())


def expected(given: Operands) -> list[Tensor]:
    (a,), (b,), (scalar, row, column, plane) = given
    product = a.double() @ b.double()
    return [(product * scalar + row + column[:, None] + plane).float(), product.float()]


def check(given: Operands) -> None:
    for actual, right in zip(run(given), expected(given), strict=True):
        assert torch.equal(actual, right)


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    prepare([Problem(SPEC, None, None, None)], 0, at_once=True)


@pytest.fixture(autouse=True)
def nothing_compiled_or_replayed(prepared: None, request: pytest.FixtureRequest) -> Iterator[None]:
    if "fresh_compiler" in request.fixturenames:  # the fixture clears the counters
        yield
        return
    before = dict(counters["cute_backend"])
    yield
    after = counters["cute_backend"]
    for event in ("kernels_built", "builds_failed", "replayed"):
        assert after[event] == before.get(event, 0), event


def shifted(tensor: Tensor) -> Tensor:
    """The same values, one element off any alignment."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("m", [1, 5, 64, 129, 1000])
@pytest.mark.parametrize("n", [8, 100, 256, 1000])
def test_any_size_is_right_and_compiles_nothing(m: int, n: int) -> None:
    check(operands(m, n, 200))


@pytest.mark.filterwarnings("ignore:.*is copied at each call")
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, s, r, c, p: (a, b, s, r, c, shifted(p)),
        lambda a, b, s, r, c, p: (a, b, s, r, c, p.t().contiguous().t()),
        lambda a, b, s, r, c, p: (a, b, s, r, c, p[:1].expand(p.shape)),
        lambda a, b, s, r, c, p: (a, b, s, r.repeat_interleave(2)[::2], c, p),
        lambda a, b, s, r, c, p: (a, b, s.reshape(1, 1), r, c, p),
        lambda a, b, s, r, c, p: (a, b, s.expand(3)[1:2], r, c, p),
        lambda a, b, s, r, c, p: (shifted(a), b, s, r, c, p),
        lambda a, b, s, r, c, p: (a[:1].expand(a.shape), b, s, r, c, p),
        lambda a, b, s, r, c, p: (a, b.contiguous(), s, r, c, p),  # N-major, where the spec says K-major
    ],
    ids=[
        "odd plane",
        "column-major plane",
        "repeated row",
        "strided rowvec",
        "2-D scalar",
        "expanded scalar",
        "odd A",
        "repeated row of A",
        "N-major B",
    ],
)
def test_operands_that_lie_otherwise(change: Callable[..., tuple[Tensor, ...]], fitted: bool) -> None:
    m, n, k = 130 + fitted, 136, 72
    (a,), (b,), loads = operands(m, n, k)
    if fitted:  # as operands of these sizes usually lie
        check(([a], [b], loads))
        check(([a], [b], loads))
    a, b, *loads = change(a, b, *loads)
    check(([a], [b], loads))


@pytest.mark.filterwarnings("ignore:.*is copied at each call")
@pytest.mark.parametrize(("m", "n", "k"), [(130, 136, 71), (1, 136, 72), (130, 1, 72), (1, 1, 1), (3, 5, 7)])
def test_sizes_that_tma_does_not_take(m: int, n: int, k: int) -> None:
    for _ in range(3):
        check(operands(m, n, k))


def test_empty_sizes() -> None:
    for m, n in ((0, 64), (64, 0)):
        assert [out.shape for out in run(operands(m, n, 32))] == [(m, n), (m, n)]
    check(operands(64, 64, 0))


def test_two_results_of_one_shape_live_at_once() -> None:
    first, second = operands(128, 128, 64, seed=1), operands(128, 128, 64, seed=2)
    results = run(first), run(second)
    for result, given in zip(results, (first, second), strict=True):
        for actual, right in zip(result, expected(given), strict=True):
            assert torch.equal(actual, right)


def test_a_launch_goes_to_the_current_stream_and_waits_for_nothing() -> None:
    given = operands(256, 256, 128, seed=3)
    right = expected(given)
    late = torch.zeros_like(given[0][0])
    run(given)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(5e8))  # a quarter of a second
        late.copy_(given[0][0])  # a launch on any other stream would read zeros
        results = run(([late], given[1], given[2]))
        assert not side.query()
    assert torch.cuda.default_stream().query()
    side.synchronize()
    for actual, expectation in zip(results, right, strict=True):
        assert torch.equal(actual, expectation)


def test_two_streams_do_not_disturb_each_other() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [operands(512, 512, 256, seed=seed) for seed in range(2)]
    torch.cuda.synchronize()
    results: list[list[list[Tensor]]] = [[], []]
    for _ in range(20):
        for stream, given, out in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                out.append(run(given))
    torch.cuda.synchronize()
    for given, out in zip(inputs, results, strict=True):
        right = expected(given)
        assert all(torch.equal(x, y) for result in out for x, y in zip(result, right, strict=True))


def test_a_cuda_graph_replays_a_launch() -> None:
    static = operands(200, 256, 128, seed=4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(static)
    for seed in range(5, 8):
        fresh = operands(200, 256, 128, seed=seed)
        for old, new in zip(
            [*static[0], *static[1], *static[2]], [*fresh[0], *fresh[1], *fresh[2]], strict=True
        ):
            old.copy_(new)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for actual, right in zip(results, expected(fresh), strict=True):
            assert torch.equal(actual, right)


def test_a_compiled_program_runs_in_cuda_graphs(fresh_compiler: None) -> None:
    def fn(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return torch.relu(torch.addmm(bias, a, b)) + residual

    compiled = torch.compile(fn, backend="cute", mode="reduce-overhead")
    for seed in range(5):
        (a,), (b,), (_, row, _, plane) = operands(128, 256, 64, seed=seed)
        right = (torch.relu(a.double() @ b.double() + row) + plane).bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(a, b, row.bfloat16(), plane), right)
    assert counters["cute_backend"]["regions"] == 1
    assert not counters["cute_backend"]["replayed"]


def test_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        given = operands(130, 256, 128, device="cuda:1")
        side = torch.cuda.Stream(1)
        for stream in (torch.cuda.default_stream(1), side):
            torch.cuda.synchronize(1)
            with torch.cuda.stream(stream), torch.cuda.device(0):
                results = run(given)
            torch.cuda.synchronize(1)
            assert torch.cuda.current_device() == 0
            for actual, right in zip(results, expected(given), strict=True):
                assert actual.device == torch.device("cuda:1")
                assert torch.equal(actual, right)


@pytest.mark.parametrize("cluster_size", [1, 2, 4])
def test_the_number_of_clusters_in_flight_is_the_drivers(cluster_size: int) -> None:
    from cutlass.utils import HardwareInfo

    assert max_active_clusters(0, cluster_size) == HardwareInfo(0).get_max_active_clusters(cluster_size)
    assert max_active_clusters(0, 1) == device_at(0).sm_count


SCRIPT = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import test_runtime_gpu as t
with_graph = sys.argv[2] != "plain"
given = t.operands(130, 256, 64, seed=int(sys.argv[3]))
right = t.expected(given)
if with_graph:
    if sys.argv[2] == "graph":
        t.prepare([t.Problem(t.SPEC, None, None, None)], 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = t.run(given)
    graph.replay()
else:
    results = t.run(given)
ok = all(torch.equal(x, y) for x, y in zip(results, right))
count = t.counters["cute_backend"]
missed = count["replayed"] + count["unforked"] + count["builds_failed"]
ok = ok and not missed
print(json.dumps({"ok": ok, "built": count["kernels_built"], "dsl": "cutlass" in sys.modules}))
"""


def start(mode: str, seed: int, cache: Path | None = None) -> subprocess.Popen[str]:
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if cache is not None:
        surroundings["CUTE_BACKEND_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), mode, str(seed)]
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, object]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def test_a_new_process_runs_cached_kernels_without_the_dsl() -> None:
    assert finish(start("plain", 1)) == {"ok": True, "built": 0, "dsl": False}


def test_the_first_launch_of_a_process_may_be_captured() -> None:
    assert finish(start("graph", 2)) == {"ok": True, "built": 0, "dsl": False}


def test_a_launch_that_was_not_announced_may_be_captured() -> None:
    assert finish(start("unannounced graph", 3)) == {"ok": True, "built": 0, "dsl": False}


def test_a_captured_launch_waits_for_its_kernel(tmp_path: Path) -> None:
    assert finish(start("graph", 4, tmp_path / "kernels")) == {"ok": True, "built": 1, "dsl": False}


@pytest.mark.exhaustive  # three processes that build all kernels of a spec
def test_several_processes_at_once_from_an_empty_cache(tmp_path: Path) -> None:
    reports = [
        finish(process) for process in [start("plain", seed, tmp_path / "kernels") for seed in range(3)]
    ]
    assert [report["ok"] for report in reports] == [True] * 3
