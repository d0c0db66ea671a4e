"""A launch, the simulator, CUTLASS Operators and timings call a kernel with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend.planning import Alignment, Arch
from cute_backend.runtime import launch as launching
from cute_backend.runtime import timing
from cute_backend.runtime.bind import Binding
from cute_backend.runtime.device import Device
from cute_backend.runtime.kernel import Kernel
from cute_backend.runtime.outputs import Outputs
from cute_backend.simulator import simulate
from cute_backend.spec import (
    Accumulator,
    Axis,
    Blocks,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Order,
    ReduceKind,
    Reduction,
    Store,
    Stride,
)
from support.runtime.handmade import kernel_of
from support.runtime.layouts import check_layouts

SPEC = EpilogueSpec(
    (Accumulator("acc", DType.BF16, DType.BF16),),
    (
        Load("scalar0", LoadKind.SCALAR, DType.F32, Stride.ZERO, Stride.ZERO),
        Load("exact0", LoadKind.EXACT, DType.BOOL, Stride.OTHER, Stride.ONE),
        Load("rowvec0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE),
        Load("exact1", LoadKind.EXACT, DType.F32, Stride.OTHER, Stride.ONE, (Stride.OTHER, Stride.ZERO)),
    ),
    (),
    (
        Store("peak", "acc", DType.F32, reduce=Reduction(Axis.ALL, ReduceKind.MAX)),
        Store("out0", "exact0", DType.BOOL, Order.COLUMN),
        Store("rows", "acc", DType.F32, reduce=Reduction(Axis.ROW, ReduceKind.SUM)),
        Store("out1", "acc", DType.BF16),
    ),
)
"""One argument of every kind that isn't passed as the op gets it, stores of every kind in mixed order."""

M, N, K = 32, 48, 64
GPU = Device(-1, Arch.SM90A, 132, "a GPU")

Operands = tuple[list[Tensor], list[Tensor], list[Tensor]]
Seen = list[list[Tensor]]


def operands() -> Operands:
    """A misaligned A, a 0-d scalar, truth values, a strided vector and rows of each of two batches."""
    torch.manual_seed(0)
    a = torch.randn(M, K + 1).bfloat16()[:, 1:]
    b = torch.randn(N, K).bfloat16().t()
    rows = torch.randn(2, 1, N).expand(2, M // 2, N)
    return [a], [b], [torch.randn(()), torch.rand(M, N) > 0.5, torch.randn(2 * N)[::2], rows]


def launched(given: Operands, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(*arguments: Any) -> None:
        seen.append(list(arguments[:-1]))

    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "device_at", lambda index: GPU)
    monkeypatch.setattr(launching, "max_active_clusters", lambda index, size: 1)
    monkeypatch.setattr(launching, "load_known", lambda kernels: {})
    monkeypatch.setattr(launching, "obtain", lambda kernels: dict.fromkeys(kernels, function))
    launching.launch(*given, SPEC.to_json())


def simulated(given: Operands, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(arguments: Any, **how: Any) -> list[None]:
        seen.append(list(arguments[:-1]))
        return [None]

    monkeypatch.setattr(simulate, "_program", lambda kernel: SimpleNamespace(launch=launch))
    simulate.run_region(SPEC, *given, simulate.Machine(Arch.SM90A))


def operated(given: Operands, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass.operators", reason="needs the extra `operators`")
    from cute_backend.operators import implementation

    monkeypatch.setattr(implementation, "device_at", lambda index: GPU)
    monkeypatch.setattr(implementation, "max_active_clusters", lambda index, size: 1)
    kernel = kernel_of(SPEC)
    results, _ = Outputs(SPEC, kernel.config).of_size(M, N).allocate(given[0][0])
    for result in results:
        result.zero_()
    operator = implementation.Implementation(kernel)
    room = torch.empty(operator.workspace_bytes(M, N), dtype=torch.uint8)
    (a,), (b,), loads = given
    operator.launch(lambda *arguments: seen.append(list(arguments[:-1])), a, b, loads, results, room)


def timed(given: Operands, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "random_operands", lambda *how: given)
    configs = [kernel_of(SPEC).config]
    seen.append(timing.arguments_of(SPEC, configs, M, N, K, torch.Generator()))


PATHS = [launched, simulated, operated, timed]


@pytest.mark.filterwarnings("ignore:cute_backend")
def test_all_call_a_kernel_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given, seen = operands(), []  # type: ignore[var-annotated]
    for path in PATHS:
        path(given, seen, monkeypatch)
    assert len(seen) == len(PATHS)
    count = 2 + len(SPEC.loads)
    first, *others = seen
    for arguments in seen:
        check_layouts(Kernel(SPEC, kernel_of(SPEC).config, Alignment.TMA), arguments)
    for other in others:
        for left, right in zip(first[:-1], other[:-1], strict=True):
            assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
        assert all(map(torch.equal, first[:count], other[:count]))


def test_values_of_blocks_are_copied_to_lie_one_after_the_other() -> None:
    """One for each block, at every other place: contiguous along blocks, which are not the last axis."""
    blocks = Blocks(16, Stride.ONE, Stride.ZERO)
    load = Load("rowvec0", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.OTHER, blocks=blocks)
    spec = replace(SPEC, loads=(load,), stores=SPEC.stores[-1:])
    gate = torch.arange(6.0)[::2, None].expand(3, 16)
    *_, bound = Binding(spec).bind(*operands()[:2], [gate]).tensors
    assert bound.stride() == (1, 0) and torch.equal(bound, gate)


@pytest.mark.filterwarnings("ignore:cute_backend")
@pytest.mark.parametrize("step", ["bind", "written"])
@pytest.mark.parametrize("path", PATHS)
def test_none_has_a_way_of_its_own(
    path: Callable[..., None], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        pass

    def broken(*_: Any) -> Any:
        raise Broken

    monkeypatch.setattr(Binding, step, broken)
    with pytest.raises(Broken):
        path(operands(), [], monkeypatch)
