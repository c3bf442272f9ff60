"""The folder of a run of ``treadle train text``: whose run it is, and what a rerun finds in it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.checkpoint.lock import check_free
from treadle.checkpoint.store import write_text
from treadle.errors import ConfigError
from treadle.runs.folder import explain_changes, readable, set_aside, stored_json, writable
from treadle.runs.settings import changes
from treadle.text.run_config import FREE, TextConfig, needs_new_lora
from treadle.text.run_data import TextData, check_same_text

_log = logging.getLogger("treadle.cli")
BEST = "best_model.pt"


def is_text_run(run: Path) -> bool:
    """Says whether a folder is one of ``treadle train text``, or the ``lora`` folder inside one.

    Example:
        >>> is_text_run(Path("no_such_run"))
        False
    """
    stored = stored_json(home_of(run) / "config.json")
    return stored is not None and stored.get("face") == "text"


def home_of(run: Path) -> Path:
    """Returns the folder of the whole run: the one above, for the ``lora`` folder of its fine-tuning.

    Example:
        >>> home_of(Path("runs/text/lora")).name, home_of(Path("runs/text")).name
        ('text', 'text')
    """
    return run.absolute().parent if run.absolute().name == "lora" and not (run / "config.json").exists() else run


def open_folder(config: TextConfig, data: TextData, out: Path, *, resume: bool) -> None:
    """Checks that the folder's run is this one and readies the folder: settings, tokenizer, nothing of another run.

    Args:
        config: the settings of the run.
        data: its texts.
        out: the run folder.
        resume: go on with the folder's run; else what is there is set aside.

    Raises:
        ConfigError: the folder's run has other settings or another text, or has gone beyond its new end.
        CheckpointError: another process trains in the folder.
    """
    values = {"face": "text", **config.to_dict(), "corpus": data.fingerprint}
    check_free(out)  # before config.json is written: it may be that of a run that is going on
    with readable(out):
        stored = stored_json(out / "config.json")
        begun = (out / "checkpoints").is_dir()
    outdated = ["checkpoints", BEST, "pretrained", "lora"]
    if resume and begun:
        outdated = _take_up_changes(stored, values, config=config, data=data, out=out)
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        if not resume or outdated:
            # Else a killed fresh start would be taken for the finished run that was here before.
            (out / "metrics.json").unlink(missing_ok=True)
        for name in outdated:
            set_aside(out / name)
        if stored != values:
            write_text(json.dumps(values, indent=2) + "\n", out / "config.json")
        write_text(data.tokenizer.to_str(pretty=True) + "\n", out / "tokenizer.json")


def _take_up_changes(
    stored: Mapping[str, Any] | None, values: Mapping[str, Any], *, config: TextConfig, data: TextData, out: Path
) -> list[str]:
    """Says what a rerun changes, and returns the folders that its changes make useless."""
    if stored is None:
        return []
    differences = changes(stored, values)
    differences.pop("corpus", None)
    for sentence in explain_changes(differences, str(out), free=FREE):
        _log.warning("%s", sentence)
    check_same_text(stored, data, folder=str(out))
    outdated = ["lora"] if needs_new_lora(differences) else []
    _refuse_fewer_epochs("epochs", config.epochs, folder=out)
    if not outdated:
        _refuse_fewer_epochs("lora.epochs", config.lora.epochs, folder=out / "lora")
    return outdated


def _refuse_fewer_epochs(name: str, epochs: int, *, folder: Path) -> None:
    """Raises where a run has gone beyond its new end: its best epoch may be one that must not have happened."""
    done = len((stored_json(folder / "history.json") or {}).get("epoch", ()))
    if epochs < done:
        raise ConfigError(
            f"={epochs}: the run in {folder} has completed {done} epochs already; give as many or more, another "
            "folder with --out, or --no-resume to start afresh in this one",
            argument=name,
        )


def start_line(out: Path) -> str:
    """Says where a run starts, by the newest checkpoint of its folder.

    Example:
        >>> start_line(Path("no_such_run"))
        'fresh'
    """
    for place in ("lora/checkpoints", "checkpoints"):
        for name in ("checkpoint_latest.pt", "checkpoint_latest"):  # a file, or a folder of shards
            latest = out / place / name
            if os.path.lexists(latest):
                return f"goes on from {out / place / Path(os.path.realpath(latest)).name}"
    return "fresh"
