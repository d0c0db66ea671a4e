"""Kernels for few k tiles, whose planes get shared memory of A and B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Arch, Sizes, Stages, TileConfig, choose, tile_table
from cute_backend.planning.shallow import can_be_shallow, shallowed
from cute_backend.planning.shared_memory import Rings
from cute_backend.planning.transposing import Tiled
from cute_backend.spec import DType, Scaling
from support.shipped import epilogue_spec

FULL, BARE = epilogue_spec("bias_gelu_residual", True), epilogue_spec("rowwise", True)
WIDE = TileConfig(Arch.SM90A, 128, 128, cluster_n=2, pingpong=True, subtile_n=64)


def test_planes_get_a_stage_of_a_and_b() -> None:
    rings = Rings.of(WIDE, [[DType.BF16]], [], [[DType.BF16]])
    deep, shallow = (Stages.of(each, rings) for each in (WIDE, replace(WIDE, shallow=True)))
    assert (deep.ab, shallow.ab) == (5, 4)
    # A stage of A and B has 32 KiB, one of planes 16.
    assert shallow.exact + shallow.store == deep.exact + deep.store + 2


def test_k_tiles_decide() -> None:
    sm_count = Arch.SM90A.target.sm_count
    for k in (512, 768):
        config = choose(Arch.SM90A, FULL, Sizes(6144, 6144, k), sm_count)
        assert config.shallow and config.name.endswith("_shallow") and "shallow" in config.words
    for k in (784, 1536, 8192):
        assert not choose(Arch.SM90A, FULL, Sizes(6144, 6144, k), sm_count).shallow


def test_parts_of_k_keep_theirs() -> None:
    part = TileConfig(Arch.SM90A, 128, 128, subtile_n=64, split_k=8)
    assert shallowed(replace(part, split_k=1), FULL, 512).shallow
    assert shallowed(part, FULL, 512) == part


def test_scales_of_blocks_keep_all_stages_of_a_and_b() -> None:
    scaled = replace(FULL.product, fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE)
    spec = replace(FULL, accumulators=(scaled,))
    tile = TileConfig(Arch.SM90A, 128, 128, cluster_m=2)
    assert can_be_shallow(Tiled(spec, tile)) and not shallowed(tile, spec, 512).shallow


def test_planes_that_have_all_of_their_stages_get_no_more() -> None:
    small = TileConfig(Arch.SM90A, 64, 64)
    assert shallowed(small, FULL, 512) == small


def test_only_memory_that_planes_can_have_is_moved() -> None:
    crowded = TileConfig(Arch.SM90A, 128, 256, cluster_n=2)
    assert shallowed(crowded, FULL, 512) == crowded  # four stages of A and B are all that fit


@pytest.mark.parametrize("arch", [each for each in Arch if each is not Arch.SM90A])
def test_it_was_timed_on_hopper_alone(arch: Arch) -> None:
    assert not choose(arch, FULL if arch.target.fp8 else BARE, Sizes(6144, 6144, 256), 132).shallow


def test_what_was_built_ahead_has_none() -> None:
    assert not choose(Arch.SM90A, FULL, Sizes(512, 6144, 256), 132, tile_table).shallow


def test_an_older_record_has_none() -> None:
    old = {name: value for name, value in WIDE.to_dict().items() if name != "shallow"}
    assert TileConfig.from_dict(old) == WIDE
    assert TileConfig.from_dict(replace(WIDE, shallow=True).to_dict()).shallow
