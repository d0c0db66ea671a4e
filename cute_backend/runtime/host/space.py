"""Errors that mean that a disk has no space left, and not that the data or the permissions are at fault."""

from __future__ import annotations

import errno
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors of a full disk, of a user's quota, and of the limit on the size of files."""


def out_of_space(error: BaseException | None) -> OSError | None:
    """The error of lacking space that caused this error, or None if it has another cause."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def check_room(folder: Path, size: int) -> None:
    """Raises OSError if a file of `size` bytes can't be written to a folder."""
    path = folder / "room"
    try:
        path.write_bytes(bytes(size))
    finally:
        path.unlink(missing_ok=True)
