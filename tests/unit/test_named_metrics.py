"""Metrics by name and as functions: right over uneven batches, in Trainer and ValidationHook, refused before step 1."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import classification as of_all
from torchmetrics.functional import mean_absolute_error, mean_squared_error, r2_score

import treadle
from treadle import distributed
from treadle.engine.metrics import METRIC_NAMES, EpochMetrics

CPU = torch.device("cpu")


def fed(metrics, outputs, targets, *, sizes=(5, 5, 1), loss_fn=None):
    made = EpochMetrics(metrics, CPU, loss_fn=loss_fn)
    made.reset()
    for pair in zip(outputs.split(list(sizes)), targets.split(list(sizes)), strict=True):
        made.update(pair)
    return made.compute()


def classes(seed=0, count=3, *more):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(11, count, *more, generator=generator)
    targets = torch.randint(0, count, (11, *more), generator=generator)
    targets[:count] = torch.arange(count).view(-1, *[1] * len(more))  # each class occurs
    return outputs, targets


@pytest.mark.parametrize("more", [(), (4,)])
def test_names_of_classification_are_those_of_torchmetrics_over_the_whole_set(more):
    outputs, targets = classes(0, 3, *more)
    found = fed(["accuracy", "f1", "precision", "recall", "auroc", "average_precision"], outputs, targets)
    assert found["accuracy"] == (outputs.argmax(1) == targets).float().mean()
    assert found["f1"] == of_all.multiclass_f1_score(outputs, targets, 3, average="macro")
    assert found["auroc"] == of_all.multiclass_auroc(outputs, targets, 3)
    assert set(found) == {"accuracy", "f1", "precision", "recall", "auroc", "average_precision"}


def test_an_ignored_label_is_not_scored():
    outputs, targets = classes()
    targets[:4] = -100
    assert fed("accuracy", outputs, targets)["accuracy"] == (outputs.argmax(1) == targets)[4:].float().mean()


def test_rows_of_0_and_1_are_logits_where_the_loss_takes_logits():
    # All look like probabilities.
    logits = torch.tensor([0.1, 0.9, 0.4, 0.2, 0.3, 0.6, 0.8, 0.7, 0.9, 0.1, 0.2]).unsqueeze(1)
    targets = torch.ones(11)
    assert fed("accuracy", logits, targets, loss_fn=nn.BCEWithLogitsLoss())["accuracy"] == 1.0
    assert fed("accuracy", logits, targets, loss_fn=nn.BCELoss())["accuracy"] == pytest.approx(5 / 11)
    assert fed("auroc", logits, (logits[:, 0] > 0.5).float())["auroc"] == 1.0


def test_one_batch_inside_0_and_1_does_not_change_how_the_others_are_read():
    logits = torch.cat([torch.full((5,), 0.2), torch.full((6,), -3.0)])
    targets = torch.cat([torch.ones(5), torch.zeros(6)])
    assert fed("accuracy", logits, targets)["accuracy"] == 1.0


def test_several_labels_a_row():
    outputs = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    targets = (outputs > 0).float()
    assert fed(["accuracy", "f1"], outputs, targets) == {"accuracy": 1.0, "f1": 1.0}


def test_names_of_regression():
    outputs, targets = torch.randn(2, 11, 1, generator=torch.Generator().manual_seed(0))
    found = fed(["mse", "mae", "r2", "rmse"], outputs, targets)
    assert found["mse"] == mean_squared_error(outputs, targets)
    assert found["rmse"] == pytest.approx(mean_squared_error(outputs, targets).sqrt())
    assert found["mae"] == pytest.approx(mean_absolute_error(outputs, targets))
    assert found["r2"] == pytest.approx(float(r2_score(outputs, targets)), rel=1e-5)


def test_a_function_sees_the_whole_set_in_order():
    outputs, targets = classes()

    def median_gap(out, tgt):
        assert torch.equal(out, outputs)
        assert torch.equal(tgt, targets)
        return (out[:, 0] - tgt).median()

    found = fed([median_gap], outputs, targets)
    assert torch.equal(found["median_gap"], (outputs[:, 0] - targets).median())


def test_a_function_sees_the_rows_of_every_rank(monkeypatch):
    outputs, targets = classes()
    other = [(outputs + 1, targets), None]
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value, other] if value else [value])
    found = fed({"rows": lambda out, tgt: len(out), "top": lambda out, tgt: out.max()}, outputs, targets)
    assert found == {"rows": 22, "top": outputs.max() + 1}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("acuracy", "no metric 'acuracy'; did you mean 'accuracy'"),
        ([lambda outputs, targets: 0], "has no name; pass a dict"),
        ({"mine": lambda outputs: 0}, r"mine cannot be called as mine\(outputs, targets\)"),
        ({"mine": nn.MSELoss}, "MSELoss is a class; instantiate it"),
        (["mse", "mse"], "two metrics are named 'mse'"),
        (3, "pass torchmetrics objects, functions"),
    ],
)
def test_what_is_no_metric_is_refused_when_it_is_given(metrics, message):
    for make in (lambda: trainer(metrics), lambda: treadle.ValidationHook([], metrics=metrics)):
        with pytest.raises(treadle.ConfigError, match=message) as error:
            make()
        assert error.value.argument == "metrics"


def test_the_extra_is_named_where_torchmetrics_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.regression", None)
    treadle.engine.metric_kinds._torchmetrics.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'treadle\[metrics\]'"):
        EpochMetrics("mse", CPU)


# -- in trainers ------------------------------------------------------------------------------------------------------


def data(rows=11):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)


def trainer(metrics=None, **options):
    treadle.set_seed(0)
    model = nn.Linear(3, 2)
    return treadle.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss(), device="cpu", progress=False,
        metrics=metrics, **options,
    )  # fmt: skip


def right(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def test_trainer_and_hook_report_the_same_accuracy():
    hook = treadle.ValidationHook(data(), metrics=["accuracy", right])
    found = trainer(["accuracy", right], hooks=[hook]).train(data(), 3, data(), best_model_metric="accuracy")
    assert found["eval_accuracy"] == found["eval_right"] == [record["val_accuracy"] for record in hook.history]
    assert found["eval_accuracy"] == [record["val_right"] for record in hook.history]
    assert 0.5 < found["eval_accuracy"][-1] <= 1.0


def test_training_does_not_notice_metrics():
    plain, scored = trainer(), trainer(["accuracy", "auroc"], hooks=[treadle.ValidationHook(data(), metrics="f1")])
    plain.train(data(), 2, data())
    scored.train(data(), 2, data())
    assert torch.equal(plain.model.weight, scored.model.weight)


class Fit(treadle.BaseTrainer):
    gives_outputs = True

    def build_data_loader(self):
        return data()

    def build_model(self):
        return nn.Linear(3, 2)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.5)

    def forward(self, batch):
        outputs = self.model(batch[0])
        loss = nn.functional.cross_entropy(outputs, batch[1])
        return treadle.StepOutput(loss, outputs=(outputs, batch[1]) if self.gives_outputs else None)


def test_the_hook_scores_outputs_of_a_step_face():
    hook = treadle.ValidationHook(data(), interval=2, metrics={"acc": "accuracy", "right": right}, metric="val_acc")
    Fit(4, device="cpu", progress=False, hooks=[hook]).train()
    assert [record["step"] for record in hook.history] == [2, 4]
    assert all(record["val_acc"] == record["val_right"] for record in hook.history)


def failing(outputs, targets):
    raise KeyError("absent")


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"mine": failing}, "fails on the first batch: KeyError"),
        ({"mine": lambda outputs, targets: "high"}, "mine returned a str"),
        ({"mine": lambda outputs, targets: outputs + torch.ones(9, 9)}, "fails on the first batch: RuntimeError"),
        ("mse", "shape"),
    ],
)
def test_a_metric_that_does_not_fit_is_found_before_step_1(metrics, message):
    made = trainer(metrics)
    with pytest.raises((treadle.ConfigError, RuntimeError), match=message):
        made.train(data(), 1, data())
    fit = Fit(4, device="cpu", progress=False, hooks=[treadle.ValidationHook(data(), metrics=metrics)])
    with pytest.raises((treadle.ConfigError, RuntimeError), match=message):
        fit.train()
    assert made.step == fit.step == 0


def test_a_step_face_without_outputs_is_told_so_before_step_1():
    fit = Fit(4, device="cpu", progress=False, hooks=[treadle.ValidationHook(data(), metrics="accuracy")])
    fit.gives_outputs = False
    with pytest.raises(treadle.ConfigError, match="outputs=\\(outputs, targets\\)"):
        fit.train()
    assert fit.step == 0


def test_every_name_is_made():
    assert len(EpochMetrics(METRIC_NAMES, CPU)._named) == len(METRIC_NAMES)


@pytest.mark.parametrize("begin", ["train", "validate", "sanity"])
def test_a_run_with_metrics_by_name_resumes_exactly(begin, tmp_path):
    outputs, targets = classes()
    loader = DataLoader(TensorDataset(outputs, targets), batch_size=4)

    def run(epochs, folder):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        trainer = treadle.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), device="cpu", progress=False,
            metrics=["accuracy", "f1"], num_sanity_eval_steps=int(begin == "sanity"),
        )  # fmt: skip
        if begin == "validate":
            trainer.validate(loader)
        history = trainer.train(loader, epochs, loader, save_dir=folder, resume_from="auto")
        return history, model.weight

    run(2, tmp_path / "stopped")
    history, weight = run(4, tmp_path / "stopped")
    straight, expected = run(4, tmp_path / "straight")
    assert history == straight
    assert torch.equal(weight, expected)
