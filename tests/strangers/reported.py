"""What public reports are about: state in other modules, in objects of libraries, and in a trainer's own config."""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.stats import qmc
from torch import nn

from helpers import MeanSquare
from strangers import beside
from strangers.bench import WIDTH, Case, Points, Row, net, points_loader
from strangers.kept import Scaled, divide
from strangers.unseen import OfDicts
from treadle import BaseTrainer, StepOutput
from treadle.hooks import BaseHook

HOOKS, OWN, MODELS, DATA, VARIABLES = (
    "Hooks without their own state",
    "Own objects",
    "Models",
    "Data sets and collate functions",
    "Variables not held by objects",
)
STOPS = (2, 5, 7)


class Returns(Scaled):
    """Divides by what a function returns."""

    def __init__(self, function: Any):
        self.function = function

    def next(self, batch: Any) -> Any:
        return self.function()


class Divides(BaseHook):
    """Divides gradients by a number drawn from an object that it holds."""

    def __init__(self, source: Any, draw: Any):
        self.source, self.draw = source, draw

    def on_before_optimizer_step(self, trainer: Any) -> None:
        divide(trainer, float(self.draw(self.source)))


# -- variables of other modules -----------------------------------------------------------------------------------


def through_an_import() -> float:
    beside.calls += 1
    return beside.count()


def through_an_import_inside() -> float:
    from strangers import beside as inner

    return inner.count() + inner.COUNTS["by name"][0]()


def of_variables(function: Any) -> Any:
    def case() -> Case:
        beside.begin()
        return Case(task=Returns(function))

    return case


class Instance:
    def __call__(self) -> float:
        return beside.count()


INSTANCE = Instance()
CHOSEN = {"partial": functools.partial(beside.count), "instance": INSTANCE}


def through_a_registry() -> float:
    return sum(one() for one in CHOSEN.values())


class PrivateSlots:
    __slots__ = ("__count", "rate")

    def __init__(self) -> None:
        self.__count, self.rate = 0, 1.0

    def __call__(self) -> float:
        self.__count += 1
        self.rate *= 0.9
        return self.__count * self.rate


def transformed() -> Case:
    import datasets

    beside.begin()
    table = {"x": Points().x.tolist(), "y": Points().x.sum(1, keepdim=True).tolist()}
    rows = datasets.Dataset.from_dict(table)
    rows.set_transform(moved)
    return Case(loader=points_loader(rows, shuffle=True), task=OfDicts())


def moved(batch: Any) -> Any:
    return {"x": torch.tensor(batch["x"]) / beside.count(), "y": torch.tensor(batch["y"])}


# -- objects of libraries -----------------------------------------------------------------------------------------


class Record(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("rates", ctypes.c_double * 2)]


class InMemory(Scaled):
    """Counts in a number and a record of ctypes."""

    def __init__(self) -> None:
        self.number, self.record = ctypes.c_int(0), Record(0)

    def next(self, batch: Any) -> Any:
        self.number.value += 1
        self.record.count += 2
        self.record.rates[1] += 0.5
        return self.number.value * self.record.count + self.record.rates[1]


class Managed(Scaled):
    """Counts in the dict, list and number of a manager."""

    def __init__(self, manager: Any):
        self.shared, self.seen, self.total = manager.dict(count=0), manager.list([1]), manager.Value("i", 0)

    def next(self, batch: Any) -> Any:
        self.shared["count"] += 1
        self.seen.append(self.shared["count"])
        self.total.value += 1
        return self.shared["count"] + sum(self.seen) + self.total.value


def seeded(distribution: Any) -> Any:
    distribution.random_state = 0
    return distribution


class Prior(MeanSquare):
    """Pulls outputs towards a distribution that it replaces in each step."""

    def __init__(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(1), torch.ones(1))

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        made = model(batch[0])
        loss = torch.nn.functional.mse_loss(made, batch[1]) - 0.1 * self.prior.log_prob(made).mean()
        self.prior = torch.distributions.Normal(self.prior.loc + made.detach().mean(), self.prior.scale * 0.9)
        return StepOutput(loss, weight=len(made))


class Temporal(Scaled):
    """Keeps the last neighbours of nodes, as in temporal graph networks, and a graph that it changes."""

    def __init__(self) -> None:
        from torch_geometric.data import Data
        from torch_geometric.nn.models.tgn import LastNeighborLoader

        self.neighbours = LastNeighborLoader(12, size=3)
        self.graph = Data(x=torch.ones(2), count=0)

    def next(self, batch: Any) -> Any:
        nodes = (batch[0][:, 0] * 10).round().long()
        found, _, events = self.neighbours(nodes.unique())
        self.neighbours.insert(nodes, nodes.flip(0))
        self.graph.x = self.graph.x * 0.9
        self.graph.count += 1
        return len(found) + events.sum() + self.graph.x.sum() + self.graph.count


class Allocates(BaseHook):
    """Prunes ranks by the gradients that it has seen."""

    def on_before_optimizer_step(self, trainer: Any) -> None:
        trainer.model.update_and_allocate(trainer.step)


class Tokens(MeanSquare):
    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        ids = (batch[0] * 10).abs().long() % 8
        return StepOutput(model(input_ids=ids, labels=ids).loss)


def adalora() -> Case:
    from peft import AdaLoraConfig
    from peft.tuners.adalora import AdaLoraModel
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2}
    with torch.random.fork_rng():
        torch.manual_seed(5)  # for the base model, which a checkpoint leaves out
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    ranks = AdaLoraConfig(init_r=4, target_r=1, tinit=1, tfinal=2, total_step=9, target_modules=["c_attn"])
    return Case(
        model=AdaLoraModel(model, {"default": ranks}, "default"), task=Tokens(), hooks=[Allocates()],
        optimizer=lambda of: torch.optim.AdamW([one for one in of.parameters() if one.requires_grad], lr=0.05),
    )  # fmt: skip


# -- a config of the trainer's own --------------------------------------------------------------------------------


class Configured(BaseTrainer):
    """Lowers a value of the config that it was given."""

    def __init__(self, config: Any):
        super().__init__(9, device="cpu", progress=False)
        self.config = config

    def build_data_loader(self) -> Any:
        return points_loader(shuffle=True)

    def build_model(self) -> Any:
        return net()

    def build_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def forward(self, input: Any) -> Any:
        held = self.config if isinstance(self.config, dict) else vars(self.config)
        held["rate"] *= 0.8
        return torch.nn.functional.mse_loss(self.model(input[0]), input[1]) * held["rate"], {}


# -- values of the standard library -------------------------------------------------------------------------------


class MoreIterators(Scaled):
    def __init__(self) -> None:
        self.numbers = [
            itertools.accumulate(range(1, 50)), itertools.compress(range(50), [1, 0] * 25), iter(bytes(range(50))),
            iter(bytearray(range(50))), iter(array.array("i", range(50))), iter(np.arange(50)),
        ]  # fmt: skip
        self.groups = [
            itertools.product([1, 2, 3], repeat=3), itertools.permutations(range(5)),
            itertools.combinations(range(9), 3), itertools.combinations_with_replacement(range(9), 3),
            itertools.zip_longest(range(50), range(2), fillvalue=7),
        ]  # fmt: skip
        self.window = slice(None, 1)

    def next(self, batch: Any) -> Any:
        self.window = slice(None, self.window.stop + 1)
        return sum(int(next(each)) for each in self.numbers) + sum(sum(next(each)) for each in self.groups) + len(
            range(99)[self.window]
        )  # fmt: skip


class InNamespace(Scaled):
    def __init__(self) -> None:
        self.parts = SimpleNamespace(losses=[nn.BatchNorm1d(WIDTH, affine=False)], steps=0)

    def next(self, batch: Any) -> Any:
        self.parts.steps += 1
        self.parts.losses[0](batch[0])
        return self.parts.steps + self.parts.losses[0].running_mean.abs().sum()


class SeenThroughNumPy(Scaled):
    """Counts in one element of a large tensor, through a view that the tensor does not notice."""

    def __init__(self) -> None:
        self.counts = torch.zeros(50_000)

    def next(self, batch: Any) -> Any:
        self.counts.numpy()[12345] += 1
        return self.counts[12345]


def configured(made: Any) -> Any:
    return lambda: Case(engine=Configured(made(rate=1.0)))


REPORTED = [
    Row("of another module, by its attributes", VARIABLES, of_variables(through_an_import), stops=STOPS),
    Row("of a module imported in the function", VARIABLES, of_variables(through_an_import_inside), stops=STOPS),
    Row("behind a registry of partials and instances", VARIABLES, of_variables(through_a_registry), stops=STOPS),
    Row("private slots", OWN, lambda: Case(task=Returns(PrivateSlots())), stops=STOPS),
    Row("a number and a Structure of ctypes", OWN, lambda: Case(task=InMemory()), stops=STOPS),
    Row("iterators: accumulate, compress, product, permutations, zip_longest, of bytes and arrays; a slice",
        OWN, lambda: Case(task=MoreIterators()), stops=STOPS),
    Row("a module and a counter in a namespace", OWN, lambda: Case(task=InNamespace()), stops=STOPS),
    Row("a large tensor that is written through NumPy", OWN, lambda: Case(task=SeenThroughNumPy()), stops=STOPS),
    Row("a distribution that is replaced in each step", OWN, lambda: Case(task=Prior()), stops=STOPS),
    Row("LastNeighborLoader and a changed Data of torch_geometric", OWN, lambda: Case(task=Temporal()),
        needs=("torch_geometric",), stops=STOPS),
    Row("a SobolEngine", HOOKS, lambda: Case(hooks=[Divides(torch.quasirandom.SobolEngine(1, True, seed=0),
        lambda source: source.draw(1))]), stops=STOPS),
    Row("a Sobol sequence of SciPy", HOOKS,
        lambda: Case(hooks=[Divides(qmc.Sobol(1, rng=0), lambda source: source.random(1)[0, 0])]), stops=STOPS),
    Row("a frozen distribution of SciPy with a seed", HOOKS,
        lambda: Case(hooks=[Divides(seeded(stats.norm(1, 0.1)), lambda source: source.rvs())]), stops=STOPS),
    Row("a NumPy SeedSequence that spawns", HOOKS, lambda: Case(hooks=[Divides(np.random.SeedSequence(0),
        lambda source: np.random.default_rng(source.spawn(1)[0]).random())]), stops=STOPS),
    Row("a NumPy Generator that spawns", HOOKS, lambda: Case(hooks=[Divides(np.random.default_rng(0),
        lambda source: source.spawn(1)[0].random())]), stops=STOPS),
    Row("a NumPy BitGenerator", HOOKS, lambda: Case(hooks=[Divides(np.random.PCG64(0),
        lambda source: np.random.Generator(source).random())]), stops=STOPS),
    Row("a transform of datasets that reads a variable", DATA, transformed, needs=("datasets",), stops=STOPS),
    Row("AdaLoRA of peft, which prunes ranks", MODELS, adalora, needs=("peft", "transformers"), stops=STOPS),
    Row("a dict as the config of a BaseTrainer", OWN, configured(dict), stops=STOPS),
    Row("a namespace as the config of a BaseTrainer", OWN, configured(SimpleNamespace), stops=STOPS),
]  # fmt: skip
