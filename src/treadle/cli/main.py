"""The entry point of the command ``treadle``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from treadle.cli.encodings import write_in_any_locale


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code.

    Args:
        argv: the arguments after the program name; None takes those of the process.

    Raises:
        SystemExit: always; 0 for success, 2 for an invalid setting, 1 for a run that failed, 128 + n for signal n.

    Example:
        >>> # main(["train", "spectra", "epochs=20", "--out", "runs/short"])
    """
    write_in_any_locale()
    try:
        from treadle.cli.app import app

        app(args=None if argv is None else list(argv), prog_name="treadle")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"treadle: the command line needs {error.name}: pip install 'treadle[cli]'\n")
        sys.exit(1)
    except KeyboardInterrupt:  # before the command has begun, as while its modules are loaded
        sys.exit(130)
