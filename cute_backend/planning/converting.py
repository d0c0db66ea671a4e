"""Products that convert a stored weight themselves, and those that read it in 16 bits, as another kernel has
written it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cute_backend.spec import EpilogueSpec

MOST_CONVERTED_ROWS = 256
"""The most rows of a product whose kernel converts its weight. Each tile of rows converts all of it again,
while another kernel reads and writes it once, and the product reads 16 bits. An estimate puts the crossing at
128 to 256 rows or above; no timing has confirmed it."""


@lru_cache(maxsize=1024)
def widened(spec: EpilogueSpec) -> EpilogueSpec:
    """The spec of a product whose B has A's dtype in memory."""
    accumulators = (replace(acc, b_dtype=acc.a_dtype) for acc in spec.accumulators)
    return replace(spec, accumulators=tuple(accumulators))
