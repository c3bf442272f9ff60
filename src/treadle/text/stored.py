"""What the model of a ``treadle train text`` says, before or after its fine-tuning: scores, and continuations."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from treadle.checkpoint.base_fingerprints import FrozenBase
from treadle.checkpoint.store import load_weights, scored_weights
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.errors import ConfigError
from treadle.functional import Trainer
from treadle.hooks.files import to_json
from treadle.runs.folder import run_folder_of, stored_json
from treadle.text.folder import BEST, home_of
from treadle.text.replay import stored_text
from treadle.text.report import draw_samples, score
from treadle.text.runs import TextRun, build_base, build_lora

_IN_REPORT = {
    ("base", "val"): ("val",),
    ("base", "lora_val"): ("lora", "before"),
    ("lora", "val"): ("lora", "val_after"),
    ("lora", "lora_val"): ("lora", "after"),
}
"""Stage and split -> where ``metrics.json`` has their scores."""


def evaluate_text(
    path: Path,
    tree: Mapping[str, Any],
    *,
    split: str,
    batch_size: int | None,
    device: str | None,
    messages: Console,
    **_: Any,
) -> dict[str, Any]:
    """Returns nats per token, perplexity and bits per byte of a split.

    Args:
        path: the checkpoint; one in the run's folder ``lora`` is of the fine-tuned model.
        tree: what it holds.
        split: ``"train"``, ``"val"``, ``"lora_train"`` or ``"lora_val"``.
        batch_size: None takes that of the run's evaluations.
        device: None takes CUDA, then MPS, then the CPU.
        messages: where progress goes.

    Raises:
        ConfigError: the run was made on another text.
        CheckpointError: the base of the fine-tuning is missing, or another one than it was trained on.
    """
    with _stored(path, tree, device=device, messages=messages) as (run, trainer):
        scored = to_json(score(trainer, run.data.parts[split], batch_size=batch_size))
    sizes = {name: scored[name] for name in ("tokens", "bytes")}
    metrics = {name: value for name, value in scored.items() if name not in sizes}
    home, stage = home_of(run_folder_of(path)), _stage_of(path)
    found = {"stage": stage, "metrics": metrics, **sizes, "device": str(trainer.device)}
    stored = stored_json(home / "metrics.json")
    if stored is not None and (stage, split) in _IN_REPORT:
        of_stage = stored["lora"] if stage == "lora" else stored
        if of_stage["best_epoch"] == tree["epoch"]:
            for key in _IN_REPORT[stage, split]:
                stored = stored[key]
            found["equal_to_metrics"] = stored == scored
    return found


def predict_text(
    path: Path,
    tree: Mapping[str, Any],
    *,
    prompt: Sequence[str] | None,
    count: int | None,
    num_tokens: int | None,
    seed: int | None,
    greedy: bool,
    device: str | None,
    messages: Console,
) -> Any:
    """Returns continuations of prompts as two arrays of texts, ``prompt`` and ``text``, which begins with the prompt.

    A text depends on its own prompt and the settings only, not on the other prompts.

    Args:
        path: the checkpoint; one in the run's folder ``lora`` is of the fine-tuned model.
        tree: what it holds.
        prompt: one or several; None or none takes that of the run's samples, as for what else is None.
        count: texts for each prompt.
        num_tokens: at most so many tokens are added.
        seed: of the generator that draws.
        greedy: take the likeliest token each time, which gives one text for each prompt.
        device: None takes CUDA, then MPS, then the CPU.
        messages: where progress goes.

    Raises:
        ConfigError: the run was made on another text, or an option has no effect beside ``greedy``.
        CheckpointError: the base of the fine-tuning is missing, or another one than it was trained on.
    """
    if greedy and (seed is not None or count is not None):
        raise ConfigError("--greedy: draws nothing, so there is one text for each prompt; leave out --seed and --count")
    asked = {"count": 1 if greedy else count, "num_tokens": num_tokens, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    rows: list[tuple[str, str]] = []
    with _stored(path, tree, device=device, messages=messages) as (run, trainer):
        samples = dataclasses.replace(run.config.samples, **given)
        if greedy:
            samples = dataclasses.replace(samples, temperature=0.0)
        for begin in prompt or [samples.prompt]:
            config = dataclasses.replace(run.config, samples=dataclasses.replace(samples, prompt=begin))
            rows += [(begin, text) for text in draw_samples(trainer.model, run.data.tokenizer, config)]
    return {"prompt": np.array([begin for begin, _ in rows]), "text": np.array([text for _, text in rows])}


def _stage_of(path: Path) -> str:
    run = run_folder_of(path)
    return "base" if home_of(run) == run else "lora"


@contextmanager
def _stored(
    path: Path, tree: Mapping[str, Any], *, device: str | None, messages: Console
) -> Iterator[tuple[TextRun, Trainer]]:
    """Gives settings and data, and a trainer with the weights of a checkpoint, with the threads that the run had."""
    home = home_of(run_folder_of(path))
    with tempfile.TemporaryDirectory(prefix="treadle-stored-") as scratch, stored_text(home) as (config, data):
        training = dataclasses.replace(config.training, parallel=None, capture=False)  # of steps, which are not made
        run = TextRun(dataclasses.replace(config, training=training), data, Path(scratch), get_device(device), messages)
        model, trainer = build_base(run)
        if _stage_of(path) == "base":
            load_model_state(model, scored_weights(tree))
        else:
            load_model_state(model, load_weights(home / BEST))
            trainer = build_lora(model, run)
            kept = FrozenBase(trainer.model).check(trainer.model, tree.get("base"))
            load_model_state(trainer.model, scored_weights(tree), kept=kept)
        yield run, trainer
