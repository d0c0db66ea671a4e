"""The simulated machine against a real one: the same sm_90a kernels, the results of an H200 on disk.

`test/fixtures/hardware/machine.json` says on which machine and by which command they were recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_backend.planning import Arch
from cute_backend.runtime.arguments.operands import parse_spec
from cute_backend.simulator.simulate import Launch, Machine, run_region
from support.reference import relative_error
from support.simulator.hardware_cases import CASES, CLUSTERS

FOLDER = Path(__file__).parent.parent / "fixtures" / "hardware"
MOST_BYTES = 400_000


def machine() -> dict:
    return json.loads((FOLDER / "machine.json").read_text())


def recorded(name: str, outputs: list[Tensor]) -> list[Tensor]:
    """The real machine's outputs, in the shapes and dtypes of the simulated ones."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return [
            torch.from_numpy(arrays[f"out{i}"]).view(output.dtype).reshape(output.shape)
            for i, output in enumerate(outputs)
        ]


def test_every_case_was_recorded():
    assert FOLDER.is_dir(), f"no results of a real machine: run test/fixtures/record_hardware.py {FOLDER}"
    assert {path.stem for path in FOLDER.glob("*.npz")} == set(CASES) == set(machine()["cases"])
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_real_machine(name):
    case = CASES[name]
    assert machine()["cases"][name] == {
        "tile": case.config.name,
        "problem": list(case.problem),
        "inputs": case.digest(),
    }, "the case is not what was recorded"
    launches: list[Launch] = []

    def execute(a: list[Tensor], b: list[Tensor], loads: list[Tensor], spec: str) -> list[Tensor]:
        simulated = Machine(Arch.SM90A, 3, case.config, CLUSTERS)
        outputs, launch = run_region(parse_spec(spec), a, b, loads, simulated)
        launches.append(launch)
        return outputs

    outputs = list(case.outputs(execute))
    assert len(launches) == 1
    for actual, real in zip(outputs, recorded(name, outputs), strict=True):
        if case.exact:
            bits = (each.contiguous().view(-1).view(torch.uint8) for each in (actual, real))
            assert torch.equal(*bits)
        else:
            assert relative_error(actual, real) <= case.tolerance
