"""Astronomy trainer: epoch-based training of token models with step and epoch checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle import distributed
from treadle.astro.config import TrainingConfig
from treadle.astro.epochs import AstroEpochs
from treadle.astro.files import AstroFolder, StepCheckpoints, layout_of
from treadle.astro.loss_inputs import LossConfig
from treadle.astro.losses import Stats
from treadle.astro.schedule import WarmupCosine
from treadle.astro.settings import (
    check_model,
    codebooks_of,
    default_optimizer,
    default_schedule,
    precision_of,
    schedule_length,
    training_settings,
)
from treadle.astro.step_records import TERMS
from treadle.astro.task import AstroTask
from treadle.astro.vocab import VocabSpec
from treadle.capture.compile import Compile, check_compile
from treadle.checkpoint.store import load_checkpoint
from treadle.device import get_device
from treadle.device.host_transfer import read_scalars
from treadle.engine.best import BestRule
from treadle.engine.hook import BaseHook
from treadle.engine.limits import Limits
from treadle.engine.run_log import run_log_shown
from treadle.engine.settings import Capture
from treadle.errors import ConfigError
from treadle.errors.arguments import check_whole, checked, suggesting
from treadle.faces.build import EngineArguments, build_engine, place
from treadle.faces.epoch_face import EpochFace
from treadle.faces.epochs import numbers_of
from treadle.faces.loaders import EvalLoaders, check_eval_loaders, check_loader, results_by_name, selected_by
from treadle.faces.parallel import ParallelConfig
from treadle.hooks.history import HistoryHook
from treadle.hooks.trackers import TrackerChoice
from treadle.seed import mix_seed

_log = logging.getLogger("treadle.astro")
_epoch_log = logging.getLogger("treadle.astro.epochs")


class AstroTrainer(EpochFace):
    """Trainer of a model ``(tokens, types, attn_mask) -> logits`` on token sequences; see ``treadle.hooks.base``.

    If the model has ``hidden_states`` and a linear ``head`` without bias, like `CausalTransformerLM`,
    :meth:`compute_loss` is not overridden and the model is not sharded, the logits are never materialised: the same
    loss in much less memory.

    Args:
        model: moved to the device in place.
        vocab: the vocabulary of the sequences.
        train_loader: batches in the format of `collate_sequences`.
        config: the training section of the settings; None uses the defaults. It is not modified.
        image_codebook: (v_image, D). This and the next two may be None if the weight of their term is 0.
        spectrum_codebook: mapping from each group to (v_spectra, D), or (groups, v_spectra, D).
        scalar_centers: (v_scalar,) or (n_columns, n_bins).
        device: None selects CUDA, then MPS, then the CPU.
        output_dir: folder for checkpoints and history; None writes nothing.
        use_amp: whether to use autocast; None enables it on CUDA.
        use_ce: whether the loss includes the cross-entropy.
        compile_model: True compiles the forward pass of the model, ``"blocks"`` each of its layers in place; overrides
            ``config.compile``.
        amp_dtype: ``"fp16"`` (with a gradient scaler) or ``"bf16"``.
        optimizer: None builds AdamW with betas (0.9, 0.95) and weight decay on matrices, not on embeddings, norms and
            biases.
        scheduler: None builds the warm-up and cosine of `cosine_schedule_with_warmup`.
        scheduler_interval: ``"step"`` (applied steps) or ``"epoch"``, for a given scheduler.
        hooks: additional hooks.
        trackers: experiment trackers, such as ``["tensorboard", "wandb"]``; see :func:`treadle.with_trackers`.
        progress: False shows no progress unless you configure a log handler, like ``TREADLE_PROGRESS=0``.
        limits: limits of time and batches, and short trials: a :class:`treadle.Limits` or a mapping of its fields.
        save_total_limit: how many of the newest checkpoints to keep, of epochs and of steps each; None keeps all.
        eval_seed: seed of evaluations and, with the batch index, of the sampled positions.
        capture: whether to replay the step as one CUDA graph; ``"auto"`` warns if that is impossible, True raises. The
            terms of the built-in loss are counted on the host in each step, so only a custom ``compute_loss`` can be
            replayed.
        parallel: ``"ddp"``, ``"fsdp"`` or a ParallelConfig distributes the model over the ranks started by torchrun;
            overrides ``config.parallel``.

    Attributes:
        model, optimizer, scheduler, device, config: as used by the trainer.

    Raises:
        ConfigError: a setting or codebook is invalid or missing, nothing would be trained, the loader has no length and
            ``config.total_steps`` is None, or a device is not available.

    Example:
        >>> from treadle.astro import CausalTransformerLM, build_vocab_spec, collate_sequences, encode_sequence
        >>> vocab = build_vocab_spec(2, 4, 2, ["a"], scalar_bins=2)
        >>> batch = collate_sequences([encode_sequence(vocab, image=[0, 1], scalars=[1, 0], spectra={"a": [1]})])
        >>> model = CausalTransformerLM(vocab.vocab_size, 8, 16, 1, 2, 32, 0.0, 32)
        >>> loss = {"weight_spectrum": 0.0}
        >>> trainer = AstroTrainer(
        ...     model, vocab, [batch] * 4, {"warmup_steps": 2, "grad_accum_steps": 3, "meaningful_loss": loss},
        ...     image_codebook=[[0.0], [1.0]], scalar_centers=[1.0, 3.0, 10.0, 30.0], device="cpu",
        ... )
        >>> records = trainer.train(num_epochs=2)
        >>> trainer.global_step, records[0]["epoch"], records[0]["train_n_img"]
        (4, 1, 8)
    """

    _epochs: AstroEpochs
    _folder: AstroFolder

    @checked
    def __init__(
        self,
        model: nn.Module,
        vocab: VocabSpec,
        train_loader: Iterable[Any],
        config: TrainingConfig | Mapping[str, Any] | None = None,
        image_codebook: Any = None,
        spectrum_codebook: Any = None,
        scalar_centers: Any = None,
        device: torch.device | str | int | None = None,
        output_dir: str | Path | None = None,
        use_amp: bool | None = None,
        use_ce: bool = True,
        compile_model: Compile = False,
        *,
        amp_dtype: Literal["fp16", "bf16"] = "fp16",
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        hooks: Sequence[BaseHook] = (),
        trackers: str | Sequence[TrackerChoice] = (),
        eval_seed: int = 0,
        capture: Capture = False,
        parallel: ParallelConfig | str | None = None,
        progress: bool = True,
        limits: Limits | Mapping[str, Any] | None = None,
        save_total_limit: int | None = None,
    ):
        self.config = training_settings(config)
        self.vocab, self.train_loader, self.device = vocab, train_loader, get_device(device)
        loss_config = LossConfig.read(self.config.meaningful_loss)
        given = (image_codebook, spectrum_codebook, scalar_centers)
        codebooks = codebooks_of(vocab, given, loss_config, use_ce=use_ce, device=self.device)
        check_model(model, vocab)
        compiled = check_compile(compile_model or self.config.compile)  # True: the task compiles what the loss needs
        self.model, self.optimizer, _ = place(
            model, partial(default_optimizer, settings=self.config) if optimizer is None else optimizer,
            device=self.device, scheduler=scheduler, compile="blocks" if compiled == "blocks" else False,
            parallel=parallel or self.config.parallel,
        )  # fmt: skip
        if scheduler is None:
            scheduler = default_schedule(self.optimizer, self.config, train_loader, interval=scheduler_interval)
        self.scheduler = scheduler
        overridden = type(self).compute_loss is not AstroTrainer.compute_loss
        self._task = AstroTask(
            self.device, vocab, codebooks=codebooks, config=loss_config, use_ce=use_ce, draw_seed=self._draw_seed,
            own_loss=self.compute_loss if overridden else None, compiled=compiled is True,
        )  # fmt: skip
        arguments: EngineArguments = {
            "scheduler": self.scheduler, "scheduler_interval": scheduler_interval, "device": device,
            "precision": precision_of(use_amp, amp_dtype, self.device), "eval_seed": eval_seed, "capture": capture,
            "limits": limits, **_engine_arguments(self.config),
        }  # fmt: skip
        arguments["config"] = self._described(arguments, loss_config, use_ce=use_ce, compile_model=compiled)
        self._engine = build_engine(
            "astro", self.model, self.optimizer, self._task, arguments, own_hooks=self._own_hooks(output_dir),
            hooks=hooks, trackers=trackers, progress=progress, log_every=self.config.log_every,
        )  # fmt: skip
        self._epochs = AstroEpochs(self._engine, None if overridden else self._task.term_weights)
        self._folder = AstroFolder(self._engine, vocab, path=output_dir, save_total_limit=save_total_limit)

    def _described(
        self, arguments: EngineArguments, loss_config: LossConfig, *, use_ce: bool, compile_model: Compile
    ) -> dict[str, Any]:
        return {
            **layout_of(self.vocab), "loss_config": dataclasses.asdict(loss_config),
            "training": dataclasses.asdict(self.config), "use_ce": use_ce, "precision": arguments["precision"],
            "compile_model": compile_model, "scheduler_interval": arguments["scheduler_interval"],
            "eval_seed": arguments["eval_seed"],
        }  # fmt: skip

    def _own_hooks(self, output_dir: str | Path | None) -> list[BaseHook]:
        if output_dir is None:
            return []
        own: list[BaseHook] = [HistoryHook(Path(output_dir) / "training_history.json", lambda: self.history)]
        if self.config.save_every_steps:
            own.append(StepCheckpoints(lambda: self._folder.write_step(), self.config.save_every_steps))
        return own

    def _draw_seed(self) -> int:
        """Return the seed for sampling positions of the current micro-batch, identical in a resumed run."""
        engine = self._engine
        if not torch.is_grad_enabled():
            return mix_seed(engine.eval_seed, engine.eval_cursor.position)
        number = engine.micro_steps - len(engine.attempt.group.batches) + len(engine.attempt.info.get("loss", ()))
        return mix_seed(self.config.seed, number, distributed.rank())

    # -- what happened so far -------------------------------------------------------------------------------------

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch."""
        return self._epochs.history

    @property
    def output_dir(self) -> Path | None:
        """The checkpoint folder, or None."""
        return self._folder.path

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group at the next step."""
        return float(read_scalars([self.optimizer.param_groups[0]["lr"]])[0])

    # -- to override ----------------------------------------------------------------------------------------------

    def compute_loss(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the loss of a batch and its statistics; may be overridden.

        An override receives the logits of every micro-batch, in training and evaluation. Micro-batches are then
        weighted by their valid tokens, a statistic ``loss_x`` by ``n_x``, and ``n_x`` is summed.

        Args:
            logits: (B, L, V).
            targets: ids (B, L).

        Returns:
            The loss, 0-d, and ``loss_ce``, ``loss_img``, ``loss_sca``, ``loss_spec`` with ``n_ce``, …; see
            `combined_loss`.
        """
        loss: Tensor
        stats: Stats
        loss, stats = self._task.loss_and_stats(logits, targets)
        return loss, stats

    # -- training -------------------------------------------------------------------------------------------------

    @suggesting
    def train(
        self,
        num_epochs: int | None = None,
        val_loader: EvalLoaders | None = None,
        *,
        resume_from: str | Path | None = None,
        best_model_metric: str | None = None,
    ) -> list[dict[str, Any]]:
        """Train until ``num_epochs`` epochs are complete.

        Args:
            num_epochs: absolute target; None uses ``config.epochs``. A run that has reached it returns immediately.
            val_loader: batches to evaluate after each epoch; ``val_loss_total`` then selects ``best.pt``. In a dict,
                every loader is evaluated, as ``val_<name>_loss_total`` and so on.
            resume_from: None, ``"auto"`` (the furthest intact checkpoint in ``output_dir`` and the folders of hooks
                that load the latest), or a path, which may be relative to ``output_dir``.
            best_model_metric: another loss of the record to select ``best.pt`` by, such as ``"val_far_loss_total"`` or
                ``"val_loss_img"``; with several loaders and no loader name, that of the first.

        Returns:
            A record for each epoch: ``epoch`` (1-based), ``train_loss_total``, ``train_loss_ce``, …, ``train_n_ce``,
            …, the same with ``val_``, and ``lr``.

        Raises:
            ConfigError: ``num_epochs`` is not an integer >= 0, a loader is empty, or ``best_model_metric`` is not a
                loss of the record.
            CheckpointError: another process is training in ``output_dir``, or no checkpoint is intact.
        """
        epochs = self.config.epochs if num_epochs is None else num_epochs
        check_whole(0, num_epochs=epochs)
        check_loader(self.train_loader, "train_loader")
        check_eval_loaders(val_loader, "val_loader")
        make_rule = self._rule_for(best_model_metric, val_loader)
        with run_log_shown(self._engine), self._folder.training():
            self._folder.resume(resume_from)
            self._epochs.select_by(make_rule)
            if isinstance(self.scheduler, WarmupCosine) and self.epoch < epochs:
                self.scheduler.use_total(schedule_length(self.config, self.train_loader, epochs))
            return self._epochs.fit(self.train_loader, val_loader, epochs, after_epoch=self._end_epoch)

    def _rule_for(self, metric: str | None, loaders: EvalLoaders | None) -> Callable[[], BestRule] | None:
        """Return a factory for the best-checkpoint rule, or None if nothing is evaluated."""
        if loaders is None:
            if metric is not None:
                raise ConfigError(
                    "selects by an evaluation; give a val_loader", argument="best_model_metric", value=metric
                )
            return None
        key = selected_by("loss_total" if metric is None else metric.removeprefix("val_"), loaders)
        known = results_by_name(("loss_total", *(f"loss_{term}" for term in TERMS)), loaders)
        if key not in known and type(self).compute_loss is AstroTrainer.compute_loss:
            raise ConfigError(
                f"no epoch's record will have it as a loss, only {', '.join(f'val_{name}' for name in known)}",
                argument="best_model_metric", value=metric,
            )  # fmt: skip
        return partial(BestRule, f"val_{key}", "min")

    def _end_epoch(self, record: Mapping[str, Any]) -> None:
        self._folder.write_epoch(improved=self._epochs.improved)
        if distributed.rank() == 0:
            _epoch_log.info("epoch %d: %s", self.epoch, numbers_of(record), extra={"topic": "epoch"})

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Run one optimizer step on one micro-batch, with its hooks, and return its results.

        Returns:
            ``loss_total`` (NaN if no term has a position), the means and counts of `combined_loss` as numbers, and
            ``lr``.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        self._epochs.train_step(batch)
        return {**self._epochs.step_numbers(), "lr": float(read_scalars(self._engine.attempt.info["lr"][:1])[0])}

    def train_epoch(self) -> dict[str, Any]:
        """Train one epoch without evaluating, selecting or writing anything at its end.

        Returns:
            ``loss_total``, ``loss_ce``, …, ``n_ce``, …: means over the epoch and total counts.
        """
        return self._epochs.train_epoch(self.train_loader)

    def evaluate(self, val_loader: Iterable[Any]) -> dict[str, Any]:
        """Evaluate on a loader, with averaged weights if there are any; repeatable to the bit.

        Returns:
            ``loss_total``, ``loss_ce``, …, ``n_ce``, ….

        Raises:
            ConfigError: the loader is empty.
        """
        return self._epochs.evaluate(val_loader)

    def predict(self, loader: Iterable[Any]) -> Any:
        """Return the logits of a loader's sequences, with averaged weights if there are any.

        Returns:
            (N, L - 1, V) on the CPU: position i predicts token i + 1.

        Raises:
            ConfigError: the loader is empty, or its sequences differ in length.
        """
        return self._epochs.predict(loader, partial(self._task.logits, self.model))

    # -- files ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, filename: str | Path) -> Path:
        """Write everything needed to resume the run exactly; a collective call.

        Args:
            filename: a relative path is resolved against ``output_dir``.

        Returns:
            The file.
        """
        return self._folder.write(Path(filename) if self.output_dir is None else self.output_dir / filename)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Restore the full state from a checkpoint in place; :meth:`train` then continues from its step.

        Args:
            path: used as given; if there is no such file, looked up in ``output_dir``.

        Returns:
            The checkpoint's data.

        Raises:
            CheckpointError: the file is missing or damaged, or its vocabulary or model differs.
        """
        path = self._folder.find(path)
        tree = load_checkpoint(path)
        self._folder.restore(tree, path)
        return dict(tree)


def _engine_arguments(settings: TrainingConfig) -> EngineArguments:
    return {
        "grad_clip": settings.grad_clip,
        "accumulation_steps": settings.grad_accum_steps,
        "max_non_finite_grad_retries": settings.max_non_finite_grad_retries,
    }
