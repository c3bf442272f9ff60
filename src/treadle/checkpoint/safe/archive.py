"""Safe reader of the zip archives of ``torch.save``: one pass over every record, nothing executed.

Refused before a record is read: compressed records and declared sizes beyond the file (zip bombs), names that leave the
archive, duplicate names, data before or after the archive, and records that torch does not write, such as code or
another archive.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import BinaryIO

_CHUNK = 1 << 22
_END = struct.Struct("<4s4H2LH")
_LONG_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_RECORD_HEADER = struct.Struct("<4s5H3L2H")
_UTF8 = 0x800
_FLAGS = _UTF8 | 0x8  # UTF-8 name, sizes after the data; no encryption
_FOLDER = 0x10  # torch reads such a record as empty, whatever its CRC-32
_RECORD = re.compile(r"data\.pkl|data/[0-9]+|byteorder|version|\.[a-z_]+|\.data/serialization_id")
_PROGRAM = re.compile(r"constants\.pkl|code/.*|data/.*\.py")


class ArchiveError(Exception):
    """Error of a file in one sentence, internal to this package."""


@dataclass(frozen=True)
class Archive:
    """Archive in which every record has the correct CRC-32.

    Attributes:
        storages: bytes of each tensor storage, by its key.
        pickle: record that builds the tree from the storages.
    """

    storages: dict[str, int]
    pickle: bytes


def read_archive(path: str | os.PathLike[str]) -> Archive:
    """Read a checkpoint's records once, check their CRC-32, and keep the pickle.

    Raises:
        ArchiveError: the file is missing, damaged, or not written by ``torch.save``.

    Example:
        >>> read_archive("no_such_file.pt")
        Traceback (most recent call last):
        treadle.checkpoint.safe.archive.ArchiveError: no such file
    """
    return _opened(path, None)


def _opened(path: str | os.PathLike[str], names: list[str] | None) -> Archive:
    with open_plain_file(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                _check_end(file, archive, archive.infolist())
                return _read(file, archive.infolist(), names)
        except ArchiveError:
            raise
        except Exception as error:  # zlib.error and struct.error too, from a mangled header
            detail = str(error) if isinstance(error, (zipfile.BadZipFile, OSError)) else f"{type(error).__name__}"
            raise ArchiveError(f"damaged or truncated archive: {detail[:200]}") from error


def read_pickle(path: str | os.PathLike[str]) -> Archive:
    """Read an archive like :func:`read_archive`, but only its pickle: fast for files of any size.

    Raises:
        ArchiveError: the file is missing, or not written by ``torch.save``.

    Example:
        >>> read_pickle("no_such_file.pt")
        Traceback (most recent call last):
        treadle.checkpoint.safe.archive.ArchiveError: no such file
    """
    return _opened(path, ["data.pkl"])


def open_plain_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; a pipe or device, which could block forever, is refused.

    Raises:
        ArchiveError: there is no such file, it is not a regular file, or it is not readable.
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


def check_last_record(content: bytes) -> None:
    """Refuse an archive in memory that is not complete, by its last record, which gives its size.

    Raises:
        ArchiveError: it is truncated, or continues after its end.

    Example:
        >>> check_last_record(b"PK")
        Traceback (most recent call last):
        treadle.checkpoint.safe.archive.ArchiveError: the archive is cut off
    """
    at = len(content) - _END.size - _LOCATOR.size - _LONG_END.size  # of the long form, which torch writes always
    found = _LONG_END.unpack_from(content, at) if at >= 0 else (b"",)
    if found[0] != b"PK\6\6" or found[-1] + found[-2] != at:
        raise ArchiveError("the archive is cut off")


def _check_end(file: BinaryIO, archive: zipfile.ZipFile, records: list[zipfile.ZipInfo]) -> None:
    """Refuse a file that does not end exactly with this archive; other readers could find a different one."""
    start, count = archive.start_dir, len(records)
    file.seek(start)
    table = file.read()
    directory = 0
    for _ in records:  # zipfile itself truncates lengths beyond the end
        directory += 46 + sum(struct.unpack_from("<3H", table, directory + 28))
    end = table[directory:]
    right = True
    if len(end) != _END.size:  # the long form, which torch always writes
        long, locator = _LONG_END.unpack_from(end), _LOCATOR.unpack_from(end, _LONG_END.size)
        right = long[:2] == (b"PK\6\6", 44) and long[4:] == (0, 0, count, count, directory, start)
        right = right and locator == (b"PK\6\7", 0, start + directory, 1)
        end = end[_LONG_END.size + _LOCATOR.size :]
    found = _END.unpack(end)
    expected = (b"PK\5\6", 0, 0, count, count, directory, start, 0)
    absent = (None, None, None, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, None)
    if not right or any(x not in (y, z) for x, y, z in zip(found, expected, absent, strict=True)):
        raise ArchiveError("damaged archive: its end does not match its table of contents")


def _read(file: BinaryIO, records: list[zipfile.ZipInfo], names: list[str] | None) -> Archive:
    """Read the named records below the root; None reads all."""
    root = _check_directory(records, os.fstat(file.fileno()).st_size)
    storages: dict[str, int] = {}
    pickle = b""
    for record in records:
        name = record.filename.removeprefix(root)
        if name.startswith("data/"):
            storages[name.removeprefix("data/")] = record.file_size
        if names is None or name in names:
            content = _read_record(file, record, keep=name == "data.pkl")
            pickle = content or pickle
    return Archive(storages, pickle)


def _read_record(file: BinaryIO, record: zipfile.ZipInfo, *, keep: bool) -> bytes:
    """Read an uncompressed record and check its CRC-32; return its content if it is kept.

    Takes a third of the time of ``zipfile.ZipFile.open``, which matters for hundreds of small records.
    """
    file.seek(record.header_offset)
    signature, *_, length_of_name, length_of_extra = _RECORD_HEADER.unpack(file.read(_RECORD_HEADER.size))
    name = file.read(length_of_name)
    if signature != b"PK\3\4" or name.decode("utf-8" if record.flag_bits & _UTF8 else "cp437") != record.orig_filename:
        raise ArchiveError(f"damaged archive: record {_short(record.filename)} is not where its table of contents says")
    file.seek(length_of_extra, os.SEEK_CUR)
    left, found, kept = record.file_size, 0, []
    while left:
        content = file.read(min(left, _CHUNK))
        if not content:
            raise ArchiveError("damaged or truncated archive: EOFError")
        left -= len(content)
        found = zlib.crc32(content, found)
        kept += [content] if keep else []
    if found != record.CRC:
        raise ArchiveError(f"record {record.filename!r} fails its CRC-32 check")
    return b"".join(kept)


def _check_directory(records: list[zipfile.ZipInfo], size: int) -> str:
    """Refuse anything that torch does not write, based on the central directory; return the records' folder."""
    seen: set[str] = set()
    for record in records:
        name = record.orig_filename
        if name in seen:
            raise ArchiveError(f"refused: record {_short(name)} occurs twice")
        seen.add(name)
        parts = re.split(r"[/\\]", name)
        if ".." in parts or not parts[0] or "\0" in name or re.match(r"[A-Za-z]:", name):
            raise ArchiveError(f"refused: record {_short(name)} points outside the archive")
        if record.flag_bits & ~_FLAGS or record.volume or record.comment or record.external_attr & _FOLDER:
            raise ArchiveError(
                f"damaged or refused: record {_short(name)} is marked as encrypted, a folder, or on another disk"
            )
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ArchiveError(
                f"refused: record {_short(name)} is compressed ({record.compress_size:,} of {record.file_size:,} "
                "bytes), which torch.save never does"
            )
    if sum(record.file_size for record in records) > size:
        raise ArchiveError(f"refused: its records claim more bytes than the file's {size:,}")
    pickles = [name for name in seen if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ArchiveError("not a torch checkpoint: the archive has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    for name in sorted(seen):
        inner = name.removeprefix(root)
        if name.startswith(root) and _PROGRAM.fullmatch(inner):
            raise ArchiveError(f"refused: a TorchScript program, its record {_short(name)} holds code")
        if not name.startswith(root) or not _RECORD.fullmatch(inner):
            raise ArchiveError(f"refused: record {_short(name)} is not one that torch.save writes")
    if min(record.header_offset for record in records) != 0:
        raise ArchiveError("refused: the file has data before the archive")
    return root


def _short(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:77]}...")
