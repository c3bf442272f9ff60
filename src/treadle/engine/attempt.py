"""One attempt at a step: its record, and how it ends as applied, skipped or refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from treadle import distributed
from treadle.data.cursor import Group
from treadle.engine.failure import non_finite_error
from treadle.engine.logits import warn_of_logits
from treadle.engine.masks import warn_of_masks
from treadle.engine.session import own_notices
from treadle.engine.settings import Outcome
from treadle.engine.signal_exit import exit_after_step
from treadle.engine.skips import decide_wait, follow_on_device
from treadle.means import Total, Weighted
from treadle.nested import as_number, flatten_nested_dict, map_nested_tensor
from treadle.optim.ema import Ema
from treadle.optim.gradients import Gradients, are_whole, total_norm
from treadle.optim.late_flags import LateRefusal
from treadle.optim.loss_weights import EqualWeights, GivenWeights, GroupWeights
from treadle.optim.nonfinite import SCALE_LOWERED
from treadle.task import StepOutput

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_NUMBERS = (float, int)
_OTHER_NAMES = {"non_finite_grad_retries": "retries", "non_finite_grad_retry_count": "retries"}


class StepInfo(dict[str, Any]):
    """Record of a step; its entries can also be read by their names in trainloop.

    Example:
        >>> StepInfo(retries=1)["non_finite_grad_retries"]
        1
    """

    def __missing__(self, key: str) -> Any:
        if key in _OTHER_NAMES:
            return self[_OTHER_NAMES[key]]
        raise KeyError(key)


class Attempt:
    """State of one attempt at a step.

    Args:
        group: its micro-batches.
        rates: learning rates of the parameter groups.
        tries: groups tried for the step, including this one.
        term_totals: counts of the loss terms over all micro-batches and ranks; None if no term has a count.
        num_ranks: number of ranks of the run.
        keeps_outputs: whether the record keeps the model's outputs, for tasks that need them after a replay.
        inspect: called with the first loss, which still has its graph; None for none.

    Attributes:
        info: the record that hooks read as ``trainer.step_info``.
        outputs: losses and records of the micro-batches, detached, on the device.
        rank_notices: numbers that each rank sent with this step: a signal, a stop, and one for each hook that requests
            it.

    Example:
        >>> attempt = Attempt(Group(["batch"], [0.0]))
        >>> attempt.record_output(StepOutput(torch.tensor(2.0), {"n": 3}))
        >>> attempt.info["loss"], attempt.outputs[0].records
        ([tensor(2.)], {'n': 3})
    """

    __slots__ = ("_inspect", "_keeps_outputs", "_num_ranks", "group", "info", "outputs", "rank_notices", "term_totals")

    def __init__(
        self,
        group: Group | None = None,
        *,
        rates: Sequence[Any] = (),
        tries: int = 1,
        term_totals: Mapping[str, float] | None = None,
        num_ranks: int = 1,
        keeps_outputs: bool = False,
        inspect: Callable[[Tensor], None] | None = None,
    ):
        self.group = Group() if group is None else group
        self.term_totals = term_totals
        self.outputs: list[StepOutput] = []
        self.rank_notices: list[list[float]] = []
        self.info: dict[str, Any] = StepInfo() if group is None else StepInfo({
            "loss": [], "weight": [], "records": [], "data_time": group.data_time, "lr": rates,
            "applied": False, "retries": tries - 1, "reason": None, "num_samples": 0,
        })  # fmt: skip
        self._num_ranks = num_ranks
        self._keeps_outputs = keeps_outputs
        self._inspect = inspect

    def record_output(self, output: StepOutput) -> None:
        """Add the detached loss and records of a micro-batch."""
        weight = 1.0 if output.weight is None else output.weight
        if self._inspect is not None and output.loss is not None:
            self._inspect(output.loss)
            self._inspect = None
        loss = None if output.loss is None else output.loss.detach()
        if self.term_totals is not None and loss is not None:
            # It is a share of the step's loss. The mean of the shares times their number is their sum, and with weights
            # of one over their number every step counts once.
            shares = len(self.group.batches) * self._num_ranks
            loss, weight = loss * shares, 1.0 / shares
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        outputs = map_nested_tensor(Tensor.detach, output.outputs) if self._keeps_outputs else None
        records = _detached(output.records)
        self.keep(StepOutput(loss, records, weight, output.reduction, outputs, output.num_samples))

    def keep(self, output: StepOutput) -> None:
        """Add an already detached output of a micro-batch."""
        self.outputs.append(output)
        info = self.info
        info["loss"].append(output.loss)
        info["weight"].append(output.weight)
        info["records"].append(output.records)
        info["num_samples"] += output.num_samples or 0

    def add_records(self, records: Mapping[str, Any]) -> None:
        """Add records to those of the latest micro-batch."""
        last = self.outputs[-1]
        self.outputs[-1] = replace(last, records={**last.records, **records})
        self.info["records"][-1] = self.outputs[-1].records

    def receive(self, notices: list[list[float]]) -> None:
        """Keep the numbers that each rank sent with this step."""
        self.rank_notices = notices

    def discard_outputs(self) -> None:
        """Drop losses and records: those of a refused attempt enter no mean."""
        self.outputs = []


def _refuse_other_than_numbers(records: Mapping[str, Any]) -> None:
    """Raise TypeError for a value in nested records that is no number."""
    for path, value in flatten_nested_dict(records).items():
        as_number(("records", *path), value.value if isinstance(value, (Total, Weighted)) else value)


def _detached(records: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return detached records: flat ones directly, nested ones by the rules for nested values.

    Raises:
        TypeError: a value is no number, before the step changes a weight.
    """
    flat: dict[str, Any] = {}
    for name, value in (records or {}).items():
        kind = type(value)
        if kind is Tensor:
            flat[name] = value.detach() if value.dim() == 0 else as_number(("records", name), value)
        elif kind in _NUMBERS:
            flat[name] = value
        else:
            if kind not in (Total, Weighted, dict):  # which are read where they are added up
                _refuse_other_than_numbers(records)
            return map_nested_tensor(Tensor.detach, records)
    return flat


def start_attempt(engine: Engine, group: Group) -> EqualWeights | GivenWeights | GroupWeights:
    """Clear the gradients and start the record of an attempt.

    Returns:
        The weights of its micro-batches, which also carry the messages between ranks.
    """
    clear_gradients(engine)
    totals = _sum_term_counts(engine, group.batches)
    begin_record(engine, group, totals)
    if engine.guard.weights is not None:
        return engine.guard.weights
    return GroupWeights(
        len(group.batches), device=engine.precision.device, undivided=totals is not None,
        largest=engine.settings.accumulation_steps, num_ranks=engine.num_ranks, notices=lambda: own_notices(engine),
    )  # fmt: skip


def begin_record(engine: Engine, group: Group, term_totals: Mapping[str, float] | None = None) -> None:
    """Start the record of an attempt."""
    rates = engine.progress.begin_attempt(len(group.batches), engine.optimizer)
    engine.attempt = Attempt(
        group, rates=rates, tries=engine.progress.tries, term_totals=term_totals, num_ranks=engine.num_ranks,
        keeps_outputs=engine.guard.recording and hasattr(engine.task, "replayed"),
        inspect=partial(warn_of_logits, engine) if engine.progress.step <= 1 and engine.progress.tries == 1 else None,
    )  # fmt: skip
    if engine.guard.plan is not None:
        engine.guard.plan.watch()
    if engine.guard.buffers is not None:
        engine.guard.buffers.update()
    if engine.progress.step <= 1 and group.batches:
        warn_of_masks(engine, group.batches[0], training=True)


def counts_terms(engine: Engine, batch: Any) -> bool:
    """Return whether the task divides each term of a batch's loss by a count."""
    weights_of = getattr(engine.task, "weights", None)
    return weights_of is not None and weights_of(batch) is not None


def _sum_term_counts(engine: Engine, batches: Sequence[Any]) -> Mapping[str, float] | None:
    """Sum the counts of each loss term over the group and the ranks, before the first forward."""
    # Called in each step, in which isinstance against a protocol would take as long as two layers of the model.
    weights_of: Callable[[Any], Mapping[str, float] | None] | None = getattr(engine.task, "weights", None)
    if weights_of is None:
        return None
    totals: dict[str, float] = {}
    for batch in batches:
        counts = weights_of(batch)
        if counts is None:
            return None
        for term, count in counts.items():
            totals[term] = totals.get(term, 0.0) + float(count)
    summed = distributed.sum_over_ranks(torch.tensor(list(totals.values()), dtype=torch.float64))
    return dict(zip(totals, summed.tolist(), strict=True))


def run_gradient_hooks(engine: Engine, grads: Sequence[Tensor]) -> tuple[Gradients, Tensor]:
    """Call ``on_before_optimizer_step``.

    Returns:
        The gradients and their norm after the hooks: their changes are clipped and checked.
    """
    before = [(id(grad), grad._version) for grad in grads]
    hooks = engine.events.hooks_for(engine.hooks, "on_before_optimizer_step")
    engine.events.emit(engine, "on_before_optimizer_step")
    left = Gradients.of(engine.optimizer)
    may_differ = not all(getattr(hook.on_before_optimizer_step, "read_only", False) for hook in hooks)
    # The norm of sharded gradients takes a collective, and a hook that reads it may be on one rank only.
    if may_differ and (are_whole(left) or [(id(grad), grad._version) for grad in left] != before):
        engine.attempt.info["grad_norm"] = total_norm(left)
    norm: Tensor = engine.attempt.info["grad_norm"]
    return left, norm


def skip(engine: Engine, reason: str) -> Outcome:
    """Skip a step that has nothing to apply."""
    engine.attempt.info["reason"] = reason
    engine.precision.skipped()
    clear_gradients(engine)
    return "skipped"


def refuse(engine: Engine) -> Outcome:
    """Refuse a non-finite gradient: lower the fp16 scale if possible, else follow a hook or retry on new data."""
    info = engine.attempt.info
    if engine.precision.refused():
        info["reason"] = SCALE_LOWERED
        clear_gradients(engine)
        return "skipped"
    info["reason"] = "non-finite gradient"
    if engine.guard.buffers is not None:
        engine.guard.buffers.restore()
    skips = engine.guard.plan is not None and engine.guard.plan.refused()
    clear_gradients(engine)
    if skips:
        engine.attempt.discard_outputs()  # a non-finite loss must not enter the means
    return "skipped" if skips else "refused"


def apply_step_effects(engine: Engine, moved: Collection[Ema] = ()) -> Outcome:
    """Advance what follows applied steps: counters, schedule, averages; for those in ``moved`` the counter only."""
    if engine.guard.recording:
        return "applied"  # nothing changed: see treadle.capture
    if engine.guard.skips is not None and engine.guard.skips.open:
        on_device = follow_on_device(engine, engine.guard.skips, moved)
        if on_device is None:
            clear_gradients(engine)
            return "skipped"
        moved = on_device
    engine.precision.applied()
    scheduler = engine.lr_scheduler if engine.settings.scheduler_interval == "step" else None
    moves = scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau)  # that one moves with epochs
    engine.progress.apply(engine.attempt.info["lr"], moves_schedule=moves)
    if scheduler is not None and moves:
        scheduler.step()
    for ema in engine.declared.averages.values():
        if ema in moved:
            ema.count_update()
        else:
            ema.update(engine.model, applied_steps=engine.progress.applied_steps)
    return "applied"


def finish_step(engine: Engine, outcome: Outcome) -> None:
    """Close the record of a step, call ``on_after_step``, write the requested files, and exit on a signal."""
    attempt = engine.attempt
    attempt.info["applied"] = outcome == "applied"
    if outcome == "refused":
        attempt.discard_outputs()
    attempt.info["step_time"] = engine.progress.end_step(attempt.outputs)
    if engine.target.deadline is not None and engine.target.deadline.over:
        engine.should_stop = True
    engine.events.emit(engine, "on_after_step")
    engine.events.write_requested()
    if engine.guard.skips is not None:
        decide_wait(engine, engine.guard.skips)
    if engine.events.held:
        engine.events.hold_exit()
    elif engine.signals.plans:
        exit_after_step(engine)


def raise_late_refusal(engine: Engine, late: LateRefusal) -> None:
    """Raise NonFiniteError for a step that the device refused and the host noticed later.

    The optimizer skipped that step and every later one, so the weights and its state are those of the last applied
    step. The schedule and the averages in memory are ahead by as many updates; the saved state is checked first.
    """
    engine.progress.subtract_applied(late.undone)
    for average in () if engine.guard.skips is None else engine.averages.values():
        average.count_update(-late.undone)  # in fp16 the device left it unchanged
    clear_gradients(engine)
    raise non_finite_error(engine, late.place, late.norm)


def clear_gradients(engine: Engine) -> None:
    """Set every gradient to None, including those of parameters in no optimizer."""
    optimizer = engine.optimizer
    if type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
        for group in optimizer.param_groups:  # like zero_grad(), which takes longer than a small layer
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=True)
    for parameter in engine.stray_parameters:
        parameter.grad = None
