"""The table of strangers: one row for each real object."""

from __future__ import annotations

from strangers.begun import BEGUN
from strangers.bench import Row
from strangers.data import DATA_ROWS
from strangers.fresh import FRESH
from strangers.kept import KEPT
from strangers.models import MODELS
from strangers.nested import NESTED
from strangers.objects import OBJECTS
from strangers.optimizers import OPTIMIZERS
from strangers.peers import PEERS
from strangers.ported import PORTED
from strangers.reported import REPORTED
from strangers.schedulers import SCHEDULERS
from strangers.unseen import UNSEEN

TABLE: list[Row] = [
    *OPTIMIZERS, *SCHEDULERS, *MODELS, *OBJECTS, *DATA_ROWS, *NESTED, *PEERS, *UNSEEN, *FRESH, *KEPT, *BEGUN, *REPORTED,
    *PORTED,
]  # fmt: skip
