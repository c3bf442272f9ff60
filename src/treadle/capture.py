"""The step replayed as one CUDA graph: forward, backward, clip and update launched at once, with the same numbers.

What is captured is :meth:`Engine.train_step` itself. The first step of every shape runs as ever, so that the optimizer
has its state; before the second, the step is warmed up and recorded, weights, optimizer and random numbers are put
back, and one replay is compared with one eager step to the bit. Schedule and averages move beside the graph.

The learning rate becomes a tensor on the device, in float32, which the schedule changes in place. An eager run whose
learning rate is a tensor has the same numbers; one whose learning rate is a Python number rounds in float64.

A gradient that is not finite is left out by the optimizer on the device, and so is every step after it until the host
has seen it: some steps later, and before anything is saved, logged or evaluated. Parameters have no ``grad`` then that
a hook could look at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from treadle.bookkeeping import (
    Outcome,
    begin_attempt,
    clear_gradients,
    counts_terms,
    keep_output,
    move_on,
    place_of,
    refuse,
    settle,
    skip,
)
from treadle.cuda_graph import CudaGraph, FixedBatch, Results, capturable, shape_of, tensors_of
from treadle.data.cursor import Group
from treadle.errors import ConfigError
from treadle.guard import FiniteGuard, Place, ReplayFlags, Verdict, skipping, skips_on_device
from treadle.hooks.base import listeners
from treadle.nested import map_nested_tensor
from treadle.seed import RngState
from treadle.task import StepOutput

if TYPE_CHECKING:
    from treadle.engine import Engine

Capture = bool | Literal["auto"]
_PLAIN = (int, float, bool, tuple, str, type(None))
_MAX_GRAPHS = 32


def check_capture(capture: Any) -> Capture:
    """Returns the setting.

    Raises:
        ConfigError: it is another value.

    Example:
        >>> check_capture("auto")
        'auto'
    """
    if capture is True or capture is False or capture == "auto":
        return capture  # type: ignore[no-any-return]
    raise ConfigError(f"capture={capture!r}: use True, False or 'auto'")


Steps = Callable[[Group], Outcome]


def steps_of(engine: Engine) -> Steps:
    """Returns how the steps of an engine are run.

    Raises:
        ConfigError: ``capture=True`` and something makes it impossible.
    """
    if engine.capture is False:
        return engine.train_step
    reason = _why_not(engine)
    if reason is None:
        return CapturedSteps(engine)
    _refuse(engine, reason)
    return engine.train_step


def _refuse(engine: Engine, reason: str) -> None:
    if engine.capture is True:
        raise ConfigError(f"capture=True: {reason}; or use capture='auto' or False")
    engine.logger.warning("capture='auto': steps are not captured: %s", reason)


def _why_not(engine: Engine) -> str | None:
    """Returns what makes capturing impossible, as far as that is known before the first step."""
    from treadle.engine import Engine as Base

    listening = [hook.state_key for hook in listeners(engine.hooks, "on_before_optimizer_step")]
    observed = [name for name in ("pre", "post") if getattr(engine.optimizer, f"_optimizer_step_{name}_hooks", None)]
    if engine.device.type != "cuda":
        return f"the device is {engine.device}; CUDA graphs need a CUDA device"
    if engine.num_ranks > 1:
        return f"there are {engine.num_ranks} ranks, and what they tell each other in a step cannot be captured"
    if engine.precision.scaled:
        return "fp16 scales gradients by decisions of the host; use bf16"
    if not skips_on_device(engine.optimizer, engine.device):
        return (
            f"{type(engine.optimizer).__name__} cannot leave out a step on the device; build it with fused=True in "
            "every parameter group"
        )
    if listening:
        return f"{', '.join(listening)} acts before the optimizer's step, which is inside the graph; leave it out"
    if observed:
        return "the optimizer has step hooks, which would run while it is captured only; remove them"
    if type(engine).train_step is not Base.train_step:
        return f"{type(engine).__name__} has a train_step of its own"
    return None


class CapturedSteps:
    """Replays the steps of an engine, one graph for each shape of their data.

    Args:
        engine: whose steps.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._steps: dict[Any, _CapturedStep] = {}
        self._met: set[Any] = set()
        self._parameters = list(engine.model.parameters())
        self._num_loads = engine.num_loads
        self._off = False
        self._settled_state = False  # whether the optimizer has all of its state
        self._rates: list[Tensor] = []
        self._flags = ReplayFlags(engine.device) if engine.guard.deferred else None
        engine.guard.replays = self._flags

    def __call__(self, group: Group) -> Outcome:
        """Runs one step: by a graph, or eagerly where there is none for the shape of its data yet."""
        engine = self._engine
        if self._off:
            return engine.train_step(group)
        self._forget_if_loaded()
        self._keep_rates_on_device()
        group, weights = self._prepared(group)
        step = None if 0.0 in weights else self._step_for(group, weights)
        if step is None:
            outcome = engine.train_step(group)
            self._settled_state |= outcome == "applied"
            return outcome
        if engine.guard.waits or (self._flags is not None and self._flags.raised):
            settle(engine)
        return step.run(group, weights)

    def _prepared(self, group: Group) -> tuple[Group, list[float | None]]:
        """Lets the task do the host's part of the step; returns also the weights that the host knows."""
        prepare: Callable[..., tuple[Any, float | None]] | None = getattr(self._engine.task, "prepare_batch", None)
        if prepare is None:
            return group, [None] * len(group.batches)
        pairs = [prepare(self._engine.model, batch) for batch in group.batches]
        batches, weights = [batch for batch, _ in pairs], [weight for _, weight in pairs]
        return Group(batches, group.data_time, group.sample_ids), weights

    def _forget_if_loaded(self) -> None:
        """Drops the graphs after a state was loaded: it lies in other memory."""
        if self._num_loads != self._engine.num_loads:
            self._num_loads = self._engine.num_loads
            self._steps, self._met, self._settled_state = {}, set(), False

    def _keep_rates_on_device(self) -> None:
        """Makes each learning rate a tensor of the device, also after somebody has set a number."""
        groups = self._engine.optimizer.param_groups
        if len(self._rates) != len(groups):
            self._rates = [torch.zeros((), dtype=torch.float32, device=self._engine.device) for _ in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            if group["lr"] is not rate:
                value = group["lr"]
                rate.copy_(value) if isinstance(value, Tensor) else rate.fill_(value)
                group["lr"] = rate

    def _step_for(self, group: Group, weights: list[float | None]) -> _CapturedStep | None:
        """Returns the captured step for a group, captured now if it is time for it; None for an eager one."""
        shapes = [shape_of(batch) for batch in group.batches]
        unknown = [shape for shape in shapes if isinstance(shape, str)]
        if unknown:
            self._give_up(
                f"a batch holds a {unknown[0]}, whose tensors cannot be kept in fixed memory; give tensors, tuples, "
                "dicts or dataclasses (graphs: pad them, see treadle.graphs.pad_batch)"
            )
            return None
        # One micro-batch's weight changes no gradient, those of several scale their losses.
        scales = tuple(weights) if len(weights) > 1 else None
        key = tuple(shapes), scales, self._settings()
        if key not in self._steps and self._is_time_for(key):
            if len(self._steps) >= _MAX_GRAPHS:
                self._give_up(f"there are more than {_MAX_GRAPHS} shapes of data; pad it into a few", known=True)
                return None
            self._capture(key, group, knows_weight=weights[0] is not None)
        return self._steps.get(key)

    def _settings(self) -> tuple[Any, ...]:
        """Returns what is written into a graph besides the data: a change of it needs another one."""
        engine = self._engine
        groups = [
            tuple(value for name, value in group.items() if name != "lr" and isinstance(value, _PLAIN))
            for group in engine.optimizer.param_groups
        ]
        trained = tuple([parameter.requires_grad for parameter in self._parameters])
        return engine.model.training, engine.grad_clip, tuple(groups), trained

    def _is_time_for(self, key: Any) -> bool:
        if self._settled_state and key in self._met:
            return True
        self._met.add(key)
        return False

    def _give_up(self, reason: str, *, known: bool = False) -> None:
        """Says why steps are not captured; from here on none is."""
        self._off = True
        if known:
            self._engine.logger.warning("capture: from step %d on steps are eager: %s", self._engine.step, reason)
        else:
            _refuse(self._engine, reason)

    def _capture(self, key: Any, group: Group, *, knows_weight: bool) -> None:
        """Records the step for groups of this shape and checks it against an eager one; leaves the state as it was."""
        engine = self._engine
        if counts_terms(engine, group.batches[0]):
            self._give_up("the terms of the loss are counted on the host in each step")
            return
        settle(engine)
        kept = _Kept(engine)
        try:
            share = next(iter(self._steps.values()), None)
            step = _CapturedStep(engine, group, self._flags, share=share, knows_weight=knows_weight)
            if kept.grew():
                kept.restore()
                return  # a parameter got its first gradient: another eager step makes the rest of the state
            kept.restore()
            problem = _check(engine, step, group, kept)
            if self._flags is not None:
                self._flags.refused.zero_()  # of a trial
        except RuntimeError as error:
            kept.restore()
            self._give_up(f"the step cannot be captured: {_first_line(error)}. {_HINT}")
            return
        except BaseException:
            kept.restore()
            raise
        if problem is not None:
            self._give_up(problem)
            return
        self._steps[key] = step
        shown = "" if len(self._steps) == 1 else f" for a further shape of data ({len(self._steps)})"
        engine.logger.info("step %d: captured as one CUDA graph%s", engine.step, shown)


_HINT = (
    "A captured step reads nothing from the device (no .item(), .cpu(), printing or branching on a tensor) and keeps "
    "its shapes"
)


class _CapturedStep:
    """One graph and its memory.

    Args:
        engine: whose step.
        group: micro-batches of the shape.
        flags: where a step leaves word of a refusal; None where the host reads that of each step.
        share: another step whose graph's memory is used too.
        knows_weight: whether the host knows the weight of each group, which is above 0.
    """

    def __init__(
        self,
        engine: Engine,
        group: Group,
        flags: ReplayFlags | None,
        *,
        share: _CapturedStep | None,
        knows_weight: bool,
    ):
        self._engine = engine
        self._flags = flags
        in_place = getattr(engine.cursor.loader, "num_buffers", None) == 1 and len(group.batches) == 1
        self._inputs = [FixedBatch(batch, engine.device, in_place=in_place) for batch in group.batches]
        self._guard = _RecordingGuard(flags, knows_weight=knows_weight)
        self._graph: CudaGraph = CudaGraph(share=None if share is None else share._graph)
        with _aside(engine, self._guard):
            self._left: _Left = self._graph.record(self._recorded, prepare=lambda: clear_gradients(engine))
        clear_gradients(engine)

    def _recorded(self) -> _Left:
        engine = self._engine
        with capturable(engine.optimizer):
            self._train()
        return _Left(engine.step_outputs, engine.step_info["grad_norm"], device=engine.device)

    def _train(self) -> None:
        batches = [inputs.batch for inputs in self._inputs]
        if self._engine.train_step(Group(batches, [0.0] * len(batches))) != "applied":
            raise RuntimeError("a micro-batch had no loss, which only the host can decide")

    def eager(self) -> list[StepOutput]:
        """Runs the same step without the graph; returns its outputs."""
        with _aside(self._engine, self._guard):
            self._train()
            return self._engine.step_outputs

    def replay(self, group: Group) -> tuple[Tensor, list[StepOutput]]:
        """Fills the memory, launches the graph and returns the norm and the outputs."""
        for inputs, batch in zip(self._inputs, group.batches, strict=True):
            inputs.fill(batch)
        self._graph.replay()
        return self._left.read()

    def run(self, group: Group, weights: Sequence[float | None]) -> Outcome:
        """Runs one step and notes what it gave, as an eager one does."""
        engine = self._engine
        begin_attempt(engine, group)
        engine.step_info["grad_norm"], outputs = norm, _ = self.replay(group)
        for output, weight in zip(outputs, weights, strict=True):
            keep_output(engine, output if weight is None else replace(output, weight=weight))
        if self._flags is not None and not self._guard.weight_on_device:
            self._flags.note(place_of(engine), norm)
            return move_on(engine)
        bad, uncounted = self._guard.flags.tolist()
        if uncounted:
            return skip(engine, "the total weight is 0")
        return refuse(engine) if bad else move_on(engine)


class _Left:
    """What a captured step leaves for the host.

    Args:
        outputs: of its micro-batches.
        norm: of its gradient.
        device: what lies elsewhere is a constant.
    """

    def __init__(self, outputs: list[StepOutput], norm: Tensor, *, device: torch.device):
        def is_left(value: Any) -> bool:
            return isinstance(value, Tensor) and value.device == device

        self._outputs = outputs
        self._tensors = [norm]
        self._places: list[tuple[int | None, int | None, bool]] = []
        for output in outputs:
            loss = self._place(output.loss) if is_left(output.loss) else None
            weight = self._place(output.weight) if is_left(output.weight) else None
            tensors = [tensor for tensor in tensors_of(output.records) if is_left(tensor)]
            self._places.append((loss, weight, bool(tensors)))
            self._tensors += tensors
        self._device = device
        self._results = Results(self._tensors)

    def _place(self, tensor: Any) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def read(self) -> tuple[Tensor, list[StepOutput]]:
        """Returns copies of the norm and the outputs, as the latest replay left them."""
        found = self._results.read()
        outputs = []
        at = 1
        for output, (loss, weight, has_records) in zip(self._outputs, self._places, strict=True):
            at += (loss is not None) + (weight is not None)
            records = output.records
            if has_records:
                rest = iter(found[at:])

                def copy(tensor: Tensor, rest: Iterator[Tensor] = rest) -> Tensor:
                    return next(rest) if tensor.device == self._device else tensor

                records = map_nested_tensor(copy, records)
                at += sum(tensor.device == self._device for tensor in tensors_of(records))
            outputs.append(
                StepOutput(
                    output.loss if loss is None else found[loss], records,
                    output.weight if weight is None else found[weight], output.reduction,
                    num_samples=output.num_samples,
                )
            )  # fmt: skip
        return found[0], outputs


class _RecordingGuard(FiniteGuard):
    """Leaves the decision to the device and reads nothing.

    Args:
        replays: where a refusal is told; None: :attr:`flags` of each step is read.
        knows_weight: whether the host knows that something counts.

    Attributes:
        flags: whether the gradient is not finite, and whether nothing counts.
        weight_on_device: whether the device knows the step's weight, and the host does not.
    """

    recording = True

    def __init__(self, replays: ReplayFlags | None, *, knows_weight: bool):
        super().__init__()
        self._knows_weight = knows_weight
        self._replays = replays
        self._found: Tensor | None = None
        self.flags = torch.zeros(())
        self.weight_on_device = False

    def judge(self, norm: Tensor, total_weight: float | Tensor) -> Verdict:
        """Computes the flags."""
        self.weight_on_device = isinstance(total_weight, Tensor) and not self._knows_weight
        if self._replays is not None and not self.weight_on_device:
            self._found = self._replays.raise_for(norm)
            return Verdict(finite=True, counted=True)
        bad = ~torch.isfinite(norm)
        nothing = ~(total_weight > 0) if isinstance(total_weight, Tensor) else torch.zeros_like(bad)
        self.flags = torch.stack([bad, nothing])
        self._found = self.flags.any().float()
        return Verdict(finite=True, counted=True)

    def apply(self, optimizer: Any, norm: Tensor, total_weight: float | Tensor, *, place: Place) -> None:
        """Steps the optimizer, which leaves the step out where a flag is set."""
        assert self._found is not None, "judge() comes first"
        with skipping(optimizer, self._found):
            optimizer.step()


_NOTED = ("guard", "group", "micro_steps", "last_lr", "term_totals", "heard", "step_info", "step_outputs")


@contextlib.contextmanager
def _aside(engine: Engine, guard: FiniteGuard) -> Iterator[None]:
    """Lets steps run inside the block of which the engine keeps nothing."""
    before = {name: getattr(engine, name) for name in _NOTED}
    engine.guard = guard
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(engine, name, value)


class _Kept:
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
        model = [*engine.model.parameters(), *engine.model.buffers()]
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


def _check(engine: Engine, step: _CapturedStep, group: Group, kept: _Kept) -> str | None:
    """Compares a replay with an eager step from the same state; returns what is wrong, if anything is."""

    def state_after(run: Callable[[], Any]) -> list[Tensor]:
        kept.restore()
        outputs = run()
        found = [tensor.clone() for tensor in kept.live]
        found += [output.loss.clone() for output in outputs if output.loss is not None]
        return found

    replayed = state_after(lambda: step.replay(group)[1])
    before = _host_rng()
    eager = state_after(step.eager)
    drawn = _host_rng() != before
    difference = _largest_difference(replayed, eager)
    itself = _largest_difference(eager, state_after(step.eager)) if difference else 0.0
    kept.restore()
    if drawn:
        return (
            "the step draws random numbers on the CPU, which would be drawn once and used for ever; draw them on the "
            "device, or in the data loader"
        )
    if difference and not itself:
        return f"a captured step gives other numbers than an eager one: they differ by {difference:.3g} at most"
    if difference:
        engine.logger.warning(
            "capture: kernels of this step do not give the same bits twice (atomic additions, most often): two eager "
            "steps differ by %.3g at most, a captured and an eager one by %.3g; torch.use_deterministic_algorithms "
            "names the kernels", itself, difference,
        )  # fmt: skip
    return None


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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
