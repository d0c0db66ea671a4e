"""The template on mma.sync on a Hopper GPU, which has its instructions: kernels of sm_80, which copy operands
by cp.async, and of sm_120a, to which TMA brings them, compiled for sm_90a."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from cute_backend.kinds import reductions
from cute_backend.planning import Alignment, Arch, offered, plan, unserved
from cute_backend.planning.targets import Demand
from cute_backend.replay import replay
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction, load
from cute_backend.spec import STORED_DTYPES, DType, EpilogueSpec, Major
from support.epilogues import EPILOGUES
from support.kernel_check import SHAPES, check_functions, fitting, operands_of, run_kernel
from support.shipped import epilogue_spec

pytestmark = pytest.mark.gpu

Functions = dict[Kernel, KernelFunction]

SUMS = {reductions.SUM, reductions.MEAN, reductions.LOGSUMEXP}

FEEDS = (Arch.SM80, Arch.SM120A)

TILES = [(arch, tile) for arch in FEEDS for tile in range(len(arch.target.tiles.shipped[Demand.PLANES]))]

LAYOUTS = [(dtype, a, b) for dtype in (DType.BF16, DType.F16) for a in Major for b in Major]


@cache
def in_16_bits(name: str) -> EpilogueSpec:
    """A shared epilogue whose products are of 16 bits, whatever they were of."""
    spec = epilogue_spec(name, True)
    fp8 = spec.product.a_dtype.is_fp8 or spec.product.b_dtype.is_fp8
    return of_operands(spec, DType.BF16) if fp8 else spec


def of_operands(spec: EpilogueSpec, dtype: DType, a: Major = Major.K, b: Major = Major.K) -> EpilogueSpec:
    accumulators = (
        replace(acc, a_dtype=dtype, b_dtype=dtype, a_major=a, b_major=b) for acc in spec.accumulators
    )
    return replace(spec, accumulators=tuple(accumulators))


def names() -> list[str]:
    """The shared epilogues but those that convert fp8, which sm_80 can't."""
    return [name for name in EPILOGUES if unserved(in_16_bits(name), Arch.SM80.target) is None]


def one_tile(name: str, arch: Arch = Arch.SM80) -> list[Kernel]:
    """An epilogue's kernels in a tile, another one for each, aligned and not."""
    configs = offered(arch, spec := in_16_bits(name))
    config = configs[list(EPILOGUES).index(name) % len(configs)]
    return [Kernel(plan(spec, config, alignment)) for alignment in Alignment]


def wgmma_peer(name: str) -> Kernel:
    """The same epilogue behind wgmma."""
    spec = in_16_bits(name)
    return Kernel(plan(spec, offered(Arch.SM90A, spec)[-1], Alignment.TMA))


def of_tile(arch: Arch, tile: int, alignment: Alignment) -> Kernel:
    spec = in_16_bits("addmm_relu")
    return Kernel(plan(spec, offered(arch, spec)[tile], alignment))


def of_layout(arch: Arch, dtype: DType, a: Major, b: Major) -> Kernel:
    spec = of_operands(in_16_bits("addmm_relu"), dtype, a, b)
    return Kernel(plan(spec, offered(arch, spec)[-1], Alignment.TMA))


def converting(arch: Arch, stored: DType, other: DType) -> list[Kernel]:
    """The kernels of a weight of 8 bits in every tile of mma.sync."""
    spec = of_operands(in_16_bits("addmm_relu"), other)
    spec = replace(spec, accumulators=(replace(spec.product, b_dtype=stored),))
    return [Kernel(plan(spec, config, Alignment.TMA)) for config in offered(arch, spec)]


def built_for_hopper(kernels: list[Kernel], folder: Path) -> Functions:
    """Kernels on mma.sync, as functions that run on Hopper."""
    if torch.cuda.get_device_capability() != Arch.SM90A.target.capability:
        pytest.skip("they are compiled for Hopper")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        built_for = import_module("elsewhere").built_for
    return {kernel: load(built_for(Arch.SM90A, kernel, folder)) for kernel in kernels}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("arch", FEEDS)
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_shared_epilogue_is_right(name: str, arch: Arch, tmp_path: Path) -> None:
    if name not in names():
        pytest.skip("sm_80 converts no fp8")
    check_functions(built_for_hopper(one_tile(name, arch), tmp_path))


@pytest.mark.sweep
@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0].value}-{tile[1]}")
def test_every_tile_is_right_to_the_bit(tile: tuple[Arch, int], alignment: Alignment, tmp_path: Path) -> None:
    check_bits(of_tile(*tile, alignment), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", FEEDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(each.value for each in layout))
def test_every_layout_is_right_to_the_bit(
    layout: tuple[DType, Major, Major], arch: Arch, tmp_path: Path
) -> None:
    check_bits(of_layout(arch, *layout), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", FEEDS)
@pytest.mark.parametrize("stored", [each for each in STORED_DTYPES if each in Arch.SM80.target.converts])
@pytest.mark.parametrize("other", [DType.BF16, DType.F16])
def test_weights_are_converted_right_to_the_bit(
    arch: Arch, stored: DType, other: DType, tmp_path: Path
) -> None:
    for kernel in converting(arch, stored, other):
        check_bits(kernel, tmp_path)


def check_bits(kernel: Kernel, folder: Path) -> None:
    """Asserts that a kernel gives the replay's bits: its products are exact, and the rest is rounded once."""
    function = built_for_hopper([kernel], folder)[kernel]
    for m, n, k in SHAPES:
        a, bs, loads = operands_of(kernel.plan.spec, m, n, k, aligned=kernel.plan.alignment is Alignment.TMA)
        expected = replay(kernel.plan.spec, a, bs, loads, accumulate=torch.float64)
        outputs = run_kernel(kernel, function, (a, bs, loads), m, n)
        for actual, right in zip(outputs, expected, strict=True):
            assert torch.equal(actual, right), (m, n, k)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", EPILOGUES)
def test_the_epilogue_gives_the_bits_that_it_gives_behind_wgmma(name: str, tmp_path: Path) -> None:
    """The products are exact, so nothing else tells the kernels of the two templates apart."""
    if name not in names():
        pytest.skip("sm_80 converts no fp8")
    spec, of_warps, peer = in_16_bits(name), one_tile(name)[0], wgmma_peer(name)
    if any(each.kind in SUMS for each in spec.reductions.values()):
        pytest.skip("tiles differ, and so does the order of sums over rows and columns")
    rows = 272 if EPILOGUES[name].square else 48  # a pitch for planes by columns
    m, n, k = fitting(spec, (rows, 272, 2048))
    given = operands_of(spec, m, n, k, aligned=True)
    functions = built_for_hopper([of_warps], tmp_path) | obtain([peer])
    results = [run_kernel(kernel, function, given, m, n) for kernel, function in functions.items()]
    for warps, warpgroups in zip(*results, strict=True):
        assert torch.equal(warps, warpgroups)
