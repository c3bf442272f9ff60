"""Learning rate and batch size finders that leave the run unchanged to the bit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch

from treadle.engine import Engine
from treadle.engine.out_of_memory import is_out_of_memory
from treadle.engine.trial import TrialSteps, undone
from treadle.errors import ConfigError
from treadle.errors.arguments import check_above, check_least, check_whole, checked

_SMOOTHING = 0.9


@dataclass(frozen=True)
class LearningRates:
    """Losses of a trial with increasing learning rates.

    Attributes:
        rates: learning rates of the optimizer's first group, one per step.
        losses: smoothed losses, one per step.
        suggestion: the rate at which the loss falls fastest over the logarithm of the rate; None if it never falls.

    Example:
        >>> LearningRates([0.1, 1.0, 10.0], [3.0, 1.0, 5.0]).suggestion
        0.1
    """

    rates: Sequence[float]
    losses: Sequence[float]

    @property
    def suggestion(self) -> float | None:
        """Rate at which the loss falls fastest over a tenth of the steps; the noisy first tenth is skipped."""
        width = max(1, len(self.losses) // 10)
        lowest = min(range(len(self.losses)), key=self.losses.__getitem__, default=0)
        first = width if lowest >= 3 * width else 0
        falls = {
            index: fall
            for index in range(first, lowest - width + 1)
            if (fall := self.losses[index] - self.losses[index + width]) > 0
        }
        return self.rates[max(falls, key=falls.__getitem__) + width // 2] if falls else None


@checked
def find_learning_rate(
    trainer: Any,
    loader: Iterable[Any] | None = None,
    *,
    lowest: float = 1e-7,
    highest: float = 1.0,
    num_steps: int = 100,
    divergence: float = 4.0,
) -> LearningRates:
    """Try steps with increasing learning rates, then restore everything to the bit.

    Parameter groups keep the ratios of their rates. A trial ends early if the smoothed loss exceeds ``divergence``
    times its minimum, or a gradient is not finite. A later run equals a run without the trial in weights, buffers,
    optimizer, random numbers and order of the data.

    Args:
        trainer: any trainer, before it trains; its clipping, precision and accumulation are used.
        loader: micro-batches; None takes the data loader of a BaseTrainer.
        lowest: first rate of the optimizer's first group, > 0.
        highest: last rate, > ``lowest``.
        num_steps: number of steps, >= 2.
        divergence: ratio to the minimal loss that ends the trial, > 1.

    Returns:
        Rates and losses; ``suggestion`` is a rate to start from.

    Raises:
        ConfigError: a value is outside its range, there is no loader, or training is running.

    Example:
        >>> from treadle import Trainer
        >>> model = torch.nn.Linear(1, 1)
        >>> trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), device="cpu")
        >>> found = find_learning_rate(trainer, [(torch.ones(4, 1), torch.ones(4, 1))], num_steps=5)
        >>> len(found.rates)
        5
    """
    _check_search(lowest, highest, num_steps, divergence)
    engine, loader = _prepared(trainer, loader)
    rates, losses = list[float](), list[float]()
    mean = 0.0
    with undone(engine, loader) as steps:
        bases = [float(group["lr"]) or 1.0 for group in steps.optimizer.param_groups]
        for number in range(num_steps):
            rate = lowest * (highest / lowest) ** (number / (num_steps - 1))
            _set_rates(steps, [base / bases[0] * rate for base in bases])
            loss = steps.run()
            value = math.nan if loss is None else loss.item()
            if not math.isfinite(value):
                break
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
            rates.append(rate)
            losses.append(mean / (1 - _SMOOTHING ** (number + 1)))
            lowest_loss = min(losses)
            if losses[-1] - lowest_loss > (divergence - 1) * abs(lowest_loss):
                break
    return LearningRates(rates, losses)


def _check_search(lowest: float, highest: float, num_steps: Any, divergence: float) -> None:
    if not 0 < lowest < highest:
        raise ConfigError("must be > 0 and below highest", argument="lowest", value=lowest)
    check_whole(2, num_steps=num_steps)
    check_above(1, divergence=divergence)


@checked
def find_batch_size(
    trainer: Any,
    make_loader: Callable[[int], Iterable[Any]],
    *,
    start: int = 2,
    largest: int | None = None,
    num_steps: int = 2,
) -> int:
    """Return the largest batch size whose steps fit into memory, and restore everything to the bit.

    The size is doubled until memory runs out, then refined to an eighth. Leave some headroom: activations of later
    batches may be larger, and evaluations need memory too.

    Args:
        trainer: any trainer, before it trains.
        make_loader: returns a loader with the given batch size.
        start: the first size, >= 1.
        largest: the last size to try; None ends once a loader has a single batch.
        num_steps: steps with each size, >= 1; from the second one on the optimizer has state.

    Raises:
        ConfigError: a value is outside its range, or a loader without a length has no ``largest``.
        OutOfMemoryError: not even ``start`` fits; raised by torch.

    Example:
        >>> from treadle import Trainer
        >>> model = torch.nn.Linear(1, 1)
        >>> trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), device="cpu")
        >>> find_batch_size(trainer, lambda size: [(torch.ones(size, 1), torch.ones(size, 1))] * (8 // size))
        8
    """
    check_least(1, start=start, num_steps=num_steps, largest=largest)
    fits, fails, size = 0, math.inf, start
    while fits < size < fails:
        loader = make_loader(size)
        alone = isinstance(loader, Sized) and len(loader) <= 1
        if not isinstance(loader, Sized) and largest is None:
            raise ConfigError("the loader has no length; give the largest size to try", argument="largest", value=None)
        if _batch_size_fits(trainer, loader, num_steps, must=size == start):
            fits = size
            if fails == math.inf and (alone or size == largest):
                break
        else:
            fails = size
        size = 2 * fits if fails == math.inf else fits + int(fails - fits) // 2
        size = size if largest is None else min(size, largest)
        if fails - fits <= max(1, fits // 8):
            break
    return fits


def _batch_size_fits(trainer: Any, loader: Iterable[Any], num_steps: int, *, must: bool) -> bool:
    engine, loader = _prepared(trainer, loader)
    fits = True
    try:
        with undone(engine, loader) as steps:
            for _ in range(num_steps):
                steps.run()
    except BaseException as error:
        if must or not is_out_of_memory(error):
            raise
        fits = False
    if not fits:
        gc.collect()  # the error's frames hold tensors
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    return fits


def _prepared(trainer: Any, loader: Iterable[Any] | None) -> tuple[Engine, Iterable[Any]]:
    engine = trainer if isinstance(trainer, Engine) else getattr(trainer, "_engine", getattr(trainer, "engine", None))
    if not isinstance(engine, Engine):
        raise ConfigError("must be a trainer", argument="trainer", value=trainer)
    engine.prepare()
    loader = getattr(engine, "data_loader", None) if loader is None else loader
    if loader is None:
        raise ConfigError("pass the micro-batches of training", argument="loader", value=None)
    return engine, loader


def _set_rates(steps: TrialSteps, rates: Sequence[float]) -> None:
    for group, rate in zip(steps.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
