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
    # Specs without planes mostly have many columns. With few rows, ping-pong in 64 x 128 hides everything
    # but the reading of B: the argmax of 16 rows over 128256 columns, with K = 4096 in bf16, took 267 us with
    # it, 274 in 64 x 64, 275 in 64 x 128 without ping-pong, and torch's product alone 263. Up to 128 rows fit
    # in a tile of 128 rows: 96 rows took 294 us in 128 x 128 and 431 in 64 x 128. Up to 192 rows fit in one
    # cluster of three tiles: 136 rows took 320 us in it, 566 in 64 x 128, and 670 in 128 x 128 (all on an
    # H200).
    reduced=(
        Shape(128, 128, 2, pingpong=True),
        Shape(128, 128, pingpong=True),
        Shape(64, 192, 3, pingpong=True),
        Shape(64, 128, pingpong=True),
        Shape(64, 64),
    ),
    # A thread keeps two sets of promoted sums in registers, in addition to the accumulators.
    promoted=(
        Shape(128, 128, 2),
        Shape(64, 128, 2, pingpong=True),
        Shape(64, 64),
    ),
    # For four bare products of 4096 rows, 128 x 256 in two pieces of columns took 0.94 to 0.99 of the time of
    # 128 x 128 if columns share scales. Otherwise 256 x 128 took 0.94 to 0.98 of the time of the faster of
    # both (H100). 128 rows took 36.6 us in 64 x 128 in clusters of four, and 40.9 in clusters of two (H200).
    sized_by_blocks=(
        Shape(128, 256, 2),
        Shape(256, 128, cluster_n=2),
        Shape(64, 128, 2, 2, pingpong=True),
    ),
    # In 64 x 64, a pair whose B is contiguous along N would have only 32 columns of each product, which is
    # half a row of the swizzle. This tile has no cluster, so no CTA of it lacks rows.
    alone=Shape(64, 128, pingpong=True),
    # For 140 drawn problems (fp8 and bf16, M of 1 to 16384), the shipped tile that the model chose took 6
    # percent longer than the fastest of all tiles, and the tile that it chose among these and the shipped
    # ones 2 percent (H200, benchmarks/findings/tiles.md). 128 x 256 in clusters of 2 x 1 is not among them,
    # because its predicted time is too short: 4096 cubed took 201 us in bf16, and 184 in 128 x 128.
    sized=(
        Shape(128, 256, cluster_n=2),
        Shape(256, 128, cluster_n=2),
        Shape(128, 192, 2),
        Shape(128, 192, cluster_n=2),
        # Of 172 drawn problems, most with more than 768 rows, the tile that the model chooses took 0.971
        # (full), 0.979 (gated) and 0.979 (bare) times as long in bf16 as without these, and 0.984 in fp8
        # (H100). 256 x 160 and 256 x 192 were the fastest for 5 of 48 problems of 100 to 1024 rows, by 4 to
        # 10 percent, so only tuning tries them.
        Shape(128, 192, 2, pingpong=True),
        Shape(128, 192, cluster_n=2, pingpong=True),
        Shape(128, 160, 2, pingpong=True),
        Shape(128, 160, cluster_n=2, pingpong=True),
        Shape(128, 128, 2, pingpong=True, subtile_n=64),
        Shape(64, 192, cluster_n=2, pingpong=True),
        Shape(64, 128, 2, pingpong=True),
        Shape(64, 128, pingpong=True),
        Shape(64, 64, 2, pingpong=True),
        Shape(64, 64, cluster_n=2, pingpong=True),
        Shape(64, 64, pingpong=True),
    ),
    # A pair has 112 columns of each product in them. With a predicted gain of more than 5 percent
    # (`search._NARROW_PAIR_MARGIN`), the chosen tile took 0.992 times as long as without them for 34 drawn
    # pairs in bf16 and for 40 in fp8 (H100).
    pairs=(
        Shape(128, 224, 2, subtile_n=16),
        Shape(128, 224, cluster_n=2, subtile_n=16),
    ),
    # Of 29 further problems, most with M of 129 to 768, the transposed product was the fastest for 10, and
    # tiles of 160 or 224 columns for 3. With these tiles, the chosen one takes 1.02 (bf16) and 1.03 (fp8)
    # times as long as the fastest, and without them 1.06 and 1.09 times (H200). For more rows, they are
    # chosen only if the predicted gain is more than the model's error (`search._UNTIMED_MARGIN`).
    middle=(
        Shape(128, 224, 2),
        Shape(128, 224, cluster_n=2),
        Shape(128, 224, 2, transposed=True),
        Shape(128, 192, 2, transposed=True),
        Shape(128, 160, 2),
        Shape(128, 160, 2, transposed=True),
    ),
    middle_rows=768,
    # An H100 has room for 30 clusters of four CTAs, so these serve problems of at most 120 tiles. Each CTA
    # reads half of its rows and columns from L2, or a quarter of its rows and all columns. For 92 drawn
    # problems of 40 to 132 tiles, the chosen tile took 0.956 times as long as without these (H100,
    # benchmarks/findings/tiles.md).
    large_clusters=(
        Shape(128, 128, 2, 2, pingpong=True, subtile_n=64),
        Shape(128, 128, cluster_n=4, pingpong=True, subtile_n=64),
    ),
    blocks=(
        Shape(128, 160, 2),
        Shape(64, 160),
    ),
    # These were not timed.
    whole_blocks=(
        Shape(128, 96, 2),
        Shape(128, 80, 2, subtile_n=16),
        Shape(64, 96),
        Shape(64, 80, subtile_n=16),
    ),
    # q, k and v of GPT-NeoX-20B, whose heads have 96 columns, took 80.0, 83.2 and 84.4 us in 64 x 96 with 1,
    # 16 and 64 rows, and 85.7, 85.8 and 85.9 in the best tile of 192 columns (bf16, H100).
    packed=(
        Shape(128, 96, 2, pingpong=True),
        Shape(64, 96, pingpong=True),
        Shape(64, 96),
    ),
    # This tile was timed for DeepSeek-V3's experts at 4096 tokens, 256 groups of 128 rows in the mean, beside
    # the tile that the model chooses. A cluster loads B once for both halves of a group's rows. Gate and up
    # in bf16 took 4868 and 4873 us on two days, and 5385 and 6106 in the model's tile (H200); on an H100 they
    # took 5939 and 7456. With groups of 256 rows, this tile took 1.04, 0.94 and 0.97 times as long as the
    # model's. In fp8 it took 2365 us on an H200 and 2973 on an H100, and the model's tile 2643 and 3533. Down
    # took 2384 and 2530 us in two runs on an H200 (the model's tile 2597 and 2746), and 3010 on an H100
    # (3353). With half of the rows in one group, down took 1.02 (H100) and 1.04 times as long as in the
    # model's tile.
    small_groups=Shape(64, 256, 2, pingpong=True),
    # Split-K by eight was slower than by four wherever it was tried: M of 16 and 128, N from 512, K up to
    # 8192 in fp8 (H200).
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
        Shape(256, 192),
        Shape(256, 160),
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
        Shape(128, 192, pingpong=True),
        Shape(128, 160, pingpong=True),
        Shape(128, 128, pingpong=True, subtile_n=64),
        Shape(64, 256, pingpong=True),
        Shape(64, 192, pingpong=True),
        Shape(64, 128, pingpong=True),
        Shape(64, 64, pingpong=True),
        *(Shape(256, columns, transposed=True) for columns in (192, 160)),
        *(Shape(128, columns, transposed=True) for columns in (224, 192, 160, 128, 96)),
        # A pair has half of the columns for each product: 128 x 112 x 2 and 128 x 80 x 2.
        *(Shape(128, columns, subtile_n=16) for columns in (240, 224, 208, 176, 160, 144, 112, 80)),
    ),
    # In 128 x 96 x 2 and three parts of K, 932 x 896 x 13936 gated took 52.5 us on an H100 and 49.5 on an
    # H200, and in the fastest tile without split-K 66.6 and 59.5. On an H100 in bf16, 229 x 5312 x 22224 took
    # 119 in 128 x 256 and three parts, and 137 in the tile that was chosen before; 480 x 2656 x 8864 took
    # 47.1 in 128 x 192 and two parts, and 62.7 before.
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
    # Kernels with segments were not timed in wider tiles.
    segment_tile_n=192,
    # Four stages of A and B in place of five were timed in 128 x 128 ping-pong (H200). In fp8, 6144 x 6144 x
    # 512 took 55.3 us in place of 64.0, and 10694 x 25440 x 336 took 409 in place of 474. In bf16, 4714 x
    # 20144 x 272 took 149 in place of 156, and 2074 x 14208 x 272 took 46.8 in place of 49.3. But 3000 x 5008
    # x 1536 in fp8 took 47.0 in place of 45.2, and 2357 x 8000 x 896 in bf16 61.6 in place of 59.7. No depth
    # between was timed.
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
    # The 128 threads that load keep 40 registers each, so 232 remain for each other thread: 40 + 2 x 232 is
    # 3 x 168. `TileConfig.epilogue_registers` has the exception.
    epilogue_registers=232,
    tiles=_TILES,
    # For 214 timings of problems of 1 to 8192 rows on H100s, 26 of them drawn, the chosen tile takes 1.005
    # (each column has a scale) and 1.011 times as long as the fastest that was timed, as geometric means
    # (benchmarks/findings/block-scales.md).
    timing=replace(
        H200,
        by_blocks={
            Cut(64, 128, 2, 2, pingpong=True): 0.85,
            Cut(128, 256, 2): 1.03,
        },
        by_lines={
            Cut(64, 128, 2, 2, pingpong=True): 0.85,
            Cut(128, 128, 2): 1.04,
            Cut(128, 256, 2): 1.12,
            Cut(256, 128, cluster_n=2): 0.9,
        },
    ),
)
