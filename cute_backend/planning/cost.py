"""How long a problem should take with a tile: a model, with constants that were fitted to timings.

The constants of each target stand in its file, with what they were measured on.
"""

from __future__ import annotations

from .tiles import TileConfig


def cost(config: TileConfig, m: int, n: int, k_bytes: int, sm_count: int) -> float:
    """How long a problem should take on `sm_count` multiprocessors, in microseconds, by waves of clusters.

    Tiles of 64 rows whose A is not multicast leave out those beyond the last row; of others, the last row of
    tiles is seldom full, the CTAs of a cluster wait for the slowest, and multicast zeros are written by each.
    """
    timing = config.target.timing
    rows, columns = config.cta_rows * config.cluster_m, config.tile_n * config.cluster_n
    cluster_rows = -(-m // rows)
    clusters = cluster_rows * -(-n // columns)
    in_flight = int(sm_count * timing.reached.get(config.cluster_size, 1.0)) // config.cluster_size
    waves = -(-clusters // max(in_flight, 1))
    k_bytes = -(-k_bytes // config.split_k)
    area = config.cta_rows * config.mma_n
    largest = max(timing.tile_us)
    own, for_k = timing.tile_us.get(area) or (us * area / largest for us in timing.tile_us[largest])
    whole = config.cta_rows > 64 or config.cluster_n > 1
    beyond = min(cluster_rows * rows - m, config.cta_rows) * config.cluster_n / cluster_rows if whole else 0
    unsuited = config.pingpong and (config.subtile_n == 64) != (k_bytes <= timing.short_k)
    own += timing.split_us.get(config.split_k, 0.0)
    read = config.cta_rows / config.cluster_n + config.mma_n / config.cluster_m
    for_k = max(for_k, read * timing.read_us)
    return waves * (own + (for_k + beyond * timing.beyond_us) * k_bytes / 1024) * (1.01 if unsuited else 1.0)
