"""Marker of a complete folder of shards: ``WHOLE.json`` with the size and CRC-32 of every file.

One rank writes it, by rename, once every rank has written its part and read it back. A folder without it is
unfinished: some rank may never have written. Code that deletes a folder deletes the marker first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.checkpoint.files import sync_folder, write_text
from treadle.errors import CheckpointError

MARKER = "WHOLE.json"
STATE = "state.pt"
METADATA = ".metadata"
_BEGUN = "UNFINISHED"
_OLD, _NEW = ".old", ".new"
_NAME, _VERSION = "treadle sharded", 1
_CHUNK = 1 << 22
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_log = logging.getLogger("treadle.checkpoint")


@dataclass(frozen=True)
class Marker:
    """Content of a marker.

    Attributes:
        ranks: number of ranks that wrote the folder.
        files: name to ``{"size", "crc32"}``.
    """

    ranks: int
    files: Mapping[str, Mapping[str, Any]]

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(int(entry["size"]) for entry in self.files.values())

    @property
    def shards(self) -> int:
        """Number of files with tensors."""
        return sum(_SHARD.fullmatch(name) is not None for name in self.files)


def checksum(path: Path) -> dict[str, Any]:
    """Return the size and the CRC-32 of a file, read once."""
    with open(path, "rb") as file:
        return checksum_of(file)


def checksum_of(file: Any) -> dict[str, Any]:
    """Return the size and the CRC-32 of the rest of an open file."""
    size, crc = 0, 0
    while block := file.read(_CHUNK):
        size += len(block)
        crc = zlib.crc32(block, crc)
    return {"size": size, "crc32": f"{crc:08x}"}


def is_whole(folder: Path) -> bool:
    """Return whether a folder of shards was published; its files may be damaged since.

    Example:
        >>> is_whole(Path("no_such_folder"))
        False
    """
    return (folder / MARKER).is_file()


def has_shards(folder: Path) -> bool:
    """Return whether a folder is one checkpoint, complete or unfinished, rather than a folder of checkpoints."""
    return is_whole(folder) or (folder / _BEGUN).is_file()


def publish(folder: Path, files: Mapping[str, Mapping[str, Any]], *, ranks: int) -> None:
    """Write the marker, by rename, once everything else in the folder is durable.

    Raises:
        CheckpointError: it cannot be written; the folder is then unfinished.
    """
    sync_folder(folder)
    write_text(marker_text(files, ranks=ranks), folder / MARKER)
    (folder / _BEGUN).unlink(missing_ok=True)
    sync_folder(folder.parent)


def marker_text(files: Mapping[str, Mapping[str, Any]], *, ranks: int) -> str:
    """Return the content of a marker."""
    described = {"format": {"name": _NAME, "version": _VERSION}, "ranks": ranks, "files": dict(sorted(files.items()))}
    return json.dumps(described, indent=1) + "\n"


def read_marker(folder: Path) -> tuple[Marker | None, list[str]]:
    """Return the marker of a folder, or None and the problem."""
    try:
        return parse_marker((folder / MARKER).read_bytes())
    except FileNotFoundError:
        lacks = f"it is unfinished: it has no {MARKER}, so some rank may not have written its part"
        return None, [lacks if folder.is_dir() else "no such folder"]
    except OSError as error:
        return None, [f"{MARKER} cannot be read ({type(error).__name__})"]


def parse_marker(data: bytes) -> tuple[Marker | None, list[str]]:
    """Parse a marker from bytes; return it, or None and the problem."""
    try:
        found = json.loads(data)
        version, marker = int(found["format"]["version"]), Marker(int(found["ranks"]), dict(found["files"]))
        named = found["format"]["name"] == _NAME and {STATE, METADATA} <= marker.files.keys()
        plain = all(
            os.path.basename(name) == name and type(entry["size"]) is int and type(entry["crc32"]) is str
            for name, entry in marker.files.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, [f"{MARKER} cannot be read ({type(error).__name__})"]
    if version > _VERSION:
        return None, [f"its format {version} is newer than this treadle reads ({_VERSION}); update treadle"]
    return (marker, []) if named and plain else (None, [f"{MARKER} was not written by treadle"])


def folder_problems(folder: Path, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the problems of a folder of shards; an empty list means that every byte is intact.

    Args:
        folder: folder of one checkpoint.
        share: (index, count): check the size of all files, but the content of every count-th one only.
    """
    marker, problems = read_marker(folder)
    if marker is None:
        return problems
    for number, (name, entry) in enumerate(sorted(marker.files.items())):
        try:
            size = os.stat(folder / name).st_size
            if size != entry["size"]:
                problems.append(f"{_named(name)} has {size:,} bytes instead of {entry['size']:,}")
            elif number % share[1] == share[0] and checksum(folder / name) != dict(entry):
                problems.append(f"{_named(name)} fails its CRC-32 check")
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            problems.append(f"{_named(name)} {'is missing' if missing else f'cannot be read: {error.strerror}'}")
    return problems


def _named(name: str) -> str:
    shard = _SHARD.fullmatch(name)
    return f"{name} of rank {shard[1]}" if shard is not None else name


# -- creation and deletion of folders -------------------------------------------------------------------------------


def is_unfinished(folder: Path) -> bool:
    """Return whether this library was interrupted while writing or deleting a folder.

    Example:
        >>> is_unfinished(Path("no_such_folder"))
        False
    """
    if is_whole(folder) or not folder.is_dir():
        return False
    return (folder / _BEGUN).exists() or not any(folder.iterdir())


def remove_folder(folder: Path) -> None:
    """Delete a folder of shards, the marker first, so that a partial one is never taken for a checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / MARKER, folder / _BEGUN)
        sync_folder(folder)
    for path in folder.iterdir():
        if path.name != _BEGUN:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else os.unlink(path)
    sync_folder(folder)  # after a power loss nothing may remain without the name that identifies it
    (folder / _BEGUN).unlink(missing_ok=True)
    os.rmdir(folder)


def begin(folder: Path) -> Path:
    """Create an empty folder marked as unfinished and return it; a hidden one if a complete one has the name.

    Raises:
        CheckpointError: a folder or file of that name exists that this library did not write.
    """
    finish_replacement(folder)
    place = _hidden(folder, _NEW) if is_whole(folder) else folder
    if os.path.lexists(place):
        raise CheckpointError(f"{str(place)!r} is not a checkpoint and has the name of the next one; move it away")
    os.mkdir(place)
    (place / _BEGUN).touch()
    sync_folder(place)
    sync_folder(place.parent)
    return place


def replace_published(folder: Path) -> None:
    """Replace the previous folder by the hidden one, once published."""
    os.rename(folder, _hidden(folder, _OLD))
    os.rename(_hidden(folder, _NEW), folder)
    sync_folder(folder.parent)


def finish_replacement(folder: Path) -> None:
    """Remove unfinished folders; of a folder that was rewritten, keep a complete one."""
    if is_unfinished(folder):
        remove_folder(folder)
    for other in (_hidden(folder, _NEW), _hidden(folder, _OLD)):
        if is_whole(other) and not os.path.lexists(folder):
            os.rename(other, folder)
            sync_folder(folder.parent)
        elif os.path.lexists(other):
            remove_folder(other)


def unfinished(parent: Path, pattern: str) -> list[Path]:
    """Return the final names of folders that a killed run left unfinished.

    Args:
        parent: the folder of the checkpoints.
        pattern: regular expression of their names.
    """
    try:
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    hidden = (re.fullmatch(rf"\.({pattern})({re.escape(_OLD)}|{re.escape(_NEW)})", name) for name in names)
    left = {found[1] for found in hidden if found is not None}
    left |= {name for name in names if re.fullmatch(pattern, name) and is_unfinished(parent / name)}
    return sorted(parent / name for name in left)


def remove_unfinished(folder: Path) -> None:
    """Clean up like :func:`finish_replacement`, and log removed folders."""
    if is_unfinished(folder):
        _log.warning("removing %s: it is unfinished, since some rank never wrote its part", folder)
    finish_replacement(folder)


def _hidden(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")
