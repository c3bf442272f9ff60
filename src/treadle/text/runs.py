"""Runs of ``treadle train text``: data, training and fine-tuning; the scores are in :mod:`treadle.text.report`."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.capture.compile import check_compile, compile_model
from treadle.checkpoint.base_fingerprints import FrozenBase
from treadle.checkpoint.ranks import held_by_rank_0
from treadle.checkpoint.store import load_weights, scored_weights
from treadle.config.sections import as_settings
from treadle.data import steps_per_epoch
from treadle.distributed.state_names import load_model_state, model_state
from treadle.engine.settings import Capture, check_capture
from treadle.errors import ConfigError, number_of
from treadle.exchange.pretrained import without_progress_bars
from treadle.functional import Trainer
from treadle.hooks import CheckpointingHook
from treadle.hooks.files import to_json
from treadle.optim.adamw import build_optimizer, build_warmup_cosine
from treadle.runs.folder import read_record, stored_json, write_changed
from treadle.runs.pack import Evaluation, Opened, Pack, Predictions, Results, Run
from treadle.runs.packs import SUMMARIES
from treadle.runs.report import Report
from treadle.seed import set_seed
from treadle.text import report
from treadle.text.extras import import_extra
from treadle.text.model import add_lora, build_gpt2
from treadle.text.run_config import FREE, TextConfig, needs_new_lora
from treadle.text.run_data import (
    Part,
    TextData,
    check_same_on_ranks,
    check_same_text,
    prepare_data_of,
    warn_of_untrained,
)
from treadle.text.tokenizer import as_transformers

_log = logging.getLogger("treadle.cli")
LORA = "lora"
_BEST = "best_model.pt"
_IN_REPORT = {
    ("base", "val"): ("val",),
    ("base", "test"): ("test",),
    ("base", "lora_val"): ("lora", "before"),
    ("base", "lora_test"): ("lora", "test_before"),
    ("lora", "val"): ("lora", "val_after"),
    ("lora", "lora_val"): ("lora", "after"),
    ("lora", "lora_test"): ("lora", "test_after"),
}
"""Stage and split -> location of their scores in ``metrics.json``."""

TextRun = Run[TextConfig]
TextOpened = Opened[TextConfig, TextData, Trainer]


class TextPack(Pack[TextConfig, TextData, Trainer]):
    """Pack of ``treadle train text``, a training followed by its fine-tuning."""

    name = "text"
    summary = SUMMARIES["text"]
    help = """
    Train a small GPT-2 on Python's own manual, fine-tune it with LoRA on the pages about statements, and sample text.

    Weights, tokenizer and text are made on this machine; nothing is downloaded. A run that was stopped at any moment,
    by any cause, resumes when the same command is run again; a finished one shows its results. Ctrl-C saves before
    exiting.

    The run folder holds config.json, tokenizer.json, history.json, steps.jsonl, checkpoints/, best_model.pt,
    pretrained/ (for from_pretrained), lora/ with the same for the fine-tuning, samples.txt, metrics.json and
    pictures/loss.png.

    \b
    Examples:
      treadle train text
      treadle train text epochs=4 lora.epochs=2 --out runs/short
      treadle train text samples.prompt='The "with" statement' samples.temperature=0.5
      treadle train text model.n_embd=256 model.n_layer=6 data.block_length=256 --device cuda --out runs/large
      torchrun --nproc_per_node 2 -m treadle train text
      treadle train text --show-settings
    """
    config = TextConfig
    example = "epochs=20 model.n_layer=4"
    free = FREE
    made = ("checkpoints", _BEST, "pretrained", LORA)
    results = ("metrics.json", "samples.txt")
    parts = (LORA,)
    splits = ("train", "val", "test", "lora_train", "lora_val", "lora_test")
    takes = ("prompt", "count", "num_tokens", "seed", "greedy")
    without = "has no rows of a split; give --prompt"
    afterwards = "the fine-tuning"
    warm = ("transformers.models.gpt2.modeling_gpt2", "peft")

    def defaults(self, device: torch.device) -> TextConfig:
        """Return the default settings for a device."""
        return TextConfig.for_device(device)

    def idle(self, config: TextConfig) -> Iterator[tuple[str, str]]:
        """Yield the settings of samples that a temperature of 0 switches off."""
        if config.samples.temperature == 0:
            for name in ("top_k", "seed"):
                yield f"samples.{name}", "samples.temperature is 0, which always takes the most likely token"

    def parallel(self, config: TextConfig) -> str | None:
        """Return the setting that distributes the model over ranks in the first training."""
        return config.training.parallel

    @contextmanager
    def environment(self, config: TextConfig) -> Iterator[None]:
        """Make errors name the settings, and hide the progress bars of transformers."""
        import_extra("transformers.utils.logging")
        with super().environment(config), without_progress_bars():
            yield

    # -- the two trainings ----------------------------------------------------------------------------------------

    def prepare(self, run: TextRun) -> TextData:
        """Read the manual, which must be the same on all ranks and the same as at the start of a resumed run.

        Raises:
            ConfigError: it differs.
        """
        record = None if run.home is None else read_record(run.home)
        data = prepare_data_of(run.config, None if record is None else record.identity.get("corpus"))
        check_same_on_ranks(data)
        if run.home is None:
            warn_of_untrained(run.config.data, data)
        if record is not None:
            check_same_text(record.identity, data, folder=str(run.home))
        return data

    def build(self, run: TextRun, data: TextData) -> Trainer:
        """Build the trainer of the first training, or of the fine-tuning on its best weights."""
        trainer = build_base(run, data)
        if run.part != LORA:
            return trainer
        assert run.home is not None
        load_model_state(trainer.model, load_weights(run.home / _BEST))
        return build_lora(trainer.model, run, data)

    def fit(self, run: TextRun, data: TextData, trainer: Trainer) -> None:
        """Train up to the number of epochs, from the latest checkpoint in the folder."""
        train, val, epochs = data.train, data.val, run.config.epochs
        if run.part == LORA:
            train, val, epochs = data.lora_train, data.lora_val, run.config.lora.epochs
        batches = train.loader(run.config.batch_size, seed=run.config.seed)
        trainer.train(batches, epochs, val.loader(), run.folder, save_freq=None)

    def finish(self, run: TextRun, data: TextData, trainer: Trainer) -> Results:
        """Score the best weights, fine-tune them, score them again, and sample from both models."""
        load_model_state(trainer.model, load_weights(run.out / _BEST))
        _add_tokenizer(data, run.out)
        scores = {"val": report.score(trainer, data.val), "before": report.score(trainer, data.lora_val)}
        if data.test is not None:
            scores["test"] = report.score(trainer, data.test)
        if data.lora_test is not None:
            scores["test_before"] = report.score(trainer, data.lora_test)
        samples = {"base": report.draw_samples(trainer.model, data.tokenizer, run.config)}
        tuned = self._fine_tune(trainer.model, run, data)
        scores["after"] = report.score(tuned.trainer, data.lora_val)
        scores["val_after"] = report.score(tuned.trainer, data.val)
        if data.lora_test is not None:
            scores["test_after"] = report.score(tuned.trainer, data.lora_test)
        samples["fine-tuned"] = report.draw_samples(tuned.trainer.model, data.tokenizer, run.config)
        return report.finish_run(
            run.config, data, trainer=trainer, tuned=tuned, scores=scores, samples=samples, out=run.out
        )

    def _fine_tune(self, model: Any, run: TextRun, data: TextData) -> report.Tuned:
        run = dataclasses.replace(run, part=LORA)
        trainer = build_lora(model, run, data)
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        part = data.lora_train
        _log.info(
            "fine-tuning %s adapter weights by LoRA on %d topics about statements, %s tokens",
            f"{trained:,}", len(part.topics), f"{part.blocks.num_targets:,}",
        )  # fmt: skip
        self.fit_logged(run, data, trainer)
        # The file has the trained weights; the base is already in the model.
        load_model_state(trainer.model, load_weights(run.folder / _BEST), kept=model_state(trainer.model))
        _add_tokenizer(data, run.folder)
        return report.Tuned(trainer, trained)

    # -- the run folder -------------------------------------------------------------------------------------------

    def held(self, run: TextRun) -> AbstractContextManager[None]:
        """Lock the folder from the start of the first training to the end of the fine-tuning."""
        return held_by_rank_0(run.out)

    def identity(self, data: TextData) -> dict[str, Any]:
        """Return the fingerprint of the text and the tokenizer."""
        return {"corpus": data.fingerprint}

    def keep(self, run: TextRun, data: TextData) -> None:
        """Write the tokenizer to the run folder."""
        super().keep(run, data)
        write_changed(data.tokenizer.to_str(pretty=True) + "\n", run.out / "tokenizer.json")

    def outdated(self, run: TextRun, differences: Mapping[str, tuple[Any, Any]]) -> Sequence[str]:
        """Return the folder of the fine-tuning if a changed setting affects its start.

        Raises:
            ConfigError: a training has already passed its new end.
        """
        names = [LORA] if needs_new_lora(differences) else []
        _refuse_fewer_epochs("epochs", run.config.epochs, folder=run.out)
        if not names:
            _refuse_fewer_epochs("lora.epochs", run.config.lora.epochs, folder=run.out / LORA)
        return names

    def describe(self, run: TextRun, data: TextData, trainer: Trainer) -> dict[str, str]:
        """Return the decisions about precision, data, tokens, model and schedule."""
        return report.decisions(run.config, data, trainer)

    def report(self, metrics: Mapping[str, Any], out: Path) -> Report:
        """Return the scores before and after the fine-tuning, and excerpts of the samples."""
        return report.results(metrics)

    # -- stored runs ----------------------------------------------------------------------------------------------

    def default_split(self, part: str) -> str:
        """Return the name of the held-out split."""
        return "lora_val" if part == LORA else "val"

    def load(self, run: TextRun, trainer: Trainer, path: Path, tree: Mapping[str, Any]) -> None:
        """Load the evaluated weights; adapters only onto the base that they were trained on.

        Raises:
            CheckpointError: the base differs.
        """
        kept = FrozenBase(trainer.model).check(trainer.model, tree.get("base")) if run.part == LORA else ()
        load_model_state(trainer.model, scored_weights(tree), kept=kept)

    def evaluate(self, opened: TextOpened, split: str, *, batch_size: int | None, num_workers: int) -> Evaluation:
        """Return nats per token, perplexity and bits per byte of a split."""
        if split not in opened.data.parts:
            raise ConfigError(
                "the run has no such split, because of its test_fraction; choose another",
                argument="--split",
                value=split,
            )
        scored = to_json(report.score(opened.trainer, opened.data.parts[split], batch_size=batch_size))
        sizes = {name: scored[name] for name in ("tokens", "bytes")}
        stage = opened.run.part or "base"
        file, compared = opened.home / "metrics.json", None
        stored = stored_json(file)
        if stored is not None and (stage, split) in _IN_REPORT:
            of_stage = stored["lora"] if stage == LORA else stored
            if of_stage["best_epoch"] == opened.tree["epoch"]:
                for key in _IN_REPORT[stage, split]:
                    stored = stored.get(key, {})
                compared = (file, stored == scored)
        return Evaluation(
            {name: value for name, value in scored.items() if name not in sizes},
            counts=sizes,
            about={"stage": stage},
            device=str(opened.trainer.device),
            compared=compared,
        )

    def predictions_file(self, split: str) -> str:
        """Return the name of the file of generated texts."""
        return "continuations.csv"

    def predict(
        self,
        opened: TextOpened,
        split: str,
        *,
        batch_size: int | None = None,
        prompt: Sequence[str] | None = None,
        count: int | None = None,
        num_tokens: int | None = None,
        seed: int | None = None,
        greedy: bool = False,
        **options: Any,
    ) -> Predictions:
        """Return continuations of prompts as two string arrays, ``prompt`` and ``text``, which starts with the prompt.

        A text depends only on its own prompt and the settings, not on the other prompts.

        Args:
            opened: the run.
            split: has no effect.
            batch_size: has no effect.
            prompt: one or several; if None or empty, that of the run's samples. Other options that are None also use
                the run's settings.
            count: texts per prompt.
            num_tokens: maximum number of new tokens.
            seed: seed of the sampling generator.
            greedy: select the most likely token each time, which gives one text per prompt.
            options: none.

        Raises:
            ConfigError: an option has no effect together with ``greedy``.
        """
        if greedy and (seed is not None or count is not None):
            raise ConfigError("--greedy: always generates the same text, so leave out --seed and --count")
        asked = {"count": 1 if greedy else count, "num_tokens": num_tokens, "seed": seed}
        given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        samples = dataclasses.replace(opened.run.config.samples, **given)
        if greedy:
            samples = dataclasses.replace(samples, temperature=0.0)
        rows: list[tuple[str, str]] = []
        for begin in prompt or [samples.prompt]:
            config = dataclasses.replace(opened.run.config, samples=dataclasses.replace(samples, prompt=begin))
            rows += [(begin, text) for text in report.draw_samples(opened.trainer.model, opened.data.tokenizer, config)]
        arrays = {"prompt": np.array([begin for begin, _ in rows]), "text": np.array([text for _, text in rows])}
        return Predictions(arrays, texts=[{"prompt": begin, "text": text} for begin, text in rows])


def build_base(run: TextRun, data: TextData) -> Trainer:
    """Seed, and build the trainer of the first training with a new GPT-2."""
    config = run.config
    set_seed(config.seed)
    with as_settings("model", vars(config.model)):
        model = build_gpt2(config.data.vocab_size, n_positions=config.data.block_length, **vars(config.model))
    steps = config.epochs * _steps_per_epoch(data.train, config)
    with as_settings("optimizer", vars(config.optimizer)):
        optimizer = build_optimizer(model.to(run.device), **vars(config.optimizer))
    schedule = config.schedule
    with as_settings("schedule", vars(schedule)):
        scheduler = build_warmup_cosine(
            optimizer, warmup_steps=schedule.warmup_steps, total_steps=steps, min_lr_scale=schedule.min_lr_scale
        )
    compile_model(model, check_compile(config.training.compile))
    return _build_trainer(model, optimizer, scheduler, run, check_capture(config.training.capture))


def build_lora(model: Any, run: TextRun, data: TextData) -> Trainer:
    """Build the trainer of the fine-tuning; adapters are added in place, and only they are trained.

    The seed is set again, so it does not matter whether the first training ran in this process or an earlier one.
    """
    config = run.config
    set_seed(config.seed)
    with as_settings("lora", vars(config.lora)):
        adapted = add_lora(model, r=config.lora.r, alpha=config.lora.alpha, dropout=config.lora.dropout)
        optimizer = build_optimizer(adapted.to(run.device), lr=config.lora.lr, weight_decay=0.0)
    steps = config.lora.epochs * _steps_per_epoch(data.lora_train, config)
    # Updates initialised to 0 need no warm-up.
    scheduler = build_warmup_cosine(
        optimizer, warmup_steps=0, total_steps=steps, min_lr_scale=config.schedule.min_lr_scale
    )
    # A capture error would come only after the first training.
    return _build_trainer(adapted, optimizer, scheduler, run, "auto" if config.training.capture else False)


def _steps_per_epoch(part: Part, config: TextConfig) -> int:
    return steps_per_epoch(part.loader(config.batch_size), config.training.accumulation_steps)


def _build_trainer(model: Any, optimizer: Any, scheduler: Any, run: TextRun, capture: Capture) -> Trainer:
    training = run.config.training
    trainer = Trainer(
        model,
        optimizer,
        None,  # the model computes its loss
        {
            "training": {
                "max_grad_norm": training.grad_clip,
                "gradient_accumulation_steps": training.accumulation_steps,
                "mixed_precision": training.mixed_precision,
                "scheduler_step_per_batch": True,
            }
        },
        run.device,
        scheduler,
        hooks=[
            *run.hooks(status=lambda: _status(trainer)),
            CheckpointingHook(training.checkpoint_interval, exit_signals=(signal.SIGTERM, signal.SIGINT)),
        ],
        parallel=None if run.part == LORA else run.parallel,
        capture=capture if run.trains else False,
    )
    return trainer


def _status(trainer: Trainer) -> str:
    losses = trainer.history.get("eval_loss")
    if not losses or trainer.best_metric is None:
        return ""
    return f"val {losses[-1]:.3f} (best {trainer.best_metric:.3f})"


def _add_tokenizer(data: TextData, folder: Path) -> None:
    """Write the tokenizer next to the weights that the trainer wrote for ``from_pretrained``."""
    as_transformers(data.tokenizer).save_pretrained(folder / "pretrained")


def _refuse_fewer_epochs(name: str, epochs: int, *, folder: Path) -> None:
    """Raise if a run has passed its new end: its best epoch may lie beyond it."""
    done = len((stored_json(folder / "history.json") or {}).get("epoch", ()))
    if epochs < done:
        raise ConfigError(
            f"={epochs}: the run in {folder} has completed {number_of(done, 'epoch')} already; give as many or more, "
            "another folder with --out, or --no-resume to start over in this one",
            argument=name,
        )


PACK = TextPack()
