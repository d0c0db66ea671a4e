"""Kernels that draw tokens, on the simulated machine: the same draws whatever the tile, and the replay's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend.runtime import sample as op_module
from cute_backend.simulator.api import Machine, run_region
from cute_backend.spec import EpilogueSpec
from cute_backend.templates.config import Arch, TileConfig

BF16 = torch.bfloat16
ROWS, VOCABULARY, DEPTH = 70, 200, 64

CONFIGS = {
    "cooperative": TileConfig(Arch.SM90A, 128, 64, cluster_n=2),
    "ping-pong": TileConfig(Arch.SM90A, 64, 128, 2, pingpong=True),
    "one CTA": TileConfig(Arch.SM100A, 128, 64),
    "two CTAs": TileConfig(Arch.SM100A, 256, 128, 2, ctas=2),
}

Call = tuple[list[Tensor], list[Tensor], list[Tensor], EpilogueSpec]


@pytest.fixture(scope="module")
def drawn() -> tuple[Call, Tensor]:
    """One call of the op that `sample` makes, and the tokens that the replay draws.

    Logits are integers, and all below zero, so that a zero from beyond an edge would win; a row has its own
    temperature, 0 and NaN among them.
    """
    calls: list[Any] = []
    original = op_module.gemm_epilogue

    def spy(a: list[Tensor], b: list[Tensor], loads: list[Tensor], spec: str, *rest: Any) -> Any:
        calls.append((a, b, loads, EpilogueSpec.from_json(spec)))
        return original(a, b, loads, spec, *rest)

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randint(-2, 3, (size, DEPTH), generator=generator).to(BF16) for size in (ROWS, VOCABULARY)
    )
    temperature = torch.full((ROWS,), 5.0)
    temperature[::7], temperature[64] = 0.0, float("nan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_module, "gemm_epilogue", spy)
        tokens = cute_backend.sample(
            hidden,
            weight,
            temperature=temperature,
            seed=2**40 + 3,
            bias=torch.full((VOCABULARY,), -1000.0),
        )
    (call,) = calls
    return call, tokens


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tile_draws_what_the_replay_draws(config: TileConfig, drawn: tuple[Call, Tensor]) -> None:
    (a, b, loads, spec), tokens = drawn
    outputs, _ = run_region(spec, a, b, loads, Machine(config.arch, async_seed=1, config=config))
    assert torch.equal(torch.stack(outputs, 1), tokens)
    assert (tokens[64] == 0).all() and len(tokens.unique()) > 40
