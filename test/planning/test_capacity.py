"""The planes that shared memory holds, against the rules by which tiles are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_backend.planning import Arch, holds_planes, plane_bits_held, tile_table
from cute_backend.planning.registers import NARROW_SUBTILE_N
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Load, LoadKind, Op, Store, Stride


def of_bytes(count: int) -> EpilogueSpec:
    """A spec that reads planes of one byte an element, and writes one: `count` in all."""
    loads = tuple(
        Load(f"exact{i}", LoadKind.EXACT, DType.I8, Stride.OTHER, Stride.ONE) for i in range(count - 1)
    )
    ops, value = [], "acc"
    for load in loads:
        ops.append(Op(f"t{len(ops)}", "mul", (value, load.name), DType.F32))
        value = ops[-1].name
    product = Accumulator("acc", DType.BF16, DType.BF16)
    return EpilogueSpec((product,), loads, tuple(ops), (Store("out0", value, DType.U8),))


@pytest.mark.parametrize("arch", [arch for arch in Arch if arch.target.planes_by_tma])
def test_a_large_tile_holds_as_many_planes_as_it_is_said_to(arch: Arch) -> None:
    held = plane_bits_held(arch, of_bytes(1).accumulators) // 8

    def large_tiles_that_hold(count: int) -> list[bool]:
        spec = of_bytes(count)
        configs = [
            replace(each, subtile_n=NARROW_SUBTILE_N, occupancy=1) for each in tile_table(arch, of_bytes(1))
        ]
        large = [each for each in configs if each.cta_rows * each.mma_n >= 128 * 128]
        return [holds_planes(each, spec) for each in large or configs[:1]]

    assert any(large_tiles_that_hold(held))
    assert not any(large_tiles_that_hold(held + 1))
