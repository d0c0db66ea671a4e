"""The zip archives of packs: their members are stored, and their sizes are known before any is read.

Zip allows far more than packs need: compression, so that 3 MB unpack to 3 GiB, encryption, links, members in
several files or of other versions of the format. All of this is refused before the zip library reads the
file. So no member is longer than the file.
"""

from __future__ import annotations

import os
import struct
import zipfile
from typing import BinaryIO

_MAX_FILE = 4 << 30
"""The most bytes of an archive; zip has another format for larger ones."""

_MAX_MEMBER = 256 << 20
"""The most bytes of a member. The code of a kernel has some 100,000 bytes, a manifest some 1,000 for each
kernel."""

_MAX_LISTING = 512
"""The most bytes of a member in the list of members: 46, and a name of at most 255."""

_END = struct.Struct("<4s4H2LH")
"""The record that ends an archive: its signature, the numbers of this volume and of the first, the counts of
members here and in all, the size and the place of the listing, and the length of a comment."""

_SIGNATURE, _LARGE = b"PK\5\6", b"PK\6\7"
"""The signature of that record, and that of the record before it in the format for more than 4 GiB."""

_LARGE_SIZE = 20

_FLAG_UTF8 = 0x800


class ArchiveError(Exception):
    """A file is not an archive of this kind; the message says why."""


class Archive:
    """An archive in an open file. Raises ArchiveError for any other file."""

    def __init__(self, file: BinaryIO) -> None:
        self._size = os.fstat(file.fileno()).st_size
        _check_end(file, self._size)
        try:
            self._zip = zipfile.ZipFile(file)
        except _FAILURES as error:
            raise ArchiveError(str(error)) from error
        for member in self._zip.infolist():
            self._check(member)

    def _check(self, member: zipfile.ZipInfo) -> None:
        found = {
            "is encrypted or has other flags": member.flag_bits & ~_FLAG_UTF8,
            "is compressed": member.compress_type != zipfile.ZIP_STORED,
            "is not as long as it says": member.file_size != member.compress_size,
            "is longer than a pack's members are": member.file_size > _MAX_MEMBER,
            "lies beyond the end of the file": member.header_offset + member.file_size > self._size,
        }
        for what, is_so in found.items():
            if is_so:
                raise ArchiveError(f"its member {member.filename!r:.80} {what}")

    def read(self, name: str) -> bytes:
        """The content of a member. Raises ArchiveError if it is missing or contradicts its checksum."""
        try:
            return self._zip.read(name)
        except KeyError as error:
            raise ArchiveError(f"there is no member {name!r} in it") from error
        except _FAILURES as error:
            raise ArchiveError(str(error) or f"its member {name!r} ends early") from error


_FAILURES = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    ValueError,
    OverflowError,
)
"""The exceptions that the library raises for a damaged file, by its documentation and by trial."""


def _check_end(file: BinaryIO, size: int) -> None:
    """Raises ArchiveError unless an archive ends without a comment, which bounds the size of its list of
    members."""
    if size > _MAX_FILE:
        raise ArchiveError(f"it has {size} bytes, more than {_MAX_FILE}")
    file.seek(max(0, size - _END.size - _LARGE_SIZE))
    tail = file.read(_END.size + _LARGE_SIZE)
    file.seek(0)
    if len(tail) < _END.size or tail[-_END.size :][:4] != _SIGNATURE:
        raise ArchiveError("it does not end as a zip archive does")
    _, _, _, _, members, listing, _, comment = _END.unpack(tail[-_END.size :])
    if comment or tail.startswith(_LARGE) or listing > _MAX_LISTING * members:
        raise ArchiveError("its list of members is not that of a pack")
