"""Check of the PyTorch version, before importing anything that an older one lacks."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str

TORCH = (2, 7)
"""The oldest version; that of the package's metadata."""


def installed_torch() -> str:
    """Return the version of the installed PyTorch without importing it; "unknown" if no file states it.

    Raises:
        ImportError: PyTorch is not installed.

    Example:
        >>> installed_torch() == "unknown"
        False
    """
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(getattr(loaded, "__version__", "unknown"))
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ImportError("treadle needs torch, which is not installed; run: pip install torch", name="torch")
    origin = Path(found.origin)
    for path in (origin.with_name("version.py"), origin) if origin.stem == "__init__" else (origin,):
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, flags=re.MULTILINE)
        if version is not None:
            return version[1]
    return "unknown"


def refuse_old_torch(version: str) -> None:
    """Raise if a version of PyTorch is too old.

    Args:
        version: ``torch.__version__``.

    Raises:
        ImportError: it is too old.
        SystemExit: it is too old, and this process is the command ``treadle``, which has printed one line.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= TORCH:
        return
    needed = f"{TORCH[0]}.{TORCH[1]}"
    text = f"treadle needs torch >= {needed}, and this is torch {version}; run: pip install --upgrade 'torch>={needed}'"
    if _is_command(sys.argv[0], sys.orig_argv):
        sys.stderr.write(f"error: {text}\n")
        raise SystemExit(1)
    raise ImportError(text)


def _is_command(program: str, words: list[str]) -> bool:
    """Return whether a process was started as ``treadle`` or ``python -m treadle``.

    Example:
        >>> _is_command("/usr/bin/treadle", []), _is_command("-m", ["python", "-m", "treadle", "train"])
        (True, True)
        >>> _is_command("train.py", ["python", "train.py"])
        False
    """
    by_name = os.path.basename(program).removesuffix(".exe") == "treadle"
    return by_name or (program == "-m" and "treadle" in words[words.index("-m") :][:2])


def __getattr__(name: str) -> str:
    """Return the version of treadle as ``__version__``, which takes a search through the installed packages."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return own_version()


def own_version() -> str:
    """Return the version of treadle; "unknown" in a source tree that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("treadle")
    except metadata.PackageNotFoundError:
        return "unknown"
