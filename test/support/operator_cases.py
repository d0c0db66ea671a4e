"""Tensors and epilogues for tests of the operators, and a machine without a GPU to run them on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

E4M3, E5M2, BF16, F16, F32, F64 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)

M, N, K = 192, 256, 160

TARGETS = ("90a", "100a")


def matrix(rows: int, columns: int, dtype: torch.dtype, order: str = "t", device: Any = "cpu") -> Tensor:
    """Small integers, "t" row-major or "n" column-major."""
    shape = (rows, columns) if order == "t" else (columns, rows)
    values = torch.randint(-3, 4, shape, device=device).to(dtype)
    return values if order == "t" else values.t()


def gemm_operands(
    a: torch.dtype = BF16, b: torch.dtype | None = None, out: torch.dtype = BF16, layout: str = "tnt"
) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and out of one layout."""
    return (
        matrix(M, K, a, layout[0]),
        matrix(K, N, b or a, layout[1]),
        torch.zeros(M, N).to(out) if layout[2] == "t" else torch.zeros(N, M).to(out).t(),
    )


def like(tensor: Tensor, where: str) -> Tensor:
    """The same tensor on a device without values."""
    if where == "cpu":
        return tensor
    if where == "meta":
        return tensor.to("meta")
    with FakeTensorMode():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def without_a_gpu(patch: pytest.MonkeyPatch, function_of: Callable[[Any], Callable[..., None]]) -> None:
    """Lets operators run on CPU tensors: `function_of` returns a stand-in for a compiled kernel."""
    from cute_backend.operators import implementation, kernels
    from cute_backend.operators.tensor_arguments import TensorWrapper

    def values_of(name: str, tensor: Any) -> Tensor:
        values = tensor.runtime_tensor if isinstance(tensor, TensorWrapper) else tensor
        return values[0] if values.dim() == 3 else values

    def launch(self: Any, *given: Any) -> None:
        gpu = SimpleNamespace(arch=self.kernel.arch, index=0, name="a simulated GPU", sm_count=132)
        patch.setattr(implementation, "device_at", lambda index: gpu)
        real_launch(self, *given)

    real_launch = implementation.Implementation.launch
    patch.setattr(kernels, "values_of", values_of)
    patch.setattr(kernels, "running_on", lambda stream, device: nullcontext())
    patch.setattr(implementation, "max_active_clusters", lambda index, size: 2)
    patch.setattr(implementation.Implementation, "launch", launch)
    patch.setattr(implementation.Implementation, "compile", lambda self: function_of(self.kernel))


def replayed(kernel: Any) -> Callable[..., None]:
    """A stand-in for a compiled kernel, which checks the layouts of the arguments and replays the spec."""
    from cute_backend.replay import replay
    from cute_backend.runtime.compiling.compile import fake_operands

    spec = kernel.plan.spec

    def function(*given: Any) -> None:
        *tensors, _ = given
        expected = fake_operands(kernel.plan)
        assert len(tensors) == len(expected)
        for (name, stand_in), tensor in zip(expected.items(), tensors, strict=True):
            assert tensor.dim() == len(stand_in.shape), name
            for stride, wanted in zip(tensor.stride(), stand_in.stride, strict=True):
                assert not isinstance(wanted, int) or stride == wanted, name
        loads = tensors[2 : 2 + len(spec.loads)]
        written = tensors[2 + len(spec.loads) :]
        for store, result, memory in zip(
            spec.stores, replay(spec, tensors[:1], tensors[1:2], loads), written, strict=False
        ):
            assert memory.numel() == result.numel(), store.name
            memory.copy_(result.view(memory.shape))

    return function


def simulated(kernel: Any) -> Callable[..., None]:
    """The kernel itself, with its real host code, on the simulator."""
    from cute_backend.runtime.compiling.build import build
    from cute_backend.runtime.compiling.compile import SYMBOL
    from cute_backend.simulator.host import HostProgram

    built = build(kernel)
    program = HostProgram(built.ptx, built.host_object, SYMBOL)

    def function(*given: Any) -> None:
        program.launch(list(given))

    return function
