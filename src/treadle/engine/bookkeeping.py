"""What a step writes down about itself, and how it ends when it is not applied."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from treadle import distributed
from treadle.data.cursor import Group
from treadle.engine.session import leave_after_step, notices
from treadle.engine.settings import Outcome
from treadle.errors import NonFiniteError
from treadle.nested import map_nested_tensor
from treadle.optim.ema import Ema
from treadle.optim.gradients import Gradients, are_whole, total_norm
from treadle.optim.loss_weights import GivenWeights, GroupWeights
from treadle.optim.nonfinite import Place
from treadle.task import StepOutput, add_output

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


def begin_step(engine: Engine) -> None:
    """Counts a step and tells the hooks."""
    engine.step += 1
    engine.tries = 1
    engine.step_started = time.perf_counter()
    engine.emit("on_before_step")


def start_attempt(engine: Engine, group: Group) -> tuple[dict[str, Any], GroupWeights | GivenWeights]:
    """Clears the gradients and drops what is known of a refused attempt.

    Returns:
        A fresh record of the step, and what weighs its micro-batches and carries what ranks tell each other.
    """
    clear_gradients(engine)
    begin_attempt(engine, group)
    engine.term_totals = _sum_term_counts(engine, group.batches)
    if engine.guard.weights is not None:
        return engine.step_info, engine.guard.weights
    weights = GroupWeights(
        len(group.batches), device=engine.device, undivided=engine.term_totals is not None,
        largest=engine.accumulation_steps, num_ranks=engine.num_ranks, notices=lambda: notices(engine),
    )  # fmt: skip
    return engine.step_info, weights


def begin_attempt(engine: Engine, group: Group) -> None:
    """Begins the record of an attempt."""
    engine.group = group
    engine.micro_steps += len(group.batches)
    rates = _frozen_rates(engine)
    if not engine.epoch_applied_steps:
        engine.last_lr = rates
    engine.step_outputs = []
    engine.step_info = {
        "loss": [], "weight": [], "records": [], "data_time": group.data_time, "lr": rates,
        "applied": False, "retries": engine.tries - 1, "reason": None, "num_samples": 0,
    }  # fmt: skip
    if engine.guard.plan is not None:
        engine.guard.plan.watch()


def _frozen_rates(engine: Engine) -> list[Any]:
    """Returns the learning rates; of a tensor, which is changed in place, a copy of its present value."""
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    for rate in rates:
        if isinstance(rate, Tensor):
            break
    else:
        return rates
    state = [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates]
    copied_from, copies = engine.rates_copied
    if copied_from != state:  # they move with the schedule, if there is one
        copies = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        engine.rates_copied = state, copies
    return copies


def clear_gradients(engine: Engine) -> None:
    """Lets go of every gradient, also of parameters that no optimizer holds."""
    optimizer = engine.optimizer
    if type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
        for group in optimizer.param_groups:  # as torch's own does, which takes longer over it than over a small layer
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=True)
    for parameter in engine.stray_parameters:
        parameter.grad = None


def counts_terms(engine: Engine, batch: Any) -> bool:
    """Returns whether the task divides each term of a batch's loss by a count of its own."""
    weights_of = getattr(engine.task, "weights", None)
    return weights_of is not None and weights_of(batch) is not None


def _sum_term_counts(engine: Engine, batches: Sequence[Any]) -> Mapping[str, float] | None:
    """Sums the counts of each loss term over the group and the ranks, before the first forward."""
    # Asked each step, and whether a task is a WeighsTerms takes isinstance as long as two of the model's layers.
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


def note_output(engine: Engine, output: StepOutput) -> None:
    """Keeps a micro-batch's loss and records on the device, free of their graph."""
    weight = 1.0 if output.weight is None else output.weight
    loss = None if output.loss is None else output.loss.detach()
    if engine.term_totals is not None and loss is not None:
        # It is one share of the step's loss. A mean of shares times their number is their sum, and weights of one over
        # their number let every step count once.
        shares = len(engine.group.batches) * engine.num_ranks
        loss, weight = loss * shares, 1.0 / shares
    records = map_nested_tensor(Tensor.detach, output.records) if output.records else {}
    weight = weight.detach() if isinstance(weight, Tensor) else weight
    outputs = None
    if engine.guard.recording and hasattr(engine.task, "replayed"):  # it wants them after each replay
        outputs = map_nested_tensor(Tensor.detach, output.outputs)
    keep_output(engine, StepOutput(loss, records, weight, output.reduction, outputs, output.num_samples))


def show_gradients(engine: Engine, grads: Sequence[Tensor]) -> tuple[Gradients, Tensor]:
    """Shows the gradients of a step to the hooks.

    Returns:
        The gradients and their norm, as the hooks left them: what they changed is clipped and judged.
    """
    before = [(id(grad), grad._version) for grad in grads]
    heard = engine.hears("on_before_optimizer_step")
    engine.emit("on_before_optimizer_step")
    left = Gradients.of(engine.optimizer)
    may_differ = not all(getattr(hook.on_before_optimizer_step, "looks_only", False) for hook in heard)
    # The norm of gradients that are spread over ranks is a collective, and a hook that looks may be on one rank alone.
    if may_differ and (are_whole(left) or [(id(grad), grad._version) for grad in left] != before):
        engine.step_info["grad_norm"] = total_norm(left)
    norm: Tensor = engine.step_info["grad_norm"]
    return left, norm


def keep_output(engine: Engine, kept: StepOutput) -> None:
    """Adds a micro-batch's output, free of its graph, to the record of the step."""
    engine.step_outputs.append(kept)
    info = engine.step_info
    info["loss"].append(kept.loss)
    info["weight"].append(kept.weight)
    info["records"].append(kept.records)
    info["num_samples"] += kept.num_samples or 0


def skip(engine: Engine, reason: str) -> Outcome:
    """Gives a step up that has nothing to apply."""
    engine.step_info["reason"] = reason
    engine.precision.skipped()
    clear_gradients(engine)
    return "skipped"


def refuse(engine: Engine) -> Outcome:
    """Refuses a non-finite gradient: lowers the fp16 scale where possible, else asks a hook or for other data."""
    if engine.precision.refused():
        engine.step_info["reason"] = "non-finite gradient: the fp16 scale was lowered"
        clear_gradients(engine)
        return "skipped"
    engine.step_info["reason"] = "non-finite gradient"
    goes_on = engine.guard.plan is not None and engine.guard.plan.refused()
    clear_gradients(engine)
    if goes_on:
        engine.step_outputs = []  # a loss that is not finite belongs to no mean
    return "skipped" if goes_on else "refused"


def move_on(engine: Engine, moved: Collection[Ema] = ()) -> Outcome:
    """Moves what moves with applied steps only: counters, schedule, averages; of those in ``moved`` the counter."""
    if engine.guard.recording:
        return "applied"  # nothing changed: see treadle.capture
    engine.precision.applied()
    engine.applied_steps += 1
    engine.epoch_applied_steps += 1
    engine.last_lr = engine.step_info["lr"]
    if engine.lr_scheduler is not None and moves_each_step(engine):
        engine.lr_scheduler.step()
    for ema in engine.averages.values():
        if ema in moved:
            ema.count_update()
        else:
            ema.update(engine.model, applied_steps=engine.applied_steps)
    return "applied"


def moves_each_step(engine: Engine) -> bool:
    """Returns whether the scheduler moves with every applied step; a plateau scheduler never does."""
    return engine.scheduler_interval == "step" and not isinstance(engine.lr_scheduler, ReduceLROnPlateau)


def place_of(engine: Engine) -> Place:
    """Returns where the present step stands."""
    return Place(engine.step, engine.epoch, engine.cursor.position, len(engine.step_info["loss"]), engine.tries)


def non_finite_error(engine: Engine, place: Place | None = None, norm: Tensor | None = None) -> NonFiniteError:
    """Returns the error of a step whose gradient is not finite and whose retries are used up."""
    at = place_of(engine) if place is None else place
    measured = float(engine.step_info.get("grad_norm", math.nan) if norm is None else norm)
    first = max(at.position - at.num_batches + 1, min(at.position, 1))
    where = f"batch {at.position}" if first == at.position else f"batches {first} to {at.position}"
    return NonFiniteError(
        f"the gradient of step {at.step} is not finite (norm {measured}) after {at.tries} "
        f"{'try' if at.tries == 1 else 'tries'}: {where} of epoch "
        f"{at.epoch + 1}. The weights are those of the last applied step ({engine.applied_steps}). Look at that "
        "batch, lower the learning rate, clip gradients, or set max_non_finite_grad_retries",
        step=at.step, norm=measured, epoch=at.epoch, batch_index=at.position, tries=at.tries,
    )  # fmt: skip


def settle(engine: Engine, *, wait: bool = True) -> None:
    """Raises NonFiniteError if a step was refused on the device and the host did not look until now.

    The optimizer skipped that step and whatever came after it, so the weights and its state are those of the last
    applied step. The schedule and the averages in memory are as many updates ahead; what is saved is settled before.

    Args:
        engine: whose steps.
        wait: for all steps so far; False looks at what the host has been told already.
    """
    late = engine.guard.late_refusal(wait=wait)
    if late is None:
        return
    engine.applied_steps -= late.undone
    engine.epoch_applied_steps -= late.undone
    clear_gradients(engine)
    raise non_finite_error(engine, late.place, late.norm)


def finish_step(engine: Engine, outcome: Outcome) -> None:
    """Closes the record of a step, tells the hooks, writes what they ask for, and leaves if a signal says so."""
    info = engine.step_info
    info["applied"] = outcome == "applied"
    info["step_time"] = time.perf_counter() - engine.step_started
    if outcome == "refused":
        engine.step_outputs = []  # as on a retry, the discarded group is in no mean
    for output in engine.step_outputs:
        add_output(engine.epoch_means, output)
    engine.emit("on_after_step")
    engine.write_requested()
    if engine.exit_plans:
        leave_after_step(engine)
