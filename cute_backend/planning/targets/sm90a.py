"""Hopper: wgmma, whose accumulators lie in the registers of one or two warpgroups."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets.h200 import H200
from cute_backend.planning.targets.target import Accumulators, Cut, Shape, Target, Tiles
from cute_backend.spec import DType, Scaling

_TILES = Tiles(
    shipped=(
        Shape(128, 128, 2, pingpong=True),
        Shape(128, 128, cluster_n=2, pingpong=True, subtile_n=64),
        Shape(64, 192, 3, pingpong=True),
        Shape(64, 128, 2),
        Shape(64, 64),
    ),
    # Specs without planes have many columns above all, and with few rows ping-pong on 64 x 128 hides all
    # but the reading of B: the argmax of 16 rows over 128256 columns of 4096 in bf16 took 267 us with it,
    # 274 by 64 x 64 and 275 without ping-pong; torch's product alone 263 (H200). Of up to 128 rows all lie
    # in one tile: 96 took 294 us by 128 x 128, 431 by 64 x 128. Of up to 192 rows all lie in one cluster of
    # three: 136 took 320 us with it, 566 by 64 x 128, 670 by two of 128 x 128 (H200).
    reduced=(
        Shape(128, 128, 2, pingpong=True),
        Shape(128, 128, pingpong=True),
        Shape(64, 192, 3, pingpong=True),
        Shape(64, 128, pingpong=True),
        Shape(64, 64),
    ),
    # Promoted sums keep two sets of sums beside the accumulators in registers.
    promoted=(
        Shape(128, 128, 2),
        Shape(64, 128, 2, pingpong=True),
        Shape(64, 64),
    ),
    # Bare, at 4096 rows, torch's time divided by that of 128 x 256 in two pieces of columns was 1.01, 1.04,
    # 1.09 and 1.12; divided by that of 128 x 128 it was 0.99, 1.02, 1.09 and 1.09. 128 rows took 36.6 us by
    # 64 x 128 in clusters of four, 40.9 in clusters of two (H200).
    sized_by_blocks=(
        Shape(128, 256, 2),
        Shape(64, 128, 2, 2, pingpong=True),
    ),
    # Pairs whose B is contiguous along N have no 32 columns of each in 64 x 64. No CTA of this is without
    # rows.
    alone=Shape(64, 128, pingpong=True),
    # Of 140 problems that were drawn (fp8 and bf16, M of 1 to 16384), what the model chose of the shipped
    # tiles took 6 percent longer than the fastest of all, and its choice of these and those 2 percent
    # (H200, benchmarks/findings/tiles.md). 128 x 256 in clusters of 2 x 1 is not among them, because its
    # predicted time is too short: 4096 cubed took 201 us in bf16, and 184 with 128 x 128.
    sized=(
        Shape(128, 256, cluster_n=2),
        Shape(256, 128, cluster_n=2),
        Shape(128, 192, 2),
        Shape(128, 192, cluster_n=2),
        Shape(128, 128, 2, pingpong=True, subtile_n=64),
        Shape(64, 192, cluster_n=2, pingpong=True),
        Shape(64, 128, 2, pingpong=True),
        Shape(64, 128, pingpong=True),
        Shape(64, 64, 2, pingpong=True),
        Shape(64, 64, cluster_n=2, pingpong=True),
        Shape(64, 64, pingpong=True),
    ),
    # Of 29 further problems, most with M of 129 to 768, the transposed product was fastest for 10, and 160 or
    # 224 columns for 3. With these the chosen tile takes 1.02 (bf16) and 1.03 (fp8) times as long as the
    # fastest, without them 1.06 and 1.09 (H200). For more rows they are taken where the model predicts
    # more of a gain than its error (`search._UNTIMED_MARGIN`).
    middle=(
        Shape(128, 224, 2),
        Shape(128, 224, cluster_n=2),
        Shape(128, 224, 2, transposed=True),
        Shape(128, 192, 2, transposed=True),
        Shape(128, 160, 2),
        Shape(128, 160, 2, transposed=True),
    ),
    middle_rows=768,
    # DeepSeek-V3's gate and up at 4096 tokens, 256 groups of 128 rows in the mean, took 4868 and 4873 us with
    # it on two days, and 5385 and 6106 with what the model chooses (H200); 5939 and 7456 on an H100. B is
    # brought once for both halves of a group's rows. Of 256 rows it took 1.04, 0.94 and 0.97 times as long.
    # In fp8 it took 2365 us on an H200 and 2973 on an H100, what the model chooses 2643 and 3533. Down took
    # 2384 and 2530 us in two runs on an H200, what the model chooses 2597 and 2746, and 3010 and 3353 on an
    # H100; with half of the rows in one group, 1.02 (H100) and 1.04 times as long as that.
    small_groups=Shape(64, 256, 2, pingpong=True),
    # Eight were slower than four wherever they were tried: M of 16 and 128, N from 512, K up to 8192 in fp8
    # (H200).
    splits=(2, 4),
    tried_splits=(2, 3, 4),
    parted=(
        Shape(128, 256),
        Shape(128, 192),
        Shape(128, 192, transposed=True),
        Shape(128, 160, transposed=True),
        Shape(128, 128),
        Shape(64, 128),
    ),
    parts=(6, 8, 12, 16),
    tried=(
        Shape(256, 128),
        Shape(128, 256),
        Shape(128, 224),
        Shape(128, 192),
        Shape(128, 160),
        Shape(128, 128),
        Shape(128, 96),
        Shape(128, 64),
        Shape(64, 128),
        Shape(64, 64),
        Shape(128, 128, pingpong=True),
        Shape(128, 128, pingpong=True, subtile_n=64),
        Shape(64, 256, pingpong=True),
        Shape(64, 192, pingpong=True),
        Shape(64, 128, pingpong=True),
        Shape(64, 64, pingpong=True),
        *(Shape(128, columns, transposed=True) for columns in (224, 192, 160, 128, 96)),
    ),
    # With 128 x 96 x 2 and three parts, 932 x 896 x 13936 gated took 52.5 us on an H100 and 49.5 on an H200,
    # with the fastest tile without parts 66.6 and 59.5; 229 x 5312 x 22224 took 119 by 128 x 256 in three
    # parts and 137 by what was chosen before, 480 x 2656 x 8864 47.1 in two and 62.7 (H100, bf16).
    parted_clusters=(
        Shape(128, 256, 2),
        Shape(128, 192, 2),
    ),
    tried_parted=(
        Shape(128, 256, 2),
        Shape(256, 128, cluster_n=2),
        Shape(128, 192, 2),
        Shape(128, 160, 2, transposed=True),
        Shape(128, 224, 2, transposed=True),
    ),
    clusters=((2, 1), (1, 1), (1, 2)),
)

TARGET = Target(
    name="sm_90a",
    family="Hopper",
    capability=(9, 0),
    gpu="H200",
    sm_count=132,
    smem_bytes=227 * 1024,
    least_ab_stages=3,
    template="cute_backend.templates.sm90:Sm90Gemm",
    operands=frozenset((DType.E4M3, DType.E5M2, DType.BF16, DType.F16)),
    # With an epilogue that reads a plane, and others that read rowvecs, tiles of 128 x 224 and 128 x 256
    # spilled 16 to 152 bytes, and narrower ones nothing.
    segment_tile_n=192,
    # With four stages of A and B in place of five, in 128 x 128 ping-pong: 6144 x 6144 x 512 in fp8 took 55.3
    # us in place of 64.0, 10694 x 25440 x 336 409 in place of 474, and in bf16 4714 x 20144 x 272 149 in
    # place of 156, 2074 x 14208 x 272 46.8 in place of 49.3. But 3000 x 5008 x 1536 in fp8 took 47.0 in place
    # of 45.2, and 2357 x 8000 x 896 in bf16 61.6 in place of 59.7 (H200). Nothing between was timed.
    shallow_k_bytes=6 * 128,
    scalings=frozenset((Scaling.LINE, Scaling.SQUARE)),
    planes_by_tma=True,
    promotes=True,
    # The data sheet's 1979 TFLOP/s in fp8, without sparsity, of 132 multiprocessors at 1.83 GHz.
    products_per_cycle=4096,
    # A thread has two rows, eight apart, and four threads share each (PTX ISA, wgmma register fragments,
    # matrix D).
    accumulators=Accumulators(block_m=64, row_threads=4, in_registers=True),
    least_subtile_n=8,  # the columns of the core matrices that the accumulators are laid out in
    unrolled_subtile_n=32,
    # The most without a spill, of up to eight planes with gelu and a row maximum, in every tile that ships.
    row_bits=1280,
    # The registers that remain beside 40 for each of the 128 threads that load: 40 + 2 x 232 of 3 x 168.
    epilogue_registers=232,
    tiles=_TILES,
    # For 11 problems of 1308 to 4168 rows, in two recipes each, the chosen tile takes 1.002 times as long as
    # the fastest of 128 x 256 and 128 x 128, and with a residual 1.000 times. Without the factors of 128 x
    # 256, these were 1.004 and 1.023 (H200, benchmarks/findings/tiles.md).
    timing=replace(
        H200,
        by_blocks={Cut(64, 128, 2, 2, pingpong=True): 0.85, Cut(128, 256, 2): 1.06},
        by_blocks_with_planes={Cut(128, 256, 2): 1.1},
    ),
)
