"""The files that the spectra trainer writes at the end of an epoch, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from treadle.checkpoint.store import averaged_weights, save_checkpoint, scored_weights
from treadle.faces.folder import write_best_and_last

Selection = Literal["improved", "not improved", "last"]


def write_epoch(tree: Mapping[str, Any], out_dir: Path, selection: Selection) -> None:
    """Writes the exports and checkpoints of an epoch from a copy of its state, and nothing else.

    The exports go first and ``last.pt`` goes last: killed in between, the run repeats this epoch and writes all again.

    Args:
        tree: a checkpoint tree.
        out_dir: the run's folder.
        selection: whether this is the best epoch so far; ``"last"`` for a fixed budget, where no epoch is the best.
    """
    if selection == "improved":
        save_checkpoint(scored_weights(tree), out_dir / "best_model.pt")
    elif selection == "last":
        save_checkpoint(tree["model"], out_dir / "last_model.pt")
        if (averaged := averaged_weights(tree)) is not None:  # nothing was validated
            save_checkpoint(averaged, out_dir / "ema_last_model.pt")
    write_best_and_last(tree, out_dir / "checkpoints", is_best=selection == "improved")
