"""Bank conflicts: how often more a multiprocessor looks into shared memory than the bytes need.

Shared memory has 32 banks of 4 bytes, and in one go, a wavefront, it gives or takes a word of each (CUDA C++
Programming Guide, shared memory of compute capability 5.x). Lanes that want more than 128 bytes together are
served 128 bytes' worth of lanes at a time: 8 with 16 bytes each, as the rows of a matrix of ldmatrix. Of
these, those that want different words of one bank wait for each other.
"""

from __future__ import annotations

import numpy as np

WAVEFRONT_BYTES, WORD_BYTES = 128, 4


def wavefronts(lanes: np.ndarray, offsets: np.ndarray, nbytes: int) -> tuple[int, int]:
    """The wavefronts of one warp instruction whose `lanes` access `nbytes` each at `offsets`, multiples of
    it, and as many as there would be without a conflict."""
    unit = max(nbytes, WORD_BYTES)
    together = WAVEFRONT_BYTES // unit
    turns, places = lanes // together, offsets // unit
    wanted = np.unique(np.stack((turns, places)), axis=1)
    slots = np.bincount(wanted[0] * together + wanted[1] % together, minlength=32)
    deepest = np.pad(slots, (0, -len(slots) % together)).reshape(-1, together).max(axis=1)
    return int(deepest.sum()), int((deepest > 0).sum())
