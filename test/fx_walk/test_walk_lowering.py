"""How Inductor lowers a call of the op: what it allocates, where, and what its scheduler knows of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import comms, ir
from torch._inductor.utils import run_and_get_code
from torch.distributed._symmetric_memory import _test_mode
from torch.testing._internal.distributed.fake_pg import FakeStore

from cute_backend.runtime.calls.op import gemm_epilogue
from support.fx_walk.fake_gpu import lowered

BF16, E4M3, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
X, W = ((16, 64), BF16), ((64, 128), BF16)
FP8 = [((16, 64), E4M3), ((128, 64), E4M3), ((), F32)]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def reduced(local: Tensor) -> Sequence[Tensor]:
    ops = torch.ops._c10d_functional
    return (ops.wait_tensor(ops.all_reduce(local, "sum", dist.group.WORLD.group_name)),)


def by_rows(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return reduced(F.relu(x @ w))


def by_sequences(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return reduced(F.relu(x @ w).view(2, 8, 128))


def of_fp8(x: Tensor, w: Tensor, scale: Tensor) -> Sequence[Tensor]:
    return reduced(torch._scaled_mm(x, w.t(), scale, scale, out_dtype=BF16))


@pytest.mark.parametrize(
    ("fn", "operands"), [(by_rows, [X, W]), (by_sequences, [X, W]), (of_fp8, FP8)], ids=lambda value: ""
)
def test_a_small_all_reduce_is_one_shot_from_the_memory_that_a_kernel_writes(
    fn: Callable[..., Any], operands: list[Any], fake_group: None
) -> None:
    with _test_mode(), lowered(fn, *operands, **{"_collective.auto_select": True}) as graph:
        assert counters["cute_backend"]["regions"] == 1
        product, reduction, *_ = graph.operations
        assert isinstance(product.layout, ir.CommBufferLayout)
        assert "symm_mem.one_shot_all_reduce" in reduction.python_kernel_name
        assert reduction.input_name(0) == product.get_name()
        if fn is by_sequences:  # for which Inductor compiles a copy, here as for products of its own
            return
        code = graph.codegen()[0].value
    (written,) = re.findall(r"gemm_epilogue_of_\w+\(.*results=\[(\w+)\]\)", code)
    assert f"{written} = empty_strided_p2p((16, 128), (128, 1), torch.bfloat16" in code
    assert re.search(rf"symm_mem\.one_shot_all_reduce(_out)?\.default\({written}, 'sum'", code)


def test_symmetric_memory_is_left_where_a_size_is_unknown(fake_group: None) -> None:
    args = [torch.ones(shape, dtype=dtype) for shape, dtype in (X, W)]
    compiled = torch.compile(by_rows, backend="cute", options={"_collective.auto_select": True}, dynamic=True)
    with _test_mode():
        _, (code,) = run_and_get_code(compiled, *args)
    assert counters["cute_backend"]["regions"] == 1 and not counters["cute_backend"]["internal_error"]
    assert "one_shot" not in code
    assert re.search(r"(\w+) = empty_strided_cpu.*\n(.*\n)?.*gemm_epilogue_on_cpu\(.*results=\[\1\]", code)


TWO_RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch._dynamo.utils import counters

import cute_backend

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def whole(*shape):
    return torch.randint(-1, 2, shape, generator=generator).to(torch.bfloat16)

def fn(x, w, y, u):
    sums = collectives.all_reduce(torch.relu(x @ w), "sum", dist.group.WORLD)
    beside = torch.relu(y @ u)  # while the first result is sent
    return torch.relu(beside @ w.t()) + sums

generator = torch.Generator().manual_seed(rank)
args = whole(16, 32), whole(32, 32), whole(16, 48), whole(48, 32)
assert torch.equal(torch.compile(fn, backend="cute")(*args), fn(*args))
counted = counters["cute_backend"]
assert counted["regions"] + counted["cached_regions"] == 3  # one rank may find what the other has cached
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_two_ranks_reduce_what_kernels_write(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_RANKS]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors


def one(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return (F.relu(x @ w),)


def largest(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return ((x @ w).argmax(-1),)


def two(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    wide = (x @ w).float()
    return F.relu(wide), torch.sigmoid(wide).to(BF16)


@pytest.mark.parametrize("fn", [one, largest, two])
def test_the_scheduler_takes_a_call_for_a_product(fn: Callable[..., Any]) -> None:
    speed = mock.patch("torch._inductor.scheduler.get_gpu_dram_gbps", lambda: 4800)
    flops = mock.patch("torch._inductor.scheduler.get_device_tflops", {BF16: 989, F32: 67}.__getitem__)
    seen = []
    update = "torch._inductor.graph.GraphLowering._update_scheduler"
    whole = torch._inductor.graph.GraphLowering._update_scheduler

    def looking(graph: Any) -> None:
        whole(graph)
        for node in graph.scheduler.nodes:
            if not isinstance(node.node, ir.MultiOutput):
                seen.append((node.node, node._get_estimated_runtime(), comms.is_gemm_like(node.node)))

    with speed, flops, mock.patch(update, looking), lowered(fn, X, W) as graph:
        graph.codegen()
    ((node, milliseconds, is_product),) = seen
    assert is_product
    assert node.get_origin_node().target is gemm_epilogue
    assert milliseconds * 1e6 >= 2 * (16 * 64 + 64 * 128) / 4800  # its operands' bytes
    if fn is one:
        assert node.get_dtype() is node.maybe_get_dtype() is BF16


def chained(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = F.relu(x @ w)
    return x


def given_back(x: Tensor, w: Tensor) -> Tensor:
    x.copy_(F.relu(x @ w))
    return w + 1


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(x @ w + x.t()).t()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [chained, given_back, transposed])
def test_no_kernel_writes_to_what_it_reads(fn: Callable[..., Any], dynamic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-1, 2, (16, 16), generator=generator).to(BF16) for _ in range(2))
    own, right = x.clone(), x.clone()
    result, (code,) = run_and_get_code(torch.compile(fn, backend="cute", dynamic=dynamic), own, w)
    assert torch.equal(result, fn(right, w)) and torch.equal(own, right)
    calls = re.findall(r"gemm_epilogue_on_cpu\((.*?), '.*results=\[(\w+)\]\)", code)
    assert len(calls) == counters["cute_backend"]["regions"] > 0
    for operands, result in calls:
        assert not re.search(rf"\b{result}\b", operands)
    if fn is chained:
        assert code.count("# reuse") == 2, "the third result lies where the first one was"


def test_training_gives_the_gradients_of_eager() -> None:
    args = [torch.randint(-1, 2, (16, 16)).to(BF16) for _ in range(2)]
    gradients = []
    for fn in (chained, torch.compile(chained, backend="cute")):
        own = [each.clone().requires_grad_() for each in args]
        fn(*own).sum().backward()
        gradients.append([each.grad for each in own])
    for ours, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager)
