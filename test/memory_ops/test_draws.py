"""Kernels that draw tokens, on the simulated machine: the same draws whatever the tile, and the replay's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator.simulate import Machine, run_region
from support.draws import Call, recorded

BF16 = torch.bfloat16
ROWS, VOCABULARY, DEPTH = 70, 200, 64

CONFIGS = {
    "cooperative": TileConfig(Arch.SM90A, 128, 64, cluster_n=2, subtile_n=16),
    "half of each block": TileConfig(Arch.SM90A, 128, 64, subtile_n=8),
    "ping-pong": TileConfig(Arch.SM90A, 64, 192, 2, pingpong=True, subtile_n=16),
    "two blocks": TileConfig(Arch.SM90A, 128, 64, pingpong=True, subtile_n=16),
    "one CTA": TileConfig(Arch.SM100A, 128, 64, subtile_n=16),
    "two CTAs": TileConfig(Arch.SM100A, 256, 128, 2, ctas=2, subtile_n=32),
    "mma.sync": TileConfig(Arch.SM80, 64, 64, subtile_n=16),
}


@pytest.fixture(scope="module")
def drawn() -> tuple[Call, Tensor]:
    """One call of the op that `sample` makes, and the tokens that the replay draws.

    Logits are integers, and all below zero, so that a zero from beyond an edge would win; a row has its own
    temperature, 0 and NaN among them.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randint(-2, 3, (size, DEPTH), generator=generator).to(BF16) for size in (ROWS, VOCABULARY)
    )
    temperature = torch.full((ROWS,), 5.0)
    temperature[::7], temperature[64] = 0.0, float("nan")
    bias = torch.full((VOCABULARY,), -1000.0)
    (call,), tokens = recorded(hidden, weight, temperature=temperature, seed=2**40 + 3, bias=bias)
    return call, tokens


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tile_draws_what_the_replay_draws(config: TileConfig, drawn: tuple[Call, Tensor]) -> None:
    (a, b, loads, spec), tokens = drawn
    outputs, _ = run_region(spec, a, b, loads, Machine(config.arch, async_seed=1, config=config))
    assert torch.equal(torch.stack(outputs, 1), tokens)
    assert (tokens[64] == 0).all() and len(tokens.unique()) > 40


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"two blocks"}))  # these have no loop
def test_four_draws_take_one_block(name: str, drawn: tuple[Call, Tensor]) -> None:
    """A block is ten rounds, in which each of its two factors multiplies once; the compiler drops a few.
    Where a visit has half of each block's columns, every draw has a block of its own."""
    config, ((_, _, _, spec), _) = CONFIGS[name], drawn
    draws = config.block_m * config.subtile_n // 128
    blocks = draws if name == "half of each block" else draws // 4
    factor = 0xD2511F53 - 2**32
    count = build(Kernel(plan(spec, config, Alignment.TMA))).ptx.count(f", {factor};")
    assert 8 * blocks <= count <= 10 * blocks
