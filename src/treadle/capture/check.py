"""Comparison of a captured step with an eager one from the same state, which is restored."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.capture.compile import uncompiled
from treadle.capture.step import CapturedStep
from treadle.data.cursor import Group
from treadle.engine.attempt import clear_gradients
from treadle.seed import RngState
from treadle.task import StepOutput

if TYPE_CHECKING:
    from treadle.engine import Engine


class KeptState:
    """Copies of everything that a step changes, to restore it in place.

    Args:
        engine: engine whose state is copied.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._sizes = self._state_sizes()
        self.live = self._tensors()
        self._copies = [tensor.clone() for tensor in self.live]
        self.num_weights = len(list(engine.model.parameters()))  # weights come first
        self._rng = RngState.capture()

    def _tensors(self) -> list[Tensor]:
        engine = self._engine
        modules = [engine.model, *(average.module for average in engine.averages.values())]
        model = [value for module in modules for value in (*module.parameters(), *module.buffers())]
        state = [value for entries in engine.optimizer.state.values() for value in entries.values()]
        late = [] if engine.guard.late is None else engine.guard.late.moved
        return [value.detach() for value in [*model, *state, *late] if isinstance(value, Tensor)]

    def _state_sizes(self) -> dict[int, int]:
        return {id(parameter): len(entries) for parameter, entries in self._engine.optimizer.state.items()}

    @property
    def weights(self) -> list[Tensor]:
        """Saved weights."""
        return self._copies[: self.num_weights]

    def grew(self) -> bool:
        """Return whether the optimizer has created state since, and remove it."""
        state = self._engine.optimizer.state
        new = [parameter for parameter in state if id(parameter) not in self._sizes]
        for parameter in new:
            del state[parameter]
        return bool(new) or self._state_sizes() != self._sizes

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything."""
        torch._foreach_copy_(self.live, self._copies)
        self._rng.restore()
        clear_gradients(self._engine)


def what_differs(
    engine: Engine, step: CapturedStep, group: Group, kept: KeptState, *, largest: Callable[[float], float]
) -> str | None:
    """Compare a replay with an eager step from the same state; return the difference, if any.

    Args:
        engine: engine of the step.
        step: the captured step.
        group: group to run it with.
        kept: the state to restore.
        largest: returns the maximum of a number over ranks, which all run the same steps here.
    """

    def state_after(run: Callable[[], list[StepOutput]]) -> _After:
        kept.restore()
        step.prepare()
        losses = [output.loss.clone() for output in run() if output.loss is not None]
        state = [tensor.clone() for tensor in kept.live]
        return _After(losses, state, state[: kept.num_weights])

    replayed = state_after(lambda: step.replay(group)[1])
    before = _host_rng()
    eager = state_after(step.eager)
    drawn = _host_rng() != before
    difference = largest(replayed.largest_difference(eager))
    itself, kernels = 0.0, list[str]()
    if difference:
        itself = eager.largest_difference(state_after(step.eager))
        kernels = unordered_kernels(engine.model, lambda: state_after(step.eager))
    kept.restore()
    step.prepare()
    if drawn:
        return (
            "the step draws random numbers on the CPU, which every replay of a graph would reuse; draw them on the "
            "device, or in the data loader"
        )
    if not difference:
        return None
    if not ((itself or kernels) and replayed.is_like(eager, start=kept.weights)):
        return (
            f"a captured step differs from an eager one by up to {difference:.3g}: it depends on something that "
            "changes between calls, or its kernels are not deterministic"
        )
    engine.logger.warning(
        "capture: kernels of this step are not deterministic: %s. A captured and an eager step differ by up to %.3g, "
        "two eager ones by up to %.3g", ", ".join(kernels) or "torch does not name them", difference, itself,
    )  # fmt: skip
    return None


@dataclass(frozen=True)
class _After:
    """Result of a step: its losses, the tensors of :class:`KeptState`, and which of them are weights."""

    losses: list[Tensor]
    state: list[Tensor]
    weights: list[Tensor]

    def largest_difference(self, other: _After) -> float:
        """Return the largest difference between two tensors; 0 only if all are equal."""
        return _largest_difference([*self.losses, *self.state], [*other.losses, *other.state])

    def is_like(self, other: _After, *, start: Sequence[Tensor]) -> bool:
        """Return whether both differ only by rounding, even in half precision.

        The weights may differ by a quarter of the step's change: Adam turns a gradient that is 0 up to rounding, such
        as that of a key's bias, into a full step.

        Args:
            other: the result to compare with.
            start: the weights before the step.
        """
        pairs = list(zip(self.losses, other.losses, strict=True))
        if not all(torch.allclose(one.double(), two.double(), rtol=1e-2, equal_nan=True) for one, two in pairs):
            return False
        return _distance(self.weights, other.weights) <= 0.25 * _distance(start, other.weights)


_UNORDERED = re.compile(r"(.+?) (?:defaults to a non-deterministic algorithm|does not have a deterministic impl)")


def unordered_kernels(model: nn.Module, run: Callable[[], object]) -> list[str]:
    """Call a function and return torch's names of its non-deterministic kernels.

    Two calls may still agree: the order of additions also depends on what else the device does.

    Args:
        model: model that the function runs, uncompiled.
        run: the function to call.

    Example:
        >>> unordered_kernels(nn.ReLU(), lambda: torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2)))
        ['put_']
    """
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with uncompiled(model), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
        torch.set_warn_always(always)
    found = (_UNORDERED.match(str(warning.message)) for warning in caught)
    return sorted({match[1] for match in found if match})


def _host_rng() -> tuple[Any, ...]:
    plain = RngState.capture()
    _, keys, *rest = plain.numpy
    return plain.python, keys.tobytes(), rest, plain.torch.numpy().tobytes()


def _largest_difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference between tensors of the same shapes; 0 only if they are equal."""
    largest = 0.0
    for one, other in zip(some, others, strict=True):
        if torch.equal(one, other) or bool((one.isnan() & other.isnan()).all()):
            continue
        gap = (one.double() - other.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest = max(largest, float(gap.max()))
    return largest


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the Euclidean distance over all values, excluding values finite in neither."""
    squares = [
        (one.double() - other.double()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum()
        for one, other in zip(some, others, strict=True)
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
