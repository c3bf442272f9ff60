"""Leaving a run at a signal: save by the plans of the hooks, and raise SystemExit."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from treadle import distributed
from treadle.engine.evaluation import EvaluationAbandoned
from treadle.engine.signals import ExitPlan

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class SignalsBetweenRuns:
    """Handling of signals around the runs of a front end, and before, between and after them.

    Args:
        engine: the running engine.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._plans = [plan for hook in engine.hooks if (plan := hook.exit_plan(engine)) is not None]
        self._listening = engine.signals.listening([number for plan in self._plans for number in plan.signals])

    def __enter__(self) -> SignalsBetweenRuns:
        self._listening.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._listening.__exit__(*failure)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Save and exit, at the end of the block, if a signal has arrived; evaluations are abandoned."""
        self._engine.signals.expect(self._plans)
        try:
            with contextlib.suppress(EvaluationAbandoned):
                yield
            exit_on_signal(self._engine)
        finally:
            self._engine.signals.expect([])


def exit_after_step(engine: Engine) -> None:
    """Exit like :func:`exit_on_signal`, based on the messages of the step, without further communication."""
    if engine.num_ranks == 1 or engine.events.abandoned:
        exit_on_signal(engine)
    elif engine.signals.plans:
        _save_and_exit(engine, int(max((sent[0] for sent in engine.attempt.rank_notices), default=0)))


def interruption(engine: Engine) -> Callable[[], bool] | None:
    """Return a callable that is True once a signal should abandon the evaluation; None if none should.

    No evaluation is abandoned inside a step: a hook cut short there would leave wrong gradients, and an unfinished step
    has no state to save.
    """
    if not engine.signals.plans or engine.progress.in_step:
        return None
    return lambda: bool(distributed.agree(engine.signals.received or 0))


def exit_on_signal(engine: Engine) -> None:
    """If a signal arrived on any rank, save by each hook's plan, wait, and raise SystemExit."""
    if engine.signals.plans:
        _save_and_exit(engine, distributed.agree(engine.signals.received or 0))


def _save_and_exit(engine: Engine, received: int) -> None:
    if not received:
        return
    plans = [plan for plan in engine.signals.plans if received in plan.signals] or engine.signals.plans
    engine.logger.warning("%s: saving at step %d and exiting", _name_of(received), engine.progress.step)
    for plan in plans:
        plan.write()
    wait = max(plan.wait for plan in plans)
    if wait > 0:
        time.sleep(wait)
    exit_by(plans, received)


def _name_of(number: int) -> str:
    """Return the name of a signal, with its key on a terminal.

    Example:
        >>> _name_of(15)
        'SIGTERM'
    """
    if number == signal.SIGINT:
        return "SIGINT (Ctrl-C)"
    return signal.Signals(number).name if number in [*signal.Signals] else f"signal {number}"


def exit_by(plans: Sequence[ExitPlan], received: int) -> NoReturn:
    """Exit by the first of the plans."""
    if received == signal.SIGINT and hasattr(sys, "ps1"):  # an interactive prompt or notebook, which must stay open
        raise KeyboardInterrupt
    raise SystemExit(plans[0].exit_code(received))
