"""Where the data comes from, and where in it a run stands."""

from __future__ import annotations

from treadle.data.cursor import Cursor, Group, steps_per_epoch
from treadle.data.sources import Source, open_source
from treadle.data.tensors import TensorLoader

__all__ = ["Cursor", "Group", "Source", "TensorLoader", "open_source", "steps_per_epoch"]
