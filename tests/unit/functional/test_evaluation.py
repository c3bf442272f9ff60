"""Evaluation, metric objects and predictions: repeatable, unnoticed by training, of the scored weights."""

from __future__ import annotations

import os
import queue
import signal
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import treadle
from functional_kit import constant, line, loader, make, same_weights, scalar
from helpers import Augmented
from treadle import CheckpointingHook, ConfigError
from treadle.checkpoint import load_checkpoint


def test_an_evaluation_in_the_middle_of_training_changes_no_weight_and_no_generator():
    class Looks(treadle.BaseHook):
        def on_after_step(self, engine):
            trainer.evaluate(loader(9, 4, shuffle=True))
            trainer.eval_step(batch)
            trainer.predict(data)

    data = DataLoader(Augmented(8), batch_size=4)
    batch = next(iter(data))
    trainer = make(hooks=[Looks()])
    watched = trainer.train(DataLoader(Augmented(), 8, shuffle=True), 2)
    plain = make()
    assert plain.train(DataLoader(Augmented(), 8, shuffle=True), 2) == watched
    assert same_weights(plain, trainer)


def test_two_evaluations_agree_and_keep_the_mode_of_each_module():
    trainer = make()
    trainer.model[1].eval()
    modes = [module.training for module in trainer.model.modules()]
    data = DataLoader(Augmented(), 8, shuffle=True)
    assert trainer.evaluate(data) == trainer.evaluate(data)
    assert [module.training for module in trainer.model.modules()] == modes
    assert list(trainer.evaluate(data)) == ["loss"]
    assert not any(p.grad is not None for p in trainer.model.parameters())


def test_one_eval_step_is_in_eval_mode_without_gradients():
    trainer = make()
    batch = next(iter(loader()))
    first = trainer.eval_step(batch)
    assert first == trainer.eval_step(batch)
    assert type(first["loss"]) is float
    assert trainer.model.training
    expected = nn.functional.mse_loss(trainer.model.eval()(batch[0]), batch[1])
    assert first["loss"] == expected.item()


def classes():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return [(x[i : i + 8], (x[i : i + 8, 0] > 0).long()) for i in (0, 8, 16)]


def classifier(**rest):
    torch.manual_seed(3)
    return make(model=nn.Linear(4, 2), loss_fn=nn.CrossEntropyLoss(), **rest)


def right(trainer, data):
    return sum((trainer.model(x).argmax(1) == y).sum().item() for x, y in data) / sum(len(y) for _, y in data)


@pytest.mark.parametrize("cls", [treadle.Trainer, type("Own", (treadle.Trainer,), {})])
def test_a_metric_object_is_taken_over_all_samples_and_selects(cls):
    trainer = classifier(cls=cls, lr=0.1, metrics=MulticlassAccuracy(2, average="micro"))
    history = trainer.train(classes(), 3, classes(), best_model_metric="accuracy")
    assert list(history) == ["epoch", "train_loss", "lr", "eval_loss", "eval_accuracy"]
    assert history["eval_accuracy"][-1] == pytest.approx(right(trainer, classes()))
    assert trainer.best_metric == max(history["eval_accuracy"])


@pytest.mark.parametrize(("metric", "key"), [("accuracy", "eval_near_accuracy"), ("far_accuracy", "eval_far_accuracy")])
def test_a_metric_without_a_loaders_name_is_that_of_the_first_loader(metric, key):
    trainer = classifier(lr=0.1, metrics=MulticlassAccuracy(2, average="micro"))
    history = trainer.train(classes(), 3, {"near": classes(), "far": classes()[:1]}, best_model_metric=metric)
    assert trainer.best_metric == max(history[key])


def test_collections_and_dicts_of_metrics_are_reported_under_their_names():
    collection = MetricCollection({"acc": MulticlassAccuracy(2, average="micro"), "all": MulticlassAccuracy(2)})
    found = classifier(metrics=collection).evaluate(classes())
    assert list(found) == ["loss", "acc", "all"]
    mine = {"micro": MulticlassAccuracy(2, average="micro"), "table": MulticlassConfusionMatrix(2), "set": collection}
    trainer = classifier(metrics=mine)
    found = trainer.evaluate(classes())
    assert list(found) == ["loss", "micro", "table", "set/acc", "set/all"]
    assert found["micro"] == found["set/acc"] == pytest.approx(right(trainer, classes()))
    assert torch.tensor(found["table"]).sum() == 20


def test_a_metric_is_emptied_before_each_evaluation():
    trainer = make(model=line(), metrics=MeanSquaredError())
    first = trainer.evaluate(loader())
    assert first == trainer.evaluate(loader())
    assert first["mean_squared_error"] == pytest.approx(first["loss"])


def test_training_feeds_no_metric():
    class Counts:
        updates = 0

        def reset(self):
            pass

        def update(self, prediction, target):
            self.updates += 1

        def compute(self):
            return 1.0

    metric = Counts()
    trainer = make(model=line(), metrics={"mine": metric})
    trainer.train(loader(), 2)
    assert metric.updates == 0
    trainer.train(loader(), 3, loader())
    assert metric.updates == 3


def test_a_metric_gets_logits_and_labels_of_models_with_a_loss_of_their_own():
    @dataclass
    class Output:
        loss: torch.Tensor
        logits: torch.Tensor

    class Own(nn.Linear):
        def forward(self, x, labels):
            logits = super().forward(x)
            return Output(nn.functional.cross_entropy(logits, labels), logits)

    data = [{"x": x, "labels": y} for x, y in classes()]
    trainer = make(model=Own(4, 2), loss_fn=None, metrics=MulticlassAccuracy(2, average="micro"))
    assert 0 <= trainer.evaluate(data)["accuracy"] <= 1


def test_a_metric_is_fed_by_an_overridden_eval_step_too():
    class Own(treadle.Trainer):
        def eval_step(self, batch):
            return super().eval_step(batch)

    found = make(Own, model=line(), metrics=MeanSquaredError()).evaluate(loader())
    assert found["mean_squared_error"] == pytest.approx(found["loss"])


def test_what_is_no_metric_is_refused():
    with pytest.raises(ConfigError, match="no update"):
        make(metrics={"acc": 3})


def test_predictions_are_joined_in_order_on_the_cpu_in_eval_mode():
    trainer = make()
    outputs = trainer.predict(loader())
    trainer.model.eval()
    with torch.no_grad():
        assert torch.equal(outputs, torch.cat([trainer.model(x) for x, _ in loader()]))
    assert outputs.shape == (20, 1)
    assert not outputs.requires_grad


def test_predictions_are_of_the_averaged_weights():
    trainer = scalar(lr=1.0, ema_decay=0.5)
    trainer.train([constant(1)], 1)
    assert torch.equal(trainer.predict([constant(1)]), constant(0.5))
    assert trainer.model.weight.item() == 0.0


class Several(nn.Module):
    def __init__(self, make_outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.make_outputs = make_outputs

    def forward(self, x):
        return self.make_outputs(x)


def predict(make_outputs, data):
    return make(model=Several(make_outputs), loss_fn=None).predict(data)


def test_predictions_keep_tuples_and_mappings_and_leave_out_what_is_no_tensor():
    x = [torch.ones(2, 3), torch.zeros(1, 3)]
    found = predict(lambda x: {"logits": x, "loss": x.sum(), "cache": object(), "parts": (x, None, [x])}, x)
    assert found["logits"].shape == (3, 3)
    assert found["loss"].tolist() == [6.0, 0.0]
    assert set(found) == {"logits", "loss", "parts"}
    first, nothing, (inner,) = found["parts"]
    assert first.shape == inner.shape == (3, 3)
    assert nothing is None


def test_predictions_that_cannot_be_joined_or_are_none_are_refused():
    with pytest.raises(ConfigError, match="cannot be concatenated"):
        predict(lambda x: x, [torch.ones(2, 3), torch.ones(2, 4)])
    with pytest.raises(ConfigError, match="empty"):
        predict(lambda x: x, [])


@pytest.mark.parametrize("own", [True, False])
def test_a_signal_in_an_evaluation_saves_the_step_before_it_and_leaves(own, tmp_path):
    class Own(treadle.Trainer):
        def evaluate(self, dataloader):
            return {"loss": sum(self.eval_step(batch)["loss"] for batch in dataloader)}

    def batches():
        for number, batch in enumerate(loader(20, 4)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            read.put(number)
            yield batch

    class Stream:
        def __iter__(self):
            return batches()

    read = queue.SimpleQueue()  # of a type that no checkpoint holds: an evaluation puts back what changes
    hook = CheckpointingHook(100, path=tmp_path / "steps", exit_signals=signal.SIGTERM)
    trainer = make(Own if own else treadle.Trainer, hooks=[hook])
    with pytest.raises(SystemExit) as left:
        trainer.train(loader(), 5, Stream(), save_dir=tmp_path)
    assert left.value.code == 143
    assert [read.get() for _ in range(read.qsize())][-1] <= 2
    tree = load_checkpoint(tmp_path / "steps" / "checkpoint_latest.pt")
    assert (tree["global_step"], tree["epoch"], tree["history"]) == (3, 0, [])


def test_torchmetrics_is_not_imported_by_the_library():
    metric = MeanMetric()  # only takes (value, weight): works as anything with update, compute and reset does
    trainer = make(metrics={"mean": metric})
    assert "mean" in trainer.evaluate(loader())


class Accurate(treadle.Trainer):
    """Adds the accuracy to what a step and an evaluation give."""

    def accuracy(self, batch):
        inputs, targets = self._prepare_batch(batch)
        return (self._forward_pass(inputs).argmax(1) == targets).float().mean().item()

    def eval_step(self, batch):
        accuracy = self.accuracy(batch)
        return {**super().eval_step(batch), "accuracy": accuracy, "nested": {"wrong": 1 - accuracy}}

    def train_step(self, batch):
        return {**super().train_step(batch), "accuracy": self.accuracy(batch)}


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 9.0])])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_other_numbers_than_the_loss_are_means_over_the_targets(size, weights, reduction):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.8).long()
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(3, 2), nn.CrossEntropyLoss(weight=weights, reduction=reduction)
    right, loss = (model(x).argmax(1) == y).float().mean().item(), loss_fn(model(x), y).item()
    data = DataLoader(TensorDataset(x, y), batch_size=size)
    config = {"training": {"log_interval": None}}
    trainer = Accurate(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, config, device="cpu")
    assert trainer.evaluate(data) == pytest.approx({"loss": loss, "accuracy": right, "nested/wrong": 1 - right})
    history = trainer.train(data, 1)
    assert history["train_loss"] == [pytest.approx(loss)]
    assert history["train_accuracy"] == [pytest.approx(right)]


def test_an_epoch_whose_metric_is_nan_is_named(caplog):
    x, y = torch.ones(4, 4), torch.full((4, 1), torch.nan)
    assert make().train(loader(), 1, [(x, y)])["epoch"] == [1]
    assert "epoch 1: eval_loss is NaN, so this epoch cannot be the best" in caplog.text
