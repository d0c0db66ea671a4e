"""Who works in a CTA and arrives at its barriers: counted from roles, refused where facts contradict."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import cutlass
import pytest

from cute_backend.planning import Arch, TileConfig
from cute_backend.spec import ProductKind, Scaling
from cute_backend.templates import crew, sm90, sm100
from cute_backend.templates.block_scaled import Sm90BlockScaled
from cute_backend.templates.crew import Arrivals, Crew, Meeting, Ring, Role, one
from cute_backend.templates.drain import Keep, Visit
from cute_backend.templates.epilogue import SmemOperand
from cute_backend.templates.rings import check_stage
from cute_backend.templates.sm90 import Sm90Gemm
from cute_backend.templates.sm100 import Sm100Gemm
from support.bare_epilogue import stages_for


class Full:
    """An epilogue that has every role and ring: a staged rowvec, a plane loaded and one stored."""

    loads = ("scale_b", "exact0")
    stores = ("out0",)
    staged = (SmemOperand("scale_b", cutlass.Float32),)
    shared_loads = (SmemOperand("exact0", cutlass.BFloat16),)
    shared_stores = (SmemOperand("out0", cutlass.BFloat16),)
    sweeps = (Visit(planes=("exact0",)),)


class Twice(Full):
    staged = (*Full.staged, SmemOperand("rowvec0", cutlass.Float32))


class Bare:
    loads = staged = shared_loads = ()
    stores, shared_stores = Full.stores, Full.shared_stores
    sweeps = (Visit(),)


class Forgetful(Full):
    sweeps = Bare.sweeps


class Idle(Bare):
    sweeps = (Keep(64, ("exact0",)), *Full.sweeps)


SM90, SM100 = Arch.SM90A, Arch.SM100A
TURNS = TileConfig(SM90, 128, 128, 2, pingpong=True)
PAIR = TileConfig(SM100, 256, 128, 2, ctas=2)


def gemm(config: TileConfig, epilogue: type = Full) -> Sm90Gemm | Sm100Gemm:
    made, stages = epilogue(), stages_for(epilogue(), config)
    return Sm90Gemm(made, config, stages) if config.arch is SM90 else Sm100Gemm(made, config, stages)


@pytest.mark.parametrize(("module", "config"), [(sm90, TURNS), (sm100, PAIR)], ids=["sm90", "sm100"])
def test_a_kernel_opens_with_its_table(module, config):
    assert f"tile\n{config.name} has" in module.__doc__ or f"tile {config.name} has" in module.__doc__
    assert textwrap.indent(str(gemm(config).crew), "    ", lambda line: bool(line.strip())) in module.__doc__


CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1)]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize("config", [TURNS, TileConfig(SM90, 128, 64), TileConfig(SM100, 128, 64)])
def test_a_stage_is_released_by_all_who_read_it(config, cluster):
    """Counted one by one: what a CTA loads of A goes to its row of the cluster, of B to its column."""
    rows, columns = cluster
    config = replace(config, cluster_m=rows, cluster_n=columns)
    readers = {(r, c) for r in range(rows) for c in range(columns) if r == 0 or c == 0}
    if config.arch is SM90:
        # One lane of each warp that works on the tile; under ping-pong that is one warpgroup of the two.
        expected = len(readers) * 4 * (1 if config.pingpong else 2)
    else:
        expected = len(readers)  # a commit of each MMA
    assert gemm(config).ab_ring.emptied.count == expected


@pytest.mark.parametrize("cluster_m", [2, 4])
def test_a_pair_of_ctas_counts_as_one_mma(cluster_m):
    made = gemm(replace(PAIR, cluster_m=cluster_m))
    assert made.ab_ring.emptied.count == cluster_m // 2
    assert made.acc_ring.emptied.count == 8, "4 warps in each CTA of the pair"


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_first_part_waits_for_the_sums_of_all_others(parts):
    made = gemm(TileConfig(SM90, 128, 64, split_k=parts))
    assert (made.sum_ring.filled.count, made.sum_ring.emptied.count) == (8 * (parts - 1), 8)


def test_sums_in_memory_have_no_ring():
    assert gemm(TileConfig(SM90, 128, 64, split_k=8), Bare).sum_ring is None


def test_scales_of_blocks_arrive_in_the_stages_of_a_and_b():
    mainloop = Sm90BlockScaled(Scaling.LINE, Scaling.SQUARE, sets=2, k_tiles=4)
    config = TileConfig(SM90, 128, 128, 2)
    made = Sm90Gemm(Bare(), config, stages_for(Bare(), config, mainloop.scaling), mainloop)
    assert [ring.name for ring in made.crew.rings] == ["ab"]
    assert [arrivals.count for arrivals in made.ab_ring.fills] == [1, 32]
    assert "1 warp of load, 1 warp of scales x 32 threads = 32" in str(made.crew)


def test_what_an_epilogue_has_no_use_for_has_no_role():
    assert [role.name for role in gemm(TURNS, Bare).crew.roles] == ["load", "consume"]
    assert [ring.name for ring in gemm(TURNS, Bare).crew.rings] == ["ab"]
    assert [role.name for role in gemm(PAIR, Bare).crew.roles] == ["load", "multiply", "epilogue"]
    assert gemm(PAIR, Bare).threads == 6 * 32 and gemm(TURNS, Bare).threads == 3 * 128


LOAD, WORK = Role("load", 0, 1, "loads", print), Role("work", 4, 8, "works", print)
RING = Ring("ab", 4, one(LOAD), Arrivals(WORK, 8, 1))
SOUND = Crew((LOAD, WORK), (RING,), (Meeting("turn", 1, ((WORK, 8),)),), (40, 232, 232))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"roles": (LOAD, WORK, Role("rows", 10, 4, "stages", print))},
            "warp 10 has two roles: work has warps 4 to 11, rows 10 to 13",
        ),
        (
            {"roles": (LOAD, WORK, Role("more", 12, 24, "works", print)), "registers": ()},
            "36 warps have roles; a CTA has 32",
        ),
        ({"roles": (WORK,)}, "ring ab is filled by load, which no warp of the CTA is"),
        ({"rings": (replace(RING, stages=0),)}, "ring ab has 0 stages"),
        (
            {"rings": (replace(RING, emptied=Arrivals(WORK, 3, 1)),)},
            "ring ab is emptied by 3 warps of work at a time, which don't divide its 8",
        ),
        (
            {"rings": (replace(RING, filled=Arrivals(LOAD, 1, 33)),)},
            "ring ab is filled by 33 threads of each warp of load; a warp has 32",
        ),
        (
            {"rings": (replace(RING, also_filled=one(Role("scales", 3, 1, "copies", print))),)},
            "ring ab is filled by scales, which no warp of the CTA is",
        ),
        (
            {"rings": (replace(RING, emptied=Arrivals(WORK, 8, 32, 0)),)},
            "8 warps x 32 threads x 0 CTAs = 0 arrivals; a barrier counts 1 to 1048575",
        ),
        (
            {"rings": (RING, replace(RING, name="scales", stages=30))},
            "barriers take 16 bytes x (4 of ab + 30 of scales) = 544; 496 are left",
        ),
        (
            {"meetings": (Meeting("turn", 1, ((WORK, 8),)), Meeting("group", 1, ((WORK, 4),)))},
            "turn and group are both named barrier 1",
        ),
        ({"meetings": (Meeting("turn", 0, ((WORK, 8),)),)}, "turn is named barrier 0, of 1 to 15"),
        ({"meetings": (Meeting("turn", 1, ((WORK, 5),)),)}, "at turn meet 5 warps of work, which has 8"),
        (
            {"registers": (40, 240, 240)},
            "128 threads x (40 + 240 + 240) registers = 66560; 384 threads begin with 168 each = 64512",
        ),
        ({"registers": (40, 232)}, "registers are dealt out to 2 warpgroups, 8 warps, of 12"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:40] if isinstance(value, str) else "",
)
def test_facts_that_contradict_are_refused_with_the_arithmetic(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SOUND, **changes)


@pytest.mark.parametrize("kind", ProductKind)
@pytest.mark.parametrize("epilogue", [Full, Twice])
def test_warps_that_find_groups_and_stage_two_vectors_have_more_registers(kind, epilogue):
    more = kind is ProductKind.GROUPED and epilogue is Twice
    dealt = Sm90Gemm(epilogue(), TURNS, stages_for(epilogue(), TURNS), kind=kind).crew.registers
    assert dealt == ((72, 216, 216) if more else (40, 232, 232))
    small = TileConfig(SM90, 64, 64)
    made = Sm90Gemm(epilogue(), small, stages_for(epilogue(), small), kind=kind)
    assert made.crew.registers == (40, 232)


def test_barriers_beside_those_of_the_rings_need_room():
    """Those of the tails of groups, for which `Tails.allocate` asks."""
    SOUND.check_further(54)
    message = "barriers take 16 bytes x (4 of ab) + 8 x 55 = 504; 496 are left"
    with pytest.raises(ValueError, match=re.escape(message)):
        SOUND.check_further(55)


def test_a_template_is_refused_before_it_is_compiled(monkeypatch):
    monkeypatch.setattr(sm90, "LOAD_REGISTERS", 48)
    with pytest.raises(
        ValueError, match=re.escape("(48 + 232 + 232) registers = 65536; 384 threads begin with 168")
    ):
        gemm(TURNS)
    monkeypatch.setattr(crew, "BARRIER_BYTES", 64)
    with pytest.raises(
        ValueError, match=r"barriers take 16 bytes x \(6 of ab \+ 2 of acc .* = 224; 64 are left"
    ):
        gemm(PAIR)


def test_one_sweep_reads_each_plane():
    with pytest.raises(ValueError, match="sweeps read the planes none, and shared loads are exact0"):
        gemm(TURNS, Forgetful)
    with pytest.raises(ValueError, match="sweeps read the planes exact0, exact0, and shared loads are none"):
        gemm(PAIR, Idle)


def test_a_stage_is_as_large_as_what_was_planned():
    check_stage(TURNS, 32768)
    with pytest.raises(
        ValueError, match="has 32784 bytes by its layouts, 32768 by tile 128x128_2x1_pingpong"
    ):
        check_stage(TURNS, 32784)


MAX_LINES = 150


def test_no_function_is_longer_than_a_person_reads():
    long = []
    for path in sorted(Path(inspect.getfile(sm90)).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MAX_LINES:
                long.append(f"{path.name}: {node.name} has {node.end_lineno - node.lineno + 1} lines")
    assert not long
