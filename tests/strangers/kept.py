"""What users keep in still other ways: iterators, views, references to layers, data sets beside the loader."""

from __future__ import annotations

import array
import contextvars
import dataclasses
import enum
import functools
import itertools
import queue
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from helpers import MeanSquare
from strangers.bench import WIDTH, Case, Points, Row, net, points_loader
from strangers.objects import With
from treadle import StepOutput
from treadle.hooks import BaseHook

OWN, HOOKS, MODELS, DATA = (
    "Own objects",
    "Hooks without their own state",
    "Models",
    "Data sets and collate functions",
)
VARIABLES = "Variables not held by objects"
STOPS = (2, 7)


class Scaled(MeanSquare):
    """A task that divides its loss by a number that :meth:`next` returns."""

    def next(self, batch: Any) -> Any:
        raise NotImplementedError

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        output = super().step(model, batch)
        return StepOutput(output.loss / (1 + self.next(batch)), weight=output.weight)


def divide(trainer: Any, number: float) -> None:
    for one in trainer.model.parameters():
        one.grad.div_(1 + number)


# -- iterators, views and variables -------------------------------------------------------------------------------


class Iterators(Scaled):
    def __init__(self) -> None:
        self.parts = [itertools.cycle([1, 2, 4]), itertools.chain(range(3), range(5, 99)), iter([3.0, 1.0] * 9)]
        self.waiting: queue.Queue[int] = queue.Queue(3)
        self.pairs = enumerate(zip(range(99), itertools.repeat(2)), start=1)

    def next(self, batch: Any) -> Any:
        number, (one, two) = next(self.pairs)
        if self.waiting.full():
            number += self.waiting.get()
        self.waiting.put(number)
        return sum(next(part) for part in self.parts) + number + one * two


HITS, COUNT, PLAN = array.array("i", [0]), itertools.count(1), iter(range(99))
VIEW = memoryview(bytearray(4))
LOCAL, CONTEXT = threading.local(), contextvars.ContextVar("calls", default=0)


class Node:
    calls = 0


HELD = Node()
BEHIND = weakref.ref(HELD)


class OfVariables(Scaled):
    def next(self, batch: Any) -> Any:
        HITS[0] += 1
        VIEW[1] += 2
        return HITS[0] + VIEW[1] + next(COUNT) + next(PLAN)


class OfHiddenVariables(Scaled):
    def next(self, batch: Any) -> Any:
        node = BEHIND()
        node.calls += 1
        LOCAL.calls += 1
        CONTEXT.set(CONTEXT.get() + 1)
        return node.calls + LOCAL.calls + CONTEXT.get()


def of_variables() -> Case:
    global COUNT, PLAN
    HITS[0], VIEW[1], COUNT, PLAN = 0, 0, itertools.count(1), iter(range(99))
    return Case(task=OfVariables())


def of_hidden_variables() -> Case:
    HELD.calls, LOCAL.calls = 0, 0
    CONTEXT.set(0)
    return Case(task=OfHiddenVariables())


class Encloses:
    """A hook of a local class, whose method encloses a counter."""

    @staticmethod
    def made() -> BaseHook:
        calls = {"all": 0}

        class Counts(BaseHook):
            def on_before_optimizer_step(self, trainer: Any) -> None:
                calls["all"] += 1
                divide(trainer, calls["all"])

        return Counts()


# -- parameters and layers ----------------------------------------------------------------------------------------


class HidesParameters(nn.Module):
    """Parameters in a list, and tensors, which it writes through ``.data``, as many an average is written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scales = net(), [nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))]
        self.mean = torch.zeros(WIDTH)
        self.register_buffer("spread", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scales[1].data = 0.9 * self.scales[1].data + 0.1 * x.mean(0)
            self.mean.data.lerp_(x.mean(0), 0.1)
            self.spread.data.mul_(0.95)
        return self.inner((x - self.mean) * self.scales[0] * self.spread + self.scales[1])


class KeyedByParts(BaseHook):
    """Norms by parameter, calls by layer, and the layer whose turn it is."""

    def __init__(self, model: nn.Module):
        self.layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        self.norms, self.calls, self.active = dict.fromkeys(model.parameters(), 0.0), {}, self.layers[0]

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.active = self.layers[(len(self.calls) + trainer.step) % 2]
        self.calls[self.active] = self.calls.get(self.active, 0) + 1
        for one in self.norms:
            self.norms[one] = 0.9 * self.norms[one] + float(one.grad.norm())
            one.grad.div_(1 + self.norms[one])
        for one in self.active.parameters():
            one.grad.div_(self.calls[self.active])


def keyed_by_parts() -> Case:
    model = net()
    return Case(model=model, hooks=[KeyedByParts(model)])


def patched() -> Case:
    model, calls, steps = net(), itertools.count(1), [0]
    forward = model.forward
    model.forward = lambda x: forward(x) * (1 + next(calls) / 10)

    def optimizer(of: nn.Module) -> Any:
        made = torch.optim.SGD(of.parameters(), lr=0.05)
        plain = made.step

        def step(closure: Any = None) -> Any:
            steps[0] += 1
            for one in of.parameters():
                one.grad.div_(steps[0])
            return plain(closure)

        made.step = step
        return made

    return Case(model=model, optimizer=optimizer)


# -- objects in the place of others, and beside ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    calls: int = 0


class Options(enum.Flag):
    FIRST = 1
    LATE = 2


class Replaces(Scaled):
    """Replaces a frozen record, hands an object on, and swaps two objects and two layers."""

    def __init__(self) -> None:
        self.record, self.now, self.options = Frozen(), Node(), Options.FIRST
        self.late: Node | None = None
        self.before = self.now
        self.one, self.other = Node(), Node()
        self.left, self.right = nn.Linear(1, 1), nn.Linear(1, 1)
        self.recent = deque([nn.Linear(1, 1), nn.Linear(1, 1)])

    @torch.no_grad()
    def next(self, batch: Any) -> Any:
        self.record = dataclasses.replace(self.record, calls=self.record.calls + 1)
        self.before, self.now = self.now, Node()
        self.now.calls = self.before.calls + 2
        self.one, self.other = self.other, self.one
        self.one.calls += 1 + self.other.calls
        self.late = Node() if self.late is None else self.late
        self.late.calls += 1
        self.left, self.right = self.right, self.left
        self.left.weight.mul_(0.5)
        self.recent.rotate()
        self.recent[0].weight.mul_(0.7)
        if self.record.calls == 4:
            self.options |= Options.LATE
        factor = 2 if Options.LATE in self.options else 1
        return (
            (self.record.calls + self.before.calls + self.one.calls + self.late.calls) * factor
            + self.left.weight.abs().sum()
            + self.recent[1].weight.abs().sum()
        )


class Memory(Dataset):
    """A data set that the task fills, beside the one that is trained on."""

    def __init__(self) -> None:
        self.rows: list[Any] = [torch.zeros(WIDTH)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Remembers(Scaled):
    def __init__(self) -> None:
        self.memory = Memory()

    def next(self, batch: Any) -> Any:
        self.memory.rows = [*self.memory.rows, batch[0][0].clone()][-4:]
        return self.memory[len(self.memory) // 2].abs().sum()


class Critic(nn.Module):
    """A loss module that steps an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer, self.first = torch.optim.Adam([self.weight], lr=0.05), None

    def learn(self, target: torch.Tensor) -> torch.Tensor:
        self.first = target.mean() if self.first is None else self.first
        self.optimizer.zero_grad()
        (self.weight.sum() - target.mean() / (0.1 + self.first.abs())).square().backward()
        self.optimizer.step()
        return self.weight.detach().abs().sum()


class ForgetsItsOptimizer:
    """An object whose state_dict leaves out its optimizer."""

    def __init__(self) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def learn(self, target: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.net(target) - target).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state_dict(self) -> Any:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.net.load_state_dict(state["net"])


class Learns(Scaled, With):
    def next(self, batch: Any) -> Any:
        return self.critic.learn(batch[1])


def weighted(state: dict[str, int], weights: list[float], batch: Any) -> float:
    state["calls"] += 1
    weights.append(state["calls"] / 2)
    return sum(weights)


class CallsPartial(Scaled):
    def __init__(self) -> None:
        self.next = functools.partial(weighted, {"calls": 0}, [0.5])


class Standardises(Scaled):
    def __init__(self) -> None:
        from sklearn.preprocessing import StandardScaler

        self.scaler = StandardScaler()

    def next(self, batch: Any) -> Any:
        self.scaler.partial_fit(batch[0].numpy())
        return float(abs(self.scaler.transform(batch[0].numpy())).mean())


class OfItsWorker(Points):
    """Adds what depends on the worker that reads an item."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        x, y = super().__getitem__(index)
        return x + (0 if info is None else info.id) / 10, y


def row(name: str, kind: str, make: Any, needs: tuple[str, ...] = (), stops: Any = STOPS) -> Row:
    return Row(name, kind, make, (), needs, stops=stops)


def of_task(make: Any) -> Any:
    return lambda: Case(task=make())


KEPT = [
    row("iterators: cycle, chain, enumerate, zip, of lists and ranges", OWN, of_task(Iterators), stops=(2,)),
    row("array.array, memoryview, count and an iterator", VARIABLES, of_variables),
    row("behind a weak reference, in threading.local and in a ContextVar", VARIABLES, of_hidden_variables),
    row("in the closure of a local class's method", VARIABLES, lambda: Case(hooks=[Encloses.made()])),
    row("parameters in a list, tensors written through .data", MODELS, lambda: Case(
        model=HidesParameters(),
        optimizer=lambda of: torch.optim.Adam([*of.parameters(), of.scales[0]], lr=0.02))),
    row("dicts keyed by parameters and by layers", HOOKS, keyed_by_parts),
    row("replaced forward and optimizer step", MODELS, patched),
    row("objects that are replaced, handed on and swapped; flags", OWN, of_task(Replaces)),
    row("a data set besides the loader's", OWN, of_task(Remembers)),
    row("a loss module with an optimizer", OWN, of_task(lambda: Learns(critic=Critic()))),
    row("a state_dict that omits an optimizer", OWN, of_task(lambda: Learns(critic=ForgetsItsOptimizer()))),
    row("a partial with a dict and a list", OWN, of_task(CallsPartial)),
    row("an estimator of scikit-learn", OWN, of_task(Standardises), needs=("sklearn.preprocessing",)),
    row("items that depend on the worker", DATA, lambda: Case(
        loader=points_loader(OfItsWorker(), num_workers=2)), stops=(3,)),
]  # fmt: skip
