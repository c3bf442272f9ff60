"""The step replayed as one CUDA graph: forward, backward, clip and update launched at once, with the same numbers.

What is captured is :meth:`Engine.train_step` itself. The first step of every shape runs as ever, so that the optimizer
has its state; before the second, the step is warmed up and recorded, weights, optimizer and random numbers are put
back, and one replay is compared with one eager step to the bit. Schedule and averages move beside the graph.

The learning rate becomes a tensor on the device, in float32, which the schedule changes in place. An eager run whose
learning rate is a tensor has the same numbers; one whose learning rate is a Python number rounds in float64.

A gradient that is not finite is left out by the optimizer on the device, and so is every step after it until the host
has seen it, which is two steps later at most and before anything is saved, logged or evaluated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from treadle.bookkeeping import (
    Outcome,
    clear_gradients,
    counts_terms,
    move_on,
    note_output,
    place_of,
    refuse,
    settle,
    skip,
    start_attempt,
)
from treadle.cuda_graph import CudaGraph, FixedBatch, Results, capturable, shape_of
from treadle.data.cursor import Group
from treadle.errors import ConfigError
from treadle.guard import FiniteGuard, Place, Verdict, skipping, skips_on_device
from treadle.hooks.base import listeners
from treadle.seed import RngState

if TYPE_CHECKING:
    from treadle.engine import Engine

Capture = bool | Literal["auto"]
_PLAIN = (int, float, bool, tuple, str, type(None))
_MAX_GRAPHS = 32
_AHEAD = 2  # steps; one runs while the host prepares the next


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
        self._refused = torch.zeros((), dtype=torch.float32, device=engine.device)
        self._replaying = False

    def __call__(self, group: Group) -> Outcome:
        """Runs one step: by a graph, or eagerly where there is none for the shape of its data yet."""
        engine = self._engine
        if self._off:
            return engine.train_step(group)
        self._forget_if_loaded()
        self._keep_rates_on_device()
        step = self._step_for(group)
        if step is None:
            self._replaying = False
            outcome = engine.train_step(group)
            self._settled_state |= outcome == "applied"
            return outcome
        settle(engine, ahead=_AHEAD if self._replaying else 0)
        if not engine.guard.waits:
            self._refused.zero_()  # whatever was refused is known
        self._replaying = True
        return step.run(group)

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

    def _step_for(self, group: Group) -> _CapturedStep | None:
        """Returns the captured step for a group, captured now if it is time for it; None for an eager one."""
        shapes = [shape_of(batch) for batch in group.batches]
        unknown = [shape for shape in shapes if isinstance(shape, str)]
        if unknown:
            self._give_up(
                f"a batch holds a {unknown[0]}, whose tensors cannot be kept in fixed memory; give tensors, tuples, "
                "dicts or dataclasses (graphs: pad them, see treadle.graphs.pad_batch)"
            )
            return None
        key = tuple(shapes), self._settings()
        if key not in self._steps and self._is_time_for(key):
            if len(self._steps) >= _MAX_GRAPHS:
                self._give_up(f"there are more than {_MAX_GRAPHS} shapes of data; pad it into a few", known=True)
                return None
            self._capture(key, group)
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

    def _capture(self, key: Any, group: Group) -> None:
        """Records the step for groups of this shape and checks it against an eager one; leaves the state as it was."""
        engine = self._engine
        if counts_terms(engine, group.batches[0]):
            self._give_up("the terms of the loss are counted on the host in each step")
            return
        settle(engine)
        kept = _Kept(engine)
        try:
            share = next(iter(self._steps.values()), None)
            step = _CapturedStep(engine, group, self._refused, share=share)
            if kept.grew():
                kept.restore()
                return  # a parameter got its first gradient: another eager step makes the rest of the state
            kept.restore()
            problem = _check(engine, step, group, kept)
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


class _Outputs(NamedTuple):
    """What a captured step leaves for the host."""

    outputs: list[Any]
    norm: Tensor
    total: float | Tensor


class _CapturedStep:
    """One graph and its memory.

    Args:
        engine: whose step.
        group: micro-batches of the shape.
        refused: 0-d, above 0 from a refused step on.
        share: another step whose graph's memory is used too.
    """

    def __init__(self, engine: Engine, group: Group, refused: Tensor, *, share: _CapturedStep | None):
        self._engine = engine
        in_place = getattr(engine.cursor.loader, "num_buffers", None) == 1 and len(group.batches) == 1
        self._places = [FixedBatch(batch, engine.device, in_place=in_place) for batch in group.batches]
        self._batches = [place.batch for place in self._places]
        self._guard = _RecordingGuard(refused, sticky=engine.guard.deferred)
        self._graph: CudaGraph = CudaGraph(share=None if share is None else share._graph)
        with _aside(engine, self._guard):
            self._results: Results = self._graph.record(self._recorded, prepare=lambda: clear_gradients(engine))
        clear_gradients(engine)

    def _recorded(self) -> Results:
        engine = self._engine
        with capturable(engine.optimizer):
            _run_aside(engine, self._batches)
        left = _Outputs(engine.step_outputs, engine.step_info["grad_norm"], self._guard.total)
        return Results(left, device=engine.device)

    def eager(self) -> list[Any]:
        """Runs the same step without the graph; returns its outputs."""
        with _aside(self._engine, self._guard):
            _run_aside(self._engine, self._batches)
            return self._engine.step_outputs

    def replay(self, group: Group) -> _Outputs:
        """Fills the memory, launches the graph and returns what it left."""
        for place, batch in zip(self._places, group.batches, strict=True):
            place.fill(batch)
        self._graph.replay()
        left: _Outputs = self._results.read()
        return left

    def run(self, group: Group) -> Outcome:
        """Runs one step and notes what it gave, as an eager one does."""
        engine = self._engine
        start_attempt(engine, group)
        left = self.replay(group)
        for output in left.outputs:
            note_output(engine, output)
        engine.step_info["grad_norm"] = left.norm
        verdict = self._verdict(left)
        if not verdict.counted:
            return skip(engine, "the total weight is 0")
        return move_on(engine) if verdict.finite else refuse(engine)

    def _verdict(self, left: _Outputs) -> Verdict:
        guard, flags = self._engine.guard, self._guard.flags
        if guard.deferred and not isinstance(left.total, Tensor):
            guard.look_later(flags[0], left.norm, place=place_of(self._engine))
            return Verdict(finite=True, counted=True)
        bad, uncounted = flags.tolist()
        return Verdict(finite=not bad, counted=not uncounted)


class _RecordingGuard(FiniteGuard):
    """Leaves the decision to the device and reads nothing.

    Args:
        refused: 0-d, above 0 from a refused step on.
        sticky: whether steps after a refused one are left out too.
    """

    recording = True

    def __init__(self, refused: Tensor, *, sticky: bool):
        super().__init__()
        self._refused = refused
        self._sticky = sticky
        self.flags = torch.zeros(2, device=refused.device)
        self.total: float | Tensor = 0.0

    def judge(self, norm: Tensor, total_weight: float | Tensor) -> Verdict:
        """Computes the flags: the norm is not finite, nothing counts."""
        self.total = total_weight
        self.flags[0] = ~torch.isfinite(norm)
        if isinstance(total_weight, Tensor):
            self.flags[1] = ~(total_weight > 0)
        if self._sticky:
            self.flags[0] = torch.maximum(self.flags[0], self._refused)
            self._refused.copy_(self.flags[0])
        return Verdict(finite=True, counted=True)

    def apply(self, optimizer: Any, norm: Tensor, total_weight: float | Tensor, *, place: Place) -> None:
        """Steps the optimizer, which leaves the step out where a flag is set."""
        with skipping(optimizer, self.flags.amax()):
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


def _run_aside(engine: Engine, batches: Sequence[Any]) -> None:
    if engine.train_step(Group(list(batches), [0.0] * len(batches))) != "applied":
        raise RuntimeError("a micro-batch had no loss, which only the host can decide")


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

    replayed = state_after(lambda: step.replay(group).outputs)
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
