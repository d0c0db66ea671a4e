"""Plans and builds kernels of a target in both alignments: python docs/changes/both_alignments.py sm_110a"""

import sys

import torch

from cute_backend import explain
from cute_backend.planning import Alignment, Arch, plan, tile_table
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel


def linear(x, weight, bias, residual, gate):
    """Three planes of fp32, which narrow subtiles where a thread has whole rows of them."""
    return (x @ weight.t() + bias).relu().float() * gate + residual


def main(name):
    shapes = (64, 64), (128, 64), (128,)
    operands = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    planes = [torch.empty(64, 128) for _ in range(2)]
    (region,) = explain(linear, *operands, *planes, arch=name).regions
    for alignment in Alignment:
        planned = plan(region.spec, tile_table(Arch.of_name(name), region.spec)[-1], alignment)
        built = build(Kernel(planned))
        places = ", ".join(f"{load} {placement.name}" for load, placement in planned.placements.items())
        print(f"{name} {alignment.value}: subtiles of {planned.tile.subtile_n} columns, {places}")
        print(f"    target {built.ptx.split('.target ')[1].split()[0]}, {built.spill_bytes} bytes spilled")


if __name__ == "__main__":
    main(sys.argv[1])
