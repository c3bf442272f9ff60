"""The zip archive that ``torch.save`` writes, read with distrust: one pass over every byte, nothing executed.

Refused before a record is read: compressed records and declared sizes beyond the file (zip bombs), names that leave
the archive, names given twice, anything before or after the archive, and records that torch does not write, such as
code or another archive.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 22
_END_SIZE = 22  # of the last entry of an archive without a comment
_RECORD = re.compile(r"data\.pkl|data/[0-9]+|byteorder|version|\.[a-z_]+|\.data/serialization_id")
_PROGRAM = re.compile(r"constants\.pkl|code/.*|data/.*\.py")


class ArchiveError(Exception):
    """What is wrong with a file, in one sentence; for this package's own use."""


@dataclass(frozen=True)
class Archive:
    """An archive whose every record has the right CRC-32.

    Attributes:
        storages: bytes of each tensor storage, by its key.
        pickle: the record that says how the storages make up a tree.
    """

    storages: dict[str, int]
    pickle: bytes


def read_archive(path: str | os.PathLike[str]) -> Archive:
    """Reads a checkpoint's records once, checks their CRC-32, and keeps the pickle.

    Raises:
        ArchiveError: the file is missing, damaged, or not what ``torch.save`` writes.

    Example:
        >>> read_archive("no_such_file.pt")
        Traceback (most recent call last):
        treadle.checkpoint.archive.ArchiveError: no such file
    """
    with open_plain_file(path) as file:
        try:
            _check_end(file)
            with zipfile.ZipFile(file) as archive:
                return _read(archive, os.fstat(file.fileno()).st_size)
        except ArchiveError:
            raise
        except Exception as error:  # zlib.error and struct.error too, from a mangled header
            detail = str(error) if isinstance(error, (zipfile.BadZipFile, OSError)) else f"{type(error).__name__}"
            raise ArchiveError(f"damaged or truncated archive: {detail[:200]}") from error


def open_plain_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading; a pipe or a device, which could block for ever, is refused.

    Raises:
        ArchiveError: there is no such file, it is no file, or it may not be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ArchiveError("not a file")
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError):
        dangling = os.path.islink(path)
        raise ArchiveError(f"no such file: a link to {os.readlink(path)!r}" if dangling else "no such file") from None
    except (OSError, ValueError) as error:  # a link to itself, no permission, a NUL in the name
        raise ArchiveError(getattr(error, "strerror", None) or str(error)) from None


def _check_end(file: BinaryIO) -> None:
    """Refuses what follows the archive: readers that search for its end could each find another one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_SIZE))
    end = file.read()
    if len(end) < _END_SIZE or not end.startswith(b"PK\x05\x06") or end[-2:] != b"\0\0":
        raise ArchiveError("damaged or truncated archive: its last bytes are not the end of one")


def _read(archive: zipfile.ZipFile, size: int) -> Archive:
    records = archive.infolist()
    root = _check_directory(records, size)
    storages: dict[str, int] = {}
    pickle = b""
    for record in records:
        name = record.filename.removeprefix(root)
        try:
            with archive.open(record) as content:
                if name == "data.pkl":
                    pickle = content.read()
                while content.read(_CHUNK):
                    pass
        except zipfile.BadZipFile as error:
            if "CRC" in str(error):
                raise ArchiveError(f"record {record.filename!r} fails its CRC-32 check") from None
            raise
        if name.startswith("data/"):
            storages[name.removeprefix("data/")] = record.file_size
    return Archive(storages, pickle)


def _check_directory(records: list[zipfile.ZipInfo], size: int) -> str:
    """Refuses what torch does not write, by the archive's table of contents alone; returns the records' folder."""
    seen: set[str] = set()
    for record in records:
        name = record.orig_filename
        if name in seen:
            raise ArchiveError(f"refused: record {_short(name)} is there twice")
        seen.add(name)
        parts = re.split(r"[/\\]", name)
        if ".." in parts or not parts[0] or "\0" in name or re.match(r"[A-Za-z]:", name):
            raise ArchiveError(f"refused: record {_short(name)} points outside the archive")
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ArchiveError(
                f"refused: record {_short(name)} is compressed ({record.compress_size:,} of {record.file_size:,} "
                "bytes), which torch.save never does"
            )
    if sum(record.file_size for record in records) > size:
        raise ArchiveError(f"refused: its records claim more bytes than the file's {size:,}")
    pickles = [name for name in seen if Path(name).name == "data.pkl" and name.count("/") == 1]
    if len(pickles) != 1:
        raise ArchiveError("not a torch checkpoint: the archive has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    for name in sorted(seen):
        inner = name.removeprefix(root)
        if name.startswith(root) and _PROGRAM.fullmatch(inner):
            raise ArchiveError(f"refused: a TorchScript program, its record {_short(name)} holds code")
        if not name.startswith(root) or not _RECORD.fullmatch(inner):
            raise ArchiveError(f"refused: record {_short(name)} is none that torch.save writes")
    if min(record.header_offset for record in records) != 0:
        raise ArchiveError("refused: there is something before the archive in the file")
    return root


def _short(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:77]}...")
