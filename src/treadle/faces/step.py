"""BaseTrainer: a step-based trainer to subclass with ``build_*`` methods and ``forward``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.capture.checkpointing import Checkpointing, check_checkpointing, checkpoint_model
from treadle.capture.compile import Compile, check_compile, compile_model
from treadle.checkpoint.schema import to_plain
from treadle.data.amount import Amount
from treadle.distributed import unwrap
from treadle.engine import Engine
from treadle.engine.evaluation import refuse_no_batch
from treadle.engine.failure import errors_logged_with_rank
from treadle.engine.hook import BaseHook
from treadle.engine.limits import Duration, Limits
from treadle.engine.names import is_own_helper
from treadle.engine.observers import announce_building
from treadle.engine.predictions import predicted, scored_weights
from treadle.engine.settings import Capture, EngineSettings, check_accumulation
from treadle.engine.state_options import state_options
from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import check_whole, checked
from treadle.faces.epoch_face import save_state
from treadle.faces.overrides import check_overrides, refuse_own_loop, refuse_replaced_parts
from treadle.faces.run_files import with_default_hooks
from treadle.hooks.remote import local_workspace
from treadle.hooks.trackers import TrackerChoice, with_trackers
from treadle.hooks.validate import check_hooks
from treadle.optim.precision import Precision, check_precision
from treadle.task import Rng, StepOutput, Task, Totals, as_step_output

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


class BaseTrainer(Engine):
    """Trainer to ``max_steps`` optimizer steps; the loop is documented in ``treadle.hooks.base``.

    Implement ``build_data_loader``, ``build_model``, ``build_optimizer`` and ``forward``. The constructor builds
    nothing and touches no file; everything is built once, on the first call of ``train()``, ``state_dict()`` or
    ``load_state_dict()``.

    Args:
        max_steps: absolute target, >= 0. An epoch that ends with the last step is completed only when the run
            continues, so that the checkpoint of the last step is the final state of the run.
        grad_clip: total 2-norm; None or 0 off.
        grad_clip_value: largest absolute value of a gradient's element; None or 0 off. Not together with ``grad_clip``.
        max_non_finite_grad_retries: fresh groups to try before NonFiniteError; None or 0: none.
        mixed_precision: None, ``"bf16"`` or ``"fp16"``.
        gradient_accumulation_steps: micro-batches per step, >= 1; None = 1.
        workspace: folder for the output of hooks; None if they write no relative paths. A URL such as
            ``s3://bucket/run`` is mirrored by a :class:`treadle.hooks.RemoteWorkspaceHook` from a local folder below
            ``TREADLE_STAGING``.
        device: None takes CUDA, then MPS, then the CPU.
        no_sync_accumulate: exchange gradients between ranks with the last micro-batch of a step only.
        state_dict_options: torch's options, for any model: ``ignore_frozen_params`` reduces frozen weights in states to
            a fingerprint, ``strict=False`` loads what fits and warns about the rest, ``full_state_dict`` makes
            checkpoints of a sharded model single files. Whole tensors are always on the CPU of rank 0.
        logger: by default ``treadle.trainer``.
        scheduler_interval: ``"step"`` or ``"epoch"``.
        hooks: hooks called after those of ``build_hooks``.
        capture: whether the step is replayed as one CUDA graph; ``"auto"`` warns if it cannot be, True raises.
        gradient_checkpointing: True recomputes activations of the model's blocks in the backward pass; or names of
            modules; see :func:`treadle.checkpoint_model`.
        compile: True compiles the model from ``build_model`` in place; ``"blocks"`` each of its repeated blocks.
        trackers: experiment trackers, such as ``["tensorboard", "wandb"]``; see :func:`treadle.with_trackers`.
        progress: False keeps a run silent unless you configured a logging handler, like ``TREADLE_PROGRESS=0``.
        max_time: time limit of one call of ``train``: seconds, ``"HH:MM:SS"``, ``"1h30m"`` or a timedelta.
        limit_train_batches: micro-batches per epoch, or a float, a fraction of it.
        limit_eval_batches: batches of ``evaluate`` and ``validate``, also during training, or a float.
        overfit_batches: number of batches from the start of the loader that make up every epoch, read once.
        fast_dev_run: True or a number of steps and of batches per evaluation; nothing is written or resumed.
        num_sanity_eval_steps: batches that a ValidationHook evaluates before step 1 of a fresh run; -1 for all.

    Raises:
        ConfigError: a value is outside its range, or one of ``state_dict_options`` is not supported.

    Example:
        >>> class Fit(BaseTrainer):
        ...     def build_data_loader(self):
        ...         return [torch.ones(2, 1)] * 3
        ...     def build_model(self):
        ...         return nn.Linear(1, 1).to(self.device)
        ...     def build_optimizer(self):
        ...         return torch.optim.SGD(self.model.parameters(), lr=0.1)
        ...     def forward(self, input):
        ...         return ((self.model(input) - 1) ** 2).mean(), {"size": len(input)}
        >>> trainer = Fit(max_steps=5, device="cpu")
        >>> trainer.train()
        >>> trainer.step, trainer.epoch
        (5, 1)
    """

    model: Any
    optimizer: Any
    hooks: Any
    data_loader: Any

    @checked
    def __init__(
        self,
        max_steps: int,
        grad_clip: float | None = None,
        max_non_finite_grad_retries: int | None = None,
        mixed_precision: Literal["fp16", "bf16"] | None = None,
        gradient_accumulation_steps: int | None = 1,
        workspace: Path | str | None = None,
        device: torch.device | str | int | None = None,
        no_sync_accumulate: bool = True,
        state_dict_options: StateDictOptions | None = None,
        logger: logging.Logger | None = None,
        *,
        scheduler_interval: Literal["step", "epoch"] = "step",
        hooks: Sequence[BaseHook] = (),
        trackers: str | Sequence[TrackerChoice] = (),
        capture: Capture = False,
        compile: Compile = False,
        progress: bool = True,
        grad_clip_value: float | None = None,
        gradient_checkpointing: Checkpointing = False,
        max_time: Duration | None = None,
        limit_train_batches: Amount | None = None,
        limit_eval_batches: Amount | None = None,
        overfit_batches: Amount | None = None,
        fast_dev_run: bool | int = False,
        num_sanity_eval_steps: int = 0,
    ):
        refuse_own_loop(type(self), BaseTrainer)
        check_whole(0, max_steps=max_steps)
        check_precision(mixed_precision, argument="mixed_precision")
        accumulation_steps = 1 if gradient_accumulation_steps is None else gradient_accumulation_steps
        check_accumulation(accumulation_steps, argument="gradient_accumulation_steps")
        limits = Limits(
            max_time, limit_train_batches, limit_eval_batches, overfit_batches, fast_dev_run, num_sanity_eval_steps
        )
        settings = EngineSettings(
            face="mini", scheduler_interval=scheduler_interval, device_asked=device, grad_clip=grad_clip,
            grad_clip_value=grad_clip_value, accumulation_steps=accumulation_steps, syncs_each=not no_sync_accumulate,
            max_non_finite_grad_retries=max_non_finite_grad_retries, capture=capture, progress=progress, limits=limits,
        )  # fmt: skip
        logger, options = logger or logging.getLogger("treadle.trainer"), state_options(state_dict_options)
        self._configure(settings, mixed_precision, logger=logger, state_options=options)
        self.max_steps, self.trackers = max_steps, trackers
        self.compile_setting = check_compile(compile)
        self.checkpointing_setting = check_checkpointing(gradient_checkpointing)
        self._given_hooks = check_hooks(hooks, warns=False)
        with_trackers([], trackers)  # raises for an unknown name
        # Absolute, so that a hook given `trainer.workspace / "checkpoints"` does not nest it below the workspace again.
        self.workspace, self._remote = local_workspace(workspace)
        self.state_dict_options = state_dict_options
        self.task = _ForwardTask(self)
        self._clear_parts()
        self.config = self._own_config = self._described(
            mixed_precision=mixed_precision, max_non_finite_grad_retries=max_non_finite_grad_retries,
            gradient_checkpointing=gradient_checkpointing, compile=compile,
        )  # fmt: skip

    def _described(self, *, gradient_checkpointing: Checkpointing, **given: Any) -> dict[str, Any]:
        """Return the settings that a checkpoint records, as given; newer ones only if set."""
        own = self.settings
        later = {"grad_clip_value": own.grad_clip_value, "gradient_checkpointing": gradient_checkpointing}
        return {
            "max_steps": self.max_steps, "grad_clip": own.grad_clip,
            "max_non_finite_grad_retries": given["max_non_finite_grad_retries"],
            "mixed_precision": given["mixed_precision"], "gradient_accumulation_steps": own.accumulation_steps,
            "scheduler_interval": own.scheduler_interval, "capture": own.capture, "compile": given["compile"],
            **{name: value for name, value in later.items() if value}, **own.limits.given(),
        }  # fmt: skip

    @property
    def _recorded_config(self) -> Any:
        """Configuration that a checkpoint records: the trainer's, where a subclass put an object in its place."""
        try:
            to_plain(self.config, "config")
        except CheckpointError:
            return self._own_config
        return self.config

    def _clear_parts(self) -> None:
        """Set the parts that :meth:`prepare` builds to None."""
        self.model = self.optimizer = self.lr_scheduler = self.hooks = None
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.data_loader: Any = None

    def train(self) -> None:
        """Train to ``max_steps``; a finished run is a no-op. Exceptions propagate unchanged."""
        if "max_steps" not in vars(self):
            raise ConfigError(
                f"{type(self).__name__}.__init__() did not call super().__init__(max_steps=...); call it before "
                "using the trainer"
            )
        with errors_logged_with_rank(self):
            self.prepare()
        self.run(self.data_loader, max_steps=self.max_steps)

    def evaluate(self, loader: Iterable[Any], task: Task | None = None) -> dict[str, Any]:
        """Return the weighted mean loss, records and epoch metrics over a loader; see :meth:`Engine.evaluate`.

        Raises:
            ConfigError: the parts are not built yet.
        """
        self._refuse_unbuilt("evaluate")
        return super().evaluate(loader, task)

    def _refuse_unbuilt(self, method: str) -> None:
        if self.hooks is None:
            raise ConfigError(
                f"{method}() was called before train(), so there is no model yet; call train(), which only loads the "
                f"state if the run is finished, or prepare() to {method} with fresh weights"
            )

    def validate(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over a loader, using averaged weights if there are any, without affecting training.

        Args:
            loader: batches, limited by ``limit_eval_batches``; or a dict of loaders, whose names prefix the names of
                their results.

        Raises:
            ConfigError: the parts are not built yet, or a loader is empty.
        """
        self._refuse_unbuilt("validate")
        if isinstance(loader, Mapping):
            results = {name: self.validate(one) for name, one in loader.items()}
            return {f"{name}_{key}": value for name, values in results.items() for key, value in values.items()}
        with scored_weights(self):
            values = self.evaluate(loader)
        refuse_no_batch(self.eval_cursor.position, "loader: it")
        return values

    def test(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over the whole loader, like :meth:`validate` without a limit.

        Raises:
            ConfigError: the parts are not built yet, or a loader is empty.
        """
        with self.evaluations_limited_to(None):
            return BaseTrainer.validate(self, loader)

    def predict(self, loader: Iterable[Any]) -> Any:
        """Return the outputs of the subclass's ``predict_step(input)`` over a loader, in eval mode and in order.

        Returns:
            The outputs of all batches concatenated along dimension 0 on the CPU, from averaged weights if there are
            any: a tensor (N, ...), or tuples and dicts of tensors.

        Raises:
            ConfigError: the parts are not built yet, the trainer has no ``predict_step``, or the loader is empty.
        """
        self._refuse_unbuilt("predict")
        step = getattr(self, "predict_step", None)
        if step is None:
            raise ConfigError(
                f"{type(self).__name__} has no predict_step(input), which returns the predictions for a batch; "
                "define it, for example: return self.model(input[0].to(self.device))",
                argument="predict",
            )
        return predicted(self, loader, step)

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint of everything that a run needs to resume exactly; collective.

        Returns:
            The path of the file, under another name in the same folder if the weights are not finite.

        Raises:
            CheckpointError: the file cannot be written.
        """
        return save_state(self, path)

    # -- to implement ---------------------------------------------------------------------------------------------

    def build_data_loader(self) -> Iterable[Any]:
        """Return any iterable of micro-batches; a finite one is re-iterated for each epoch."""
        raise self._missing("build_data_loader")

    def build_model(self) -> nn.Module:
        """Return the model on ``self.device``, wrapped or compiled as you like.

        In a process group, use ``treadle.parallelize(model, "ddp")`` or ``"fsdp"``.
        """
        raise self._missing("build_model")

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer; ``self.model`` already exists."""
        raise self._missing("build_optimizer")

    def forward(self, input: Any) -> Any:
        """Return the loss, ``(loss, records)``, ``(loss, records, weight)`` or a StepOutput; run under autocast.

        Args:
            input: the loader's item, unchanged.
        """
        raise self._missing("forward")

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must implement {method}()")

    # -- may be overridden ----------------------------------------------------------------------------------------

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Return the learning-rate scheduler, or None."""
        return None

    def build_grad_scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler; enabled for fp16 only."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision.name == "fp16")

    def build_hooks(self) -> list[BaseHook]:
        """Return the hooks, in order."""
        return []

    # -- building, once and on demand -----------------------------------------------------------------------------

    @property
    def no_sync_accumulate(self) -> bool:
        """Whether ranks exchange gradients with the last micro-batch of a step only."""
        return not self.settings.syncs_each

    def prepare(self) -> None:
        """Build data loader, model, optimizer, scheduler, scaler and hooks, in this order, on the first call.

        Raises:
            ConfigError: a subclass has assigned an attribute with the name of a part or a method of the engine.
        """
        if self.hooks is None:
            check_overrides(self, BaseTrainer)
            announce_building(self)
            # A subclass may have a method of this name for something else, which only the subclass calls.
            BaseTrainer._build(self) if is_own_helper(type(self), BaseTrainer, "_build") else self._build()
            refuse_replaced_parts(self, BaseTrainer)  # build methods may assign too
            if self.hooks is None:
                raise ConfigError(
                    f"{type(self).__name__}._build() did not call super()._build(), which builds every part; call "
                    "it, and override methods such as build_model to change a part"
                )
        super().prepare()

    def _build(self) -> None:
        """Build every part; a subclass may wrap ``super()._build()``."""
        self.data_loader = self._built("build_data_loader")
        self.model = checkpoint_model(self._built("build_model"), self.checkpointing_setting)
        compile_model(self.model, self.compile_setting)
        self.optimizer = self._built("build_optimizer")
        if not hasattr(self.optimizer, "param_groups"):
            raise ConfigError(
                f"{type(self).__name__}.build_optimizer() returned a {type(self.optimizer).__name__}; return one "
                "optimizer. Return a schedule from build_lr_scheduler; for several optimizers see "
                "docs/guide/several-optimizers.md"
            )
        self.lr_scheduler = self.build_lr_scheduler()
        self.grad_scaler = self.build_grad_scaler()
        self.precision = Precision(self.precision.name, self.device, scaler=self.grad_scaler)
        hooks = self._built("build_hooks")
        if self._given_hooks:
            hooks = [*check_hooks(hooks, warns=False), *self._given_hooks]
        hooks = with_trackers(hooks, self.trackers)
        if self._remote is not None:
            hooks = [self._remote, *hooks]
        self.hooks = with_default_hooks(hooks, given=hooks, progress=self.settings.progress)

    def _built(self, method: str) -> Any:
        part = getattr(self, method)()
        if part is None:
            raise ConfigError(f"{type(self).__name__}.{method}() returned None; return what it builds")
        return part

    @staticmethod
    def unwrap(module: nn.Module) -> nn.Module:
        """Unwrap ``torch.compile``, DistributedDataParallel, DataParallel and AveragedModel, in any nesting."""
        return unwrap(module)

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model without its wrappers."""
        return unwrap(self.model)


class _ForwardTask:
    """Task that lets evaluations use the trainer's ``forward``; training calls it directly."""

    def __init__(self, trainer: BaseTrainer):
        self.trainer = trainer

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        return as_step_output(self.trainer.forward(batch), training=False)
