"""Whether a captured step gives the numbers of an eager one, tried from the same state, which is put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.bookkeeping import clear_gradients
from treadle.captured_step import CapturedStep
from treadle.data.cursor import Group
from treadle.seed import RngState
from treadle.task import StepOutput

if TYPE_CHECKING:
    from treadle.engine import Engine


class KeptState:
    """Copies of all that a step changes, to put it back in place.

    Args:
        engine: whose state.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._sizes = self._state_sizes()
        self.live = self._tensors()
        self._copies = [tensor.clone() for tensor in self.live]
        self._rng = RngState.capture()

    def _tensors(self) -> list[Tensor]:
        engine = self._engine
        modules = [engine.model, *(average.module for average in engine.averages.values())]
        model = [value for module in modules for value in (*module.parameters(), *module.buffers())]
        state = [value for entries in engine.optimizer.state.values() for value in entries.values()]
        return [value.detach() for value in [*model, *state] if isinstance(value, Tensor)]

    def _state_sizes(self) -> dict[int, int]:
        return {id(parameter): len(entries) for parameter, entries in self._engine.optimizer.state.items()}

    def grew(self) -> bool:
        """Returns whether the optimizer made state since, and takes it away again."""
        state = self._engine.optimizer.state
        new = [parameter for parameter in state if id(parameter) not in self._sizes]
        for parameter in new:
            del state[parameter]
        return bool(new) or self._state_sizes() != self._sizes

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        torch._foreach_copy_(self.live, self._copies)
        self._rng.restore()
        clear_gradients(self._engine)


def what_differs(engine: Engine, step: CapturedStep, group: Group, kept: KeptState) -> str | None:
    """Compares a replay with an eager step from the same state; returns what is wrong, if anything is."""

    def state_after(run: Callable[[], list[StepOutput]]) -> tuple[list[Tensor], list[Tensor]]:
        kept.restore()
        step.prepare()
        outputs = run()
        losses = [output.loss.clone() for output in outputs if output.loss is not None]
        return losses, [*losses, *(tensor.clone() for tensor in kept.live)]

    losses, replayed = state_after(lambda: step.replay(group)[1])
    before = _host_rng()
    own_losses, eager = state_after(step.eager)
    drawn = _host_rng() != before
    difference = _largest_difference(replayed, eager)
    itself = _largest_difference(eager, state_after(step.eager)[1]) if difference else 0.0
    kept.restore()
    step.prepare()
    if drawn:
        return (
            "the step draws random numbers on the CPU, which would be drawn once and used for ever; draw them on the "
            "device, or in the data loader"
        )
    if difference and not (itself and _are_close(losses, own_losses)):
        return (
            f"a captured step gives other numbers than an eager one, {difference:.3g} apart at most: it depends on "
            "something that changes from call to call, or its kernels do"
        )
    if difference:
        engine.logger.warning(
            "capture: kernels of this step do not give the same bits twice (atomic additions, most often): two eager "
            "steps differ by %.3g at most, a captured and an eager one by %.3g; torch.use_deterministic_algorithms "
            "names the kernels", itself, difference,
        )  # fmt: skip
    return None


def _are_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Returns whether losses differ by rounding only, also in half precision."""
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(one.double(), other.double(), rtol=1e-2, equal_nan=True) for one, other in pairs)


def _host_rng() -> tuple[Any, ...]:
    plain = RngState.capture()
    _, keys, *rest = plain.numpy
    return plain.python, keys.tobytes(), rest, plain.torch.numpy().tobytes()


def _largest_difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Returns the largest difference between tensors of the same shapes; 0 only where they are equal."""
    largest = 0.0
    for one, other in zip(some, others, strict=True):
        if torch.equal(one, other) or bool((one.isnan() & other.isnan()).all()):
            continue
        gap = (one.double() - other.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest = max(largest, float(gap.max()))
    return largest
