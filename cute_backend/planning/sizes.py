"""The sizes of a product, by which its tile is chosen."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Known sizes. An M that varies from launch to launch is its bucket here (`untuned.bucket_of`)."""

    m: int
    n: int
    k: int
    groups: int | None = None
    """The number of groups, of rows or of K; None for a product without them."""
