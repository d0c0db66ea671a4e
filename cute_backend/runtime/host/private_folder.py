"""Folders that no other process uses."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from cute_backend.runtime.host.space import check_room
from cute_backend.runtime.host.trust import UntrustedError, check_folder

_MEMORY = "/dev/shm"
"""A folder in memory, used when no disk has space."""


def private_folder(room: int, without: Collection[Path] = ()) -> Path:
    """A new folder, of this process alone, on a disk that has `room` bytes left.

    It is in the temporary folder or, where that is full or not to be trusted, in memory; places in `without`
    are not used. Raises OSError if no place has room.
    """
    failures = []
    for place in (tempfile.gettempdir, lambda: _MEMORY):
        try:
            within = Path(place())
            if within in without:
                failures.append(f"{within} did not take a kernel")
                continue
            folder = Path(tempfile.mkdtemp(prefix="cute_backend_", dir=within))
        except OSError as error:
            failures.append(str(error))
            continue
        try:
            check_folder(folder)
            check_room(folder, room)
            return folder
        except (OSError, UntrustedError) as error:
            failures.append(f"{within} can't be used: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    raise OSError("; ".join(failures))
