"""Whatever offsets a grouped product is given, each row has the product of its group, and others are left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_backend.planning import TileConfig
from cute_backend.simulator.simulate import run_region
from cute_backend.spec import DType
from support.simulator.exact import grouped, grouped_k, groups, groups_of_k, machine, sm90, sm100

pytestmark = pytest.mark.sim

M, N, K = 100, 72, 96
GROUPS = 5
"""Kernels are compiled once: sizes stay, and offsets alone differ."""

RISING = st.lists(st.integers(0, M), min_size=GROUPS, max_size=GROUPS).map(sorted)
ANY = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, M + 2), min_size=GROUPS, max_size=GROUPS)
CONFIGS = [sm90(64, 64), sm90(128, 64, 1, 2, pingpong=True), sm100(128, 64), sm100(256, 64, 2, 1, ctas=2)]


def members(ends: list[int]) -> list[range]:
    """The rows of each group as a kernel cuts them: within the rows that there are, the first before the
    last."""
    inside = [min(max(end, 0), M) for end in ends]
    firsts = [0, *inside[:-1]]
    return [range(first, max(first, end)) for first, end in zip(firsts, inside, strict=True)]


def is_disjoint(ends: list[int]) -> bool:
    """Whether no row is in two groups, which would both write it."""
    rows = [row for group in members(ends) for row in group]
    return len(set(rows)) == len(rows)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.arch.value}-{config.name}")
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ends=RISING | ANY.filter(is_disjoint), seed=st.integers(1, 8))
def test_groups_alone_are_written(config: TileConfig, ends: list[int], seed: int) -> None:
    spec = grouped()
    a, b, loads = groups(spec, tuple(ends), M, N, K)
    scale_a, scale_b, residual, bias = loads
    outputs, _ = run_region(spec, a, b, loads, machine(config, seed=seed))
    products = [
        ((a[0].double() @ b[0][group].double()) * scale_a[:, None] * scale_b + residual + bias[group])
        .float()
        .bfloat16()
        for group in range(GROUPS)
    ]
    expected = torch.full((M, N), -1, dtype=torch.int16)
    for product, rows in zip(products, members(ends), strict=True):
        expected[rows.start : rows.stop] = product[rows.start : rows.stop].view(torch.int16)
    assert torch.equal(outputs[0].view(torch.int16), expected), ends


ANY_OF_K = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, K + 2), min_size=3, max_size=3)
STEPS = {DType.BF16: 1, DType.E4M3: 16}
"""The multiples at which groups of K begin."""


@pytest.mark.parametrize("dtype", STEPS, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.arch.value}-{config.name}")
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ends=ANY_OF_K | ANY_OF_K.map(sorted), seed=st.integers(1, 8))
def test_groups_of_k_alone_are_multiplied(
    dtype: DType, config: TileConfig, ends: list[int], seed: int
) -> None:
    """All ends are rounded down to where groups begin, but for that of a last group that is not empty."""
    spec, step = grouped_k(dtype), STEPS[dtype]
    a, b, loads = groups_of_k(spec, (K,) * len(ends), N, N, K)
    a[1] = torch.tensor(ends, dtype=torch.int32)
    outputs, _ = run_region(spec, a, b, loads, machine(config, seed=seed))
    inside = [min(max(end, 0), K) for end in ends]
    firsts = [first // step * step for first in (0, *inside[:-1])]
    lasts = [end // step * step for end in inside]
    if inside[-1] > inside[-2]:
        lasts[-1] = inside[-1]
    columns = loads[1].expand(len(ends), N) if loads[1].dim() == 1 else loads[1]
    for group, (first, end) in enumerate(zip(firsts, lasts, strict=True)):
        rows = slice(group * N, (group + 1) * N)
        product = a[0][:, first : max(first, end)].double() @ b[0][first : max(first, end)].double()
        scaled = product * loads[0][rows, None] * columns[group] + loads[2][rows]
        assert torch.equal(outputs[0][rows], scaled.float().bfloat16()), (ends, group)
