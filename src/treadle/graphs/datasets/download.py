"""Downloaded data folders, complete or absent and never downloaded twice."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["on_disk"]


@contextlib.contextmanager
def on_disk(name: str, folder: Path, complete: Sequence[Sequence[str]]) -> Iterator[tuple[Path, bool]]:
    """Yield the folder to read a data set from, and whether it must first be downloaded into that folder.

    Files on disk are never downloaded again. A download goes into a temporary sibling folder, which replaces the target
    when the block succeeds and is removed when it fails. An incomplete folder is left untouched, since torch_geometric
    would empty it.

    Args:
        name: name of the data set for messages.
        folder: target folder.
        complete: sets of files below ``folder``; any one of them is sufficient to read the data.

    Raises:
        FileNotFoundError: the data are missing and could not be downloaded, or the folder is incomplete.
    """
    if any(all((folder / file).is_file() for file in files) for files in complete):
        yield folder, False
        return
    if folder.is_dir() and any(folder.iterdir()):
        missing = [file for file in complete[0] if not (folder / file).is_file()]
        raise FileNotFoundError(
            f"data set {name!r}: {folder} is incomplete, it lacks {', '.join(missing)}; put the missing files there, "
            "or remove the folder so that all is downloaded"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
        fresh = Path(staging) / folder.name
        fresh.mkdir()
        try:
            yield fresh, True
        except Exception as error:  # any failure of the network, an archive or its reader
            raise FileNotFoundError(
                f"data set {name!r} is not in {folder} and could not be downloaded "
                f"({type(error).__name__}: {error}). Put {', '.join(complete[0])} there by hand, or use molecules that "
                "need no download: 'nci' (they come with rdkit) or 'zinc_clean_leads' (pip install --no-deps molsets)"
            ) from error
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        os.replace(fresh, folder)
