"""Exchange of weights with other programs: import another framework's checkpoints, export treadle's."""

from __future__ import annotations

from treadle.exchange.export import Exported, export_weights
from treadle.exchange.foreign import ForeignCheckpoint
from treadle.exchange.loading import load_foreign
from treadle.exchange.reading import read_foreign

__all__ = ["Exported", "ForeignCheckpoint", "export_weights", "load_foreign", "read_foreign"]
