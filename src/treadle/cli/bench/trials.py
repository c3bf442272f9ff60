"""Settings that may make a step faster, each tried on the current run and then undone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from treadle.capture.compile import compile_model, is_compiled
from treadle.capture.steps import steps_of
from treadle.cli.bench.timing import Clock, step_seconds
from treadle.data.cursor import Group
from treadle.engine import Engine
from treadle.engine.session import finite_guard
from treadle.optim.optimizer import can_be_fused
from treadle.optim.precision import Precision

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_WARM_UP = 3
Step = Callable[[Group], Any]


class NotTried(Exception):
    """Reason why a trial does not apply."""


@dataclass(frozen=True)
class Trial:
    """Effect of one setting on the time of a step.

    Attributes:
        name: the setting, in words.
        how: the code that enables it.
        seconds: of a step with it; None if it was not tried.
        present: of a step without it, measured around the trial.
        note: what else it changes, or why it was not tried.
        other_training: whether the trial changes the training itself.
    """

    name: str
    how: str
    seconds: float | None = None
    present: float | None = None
    note: str = ""
    other_training: bool = False


class Bench:
    """Trials of settings on an engine, with the groups of some of its steps.

    Args:
        engine: the run, which is discarded afterwards, since every trial updates its weights.
        groups: the groups of some steps.
        clock: the clock for the device.
        count: steps per measurement.
    """

    def __init__(self, engine: Engine, groups: Sequence[Group], *, clock: Clock, count: int):
        self.engine, self.groups, self.clock, self.count = engine, groups, clock, count
        self.block = 5 if engine.device.type == "cuda" else 1

    def seconds(self, step: Step, groups: Sequence[Group]) -> float:
        """Return the median time of a step, after some warm-up steps."""
        for number in range(_WARM_UP):
            step(groups[number % len(groups)])
        return step_seconds(step, groups, count=self.count, clock=self.clock, block=self.block)

    def run(self, name: str, how: str, change: Callable[[], AbstractContextManager[Step]], note: str = "") -> Trial:
        """Measure the step without, with, and again without a change."""
        before = self.seconds(self.engine.steps, self.groups)
        try:
            with change() as step:
                changed = self.seconds(step, self.groups)
        except NotTried as reason:
            return Trial(name, how, note=str(reason))
        except Exception as error:  # noqa: BLE001  # user code or a compiler may fail with the change
            first = (str(error).strip().splitlines() or [""])[0][:200]
            return Trial(name, how, note=f"failed: {type(error).__name__}: {first}")
        after = self.seconds(self.engine.steps, self.groups)
        return Trial(name, how, changed, (before + after) / 2, note)


@contextlib.contextmanager
def fused_optimizer(engine: Engine) -> Iterator[Step]:
    """Replace the optimizer by a fused one inside the block."""
    present = engine.optimizer
    if all(group.get("fused") for group in present.param_groups):
        raise NotTried("the optimizer is fused already")
    if type(present) not in _FUSED:
        raise NotTried(f"torch has no fused {type(present).__name__}")
    if not can_be_fused([p for group in present.param_groups for p in group["params"]]):
        raise NotTried("torch does not fuse on this device or for these parameters")
    kind = cast(Any, type(present))
    groups = [{**group, "fused": True, "foreach": None} for group in present.param_groups]
    with engine.temporarily(optimizer=kind(groups)), engine.temporarily(guard=finite_guard(engine)):
        yield engine.train_step


@contextlib.contextmanager
def in_bf16(engine: Engine) -> Iterator[Step]:
    """Train in bf16 mixed precision inside the block."""
    present = engine.precision
    if present.name is not None:
        raise NotTried(f"the run is in {present.name} already")
    with engine.temporarily(precision=Precision("bf16", engine.device)):
        yield engine.train_step


@contextlib.contextmanager
def captured(engine: Engine, groups: Sequence[Group]) -> Iterator[Step]:
    """Replay the step as one CUDA graph per shape of the groups, with a fused optimizer."""
    if engine.device.type != "cuda":
        raise NotTried("CUDA graphs need a CUDA device")
    captures = dataclasses.replace(engine.settings, capture=True)
    is_fused = all(group.get("fused") for group in engine.optimizer.param_groups)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    with contextlib.nullcontext() if is_fused else fused_optimizer(engine):
        try:
            with engine.temporarily(settings=captures, guard=finite_guard(engine)):
                steps = steps_of(engine)
                for met in [*groups, *groups]:  # the second step of each shape captures, which is not measured
                    steps(met)
                yield steps
        finally:
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


@contextlib.contextmanager
def compiled_blocks(engine: Engine, *, cold: dict[str, float]) -> Iterator[Step]:
    """Compile the blocks; the seconds of the first steps go into ``cold``."""
    before = {module for module in engine.model.modules() if is_compiled(module)}
    if before:
        raise NotTried("the model is compiled already")
    started = time.perf_counter()
    compile_model(engine.model, "blocks")
    try:

        def step(group: Group) -> Any:
            outcome = engine.train_step(group)
            cold.setdefault("seconds", time.perf_counter() - started)
            return outcome

        yield step
    finally:
        for module in engine.model.modules():
            module._compiled_call_impl = None


@contextlib.contextmanager
def num_threads(engine: Engine, count: int) -> Iterator[Step]:
    """Use another number of CPU threads inside the block."""
    present = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield engine.train_step
    finally:
        torch.set_num_threads(present)


@contextlib.contextmanager
def doubled_batch(engine: Engine) -> Iterator[Step]:
    """Double the batch; each step then counts as two."""

    made: dict[int, Group] = {}  # concatenating batches is not part of the step

    def step(group: Group) -> Any:
        if id(group) not in made:
            batches = [doubled(batch) for batch in group.batches]
            made[id(group)] = Group(batches, group.data_time, group.sample_ids)
        return engine.train_step(made[id(group)])

    yield step


def doubled(batch: Any) -> Any:
    """Return a batch with every sample twice.

    Raises:
        NotTried: the batch is not a nesting of tensors that share their first dimension.

    Example:
        >>> doubled((torch.zeros(2, 3), torch.ones(2)))[1].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    leaves, spec = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors or len(tensors) < len(leaves) or len({len(tensor) for tensor in tensors}) > 1:
        raise NotTried("the batches are not tensors that all have the same first size")
    return tree_unflatten([torch.cat([tensor, tensor]) for tensor in tensors], spec)


def thread_counts() -> list[int]:
    """Return the numbers of threads to try: one, and one per core, except the current number."""
    cores = os.cpu_count() or 1
    return [count for count in dict.fromkeys((1, cores)) if count != torch.get_num_threads()]
