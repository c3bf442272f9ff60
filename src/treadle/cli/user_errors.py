"""Short descriptions of errors in user code: the error and its locations in the user's files."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path

import typer

WHOLE = "TREADLE_TRACEBACK"
"""Environment variable that enables the whole traceback."""

_COMMAND_LINE = str(sys.modules[typer.Exit.__module__.partition(".")[0]].__file__)  # click, or typer itself
_TORCH = Path(str(getattr(importlib.util.find_spec("torch"), "origin", "torch"))).parent  # found, not loaded
_OWN = (
    Path(__file__).parents[1], _TORCH, Path(typer.__file__).parent, Path(_COMMAND_LINE).parent,
    Path(sysconfig.get_paths()["stdlib"]),
)  # fmt: skip
_PACKAGES = ("site-packages", "dist-packages")  # site-packages can be inside the standard library's folder


def described(error: BaseException) -> str | None:
    """Return the lines that describe an error raised in or below user code.

    Args:
        error: with its traceback.

    Returns:
        The error, treadle's notes on it, and its locations in user code, outermost first; one line for a full disk;
        None if there is no user code in the traceback or the whole traceback is requested.

    Example:
        >>> described(ValueError("not raised")) is None
        True
    """
    if os.environ.get(WHOLE):
        return None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = "" if error.filename is None else f" for {_short(str(error.filename))}"
        return f"{error.strerror}{place}; files already saved are intact: free some space and run the command again"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(Path(frame.filename))]
    if isinstance(error, SyntaxError) and error.filename and not _is_ours(Path(error.filename)):
        line = (error.text or "").strip()
        return f"{type(error).__name__}: {error.msg}\n  {_short(error.filename)}, line {error.lineno}: {line}"
    if not frames:
        return None
    text = str(error).strip()
    lines = [f"{type(error).__name__}: {text}" if text else type(error).__name__]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    lines += [f"  {_short(frame.filename)}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
    return "\n".join([*lines, f"  {WHOLE}=1 shows the whole traceback"])


def _is_ours(path: Path) -> bool:
    if str(path).startswith("<"):
        return True
    for folder in _OWN:
        if path.is_relative_to(folder):
            return not any(part in _PACKAGES for part in path.relative_to(folder).parts)
    return False


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
