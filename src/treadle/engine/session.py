"""Session of a run: what its hooks declare, how they are opened and closed, and what ranks exchange in a step."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treadle import distributed
from treadle.checkpoint.lock import is_used_again
from treadle.data.agreement import numbers_of_ranks
from treadle.engine.evaluation import EvaluationAbandoned
from treadle.engine.failure import errors_logged_with_rank
from treadle.engine.hook import BaseHook
from treadle.engine.objects_part import hooks_beginning
from treadle.engine.out_of_memory import explaining_out_of_memory
from treadle.engine.preflight import (
    check_added_hooks,
    check_before_training,
    into_training_mode,
    try_hooks,
)
from treadle.engine.run_log import run_log_shown
from treadle.engine.signal_exit import exit_by, exit_on_signal
from treadle.engine.single_samples import explaining_single_samples
from treadle.engine.skips import take_back_skipped
from treadle.engine.start_log import end_line, start_block, start_line
from treadle.errors import ConfigError
from treadle.optim.ema import Ema
from treadle.optim.late_flags import skips_on_device
from treadle.optim.late_skips import LateSkips, scales_on_device
from treadle.optim.nonfinite import BufferCopies, FiniteGuard, RefusalPlan
from treadle.seed import RngState, mix_seed

if TYPE_CHECKING:
    from treadle.engine.base import EngineBase
    from treadle.engine.loop import Engine


@dataclass(frozen=True)
class HookDeclarations:
    """Declarations of a run's hooks, collected once before any state is collected or loaded.

    Attributes:
        hooks: the hooks that were queried.
        averages: averaged models, by name.
        notices: callables whose values are exchanged between ranks in every step.
        complete: whether the hooks have been queried.
    """

    hooks: Sequence[BaseHook] = ()
    averages: Mapping[str, Ema] = field(default_factory=dict)
    notices: Sequence[Callable[[], float]] = ()
    complete: bool = False


def hook_declarations(engine: Engine) -> HookDeclarations:
    """Return what the hooks of an engine declare.

    Raises:
        ConfigError: two hooks share a state key, or two averages a name.
    """
    keys: set[str] = set()
    averages: dict[str, Ema] = {}
    for hook in engine.hooks:
        if hook.state_key in keys:
            raise ConfigError(
                f"two hooks have the state key {hook.state_key!r}; give one another name=, or override its state_key",
                argument="hooks",
            )
        keys.add(hook.state_key)
        for name, ema in hook.averages(engine).items():
            if name in averages:
                raise ConfigError(f"two averages are named {name!r}; give one another name=", argument="hooks")
            averages[name] = ema
    notices = [notice for hook in engine.hooks if (notice := hook.notice(engine)) is not None]
    return HookDeclarations(list(engine.hooks), averages, notices, complete=True)


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
        raise ConfigError(f"{' and '.join(plans)} both handle non-finite gradients; keep one of them", argument="hooks")
    return next(iter(plans.values()), None)


def _late_skips(engine: Engine) -> LateSkips | None:
    """Return the flags of steps in fp16, if the device can skip them alike on all ranks."""
    alike = engine.num_ranks == 1 or (engine.exchange.equal and not distributed.is_sharded(engine.model))
    if not (alike and scales_on_device(engine.precision, engine.optimizer, engine.device)):
        return None
    return LateSkips(engine.device, engine.precision, functools.partial(take_back_skipped, engine))


def finite_guard(engine: Engine) -> FiniteGuard:
    """Return the guard of the weights: on the device, unless the host must know of a refused step at once."""
    plan = refusal_plan(engine)
    must_know_now = bool(engine.max_non_finite_grad_retries) or plan is not None
    buffers = BufferCopies(engine.model) if must_know_now and plan is None else None  # a plan restores them itself
    skips = _late_skips(engine) if engine.precision.scaled and not must_know_now else None
    must_know_now |= engine.precision.scaled
    deferred = skips is not None or (not must_know_now and skips_on_device(engine.optimizer, engine.device))
    return FiniteGuard(
        deferred=deferred, can_wait=not must_know_now, plan=plan, agreed=engine.exchange.equal,
        num_ranks=engine.num_ranks, skips=skips, buffers=buffers,
    )  # fmt: skip


def resume_from_hooks(engine: Engine) -> None:
    """Load the checkpoint that a hook names, before any event of the first run; a manually loaded state wins."""
    state = engine.state
    if state.resumed or (engine.progress.step > 0 and not state.loaded):
        return  # this object continues from where it is
    for hook in engine.hooks:
        tree = hook.checkpoint_to_resume(engine)
        if tree is not None and state.loaded:
            engine.logger.warning("%s is ignored: a state was already loaded", type(hook).__name__)
        elif tree is not None:
            engine.load_state_dict(tree)
    state.record_resumed()  # not before: after an error here, the next run must not start from scratch


def pass_over(engine: Engine, loader: Iterable[Any]) -> None:
    """Pass over the loader of a run that has reached its target; warn if this object, or one in its folder, trained."""
    state, source = engine.state, engine.state.source
    is_shared = not state.num_runs and source is not None and is_used_again(Path(source).parent)
    engine.cursor.built.pass_over(loader)
    engine.logger.log(
        logging.WARNING if state.num_runs or is_shared else logging.INFO,
        "nothing to do: already at step %d, epoch %d (target of the whole run: %s); raise the target to train "
        "further%s",
        engine.progress.step, engine.epoch, engine.target,
        f", or give this run its own folder: another of this process used {source}" if is_shared else "",
    )  # fmt: skip


@contextlib.contextmanager
def training_session(engine: Engine) -> Iterator[None]:
    """Open hooks and signal handlers for a run, and always close them."""
    with run_log_shown(engine), contextlib.ExitStack() as held:
        signals = _begin_session(engine, held)
        plans = engine.signals.plans
        with engine.signals.listening(signals) as outermost:  # hooks that close may upload for minutes
            first_step, started = engine.progress.step, time.perf_counter()
            with _opened_hooks(engine):
                yield
            if distributed.rank() == 0:
                seconds = time.perf_counter() - started
                engine.logger.info(end_line(engine, first_step, seconds), extra={"topic": "end"})
            if outermost and engine.signals.received and plans:  # the final state is saved
                exit_by(plans, engine.signals.received)


@contextlib.contextmanager
def _opened_hooks(engine: Engine) -> Iterator[None]:
    """Open the hooks, exit on a signal at the end of the block, and always close them."""
    opened: list[BaseHook] = []
    failure: BaseException | None = None
    try:
        with errors_logged_with_rank(engine), explaining_out_of_memory(engine), explaining_single_samples(engine):
            with contextlib.suppress(EvaluationAbandoned):  # raised in a callback, or in a hook before the first step
                with hooks_beginning(engine):
                    for hook in engine.hooks:
                        opened.append(hook)
                        hook.on_before_train(engine)
                try_hooks(engine)
                engine.state.run_trial(engine)  # which may need what hooks create
                engine.events.cache_dispatch(engine.hooks)
                into_training_mode(engine)
                engine.state.begin_run(engine)
                yield
            exit_on_signal(engine)  # a signal after the last boundary must not be lost
    except BaseException as error:
        failure = error
        raise
    finally:
        engine.signals.expect([])
        engine.state.end_run(engine)
        engine.cursor.close()
        engine.eval_cursor.close()
        engine.exchange.close()
        if (end_run := getattr(engine.steps, "end_run", None)) is not None:  # of captured steps
            end_run()
        engine.events.clear_dispatch()
        close_hooks(engine, opened, failure)


@contextlib.contextmanager
def claimed_by_hooks(engine: Engine) -> Iterator[None]:
    """Hold, inside the block, what the hooks of an engine claim for a run."""
    with contextlib.ExitStack() as held:
        for hook in engine.hooks:
            held.enter_context(hook.claim(engine))
        yield


def _begin_session(engine: Engine, held: contextlib.ExitStack) -> list[int]:
    """Check a run and enter the claims of its hooks, before any event; return the signals to listen to."""
    with errors_logged_with_rank(engine):
        check_added_hooks(engine)
        for hook in engine.hooks:
            held.enter_context(hook.claim(engine))
        check_before_training(engine)
        engine.attempt.receive([])
        engine.events.begin()
        if engine.progress.forget_step():
            engine.logger.warning(
                "step %d was interrupted by an error; it counts and is not repeated. To continue without it, resume "
                "from a checkpoint in a new trainer", engine.progress.step,
            )  # fmt: skip
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


def own_notices(engine: Engine) -> list[float]:
    """Return the numbers that this rank sends in each step: a signal, whether to stop, those of hooks."""
    own = [float(engine.signals.received or 0), float(engine.should_stop)]
    return own + [notice() for notice in engine.declared.notices]


def notices_of_ranks(engine: EngineBase, notice: Callable[[], float]) -> list[float]:
    """Return the number that each rank sent for a hook in the current step."""
    if distributed.world_size() == 1:
        return [notice()]
    column = 2 + engine.declared.notices.index(notice)
    return [sent[column] for sent in engine.attempt.rank_notices]


def agree_to_stop(engine: Engine) -> bool:
    """Stop between two epochs if any rank does; return whether it stops."""
    engine.should_stop = bool(distributed.agree(int(engine.should_stop)))
    return engine.should_stop


def separate_streams() -> None:
    """Derive a random stream per rank from rank 0's, if ranks would draw the same numbers.

    This covers Python's, numpy's and torch's generators; generators that already differ are kept. Rank 0 draws as a
    single process does. Called once at the start of a run, after the weights exist, so that they can be initialized
    identically on all ranks.
    """
    if distributed.world_size() == 1:
        return
    state, rank = RngState.capture(), distributed.rank()
    rows = numbers_of_ranks([
        _digest(repr(state.python).encode()),
        _digest(state.numpy[1].tobytes() + bytes(str(state.numpy[2]), "ascii")),
        _digest(state.torch.numpy().tobytes()),
    ])  # fmt: skip
    for kind, seed in enumerate((random.seed, lambda n: np.random.seed(n % 2**32), torch.manual_seed)):
        if rows[rank][kind] in (row[kind] for row in rows[:rank]):
            seed(mix_seed(rows[0][kind], rank))


def _digest(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 1
