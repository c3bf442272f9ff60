"""Captured step: its graph, its input memory and its results for the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.capture.graph import Branch, CudaGraph, capturable
from treadle.capture.memory import STEPS_PER_GRAPH, FixedBatch, Results, Rows, tensors_of
from treadle.checkpoint.comparison import same_bits
from treadle.data.cursor import Group
from treadle.data.tensors import RowGather
from treadle.device.handover import wait_for_work
from treadle.engine.attempt import apply_step_effects, begin_record, clear_gradients, refuse, skip
from treadle.engine.block import StepBlock
from treadle.engine.settings import Outcome
from treadle.nested import map_nested_tensor
from treadle.optim.ema import Ema
from treadle.optim.late_flags import LateFlags, Locate, step_unless
from treadle.optim.late_skips import LateSkips
from treadle.optim.loss_weights import EqualWeights, GivenWeights, KnownWeights
from treadle.optim.nonfinite import FiniteGuard, Verdict
from treadle.task import StepOutput

if TYPE_CHECKING:
    from treadle.capture.check import KeptState
    from treadle.engine import Engine
_SHORT = 3e-4  # device time of a step in seconds


class CapturedStep:
    """Captured step with its graph and memory.

    Args:
        engine: engine of the step.
        group: micro-batches of the captured shape.
        flags: flags in which a step records a refusal; None if the host reads the flag of each step.
        share: another step whose graph's memory to share.
        weights: weights of the micro-batches if the host knows them, each above 0; None if the step computes them.
        gather: gathers the step's batch within the graph; None if the batch already exists.
    """

    def __init__(
        self,
        engine: Engine,
        group: Group,
        flags: LateFlags | None,
        *,
        share: CapturedStep | None,
        weights: Sequence[float] | None,
        gather: RowGather | None = None,
    ):
        self._engine = engine
        self._flags = flags
        self._gather = gather
        in_place = getattr(engine.cursor.loader, "num_buffers", None) == 1 and len(group.batches) == 1
        self._inputs = [FixedBatch(batch, engine.device, in_place=in_place) for batch in group.batches]
        self._guard = _RecordingGuard(flags, knows_weight=weights is not None)
        self._equal: EqualWeights | None = None
        self._known = weights if weights is not None and len(weights) > 1 else None  # one weight changes no gradient
        if self._known is not None:
            equal = len(set(self._known)) == 1
            self._guard.weights = given = GivenWeights(len(self._known), device=engine.device, equal=equal)
            given.give(self._known)
        elif engine.num_ranks > 1:
            size, ranks = len(group.batches), engine.num_ranks
            self._guard.weights = self._equal = EqualWeights(size, device=engine.device, num_ranks=ranks)
        self._rows = Rows(2, engine.device)
        self._has_rows = False  # until checked
        self._graph: CudaGraph = CudaGraph(share=None if share is None else share._graph)
        self._several: Callable[[], None] | None = None  # replays STEPS_PER_GRAPH steps
        self._found_inf: Tensor | None = None  # flag in which replays record infinite scaled gradients
        with engine.isolated_step(self._guard), engine.exchange.recording():
            self._results: _StepResults = self._graph.record(self._capture_step, prepare=self.prepare)
        self._verdict_flags = self._guard.flags  # flags written by replays; an eager step creates others
        self._with_outputs: Callable[[Any, StepOutput], StepOutput] | None = getattr(engine.task, "replayed", None)
        clear_gradients(engine)

    @property
    def reads(self) -> bool:
        """Whether the host must read the verdict of each step."""
        return self._late_flags is None

    @property
    def _late_flags(self) -> LateFlags | None:
        """Flags in which a step records a refusal; None if the host reads the verdict of each step."""
        return None if self._guard.weight_on_device else self._flags

    @property
    def agreed(self) -> Sequence[float]:
        """Numbers of its micro-batches that must be the same on all ranks; none on a single rank."""
        return () if self._equal is None else self._equal.agreed

    def drop(self) -> None:
        """Free the graph; the step cannot be run any more."""
        self._graph.drop()

    def prepare(self) -> None:
        """Restore what a trial of the step changes besides the training state."""
        clear_gradients(self._engine)
        if self._gather is not None:
            self._gather.rewind()

    def _capture_step(self) -> _StepResults:
        engine = self._engine
        branch = self._guard.branch = Branch(engine.device)
        if self._gather is not None:
            self._gather.run()
            with branch.after(branch.mark()):
                self._gather.advance()
        with capturable(engine.optimizer):
            self._found_inf = self._train()
        with branch.after(self._guard.judged):  # loss and norm exist before the update
            left = _StepResults(engine.attempt.outputs, engine.attempt.info["grad_norm"], engine.device, self._rows)
        branch.join()
        return left

    def _train(self) -> Tensor | None:
        """Train on the batches; return the flag in which replays record infinite scaled gradients."""
        batches = [inputs.batch for inputs in self._inputs]
        if isinstance(self._guard.weights, (GivenWeights, EqualWeights)):
            self._guard.weights.begin()
        if self._engine.train_step(Group(batches, [0.0] * len(batches))) != "applied":
            raise RuntimeError("a micro-batch had no loss, which only the host can handle")
        found_inf = self._engine.precision.forget_recorded(self._engine.optimizer)
        self._averages = () if self._late_flags is None else tuple(self._averages_inside())
        for average in self._averages:
            average.move(self._engine.model, unless=self._guard.skips_average)
        return found_inf

    def _averages_inside(self) -> Iterator[Ema]:
        """Return the averages updated in every step on the device, which the graph updates."""
        for average in self._engine.averages.values():
            if average.recordable and average.shares_devices_with(self._engine.model):
                yield average

    def eager(self) -> list[StepOutput]:
        """Run the same step without the graph, weighted like an eager step; return its outputs."""
        given = self._guard.weights
        self._guard.branch = None
        if self._known is not None:
            self._guard.weights = KnownWeights(self._known, device=self._engine.device)
        with self._engine.isolated_step(self._guard), self._engine.exchange.recording():
            self._train()
            outputs = self._engine.attempt.outputs
        self._guard.weights = given
        return outputs

    def replay(self, group: Group, weights: Sequence[float | None] | None = None) -> tuple[Tensor, list[StepOutput]]:
        """Fill the memory, replay the graph and return the norm and the outputs.

        Args:
            group: group of the captured shape.
            weights: weights of its micro-batches, if the host knows them.
        """
        if self._gather is None:
            for inputs, batch in zip(self._inputs, group.batches, strict=True):
                inputs.fill(batch)
        self._graph.replay()
        return self._results.read(weights or [None] * len(group.batches))

    @property
    def runs_ahead(self) -> bool:
        """Whether several steps can be replayed in a row, because the host does nothing between them."""
        return (
            self._gather is not None and self._late_flags is not None and self._with_outputs is None
            and self._known is None and self._has_rows and len(self._averages) == len(self._engine.averages)
            and not isinstance(self._results.constant.weight, Tensor)
        )  # fmt: skip

    def check_rows(self) -> None:
        """Check that replays write their exact numbers into rows; the caller must restore the state."""
        results = self._results.results
        if results.rows is None:
            return
        seen: list[Tensor] = []

        def replay() -> None:
            self._graph.replay()
            seen.append(results.latest.clone())

        rows = self._rows.collect(replay, 2)
        self._has_rows = same_bits(rows, torch.stack(seen))

    def record_several(self, kept: KeptState) -> None:
        """Capture several steps as another graph if steps are short, since launches dominate; check it to the bit.

        Args:
            kept: restores the state; the caller does so afterwards.
        """
        if not self.runs_ahead or self._graph.seconds(prepare=self.prepare) > _SHORT:
            return
        several = CudaGraph(share=self._graph)
        kept.restore()
        with self._engine.isolated_step(self._guard):
            several.record(self._capture_several, prepare=self.prepare, warm_ups=0)

        def state_after(replay_several: Callable[[], None] | None) -> list[Tensor]:
            kept.restore()
            self.prepare()
            rows = self._rows.collect(self._graph.replay, STEPS_PER_GRAPH, several=replay_several)
            return [rows, *(tensor.clone() for tensor in kept.live)]

        if all(map(same_bits, state_after(None), state_after(several.replay))):
            self._several = several.replay

    def _capture_several(self) -> None:
        for _ in range(STEPS_PER_GRAPH):
            self._capture_step()

    def run_block(self, count: int) -> StepBlock:
        """Replay the steps after the latest one, without counting them in the engine."""
        engine, flags = self._engine, self._late_flags
        assert flags is not None
        progress, cursor = engine.progress, engine.cursor
        rates = progress.read_rates(engine.optimizer)
        numbers = self._rows.collect(self._graph.replay, count, several=self._several)
        block = StepBlock(
            progress.step + 1, cursor.epoch, cursor.position + 1, numbers, self._results.constant, rates,
            may_skip=engine.guard.skips is not None,
        )  # fmt: skip
        flags.note_block(block.first_location, numbers[:, 0])
        return block

    def run(self, group: Group, weights: Sequence[float | None], *, messages: Sequence[list[float]] = ()) -> Outcome:
        """Run one step and record its results like an eager one.

        Args:
            group: of the shape.
            weights: of its micro-batches, where the host knows them.
            messages: that each rank sent with this step.
        """
        engine = self._engine
        begin_record(engine, group)
        engine.attempt.receive(list(messages))
        if isinstance(self._guard.weights, GivenWeights):
            self._guard.weights.give([weight for weight in weights if weight is not None])
        norm, outputs = self.replay(group, weights)
        if self._gather is not None:
            self._gather.leave_next()
        engine.attempt.info["grad_norm"] = norm
        for batch, output in zip(group.batches, outputs, strict=True):
            engine.attempt.keep(output if self._with_outputs is None else self._with_outputs(batch, output))
        if (flags := self._late_flags) is not None:
            flags.note(engine.location(), norm)
            return apply_step_effects(engine, moved=self._averages)
        engine.precision.note_replayed(engine.optimizer, self._found_inf)
        wait_for_work(engine.device)
        bad, uncounted = self._verdict_flags.tolist()
        if uncounted:
            return skip(engine, "the total weight is 0")
        return refuse(engine) if bad else apply_step_effects(engine)


class _StepResults:
    """Results of a captured step for the host.

    Args:
        outputs: outputs of its micro-batches.
        norm: norm of its gradient.
        device: device of the step; tensors elsewhere are constants.
        rows: rows of norm and loss, see :class:`Results`.
    """

    def __init__(self, outputs: list[StepOutput], norm: Tensor, device: torch.device, rows: Rows):
        def changes(value: Any) -> bool:
            return isinstance(value, Tensor) and value.device == device

        self._outputs = outputs
        self._tensors = [norm]
        self._indices: list[tuple[int | None, int | None, bool]] = []
        for output in outputs:
            loss = self._add(output.loss) if changes(output.loss) else None
            weight = self._add(output.weight) if changes(output.weight) else None
            tensors = [tensor for tensor in tensors_of((output.records, output.outputs)) if changes(tensor)]
            self._indices.append((loss, weight, bool(tensors)))
            self._tensors += tensors
        self._device = device
        self._is_plain = self._indices == [(1, None, False)]  # a single loss; everything else is constant
        self._is_flat = all(
            type(output.outputs) is tuple and not tensors_of(output.records) and all(map(changes, output.outputs))
            for output in outputs
        )  # outputs that are tuples of tensors
        self._results = Results(self._tensors, rows if self._is_plain else None)

    def _add(self, tensor: Any) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    @property
    def results(self) -> Results:
        """Results of the latest replay."""
        return self._results

    @property
    def constant(self) -> StepOutput:
        """Output of a step in a block, of which only the loss changes."""
        return self._outputs[0]

    def read(self, weights: Sequence[float | None]) -> tuple[Tensor, list[StepOutput]]:
        """Return copies of the norm and outputs of the latest replay, with the weights if given."""
        found = self._results.read()
        if self._is_plain:  # the usual case, in a third of the time
            output, known = self._outputs[0], weights[0]
            weight_now = output.weight if known is None else known
            copied = StepOutput(
                found[1], output.records, weight_now, output.reduction, output.outputs, output.num_samples
            )
            return found[0], [copied]
        outputs = []
        at = 1
        for output, (loss, weight, has_more), known in zip(self._outputs, self._indices, weights, strict=True):
            at += (loss is not None) + (weight is not None)
            left = output.weight if weight is None else found[weight]
            more = output.records, output.outputs
            if has_more and self._is_flat:
                count = len(output.outputs)
                more = output.records, tuple(found[at : at + count])
                at += count
            elif has_more:
                rest = iter(found[at:])

                def copy(tensor: Tensor, rest: Iterator[Tensor] = rest) -> Tensor:
                    return next(rest) if tensor.device == self._device else tensor

                more = map_nested_tensor(copy, more)
                at += sum(tensor.device == self._device for tensor in tensors_of(more))
            outputs.append(
                StepOutput(
                    output.loss if loss is None else found[loss], more[0],
                    left if known is None else known, output.reduction,
                    outputs=more[1], num_samples=output.num_samples,
                )
            )  # fmt: skip
        return found[0], outputs


class _RecordingGuard(FiniteGuard):
    """Guard that defers the decision to the device, without reading it.

    Args:
        replays: receives refusals; None reads :attr:`flags` of each step.
        knows_weight: whether the host knows that the total weight is above 0.

    Attributes:
        flags: whether the gradient is not finite, and whether the total weight is 0.
        weight_on_device: whether the step's weight is known on the device only.
    """

    recording = True
    branch: Branch | None = None  # of the capture
    judged: torch.cuda.Event | None = None  # when the norm was computed

    def __init__(self, replays: LateFlags | None, *, knows_weight: bool):
        super().__init__()
        self._knows_weight = knows_weight
        self._replays = replays
        self._skips: Tensor | None = None
        self.flags = torch.zeros(())
        self.weight_on_device = False

    @property
    def skips_average(self) -> Tensor | None:
        """Flag that leaves averages unchanged too; None if no later step is run before the host knows."""
        return self._skips if isinstance(self._replays, LateSkips) else None

    def judge(self, norm: Tensor, total_weight: float | Tensor) -> Verdict:
        """Compute the flags."""
        self.judged = None if self.branch is None else self.branch.mark()
        self.weight_on_device = isinstance(total_weight, Tensor) and not self._knows_weight
        if self._replays is not None and not self.weight_on_device:
            self._skips = self._replays.raise_for(norm)
            return Verdict(finite=True, counted=True)
        bad = ~torch.isfinite(norm)
        nothing = ~(total_weight > 0) if isinstance(total_weight, Tensor) else torch.zeros_like(bad)
        self.flags = torch.stack([bad, nothing])
        self._skips = self.flags.any().float()
        return Verdict(finite=True, counted=True)

    def apply(self, optimizer: Any, norm: Tensor, total_weight: float | Tensor, *, locate: Locate) -> None:
        """Step the optimizer, which skips the step if a flag is set."""
        assert self._skips is not None, "call judge() first"
        judged = None if self.branch is None else self.branch.mark()
        step_unless(self._skips, optimizer)
        if isinstance(self._replays, LateSkips) and not self.weight_on_device:
            with contextlib.nullcontext() if self.branch is None else self.branch.after(judged):
                self._replays.move_scale()
