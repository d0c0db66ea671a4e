"""Out of space, a state of its own: neither a fault of what is being written nor of who writes it."""

from __future__ import annotations

import errno
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, the user's part of it, the largest file that the process may write."""


def out_of_space(error: BaseException | None) -> OSError | None:
    """The lack of space that is behind an error, if that is what is."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def check_room(folder: Path, size: int) -> None:
    """Raises OSError where a file of `size` bytes can't be written to a folder."""
    path = folder / "room"
    try:
        path.write_bytes(bytes(size))
    finally:
        path.unlink(missing_ok=True)
