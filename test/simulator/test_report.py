"""The report of a launch for each warp role, counted by hand for a product of six tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import cutlass.cute as cute
import pytest
from cutlass import Float32

from cute_backend.planning import Alignment, Rowvecs, TileConfig, plan, with_rowvecs
from cute_backend.runtime.compiling.compile import SYMBOL
from cute_backend.simulator import simulate
from cute_backend.simulator.host import HostProgram
from cute_backend.simulator.report import Recorder
from cute_backend.simulator.simulate import Launch, Machine, run_region
from support.simulator.exact import operands, scaled_residual, sm90, sm100
from support.simulator.mutants import Subject, traced
from support.simulator.planting import Call, instead

M, N, K = 192, 192, 384
BF16 = 2


def launched(config: TileConfig, n: int = N) -> tuple[Launch, Recorder]:
    recorder = Recorder()
    spec = scaled_residual()
    a, b, loads = operands(spec, M, n, K)
    machine = Machine(config.arch, 1, config, clusters=1, observer=recorder)
    _, launch = run_region(spec, a, b, loads, machine)
    return launch, recorder


def test_blackwell_roles():
    launch, recorder = launched(sm100(128, 64))
    tiles, k_tiles, subtiles = 2 * 3, 3, 2
    stages = tiles * k_tiles * (128 + 64) * 128
    planes = tiles * 128 * 64 * BF16
    roles = launch.report.roles
    assert {name: role.warps for name, role in roles.items()} == {
        "tma": 2,
        "mma": 1,
        "epilogue": 4,
        "staging": 1,
    }
    assert roles["tma"].bytes == {"TMA load": stages + planes}
    assert roles["mma"].bytes["MMA operands"] == stages
    assert roles["staging"].bytes == {"ld.global": tiles * 64 * 4, "st.shared": tiles * 64 * 4}
    epilogue = roles["epilogue"]
    assert epilogue.bytes["tcgen05.ld"] == tiles * 128 * 64 * 4
    assert epilogue.bytes["st.shared"] == epilogue.bytes["TMA store"] == planes
    assert epilogue.bytes["ld.global"] == tiles * 128 * 4  # a row's scale in each thread
    assert epilogue.exposed_loads == [0] * (4 * tiles)
    assert sum(role.instructions for role in roles.values()) == launch.report.instructions

    def issued(role: str, opcode: str) -> int:
        return sum(n for name, n in roles[role].opcodes.items() if name.startswith(opcode))

    assert issued("mma", "tcgen05.mma") == tiles * k_tiles * 4
    assert issued("tma", "cp.async.bulk.tensor") == tiles * (2 * k_tiles + subtiles)
    assert issued("epilogue", "cp.async.bulk.tensor") == tiles * subtiles
    pipes = [pipe for pipe, *_ in recorder.operations]
    assert pipes.count("TMA load of CTA (0, 0, 0)") == tiles * (2 * k_tiles + subtiles)
    # A commit for each k tile and one for each accumulator.
    assert pipes.count("MMA of CTA (0, 0, 0)") == tiles * (k_tiles * (4 + 1) + 1)
    assert all(issued < finished for _, _, issued, finished in recorder.operations)
    assert all(start <= end <= launch.report.ticks for *_, start, end in recorder.waits)
    ends = {warp: time for warp, _, time in recorder.exits}
    assert len(ends) == 8
    assert all(end <= ends[warp] <= launch.report.ticks for warp, *_, end in recorder.waits)


def test_hopper_roles():
    launch, recorder = launched(sm90(128, 128))
    tiles, k_tiles = 2 * 2, 3
    stages = tiles * k_tiles * (128 + 128) * 128
    planes = tiles * 128 * 128 * BF16
    roles = launch.report.roles
    assert {name: role.warps for name, role in roles.items()} == {"tma": 2, "wgmma": 8, "other": 2}
    assert roles["tma"].bytes == {"TMA load": stages + planes}
    assert roles["wgmma"].bytes["TMA store"] == roles["wgmma"].bytes["st.shared"] == planes
    assert roles["wgmma"].exposed_loads == [0] * (8 * tiles)
    # Each warp reports its part of a warpgroup's instruction: four of them to a k tile.
    assert sum(pipe.startswith("wgmma of") for pipe, *_ in recorder.operations) == 8 * tiles * k_tiles * 4


@pytest.mark.parametrize("config", [sm100(128, 64), sm90(64, 64)], ids=lambda config: config.arch.value)
def test_loads_by_element_stand_between_accumulator_and_store(config):
    """Where TMA can't bring a plane, each thread reads it after the accumulator wait: the count sees that."""
    launch, _ = launched(config, n=69)
    assert launch.kernel.plan.alignment is Alignment.PLAIN
    assert launch.report.exposed_loads
    assert min(launch.report.exposed_loads) > 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("column_groups", [1, 2])
@pytest.mark.parametrize("rowvecs", [Rowvecs.REGISTER_HOIST, Rowvecs.SMEM_STAGED])
def test_no_load_stands_there_wherever_rowvecs_are(rowvecs: Rowvecs, column_groups: int) -> None:
    config = with_rowvecs(sm100(128, 128, column_groups=column_groups), scaled_residual(), rowvecs)
    launch, _ = launched(config)
    placed = plan(scaled_residual(), launch.kernel.plan.tile, Alignment.TMA).placements
    assert {name: placed[name].name for name in ("scale_a", "scale_b", "exact0")} == {
        "scale_a": "row_read",
        "scale_b": rowvecs.value,
        "exact0": "tma",
    }
    tiles = 2 * 2
    assert launch.report.roles["epilogue"].exposed_loads == [0] * (4 * column_groups * tiles)


def test_a_rowvec_that_is_read_when_it_is_needed_stands_there(tmp_path: Path) -> None:
    hoisted = with_rowvecs(sm100(128, 128), scaled_residual(), Rowvecs.REGISTER_HOIST)
    found: list[Any] = []

    def remember(call: Call) -> Any:
        made = call()
        if hasattr(made, "scale_b"):
            found.append(made)
        return made

    def read(call: Call) -> Any:
        columns = cute.make_rmem_tensor(call.self.columns, Float32)
        for c in range(call.self.columns):
            columns[c] = found[-1].scale_b[call.self.column(c)]
        return columns

    late = (*instead("epilogue.by_name", remember), *instead("tile.Subtile.columns_of", read))
    compiled = traced(Subject(hoisted, (M, N, K)).kernel, late, tmp_path)
    program = HostProgram(compiled.ptx, compiled.host_object, SYMBOL)
    with patch.object(simulate, "_program", lambda kernel: program):
        launch, _ = launched(hoisted)
    assert min(launch.report.roles["epilogue"].exposed_loads) > 0
