"""Times the template on mma.sync on a Hopper GPU, with Triton's product on mma.sync and torch's on wgmma.

    python benchmarks/warp_mma.py FILE.json [TENSOROP_GEMM.py]

Kernels of sm_80, and kernels of sm_120a, which TMA feeds, are compiled for sm_90a, bare and with a bias, an
activation and a residual. They have every tile that tuning tries for either architecture. Before they are
timed, each bare product is compared with torch's. Kernels are timed alone, in CUDA graphs, interleaved, from
a cold L2; figures are medians in microseconds. They show how well the template uses mma.sync on a Hopper GPU,
not how fast it is on the GPUs that it is for.

TENSOROP_GEMM.py is NVIDIA's example of the CuTe DSL for Ampere, which is timed too if it is given
(github.com/NVIDIA/cutlass, examples/python/CuTeDSL/cute/ampere/kernel/dense_gemm).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.runtime import from_dlpack
from elsewhere import functions_for
from problems import Drawn, Epilogue, Operands
from torch import Tensor
from triton_mm import TILES, assert_mma_sync, fits, mm

from cute_backend.bench.program_timing import require_gpu, time_units, unit_of
from cute_backend.planning import Alignment, Arch, TileConfig, plan
from cute_backend.planning.search import clustered
from cute_backend.runtime.arguments.device import device_at
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.link import KernelFunction
from cute_backend.runtime.tuning.timing import arguments_of
from cute_backend.spec import Accumulator, DType, EpilogueSpec, Store

PROBLEMS = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (128, 8192, 8192),
    (7697, 27304, 5120),
    (16, 4096, 14336),
)
"""(M, N, K)."""

FEW_ROWS = 256
"""The most rows for which tiles with split-K are timed too."""

CALLS, ROUNDS = 2, 11
"""The calls of a graph, each on different operands, and the timings of each graph."""

BARE = EpilogueSpec(
    (Accumulator("acc", DType.BF16, DType.BF16),), (), (), (Store("out0", "acc", DType.BF16),)
)

WRONG = 1e-2
"""The tolerance relative to the largest result. A rounding to bf16 changes a result by up to 0.004."""


@torch.no_grad()
def measure(
    m: int,
    n: int,
    k: int,
    functions: dict[Kernel, KernelFunction],
    example: Callable[[Tensor, Tensor, Tensor], None] | None,
) -> dict[str, float]:
    """Microseconds by "torch", "triton TILE", "nvidia", "bare TILE", "full TILE", "TMA bare TILE" and
    "TMA full TILE"."""
    generator = torch.Generator("cuda").manual_seed(0)
    sms = device_at(0).sm_count
    kernels = [kernel for kernel in functions if kernel.plan.tile.split_k == 1 or m <= FEW_ROWS]
    alike = defaultdict(list)
    for kernel in kernels:
        alike[kernel.plan.spec, kernel.plan.tile.sums_in_memory].append(kernel.plan)
    sets = {
        key: [tuple(arguments_of(plans, m, n, k, generator)) for _ in range(CALLS)]
        for key, plans in alike.items()
    }
    products = [(a, b, torch.empty_like(out)) for a, b, out in sets[BARE, False]]
    units = {"torch": unit_of(lambda a, b, out: torch.mm(a, b, out=out), products)}
    for kernel in kernels:
        by_tma = "" if kernel.arch is Arch.SM80 else "TMA "
        name = f"{by_tma}{'bare' if kernel.plan.spec == BARE else 'full'} {kernel.plan.tile.name}"
        own = sets[kernel.plan.spec, kernel.plan.tile.sums_in_memory]
        units[name] = unit_of(lambda *args, f=functions[kernel]: f(*args, sms), own)
        if kernel.plan.spec == BARE:
            a, b, out = own[0][:3]
            compare(name, out, torch.mm(a, b))
    peers = [(a, b.t(), torch.empty_like(out)) for a, b, out in products]
    for tile in filter(fits, TILES):
        assert_mma_sync(mm(tile, *peers[0]))
        name = "triton " + "x".join(map(str, tile))
        units[name] = unit_of(lambda a, b, out, t=tile: mm(t, a, b, out), peers)
        compare(name, peers[0][-1], products[0][-1])
    if example is not None:
        units["nvidia"] = unit_of(example, peers)
        compare("nvidia", peers[0][-1], products[0][-1])
    return {name: timing.median_us for name, timing in time_units(units, ROUNDS).items()}


def compare(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError if a product differs from torch's by more than rounding."""
    error = ((actual.float() - expected.float()).abs().max() / expected.abs().max()).item()
    assert error < WRONG, f"{name} differs from torch's product by {error:.2e} of the largest result"


def published(file: Path) -> Callable[[Tensor, Tensor, Tensor], None]:
    """NVIDIA's example as a function of A (M, K), B (N, K) and the output (M, N), all contiguous bf16."""
    sys.path.insert(0, str(file.parent))
    example = import_module(file.stem)
    made: dict[tuple[int, ...], Any] = {}

    def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
        tensors = [from_dlpack(each.unsqueeze(0), assumed_align=16) for each in (a, b.t(), out)]
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        if a.shape + out.shape not in made:
            gemm = example.TensorOpGemm(BFloat16, BFloat16, Float32, (2, 2, 1), False)
            made[a.shape + out.shape] = cute.compile(example.bmm, gemm, *tensors, stream)
        made[a.shape + out.shape](*tensors, stream)

    return mm


def best(times: dict[str, float], kind: str) -> tuple[str, float]:
    """The name and the time of the fastest of a kind."""
    name, us = min((item for item in times.items() if item[0].startswith(kind)), key=lambda item: item[1])
    return name.removeprefix(kind).strip(), us


def tiles_for(spec: EpilogueSpec) -> list[TileConfig]:
    """The tiles of sm_80 and sm_120a, each for both of them if it fits."""
    copying, fed = (list(clustered(arch, spec)) for arch in (Arch.SM80, Arch.SM120A))
    copying += [replace(config, arch=Arch.SM80) for config in fed]
    alone = [config for config in copying if config.tile_m <= 128 and config.occupancy == 1]
    fed += [replace(config, arch=Arch.SM120A) for config in alone]
    return [config for config in dict.fromkeys(copying + fed) if config.split_k == 1 or _is_for_few(config)]


def _is_for_few(config: TileConfig) -> bool:
    """Whether a tile with split-K may be chosen for few rows."""
    return config.split_k == 4 and config.tile_m * config.tile_n <= 128 * 64


def main() -> None:
    """Writes all times to the file that the command names, and prints the best of each kind."""
    require_gpu()
    file = Path(sys.argv[1])
    example = published(Path(sys.argv[2])) if len(sys.argv) > 2 else None
    full = Drawn(256, 512, 256, Operands.BF16, Epilogue.FULL).spec()
    kernels = [
        Kernel(plan(spec, config, Alignment.TMA)) for spec in (BARE, full) for config in tiles_for(spec)
    ]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        functions = functions_for(Arch.SM90A, kernels, Path(folder))
    for m, n, k in PROBLEMS:
        times = measure(m, n, k, functions, example)
        found.append({"m": m, "n": n, "k": k, "us": times})
        file.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "problems": found}, indent=1))
        torch.cuda.empty_cache()
    print("M, N, K: bare TFLOP/s in a tile; of Triton's speed in a tile; of torch's; full of bare in a tile;")
    print("of the speed of NVIDIA's example, if it was given")
    print("TMA: of the speed by cp.async in the same tile; full of bare in a tile")
    for each in found:
        m, n, k, us = each["m"], each["n"], each["k"], each["us"]
        (tile, bare), (peer_tile, peer), (full_tile, full_us) = (
            best(us, kind) for kind in ("bare", "triton", "full")
        )
        rate = f"{2e-6 * m * n * k / bare:.0f} in {tile}"
        peers = f"{peer / bare:.2f} ({peer_tile}); {us['torch'] / bare:.2f}"
        shown = f"; {us['nvidia'] / bare:.2f}" if "nvidia" in us else ""
        print(f"{m}, {n}, {k}: {rate}; {peers}; {bare / full_us:.2f} in {full_tile}{shown}")
        (fed_tile, fed), (fed_full_tile, fed_full) = (best(us, f"TMA {kind}") for kind in ("bare", "full"))
        copied = us[f"bare {fed_tile}"]
        print(f"    TMA: {copied / fed:.2f} ({fed_tile}); {fed / fed_full:.2f} in {fed_full_tile}")


if __name__ == "__main__":
    main()
