"""Hopper: wgmma, whose accumulators lie in the registers of one or two warpgroups."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets.h200 import H200
from cute_backend.planning.targets.target import Accumulators, Cut, Demand, EvenTiles, Shape, Target, Tiles
from cute_backend.spec import STORED_DTYPES, DType, Scaling

_TILES = Tiles(
    shipped={
        Demand.PLANES: (
            Shape(128, 128, 2, pingpong=True),
            Shape(128, 128, cluster_n=2, pingpong=True, subtile_n=64),
            Shape(64, 192, 3, pingpong=True),
            Shape(64, 128, 2),
            Shape(64, 64),
        ),
        # Specs without planes mostly have many columns. With few rows, ping-pong in 64 x 128 hides everything
        # but the reading of B: the argmax of 16 rows over 128256 columns, with K = 4096 in bf16, took 267 us
        # with it, 274 in 64 x 64, 275 in 64 x 128 without ping-pong, and torch's product alone 263. Up to 128
        # rows fit in a tile of 128 rows: 96 rows took 294 us in 128 x 128 and 431 in 64 x 128. Up to 192 rows
        # fit in one cluster of three tiles: 136 rows took 320 us in it, 566 in 64 x 128, and 670 in 128 x 128
        # (all on an H200).
        Demand.REDUCED: (
            Shape(128, 128, 2, pingpong=True),
            Shape(128, 128, pingpong=True),
            Shape(64, 192, 3, pingpong=True),
            Shape(64, 128, pingpong=True),
            Shape(64, 64),
        ),
        # A thread keeps two sets of promoted sums in registers, in addition to the accumulators.
        Demand.PROMOTED: (
            Shape(128, 128, 2),
            Shape(64, 128, 2, pingpong=True),
            Shape(64, 64),
        ),
        Demand.BLOCKS: (
            Shape(128, 256, cluster_n=2),
            Shape(128, 192, 2),
            Shape(128, 192, cluster_n=2),
            Shape(128, 160, 2),
            Shape(128, 96, 2),
            Shape(64, 192, cluster_n=2, pingpong=True),
            Shape(128, 80, 2, subtile_n=16),
            Shape(64, 160),
            Shape(64, 96),
            Shape(64, 80, subtile_n=16),
        ),
        # The rows of D lie along the columns of transposed tiles, whose rows are converted.
        Demand.CONVERTED: (
            Shape(128, 128, transposed=True),
            Shape(128, 64, transposed=True),
            Shape(128, 32, transposed=True),
            Shape(128, 16, subtile_n=16, transposed=True),
            Shape(64, 16, subtile_n=16, transposed=True),
        ),
    },
    # A tile of 160 or 224 columns in subtiles of 16 has 80 or 112 columns of each product of a pair; for one
    # product, its subtiles have 32.
    further=(
        Shape(256, 192, cluster_n=2),
        Shape(256, 192, 2, transposed=True),
        Shape(256, 160, cluster_n=2),
        Shape(256, 160, cluster_n=2, transposed=True),
        Shape(128, 256, 2),
        Shape(128, 256, cluster_n=2),
        Shape(256, 128, 2),
        Shape(256, 128, cluster_n=2),
        Shape(128, 224, 2, subtile_n=16),
        Shape(128, 224, cluster_n=2, subtile_n=16),
        Shape(128, 224, 2, transposed=True),
        Shape(128, 192, 2, pingpong=True),
        Shape(128, 192, cluster_n=2, pingpong=True),
        Shape(128, 192, 2),
        Shape(128, 192, cluster_n=2),
        Shape(128, 192, 2, transposed=True),
        Shape(128, 160, 2, pingpong=True),
        Shape(128, 160, cluster_n=2, pingpong=True),
        Shape(128, 160, 2, subtile_n=16),
        Shape(128, 160, cluster_n=2, subtile_n=16),
        Shape(128, 160, 2, transposed=True),
        Shape(128, 160, cluster_n=2, transposed=True),
        Shape(128, 128, 2, pingpong=True, subtile_n=64),
        Shape(128, 128, cluster_n=2, pingpong=True),
        Shape(128, 128, 2, 2, pingpong=True, subtile_n=64),
        Shape(128, 128, cluster_n=4, pingpong=True, subtile_n=64),
        Shape(128, 128, cluster_n=2),
        Shape(64, 256, 2, pingpong=True),
        Shape(64, 256, pingpong=True),
        Shape(128, 96, 2, pingpong=True),
        Shape(128, 96, cluster_n=2),
        Shape(128, 96, 2, transposed=True),
        Shape(128, 64, 2),
        *(Shape(128, columns, 2, subtile_n=16) for columns in (240, 208, 176, 144, 112, 80)),
        Shape(64, 192, 2, pingpong=True),
        Shape(64, 192, pingpong=True),
        Shape(64, 128, 2, 2, pingpong=True),
        Shape(64, 128, 2, pingpong=True),
        Shape(64, 128, pingpong=True),
        Shape(64, 96, pingpong=True),
        Shape(64, 64, 2, pingpong=True),
        Shape(64, 64, cluster_n=2, pingpong=True),
        Shape(64, 64, pingpong=True),
        Shape(64, 64, 2),
        # K in more parts than a cluster has CTAs is for few tiles and a long K.
        *(
            shape._replace(split_k=parts)
            for parts in (6, 8, 12, 16)
            for shape in (
                Shape(128, 256),
                Shape(128, 192),
                Shape(128, 192, transposed=True),
                Shape(128, 160, transposed=True),
                Shape(128, 128),
                Shape(64, 128),
            )
        ),
        # Clusters that share operands can't also add up each other's sums. In 128 x 96 x 2 and three parts
        # of K, 932 x 896 x 13936 gated took 52.5 us on an H100 and 49.5 on an H200, and in the fastest tile
        # without split-K 66.6 and 59.5. On an H100 in bf16, 229 x 5312 x 22224 took 119 in 128 x 256 and
        # three parts, and 137 in six without a cluster; 480 x 2656 x 8864 took 47.1 in 128 x 192 and two
        # parts, and 62.7 without.
        *(Shape(128, columns, 2, split_k=parts) for parts in (2, 3, 4) for columns in (256, 192)),
    ),
    splits=(2, 4, 6, 8, 12, 16),
    # One warpgroup has all three blocks of 192 rows. 7 x 12288 x 4096 took 27.6 us in 192 x 8, and 31.8 in
    # the tile that the model chose before; 47 x 11008 x 4096 took 28.0 in 192 x 48, and 31.3; 16 x 17408 x
    # 5120 took 48.7 in 192 x 16, and 50.4. With 72 to 128 columns, such tiles took 1.02 to 1.31 times as
    # long as others for 96 to 500 rows (bf16 and fp16, H200, 2026-11-29).
    even=EvenTiles(rows=(64, 128, 192, 256), up_to={192: 64}, accumulators=192, clusters=(1, 2, 4)),
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
    operands=frozenset((DType.E4M3, DType.E5M2, DType.I8, DType.BF16, DType.F16)),
    # Kernels with segments were not timed in wider tiles.
    segment_tile_n=192,
    # Four stages of A and B in place of five were timed in 128 x 128 ping-pong (H200). In fp8, 6144 x 6144 x
    # 512 took 55.3 us in place of 64.0, and 10694 x 25440 x 336 took 409 in place of 474. In bf16, 4714 x
    # 20144 x 272 took 149 in place of 156, and 2074 x 14208 x 272 took 46.8 in place of 49.3. But 3000 x 5008
    # x 1536 in fp8 took 47.0 in place of 45.2, and 2357 x 8000 x 896 in bf16 61.6 in place of 59.7. No depth
    # between was timed.
    shallow_k_bytes=6 * 128,
    scalings=frozenset((Scaling.LINE, Scaling.SQUARE)),
    converts=frozenset(STORED_DTYPES),
    planes_by_tma=True,
    promotes=True,
    # The data sheet's 1979 TFLOP/s in fp8, without sparsity, of 132 multiprocessors at 1.83 GHz.
    products_per_cycle=4096,
    # A thread has two rows, eight apart, and four threads share each (PTX ISA, wgmma register fragments,
    # matrix D).
    accumulators=Accumulators(block_m=64, row_threads=4, in_registers=True),
    least_subtile_n=8,  # the columns of the core matrices that the accumulators are laid out in
    unrolled_subtile_n=32,
    # The 128 threads that load keep 40 registers each, so 232 remain for each other thread: 40 + 2 x 232 is
    # 3 x 168. `TileConfig.epilogue_registers` has the exception.
    epilogue_registers=232,
    tiles=_TILES,
    # For 214 timings of problems of 1 to 8192 rows on H100s, 26 of them drawn, the chosen tile takes 1.005
    # (each column has a scale) and 1.011 times as long as the fastest that was timed, as geometric means
    # (benchmarks/findings.md).
    timing=replace(
        H200,
        by_blocks={
            Cut(64, 64): 1.0,
            Cut(64, 128, 2, pingpong=True): 1.0,
            Cut(64, 128, 2, 2, pingpong=True): 0.85,
            Cut(128, 128, 2): 1.0,
            Cut(128, 256, 2): 1.03,
            Cut(256, 128, cluster_n=2): 1.0,
        },
        by_lines={
            Cut(64, 64): 1.0,
            Cut(64, 128, 2, pingpong=True): 1.0,
            Cut(64, 128, 2, 2, pingpong=True): 0.85,
            Cut(128, 128, 2): 1.04,
            Cut(128, 256, 2): 1.12,
            Cut(256, 128, cluster_n=2): 0.9,
        },
        # DeepSeek-V3's experts at 4096 tokens are 256 groups of 128 rows in the mean. Gate and up in bf16
        # took 4868 and 4873 us in this tile on two days, and 5385 and 6106 in 128 x 64 x 2 (H200); on an H100
        # they took 5939 and 7456. With groups of 256 rows, this tile took 1.04, 0.94 and 0.97 times as long.
        # In fp8 it took 2365 us on an H200 and 2973 on an H100, and the other 2643 and 3533. Down took 2384
        # and 2530 us in two runs on an H200 (2597 and 2746 in 128 x 128), and 3010 on an H100 (3353). With
        # half of the rows in one group, down took 1.02 (H100) and 1.04 times as long as in 128 x 128.
        in_small_groups={Cut(64, 256, cluster_m=2, pingpong=True): 0.85},
    ),
)
