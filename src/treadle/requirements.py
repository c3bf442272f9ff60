"""What treadle needs of PyTorch, looked at before anything is imported that an older one lacks."""

from __future__ import annotations

import os
import re
import sys

TORCH = (2, 7)
"""The oldest version; that of the package's metadata."""


def refuse_old_torch(version: str) -> None:
    """Raises if a version of PyTorch is too old.

    Args:
        version: as ``torch.__version__`` says it.

    Raises:
        ImportError: it is.
        SystemExit: it is, and this process is the command ``treadle``, which has said so in one line.

    Example:
        >>> refuse_old_torch("2.13.0+cu128")
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
    """Returns whether a process was started as ``treadle`` or ``python -m treadle``.

    Example:
        >>> _is_command("/usr/bin/treadle", []), _is_command("-m", ["python", "-m", "treadle", "train"])
        (True, True)
        >>> _is_command("train.py", ["python", "train.py"])
        False
    """
    by_name = os.path.basename(program).removesuffix(".exe") == "treadle"
    return by_name or (program == "-m" and "treadle" in words[words.index("-m") :][:2])
