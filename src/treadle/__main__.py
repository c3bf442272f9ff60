"""Entry point of ``python -m treadle``, the same as the command ``treadle``."""

from __future__ import annotations

from treadle.cli.main import main

if __name__ == "__main__":
    main()
