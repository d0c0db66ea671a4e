"""First calls of whole models in new processes: with empty caches, and with those that the first one filled.

Each process is `python -m cute_backend.bench.first_call NAME RUNNER LAYERS`, which prints its figures as
JSON. The clock runs from the call to the result. Imports, the weights and the start of CUDA are not counted:
a program has them whoever compiles it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cute_backend.bench.model_run import failure
from cute_backend.bench.models import MODELS, Model
from cute_backend.bench.results import FirstCall, FirstCalls
from cute_backend.bench.table import Runner
from cute_backend.runtime.host.interpreter import search_path
from cute_backend.variables import CACHE_DIR_VARIABLE

_CACHES = (CACHE_DIR_VARIABLE, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

_COMMAND = (sys.executable, "-m", "cute_backend.bench.first_call")


def measure_first_calls(
    models: Sequence[Model],
    layers: int | None,
    times: int,
    progress: Callable[[str], Any],
    save: Callable[[FirstCalls], Any],
    command: Sequence[str] = _COMMAND,
) -> FirstCalls:
    """Times the first calls of models `times` times, one process after the other, so that each has the
    whole machine. A model has its real depth if `layers` is None. `save` is called with the results after
    each time."""
    runners = (Runner.INDUCTOR, Runner.CUTE)
    found = FirstCalls(layers, len(os.sched_getaffinity(0)), times, ())
    for model in models:
        depth, done = model.depth if layers is None else layers, found.calls
        calls = {runner: FirstCall(model.name, runner) for runner in runners}
        for _ in range(times):
            for runner in runners:
                progress(f"{model.name}, {runner.value}")
                if model.lacks:
                    calls[runner] = FirstCall(model.name, runner, note=f"not installed: {model.lacks}")
                elif not any(each.note for each in calls.values()):
                    calls[runner] = _with_another(calls[runner], model, depth, command)
            found = replace(found, calls=(*done, *calls.values()))
            save(found)
    return found


def _with_another(earlier: FirstCall, model: Model, layers: int, command: Sequence[str]) -> FirstCall:
    """The first calls of a model with a cold and a warm one more, or with what made one of these fail."""
    runner = earlier.runner
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in _CACHES}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), **caches}
        reports = []
        for _ in ("cold", "warm"):
            words = [*command, model.name, runner.value, str(layers)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                return replace(earlier, note=failure(done.stderr, done.returncode))
            reports.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = reports
    return replace(
        earlier,
        cold_s=(*earlier.cold_s, cold["seconds"]),
        warm_s=(*earlier.warm_s, warm["seconds"]),
        processor_s=(*earlier.processor_s, cold["processor_s"]),
        phases=(*earlier.phases, cold["phases"]),
        kernels=cold["kernels"],
    )


def first_call(model: Model, runner: Runner, layers: int, device: str = "cuda") -> dict[str, Any]:
    """The figures of the first call of a model in this process, which has compiled nothing before."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    with torch.device(device):
        module, args = model.build(layers)
        torch.ones(1) + 1  # CUDA is at work from here on
    compiled = torch.compile(module, backend=runner.value, dynamic=False)
    _wait(device)
    before, start = _processor_s(), time.perf_counter()
    if model.trains:
        compiled(*args).sum().backward()
    else:
        compiled(*args)
    _wait(device)
    seconds = time.perf_counter() - start
    _end_compilers()
    return {
        "seconds": seconds,
        "processor_s": _processor_s() - before,
        "kernels": counters["cute_backend"]["kernels_built"],
        "phases": {name: round(sum(each), 3) for name, each in compilation_time_metrics.items()},
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _end_compilers() -> None:
    """Ends the processes of both packages, since the system counts a process's time when it has ended."""
    from torch._inductor.async_compile import shutdown_compile_workers

    from cute_backend.runtime.compiling.workers import end_all

    shutdown_compile_workers()
    end_all()


def _processor_s() -> float:
    """Seconds of processor time of this process, and of those that it started and that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in usages)


def main() -> None:
    """Prints the figures of the model, the runner and the number of layers in the command line."""
    name, runner, layers = sys.argv[1:]
    (model,) = (each for each in MODELS if each.name == name)
    print(json.dumps(first_call(model, Runner(runner), int(layers))))


if __name__ == "__main__":
    main()
