"""What users put in the place of other parts while training, and what no checkpoint holds, is refused or named."""

from __future__ import annotations

import array
import logging
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers import MeanSquare, through_a_file
from ranks import run_on_ranks
from strangers.bench import Points, net, points_loader
from strangers.models import AtStep
from treadle import BaseTrainer, CheckpointError, ConfigError, Engine, StepOutput, Trainer
from treadle.checkpoint import plain_values
from treadle.hooks import BaseHook


def engine_of(*hooks: BaseHook, task: Any = None) -> Engine:
    model = net()
    return Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.05), task or MeanSquare(), device="cpu", hooks=[*hooks]
    )


class Saves(BaseHook):
    """Makes a checkpoint after every step."""

    def on_after_step(self, trainer: Any) -> None:
        trainer.request_write(trainer.state_dict)


# -- parts in the place of others ---------------------------------------------------------------------------------


def another_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)


def another_model(trainer: Any) -> None:
    trainer.model = net()


def another_schedule(trainer: Any) -> None:
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)


def another_layer(trainer: Any) -> None:
    trainer.model[0] = nn.Sequential(trainer.model[0])


def another_parameter(trainer: Any) -> None:
    trainer.model[0].weight = nn.Parameter(trainer.model[0].weight.detach().clone())
    trainer.optimizer.add_param_group({"params": [trainer.model[0].weight]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_optimizer, r"optimizer: replaced after the run began \(SGD then, another SGD now\)"),
        (another_model, r"model: replaced after the run began \(Sequential then"),
        (another_schedule, r"scheduler: replaced after the run began \(NoneType then, another StepLR"),
    ],
)
def test_a_part_that_was_replaced_is_refused_at_the_next_save(change: Any, message: str) -> None:
    engine = engine_of(AtStep(2, change), Saves())
    with pytest.raises(CheckpointError, match=message):
        engine.run(points_loader(), max_steps=3)
    assert engine.step == 2


def one_more_layer(trainer: Any) -> None:
    trainer.model.add_module("extra", nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("change", "event", "message", "refusal"),
    [
        (
            another_layer,
            "0 was added to this Sequential",
            "gained 0.0.bias, 0.0.weight and lost 0.bias",
            "missing 0.weight",
        ),
        (one_more_layer, "extra was added to this Sequential", "gained extra.bias, extra.weight", "extra.weight"),
        (another_parameter, "", "optimizer: 0.weight replaced another", "optimizer: "),
    ],
)
def test_a_parameter_that_was_added_is_named_at_once_saved_and_refused_by_a_run_without_it(
    change: Any, event: str, message: str, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(AtStep(2, change))
    engine.run(points_loader(), max_steps=3)
    assert event in caplog.text
    saved: dict[str, Any] = {}

    class Keeps(Saves):
        def on_after_step(self, trainer: Any) -> None:
            trainer.request_write(lambda: saved.update(through_a_file(trainer.state_dict())))

    engine = engine_of(AtStep(2, change), Keeps())
    engine.run(points_loader(), max_steps=3)
    assert message in caplog.text
    assert saved["global_step"] == 3
    with pytest.raises(CheckpointError, match=refusal):
        engine_of().load_state_dict(saved)


def tied(trainer: Any) -> None:
    trainer.model[2].weight = trainer.model[0].weight


def fresh_and_not_trained(trainer: Any) -> None:
    trainer.model[2].weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize("change", [tied, fresh_and_not_trained])
def test_a_parameter_in_the_place_of_another_is_named_at_the_next_save(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.05), MeanSquare(), device="cpu",
        hooks=[AtStep(2, change), Saves()],
    )  # fmt: skip
    engine.run(points_loader(), max_steps=4)
    assert caplog.text.count("model: 2.weight was replaced by another parameter after the run began") == 1


def test_parts_that_are_replaced_between_two_runs_are_not() -> None:
    engine = engine_of(Saves())
    engine.run(points_loader(), max_steps=1)
    another_optimizer(engine)
    engine.run(points_loader(), max_steps=2)
    assert engine.optimizer.param_groups[0]["lr"] == 0.01


class Fit(BaseTrainer):
    def build_model(self) -> nn.Module:
        return net()

    def build_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def build_data_loader(self) -> Any:
        return points_loader()

    def forward(self, input: Any) -> Any:
        return self.model(input[0]).square().mean(), {}


def another_task(trainer: Any) -> None:
    trainer.task = MeanSquare()


def another_loader(trainer: Any) -> None:
    trainer.data_loader = points_loader()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_task, "task: replaced by another MeanSquare"),
        (another_loader, "data_loader: replaced by another DataLoader"),
    ],
)
def test_another_task_or_loader_is_named_once(change: Any, message: str, caplog: pytest.LogCaptureFixture) -> None:
    Fit(max_steps=4, device="cpu", hooks=[AtStep(2, change), Saves()]).train()
    assert caplog.text.count(message) == 1


def test_another_loss_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(net(), None, nn.MSELoss(), device="cpu", hooks=[Saves()])
    trainer.train(points_loader(), 2, callbacks=[lambda of, epoch, metrics: setattr(of, "loss_fn", nn.L1Loss())])
    assert caplog.text.count("loss_fn: replaced by L1Loss") == 1


@pytest.mark.parametrize("name", ["run", "train_means", "step_group"])
def test_an_attribute_that_hides_a_method_is_named(name: str) -> None:
    class Mine(Fit):
        def build_model(self) -> nn.Module:
            setattr(self, name, nn.Linear(1, 1))
            return net()

    with pytest.raises(ConfigError, match=f"Mine.{name}: a Linear was assigned.*hides the method {name}"):
        Mine(max_steps=1, device="cpu").train()


def test_a_function_in_the_place_of_a_method_is_not_refused() -> None:
    trainer = Fit(max_steps=1, device="cpu")
    trainer.validate = lambda loader: {}
    trainer.train()
    assert trainer.step == 1


# -- state of callbacks, and iterators ----------------------------------------------------------------------------


class Lowers:
    """A callback that counts, and lowers the rate by the count."""

    def __init__(self) -> None:
        self.epochs = 0

    def __call__(self, trainer: Any, epoch: int, metrics: Any) -> None:
        self.epochs += 1
        trainer.optimizer.param_groups[0]["lr"] /= self.epochs


class LowersAndHolds(Lowers):
    """The same, with something from its first call on that no checkpoint can hold, as a file."""

    file: Any = None

    def __call__(self, trainer: Any, epoch: int, metrics: Any) -> None:
        self.file = self.file or object()
        super().__call__(trainer, epoch, metrics)


@pytest.mark.parametrize("kind", [Lowers, LowersAndHolds])
def test_the_state_of_a_callback_is_carried(kind: Any, tmp_path: Any) -> None:
    def train(epochs: int, folder: str, seed: int) -> tuple[torch.Tensor, int]:
        torch.manual_seed(seed)
        trainer = Trainer(net(), None, nn.MSELoss(), device="cpu")
        lowers = kind()
        trainer.train(points_loader(), epochs, save_dir=tmp_path / folder, callbacks=[lowers], resume_from="auto")
        return trainer.model[0].weight.detach(), lowers.epochs

    straight, _ = train(3, "straight", 0)
    train(2, "stopped", 0)
    resumed, epochs = train(3, "stopped", 1)
    assert epochs == 3
    assert torch.equal(straight, resumed)


def test_an_iterator_on_the_trainer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Fit):
        def forward(self, input: Any) -> Any:
            if not hasattr(self, "unlabelled"):
                self.unlabelled = iter(points_loader())
            return super().forward(input)

    Mine(max_steps=3, device="cpu", hooks=[Saves()]).train()
    assert caplog.text.count("trainer.unlabelled changes during the run, but checkpoints do not hold it") == 1


# -- attributes of ranks ------------------------------------------------------------------------------------------


class CountsRank(MeanSquare):
    def __init__(self) -> None:
        self.of_rank, self.steps = 0, 0

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        self.of_rank, self.steps = self.of_rank + dist.get_rank(), self.steps + 1
        return super().step(model, batch)


class RankHook(BaseHook):
    seen = 0

    def on_after_step(self, trainer: Any) -> None:
        self.seen += dist.get_rank()


def attributes_of_ranks() -> list[str]:
    torch.manual_seed(0)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("treadle").addHandler(handler)
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, CountsRank(), device="cpu", hooks=[RankHook(), Saves()])
    engine.run(points_loader(), max_steps=3)
    return [line.split(" differs between ranks")[0] for line in lines if "differs between ranks" in line]


def test_attributes_that_differ_between_ranks_are_named_once() -> None:
    named = run_on_ranks(attributes_of_ranks, 2)
    assert sorted(named[0]) == ["hook RankHook: seen", "task.of_rank"]


# -- the cost of large containers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "fewest", "most"), [(100, 200, 2000), (30_000, 0, 1000)])
def test_the_items_of_a_large_nested_container_are_not_visited(count: int, fewest: int, most: int) -> None:
    task = MeanSquare()
    task.items = {number: [number, str(number)] for number in range(count)}
    engine = engine_of(task=task)
    engine.run(points_loader(Points()), max_steps=1)
    visits = array.array("i", [0])

    def watch(frame: Any, event: str, argument: Any) -> None:
        visits[0] += event == "call" and frame.f_code is plain_values._Encoder.of.__code__

    sys.setprofile(watch)
    try:
        engine.state_dict()
    finally:
        sys.setprofile(None)
    assert fewest // 2 <= visits[0] <= most
