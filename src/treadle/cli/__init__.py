"""The command line: ``treadle train spectra`` and what it is made of. It imports everything; nothing imports it."""

from __future__ import annotations
