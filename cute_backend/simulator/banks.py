"""Bank conflicts: the wavefronts of shared memory beyond those that the bytes need.

Shared memory has 32 banks of 4 bytes. A wavefront reads or writes one word of each bank (CUDA C++ Programming
Guide, shared memory of compute capability 5.x). If lanes access more than 128 bytes together, they are served
in groups of 128 bytes: 8 lanes with 16 bytes each, such as the rows of a matrix of ldmatrix. Lanes of a group
that access different words of one bank need a wavefront each.
"""

from __future__ import annotations

import numpy as np

WAVEFRONT_BYTES, WORD_BYTES = 128, 4


def wavefronts(lanes: np.ndarray, offsets: np.ndarray, nbytes: int) -> tuple[int, int]:
    """The wavefronts of one warp instruction whose `lanes` access `nbytes` each at `offsets`, multiples of
    `nbytes`, and the number of wavefronts without conflicts."""
    unit = max(nbytes, WORD_BYTES)
    together = WAVEFRONT_BYTES // unit
    turns, places = lanes // together, offsets // unit
    wanted = np.unique(np.stack((turns, places)), axis=1)
    slots = np.bincount(wanted[0] * together + wanted[1] % together, minlength=32)
    deepest = np.pad(slots, (0, -len(slots) % together)).reshape(-1, together).max(axis=1)
    return int(deepest.sum()), int((deepest > 0).sum())
