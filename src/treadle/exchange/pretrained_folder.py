"""Folders that ``from_pretrained`` of transformers loads: weights and the model's configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from treadle.checkpoint.files import replacing_folder, reported
from treadle.errors import ConfigError

CONFIG = "config.json"
_COPIED = (".json", ".txt", ".model", ".jinja")  # the configuration and the files of tokenizers
_NOT_COPIED = ("trainer_state.json", ".index.json")


def find_config(places: Iterable[Path]) -> Path:
    """Return the first folder with a model's ``config.json``.

    Raises:
        ConfigError: there is none; the message lists the folders that were searched.
    """
    looked_in = list(places)
    for folder in looked_in:
        if (folder / CONFIG).is_file():
            return folder
    shown = " or ".join(repr(str(folder)) for folder in looked_in)
    raise ConfigError(
        f"hf needs the model's {CONFIG}, which is not in {shown}; write it with model.config.save_pretrained(DIR) and "
        "give DIR as config"
    )


def ties_embeddings(folder: Path) -> bool:
    """Return whether the model ties its embeddings on loading, so that they are stored once.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    try:
        return bool(json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("tie_word_embeddings", True))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{CONFIG} cannot be read: {error}", argument="config", value=str(folder)) from None


def write_folder(target: Path, config: Path, write_weights: Callable[[Path], None]) -> None:
    """Atomically write a folder of weights with copies of the configuration and the tokenizer.

    Args:
        target: replaced if it exists.
        config: the folder with the model's ``config.json``.
        write_weights: writes ``model.safetensors`` to the given path.

    Raises:
        CheckpointError: something cannot be written; the existing folder is left intact.
    """
    with reported(target), replacing_folder(target) as staged:
        for file in sorted(config.iterdir()):
            if file.is_file() and file.name.endswith(_COPIED) and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, staged / file.name)
        write_weights(staged / "model.safetensors")
