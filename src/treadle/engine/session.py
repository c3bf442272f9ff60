"""Session of a run: checks before it, opening and closing of hooks, signals at step boundaries."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.parameter import is_lazy

from treadle import distributed
from treadle.checkpoint.introspection import is_users_class
from treadle.distributed.state_names import clean_name
from treadle.engine.evaluation import EvaluationAbandoned
from treadle.engine.failure import failing_by_name
from treadle.engine.first_save import refuse_hidden_tensors, try_optimizer
from treadle.engine.hook import BaseHook
from treadle.engine.names import uncalled_methods
from treadle.engine.objects_part import warn_of_lost
from treadle.engine.out_of_memory import explaining_out_of_memory
from treadle.engine.rehearsal import try_folders, try_schedule
from treadle.engine.signals import ExitPlan
from treadle.engine.single_samples import explaining_single_samples
from treadle.engine.start_log import end_line, start_block, start_line
from treadle.engine.streams import separate_streams
from treadle.engine.voice import speaking
from treadle.errors import ConfigError
from treadle.optim.ema import Ema
from treadle.optim.evaluation_point import into_training_point
from treadle.optim.nonfinite import FiniteGuard, RefusalPlan, skips_on_device
from treadle.optim.optimizer import check_scheduler, is_of_torch, uncovered_parameters
from treadle.optim.schedules import check_plateau

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


@dataclass(frozen=True)
class Declared:
    """Declarations of a run's hooks, collected once before any state is collected or loaded.

    Attributes:
        hooks: the hooks that were queried.
        averages: averaged models, by name.
        messages: callables whose values are exchanged between ranks in every step.
        complete: whether the hooks have been queried.
    """

    hooks: Sequence[BaseHook] = ()
    averages: Mapping[str, Ema] = field(default_factory=dict)
    messages: Sequence[Callable[[], float]] = ()
    complete: bool = False


def declared_by_hooks(engine: Engine) -> Declared:
    """Return what the hooks of an engine declare.

    Raises:
        ConfigError: two hooks share a state key, or two averages a name.
    """
    keys: set[str] = set()
    averages: dict[str, Ema] = {}
    for hook in engine.hooks:
        if hook.state_key in keys:
            raise ConfigError(
                f"two hooks have the state key {hook.state_key!r}; pass another name= to one if it takes one, "
                "else override state_key in one",
                argument="hooks",
            )
        keys.add(hook.state_key)
        for name, ema in hook.averages(engine).items():
            if name in averages:
                raise ConfigError(f"two averages are named {name!r}; pass another name= to one", argument="hooks")
            averages[name] = ema
    messages = [message for hook in engine.hooks if (message := hook.notice(engine)) is not None]
    return Declared(list(engine.hooks), averages, messages, complete=True)


def leave_out_writers(engine: Engine) -> None:
    """Remove writing hooks and the workspace from a short trial run."""
    engine.workspace = None
    left_out = [hook for hook in engine.hooks if hook.writes and not hook.writes_in_workspace_alone]
    engine.hooks = [hook for hook in engine.hooks if hook not in left_out]
    named = [hook.state_key for hook in left_out if not hook.implicit]
    engine.logger.info(
        "fast_dev_run=%s: a short trial; nothing is written or resumed%s",
        engine.settings.limits.fast_dev_run, f", without {', '.join(named)}" if named else "",
        extra={"topic": "trial"},
    )  # fmt: skip


def refusal_plan(engine: Engine) -> RefusalPlan | None:
    """Return the plan of the hook that decides about non-finite gradients, or None.

    Raises:
        ConfigError: two hooks return a plan.
    """
    plans = {hook.state_key: plan for hook in engine.hooks if (plan := hook.refusal_plan(engine)) is not None}
    if len(plans) > 1:
        raise ConfigError(
            f"{' and '.join(plans)} both decide about non-finite gradients; keep one of them", argument="hooks"
        )
    return next(iter(plans.values()), None)


def finite_guard(engine: Engine) -> FiniteGuard:
    """Return the guard of the weights: on the device, unless the host must know of a refused step at once."""
    plan = refusal_plan(engine)
    must_know_now = bool(engine.max_non_finite_grad_retries) or engine.precision.scaled or plan is not None
    deferred = not must_know_now and skips_on_device(engine.optimizer, engine.device)
    return FiniteGuard(
        deferred=deferred, can_wait=not must_know_now, plan=plan, agreed=engine.exchange.equal,
        num_ranks=engine.num_ranks,
    )  # fmt: skip


def resume_from_hooks(engine: Engine) -> None:
    """Load the checkpoint that a hook names, before any event of the first run; a manually loaded state wins."""
    state = engine.state
    if state.resumed or (engine.progress.step > 0 and not state.loaded):
        return  # this object continues from where it is
    for hook in engine.hooks:
        tree = hook.checkpoint_to_resume(engine)
        if tree is not None and state.loaded:
            engine.logger.warning("%s: a state was loaded already and wins", type(hook).__name__)
        elif tree is not None:
            engine.load_state_dict(tree)
    state.record_resumed()  # not before: after an error here, the next run must not start from scratch


@contextlib.contextmanager
def training_session(engine: Engine) -> Iterator[None]:
    """Open hooks and signal handlers for a run, and always close them."""
    with speaking(engine), contextlib.ExitStack() as held:
        signals = _make_ready(engine, held)
        plans = engine.signals.plans
        with engine.signals.listening(signals) as outermost:  # hooks that close may upload for minutes
            first_step, started = engine.progress.step, time.perf_counter()
            with _opened_hooks(engine):
                yield
            if distributed.rank() == 0:
                seconds = time.perf_counter() - started
                engine.logger.info(end_line(engine, first_step, seconds), extra={"topic": "end"})
            if outermost and engine.signals.received and plans:  # the final state is saved
                _exit(plans, engine.signals.received)


@contextlib.contextmanager
def _opened_hooks(engine: Engine) -> Iterator[None]:
    """Open the hooks, exit on a signal at the end of the block, and always close them."""
    opened: list[BaseHook] = []
    failure: BaseException | None = None
    try:
        with failing_by_name(engine), explaining_out_of_memory(engine), explaining_single_samples(engine):
            with contextlib.suppress(EvaluationAbandoned):  # raised in a callback, or in a hook before the first step
                for hook in engine.hooks:
                    opened.append(hook)
                    hook.on_before_train(engine)
                engine.state.look_again()
                engine.events.cache_dispatch(engine.hooks)
                into_training_mode(engine)
                engine.state.begin_run(engine)
                yield
            leave_on_signal(engine)  # a signal after the last boundary must not be lost
    except BaseException as error:
        failure = error
        raise
    finally:
        engine.signals.expect([])
        engine.state.end_run(engine)
        engine.cursor.close()
        engine.eval_cursor.close()
        engine.exchange.close()
        engine.events.clear_dispatch()
        close_hooks(engine, opened, failure)


@contextlib.contextmanager
def held_by_hooks(engine: Engine) -> Iterator[None]:
    """Hold, inside the block, what the hooks of an engine claim for a run."""
    with contextlib.ExitStack() as held:
        for hook in engine.hooks:
            held.enter_context(hook.claim(engine))
        yield


class BetweenRuns:
    """Handling of signals around the runs of a front end, and before, between and after them.

    Args:
        engine: the running engine.

    Example:
        >>> # with BetweenRuns(engine) as between: ...
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._plans = [plan for hook in engine.hooks if (plan := hook.exit_plan(engine)) is not None]
        self._listening = engine.signals.listening([number for plan in self._plans for number in plan.signals])

    def __enter__(self) -> BetweenRuns:
        self._listening.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._listening.__exit__(*failure)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Save and exit, at the end of the block, if a signal has arrived; evaluations are abandoned."""
        self._engine.signals.expect(self._plans)
        try:
            with contextlib.suppress(EvaluationAbandoned):
                yield
            leave_on_signal(self._engine)
        finally:
            self._engine.signals.expect([])


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
            "model: %d layers with running statistics were in eval mode (first: %s) and are in training mode now, as "
            "every module is when training starts; to keep them frozen, override train() of the model",
            len(thawed), thawed[0],
        )  # fmt: skip


def check_added_hooks(engine: Engine) -> None:
    """Raise for a hook that was added too late for what it declares.

    Raises:
        ConfigError: it keeps averages, or has a plan for non-finite gradients.
    """
    late = [hook for hook in engine.hooks if all(hook is not asked for asked in engine.declared.hooks)]
    for hook in late:
        if type(hook).averages is not BaseHook.averages or type(hook).refusal_plan is not BaseHook.refusal_plan:
            raise ConfigError(
                f"{hook.state_key} was added after a run, a state or an evaluation had asked the hooks what "
                "they declare, so it would do nothing; pass it with the others, before all of these",
                argument="hooks",
            )


def _make_ready(engine: Engine, held: contextlib.ExitStack) -> list[int]:
    """Check a run and enter the claims of its hooks, before any event; return the signals to listen to."""
    with failing_by_name(engine):
        check_added_hooks(engine)
        for hook in engine.hooks:
            held.enter_context(hook.claim(engine))
        check_before_training(engine)
        engine.state.run_trial(engine)
        engine.attempt.receive([])
        engine.events.abandoned = False
        if engine.progress.in_step:
            engine.logger.warning(
                "step %d was interrupted by an error: it counts and is not repeated; to continue without it, resume "
                "from a checkpoint in a new trainer", engine.progress.step,
            )  # fmt: skip
        engine.progress.in_step = False
        if engine.progress.step == 0 and not engine.state.loaded:
            separate_streams()
    signals = engine.signals.expect([plan for hook in engine.hooks if (plan := hook.exit_plan(engine)) is not None])
    if distributed.rank() == 0:
        engine.logger.info(start_block(engine), extra={"topic": "start block", "short": start_line(engine)})
    return signals


def close_hooks(engine: Engine, opened: list[BaseHook], failure: BaseException | None) -> None:
    """Close hooks in reverse order; an error in one neither keeps others open nor hides ``failure``."""
    first: BaseException | None = None
    for hook in reversed(opened):
        try:
            hook.on_close(engine, failure)
        except Exception as error:  # noqa: BLE001  (raised below, once every hook is closed)
            engine.logger.error("%s.on_close failed: %s", type(hook).__name__, error)
            first = first or error
    if first is not None and failure is None:
        raise first


def check_before_training(engine: Engine) -> None:
    """Raise or warn about what would silently train a wrong model.

    Raises:
        ConfigError: a lazy parameter is not initialised, the optimizer needs a closure or holds no parameter of the
            model, or the scheduler belongs to another optimizer.
    """
    lazy = [name for name, parameter in engine.model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"lazy parameter {lazy[0]!r} is not initialised, so no optimizer or average can hold it; "
            "run one batch through the model before building the optimizer",
            argument="model",
        )
    check_scheduler(engine.lr_scheduler, engine.optimizer)
    if engine.target.score_epoch is None:
        check_plateau(engine.lr_scheduler, "train_loss", "min")
    warn_of_lost(engine)
    engine.state.objects.collect()  # raises now, not at the first save, for a state that no checkpoint can hold
    refuse_hidden_tensors(engine.optimizer)
    if engine.progress.step == 0 and engine.num_ranks == 1 and not is_of_torch(engine.optimizer):
        try_optimizer(engine.optimizer)
    try_schedule(engine)
    try_folders(engine)
    _warn_of_uncalled(engine)
    wanted = inspect.signature(engine.optimizer.step).parameters.get("closure")
    if wanted is not None and wanted.default is inspect.Parameter.empty:
        raise ConfigError(
            f"a {type(engine.optimizer).__name__} needs a closure that runs the model several times per step; "
            "here a step runs it once. Use an optimizer whose step() needs no closure",
            argument="optimizer",
        )
    _warn_of_half_sums(engine)
    uncovered = uncovered_parameters(engine.model, engine.optimizer)
    engine.stray_parameters = [parameter for _, parameter in uncovered]
    groups = [group for optimizer in engine.state.objects.optimizers() for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    names = [name for name, parameter in uncovered if id(parameter) not in held]
    if names and len(names) == sum(parameter.requires_grad for parameter in engine.model.parameters()):
        raise ConfigError(
            f"none of the {len(names)} trainable parameters of the model is in it, so nothing would be trained; build "
            "it over model.parameters() of the model that you pass, after the model was moved, wrapped or loaded",
            argument="optimizer",
        )
    if names:
        engine.logger.warning(
            "%d parameters require gradients but are in no optimizer group and will not be trained: %s",
            len(names), ", ".join(names[:10]),
        )  # fmt: skip


_OF_A_TASK = ("step", "weights", "new_metrics", "prepare_batch", "replayed", "with_metrics", "state_dict",
              "load_state_dict")  # fmt: skip


def _warn_of_uncalled(engine: Engine) -> None:
    """Warn about methods of the user's task with misspelt names."""
    kind = type(engine.task)
    if is_users_class(kind) and not engine.progress.step and not engine.state.num_runs:
        for warning in uncalled_methods(kind, object, known=_OF_A_TASK, foreign={"training_step": "step"}):
            engine.logger.warning("%s", warning)


def _warn_of_half_sums(engine: Engine) -> None:
    """Warn if gradients of several micro-batches accumulate in a dtype that drops small ones."""
    half = {torch.bfloat16, torch.float16}
    kinds = {p.dtype for group in engine.optimizer.param_groups for p in group["params"] if p.dtype in half}
    if kinds and engine.settings.accumulation_steps > 1:
        kind = str(kinds.pop()).removeprefix("torch.")
        engine.logger.warning(
            "weights are %s and so are their gradients, so the sum over %d micro-batches loses small ones (256 + 1 is "
            "256 in bfloat16); keep the weights in float32 and use mixed precision, or accumulate over fewer",
            kind, engine.settings.accumulation_steps,
        )  # fmt: skip


def own_messages(engine: Engine) -> list[float]:
    """Return the numbers that this rank sends in each step: a signal, whether to stop, those of hooks."""
    own = [float(engine.signals.received or 0), float(engine.should_stop)]
    return own + [message() for message in engine.declared.messages]


def messages_of_ranks(engine: Engine, message: Callable[[], float]) -> list[float]:
    """Return the number that each rank sent for a hook in the current step."""
    if distributed.world_size() == 1:
        return [message()]
    column = 2 + engine.declared.messages.index(message)
    return [sent[column] for sent in engine.attempt.rank_messages]


def ranks_stop(engine: Engine) -> bool:
    """Return whether any rank stops between two epochs, and stop this one too."""
    engine.should_stop = bool(distributed.agree(int(engine.should_stop)))
    return engine.should_stop


def leave_after_step(engine: Engine) -> None:
    """Exit like :func:`leave_on_signal`, based on the messages of the step, without further communication."""
    if engine.num_ranks == 1 or engine.events.abandoned:
        leave_on_signal(engine)
    elif engine.signals.plans:
        _leave(engine, int(max((sent[0] for sent in engine.attempt.rank_messages), default=0)))


def interruption(engine: Engine) -> Callable[[], bool] | None:
    """Return a callable that is True once a signal should abandon the evaluation; None if none should.

    No evaluation is abandoned inside a step: a hook cut short there would leave wrong gradients, and an unfinished step
    has no state to save.
    """
    if not engine.signals.plans or engine.progress.in_step:
        return None
    return lambda: bool(distributed.agree(engine.signals.received or 0))


def leave_on_signal(engine: Engine) -> None:
    """If a signal arrived on any rank, save by each hook's plan, wait, and raise SystemExit."""
    if engine.signals.plans:
        _leave(engine, distributed.agree(engine.signals.received or 0))


def _leave(engine: Engine, received: int) -> None:
    if not received:
        return
    plans = [plan for plan in engine.signals.plans if received in plan.signals] or engine.signals.plans
    engine.logger.warning("signal %d: saving at step %d and exiting", received, engine.progress.step)
    for plan in plans:
        plan.write()
    wait = max(plan.wait for plan in plans)
    if wait > 0:
        time.sleep(wait)
    _exit(plans, received)


def _exit(plans: Sequence[ExitPlan], received: int) -> NoReturn:
    """Exit by the first of the plans."""
    if received == signal.SIGINT and hasattr(sys, "ps1"):  # an interactive prompt or notebook, which must stay open
        raise KeyboardInterrupt
    raise SystemExit(plans[0].exit_code(received))
