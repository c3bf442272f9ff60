"""What a user brings that would fail or be ignored later is named before the first step."""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
from typing import NamedTuple

import attrs
import ml_collections
import pydantic
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer, BestRule, ConfigError, Engine, EpochTrainer, StepOutput, Trainer, ValidationHook
from treadle.hooks import CsvHook, HistoryHook, JsonlHook, SessionLogHook, StepLogHook

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def loader(size=8):
    return DataLoader(TensorDataset(X, Y), batch_size=size)


def parts():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def trainer(kind=Trainer, **options):
    return kind(*parts(), nn.MSELoss(), device="cpu", progress=False, **options)


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        return StepOutput((model(x) - y).square().mean(), {"off": 1.0})


class Base(BaseTrainer):
    def build_data_loader(self):
        return loader()

    def build_model(self):
        return nn.Linear(3, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def forward(self, input):
        x, y = input
        return (self.model(x) - y).square().mean(), {}

    def build_hooks(self):
        return [ValidationHook(loader(), interval=2, best=None)]


# -- overridden evaluations ----------------------------------------------------------------------------------------

WRONG = {
    "none": (lambda: None, "evaluate: the override returned a NoneType"),
    "number": (lambda: 0.5, "evaluate: the override returned a float"),
    "tensor": (lambda: torch.tensor(1.0), "evaluate: the override returned a Tensor"),
    "rows": (lambda: {"loss": torch.ones(3)}, r"evaluate: .*'loss' is a Tensor of shape \(3,\)"),
    "object": (lambda: {"loss": object()}, "evaluate: .*'loss' is a object"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_evaluation_of_the_users_that_gives_no_numbers_is_named(wrong):
    result, message = WRONG[wrong]

    class Mine(Trainer):
        def evaluate(self, dataloader):
            return result()

    class MineToo(EpochTrainer):
        def evaluate(self, loader):
            return result()

    class Third(Engine):
        def evaluate(self, loader, task=None):
            return result()

    class Fourth(Base):
        def evaluate(self, loader, task=None):
            return result()

    functional = trainer(Mine)
    engines = [Engine(*parts(), Fit(), device="cpu"), Third(*parts(), Fit(), device="cpu")]
    base = Fourth(max_steps=4, device="cpu")
    on_object = trainer()
    on_object.evaluate = lambda dataloader: result()
    for one, call in (
        (functional, lambda: functional.train(loader(), 2, loader())),
        (on_object, lambda: on_object.train(loader(), 2, loader())),
        (engines[0], lambda: MineToo(engines[0]).fit(loader(), loader(), 2)),
        (engines[1], lambda: EpochTrainer(engines[1]).fit(loader(), loader(), 2)),
        (base, base.train),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
        assert one.step == 0


def test_an_error_in_the_users_evaluation_comes_before_step_1():
    class Mine(Trainer):
        def evaluate(self, dataloader):
            return {"loss": self.modle(1)}

    mine = trainer(Mine)
    with pytest.raises(AttributeError, match="modle"):
        mine.train(loader(), 2, loader())
    assert mine.step == 0


def test_an_evaluation_that_needs_more_than_one_batch_is_only_named(caplog):
    class Mine(Trainer):
        calls = 0

        def evaluate(self, dataloader):
            self.calls += 1
            if len(list(dataloader)) < 2:
                raise ValueError("only one class")
            return {"loss": 0.5, "auc": 0.9}

    mine = trainer(Mine)
    history = mine.train(loader(), 2, loader())
    assert history["eval_auc"] == [0.9, 0.9]
    assert mine.calls == 2  # the trial is taken back
    assert "only one class" in caplog.text


def test_a_metric_that_the_users_evaluation_does_not_give_is_named_at_once(caplog):
    class Mine(Trainer):
        def evaluate(self, dataloader):
            return {"acc": torch.tensor(1.0)}

    with pytest.raises(ConfigError):
        trainer(Mine).train(loader(), 1, loader(), best_model_metric="accuracy")
    assert (
        "the override returned acc for the first batch, but the best epoch is selected by eval_accuracy" in caplog.text
    )


def test_the_best_rule_of_an_epoch_trainer_names_a_metric_that_is_there():
    engine = Engine(*parts(), Fit(), device="cpu")
    with pytest.raises(ConfigError, match=r"best.metric='val_acc': .* lr, train_loss, val_loss, val_off"):
        EpochTrainer(engine, best=BestRule("val_acc", "max")).fit(loader(), loader(), 2)
    assert engine.step == 0
    EpochTrainer(engine, best=BestRule("val_off", "max")).fit(loader(), loader(), 1)


def test_a_validation_hook_is_tried_and_its_metric_looked_for():
    shapes = ValidationHook([(X[:8, :2], Y[:8])], interval=2, best=None)
    unknown = ValidationHook(loader(), interval=2, best=None, metric="val_accuracy")
    for hook, error, text in (
        (shapes, RuntimeError, "shapes"),
        (unknown, ConfigError, "metric='val_accuracy': no eval"),
    ):
        engine = Engine(*parts(), Fit(), device="cpu", hooks=[hook])
        with pytest.raises(error, match=text):
            engine.run(loader(), max_steps=4)
        assert engine.step == 0


def test_loaders_that_can_be_read_once_are_refused_where_they_are_read_again():
    once = (batch for batch in loader())
    with pytest.raises(ConfigError, match=r"eval_dataloader: a generator .* read 3 times"):
        trainer().train(loader(), 3, once)
    with pytest.raises(ConfigError, match=r"val_loader: a generator .* read 2 times"):
        EpochTrainer(Engine(*parts(), Fit(), device="cpu")).fit(loader(), once, 2)
    assert trainer().train(loader(), 1, once)["eval_loss"]


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_misspelt_method_of_a_task_is_named(caplog):
    class Misspelt(Fit):
        def new_metric(self):
            return None

    Engine(*parts(), Misspelt(), device="cpu").run(loader(), max_steps=1)
    assert "Misspelt.new_metric: nothing calls it; did you mean 'new_metrics'?" in caplog.text


def test_a_direction_against_the_name_of_the_metric_is_named(caplog):
    trainer(metrics=["r2"]).train(loader(), 1, loader(), best_model_metric="r2", best_mode="min")
    assert "best_mode='min': the name of eval_r2 means that higher is better" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trainer(scheduler=torch.optim.lr_scheduler.StepLR), "scheduler: is the class StepLR; make an object"),
        (lambda: trainer().evaluate({"a": loader()}), "dataloader: is a dict of loaders"),
        (lambda: trainer().train(loader(), 1, save_dir="~/runs"), "save_dir='~/runs': only a shell expands '~'"),
        (lambda: trainer().train(loader(), 1, save_dir=""), "save_dir='': must not be empty"),
        (lambda: Base(max_steps=1, workspace="~/runs"), "workspace='~/runs': only a shell expands '~'"),
        (lambda: trainer(config={"training": {"lr": 0.1}}), "unknown key 'lr'; did you mean 'learning_rate'"),
        (lambda: trainer(compile="block"), "^compile='block'"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    "make", [JsonlHook, CsvHook, StepLogHook, SessionLogHook, lambda path: HistoryHook(path, history=list)]
)
def test_a_folder_in_the_place_of_a_file_stays_where_it_is(tmp_path, make):
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(ConfigError, match=r"runs'?: is a folder; give the path"):
        Engine(*parts(), Fit(), device="cpu", hooks=[make(folder)]).run(loader(), max_steps=1)
    assert os.listdir(tmp_path) == ["runs"]
    assert os.listdir(folder) == ["mine"]


# -- a config whose values others decide -----------------------------------------------------------------------------

VALUES = {"batch_size": 64, "num_epochs": 5, "seed": 3}


@dataclasses.dataclass
class Data_:
    batch_size: int = 64
    num_epochs: int = 5
    seed: int = 3


@attrs.define
class Attrs:
    batch_size: int = 64
    num_epochs: int = 5
    seed: int = 3


class Slots:
    __slots__ = ("batch_size", "num_epochs", "seed")

    def __init__(self):
        self.batch_size, self.num_epochs, self.seed = 64, 5, 3


class Pydantic(pydantic.BaseModel):
    batch_size: int = 64
    num_epochs: int = 5
    seed: int = 3


class Named(NamedTuple):
    batch_size: int = 64
    num_epochs: int = 5
    seed: int = 3


class Plain:
    batch_size = 64
    num_epochs = 5
    seed = 3


KINDS = {
    "dict": dict(VALUES), "dataclass": Data_(), "attrs": attrs.asdict(Attrs()) and Attrs(), "pydantic": Pydantic(),
    "slots": Slots(), "named tuple": Named(), "class attributes": Plain(), "argparse": argparse.Namespace(**VALUES),
    "namespace": types.SimpleNamespace(**VALUES), "ml_collections": ml_collections.ConfigDict(VALUES),
    "omegaconf": OmegaConf.create(VALUES),
}  # fmt: skip
EXPECTED = {
    "batch_size=64 is ignored: the loader has batch_size=8",
    "num_epochs=5 is ignored: train() was called with num_epochs=1",
    "seed=3 is ignored: torch was seeded with 0",
}  # fmt: skip


@pytest.mark.parametrize("where", ["part", "top"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_a_config_that_others_decide_are_compared(kind, where, caplog):
    config = {"training": KINDS[kind]} if where == "part" else KINDS[kind]
    torch.manual_seed(0)
    trainer(config=config).train(loader(), 1)
    found = {text for text in EXPECTED if any(f".{text}" in record.getMessage() for record in caplog.records)}
    assert found == EXPECTED


def test_values_that_are_in_force_are_not_named(caplog):
    torch.manual_seed(3)
    part = {"batch_size": 16, "num_epochs": 2, "seed": 3, "gradient_accumulation_steps": 2, "max_eval_samples": 24}
    trainer(config={"training": part}).train(loader(8), 2, loader())
    assert caplog.text == ""


def test_more_samples_of_an_evaluation_than_the_config_tells_are_named(caplog):
    trainer(config={"training": {"max_eval_samples": 10}}).train(loader(), 1, loader())
    assert "max_eval_samples=10 is ignored: the evaluation loader yields 24 samples and all are used" in caplog.text


# -- masks ---------------------------------------------------------------------------------------------------------


class Graph(types.SimpleNamespace):
    def __getitem__(self, name):
        return getattr(self, name)


def graph(**masks):
    return Graph(x=X[:8], y=Y[:8], **{name: torch.arange(8) < 4 for name in masks or ("train_mask",)})


class Reads(Base):
    loss = None

    def build_data_loader(self):
        return [graph()] * 4

    def build_hooks(self):
        return []

    def forward(self, input):
        rows = getattr(input, "train_mask")
        return (self.model(input.x) - input.y)[rows].square().mean(), {}


class Ignores(Reads):
    def forward(self, input):
        return (self.model(input.x) - input.y).square().mean(), {}


def helper(batch):
    return batch["train_mask"]


class Indirect(Reads):
    def forward(self, input):
        return (self.model(input.x) - input.y)[helper(input)].square().mean(), {}


class InTask(Fit):
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput((model(batch.x) - batch.y).square().mean())


def functional_over_graphs():
    class Graphs(Trainer):
        def _prepare_batch(self, batch):
            return batch.x, batch.y

    return trainer(Graphs).train([graph()] * 2, 1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Ignores(max_steps=2, device="cpu").train(), True),
        (lambda: Reads(max_steps=2, device="cpu").train(), False),
        (lambda: Indirect(max_steps=2, device="cpu").train(), False),
        (lambda: Engine(*parts(), InTask(), device="cpu").run([graph()] * 2, max_steps=2), True),
        (functional_over_graphs, True),
    ],
)
def test_masks_that_nothing_reads_are_named_once(call, named, caplog):
    call()
    assert caplog.text.count("the batch has train_mask") == int(named)


def test_masks_of_an_evaluation_are_looked_for(caplog):
    hook = ValidationHook([graph(val_mask=1, test_mask=1)], interval=1, best=None)
    Engine(*parts(), InTask(), device="cpu", hooks=[hook]).run([(graph())] * 2, max_steps=1)
    assert "the batch has val_mask and test_mask" in caplog.text


def test_inputs_and_targets_in_a_tuple_are_no_batches():
    for call in (
        lambda: trainer().train((X, Y), 1),
        lambda: trainer().train(loader(), 1, (X, Y)),
        lambda: Engine(*parts(), InTask(), device="cpu").run((X, Y), max_steps=1),
    ):
        with pytest.raises(
            ConfigError, match=r"a tuple of tensors of shapes \(24, 3\), \(24, 1\): each of them would be"
        ):
            call()
