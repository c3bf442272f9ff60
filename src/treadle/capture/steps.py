"""Captured steps of an engine: one CUDA graph per shape of data."""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treadle.capture.check import KeptState, what_differs
from treadle.capture.compile import makes_cuda_graphs
from treadle.capture.memory import shape_of
from treadle.capture.obstacles import reason_against
from treadle.capture.ranks import EAGER, OFF, RECORD, REPLAY, RankAgreement
from treadle.capture.step import CapturedStep
from treadle.checkpoint.files import first_line
from treadle.data.cursor import Group
from treadle.data.tensors import RowGather
from treadle.engine import Engine
from treadle.engine.attempt import counts_terms
from treadle.engine.block import RunsAhead, StepBlock
from treadle.engine.settings import Outcome, Steps
from treadle.errors import ConfigError

_PLAIN = (int, float, bool, tuple, str, type(None))
_MAX_GRAPHS = 32
_TRAINS = operator.attrgetter("requires_grad")


def steps_of(engine: Engine) -> Steps:
    """Return the step function of an engine, captured or eager.

    Raises:
        ConfigError: ``capture=True``, but capturing is impossible.
    """
    if engine.capture is False:
        return engine.train_step
    reason = reason_against(engine)
    if reason is None:
        if makes_cuda_graphs(engine.model):
            engine.logger.warning(
                "capture=%r: a part of the model is compiled with mode='reduce-overhead', which "
                "would nest CUDA graphs inside the captured one; compile it with the default mode", engine.capture,
            )  # fmt: skip
        return CapturedSteps(engine)
    _refuse(engine, reason)
    return engine.train_step


def _refuse(engine: Engine, reason: str) -> None:
    if engine.capture is True:
        raise ConfigError(f"{reason}; or use capture='auto' or False", argument="capture", value=True)
    engine.logger.warning("capture='auto': steps are not captured: %s", reason)


class CapturedSteps(RunsAhead):
    """Captured steps of an engine, with one graph per shape of the data.

    Args:
        engine: engine of the steps.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._steps: dict[Any, CapturedStep] = {}
        self._seen_shapes: set[Any] = set()
        self._parameters = list(engine.model.parameters())
        self._prepare_on_host: Callable[..., tuple[Any, float | None]] | None = getattr(
            engine.task, "prepare_batch", None
        )
        self._num_loads = engine.state.num_loads
        self._off = False
        self._optimizer_has_state = False  # whether the optimizer has all of its state
        self._rates: list[Tensor] = []
        self._plain: list[Callable[[dict[str, Any]], Any]] = []  # readers of the plain values of each parameter group
        self._latest: Any = None  # the settings of the latest step
        self._number = 0  # index among the settings seen so far
        self._latest_kind: tuple[RowGather | None, int] | None = None  # key of the latest captured step
        self._latest_step: CapturedStep | None = None
        self._loader: Any = None  # latest loader
        self._find_gather: Callable[[], RowGather | None] | None = None  # its gather of whole batches
        self._numbers: dict[str, int] = {}
        self._ranks = RankAgreement(engine)
        late = engine.guard.deferred or (engine.guard.can_wait and engine.device.type == "cuda")
        self._flags = engine.guard.late_flags(engine.device) if late else None

    def __call__(self, group: Group) -> Outcome:
        """Run one step, by a graph or, if there is none yet for the shape of its data, eagerly."""
        engine = self._engine
        gather = self._gather_of(group)
        if self._off:
            return self._run_eagerly(group, gather)
        if self._num_loads != engine.state.num_loads:
            self._forget()
        self._keep_rates_on_device()
        group, weights = self._prepared(group)
        if not self._ranks.alone:
            return self._with_other_ranks(group, weights, gather)
        step = None if 0.0 in weights else self._step_for(group, weights, gather)
        if step is None:
            outcome = self._run_eagerly(group, gather)
            self._optimizer_has_state |= outcome == "applied"
            return outcome
        if self._flags is not None and (self._flags.raised or step.reads):
            engine.raise_if_refused()
        return step.run(group, weights)

    def _with_other_ranks(self, group: Group, weights: list[float | None], gather: RowGather | None) -> Outcome:
        """Run one step the same way on all ranks: by graphs if each has one, else eagerly, after capturing if due."""
        found = self._look_up(group, weights, gather)
        key, step = found or (None, None)
        own = OFF if key is None else EAGER
        if step is not None:
            own = REPLAY
        elif key is not None and self._is_due(key[:-1]):
            own = RECORD
        action = self._ranks.action(own, () if step is None else step.agreed)
        if action == REPLAY:
            assert step is not None
            if self._flags is not None and self._flags.raised:
                self._engine.raise_if_refused()
            return step.run(group, weights, messages=self._ranks.messages)
        self._off |= action == OFF
        if action == RECORD:
            self._captured(key, group, weights, gather)
        outcome = self._run_eagerly(group, gather)
        self._optimizer_has_state |= outcome == "applied"
        return outcome

    def may_run_ahead(self) -> bool:
        """Return whether the next step fits the latest graph, and nothing changes on the host in between."""
        engine, step = self._engine, self._latest_step
        if self._off or step is None or self._latest_kind is None or not (step.runs_ahead and self._ranks.alone):
            return False
        moves = engine.lr_scheduler is not None and engine.scheduler_interval == "step"
        if moves or self._num_loads != engine.state.num_loads or (self._flags is not None and self._flags.raised):
            return False
        gather, loader = self._latest_kind[0], engine.cursor.loader
        if gather is None or loader is not self._loader or not gather.leaves_next:
            return False
        groups = engine.optimizer.param_groups
        known = all(group["lr"] is rate for group, rate in zip(groups, self._rates, strict=True))
        return known and self._latest_kind == (gather, self._settings())

    def ahead(self, count: int) -> tuple[Group, StepBlock]:
        """Replay the next steps; return the last batch and the numbers of all steps."""
        cursor, step = self._engine.cursor, self._latest_step
        assert step is not None
        assert self._latest_kind is not None
        gather = self._latest_kind[0]
        assert gather is not None
        block = step.run_block(count)
        cursor.skip(count)
        return Group([gather.batch], [0.0], [cursor.loader.last_ids()]), block

    def end_run(self) -> None:
        """Drop the graphs of several ranks: a process group may not end while one holds its collectives."""
        if not self._ranks.alone:
            self._forget()

    def _gather_of(self, group: Group) -> RowGather | None:
        """Return the gather of a group's single batch, if it can run in the graph."""
        loader = self._engine.cursor.loader
        if loader is not self._loader:
            self._loader = loader
            self._find_gather = getattr(loader, "gather", None)
        if self._find_gather is None or self._prepare_on_host is not None or len(group.batches) != 1:
            return None
        gather = self._find_gather()
        return gather if gather is not None and gather.gives(group.batches[0]) else None

    def _run_eagerly(self, group: Group, gather: RowGather | None) -> Outcome:
        if gather is not None:
            group = Group([gather.whole()], group.data_time, group.sample_ids)
        return self._engine.train_step(group)

    def _prepared(self, group: Group) -> tuple[Group, list[float | None]]:
        """Let the task do the host's part of the step; also return the weights known to the host."""
        prepare = self._prepare_on_host
        if prepare is None:
            return group, [None] * len(group.batches)
        self._engine.set_group(group)  # so that the task can look up where a batch comes from
        pairs = [prepare(self._engine.model, batch) for batch in group.batches]
        batches, weights = [batch for batch, _ in pairs], [weight for _, weight in pairs]
        return Group(batches, group.data_time, group.sample_ids), weights

    def _forget(self) -> None:
        """Drop the graphs, such as after a state was loaded, since it is in other memory."""
        for step in () if self._ranks.alone else self._steps.values():
            step.drop()
        self._num_loads = self._engine.state.num_loads
        self._steps, self._seen_shapes, self._optimizer_has_state = {}, set(), False
        self._latest_kind = self._latest_step = None

    def _keep_rates_on_device(self) -> None:
        """Convert each learning rate to a device tensor, also after it was set to a number."""
        groups = self._engine.optimizer.param_groups
        if len(self._rates) != len(groups):
            self._rates = [torch.zeros((), dtype=torch.float32, device=self._engine.device) for _ in groups]
            self._plain = [_getter_of_plain_values(group) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            if group["lr"] is not rate:
                value = group["lr"]
                rate.copy_(value) if isinstance(value, Tensor) else rate.fill_(value)
                group["lr"] = rate

    def _step_for(self, group: Group, weights: list[float | None], gather: RowGather | None) -> CapturedStep | None:
        """Return the captured step for a group, capturing it if due; None for an eager step."""
        if gather is not None and (gather, self._settings()) == self._latest_kind:  # a gather has one shape
            return self._latest_step
        found = self._look_up(group, weights, gather)
        if found is None:
            return None
        key, step = found
        if step is not None or not self._is_due(key[:-1]):
            return step
        return self._captured(key, group, weights, gather)

    def _look_up(
        self, group: Group, weights: list[float | None], gather: RowGather | None
    ) -> tuple[tuple[Any, ...], CapturedStep | None] | None:
        """Return the key of a group and its captured step, if any; None after giving up."""
        settings = self._settings()
        shapes = [shape_of(batch) for batch in group.batches]
        unknown = [shape for shape in shapes if isinstance(shape, str)]
        if unknown:
            self._give_up(
                f"a batch holds a {unknown[0]}, whose tensors cannot be kept in fixed memory; give tensors, tuples, "
                "dicts or dataclasses (graphs: pad them, see pad_to of GraphTrainer)"
            )
            return None
        kind = None if None in weights else len(set(weights)) == 1  # equal weights need fewer kernels
        key = tuple(shapes), kind, settings, gather
        step = self._steps.get(key)
        if step is not None:
            self._latest_kind, self._latest_step = (gather, settings), step
        return key, step

    def _captured(
        self, key: Any, group: Group, weights: list[float | None], gather: RowGather | None
    ) -> CapturedStep | None:
        """Capture the step of a key; return it, or None if impossible or too early."""
        if len(self._steps) >= _MAX_GRAPHS:
            self._give_up(f"the data has more than {_MAX_GRAPHS} shapes; pad it to a few", known=True)
            return None
        known = None if None in weights else [weight for weight in weights if weight is not None]
        step = self._capture(group, known, gather)
        if step is not None:
            self._steps[key] = step
            shown = "" if len(self._steps) == 1 else f" for a further shape of data ({len(self._steps)})"
            self._engine.logger.info("step %d: captured as one CUDA graph%s", self._engine.step, shown)
        return step

    def _settings(self) -> int:
        """Return the numbers baked into a graph besides the data; a change needs another graph."""
        engine = self._engine
        groups = engine.optimizer.param_groups
        latest = (
            engine.model.training,
            engine.settings.grad_clip,
            engine.settings.grad_clip_value,
            [plain(group) for plain, group in zip(self._plain, groups, strict=True)],
            list(map(_TRAINS, self._parameters)),
            [(average.decay, average.update_interval) for average in engine.averages.values()],
        )
        if latest != self._latest:
            self._latest = latest
            self._number = self._numbers.setdefault(repr(latest), len(self._numbers))
        return self._number

    def _is_due(self, key: Any) -> bool:
        if self._optimizer_has_state and key in self._seen_shapes:
            return True
        self._seen_shapes.add(key)
        return False

    def _give_up(self, reason: str, *, known: bool = False) -> None:
        """Log why steps are not captured, and stop capturing."""
        self._off = True
        if known:
            self._engine.logger.warning("capture: from step %d on steps are eager: %s", self._engine.step, reason)
        else:
            _refuse(self._engine, reason)

    def _capture(self, group: Group, weights: list[float] | None, gather: RowGather | None) -> CapturedStep | None:
        """Capture the step for groups of this shape and compare it with an eager one, keeping the state."""
        engine = self._engine
        reason = reason_against(engine)  # hooks may have been added
        if reason is None and counts_terms(engine, group.batches[0]):
            reason = "the terms of the loss are counted on the host in each step"
        if (reason := self._ranks.problem(reason)) is not None:
            self._give_up(reason)
            return None
        engine.raise_if_refused()
        kept = KeptState(engine)
        here = torch.cuda.device(engine.device) if engine.device.type == "cuda" else contextlib.nullcontext()
        try:
            with here:
                step, problem = self._capture_and_compare(group, weights, gather, kept)
            if self._flags is not None:
                self._flags.refused.zero_()  # of a trial
        except BaseException:
            kept.restore()
            raise
        if problem is not None:
            self._give_up(problem)
        return step

    def _capture_and_compare(
        self, group: Group, weights: list[float] | None, gather: RowGather | None, kept: KeptState
    ) -> tuple[CapturedStep | None, str | None]:
        """Capture the step and compare it with an eager one; return it, or the problem, which may be another rank's.

        Return neither if a parameter got its first gradient: another eager step creates the missing optimizer state.
        """
        engine, ranks = self._engine, self._ranks
        problem, grew = None, False
        step: CapturedStep | None = None
        try:
            share = next(iter(self._steps.values()), None)
            step = CapturedStep(engine, group, self._flags, share=share, weights=weights, gather=gather)
            grew = kept.grew()
            if ranks.alone and not grew:
                kept.restore()
                step.prepare()
                step.check_rows()
                step.record_several(kept)
        except RuntimeError as error:
            problem = _as_problem(error)
        problem, grew = ranks.problem(problem), ranks.largest(float(grew)) > 0
        kept.restore()
        if step is None or problem is not None or grew:
            return None, problem
        try:
            problem = what_differs(engine, step, group, kept, largest=ranks.largest)
        except RuntimeError as error:
            kept.restore()
            problem = _as_problem(error)
        problem = ranks.problem(problem)
        if problem is None:
            return step, None
        step.drop()
        return None, problem


def _getter_of_plain_values(group: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a function that reads the values of a parameter group that are baked into a graph."""
    names = [name for name, value in group.items() if name != "lr" and isinstance(value, _PLAIN)]
    return operator.itemgetter(*names) if names else lambda group: None


_HINT = (
    "A captured step must not read from the device (no .item(), .cpu(), printing or branching on a tensor) or change "
    "its shapes"
)


def _as_problem(error: BaseException) -> str:
    """Return an error of a trial as a problem, and clear its frames: they keep nodes of a graph alive."""
    traceback.clear_frames(error.__traceback__)
    return f"the step cannot be captured: {first_line(error)}. {_HINT}"
