"""Models with ``save_pretrained``: atomic writes of the folder that ``from_pretrained`` loads.

Such models are recognised by their methods alone; neither transformers nor peft is imported. Their checkpoints are
ordinary files; the folder is a copy of the weights for other programs and is never read back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import nn

from treadle.checkpoint.files import replacing_folder, reported
from treadle.checkpoint.schema import non_finite_names, to_plain
from treadle.distributed import is_sharded, rank, unwrap
from treadle.distributed.state_names import clean_name, model_state
from treadle.errors import ConfigError

_log = logging.getLogger("treadle.checkpoint")


def has_save_pretrained(model: nn.Module) -> bool:
    """Return whether a model, wrapped, compiled or plain, has a ``save_pretrained``.

    Example:
        >>> has_save_pretrained(nn.Linear(1, 1))
        False
    """
    return callable(getattr(unwrap(model), "save_pretrained", None))


def write_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Have a model write its current weights and configuration, and replace ``folder`` by them.

    For a model with adapters, its own ``save_pretrained`` writes the adapters. Non-finite weights are not written, with
    a warning. On several ranks the first one writes; for a sharded model, all must call this.

    Args:
        model: has a ``save_pretrained``; wrappers are removed before writing, so that no name has their prefixes.
        folder: replaced as a whole.

    Raises:
        CheckpointError: it could not be written; the old folder is then intact.
    """
    inner, target = unwrap(model), Path(folder)
    sharded = is_sharded(inner)
    weights = to_plain(model_state(inner)) if sharded else model_state(inner)
    if rank() != 0:
        return
    bad = non_finite_names(weights)
    if bad:
        _log.warning("not writing %s: %d tensors are not finite (first: %s)", target, len(bad), bad[0])
        return
    # Individually compiled parts keep their prefix in the model's own state dict; a sharded model has no weights that
    # another library could write.
    renamed = sharded or any(name != clean_name(name) for name in inner.state_dict())
    cleaned = {"state_dict": weights} if renamed else {}
    with reported(target), replacing_folder(target) as staged, without_progress_bars():
        inner.save_pretrained(staged, **cleaned)  # type: ignore[operator]


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers inside the block, if it is imported: they would overlap the run's."""
    library = sys.modules.get("transformers.utils.logging")
    if library is None or not library.is_progress_bar_enabled():
        yield
        return
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.enable_progress_bar()


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
