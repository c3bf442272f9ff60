"""Retention of numbered checkpoints, and order of files by write time."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from treadle.checkpoint.shard_manifest import MARKER, is_whole, remove_folder
from treadle.errors.arguments import check_least, checked

_log = logging.getLogger("treadle.checkpoint")


def write_order(path: Path) -> tuple[int, int]:
    """Return a key that sorts checkpoints by write time, then by number; a vanished file sorts first.

    The write time of a folder of shards is that of its marker.
    """
    digits = re.findall(r"\d+", path.stem)
    try:
        written = os.stat(path / MARKER if path.is_dir() else path).st_mtime_ns
    except OSError:
        written = -1
    return written, int(digits[-1]) if digits else -1


def date_last(path: Path, folder: Path) -> None:
    """Date a newly written file after every checkpoint of a folder, if the clock was set back since.

    Pages and listings sort files by write time; a resuming run goes by their content.

    Args:
        path: the file, or the marker of a folder of shards.
        folder: folder of the checkpoints.
    """
    with contextlib.suppress(OSError):  # no times on this file system, or a file of another user
        others = [other for other in folder.iterdir() if other.suffix == ".pt" or is_whole(other)]
        newest = max((write_order(other)[0] for other in others if other not in (path, path.parent)), default=-1)
        if os.stat(path).st_mtime_ns <= newest:
            os.utime(path, ns=(newest + 1, newest + 1))


@checked
@dataclass(frozen=True)
class Retention:
    """Rule of which numbered files to keep.

    Attributes:
        keep_previous: keep the N largest numbers; None keeps all.
        keep_interval: keep numbers divisible by this forever; None or 0: none.
        keep_steps: numbers to keep forever.

    Example:
        >>> Retention(keep_previous=2, keep_interval=1000).keep_previous
        2
    """

    keep_previous: int | None = None
    keep_interval: int | None = None
    keep_steps: Collection[int] = ()

    def __post_init__(self) -> None:
        check_least(0, keep_previous=self.keep_previous, keep_interval=self.keep_interval)

    def keeps(self, number: int) -> bool:
        """Return whether a number is kept forever, and therefore also saved."""
        return number in self.keep_steps or bool(self.keep_interval and number % self.keep_interval == 0)

    def prune(
        self, folder: Path, pattern: str, protect: Iterable[Path] = (), *, newest: int | None = None
    ) -> list[Path]:
        """Delete files that the rule does not keep, oldest number first.

        Args:
            folder: folder of the checkpoints, files or folders of shards; anything that does not match, other folders
                and links are never touched.
            pattern: regular expression with one group, the number; the name of a folder ends in a slash.
            protect: files to keep in any case: the one just written, and the one resumed from.
            newest: number of the checkpoint just written. Further ones are kept and not counted: they are damaged,
                since readable states of an earlier run are renamed. None: the largest.

        Returns:
            The deleted paths. Failures to delete are logged, not raised.
        """
        if self.keep_previous is None:
            return []
        safe = {os.path.realpath(path) for path in protect}
        try:
            with os.scandir(folder) as entries:
                names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries if _is_there(entry)]
        except OSError as error:
            _log.warning("old checkpoints in %s cannot be listed and stay: %s", folder, error)
            return []
        found = [(int(match.group(1)), folder / name) for name in names if (match := re.fullmatch(pattern, name))]
        numbered = [(number, path) for number, path in found if newest is None or number <= newest]
        deleted = []
        for number, path in sorted(numbered)[: -self.keep_previous]:
            if self.keeps(number) or os.path.realpath(path) in safe:
                continue
            try:
                remove_folder(path) if path.is_dir() else os.unlink(path)
                deleted.append(path)
            except Exception as error:  # noqa: BLE001  (one file too many must not end a run)
                _log.warning("old checkpoint %s cannot be deleted: %s", path, error)
        return deleted


def _is_there(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return is_whole(Path(entry.path))
    return entry.is_file(follow_symlinks=False)
