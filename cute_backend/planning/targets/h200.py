"""The model of time of an H200, as `benchmarks/fit.py` writes it. It is fitted to
benchmarks/results/nvidia-h200-2026-11-23-drawn-tiles.csv,
benchmarks/results/nvidia-h200-2026-11-23-listed-tiles.csv,
242 problems of fp8 and of 16-bit operands that were drawn. Don't edit it by hand.
"""

from __future__ import annotations

from .target import Cut, TileTime, Timing

H200 = Timing(
    tiles={
        Cut(64, 64): TileTime(2.455, 0.539, 0.915, 0.537, 0.434),
        Cut(64, 64, split_k=2): TileTime(0.710, 4.002, 0.792, 0.808, 0.300),
        Cut(64, 64, split_k=4): TileTime(1.345, 4.554, 0.758, 0.900, 0.178),
        Cut(64, 64, pingpong=True): TileTime(2.628, 0.213, 0.903, 0.544, 0.460),
        Cut(64, 64, cluster_n=2): TileTime(2.896, 0.421, 0.422, 0.956, 0.316),
        Cut(64, 64, cluster_n=2, pingpong=True): TileTime(3.059, 0.074, 0.368, 0.954, 0.403),
        Cut(64, 64, cluster_m=2): TileTime(2.409, 0.694, 0.994, 0.320, 0.077),
        Cut(64, 64, cluster_m=2, pingpong=True): TileTime(2.644, 0.294, 0.981, 0.361, 0.106),
        Cut(64, 128, pingpong=True): TileTime(3.273, 0.275, 1.373, 0.771, 0.860),
        Cut(64, 128, cluster_n=2, pingpong=True): TileTime(3.484, 0.193, 0.986, 1.135, 0.687),
        Cut(64, 128, cluster_m=2): TileTime(2.563, 1.191, 1.142, 0.653, 0.324),
        Cut(64, 128, cluster_m=2, pingpong=True): TileTime(3.233, 0.403, 1.428, 0.483, 0.285),
        Cut(64, 192, pingpong=True): TileTime(3.965, 0.476, 1.809, 1.141, 1.058),
        Cut(64, 192, cluster_n=2, pingpong=True): TileTime(4.038, 0.435, 1.368, 1.681, 0.825),
        Cut(64, 192, cluster_m=2, pingpong=True): TileTime(3.770, 0.673, 1.929, 0.546, 0.361),
        Cut(64, 192, cluster_m=3, pingpong=True): TileTime(3.881, 0.608, 1.809, 0.510, 0.149),
        Cut(64, 256, pingpong=True): TileTime(4.468, 0.605, 2.475, 1.221, 1.411),
        Cut(64, 256, cluster_n=2, pingpong=True): TileTime(4.482, 0.553, 2.086, 1.656, 1.267),
        Cut(64, 256, cluster_m=2, pingpong=True): TileTime(4.362, 0.897, 2.659, 0.474, 0.459),
        Cut(128, 64): TileTime(2.910, 0.472, 1.099, 1.398, 0.694),
        Cut(128, 64, split_k=2): TileTime(1.350, 4.351, 1.086, 1.627, 0.421),
        Cut(128, 64, split_k=4): TileTime(1.797, 5.931, 0.697, 2.011, 0.304),
        Cut(128, 64, cluster_n=2): TileTime(3.033, 0.563, 1.131, 0.896, 0.261),
        Cut(128, 64, cluster_m=2): TileTime(2.874, 0.627, 0.792, 1.565, 0.467),
        Cut(128, 128): TileTime(3.367, 1.416, 1.741, 1.584, 0.840),
        Cut(128, 128, pingpong=True): TileTime(4.176, 0.839, 1.813, 1.383, 0.906),
        Cut(128, 128, pingpong=True, subtile_n=64): TileTime(4.160, 0.714, 1.821, 1.386, 0.877),
        Cut(128, 128, cluster_n=2): TileTime(3.269, 1.488, 1.467, 1.646, 0.467),
        Cut(128, 128, cluster_n=2, pingpong=True): TileTime(4.124, 0.908, 1.592, 1.352, 0.548),
        Cut(128, 128, cluster_n=2, pingpong=True, subtile_n=64): TileTime(4.160, 0.740, 1.589, 1.389, 0.522),
        Cut(128, 128, cluster_m=2): TileTime(3.090, 1.535, 1.634, 1.515, 0.429),
        Cut(128, 128, cluster_m=2, pingpong=True): TileTime(4.096, 0.907, 1.678, 1.323, 0.535),
        Cut(128, 128, cluster_m=2, pingpong=True, subtile_n=64): TileTime(4.098, 0.753, 1.680, 1.362, 0.504),
        Cut(128, 192): TileTime(2.994, 2.139, 2.906, 1.685, 0.867),
        Cut(128, 192, cluster_n=2): TileTime(2.941, 2.186, 2.512, 1.912, 0.526),
        Cut(128, 192, cluster_m=2): TileTime(2.771, 2.157, 2.817, 1.615, 0.332),
        Cut(128, 256): TileTime(3.093, 3.190, 3.753, 2.271, 1.013),
        Cut(128, 256, cluster_n=2): TileTime(2.691, 3.408, 3.428, 2.436, 0.663),
        Cut(128, 256, cluster_m=2): TileTime(2.005, 3.526, 3.696, 2.055, 0.511),
        Cut(256, 128): TileTime(2.237, 4.236, 3.727, 2.394, 0.848),
        Cut(256, 128, cluster_n=2): TileTime(1.914, 4.373, 2.971, 2.820, 0.313),
        Cut(256, 128, cluster_m=2): TileTime(1.948, 4.392, 3.226, 2.729, 0.491),
    },
    # It has room for 132, 66, 39 and 30 clusters of 1, 2, 3 and 4 CTAs.
    reached={3: 117 / 132, 4: 120 / 132},
    beyond_us=0.00651,
    bytes_per_us=3.957e06,
)
