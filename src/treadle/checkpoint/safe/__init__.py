"""Files read with distrust: archives, pickles and headers are checked byte by byte, and nothing in them is executed."""

from __future__ import annotations
