"""The run of whole models. Each has a process of its own; several run at once, and one at a time has the
GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cute_backend.bench.model_results import ModelResult, read
from cute_backend.bench.models import Model
from cute_backend.runtime.host.interpreter import search_path

SECONDS = 530.0
"""The time limit of a run in seconds. Models that are not measured by then are left for another run."""

_CORES_EACH = 2
"""Processors for each process: compiling keeps one busy most of the time, and its child processes another."""

_POLL_S = 0.2


@dataclass
class _Process:
    model: Model
    running: subprocess.Popen[str]
    output: IO[str]
    errors: IO[str]


def measure_models(
    models: Sequence[Model],
    rounds: int,
    done: Callable[[ModelResult], Any],
    seconds: float = SECONDS,
    command: Sequence[str] = (sys.executable, "-m", "cute_backend.bench.model_case"),
) -> None:
    """Times each model in a process of its own, and calls `done` with each result.

    A model whose packages aren't installed, or whose process fails, has a result with a note. After `seconds`
    the remaining processes are ended, and their models have no result.
    """
    deadline = time.monotonic() + seconds
    waiting = list(models)
    active: list[_Process] = []
    at_once = max(1, (os.cpu_count() or 1) // _CORES_EACH)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (waiting or active) and time.monotonic() < deadline:
                while waiting and len(active) < at_once:
                    model = waiting.pop(0)
                    if model.lacks:
                        done(ModelResult(model.name, note=f"not installed: {model.lacks}"))
                    else:
                        active.append(_start(model, rounds, Path(folder), command))
                for each in [each for each in active if each.running.poll() is not None]:
                    active.remove(each)
                    done(_result(each))
                time.sleep(_POLL_S)
        finally:
            for each in active:
                each.running.kill()
                each.running.wait()


def digest() -> str:
    """A digest of all sources of this package in twelve hexadecimal digits. Results with another digest are
    stale."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _start(model: Model, rounds: int, folder: Path, command: Sequence[str]) -> _Process:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_CORES_EACH))
    environment.setdefault("CUTE_BACKEND_COMPILE_JOBS", str(_CORES_EACH))
    output, errors = (folder / f"{model.name}.{kind}" for kind in ("out", "err"))
    words = [*command, model.name, "--rounds", str(rounds), "--turn", str(folder / "turn")]
    written, said = output.open("w+"), errors.open("w+")
    return _Process(
        model,
        subprocess.Popen(words, stdout=written, stderr=said, text=True, env=environment),
        written,
        said,
    )


def _result(process: _Process) -> ModelResult:
    """The result of a process that has ended."""
    with process.output, process.errors:
        process.output.seek(0)
        process.errors.seek(0)
        if process.running.returncode == 0:
            return read(ModelResult, json.loads(process.output.read().splitlines()[-1]))
        note = failure(process.errors.read(), process.running.returncode)
    return ModelResult(process.model.name, agrees=False, note=note)


def failure(errors: str, status: int) -> str:
    """The line of a process's error output that names its last exception, else the last line, else its exit
    status. Lines that torch adds after the exception's first one give advice alone."""
    lines = errors.strip().splitlines() or [f"status {status}"]
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1]
