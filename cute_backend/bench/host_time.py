"""The time of calls on the host, and of the steps to a kernel in a new process. The product is so small that
the GPU waits for the host."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_backend.api import explain
from cute_backend.bench import scaled_mm
from cute_backend.bench.results import HostResult, Timing
from cute_backend.errors import UsageError
from cute_backend.runtime.calls.launch import launch
from cute_backend.runtime.calls.op import gemm_epilogue
from cute_backend.runtime.compiling.build import settle
from cute_backend.runtime.disk.cache import CACHE_DIR_VARIABLE
from cute_backend.runtime.host.interpreter import search_path
from cute_backend.runtime.kernels.kernel import Kernel

_SIZE = 128

_BURST = 100
"""Calls between two synchronisations: enough to be timed, and too few to fill the GPU's queue of 1024."""

_FRESH = (
    "import time, torch; start = time.perf_counter(); from cute_backend.bench import fresh; fresh.main(start)"
)


def pointwise(x: Tensor, residual: Tensor) -> Tensor:
    """Pointwise work, for which Inductor generates one kernel."""
    return F.gelu(x, approximate="tanh") + residual


def pointwise_of_six(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor, residual: Tensor
) -> Tensor:
    """Pointwise work on the operands of the fused region: x and weight are multiplied by element."""
    y = x.to(torch.bfloat16) * weight.to(torch.bfloat16) * x_scale * weight_scale + bias
    return pointwise(y.to(torch.bfloat16), residual)


@torch.no_grad()
def measure_host(rounds: int, progress: Callable[[str], Any]) -> HostResult:
    """The host time of one call with M = N = K = 128 in e4m3. Raises UsageError if no kernel can be built."""
    programs = calls("cuda")
    progress("timing calls")
    timings = time_calls(programs, rounds)
    full = scaled_mm.problem(_SIZE, _SIZE, _SIZE).workloads[1]
    with torch.device("cuda"):
        args = full.inputs()
    kernel = explain(full.fn, *args, dynamic=False).first_region().kernel()
    with tempfile.TemporaryDirectory() as folder:
        progress("compiling a kernel in a new process")
        cold = _in_new_process(kernel, folder)
        progress("loading it in another")
        warm = _in_new_process(kernel, folder)
    return HostResult(timings, cold["load_s"], warm["import_s"], warm["load_s"], warm["imports_cutlass"])


def calls(device: str) -> dict[str, Callable[[], Tensor]]:
    """The calls that are timed, by name: a product with scales alone, then graphs of one kernel each.

    Inductor's code calls the launch, not the op: the launch alone is what a fused region adds to a graph.
    """
    torch._dynamo.reset()
    bare, full, _ = scaled_mm.problem(_SIZE, _SIZE, _SIZE).workloads
    with torch.device(device):
        operands, args = bare.inputs(), full.inputs()
        plane = torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16)
    product = explain(bare.fn, *operands, dynamic=False).first_region().spec.to_json()
    x, weight, x_scale, weight_scale = operands
    b, loads = weight.t(), [x_scale.view(-1), weight_scale.view(-1)]
    of_two = torch.compile(pointwise, dynamic=False)
    of_six = torch.compile(pointwise_of_six, dynamic=False)
    inductor = torch.compile(full.fn, dynamic=False)
    cute = torch.compile(full.fn, backend="cute", dynamic=False)
    return {
        "eager _scaled_mm": lambda: bare.fn(*operands),
        "the op through torch's dispatcher, same product": lambda: gemm_epilogue([x], [b], loads, product)[0],
        "the launch as Inductor's code calls it": lambda: launch([x], [b], loads, product)[0],
        "compiled, one pointwise kernel of two operands": lambda: of_two(plane, args[-1]),
        "compiled, one pointwise kernel of six operands": lambda: of_six(*args),
        "compiled by cute, one fused region of six": lambda: cute(*args),
        "compiled by Inductor, the same program": lambda: inductor(*args),
    }


def time_calls(programs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Microseconds of host time of one call of each, from bursts that are interleaved."""
    order, shuffle = list(programs), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in programs}
    for name in order:
        _burst(programs[name])  # compiles
    settle()
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(_burst(programs[name]))
    return {name: Timing.of(taken) for name, taken in times.items()}


def _burst(program: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_BURST):
        program()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * taken / _BURST


def _in_new_process(kernel: Kernel, folder: str) -> dict[str, Any]:
    """The report of `fresh` about `kernel`, with `folder` as its cache, and with bytecode as if installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), CACHE_DIR_VARIABLE: folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", _FRESH],
        input=json.dumps(kernel.to_dict()),
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,  # `-c` looks for modules here first
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"a new process can't get a kernel: {last}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report
