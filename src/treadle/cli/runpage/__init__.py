"""Implementation of ``treadle report`` and ``treadle runs``: reading run folders, curves, the HTML page."""

from __future__ import annotations
