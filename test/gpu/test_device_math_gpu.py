"""The device functions and conversions on a real GPU: bits where they are determined, else errors in ulps.

`pytest -s` prints the largest error of each function.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.device_check import assert_converted, row_errors
from support.device_rows import (
    as_arguments,
    compiled,
    conversion_inputs,
    conversions,
    conversions_module,
    row_cases,
    row_inputs,
    rows_module,
)

pytestmark = pytest.mark.gpu

ROW_SAMPLES = 1 << 19
CONVERSION_SAMPLES = 1 << 16
"""Enough for every code of 16 bits."""


def computed(text: str, inputs: dict[str, Tensor], cases: int, folder: Path) -> Tensor:
    arch = f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}a"
    samples = next(iter(inputs.values())).numel()
    out = torch.full((cases, samples), -7, dtype=torch.int32, device="cuda")
    compiled(text, inputs, folder, arch)(*as_arguments(inputs, out))
    return out


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def test_rows(tmp_path: Path) -> None:
    cases, inputs = row_cases(), on_gpu(row_inputs(ROW_SAMPLES))
    errors = row_errors(cases, inputs, computed(rows_module(cases), inputs, len(cases), tmp_path))
    print(*(f"\n{name}: {error:.3f} ulp" for name, error in errors.items() if error > 0.0), sep="")


def test_conversions(tmp_path: Path) -> None:
    cases, inputs = conversions(), on_gpu(conversion_inputs(CONVERSION_SAMPLES))
    assert_converted(cases, inputs, computed(conversions_module(cases), inputs, len(cases), tmp_path))
