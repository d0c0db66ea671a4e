"""A launch, the simulator, CUTLASS Operators and timings call a kernel with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_backend.kinds import reductions
from cute_backend.kinds.results import WholePlane
from cute_backend.planning import Arch
from cute_backend.runtime.arguments.bind import Binding
from cute_backend.runtime.arguments.device import Device
from cute_backend.runtime.arguments.outputs import Outputs
from cute_backend.runtime.calls import spec_kernels
from cute_backend.runtime.calls.launch import launch
from cute_backend.runtime.compiling import rungs
from cute_backend.runtime.tuning import timing
from cute_backend.signature import TABLE_ROWS, TMA_ALIGN
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
    Reduction,
    Store,
    Stride,
)
from support.runtime import launches
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
        Store("peak", "acc", DType.F32, form=Reduction(Axis.ALL, reductions.MAX)),
        Store("out0", "exact0", DType.BOOL, WholePlane(Order.COLUMN)),
        Store("rows", "acc", DType.F32, form=Reduction(Axis.ROW, reductions.SUM)),
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

    launches.on(GPU, monkeypatch)
    for module in (spec_kernels, rungs):
        monkeypatch.setattr(module, "load_known", lambda kernels: {})
    monkeypatch.setattr(rungs, "obtain", lambda kernels: dict.fromkeys(kernels, function))
    monkeypatch.setattr(rungs, "begin", lambda kernel, then: None)
    launch(*given, SPEC.to_json())


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
    results, _ = Outputs(kernel.plan).of_size(M, N).allocate(given[0][0])
    for result in results:
        result.zero_()
    operator = implementation.Implementation(kernel)
    room = torch.empty(operator.workspace_bytes(M, N), dtype=torch.uint8)
    (a,), (b,), loads = given
    operator.launch(lambda *arguments: seen.append(list(arguments[:-1])), a, b, loads, results, room)


def timed(given: Operands, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "random_operands", lambda *how: given)
    seen.append(timing.arguments_of([kernel_of(SPEC).plan], M, N, K, torch.Generator()))


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
        check_layouts(kernel_of(SPEC), arguments)
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


TABLE = Load(
    "exact0",
    LoadKind.EXACT,
    DType.BF16,
    Stride.OTHER,
    Stride.OTHER,
    (Stride.ZERO, Stride.OTHER),
    Blocks(32, Stride.ZERO, Stride.ONE),
)


def bound_table(batches: int, values: Tensor) -> Tensor:
    """The tensor that a kernel gets for values (rows, 3, 32) in blocks, or for a table (rows, 32) that all
    batches share."""
    rows, *_ = values.shape
    if values.dim() == 2:
        values = values[:, None].expand(-1, 3, -1)
    given = values.expand(batches, -1, -1, -1)
    spec = replace(SPEC, loads=(TABLE,), stores=SPEC.stores[-1:])
    a, b = torch.zeros(batches * rows, K).bfloat16(), torch.zeros(96, K).bfloat16().t()
    bound = Binding(spec).bind([a], [b], [given])
    result = bound.tensors[-1]
    assert bound.aligned and not result.data_ptr() % TMA_ALIGN and not result.stride(1) * 2 % TMA_ALIGN
    assert result.shape[2:] == (3, 32) and (result.stride(0), *result.stride()[2:]) == (0, 0, 1)
    assert result.shape[0] == 1 or result.shape[1] % TABLE_ROWS == 0
    assert torch.equal(result.flatten(0, 1), given.flatten(0, 1))
    return result


@pytest.mark.filterwarnings("ignore:cute_backend")
@pytest.mark.parametrize(
    ("batches", "rows", "copied"),
    [(2, 2 * TABLE_ROWS, False), (2, TABLE_ROWS + 64, True), (1, 100, False), (5, 1, True), (1, 1, False)],
)
def test_a_table_whose_rows_end_within_a_box_is_copied_for_all_rows(
    batches: int, rows: int, copied: bool
) -> None:
    table = torch.arange(rows * 32).reshape(rows, 32).bfloat16()
    assert (bound_table(batches, table).data_ptr() != table.data_ptr()) is copied


@pytest.mark.filterwarnings("ignore:cute_backend")
@pytest.mark.parametrize("batches", [1, 2])
def test_a_table_that_lies_otherwise_is_copied(batches: int) -> None:
    """A base and a pitch that are not aligned, and columns apart. Where repeated axes have strides of their
    own, those are not used."""
    memory = torch.arange(128.0 * 66).bfloat16()
    pitched = memory.view(128, 66)
    for table in (memory[1 : 128 * 32 + 1].view(128, 32), pitched[:, :32], pitched[:, :64:2]):
        bound_table(batches, table)
    repeated = pitched[:, None, :32].repeat(1, 3, 1)
    assert bound_table(batches, repeated).data_ptr() == repeated.data_ptr()


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
