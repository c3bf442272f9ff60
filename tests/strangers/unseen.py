"""State that hides still better: variables, constants, records, and own state dicts that forget."""

from __future__ import annotations

import array
import enum
import random
from collections import deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils import data as torch_data

from helpers import MeanSquare
from strangers.bench import ROWS, Case, Points, Row, net, points_loader
from strangers.models import AtStep
from strangers.objects import functional
from treadle import StepOutput
from treadle.hooks import BaseHook

HOOKS, DATA, OTHERS, MODELS = (
    "Hooks without their own state",
    "Data sets and collate functions",
    "Own objects",
    "Models",
)
OPTIMIZERS, SAMPLERS, VARIABLES = "Optimizers", "Samplers", "Variables not held by objects"
STOPS = (2, 5, 7)
CHANCE = np.random.default_rng(3)
CALLS = 0
Pair = namedtuple("Pair", "x y")


class Phase(enum.Enum):
    WARM = 1
    LATE = 2


@dataclass
class Entry:
    x: torch.Tensor
    weight: float


# -- hooks --------------------------------------------------------------------------------------------------------


class Constants(BaseHook):
    """Keeps an enum, a complex number, bytes, a dtype and a NumPy scalar."""

    def __init__(self) -> None:
        self.phase, self.turn, self.seen, self.kind = Phase.WARM, 1j, b"", torch.float32
        self.mean = np.float32(0)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.turn, self.seen = self.turn * 1j, self.seen + b"a"
        self.mean = self.mean * np.float32(0.9) + np.float32(0.1)
        if trainer.step == 3:
            self.phase, self.kind = Phase.LATE, torch.float64
        factor = (2 + self.turn.real + len(self.seen)) * (1 if self.phase is Phase.WARM else 0.5)
        factor *= 1.5 if self.kind is torch.float64 else 1.0
        for one in trainer.model.parameters():
            one.grad.mul_(float(self.mean) / factor)


class Forgets(BaseHook):
    """A hook whose own state leaves half of it out."""

    def __init__(self) -> None:
        self.kept, self.forgotten = 0, 0

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.kept, self.forgotten = self.kept + 1, self.forgotten + 1
        for one in trainer.model.parameters():
            one.grad.div_(self.kept + self.forgotten)

    def on_state_dict(self, trainer: Any, state_dict: Any) -> None:
        state_dict["hooks"][self.state_key] = {"kept": self.kept}

    def on_load_state_dict(self, trainer: Any, state_dict: Any) -> None:
        self.kept = state_dict["hooks"][self.state_key]["kept"]


class CopiesLate(BaseHook):
    """Takes a copy of the model before training, and lets it follow."""

    def on_before_train(self, trainer: Any) -> None:
        self.teacher = net()
        self.teacher.load_state_dict(trainer.model.state_dict())

    def on_before_optimizer_step(self, trainer: Any) -> None:
        with torch.no_grad():
            for slow, live in zip(self.teacher.parameters(), trainer.model.parameters(), strict=True):
                slow.lerp_(live, 0.3)
                live.grad.add_(live - slow)


def accumulate(trainer: Any) -> None:
    trainer.accumulation_steps = 2


def clip_values(trainer: Any) -> None:
    trainer.grad_clip_value = 0.01


def prune_more(trainer: Any) -> None:
    prune.l1_unstructured(trainer.model[0], "weight", 0.2)


def pruned() -> nn.Module:
    model = net()
    prune.identity(model[0], "weight")
    return model


# -- data ---------------------------------------------------------------------------------------------------------


class DrawsFromModule(Points):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + float(CHANCE.random()) / 10, y


class CountsOnClass(Points):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        type(self).reads += 1
        x, y = super().__getitem__(index)
        return x / type(self).reads, y


class ForgetsOrder(torch_data.Sampler):
    """A sampler whose state dict leaves its generator out."""

    def __init__(self) -> None:
        self.passes, self.chance = 0, random.Random(3)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        self.passes += 1
        order = list(range(ROWS))
        self.chance.shuffle(order)
        return iter(order)

    def state_dict(self) -> Any:
        return {"passes": self.passes}

    def load_state_dict(self, state: Any) -> None:
        self.passes = state["passes"]


def of_webdataset() -> Any:
    def case() -> Case:
        import webdataset

        shuffle = webdataset.shuffle(5, initial=5, rng=random.Random(0))

        def rows(data: Any) -> Any:
            for index in range(ROWS):
                yield Points()[index]

        pipeline = webdataset.DataPipeline(lambda: iter([None]), rows, shuffle)
        return Case(loader=torch_data.DataLoader(pipeline, batch_size=3))

    return case


def of_streamed_datasets() -> Case:
    import datasets

    table = {"x": Points().x.tolist(), "y": Points().x.sum(1, keepdim=True).tolist()}
    stream = datasets.Dataset.from_dict(table).to_iterable_dataset(num_shards=2).with_format("torch")
    return Case(loader=torch_data.DataLoader(stream, batch_size=3, num_workers=1), task=OfDicts())


def of_mapped_datasets() -> Case:
    import datasets

    table = {"x": Points().x.tolist(), "y": Points().x.sum(1, keepdim=True).tolist()}
    rows = datasets.Dataset.from_dict(table).with_format("torch")
    return Case(loader=torch_data.DataLoader(rows, batch_size=3, shuffle=True), task=OfDicts())


class OfDicts(MeanSquare):
    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        return super().step(model, (batch["x"] / 10, batch["y"] / 10))


# -- tasks, losses, models ----------------------------------------------------------------------------------------


class Replays(MeanSquare):
    """Keeps named tuples and entries of a class of its own, and draws from them."""

    def __init__(self) -> None:
        self.pairs, self.entries, self.chance = deque(maxlen=5), [], random.Random(1)

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        x, y = batch
        if model.training:
            self.pairs.append(Pair(x[0], y[0]))
            self.entries = [*self.entries, Entry(x[1], float(y[1]))][-4:]
            drawn, entry = self.chance.choice(list(self.pairs)), self.chance.choice(self.entries)
            x, y = torch.cat([x, drawn.x[None] * entry.weight + entry.x]), torch.cat([y, drawn.y[None]])
        return super().step(model, (x, y))


class Cooling:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / self.calls


class WithCooling(nn.Module):
    """A model with a plain object that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = net(), Cooling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (self.temperature() if self.training else 1.0)


class CountsInModule(MeanSquare):
    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        global CALLS
        CALLS += model.training
        output = super().step(model, batch)
        return StepOutput(output.loss / (1 + CALLS), weight=output.weight)


def counting_loss() -> Any:
    def loss(
        made: torch.Tensor, wanted: torch.Tensor, cache: Any = {"calls": 0}, scale: Any = torch.ones(1), *,
        counts: Any = array.array("i", [0]),
    ) -> torch.Tensor:  # fmt: skip
        cache["calls"] += 1
        counts[0] += 1
        loss.more = getattr(loss, "more", 0) + 1
        return (made - wanted).square().mean() * scale.mul_(0.9).item() / (cache["calls"] + loss.more + counts[0])

    return loss


# -- optimizers ---------------------------------------------------------------------------------------------------


class PlainLookahead:
    """A wrapper that is no Optimizer, with the state dict of the one inside it."""

    def __init__(self, base: Any):
        self.base, self.calls = base, 0
        self.slow = [one.detach().clone() for group in base.param_groups for one in group["params"]]

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.calls += 1
        if self.calls % 3 == 0:
            for fast, slow in zip(self.base.param_groups[0]["params"], self.slow, strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)


class SharesGroups(torch.optim.Optimizer):
    """A Lookahead over the groups of another optimizer."""

    def __init__(self, base: Any):
        super().__init__([one for group in base.param_groups for one in group["params"]], {"k": 3})
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for one in self.param_groups[0]["params"]:
            slow = self.state[one].setdefault("slow", one.detach().clone())
            one.copy_(slow.lerp_(one, 0.5))


class ByAddress(PlainLookahead):
    """The widely copied Lookahead whose state is keyed by id()."""

    def state_dict(self) -> Any:
        keys = [id(one) for one in self.base.param_groups[0]["params"]]
        return {**self.base.state_dict(), "slow": dict(zip(keys, self.slow, strict=True))}


class ByParameter(torch.optim.SGD):
    """Momenta in a dict whose keys are the parameters."""

    def __init__(self, params: Any):
        super().__init__(params, lr=0.05)
        self.momenta: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            self.momenta[one] = self.momenta.get(one, 0) * 0.9 + one.grad
            one.sub_(self.momenta[one], alpha=0.05)


class DoesNotLoad(ByAddress):
    def state_dict(self) -> Any:
        return {**self.base.state_dict(), "slow": list(self.slow)}

    def load_state_dict(self, state: Any) -> None:
        self.no_such_attribute.load_state_dict(state)


def row(name: str, kind: str, make: Any, words: tuple[str, ...] = (), needs: tuple[str, ...] = ()) -> Row:
    return Row(name, kind, make, words, needs, stops=STOPS)


def optimized(make: Any) -> Any:
    return lambda: Case(optimizer=lambda model: make(torch.optim.Adam(model.parameters(), lr=0.02)))


def module_variables(make: Any) -> Any:
    def case() -> Case:
        global CALLS
        CHANCE.bit_generator.state = np.random.default_rng(3).bit_generator.state
        CALLS, CountsOnClass.reads = 0, 0
        return make()

    return case


UNSEEN = [
    row("an enum, bytes, a complex number, a dtype, a NumPy scalar", HOOKS, lambda: Case(hooks=[Constants()])),
    row("a state that omits half", HOOKS, lambda: Case(hooks=[Forgets()])),
    row("a copy of the model, created before training", HOOKS, lambda: Case(hooks=[CopiesLate()])),
    row("setting accumulation_steps", HOOKS, lambda: Case(hooks=[AtStep(4, accumulate)])),
    row("setting grad_clip_value", HOOKS, lambda: Case(hooks=[AtStep(4, clip_values)])),
    row("a module-level generator", VARIABLES, module_variables(lambda: Case(
        loader=points_loader(DrawsFromModule(), shuffle=True)))),
    row("a module-level counter", VARIABLES, module_variables(lambda: Case(task=CountsInModule()))),
    row("a class-level counter", VARIABLES, module_variables(lambda: Case(
        loader=points_loader(CountsOnClass(), shuffle=True)))),
    row("counters, a tensor and an array in default arguments, and a counter on a function", VARIABLES, functional(
        counting_loss)),
    row("a sampler whose state dict omits its generator", SAMPLERS, lambda: Case(
        loader=points_loader(sampler=ForgetsOrder()))),
    row("named tuples and custom classes in containers", OTHERS, lambda: Case(task=Replays())),
    row("a model with a counting object", MODELS, lambda: Case(model=WithCooling())),
    row("iterative pruning by a hook", MODELS, lambda: Case(model=pruned(), hooks=[
        AtStep(3, prune_more)])),
    row("a wrapper that omits its own state", OPTIMIZERS, optimized(PlainLookahead)),
    row("a Lookahead that shares groups", OPTIMIZERS, optimized(SharesGroups)),
    row("state keyed by the addresses of parameters", OPTIMIZERS, optimized(ByAddress), ("ByAddress", "address")),
    row("momenta keyed by parameters outside of state", OPTIMIZERS, lambda: Case(
        optimizer=lambda model: ByParameter(model.parameters())), ("ByParameter", "momenta")),
    row("a load_state_dict that fails", OPTIMIZERS, optimized(DoesNotLoad), ("DoesNotLoad", "load_state_dict")),
    row("webdataset, shuffled by a generator", "Loaders", of_webdataset(), needs=("webdataset",)),
    row("datasets.Dataset", "Loaders", of_mapped_datasets, needs=("datasets",)),
    row("datasets.IterableDataset", "Loaders", of_streamed_datasets, needs=("datasets",)),
]  # fmt: skip
