"""``treadle verify``: the command line and the printed report; :mod:`treadle.runs.verify` does the work."""

from __future__ import annotations
