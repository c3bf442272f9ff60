"""Upload of a run to the Hugging Face Hub: weights, records, and a model card generated from them."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.engine.best import BestRule
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.exchange.export import export_weights
from treadle.exchange.sources import Source
from treadle.hooks.values import require
from treadle.runs.settings import flat

_RECORDS = ("settings.json", "history.json", "metrics.json", "validation.jsonl", "run.json", "config.yaml")
_MOST_SETTINGS = 80
_WHICH = {"ema": "averaged weights", "model": "raw weights", "stored": "weights"}


@checked
def push_to_hub(
    source: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    message: str = "Upload a run of treadle",
    card: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Upload the best weights of a run, its records and a model card to the Hugging Face Hub.

    Weights go as ``model.safetensors``, or as the run's ``pretrained`` folder where the model has ``save_pretrained``,
    so that ``from_pretrained`` loads it. Checkpoints and step logs are not uploaded.

    Args:
        source: a run folder, whose best checkpoint is taken, or a checkpoint file.
        repo_id: ``"owner/name"``; created if missing.
        private: whether a new repository is private; None leaves it to the owner's settings.
        token: token for huggingface_hub; None uses the one stored by ``hf auth login``.
        revision: branch to commit to; None takes the main one.
        message: commit message.
        card: text of ``README.md``; None generates one from the records, see :func:`model_card`.
        endpoint: URL of the Hub; None takes huggingface_hub's default.

    Returns:
        The URL of the repository.

    Raises:
        ConfigError: there is no such source, or ``repo_id`` is not ``"owner/name"``.
        CheckpointError: no checkpoint is intact.
        MissingExtraError: huggingface_hub is not installed.

    Example:
        >>> # push_to_hub("runs/digits", "me/digits", private=True)
    """
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ConfigError("must be 'owner/name'", argument="repo_id", value=repo_id)
    hub = require("huggingface_hub", "push_to_hub", extra="hub")
    with tempfile.TemporaryDirectory() as folder:
        stage_upload(source, Path(folder), card=card, title=repo_id.split("/")[1])
        api = hub.HfApi(endpoint=endpoint, token=token)
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision)
    return str(address)


def stage_upload(
    source: str | os.PathLike[str], folder: Path, *, card: str | None = None, title: str | None = None
) -> None:
    """Write the files of an upload into an empty folder.

    Args:
        source: a run folder or a checkpoint file.
        folder: an existing empty folder.
        card: text of ``README.md``; None generates one.
        title: title of a generated card; None takes the name of the source.
    """
    asked = Path(source)
    exported = export_weights(asked, "safetensors", out=folder / "model.safetensors")
    pretrained = asked / "pretrained"
    if (pretrained / "config.json").is_file():
        exported.path.unlink()
        shutil.copytree(pretrained, folder, dirs_exist_ok=True)
    for name in _RECORDS:
        if (asked / name).is_file():
            shutil.copy(asked / name, folder / name)
    text = model_card(asked, exported.source, title=title or asked.name) if card is None else card
    (folder / "README.md").write_text(text, encoding="utf-8")


def model_card(run: Path, source: Source, *, title: str) -> str:
    """Return the text of a model card: results, settings, versions, and how to load the weights.

    Args:
        run: the run folder; missing records are omitted.
        source: the origin of the weights.
        title: title of the card.
    """
    settings = _json(run / "settings.json")
    where = ", ".join(f"{name} {value}" for name in ("step", "epoch") if (value := getattr(source, name)) is not None)
    tags = "\n".join(["---", "library_name: treadle", "tags:", "- treadle", "- pytorch", "---"])
    parts = [
        f"{tags}\n\n# {title}",
        f"The {_WHICH[source.which]} of a model trained with treadle{f', {where}' if where else ''}.",
    ]
    results = _results(run)
    if results:
        rows = [(name, "" if best is None else f"{best:.4g}", f"{last:.4g}") for name, (best, last) in results.items()]
        parts.append("## Results\n\n" + _table(("metric", "best", "last"), rows))
    versions = settings.pop("versions", {})
    flat_settings = {key: value for key, value in flat(settings).items() if value is not None}
    if flat_settings:
        rows_of_settings = [(key, f"`{value}`") for key, value in list(flat_settings.items())[:_MOST_SETTINGS]]
        parts.append("## Settings\n\n" + _table(("setting", "value"), rows_of_settings))
    parts.append("## Use\n\n" + _use(run))
    if versions:
        parts.append("## Made with\n\n" + ", ".join(f"{name} {value}" for name, value in versions.items()))
    return "\n\n".join(parts) + "\n"


def _use(run: Path) -> str:
    if (run / "pretrained" / "config.json").is_file():
        return "The files are those of `save_pretrained`: `from_pretrained` of the model's class loads them."
    lines = ["from safetensors.torch import load_file", "", 'model.load_state_dict(load_file("model.safetensors"))']
    return "\n".join(["Build the model as in the training, then:", "", "```python", *lines, "```"])


def _results(run: Path) -> dict[str, tuple[float | None, float]]:
    """Return the best and the last value of each evaluated metric."""
    columns: dict[str, list[float]] = {}
    history = _json(run / "history.json")
    for name, values in history.items():
        if isinstance(values, list) and name not in ("epoch", "lr"):
            columns[name] = [value for value in values if isinstance(value, (int, float))]
    lines = run / "validation.jsonl"
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.is_file() else ():
        for name, value in json.loads(line).items():
            if name not in ("step", "epoch") and isinstance(value, (int, float)):
                columns.setdefault(name, []).append(value)
    found = {name: [value for value in values if math.isfinite(value)] for name, values in columns.items()}
    return {name: (_best(name, values), values[-1]) for name, values in found.items() if values}


def _best(name: str, values: Sequence[float]) -> float | None:
    """Return the best value of a metric, or None if its name does not imply a direction."""
    try:
        mode = BestRule(name).mode
    except ConfigError:
        return None
    return min(values) if mode == "min" else max(values)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
