"""Which numbered checkpoints stay."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from treadle.checkpoint.shard_manifest import is_whole, remove_folder

_log = logging.getLogger("treadle.checkpoint")


@dataclass(frozen=True)
class Retention:
    """Which numbered files stay.

    Attributes:
        keep_previous: the N with the largest numbers stay; None keeps all.
        keep_interval: numbers divisible by this stay for ever; None or 0: none.

    Example:
        >>> Retention(keep_previous=2, keep_interval=1000).keep_previous
        2
    """

    keep_previous: int | None = None
    keep_interval: int | None = None

    def prune(self, folder: Path, pattern: str, protect: Iterable[Path] = ()) -> list[Path]:
        """Deletes what the rule does not keep, oldest number first.

        Args:
            folder: where the checkpoints lie, files or folders of shards alike; what does not match, other folders
                and links are never touched.
            pattern: regular expression with one group, the number; the name of a folder ends in a slash.
            protect: files that stay in any case: the one just written, and the one resumed from.

        Returns:
            What was deleted. What cannot be deleted is logged, not raised.
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
        numbered = [(int(match.group(1)), folder / name) for name in names if (match := re.fullmatch(pattern, name))]
        deleted = []
        for number, path in sorted(numbered)[: -self.keep_previous]:
            kept_for_ever = self.keep_interval and number % self.keep_interval == 0
            if kept_for_ever or os.path.realpath(path) in safe:
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
