"""The counters of tiles without a GPU: who shares them, and what a captured launch gets."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.planning import Alignment, Arch, Plan, TileConfig, kernel_plan, plan
from cute_backend.planning.last_tile import MOST_PARTS
from cute_backend.runtime.arguments import counters
from cute_backend.runtime.arguments.counters import SLAB, counters_for, set_aside
from cute_backend.runtime.arguments.outputs import Outputs
from cute_backend.spec import (
    Accumulator,
    Axis,
    DType,
    EpilogueSpec,
    ProductKind,
    Reduction,
    Store,
)


@dataclass
class Gpu:
    """Stands for torch's view of a GPU: its current device and stream, and whether that is captured."""

    device: int = 0
    stream: int = 0
    captures: bool = False
    zeroed: list[int] = field(default_factory=list)
    synchronized: int = 0

    def zeros(self, count: int, **how: Any) -> Tensor:
        assert not self.captures, "a graph would zero the counters whenever it runs"
        self.zeroed.append(count)
        return torch.zeros(count, dtype=how["dtype"])

    def synchronize(self) -> None:
        assert not self.captures
        self.synchronized += 1

    def as_torch(self) -> SimpleNamespace:
        return SimpleNamespace(
            _C=SimpleNamespace(
                _cuda_getDevice=lambda: self.device, _cuda_getCurrentRawStream=lambda device: self.stream
            ),
            cuda=SimpleNamespace(
                device=lambda index: nullcontext(),
                is_current_stream_capturing=lambda: self.captures,
                current_stream=lambda: self,
            ),
            device=lambda kind, index: torch.device("cpu"),
            empty=torch.empty,
            int32=torch.int32,
            zeros=self.zeros,
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(counters, "torch", gpu.as_torch())
    monkeypatch.setattr(counters, "_reserves", {})
    monkeypatch.setattr(counters, "_own", counters._OfThread())
    return gpu


def taken(count: int, device: int = 0) -> Tensor:
    """What a launch on a GPU gets."""
    like: Any = SimpleNamespace(is_cuda=True, get_device=lambda: device)
    return counters_for(count, like)


def shared(one: Tensor, other: Tensor) -> bool:
    """Whether two launches share a counter."""
    starts = [each.data_ptr() for each in (one, other)]
    ends = [each.data_ptr() + each.nbytes for each in (one, other)]
    return max(starts) < min(ends)


def test_launches_to_one_stream_share_counters_and_others_do_not(gpu: Gpu) -> None:
    first = taken(300)
    assert len(first) >= 300 and first.dtype is torch.int32 and not first.any()
    assert taken(7) is taken(300) is first
    gpu.stream = 1
    second = taken(300)
    assert not shared(first, second)
    gpu.stream, gpu.device = 0, 1
    assert not any(shared(taken(300, device=1), each) for each in (first, second))
    gpu.device = 0
    assert taken(300) is first


def test_a_larger_launch_gets_more_of_its_own_stream(gpu: Gpu) -> None:
    small = taken(10)
    large = taken(5000)
    assert len(large) >= 5000 and not shared(small, large) and taken(10) is large


def test_threads_share_no_stream_by_its_number(gpu: Gpu) -> None:
    """The default stream of a thread has the same number in each."""
    gpu.stream = 2
    found = [taken(10)]
    thread = Thread(target=lambda: found.append(taken(10)))
    thread.start()
    thread.join()
    assert not shared(*found)


def test_every_captured_launch_has_counters_of_its_own(gpu: Gpu) -> None:
    eager = taken(100)
    assert gpu.synchronized == 1, "a graph may run on another stream than the one that zeroed its counters"
    gpu.captures = True
    captured = [taken(100) for _ in range(3)]
    assert [len(each) for each in captured] == [100] * 3
    several = [eager, *captured]
    assert not any(shared(one, other) for one in several for other in several if one is not other)
    gpu.captures = False
    assert taken(100) is eager and gpu.synchronized == 1


def test_a_captured_launch_does_without_if_none_are_set_aside(gpu: Gpu) -> None:
    gpu.captures = True
    set_aside(0)
    assert len(taken(1)) == 0 and not gpu.zeroed
    gpu.captures = False
    set_aside(0)
    gpu.captures = True
    assert len(taken(SLAB - 1)) == SLAB - 1 and len(taken(2)) == 0 and len(taken(1)) == 1


def test_more_are_set_aside_by_a_launch_that_is_not_captured(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "MOST_SLABS", 2)
    taken(1)
    gpu.captures = True
    first = taken(SLAB // 2 + 1)
    gpu.captures = False
    taken(1)
    gpu.captures = True
    second = taken(SLAB)
    assert len(second) == SLAB and not shared(first, second)
    gpu.captures = False
    taken(1)
    gpu.captures = True
    assert len(taken(1)) == 0 and gpu.zeroed.count(SLAB) == 2, "no more than two slabs"


def of_rows(*kinds: reductions.ReductionKind, axis: Axis = Axis.ROW) -> EpilogueSpec:
    dtypes = [DType.I64 if kind.is_place else DType.F32 for kind in kinds]
    stores = [
        Store(f"out{i}", "acc", dtype, form=Reduction(axis, kind))
        for i, (kind, dtype) in enumerate(zip(kinds, dtypes, strict=True))
    ]
    return EpilogueSpec((Accumulator("acc", DType.BF16, DType.BF16),), (), (), tuple(stores))


TILE = TileConfig(Arch.SM90A, 128, 128)


def planned(spec: EpilogueSpec, tile: TileConfig) -> Plan:
    return plan(spec, tile, Alignment.TMA)


def test_rows_of_few_tiles_are_counted() -> None:
    spec = of_rows(reductions.MAX, reductions.MEAN)
    assert planned(spec, TILE).finishes_rows
    most = MOST_PARTS * TILE.tile_n
    assert planned(spec, TILE).counters(200, most) == 13 and planned(spec, TILE).counters(200, most + 1) == 0
    assert not planned(of_rows(reductions.MAX, axis=Axis.COLUMN), TILE).finishes_rows
    assert not planned(of_rows(reductions.MAX, axis=Axis.ALL), TILE).finishes_rows
    assert not planned(of_rows(reductions.MAX, reductions.ARGMAX), TILE).finishes_rows
    in_memory = TileConfig(Arch.SM90A, 64, 64, split_k=6)
    assert in_memory.sums_in_memory and not planned(spec, in_memory).finishes_rows
    plane = EpilogueSpec(spec.accumulators, (), (), (Store("out0", "acc", DType.F32),))
    assert not planned(plane, TILE).finishes_rows


def test_a_transposed_kernel_counts_the_tiles_of_its_own_rows() -> None:
    transposed = TileConfig(Arch.SM90A, 128, 128, transposed=True)
    assert not planned(of_rows(reductions.MAX), transposed).finishes_rows
    assert planned(of_rows(reductions.MAX, axis=Axis.COLUMN), transposed).counters(200, 300) == 19


@pytest.mark.parametrize("kind", [ProductKind.BATCHED, ProductKind.GROUPED])
def test_tiles_that_begin_at_any_row_have_a_counter_for_each(kind: ProductKind) -> None:
    spec = of_rows(reductions.MAX)
    spec = replace(spec, accumulators=(replace(spec.product, kind=kind),))
    assert planned(spec, TILE).counters(200, 300) == 200


def test_a_launch_passes_zeros_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Outputs(planned(of_rows(reductions.MAX), TILE))
    like = torch.empty(0)
    (*_, of_few) = memory.of_size(200, 400).allocate(like)[1]
    assert len(of_few) == 13 and not of_few.any()
    (*_, of_many) = memory.of_size(200, 2**15).allocate(like)[1]
    assert len(of_many) == 0
    monkeypatch.setattr(kernel_plan, "counters_needed", lambda *sizes: 0)
    (*_, none) = Outputs(planned(of_rows(reductions.MAX), TILE)).of_size(200, 400).allocate(like)[1]
    assert len(none) == 0
    columns = (
        Outputs(planned(of_rows(reductions.MAX, axis=Axis.COLUMN), TILE)).of_size(200, 400).allocate(like)[1]
    )
    assert len(columns) == 2, "a result and the workspace"
