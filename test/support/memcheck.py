"""Runs kernels of every schedule on small problems with edges under compute-sanitizer: see
test_memcheck_gpu.py.

    cd test
    python -m support.memcheck 0 build     # first, because the sanitizer slows compilers too
    compute-sanitizer --tool memcheck python -m support.memcheck 0

The number is that of the part of the tiles: all parts together have all of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from cute_backend.fx_walk.collect import collect
from cute_backend.planning import Alignment, offered, plan
from cute_backend.runtime.arguments.device import device_at
from cute_backend.runtime.compiling.build import obtain
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import EpilogueSpec
from support.epilogues import EPILOGUES, GROUPED, Problem
from support.kernel_check import check_kernels

PROGRAMS = EPILOGUES | GROUPED
NAMES = ("bias_gelu_residual", "sums", "addmm_relu", "grouped_routed", "grouped_k", "grouped_k_fp8")
SHAPES = ((40, 72, 256), (200, 336, 144))
"""(M, N, K): few rows, and edges in both directions."""


def specs() -> list[EpilogueSpec]:
    """The specs of some shared epilogues, and one with promoted sums."""
    found = []
    for name in NAMES:
        [graph] = collect(PROGRAMS[name].fn, PROGRAMS[name].inputs(Problem(256, 256, 256)))
        found.append(graph.regions[0].spec)
    promoted = [replace(acc, fast_accum=False) for acc in found[0].accumulators]
    return [*found, replace(found[0], accumulators=tuple(promoted))]


PARTS = range(3)
"""The parts of every spec's tiles."""


def main() -> None:
    part, *build = sys.argv[1:]
    configs = {spec: offered(device_at(0).arch, spec)[int(part) :: len(PARTS)] for spec in specs()}
    if build:
        obtain(
            Kernel(plan(spec, tile, alignment))
            for spec in configs
            for tile in configs[spec]
            for alignment in Alignment
        )
    else:
        for spec in configs:
            check_kernels(spec, SHAPES, configs[spec])


if __name__ == "__main__":
    main()
