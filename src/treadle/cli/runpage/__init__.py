"""What ``treadle report`` and ``treadle runs`` are made of: reading a run folder, its curves, its page."""

from __future__ import annotations
