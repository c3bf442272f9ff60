"""Base class of all hooks, and the reference of the loop and its events.

The loop, with every event at its place::

    run(max_steps= | epochs=):                      # absolute targets
        load what a hook's `checkpoint_to_resume` names
        finished already -> log one line, return
        on_before_train
        while step < max_steps / epoch < epochs and no stop:
            open the epoch, or reopen it at the stored position
            while a group of 1..k micro-batches remains in this epoch:
                step += 1
                on_before_step
                repeat:
                    zero gradients
                    for each micro-batch: autocast(forward); scaled backward
                        ranks exchange weights, signal and stop once the last loss is there
                        ranks exchange gradients during the last backward
                    no loss on any rank -> not applied; leave
                    unscale; normalise once by the total weight; measure the norm
                    on_before_optimizer_step        # gradients are final but for clipping
                    finite on every rank -> clip; optimizer.step; scheduler; EMA; leave
                    otherwise -> lower the fp16 scale (leave) | a hook's refusal_plan continues without it (leave)
                                 | zero gradients; fresh group | NonFiniteError
                on_after_step
                write the requested checkpoints; leave at max_steps or after a signal
                captured steps run ahead in a block, as far as `steps_ahead` of every hook allows
            epoch complete: evaluate; best rule; scheduler; epoch += 1; append the record
            on_after_epoch
            write epoch checkpoints; user callbacks; then act on early stop
        on_after_train
    finally: on_close(error), hooks in reverse order

On several ranks, a signal or a stop on one of them takes effect once all have received it: at the end of this step or
of the next one.

`on_log`, `on_log_images`, `on_state_dict` and `on_load_state_dict` fire on the corresponding calls.

Which hooks override the three events of a step is determined after `on_before_train`, and again when hooks are added or
removed; a method set on a hook later than that is not called if the hook did not override it before.

A hook receives the engine as ``trainer``. Besides the eleven events it may *declare* seven values, on which the engine
acts: the averages it keeps, the checkpoint to resume from, what it locks for a run, what to do on a signal, what to do
with a step whose gradient is not finite, the number that ranks exchange for it in each step, and how many captured
steps may run until it must see one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from treadle.engine.block import StepBlock
    from treadle.engine.loop import Engine
    from treadle.engine.signals import ExitPlan
    from treadle.optim.ema import Ema
    from treadle.optim.nonfinite import RefusalPlan

EVENTS = (
    "on_before_train",
    "on_before_step",
    "on_before_optimizer_step",
    "on_after_step",
    "on_after_epoch",
    "on_after_train",
    "on_close",
    "on_log",
    "on_log_images",
    "on_state_dict",
    "on_load_state_dict",
)
Event = TypeVar("Event", bound=Callable[..., None])


STEP_EVENTS = ("on_before_step", "on_before_optimizer_step", "on_after_step")


def read_only(method: Event) -> Event:
    """Mark an ``on_before_optimizer_step`` that does not change gradients, so that their norm is not computed again.

    Example:
        >>> class Counts(BaseHook):
        ...     steps = 0
        ...     @read_only
        ...     def on_before_optimizer_step(self, trainer):
        ...         self.steps += 1
    """
    method.read_only = True  # type: ignore[attr-defined]
    return method


def capturable(method: Event) -> Event:
    """Mark an ``on_before_optimizer_step`` whose only effect is work launched on the device.

    Captured steps contain that work. The method itself is called while a step is recorded and tested, not in a replay.

    Example:
        >>> class Halve(BaseHook):
        ...     @capturable
        ...     def on_before_optimizer_step(self, trainer):
        ...         for parameter in trainer.model.parameters():
        ...             parameter.grad.mul_(0.5)
    """
    method.capturable = True  # type: ignore[attr-defined]
    return method


class BaseHook:
    """Base hook whose events are no-ops; subclass it and override what you need.

    Example:
        >>> class CountSteps(BaseHook):
        ...     def on_after_step(self, trainer):
        ...         print(trainer.step)
    """

    writes: bool = False
    """Whether the hook writes files or reports to a log or a tracker; ``treadle replay`` leaves such hooks out."""
    writes_in_workspace_alone: bool = False
    """Whether a hook that writes does its work in a trainer without a workspace, and writes nothing then."""
    _may_fail_to_write: bool = False
    _on_all_ranks: bool = False  # whether its events wait for other ranks, which must have it too

    replays: bool = False
    """Whether the hook runs a part of a run again; the trainer's own folder is neither read nor written then."""

    implicit: bool = False
    """Whether a face added the hook by itself; such a hook is not listed when a run starts."""

    idle: bool = False
    """Whether the hook has nothing to do in the steps of this run; looked up once, after ``on_before_train``."""

    @property
    def state_key(self) -> str:
        """Key of this hook's state in a checkpoint; unique among the hooks of a trainer."""
        return type(self).__name__

    # -- events ---------------------------------------------------------------------------------------------------

    def on_before_train(self, trainer: Engine) -> None:
        """Called once before the first step, after a checkpoint is loaded."""

    def on_before_step(self, trainer: Engine) -> None:
        """Called before each step; ``trainer.step`` already counts it."""

    def on_before_optimizer_step(self, trainer: Engine) -> None:
        """Called when the gradients are final except for clipping.

        Changes to the gradients are clipped and checked as well. On several ranks, make the same change on every rank:
        gradients have been all-reduced and are not compared again.
        """

    def on_after_step(self, trainer: Engine) -> None:
        """Called after each step, applied or not; see ``trainer.step_info``."""

    def on_after_epoch(self, trainer: Engine) -> None:
        """Called after an epoch is evaluated and counted."""

    def on_after_train(self, trainer: Engine) -> None:
        """Called once when training ends without an error."""

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Called at the very end, in reverse order, with the error that ended training, if any."""

    def on_log(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Called with aggregated records; ``dry_run`` does everything but write."""

    def on_log_images(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Called with nested images."""

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Called when a checkpoint is made; may set ``state_dict["hooks"][self.state_key]`` or a new key."""

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Called when a checkpoint is loaded, with the whole tree."""

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Called in place of ``on_after_step`` after several captured steps, where :meth:`steps_ahead` allows them.

        By default it calls ``on_after_step``, which sees the last of them.
        """
        self.on_after_step(trainer)

    # -- declarations ---------------------------------------------------------------------------------------------

    def averages(self, trainer: Engine) -> Mapping[str, Ema]:
        """Return the averaged models this hook keeps, by name; called once, before any load."""
        return {}

    def checkpoint_to_resume(self, trainer: Engine) -> Mapping[str, Any] | None:
        """Return the checkpoint to start from, or None; called before any event of a fresh run."""
        return None

    def claim(self, trainer: Engine) -> AbstractContextManager[None]:
        """Return a context that spans all events of a run, such as the lock of a folder.

        Entering it fails if another process holds the lock, before any hook has touched a file.
        """
        return contextlib.nullcontext()

    def exit_plan(self, trainer: Engine) -> ExitPlan | None:
        """Return the action on a signal, or None; called when training starts."""
        return None

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Return how many captured steps may run until this hook must see the last of them; None for any number.

        Called between two steps, on hooks that override an event of a step. 1 by default: the hook sees every step.
        In fp16 on CUDA, a step that no hook must see counts as applied until the host learns that it was skipped.
        """
        return 1

    def notice(self, trainer: Engine) -> Callable[[], float] | None:
        """Return a function whose result, a number, is gathered from all ranks in each step, or None; called once.

        ``trainer.rank_notices`` returns the numbers of all ranks; they travel with what a step exchanges anyway. All
        ranks must return a function, or all None.
        """
        return None

    def _save_end(self, trainer: Engine) -> None:
        """Save the state in which a front end left an epoch, if the hook saves the end of a run."""

    def wait_for_writes(self) -> None:
        """Wait until all background writes of this hook are on disk; may raise their error."""

    def refusal_plan(self, trainer: Engine) -> RefusalPlan | None:
        """Return the action for a step whose gradient is not finite, or None; called once, before any load."""
        return None


def listeners(hooks: Sequence[BaseHook], event: str) -> list[BaseHook]:
    """Return the hooks that override an event and are not idle, in order.

    Example:
        >>> listeners([BaseHook()], "on_after_step")
        []
    """
    nothing = getattr(BaseHook, event)
    does = [hook for hook in hooks if getattr(getattr(hook, event), "__func__", None) is not nothing]
    return [hook for hook in does if not hook.idle]


def reaches_hooks(method: Callable[..., None], event: str) -> Callable[..., None]:
    """Wrap an overridden ``log`` so that every hook receives the records exactly once, whatever the override does."""

    @functools.wraps(method)
    def served(trainer: Any, records: Mapping[str, Any], dry_run: bool = False) -> None:
        trainer.events.call_override(trainer, event, lambda: method(trainer, records, dry_run), records, dry_run)

    return served
