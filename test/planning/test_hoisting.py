"""Where rowvecs are hoisted although visits are iterations of a loop: on Blackwell, where the MMA hides
it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.errors import BuildError, UsageError
from cute_backend.planning import (
    Alignment,
    Arch,
    Rowvecs,
    Rung,
    Sizes,
    TileConfig,
    choose,
    plan,
    tunable,
    with_rowvecs,
)
from cute_backend.planning.epilogue_time import epilogue_instructions, mma_cycles
from cute_backend.planning.hoisting import can_hoist, hoisting
from cute_backend.planning.registers import hoist_budget
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import DType, EpilogueSpec
from support.shipped import epilogue_spec, sampling_spec
from support.small_specs import block_mean, row_maximum, rowvec, spec_of

TILE = TileConfig(Arch.SM100A, 128, 128)
ROWWISE = epilogue_spec("rowwise", True)


def placements(
    config: TileConfig, alignment: Alignment = Alignment.TMA, name: str = "rowwise"
) -> dict[str, str]:
    placed = plan(epilogue_spec(name, True), config, alignment).placements
    return {load: placement.name for load, placement in placed.items()}


@pytest.mark.parametrize("arch", Arch)
def test_rowwise_scales_are_hoisted_by_default_from_a_k_of_1024_on(arch: Arch) -> None:
    if arch.target.unrolled_subtile_n is not None:
        pytest.skip("visits are no loop there")
    chosen = choose(arch, ROWWISE, Sizes(4096, 4096, 1024), arch.target.sm_count)
    assert chosen.unrolled and chosen.thread_columns <= 128
    assert placements(chosen) == {"scale_a": "row_read", "scale_b": "register_hoist"}
    short = hoisting(replace(chosen, unrolled=False), ROWWISE, 512)
    assert not short.unrolled and placements(short)["scale_b"] == "smem_staged"


def test_the_limit_is_where_the_mma_takes_as_long_as_the_epilogue() -> None:
    hidden = next(k for k in range(128, 4096, 128) if hoisting(TILE, ROWWISE, k).unrolled)
    instructions = epilogue_instructions(TILE, ROWWISE, hoisted=1)
    assert mma_cycles(TILE, ROWWISE, hidden - 128) <= instructions < mma_cycles(TILE, ROWWISE, hidden)
    # 128 elements of a thread, two ops, one bf16 plane, one hoisted vector; 128 x 128 x K / 8192 cycles.
    assert instructions == 128 * (4.5 + 2 + 1) + 128 * 5
    assert mma_cycles(TILE, ROWWISE, 1024) == 2048


def with_rowvec(spec: EpilogueSpec) -> EpilogueSpec:
    return replace(spec, loads=(*spec.loads, rowvec("rowvec0", DType.BF16)))


@pytest.mark.parametrize(
    ("spec", "able"),
    [
        (spec_of(dtype=DType.BF16), True),
        (replace(spec_of(dtype=DType.BF16), stores=(row_maximum(),)), False),
        (block_mean(64), False),
    ],
    ids=["plane", "reduction", "passes"],
)
def test_vectors_are_hoisted_beside_planes_alone(spec: EpilogueSpec, able: bool) -> None:
    assert can_hoist(TILE, with_rowvec(spec)) is able


def test_vectors_are_hoisted_beside_128_columns_of_a_thread_at_most() -> None:
    """Of all products, and of one warpgroup of two."""
    pair, one = (with_rowvec(spec_of(dtype=DType.BF16, products=n)) for n in (2, 1))
    assert can_hoist(replace(TILE, products=2, tile_n=64), pair)
    assert not can_hoist(replace(TILE, products=2), pair)
    wide = replace(TILE, tile_n=160)
    assert not can_hoist(wide, one) and can_hoist(replace(wide, tile_n=256, column_groups=2), one)


def test_nothing_is_hoisted_without_registers_for_every_rowvec() -> None:
    bias = epilogue_spec("bias", True)
    assert hoist_budget(bias, replace(TILE, unrolled=True), Alignment.TMA) < 128 + 64
    assert not can_hoist(TILE, bias) and can_hoist(replace(TILE, tile_n=64), bias)
    assert not can_hoist(replace(TILE, tile_n=256), ROWWISE)


def test_sixteen_bits_take_half_a_register() -> None:
    assert placements(replace(TILE, unrolled=True), name="bias")["scale_b"] == "register_hoist"
    wide = epilogue_spec("addmm_relu", True)
    need = hoist_budget(wide, replace(TILE, unrolled=True), Alignment.TMA)
    assert need >= 64 and placements(replace(TILE, unrolled=True), name="addmm_relu") == {
        "bias": "register_hoist"
    }


def test_what_draws_noise_stays_in_a_loop() -> None:
    spec = sampling_spec("four")
    assert not any(config.unrolled for config in tunable(Arch.SM100A, spec))


def test_an_alignment_without_registers_keeps_the_loop() -> None:
    """Planes that are read by element take registers of addresses."""
    spec = epilogue_spec("bias_gelu_residual", True)
    config = TileConfig(Arch.SM100A, 128, 128, unrolled=True)
    assert Rung.of(spec, config, Alignment.PLAIN).tile.rolled
    assert "register_hoist" not in placements(config, Alignment.PLAIN, "bias_gelu_residual").values()


def test_tuning_tries_both() -> None:
    tried = tunable(Arch.SM100A, ROWWISE)
    assert replace(TILE, unrolled=True) in tried and TILE in tried


def test_an_unrolled_tile_is_refused_where_subtiles_decide() -> None:
    with pytest.raises(ValueError, match="unrolled visits, but there its subtiles of 32 columns decide"):
        TileConfig(Arch.SM90A, 128, 128, unrolled=True)


@pytest.mark.parametrize(
    "config", [TILE, TileConfig(Arch.SM90A, 128, 128), TileConfig(Arch.SM90A, 128, 128, pingpong=True)]
)
def test_rowvecs_are_where_they_were_asked_for(config: TileConfig) -> None:
    assert with_rowvecs(config, ROWWISE, Rowvecs.AUTO) is config
    for asked in (Rowvecs.REGISTER_HOIST, Rowvecs.SMEM_STAGED):
        for before in (config, with_rowvecs(config, ROWWISE, Rowvecs.REGISTER_HOIST)):
            placed = with_rowvecs(before, ROWWISE, asked)
            assert placements(placed)["scale_b"] == asked.value
            assert placed.name.endswith(asked.value) and TileConfig.from_dict(placed.to_dict()) == placed
            assert TILE.arch is not config.arch or placed.unrolled is (asked is Rowvecs.REGISTER_HOIST)


def test_a_spec_without_rowvecs_stays_as_it_is() -> None:
    tensorwise = epilogue_spec("tensorwise", True)
    assert with_rowvecs(TILE, tensorwise, Rowvecs.REGISTER_HOIST) is TILE


def test_a_hoist_is_refused_where_visits_are_iterations_of_a_loop() -> None:
    sampled = sampling_spec("one")
    with pytest.raises(
        UsageError, match=r"config.rowvec_placement is 'register_hoist', but .* does not unroll its visits"
    ):
        with_rowvecs(TILE, sampled, Rowvecs.REGISTER_HOIST)


@pytest.mark.exhaustive
def test_a_hoist_that_spills_is_refused_with_the_bytes() -> None:
    config = TileConfig(Arch.SM100A, 256, 256, 2, ctas=2, unrolled=True, rowvecs=Rowvecs.REGISTER_HOIST)
    with pytest.raises(BuildError, match=r"spills \d+ bytes a thread with its rowvecs in registers"):
        build(Kernel(plan(epilogue_spec("bf16_vectors", True), config, Alignment.TMA)))


def test_nothing_is_hoisted_beside_224_columns_that_are_written_by_element() -> None:
    """Their visits are the iterations of a loop."""
    config = TileConfig(Arch.SM90A, 128, 224, 2)
    assert "register_hoist" in placements(config, Alignment.TMA, "bf16_vectors").values()
    assert "register_hoist" not in placements(config, Alignment.PLAIN, "bf16_vectors").values()
