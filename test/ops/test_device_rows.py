"""Every row and every conversion as device code: compiled for each architecture, and run on the simulator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cute_backend.ops import OPS, SPECIAL
from cute_backend.philox import upper_tail
from cute_backend.runtime.kernels.cubin import resources
from cute_backend.spec import DType
from support.device_check import assert_converted, row_errors
from support.device_rows import (
    RowCase,
    as_arguments,
    compiled,
    conversion_inputs,
    conversions,
    conversions_module,
    row_cases,
    row_inputs,
    rows_module,
)
from support.simulator.compiled import launch

ARCHES = ["sm_90a", "sm_100a"]
SAMPLES = 2048


def test_every_row_has_a_case() -> None:
    names = {case.name for case in row_cases()}
    assert names >= set(OPS) - {row.name for row in SPECIAL}


def simulated(text: str, inputs: dict[str, Tensor], cases: int, folder: Path, arch: str) -> Tensor:
    function = compiled(text, inputs, folder, arch)
    needs = resources(function.__cubin__)
    assert needs.frame_bytes == 0
    assert ".local" not in function.__ptx__
    out = torch.full((cases, SAMPLES), -7, dtype=torch.int32)
    launch(function, as_arguments(inputs, out))
    return out


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", ARCHES)
def test_rows(arch: str, tmp_path: Path) -> None:
    cases, inputs = row_cases(), row_inputs(SAMPLES)
    out = simulated(rows_module(cases), inputs, len(cases), tmp_path, arch)
    errors = row_errors(cases, inputs, out)
    assert 0.0 < errors["rsqrt(f32)"] < 1.0


@pytest.mark.parametrize("arch", ARCHES)
def test_noise_of_words_where_its_formulas_change(arch: str, tmp_path: Path) -> None:
    """The smallest and largest words, and those around powers of two and their thirds, from both ends."""
    near = torch.arange(-3, 4)
    powers = 2.0 ** torch.arange(33).double()
    edges = torch.cat([powers, powers / 3, powers * 2 / 3]).long()[:, None] + near
    words = torch.cat([edges, 2**32 - 1 - edges]).clamp(0, 2**32 - 1).flatten()
    generator = torch.Generator().manual_seed(0)
    words = torch.cat([words, torch.randint(2**32, (SAMPLES - words.numel(),), generator=generator)])
    case = RowCase("gumbel", (DType.I32,), DType.F32, "noise._gumbel_of(Uint32({0}))", upper_tail)
    inputs = row_inputs(SAMPLES) | {"i0": words.to(torch.int32)}
    (out,) = simulated(rows_module([case]), inputs, 1, tmp_path, arch)
    exact = -torch.log(-torch.log1p(-upper_tail(words).double()))
    error = (out.view(torch.float32).double() - exact).abs() / exact.abs().clamp(min=1.0)
    assert 2.0**-25 < error.max() < 2.0**-21  # the simulator's logarithms are rounded once


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", ARCHES)
def test_conversions(arch: str, tmp_path: Path) -> None:
    cases, inputs = conversions(), conversion_inputs(SAMPLES)
    out = simulated(conversions_module(cases), inputs, len(cases), tmp_path, arch)
    assert_converted(cases, inputs, out)


def test_the_message_of_a_wrong_row_has_its_largest_error_and_its_bound() -> None:
    cases = [case for case in row_cases() if str(case) in ("tanh(f32)", "neg(f32)")]
    inputs = row_inputs(8) | {"f0": torch.linspace(0.5, 1.0, 8)}
    right = torch.stack([case.reference(inputs["f0"]) for case in cases])
    assert row_errors(cases, inputs, right.view(torch.int32))["neg(f32)"] == 0.0
    off = right.view(torch.int32) + torch.tensor([0, 0, 0, 5, 0, 0, 0, 9], dtype=torch.int32)
    with pytest.raises(AssertionError) as raised:
        row_errors(cases, inputs, off)
    neg, tanh, *_ = str(raised.value).splitlines()  # pytest may add how it saw the assertion
    assert re.search(r"2 of 8 wrong, by up to 9\.00 ulp, at \[\[1\.0, .*without a line in MAX_ULP", neg)
    assert re.search(r"2 of 8 wrong, by up to 9\.\d\d ulp, at .*device_check\.py allows 2\.0$", tanh)
