"""The command line, such as ``treadle train spectra``. It may import every other package; nothing imports it."""

from __future__ import annotations
