"""Checks of a run before its first step, and trials of what it needs later: evaluation, folders."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from treadle.checkpoint.introspection import is_user_class
from treadle.checkpoint.schema import to_plain
from treadle.data.cursor import Cursor
from treadle.distributed import gather_objects, is_distributed, is_sharded
from treadle.distributed.state_names import clean_name
from treadle.engine.evaluation import evaluation_rules
from treadle.engine.failure import batch_named_in_errors
from treadle.engine.first_save import refuse_hidden_tensors, try_optimizer
from treadle.engine.hook import EVENTS, BaseHook
from treadle.engine.idle_names import names_in_vain
from treadle.engine.masks import warn_of_masks
from treadle.engine.metrics import EpochMetrics
from treadle.engine.names import uncalled_methods
from treadle.engine.objects_part import warn_of_lost
from treadle.engine.schedule_checks import try_schedule
from treadle.engine.search import is_treadle_object
from treadle.errors import ConfigError, number_of
from treadle.nested import flatten_nested_dict, non_finite_in
from treadle.optim.evaluation_point import into_training_point
from treadle.optim.optimizer import check_scheduler, is_torch_optimizer, uncovered_parameters
from treadle.optim.schedules import check_plateau
from treadle.task import HasMetrics, Task, as_step_output, update_of

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def refuse_fsdp_1(model: nn.Module) -> None:
    """Raise for FSDP1 (``FullyShardedDataParallel``), where each rank would clip by its local norm.

    Raises:
        ConfigError: a module of the model is wrapped in it.
    """
    for name, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ConfigError(
                f"{clean_name(name) or 'it'} is wrapped in FullyShardedDataParallel (FSDP 1), which is not "
                'supported; use parallelize(model, "fsdp"), which shards it by fully_shard',
                argument="model",
            )


def refuse_meta(model: nn.Module) -> None:
    """Raise for a parameter or buffer on the meta device, which has a shape and no values.

    Raises:
        ConfigError: there is one.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"{clean_name(name)!r} is on the meta device, where tensors have no values; build the model on a real "
                "device, or call model.to_empty(device=...) and initialise or load every tensor, before the optimizer",
                argument="model",
            )


def try_folders(engine: Engine) -> None:
    """Check that the folders into which hooks will write can be created.

    Raises:
        ConfigError: a file is in place of a folder, or a folder is not writable.
    """
    for hook in engine.hooks:
        for name, value in vars(hook).items() if hook.writes and not hook._may_fail_to_write else ():
            if not isinstance(value, Path):
                continue
            path = value if value.is_absolute() or engine.workspace is None else engine.workspace / value
            nearest = next((place for place in (path, *path.parents) if place.exists()), None)
            owner = f"{type(hook).__name__}: {name.lstrip('_')}={os.fspath(value)!r}"
            if nearest is not None and nearest != path and not nearest.is_dir():
                raise ConfigError(f"{owner}: {os.fspath(nearest)!r} is a file, not a folder; choose another path")
            if nearest is not None and not os.access(nearest, os.W_OK):
                raise ConfigError(f"{owner}: {os.fspath(nearest)!r} cannot be written to; choose another path")


def try_evaluation(engine: Engine, loader: Iterable[Any], task: Task | None) -> list[str] | None:
    """Read and evaluate the first batch of a loader, with the metrics if there are any; discard the result.

    Args:
        engine: engine whose model and random state the evaluation uses.
        loader: loader of the evaluation; if it cannot be iterated twice, nothing is tried.
        task: turns a batch into a loss, and holds the metrics; None only collates the batch.

    Returns:
        The names of records and metrics; None if unknown.
    """
    if isinstance(loader, Iterator):
        return None
    cursor = Cursor()
    with evaluation_rules(engine.model, loader, eval_seed=engine.eval_seed):
        try:
            cursor.restart()
            cursor.open(loader)
            batches = cursor.take(1).batches
            if batches:
                warn_of_masks(engine, batches[0], training=False)
            if task is None or not batches:
                return None
            metrics = task.new_metrics() if isinstance(task, HasMetrics) else None
            if metrics:
                metrics.reset()
            with (
                engine.precision.autocast(),
                batch_named_in_errors(batches[0], "the evaluation, tried before step 1"),
            ):
                output = as_step_output(task.step(engine.model, batches[0]), training=False)
            _warn_of_loss(engine, output.loss, batches[0])
            records = ["/".join(path) for path in flatten_nested_dict(output.records or {})]
            if not metrics or output.outputs is None:
                return records if not metrics else None
            if not isinstance(metrics, EpochMetrics):
                update_of(metrics)(output.outputs)
                metrics.reset()
                return None
            measured = metrics.try_batch(output.outputs)
            return None if measured is None else [*records, *measured]
        finally:
            cursor.close()


def _warn_of_loss(engine: Engine, loss: Tensor | None, batch: Any) -> None:
    """Warn, before step 1, if the loss of an evaluation is not finite."""
    if loss is not None and not bool(loss.isfinite().all()):
        found = ", ".join(name or "the tensor" for name, _ in non_finite_in(batch))
        cause = f"its batch has values that are not finite in {found}" if found else "its batch is finite"
        engine.logger.warning(
            "the evaluation, tried before step 1, has a loss of %s on its first batch, so no epoch could be the best; "
            "%s",
            loss.detach().float().mean().tolist(), cause,
        )  # fmt: skip


def into_training_mode(engine: Engine) -> None:
    """Put every module into training mode, and warn about layers with frozen running statistics.

    A model entirely in eval mode was loaded for inference; no part of it was frozen on purpose.
    """
    model = engine.model
    frozen = [
        (name, module)
        for name, module in (model.named_modules() if model.training else ())
        if not module.training and getattr(module, "running_mean", None) is not None
    ]
    engine.state.modules.begin(model)
    into_training_point(engine.optimizer)
    thawed = [clean_name(name) for name, module in frozen if module.training]
    if thawed:
        engine.logger.warning(
            "model: %s with running statistics in eval mode (first: %s), now in training mode, as all modules are when "
            "training starts; to keep such a layer frozen, override train() of the model",
            number_of(len(thawed), "layer"), thawed[0],
        )  # fmt: skip


def check_added_hooks(engine: Engine) -> None:
    """Raise for a hook that was added too late for its declarations to take effect.

    Raises:
        ConfigError: it keeps averages, or has a plan for non-finite gradients.
    """
    late = [hook for hook in engine.hooks if all(hook is not asked for asked in engine.declared.hooks)]
    for hook in late:
        if type(hook).averages is not BaseHook.averages or type(hook).refusal_plan is not BaseHook.refusal_plan:
            raise ConfigError(
                f"{hook.state_key} was added too late, after a run, a load or an evaluation set up the hooks, so it "
                "would have no effect; pass it in hooks=[...]",
                argument="hooks",
            )


def try_hooks(engine: Engine) -> None:
    """Warn about names that users' hooks use in vain, and in a run with a folder collect the hooks' states.

    Raises:
        CheckpointError: a state holds a value that no checkpoint can hold.
    """
    if engine.progress.step or engine.state.loaded:
        return
    for hook in engine.hooks:
        kind = type(hook)
        if is_treadle_object(hook):
            continue
        for event in EVENTS:
            if getattr(kind, event) is not getattr(BaseHook, event):
                method, may_set = getattr(hook, event), engine.state.objects.may_set
                for text in names_in_vain(method, engine, may_set=may_set, place=f"{kind.__name__}.{event}"):
                    engine.logger.warning("%s", text)
        if kind.on_state_dict is not BaseHook.on_state_dict and engine.workspace is not None:
            _try_state(engine, hook)


def _try_state(engine: Engine, hook: BaseHook) -> None:
    tree: dict[str, Any] = {"hooks": {}}
    try:
        hook.on_state_dict(engine, tree)
    except Exception as error:  # noqa: BLE001  (it may need a step, or the rest of the state)
        engine.logger.debug("%s.on_state_dict was not tried before step 1: %s", type(hook).__name__, error)
    to_plain(tree["hooks"], "hooks")


def check_before_training(engine: Engine) -> None:
    """Raise or warn about what would silently train a wrong model.

    Raises:
        ConfigError: a parameter is lazy or on the meta device, the optimizer needs a closure or holds no parameter of
            the model, or the scheduler belongs to another optimizer.
    """
    _require_alike_hooks(engine)
    lazy = [name for name, parameter in engine.model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"lazy parameter {lazy[0]!r} is not initialised; run one batch through the model before building the "
            "optimizer",
            argument="model",
        )
    refuse_meta(engine.model)
    check_scheduler(engine.lr_scheduler, engine.optimizer)
    if engine.target.score_epoch is None:
        check_plateau(engine.lr_scheduler, "train_loss", "min")
    warn_of_lost(engine)
    engine.state.objects.collect()  # raises now, not at the first save, for a state that no checkpoint can hold
    refuse_hidden_tensors(engine.optimizer)
    if engine.progress.step == 0 and engine.num_ranks == 1 and not is_torch_optimizer(engine.optimizer):
        try_optimizer(engine.optimizer)
    try_schedule(engine)
    try_folders(engine)
    _warn_of_uncalled(engine)
    wanted = inspect.signature(engine.optimizer.step).parameters.get("closure")
    if wanted is not None and wanted.default is inspect.Parameter.empty:
        raise ConfigError(
            f"a {type(engine.optimizer).__name__} needs a closure that runs the model several times per step, but a "
            "step runs it once; use an optimizer whose step() needs no closure",
            argument="optimizer",
        )
    _warn_of_half_sums(engine)
    uncovered = uncovered_parameters(engine.model, engine.optimizer)
    engine.stray_parameters = [parameter for _, parameter in uncovered]
    groups = [group for optimizer in engine.state.objects.optimizers() for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    names = [name for name, parameter in uncovered if id(parameter) not in held]
    _warn_of_untrained_loss(engine, held)
    if names and len(names) == sum(parameter.requires_grad for parameter in engine.model.parameters()):
        raise ConfigError(
            f"it holds none of the {len(names)} trainable parameters of the model, so nothing would be trained; "
            "build it over model.parameters() of the model that you pass, after moving, wrapping or loading it",
            argument="optimizer",
        )
    _warn_of_lone_ranks(engine)
    if names:
        engine.logger.warning(
            "no optimizer group has %s that need gradients and will not be trained: %s",
            number_of(len(names), "parameter"), ", ".join(names[:10]),
        )  # fmt: skip


def _warn_of_untrained_loss(engine: Engine, held: Set[int]) -> None:
    """Warn if the parameters of the loss are neither in ``held``, by id, nor in the optimizer."""
    loss = getattr(getattr(engine.task, "trainer", None), "loss_fn", None)
    held = held | {id(parameter) for group in engine.optimizer.param_groups for parameter in group["params"]}
    of_loss = loss.parameters() if isinstance(loss, nn.Module) else ()
    if any(parameter.requires_grad and id(parameter) not in held for parameter in of_loss):
        engine.logger.warning(
            "loss_fn: the parameters of %s require gradients but are in no optimizer group, so they will not be "
            "trained; add them to the optimizer, or make the loss part of the model",
            type(loss).__name__,
        )


_OF_A_TASK = ("step", "weights", "new_metrics", "prepare_batch", "replayed", "with_metrics", "state_dict",
              "load_state_dict")  # fmt: skip


def _warn_of_uncalled(engine: Engine) -> None:
    """Warn about methods of the user's task with misspelt names."""
    kind = type(engine.task)
    if is_user_class(kind) and not engine.progress.step and not engine.state.num_runs:
        for warning in uncalled_methods(kind, object, known=_OF_A_TASK, foreign={"training_step": "step"}):
            engine.logger.warning("%s", warning)


def _require_alike_hooks(engine: Engine) -> None:
    """Raise ConfigError on all ranks if only some have a hook whose events wait for the others."""
    given = gather_objects([type(hook).__name__ for hook in engine.hooks if hook._on_all_ranks])
    for rank, names in enumerate(given):
        if names != given[0]:
            raise ConfigError(
                f"rank 0 has {', '.join(given[0]) or 'none'} and rank {rank} {', '.join(names) or 'none'}, whose work "
                "all ranks share; pass the same to all",
                argument="hooks",
            )


def _warn_of_lone_ranks(engine: Engine) -> None:
    """Warn once if nothing exchanges the gradients of several ranks, as far as the model shows."""
    launched = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if launched != "1" and not is_distributed():
        engine.state.warn_once(
            engine,
            f"torchrun started {launched} processes but no process group is initialized, so each trains by itself, on "
            "all data and in the same folder; call torch.distributed.init_process_group() before the trainer is "
            'created, and pass it parallel="ddp"',
        )
    if engine.num_ranks == 1 or engine.exchange.equal or is_sharded(engine.model):
        return
    inner = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in engine.model.modules())
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in engine.model.parameters())
    if not (inner or hooked):
        engine.state.warn_once(
            engine,
            f"the model is neither replicated nor sharded: each of the {engine.num_ranks} ranks trains a model by "
            'itself, and checkpoints hold that of rank 0; pass parallel="ddp" to the trainer, or use '
            'parallelize(model, "ddp") before the optimizer is built',
        )


def _warn_of_half_sums(engine: Engine) -> None:
    """Warn if gradients of several micro-batches accumulate in a dtype that drops small ones."""
    half = {torch.bfloat16, torch.float16}
    kinds = {p.dtype for group in engine.optimizer.param_groups for p in group["params"] if p.dtype in half}
    if kinds and engine.settings.accumulation_steps > 1:
        kind = str(kinds.pop()).removeprefix("torch.")
        engine.logger.warning(
            "weights are %s and so are their gradients, so the sum over %d micro-batches loses small ones (256 + 1 "
            "is 256 in bfloat16); keep the weights in float32 with mixed precision, or accumulate over fewer",
            kind, engine.settings.accumulation_steps,
        )  # fmt: skip
