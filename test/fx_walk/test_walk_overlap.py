"""torch's overlap scheduling, low-contention collectives and flop counters see this package's products."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import fusion_regions, overlap_scheduling
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.utils import _runtime_estimation
from torch.utils.flop_counter import FlopCounterMode

import cute_backend
from cute_backend import config
from cute_backend.fx_walk.replacement.product_times import OPTION, ProductTimes, times_wanted
from cute_backend.fx_walk.search import exposed_gathers
from cute_backend.runtime.calls.op import gemm_epilogue, gemm_epilogue_into
from cute_backend.runtime.host import notices
from support.fx_walk.distributed import fake_group, moved, post_grad_graphs

BF16 = torch.bfloat16
K, N, RANKS = 4096, 14336, 8
TENSOR_CORES, MEMORY = 989e12, 3350e9
"""Operations and bytes in a second, of an H100's data sheet."""

OPTIONS = inductor_config.aten_distributed_optimizations


class Sharded(nn.Module):
    """A gated MLP whose weights are gathered where they are used, as in fully sharded training."""

    def __init__(self) -> None:
        super().__init__()
        for name, (rows, columns) in {"gate": (N, K), "up": (N, K), "down": (K, N)}.items():
            shard = torch.empty(rows // dist.get_world_size(), columns, dtype=BF16)
            self.register_parameter(name, nn.Parameter(shard, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        c10d = torch.ops._c10d_functional
        ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
        gate, up, down = (
            c10d.wait_tensor(c10d.all_gather_into_tensor(shard, ranks, group))
            for shard in (self.gate, self.up, self.down)
        )
        h = F.rms_norm(x, (K,), None, 1e-5)
        return x + F.silu(h @ gate.t()) * (h @ up.t()) @ down.t()


@dataclass
class Scheduled:
    exposed_ms: float = 0.0
    work_ms: float = 0.0
    """Of products and pointwise kernels."""
    compute: list[str] = field(default_factory=list)
    graph: Any = None


def size_of(node: fx.Node) -> int:
    value = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(each.numel() * each.element_size() for each in values)


def estimate(node: fx.Node, size: int | None) -> float | None:
    """A user's hook: times of torch's products, of gathers and of pointwise work. It knows no other op."""
    if "all_gather" in str(node.target):
        return 0.02 + size_of(node) / 250e9 * 1e3 if size is None else 0.02 + size / 250e9 * 1e3
    if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        a, b = (each.meta["val"] for each in node.args[-2:])
        return 2 * a.numel() * b.shape[1] / (0.6 * TENSOR_CORES) * 1e3
    return None


def rate(node: fx.Node, size: int | None) -> float | None:
    """A user's hook that takes this package's products to be as fast as torch's."""
    if node.target is not gemm_epilogue:
        return estimate(node, size)
    args = fx.map_arg(node.args, lambda each: each.meta["val"])
    formula = torch.utils.flop_counter.flop_registry[torch.ops.cute_backend.gemm_epilogue]
    return formula(*args) / (0.6 * TENSOR_CORES) * 1e3


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch asks a GPU about, answered from a data sheet."""
    for name in ("get_gpu_dram_gbps", "get_device_dram_gbps"):
        for module in (_runtime_estimation, fusion_regions, torch._inductor.utils):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: MEMORY / 1e9)
    tflops = lambda dtype, device=None: TENSOR_CORES / 1e12  # noqa: E731
    monkeypatch.setattr(_runtime_estimation, "get_device_tflops", tflops)
    monkeypatch.setattr(torch._inductor.utils, "get_device_tflops", tflops)
    if hasattr(overlap_scheduling, "estimate_runtime_analytical"):  # 2.11, which asks CUDA for a log
        monkeypatch.setattr(overlap_scheduling, "estimate_runtime_analytical", lambda node: 0.0)


@pytest.fixture
def benchmarked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that torch would benchmark, each of which takes a millisecond."""
    nodes: list[str] = []
    real = overlap_scheduling.benchmark_node_with_cache_key

    def named(node: fx.Node, *rest: Any) -> Any:
        def bench(call: Callable[[], Any]) -> float:
            nodes.append(str(node.target))
            return 1.0

        monkeypatch.setattr(overlap_scheduling, "get_collective_do_bench", lambda: bench)
        return real(node, *rest)

    def empty(shape: Any, stride: Any, device: Any, dtype: Any) -> Tensor:
        return torch.empty_strided(shape, stride, device=device, dtype=dtype)

    monkeypatch.setattr(overlap_scheduling, "benchmark_node_with_cache_key", named)
    monkeypatch.setattr(torch._dynamo.testing, "rand_strided", empty)
    monkeypatch.setattr(overlap_scheduling, "get_cached_node_time", lambda key: None)
    monkeypatch.setattr(overlap_scheduling, "set_cached_node_time", lambda key, value: None)
    return nodes


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    counters.clear()
    yield
    torch._dynamo.reset()


def schedule(
    backend: str, monkeypatch: pytest.MonkeyPatch, layers: int = 3, tokens: int = 8192, **options: Any
) -> Scheduled:
    """Compiles layers under overlap scheduling, without running them."""
    found, real = Scheduled(), overlap_scheduling.OverlapScheduler.run

    def run(self: Any) -> Any:
        found.compute = [str(node.target) for node in self.compute_nodes]
        result = real(self)
        found.exposed_ms = sum(info.exposed_time_ms for info in self.collective_info.values())
        estimates = getattr(self, "node_estimations", {})  # 2.11 has none
        found.work_ms = sum(estimates[node] for node in estimates.keys() - self.collective_info.keys())
        return result

    known = {
        "enable_overlap_scheduling": True,
        "insert_overlap_deps": False,
        "collective_bucketing": False,
        "pre_bucketing_fsdp_collectives": False,
        "max_memory_increase_gb": 8.0,
        "custom_runtime_estimation": estimate,
        **options,
    }
    patches = {
        f"aten_distributed_optimizations.{name}": value
        for name, value in known.items()
        if hasattr(OPTIONS, name)
    }
    with monkeypatch.context() as patched, inductor_config.patch(patches), torch.no_grad():
        patched.setattr(overlap_scheduling.OverlapScheduler, "run", run)
        patched.setattr(dist, "all_gather_object", gather_same)
        program = nn.Sequential(*(Sharded() for _ in range(layers)))
        (found.graph,) = post_grad_graphs(program, (torch.empty(tokens, K, dtype=BF16),), backend)
    return found


def gather_same(results: list[Any], value: Any, group: Any = None) -> None:
    results[:] = [value] * len(results)


def gathered_at_once(graph: fx.Graph) -> int:
    """The most bytes of gathered weights that are alive at one node of a graph."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    alive = [0] * (len(order) + 1)
    for node, place in order.items():
        if "all_gather" not in str(node.target):
            continue
        last, views = place, [node]
        while views:
            for user in views.pop().users:
                last = max(last, order[user])
                if any(name in str(user.target) for name in ("wait_tensor", "permute")):
                    views.append(user)
        for at in range(place, last + 1):
            alive[at] += size_of(node)
    return max(alive)


def test_gathers_are_hidden_as_with_inductor(
    h100: None, benchmarked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_group(RANKS):
        theirs = schedule("inductor", monkeypatch)
        ours = schedule("cute", monkeypatch)
    assert counters["cute_backend"]["regions"] >= 6
    assert len(ours.compute) >= 7 and set(ours.compute) >= {"cute_backend.gemm_epilogue.default"}
    assert ours.exposed_ms <= theirs.exposed_ms + 0.01
    assert gathered_at_once(ours.graph) <= gathered_at_once(theirs.graph) < 9 * 2 * K * N
    assert not benchmarked


SIZES = [(8, 3, 8192), (4, 3, 4096), (4, 5, 2048), (2, 4, 6144), (8, 2, 1024)]
"""Ranks, layers and tokens. In the last, the third and, by torch's estimates, the second, gathers take longer
than products."""

BY_TORCH = {"custom_runtime_estimation": None, "compute_estimator": "analytical"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("by", ["rates", "torch"])
@pytest.mark.parametrize("ranks, layers, tokens", SIZES)
def test_gathers_of_low_contention_replace_as_many_as_with_inductor(
    ranks: int,
    layers: int,
    tokens: int,
    by: str,
    h100: None,
    benchmarked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with one more weight in memory at most, and in the same time, by the scheduler's own account."""
    if not hasattr(OPTIONS, "enable_low_contention_collectives"):
        pytest.skip("this torch has no low-contention collectives")
    options: dict[str, Any] = {
        "enable_low_contention_collectives": True,
        "low_contention_min_bytes_per_rank": 0,
        "custom_runtime_estimation": rate,
        **(BY_TORCH if by == "torch" else {}),
    }
    kind = "all_gather of low contention"
    with fake_group(ranks), symmetric_memory._test_mode():
        theirs = schedule("inductor", monkeypatch, layers, tokens, **options)
        ours = schedule("cute", monkeypatch, layers, tokens, **options)
    assert moved(ours.graph)[kind] >= moved(theirs.graph)[kind] == 3 * layers - 1
    assert gathered_at_once(ours.graph) <= gathered_at_once(theirs.graph) + 2 * K * N
    # torch takes the results of a call for copies of themselves. No collective is left for the last to hide.
    assert ours.work_ms + ours.exposed_ms <= 1.003 * (theirs.work_ms + theirs.exposed_ms)


def products(graph: fx.Graph) -> list[int]:
    return [len(node.args[1]) for node in graph.nodes if node.target is gemm_epilogue]


def short(node: fx.Node, size: int | None) -> float | None:
    """A hook by which products take no time, so that they hide nothing."""
    return 0.0 if node.target in (torch.ops.aten.mm.default, gemm_epilogue) else estimate(node, size)


def of_gathers(node: fx.Node, size: int | None) -> float | None:
    """A hook that knows gathers alone, so that the cost model predicts products."""
    return estimate(node, size) if "all_gather" in str(node.target) else None


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "tokens, options, pairs",
    [
        (8192, {}, 2),
        (8192, {"enable_overlap_scheduling": False}, 3),
        (2048, {"custom_runtime_estimation": rate}, 0),
        (4096, BY_TORCH, 0),
        (8192, {"custom_runtime_estimation": of_gathers}, 2),
        (8192, {"custom_runtime_estimation": short}, 3),
    ],
    ids=["all but the first", "unscheduled", "late", "late by torch", "by model", "short"],
)
def test_pairs_are_apart_where_their_gathers_would_be_exposed(
    tokens: int,
    options: dict[str, Any],
    pairs: int,
    h100: None,
    benchmarked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "compute_estimator" in options and not hasattr(OPTIONS, "compute_estimator"):
        pytest.skip("this torch benchmarks products always")
    with fake_group(4):
        scheduled = schedule("cute", monkeypatch, tokens=tokens, **options)
    assert products(scheduled.graph).count(2) == pairs


@pytest.mark.parametrize("cap, pairs", [(200.0, 2), (240.0, 3)])
def test_pairs_whose_gathers_become_one_are_fused(
    cap: float, pairs: int, h100: None, benchmarked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight has 112 MiB."""
    if not hasattr(OPTIONS, "pre_bucketing_fsdp_collectives_bucket_cap_mb"):
        pytest.skip("this torch has no bucketing before its scheduling")
    options = {
        "pre_bucketing_fsdp_collectives": True,
        "pre_bucketing_fsdp_collectives_bucket_cap_mb": cap,
    }
    with fake_group(4):
        scheduled = schedule("cute", monkeypatch, **options)
    assert products(scheduled.graph).count(2) == pairs


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shared", [True, False])
def test_explain_says_why_a_pair_is_apart(shared: bool, h100: None) -> None:
    prefix = "aten_distributed_optimizations"
    on = {f"{prefix}.enable_overlap_scheduling": True, f"{prefix}.custom_runtime_estimation": estimate}
    with fake_group(RANKS), inductor_config.patch(on), config.patch(shared_launches=shared), torch.no_grad():
        explained = cute_backend.explain(Sharded(), torch.empty(8192, K, dtype=BF16))
    assert len(explained.regions) == 3
    text = " ".join(str(explained).split())
    for other in ("mm", "mm_1"):
        assert f"shares no launch with {other}, because their weights are gathered separately: while" in text


def test_without_torchs_estimates_pairs_are_fused_and_the_lack_is_counted(
    h100: None, benchmarked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> float:
        raise AttributeError("planted")

    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr(exposed_gathers, "assumed_ms", fail)
    said = pytest.warns(RuntimeWarning, match="planted; products that wait for several gathered weights")
    with fake_group(RANKS), config.patch(raise_errors=False), said:
        scheduled = schedule("cute", monkeypatch)
    assert products(scheduled.graph).count(2) == 3
    assert counters["cute_backend"]["internal_error"] == 1


# Times of products


def test_products_that_only_torch_knows_are_benchmarked_and_ours_are_predicted(
    h100: None, benchmarked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_group(RANKS):
        schedule("inductor", monkeypatch, layers=1, tokens=64, custom_runtime_estimation=None)
        assert benchmarked and all(name.startswith("aten.") for name in benchmarked)
        benchmarked.clear()
        ours = schedule("cute", monkeypatch, layers=1, tokens=64, custom_runtime_estimation=None)
    assert "cute_backend.gemm_epilogue.default" in ours.compute
    assert all(name.startswith("aten.") for name in benchmarked)


def test_a_product_is_predicted_in_the_tile_that_is_set() -> None:
    def predicted(tile: str | None) -> float | None:
        torch._dynamo.reset()
        args = torch.empty(4096, 1024, dtype=BF16), torch.empty(1024, 4096, dtype=BF16)
        with config.patch(tile=tile), torch.no_grad():
            (graph,) = post_grad_graphs(lambda a, b: F.relu(a @ b), args, "cute")
        (product,) = graph.find_nodes(op="call_function", target=gemm_epilogue)
        return ProductTimes(None)(product)

    slow, fast = predicted("64x64_1x1"), predicted(None)
    assert slow and fast and slow > 1.5 * fast


def test_the_users_own_hook_comes_first() -> None:
    graph = fx.Graph()
    node = graph.call_function(gemm_epilogue, ())
    other = graph.call_function(torch.ops.aten.relu.default, ())
    assert ProductTimes(lambda node, size: 7.0)(node) == 7.0
    assert ProductTimes(lambda node, size: None)(other) is None


def test_the_hook_is_set_only_where_torch_would_benchmark() -> None:
    assert not times_wanted({})
    scheduling = {"aten_distributed_optimizations.enable_overlap_scheduling": True}
    hook = times_wanted(scheduling)[OPTION]
    assert isinstance(hook, ProductTimes) and hook.own is None
    assert not times_wanted({**scheduling, OPTION: hook})
    assert times_wanted({**scheduling, OPTION: estimate})[OPTION].own is estimate
    analytical = {"aten_distributed_optimizations.compute_estimator": "analytical"}
    assert not times_wanted({**scheduling, **analytical})


def test_the_hook_is_the_same_in_every_process() -> None:
    """Inductor's caches have it in their keys."""
    assert pickle.dumps(ProductTimes(None)) == pickle.dumps(ProductTimes(None))


def test_a_pass_of_inductor_sets_the_hook_itself(
    h100: None, benchmarked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"post_grad_custom_pre_pass": cute_backend.epilogue_pass}
    with fake_group(RANKS), inductor_config.patch(options):
        ours = schedule("inductor", monkeypatch, layers=1, tokens=64, custom_runtime_estimation=None)
    assert "cute_backend.gemm_epilogue.default" in ours.compute
    assert all(name.startswith("aten.") for name in benchmarked)


@pytest.mark.parametrize("rated", [True, False])
def test_products_that_torch_can_not_rate_are_fused(
    rated: bool, h100: None, benchmarked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch fails to estimate a product with a result in fp8 on a GPU that is not in its table."""

    def tflops(dtype: torch.dtype, device: Any = None) -> float:
        if not rated and dtype not in (BF16, torch.float16, torch.float32):
            raise AssertionError(dtype)
        return TENSOR_CORES / 1e12

    def program(x: Tensor, shard: Tensor, scale: Tensor) -> Tensor:
        c10d = torch.ops._c10d_functional
        gathered = c10d.all_gather_into_tensor(shard, RANKS, dist.group.WORLD.group_name)
        y = (x @ c10d.wait_tensor(gathered).t()).relu().float() * scale
        return y.clamp(-448, 448).to(torch.float8_e4m3fn)

    monkeypatch.setattr(_runtime_estimation, "get_device_tflops", tflops)
    monkeypatch.setattr(dist, "all_gather_object", gather_same)
    args = (torch.zeros(64, 128, dtype=BF16), torch.zeros(32, 128, dtype=BF16), torch.ones(()))
    prefix = "aten_distributed_optimizations"
    enabled = {f"{prefix}.enable_overlap_scheduling": True, f"{prefix}.insert_overlap_deps": False}
    with fake_group(RANKS), inductor_config.patch(enabled), torch.no_grad():
        (graph,) = post_grad_graphs(program, args, "cute")
    is_rated = rated or not hasattr(overlap_scheduling, "estimate_roofline_runtime_ms")
    targets = [node.target for node in graph.nodes]
    assert (gemm_epilogue if is_rated else gemm_epilogue_into) in targets, targets
    assert counters["cute_backend"] == {"anchors": 1, "regions": 1}
    assert OPTIONS.custom_runtime_estimation is None  # the backend has set its hook for itself alone


# Operations


@pytest.mark.parametrize(
    "program, shapes, operations",
    [
        (lambda a, b: F.relu(a @ b), [(64, 32), (32, 48)], 2 * 64 * 32 * 48),
        (lambda a, b, c: F.silu(a @ b) * (a @ c), [(64, 32), (32, 48), (32, 48)], 4 * 64 * 32 * 48),
        (
            lambda a, b: (lambda y: F.silu(y[:, :24]) * y[:, 24:])(a @ b),
            [(64, 32), (32, 48)],
            2 * 64 * 32 * 48,
        ),
        (
            lambda a, b: (lambda y: F.silu(y[:, ::2]) * y[:, 1::2])(a @ b),
            [(64, 32), (32, 48)],
            2 * 64 * 32 * 48,
        ),
        (lambda a, b: torch.bmm(a, b).relu(), [(3, 64, 32), (3, 32, 48)], 2 * 3 * 64 * 32 * 48),
        (
            lambda a, b, c: ((a @ b).relu(), (a @ c).tanh()),
            [(64, 32), (32, 64), (32, 128)],
            2 * 64 * 32 * (64 + 128),
        ),
    ],
    ids=["plain", "gated", "halves", "interleaved", "batched", "shared"],
)
def test_operations_are_those_of_the_products(
    program: Callable[..., Any], shapes: list[tuple[int, ...]], operations: int
) -> None:
    inputs = tuple(torch.zeros(*shape, dtype=BF16) for shape in shapes)
    with config.patch(shared_launches=True), torch.no_grad():
        (graph,) = post_grad_graphs(program, inputs, "cute")
    nodes = [node for node in graph.nodes if node.target is gemm_epilogue]
    assert nodes and not [node for node in graph.nodes if str(node.target).startswith("aten.mm")]
    assert all(map(overlap_scheduling.is_compute_node, nodes))
    assert not any(map(fusion_regions.is_fusible_node, nodes))
    registered = torch.utils.flop_counter.flop_registry[torch.ops.cute_backend.gemm_epilogue]
    args = [fx.map_arg(node.args, lambda each: each.meta["val"]) for node in nodes]
    assert sum(registered(*each, out_val=None) for each in args) == operations


def test_groups_and_packed_values_count_as_torch_counts_them() -> None:
    from cute_backend.runtime.calls.flops import of_products
    from cute_backend.spec import Accumulator, DType, EpilogueSpec, Major, ProductKind, Scaling, Store

    def spec(acc: Accumulator) -> str:
        return EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.BF16),)).to_json()

    offsets = torch.tensor([10, 64], dtype=torch.int32)
    rows = Accumulator("acc", DType.BF16, DType.BF16, kind=ProductKind.GROUPED)
    a, b = torch.zeros(64, 32, dtype=BF16), torch.zeros(2, 32, 48, dtype=BF16)
    assert of_products([a, offsets], [b], [], spec(rows)) == 2 * 64 * 32 * 48
    of_k = Accumulator("acc", DType.BF16, DType.BF16, Major.MN, Major.MN, kind=ProductKind.K_GROUPED)
    assert of_products([a, offsets], [b[0]], [], spec(of_k)) == 2 * 64 * 32 * 48
    packed = Accumulator("acc", DType.E2M1X2, DType.E2M1X2, a_scaling=Scaling.NV, b_scaling=Scaling.NV)
    halves = [torch.zeros(64, 16, dtype=torch.uint8), torch.zeros(16, 48, dtype=torch.uint8)]
    scales = torch.zeros(512)
    assert of_products([halves[0], scales], [halves[1], scales], [], spec(packed)) == 2 * 64 * 32 * 48


def test_both_ops_have_a_formula() -> None:
    for op in (gemm_epilogue, gemm_epilogue_into, torch.ops.cute_backend.sample.default):
        node = fx.Graph().call_function(op, ())
        assert overlap_scheduling.is_compute_node(node)


def test_eager_calls_are_counted_once() -> None:
    a, b = torch.zeros(64, 32, dtype=BF16), torch.zeros(32, 40, dtype=BF16)
    for _ in range(2):  # the first call is traced, too
        with FlopCounterMode(display=False) as counter:
            cute_backend.gemm(a, b, epilogue=torch.relu)
        assert counter.get_total_flops() == 2 * 64 * 32 * 40
    with FlopCounterMode(display=False) as counter:
        cute_backend.sample(a, b.t().contiguous(), seed=0, num_samples=9)
    assert counter.get_total_flops() == 2 * (2 * 64 * 32 * 40)
