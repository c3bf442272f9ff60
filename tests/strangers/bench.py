"""The bench on which objects of users are tried: stopped after every step, each is exact or refused before step 1."""

from __future__ import annotations

import contextlib
import copy
import queue
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from helpers import MeanSquare, differences, through_a_file
from treadle import Engine, set_seed
from treadle.errors import TreadleError
from treadle.hooks import BaseHook

STEPS = 9
"""Of an uninterrupted run: two epochs of four steps, and one step of the third."""
ROWS, WIDTH = 12, 4


class Points(torch.utils.data.Dataset):
    """Twelve rows whose first number is their index, so that the order is visible."""

    def __init__(self, rows: int = ROWS):
        self.x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5))
        self.x[:, 0] = torch.arange(rows)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] / 10, self.x[index].sum().reshape(1) / 10


def points_loader(data: Any = None, **settings: Any) -> Any:
    """Return a loader of batches of three rows."""
    settings = {"batch_size": 3, **settings} if "batch_sampler" not in settings else settings
    return torch.utils.data.DataLoader(Points() if data is None else data, **settings)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))


@dataclass
class Case:
    """Fresh objects of one run: an engine that is made of parts here, or one that somebody made."""

    model: nn.Module | None = None
    optimizer: Any = None
    loader: Any = None
    scheduler: Any = None
    interval: Any = "step"
    hooks: Sequence[BaseHook] = ()
    task: Any = field(default_factory=MeanSquare)
    engine: Any = None

    def made(self) -> Engine:
        if self.engine is None:
            model = net() if self.model is None else self.model
            optimizer = self.optimizer or (lambda of: torch.optim.SGD(of.parameters(), lr=0.05))
            optimizer = optimizer(model)
            scheduler = self.scheduler(optimizer) if self.scheduler else None
            self.engine = Engine(
                model, optimizer, self.task, scheduler=scheduler, scheduler_interval=self.interval, device="cpu",
                hooks=list(self.hooks),
            )  # fmt: skip
        return self.engine


@dataclass(frozen=True)
class Row:
    """One object of the table.

    Attributes:
        name: what a user would call it.
        kind: the heading under which the table lists it.
        make: builds fresh objects.
        words: parts of the message that refuses it; none where it is exact.
        needs: packages without which it is not tried.
        stops: after which steps it is stopped.
    """

    name: str
    kind: str
    make: Callable[[], Case]
    words: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    stops: Iterable[int] = range(1, STEPS)

    @property
    def outcome(self) -> str:
        return "refused" if self.words else "exact"


class Recorder(BaseHook):
    """Keeps what each step read and with which settings."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}
        self.between: queue.SimpleQueue[Any] = queue.SimpleQueue()  # a state between two epochs, with its step

    def on_after_epoch(self, trainer: Any) -> None:
        if trainer.epoch == 1:
            self.between.put((trainer.step, through_a_file(trainer.state_dict())))

    def on_after_step(self, trainer: Any) -> None:
        groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in trainer.optimizer.param_groups
        ]
        self.steps[trainer.step] = {
            "batches": tensors_in(trainer.group.batches),
            "groups": groups,
            "trainable": [name for name, one in trainer.model.named_parameters() if one.requires_grad],
            "training": [name for name, module in trainer.model.named_modules() if module.training],
            "loss": [None if loss is None else loss.clone() for loss in trainer.step_info["loss"]],
        }


def tensors_in(value: Any) -> Any:
    """Return the tensors of a batch, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return value.to_dense().clone() if value.is_sparse else value.clone()
    if isinstance(value, dict):
        return {str(key): tensors_in(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [tensors_in(inner) for inner in value]
    return tensors_in(value.to_dict()) if hasattr(value, "to_dict") else str(type(value))


def run(row: Row, seed: int, *, steps: int, state: Any = None) -> tuple[Engine, Recorder]:
    """Build a row's objects and train them to a step, from the beginning or from a state."""
    set_seed(seed)
    case = row.make()
    engine = case.made()
    engine.prepare()
    recorder = Recorder()
    engine.hooks = [*engine.hooks, recorder]
    if state is not None:
        engine.load_state_dict(state)
    loader = case.loader
    if loader is None:
        loader = getattr(engine, "data_loader", None) or points_loader(shuffle=True)
    engine.run(loader, max_steps=steps)
    return engine, recorder


def end_of(engine: Engine) -> Any:
    """Return everything that a run ends with."""
    buffers = {name: value.clone() for name, value in engine.model.named_buffers()}
    return {"state": through_a_file(engine.state_dict()), "buffers": buffers}


def inexact(row: Row) -> list[str]:
    """Return where a run that was stopped and resumed differs from one that was not."""
    with quiet():
        straight, records = run(row, 0, steps=STEPS)
        expected = end_of(straight)
        stopped = ((stop, through_a_file(run(row, 0, steps=stop)[0].state_dict())) for stop in row.stops)
        for stop, state in (records.between.get(), *stopped):
            resumed, rest = run(row, 1, steps=STEPS, state=state)
            found = differences({step: records.steps[step] for step in range(stop + 1, STEPS + 1)}, rest.steps)
            found += differences(expected, end_of(resumed))
            if found:
                place = "the first epoch" if state["data"]["position"] == 0 else stop
                return [f"stopped after {place}: {line}" for line in found]
    return []


def refusal(row: Row) -> str:
    """Return the message that refuses a row before its first step, or an empty one."""
    set_seed(0)
    try:
        with quiet():
            case = row.make()
            engine = case.made()
    except (TreadleError, ValueError) as error:  # some are refused by torch, when they are built
        return str(error)
    try:
        with quiet():
            engine.prepare()
            engine.run(case.loader or getattr(engine, "data_loader", None) or points_loader(), max_steps=2)
    except TreadleError as error:
        return str(error) if engine.applied_steps == 0 else ""
    return ""


@contextlib.contextmanager
def quiet() -> Any:
    """Keep the warnings of packages about themselves out of the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
