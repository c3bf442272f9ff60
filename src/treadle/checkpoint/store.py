"""The checkpoint store: whole files or none, verified when written and when read, never worse than before.

A file is written beside its target under a temporary name, flushed, verified, renamed and its folder synced, so a
crash at any point leaves the old file or the new one. ``torch.save`` makes a zip archive with a CRC-32 for each
record; torch does not check these, so every read here does.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from treadle.checkpoint.schema import check_format, non_finite_names
from treadle.errors import CheckpointError

_log = logging.getLogger("treadle.checkpoint")
_TEMPORARY = ".treadle-tmp"
_ASIDE = ".nonfinite"


def verify_checkpoint(path: str | os.PathLike[str]) -> list[str]:
    """Returns the problems found in a checkpoint file; an empty list means it is intact.

    Checks that the file exists, is a whole zip archive, and that every record's CRC-32 is right. Nothing in the
    file is executed.

    Example:
        >>> verify_checkpoint("no_such_file.pt")
        ['no such file']
    """
    file = Path(path)
    if not file.is_file():
        return ["no such file" if not file.exists() else "not a file"]
    try:
        with zipfile.ZipFile(file) as archive:
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                return ["not a torch checkpoint: the archive has no data.pkl"]
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        return [f"damaged or truncated archive: {error}"]
    except Exception as error:  # noqa: BLE001  (zlib.error and struct.error from a mangled header)
        return [f"damaged archive: {type(error).__name__}: {error}"]
    return [] if bad is None else [f"record {bad!r} fails its CRC-32 check"]


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint to the CPU after checking every byte of it.

    Args:
        path: the file.

    Returns:
        The tree that was saved.

    Raises:
        CheckpointError: the file is missing, damaged, holds pickled code, or is of a newer format.
    """
    problems = verify_checkpoint(path)
    if problems:
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be used: {'; '.join(problems)}")
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint {os.fspath(path)!r} is refused: it holds pickled objects other than tensors and plain values, "
            f"which could run code when loaded ({_first_line(error)})"
        ) from None
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be read: {_first_line(error)}") from error
    check_format(tree, f"checkpoint {os.fspath(path)!r}")
    return dict(tree)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def save_checkpoint(tree: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Writes a state tree to a file, atomically and verified.

    A model with a non-finite value never replaces a file: it goes to ``<stem>.nonfinite.pt`` with a warning.

    Args:
        tree: what :func:`treadle.checkpoint.schema.to_plain` returned.
        path: the target; its folder is created.

    Returns:
        The file that was written.

    Raises:
        CheckpointError: the disk is full, the folder is read-only, or what was written does not verify. The old
            file under the same name is intact then.
    """
    target = Path(path)
    bad = non_finite_names(tree)
    if bad:
        aside = target.with_name(f"{target.stem}{_ASIDE}{target.suffix}")
        _log.warning(
            "not writing %s: %d tensors are not finite (first: %s); the state goes to %s and no file is pruned",
            target.name, len(bad), bad[0], aside.name,
        )  # fmt: skip
        target = aside

    with _reported(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            with open(temporary, "wb") as file:
                torch.save(dict(tree), file)
                file.flush()
                os.fsync(file.fileno())
            problems = verify_checkpoint(temporary)
            if problems:
                raise CheckpointError(f"checkpoint {target} was not written: {'; '.join(problems)}; the disk may fail")
    return target


def link_checkpoint(source: Path, target: Path) -> Path:
    """Gives a written checkpoint a second name, atomically and without writing it again.

    Files are only ever replaced, never changed, so both names keep their content. A file system without hard links
    gets a copy.
    """
    with _reported(target), replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
    return target


@contextlib.contextmanager
def _reported(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{str(target)!r} was not written: {_first_line(error)}. What was there before is intact; "
            "free some space or choose another folder"
        ) from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Gives a temporary path beside ``target`` and renames it over ``target`` when the block succeeds.

    The block must leave a flushed and fsynced file. Temporary files that a killed process left are removed.
    """
    _remove_stale(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}{_TEMPORARY}")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames and unlinks in a folder durable, where the platform can."""
    if os.name == "nt":  # a directory cannot be opened for fsync there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(target: Path) -> None:
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*{_TEMPORARY}"):
        owner = leftover.name.removesuffix(_TEMPORARY).rsplit(".", 1)[-1]
        if owner.isdigit() and int(owner) != os.getpid() and _alive(int(owner)):
            continue
        with contextlib.suppress(OSError):
            leftover.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_bytes(write: Callable[[BinaryIO], Any], path: str | os.PathLike[str]) -> Path:
    """Writes a file atomically with what ``write`` puts into it."""
    target = Path(path)
    with _reported(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    return target


def write_text(text: str, path: str | os.PathLike[str]) -> Path:
    """Writes a small text file atomically."""
    return write_bytes(lambda file: file.write(text.encode("utf-8")), path)


def save_tensor(tensor: Tensor, path: str | os.PathLike[str]) -> Path:
    """Writes one tensor atomically, for ``torch.load``."""
    return write_bytes(lambda file: torch.save(tensor, file), path)


def find_latest(candidates: Iterable[Path], *, prefer: Path | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest intact checkpoint by write time and its tree, naming each damaged one it passes over.

    States that were put aside because they are not finite are passed over too.

    Args:
        candidates: files that may exist.
        prefer: the one to try first, whatever its write time.

    Returns:
        (path, tree), or None when no candidate exists.

    Raises:
        CheckpointError: files are present but none is intact.
    """
    present = [path for path in candidates if path.exists()]
    newest_first = sorted(present, key=_write_order, reverse=True)
    usable = [path for path in newest_first if not path.stem.endswith(_ASIDE)]
    for path in sorted(usable, key=lambda path: path.resolve() != prefer):
        try:
            return path, load_checkpoint(path)
        except CheckpointError as error:
            _log.warning("%s; looking for an older one", error)
    if present:
        raise CheckpointError(
            f"no intact checkpoint among {', '.join(str(path) for path in present)}; "
            "starting afresh must be asked for: remove the files, or resume from nothing"
        )
    return None


def _write_order(path: Path) -> tuple[int, int]:
    digits = re.findall(r"\d+", path.stem)
    return path.stat().st_mtime_ns, int(digits[-1]) if digits else -1


@dataclass(frozen=True)
class Retention:
    """Which numbered files stay.

    Attributes:
        keep_previous: the N newest stay, the newest included; None keeps all.
        keep_interval: numbers divisible by this stay for ever; None or 0: none.
    """

    keep_previous: int | None = None
    keep_interval: int | None = None

    def prune(self, folder: Path, pattern: str, protect: Iterable[Path] = ()) -> list[Path]:
        """Deletes what the rule does not keep, oldest number first.

        Args:
            folder: where the files lie; files that do not match are never touched.
            pattern: regular expression with one group, the number.
            protect: files that stay in any case.

        Returns:
            What was deleted. A file that cannot be deleted is logged, not raised.
        """
        if self.keep_previous is None:
            return []
        safe = {path.resolve() for path in protect}
        numbered = []
        for path in folder.iterdir():
            match = re.fullmatch(pattern, path.name)
            if match:
                numbered.append((int(match.group(1)), path))
        # The newest are those written last: after a rewind, steps of the abandoned future are older.
        newest = sorted(numbered, key=lambda item: _write_order(item[1]))[-self.keep_previous :]
        deleted = []
        for number, path in sorted(numbered):
            kept_for_ever = self.keep_interval and number % self.keep_interval == 0
            if (number, path) in newest or kept_for_ever or path.resolve() in safe:
                continue
            try:
                path.unlink()
                deleted.append(path)
            except OSError as error:
                _log.warning("old checkpoint %s cannot be deleted: %s", path, error)
        return deleted


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the scored weights of any treadle file: a checkpoint or a weights-only export.

    Args:
        path: the file.

    Returns:
        A plain state dict. Of a checkpoint whose averaged weights were validated, the averaged ones.

    Raises:
        CheckpointError: the file is missing, damaged, or holds no weights.
    """
    tree = load_checkpoint(path)
    model = tree.get("model")
    if not isinstance(model, Mapping):
        if all(isinstance(value, Tensor) for value in tree.values()):
            return tree
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} holds no weights: its keys are {sorted(tree)}")
    described = tree.get("format") or {}
    averages = tree.get("ema") or {}
    if described.get("scored") == "ema" and averages:
        shadow: Mapping[str, Tensor] = next(iter(averages.values()))["shadow"]
        return {name: value.to(model[name].dtype) for name, value in shadow.items()}
    return dict(model)
