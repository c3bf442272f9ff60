"""GraphTrainer: what it takes and refuses, what it counts, what it returns."""

from __future__ import annotations

import inspect
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, DistributedSampler

from graph_batches import with_changes
from graph_kit import Scale, graphs, loader, make, model_of, records, same_weights
from helpers import ReadsPerStep, library_frames
from treadle.errors import ConfigError, NonFiniteError
from treadle.graphs import (
    GraphTrainer,
    PaddingCollater,
    Trainer,
    get_loss_fn,
    get_metrics,
    get_optimizer,
    get_scheduler,
    plan_buckets,
)
from treadle.hooks import BaseHook, EmaHook, ProgressHook


def batch(x, y, **more):
    return SimpleNamespace(x=torch.tensor(x), y=torch.tensor(y), num_graphs=len(x), **more)


def scale(start=0.0, lr=1.0, **kwargs):
    model = Scale(start)
    return make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), **kwargs)


@pytest.mark.parametrize(("task_type", "level", "classes"), [
    ("regression", "graph", None), ("classification", "graph", 3), ("edge_prediction", "edge", 2),
])  # fmt: skip
def test_a_step_reads_no_number_of_a_tensor(task_type, level, classes):
    reads = ReadsPerStep()
    data = loader(graphs(4, level=level, classes=classes), 2)
    outputs = classes if classes == 3 else 1
    make(
        model={"num_classes": outputs, "task": level}, task_type=task_type, num_classes=classes and outputs,
        hooks=[reads], grad_clip=0.1,
    ).fit(data, epochs=1)  # fmt: skip
    assert reads.per_step == [0, 0]


def test_the_constructor_and_fit_have_the_documented_arguments():
    names = list(inspect.signature(GraphTrainer).parameters)
    assert names == [
        "model", "optimizer", "scheduler", "loss_fn", "metrics", "device", "task_type", "num_classes", "grad_clip",
        "mixed_precision", "log_every", "checkpoint_dir", "experiment_name", "accumulation_steps",
        "scheduler_interval", "max_non_finite_grad_retries", "hooks", "trackers", "eval_seed", "parallel", "capture",
        "pad_to", "compile", "progress", "limits",
    ]  # fmt: skip
    fit = inspect.signature(GraphTrainer.fit).parameters
    assert list(fit)[1:] == [
        "train_loader", "val_loader", "epochs", "metric_for_best", "minimize_metric", "early_stopping", "min_delta",
        "resume_from",
    ]  # fmt: skip
    assert Trainer is GraphTrainer


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task_type": "regresion"}, "did you mean 'regression'"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"log_every": -1}, "log_every=-1"),
        ({"grad_clip": -1.0}, "grad_clip=-1.0"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
        ({"scheduler_interval": "batch"}, "scheduler_interval='batch'"),
        ({"task_type": "edge_prediction", "num_classes": 2}, "one logit for each pair"),
        ({"task_type": "classification", "loss_fn": get_loss_fn("classification", "bce", 1), "num_classes": 1,
          "metrics": get_metrics("classification", 1)}, "must agree"),
        ({"task_type": "classification", "metrics": get_metrics("classification", 1, from_logits=False)}, "must agree"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make(**settings)


def test_a_number_of_outputs_that_is_given_is_held_to():
    with pytest.raises(ConfigError, match="num_classes=3"):
        make(num_classes=3).train_epoch(loader(graphs(4)))


def test_a_scheduler_of_another_optimizer_is_refused():
    with pytest.raises(ConfigError, match="another optimizer"):
        make(scheduler=lambda optimizer: StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1))


def test_loss_and_metrics_are_those_of_the_task_and_the_models_width():
    three = make(model=model_of(3), task_type="classification")
    assert (three.num_classes, three.loss_fn.loss_type) == (3, "cross_entropy")
    assert three.metrics.names == ("accuracy", "f1_macro", "roc_auc")
    assert make(task_type="classification").num_classes == 1
    assert make(model=Scale(), task_type="classification").num_classes == 2
    assert make(model=model_of(3), task_type="classification", num_classes=2).num_classes == 2
    assert make(model=model_of(3)).loss_fn.loss_type == "mse"
    probabilities = make(task_type="classification", loss_fn=get_loss_fn("classification", "bce", 1))
    assert probabilities.metrics.from_logits is False


# -- targets and weights ----------------------------------------------------------------------------------------------


def test_the_target_is_y_and_where_there_is_none_target():
    trainer = scale(1.0)
    both = batch([[1.0]], [[3.0]], target=torch.tensor([[9.0]]))
    assert trainer.eval_epoch([both])["loss"] == 4.0
    assert trainer.eval_epoch([with_changes(both, y=None)])["loss"] == 64.0
    with pytest.raises(ConfigError, match="without targets"):
        trainer.eval_epoch([with_changes(both, y=None, target=None)])


def test_a_flat_target_of_a_regression_gets_a_last_axis_and_nothing_is_broadcast():
    trainer = scale(1.0)
    assert trainer.eval_epoch([batch([[1.0], [2.0]], [0.0, 0.0])])["loss"] == 2.5
    with pytest.raises(ConfigError, match=r"\(2, 1\).*\(2, 3\)"):
        trainer.train_epoch([batch([[1.0], [2.0]], [[0.0] * 3] * 2)])
    with pytest.raises(ConfigError, match=r"\(3, 1\).*\(2,\)"):
        trainer.eval_epoch([batch([[1.0], [2.0], [3.0]], [0.0, 0.0])])


def test_the_mean_of_an_epoch_is_over_labelled_entries():
    trainer = scale(1.0)
    parts = [batch([[1.0, 1.0], [1.0, 1.0]], [[0.0, math.nan], [0.0, 0.0]]), batch([[2.0, 2.0]], [[0.0, math.nan]])]
    values = trainer.eval_epoch(parts)
    assert values["loss"] == values["mse"] == pytest.approx((1 + 1 + 1 + 4) / 4)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_accumulated_step_is_that_of_one_large_batch(accumulation):
    data = graphs(12, width=2, unknown=0.4)
    parts, whole = loader(data, 4), loader(data, 12)
    model = {"dropout": 0.0, "num_classes": 2}
    runs = []
    for part, steps in ((parts, 3), (whole, accumulation)):
        run = make(model=model, accumulation_steps=steps, kind="sgd")
        runs.append((run.train_epoch(part)["loss"], run.global_step, list(run.model.parameters())))
    assert runs[0][:2] == (pytest.approx(runs[1][0], abs=1e-6), runs[1][1])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(runs[0][2], runs[1][2]))


def test_class_weights_weigh_batches_too():
    loss_fn = get_loss_fn("classification", num_classes=1, class_weights=[1.0, 3.0])
    trainer = scale(1.0, task_type="classification", num_classes=1, loss_fn=loss_fn)
    parts = [batch([0.5, 2.0], [1, 0]), batch([-1.0], [1])]
    whole = loss_fn(torch.tensor([0.5, 2.0, -1.0]), torch.tensor([1, 0, 1]))
    assert trainer.eval_epoch(parts)["loss"] == pytest.approx(float(whole), abs=1e-6)


def test_a_batch_without_any_label_changes_nothing():
    trainer = scale(1.0)
    record = trainer.train_epoch([batch([[1.0]], [[math.nan]])])
    assert math.isnan(record["loss"])
    assert math.isnan(record["mse"])
    assert float(trainer.model.weight.detach()) == 1.0
    assert trainer.global_step == 1


@pytest.mark.parametrize("level", ["graph", "node", "edge"])
@pytest.mark.parametrize("classes", [None, 3])
def test_padded_batches_give_the_numbers_of_plain_ones(level, classes):
    data = graphs(10, level=level, classes=classes)
    buckets = plan_buckets(data, batch_size=4)
    padded = DataLoader(
        data, batch_size=4, collate_fn=PaddingCollater(buckets, level=level, collate=loader(data).collate_fn)
    )
    task = "regression" if classes is None else "classification"
    model = {"num_classes": classes or 1, "task": level, "dropout": 0.0}
    runs = [make(model=model, task_type=task) for _ in range(2)]
    values = [run.fit(part, part, epochs=2) for run, part in zip(runs, (loader(data), padded))]
    for plain, other in zip(*(value["train"] + value["val"] for value in values)):
        assert {k: v for k, v in other.items() if k not in ("time", "padding")} == pytest.approx(
            {k: v for k, v in plain.items() if k != "time"}, abs=1e-4, nan_ok=True
        )
    a, b = (run.predict(part) for run, part in zip(runs, (loader(data), padded)))
    assert torch.allclose(a, b, atol=1e-4)


def test_a_padded_batch_needs_a_loss_that_leaves_padding_out():
    with pytest.raises(ConfigError, match="padded"):
        scale(loss_fn=nn.MSELoss()).train_epoch([batch([[1.0]], [[1.0]], target_mask=torch.tensor([True]))])


# -- losses and metrics of others -------------------------------------------------------------------------------------


def test_a_loss_of_torch_and_a_collection_of_torchmetrics_work():
    import torchmetrics

    metrics = torchmetrics.MetricCollection({"r2": torchmetrics.R2Score(), "mse": torchmetrics.MeanSquaredError()})
    trainer = make(loss_fn=nn.MSELoss(), metrics=metrics)
    data = loader(graphs(8))
    history = trainer.fit(data, data, epochs=1, metric_for_best="r2", minimize_metric=False)
    assert list(history["val"][0]) == ["epoch", "loss", "mse", "r2"]
    assert history["val"][0]["mse"] == pytest.approx(history["val"][0]["loss"], abs=1e-6)
    assert trainer.best_metric == history["val"][0]["r2"]


def test_metrics_of_others_do_not_see_padding():
    import torchmetrics

    trainer = scale(1.0, metrics=torchmetrics.MetricCollection({"mae": torchmetrics.MeanAbsoluteError()}))
    part = batch([[1.0], [9.0]], [[0.0], [0.0]], target_mask=torch.tensor([True, False]))
    assert trainer.eval_epoch([part]) == {"loss": 1.0, "mae": 1.0}


def test_a_loss_that_adds_up_is_reported_as_a_total():
    trainer = scale(1.0, lr=0.1, loss_fn=nn.MSELoss(reduction="sum"))
    assert trainer.train_epoch([batch([[1.0], [2.0]], [0.0, 0.0])])["loss"] == 5.0
    assert float(trainer.model.weight.detach()) == pytest.approx(0.0, abs=1e-6)


def test_a_model_that_returns_no_tensor_needs_a_loss_of_ones_own():
    class Two(Scale):
        def forward(self, batch):
            return {"a": super().forward(batch), "b": batch.x}

    data = [batch([[1.0], [2.0]], [0.0, 0.0])] * 2
    trainer = scale()
    trainer.model.__class__ = Two
    with pytest.raises(ConfigError, match="returned a dict"):
        trainer.train_epoch(data)
    own = scale(1.0, loss_fn=lambda pred, y: ((pred["a"] - y[:, None]) ** 2).mean())
    own.model.__class__ = Two
    assert list(own.eval_epoch(data)) == ["loss"]
    assert set(own.train_epoch(data)) == {"loss", "lr", "time"}
    predicted = own.predict(data)
    assert {name: part.shape for name, part in predicted.items()} == {"a": (4, 1), "b": (4, 1)}


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [(False, torch.float32), (True, torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_mixed_precision_holds_in_training_evaluation_and_prediction(asked, dtype):
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(1, 1)

        def forward(self, batch):
            seen.append(self.line(batch.x).dtype)
            return self.line(batch.x)

    trainer = make(model=Watched(), mixed_precision=asked)
    data = [batch([[1.0], [2.0]], [0.0, 1.0])]
    trainer.train_epoch(data)
    trainer.eval_epoch(data)
    predicted = trainer.predict(data)
    assert seen == [dtype] * 3
    assert (predicted.dtype, predicted.device.type, predicted.requires_grad) == (torch.float32, "cpu", False)


# -- records ----------------------------------------------------------------------------------------------------------


def test_fit_returns_a_record_per_epoch_for_training_and_validation():
    data = loader(graphs(8))
    trainer = make()
    history = trainer.fit(data, data, epochs=2)
    assert [list(record) for record in history["train"]] == [["epoch", "loss", "mse", "mae", "rmse", "lr", "time"]] * 2
    assert [list(record) for record in history["val"]] == [["epoch", "loss", "mse", "mae", "rmse"]] * 2
    assert [record["epoch"] for record in history["train"] + history["val"]] == [1, 2, 1, 2]
    assert history["train"][0]["time"] > 0
    assert (trainer.epoch, trainer.global_step) == (2, 4)
    assert make().fit(data, epochs=1)["val"] == []


def test_epochs_are_an_absolute_target():
    data = loader(graphs(8), shuffle=True)
    straight = make()
    straight.fit(data, data, epochs=3)
    parts = make()
    for epochs in (1, 3, 3, 2):
        history = parts.fit(data, data, epochs=epochs)
    assert records(history) == records(straight.history)
    assert same_weights(parts, straight)


def test_the_learning_rate_of_a_record_is_the_one_the_epoch_used():
    data = loader(graphs(4))
    trainer = make(scheduler=lambda o: get_scheduler(o, "step", step_size=1, gamma=0.5), lr=0.01)
    assert [r["lr"] for r in trainer.fit(data, epochs=3)["train"]] == pytest.approx([0.01, 0.005, 0.0025])


def test_training_metrics_are_those_of_the_outputs_that_trained():
    data = loader(graphs(10), shuffle=True)
    trainer = make()  # with dropout
    seen = []
    trainer.model.register_forward_hook(lambda m, args, out: seen.append((out.detach(), args[0].y, m.training)))
    record = trainer.train_epoch(data)
    metrics = get_metrics("regression")
    for pred, target, training in seen:
        assert training
        metrics.update(pred, target)
    assert {name: record[name] for name in metrics.names} == metrics.compute()


def test_a_group_that_was_refused_is_in_no_training_metric():
    parts = [batch([[math.inf]], [[1.0]]), batch([[1.0]], [[1.0]]), batch([[2.0]], [[0.0]])]
    trainer = scale(1.0, lr=0.0, max_non_finite_grad_retries=1)
    record = trainer.train_epoch(parts)
    assert trainer.global_step == 2
    assert record["loss"] == record["mse"] == 2.0


def test_each_step_group_counts_in_the_training_metrics_with_accumulation():
    parts = [batch([[1.0]], [[0.0]]), batch([[2.0]], [[0.0]]), batch([[3.0]], [[0.0]])]
    assert scale(1.0, lr=0.0, accumulation_steps=2).train_epoch(parts)["mse"] == pytest.approx(14 / 3)


def test_a_gradient_that_is_not_finite_is_an_error_without_retries():
    with pytest.raises(NonFiniteError):
        scale(1.0).fit([batch([[math.inf]], [[1.0]])], epochs=1)


# -- the best epoch ---------------------------------------------------------------------------------------------------


class Script(nn.Module):
    """Predicts given values, one per evaluation; its weight gives the loss a gradient."""

    def __init__(self, values):
        super().__init__()
        self.values, self.weight = list(values), nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        value = 0.0 if self.training else self.values.pop(0)
        return torch.full_like(batch.x, value) + 0 * self.weight


def scripted(values, epochs=10, **fit):
    model = Script(values)
    trainer = make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    data = [batch([[0.0]], [[0.0]])]
    trainer.fit(data, data, epochs, **fit)
    return trainer


def test_the_best_epoch_is_the_smallest_loss_and_patience_ends_the_run():
    trainer = scripted([3.0, 1.0, 2.0, 2.0, 2.0], early_stopping=3)
    assert (trainer.epoch, trainer.best_epoch, trainer.best_metric) == (5, 2, 1.0)


def test_the_direction_can_be_turned_and_small_changes_need_not_count():
    turned = scripted([1.0, 2.0, 1.5], epochs=3, metric_for_best="mae", minimize_metric=False)
    assert (turned.best_epoch, turned.best_metric) == (2, 2.0)
    assert scripted([1.0, 0.95, 0.92], metric_for_best="mae", min_delta=0.1, early_stopping=2).epoch == 3


def test_a_stopped_run_is_finished():
    trainer = scripted([1.0, 2.0, 2.0], early_stopping=2)
    before = trainer.global_step
    trainer.fit([batch([[0.0]], [[0.0]])], [batch([[0.0]], [[0.0]])], 10, early_stopping=2)
    assert trainer.global_step == before
    trainer.train_epoch([batch([[0.0]], [[0.0]])])  # asked for by itself, nothing ends it
    assert trainer.global_step == before + 1


@pytest.mark.parametrize(("validated", "which"), [(True, "validation"), (False, "training")])
def test_a_metric_that_no_record_has_is_refused_before_training(validated, which):
    trainer = make()
    with pytest.raises(ConfigError, match=f"'accuracy': the {which} record.*loss, mse, mae, rmse"):
        trainer.fit(loader(graphs(4)), loader(graphs(4)) if validated else None, 1, metric_for_best="accuracy")
    assert trainer.global_step == 0


def test_a_metric_of_others_that_no_record_has_is_refused_when_that_is_known():
    class Own:
        def reset(self): ...
        def update(self, pred, target): ...
        def compute(self):
            return {"own": 1.0}

    data = loader(graphs(4))
    with pytest.raises(ConfigError, match="'mae': the validation record has no such key; it has loss, own"):
        make(metrics=Own()).fit(data, data, 1, metric_for_best="mae")


def test_without_validation_the_best_is_chosen_by_the_training_record():
    trainer = make()
    history = trainer.fit(loader(graphs(8)), epochs=3, metric_for_best="mae")
    assert trainer.best_metric == min(record["mae"] for record in history["train"])


def test_a_name_without_a_direction_needs_one():
    class Own:
        def reset(self): ...
        def update(self, pred, target): ...
        def compute(self):
            return {"own": 1.0}

    with pytest.raises(ConfigError, match="lower or higher"):
        make(metrics=Own()).fit(loader(graphs(4)), epochs=1, metric_for_best="own")


def test_a_plateau_scheduler_follows_the_best_metric():
    model = Script([1.0, 2.0, 3.0, 0.5])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make(model=model, optimizer=optimizer, scheduler=lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5))
    data = [batch([[0.0]], [[0.0]])]
    history = trainer.fit(data, data, 4, metric_for_best="mae")
    assert [record["lr"] for record in history["train"]] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("epochs", [-1, 1.5, True, "3"])
def test_a_number_of_epochs_that_is_none_is_refused(epochs):
    with pytest.raises(ConfigError, match="epochs="):
        make().fit(loader(graphs(4)), epochs=epochs)


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_a_validation_loader_does_not_change_what_is_trained():
    data = loader(graphs(10), shuffle=True)
    with_val = make()
    with_val.fit(data, loader(graphs(6, seed=1), shuffle=True), epochs=2)
    without = make()
    without.fit(data, epochs=2)
    assert same_weights(with_val, without)


def test_evaluation_is_over_all_graphs_at_once_and_restores_the_modes():
    trainer = make()
    trainer.model.head.eval()
    modes = [module.training for module in trainer.model.modules()]
    parts, whole = trainer.eval_epoch(loader(graphs(10), 4)), trainer.eval_epoch(loader(graphs(10), 10))
    predicted = trainer.predict(loader(graphs(10), 4))
    assert parts == pytest.approx(whole, abs=1e-5)
    assert [module.training for module in trainer.model.modules()] == modes
    targets = torch.cat([graph.y for graph in graphs(10)])
    assert parts["mae"] == pytest.approx(float((predicted - targets).abs().mean()), abs=1e-6)
    for empty in (lambda: trainer.eval_epoch([]), lambda: trainer.predict([])):
        with pytest.raises(ConfigError, match="no batch"):
            empty()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("level", ["graph", "node", "edge"])
def test_what_a_sampler_repeats_for_a_rank_is_counted_once(level, padded):
    data = graphs(5, level=level)
    collate = loader(data).collate_fn
    if padded:
        collate = PaddingCollater(plan_buckets(data, batch_size=2), level=level, collate=collate)
    trainer = make(model={"task": level, "dropout": 0.0})
    total, count = 0.0, 0
    for rank in range(4):  # of five graphs, ranks 1, 2 and 3 get a copy each
        sampler = DistributedSampler(data, 4, rank, shuffle=False)
        found = trainer.eval_epoch(DataLoader(data, 2, sampler=sampler, collate_fn=collate))
        rows = sum(len(data[index].y) for index in range(rank, 5, 4))
        assert found["mse"] == pytest.approx(found["loss"], abs=1e-5)
        total, count = total + rows * found["loss"], count + rows
    assert total / count == pytest.approx(trainer.eval_epoch(loader(data))["loss"], abs=1e-5)


def test_an_average_is_what_is_evaluated_and_predicted():
    data = loader(graphs(8))
    trainer = make(hooks=[EmaHook(0.5)])
    trainer.train_epoch(data)
    plain = make(model=trainer.model)
    assert not torch.equal(trainer.predict(data), plain.predict(data))
    assert trainer.eval_epoch(data)["loss"] != plain.eval_epoch(data)["loss"]


# -- log hooks --------------------------------------------------------------------------------------------------------


def logged(epochs=2, validated=True, log_every=2, steps=3):
    calls = []
    trainer = make(log_every=log_every)
    trainer.add_log_hook(lambda metrics, step, prefix: calls.append((prefix, step, metrics)))
    data = loader(graphs(4 * steps))
    trainer.fit(data, data if validated else None, epochs)
    return calls, trainer


def test_log_hooks_hear_of_steps_and_epochs_on_one_axis():
    calls, trainer = logged()
    assert [call[:2] for call in calls] == [
        ("step", 2), ("train", 3), ("val", 3), ("step", 4), ("step", 6), ("train", 6), ("val", 6),
    ]  # fmt: skip
    by_prefix = {prefix: metrics for prefix, _, metrics in calls}
    assert set(by_prefix["step"]) == {"loss", "lr", "grad_norm"}
    last = records(trainer.history)
    for prefix in ("train", "val"):
        told = {key: value for key, value in by_prefix[prefix].items() if key != "time"}
        assert told == {key: value for key, value in last[prefix][-1].items() if key != "epoch"}
    assert all(type(value) is float for _, _, metrics in calls for value in metrics.values())


def test_step_means_are_over_the_steps_since_the_last_call():
    parts = [batch([[1.0]], [[0.0]]), batch([[2.0]], [[0.0]]), batch([[3.0]], [[0.0]])]
    trainer, losses = scale(1.0, lr=0.0, log_every=2), []
    trainer.add_log_hook(lambda metrics, step, prefix: prefix == "step" and losses.append(metrics["loss"]))
    trainer.fit(parts, epochs=2)
    assert losses == [pytest.approx(2.5), pytest.approx(5.0), pytest.approx(6.5)]


@pytest.mark.parametrize("log_every", [0, None])
def test_step_logs_can_be_off(log_every):
    calls, _ = logged(log_every=log_every, validated=False)
    assert [call[:2] for call in calls] == [("train", 3), ("train", 6)]


def test_what_a_log_hook_counts_is_carried(tmp_path):
    class Counts:
        calls = 0

        def __call__(self, metrics, step, prefix):
            self.calls += 1

    counts = []
    for epochs in (1, 2):
        trainer, hook = make(tmp_path, log_every=1), Counts()
        trainer.add_log_hook(hook)
        trainer.fit(loader(graphs(4)), epochs=epochs, resume_from="auto")
        counts.append(hook.calls)
    assert counts[1] == 2 * counts[0] > 0


def test_an_exception_of_a_log_hook_leaves_fit():
    trainer, error = make(), KeyError("mine")

    def fails(metrics, step, prefix):
        raise error

    trainer.add_log_hook(fails)
    with pytest.raises(KeyError) as caught:
        trainer.fit(loader(graphs(4)), epochs=1)
    assert caught.value is error


def test_log_lines_name_the_experiment(caplog):
    with caplog.at_level(logging.INFO, "treadle.graphs"):
        make(experiment_name="mine", log_every=1).fit(loader(graphs(4)), loader(graphs(4)), epochs=1)
    assert "mine: epoch 1" in caplog.text
    assert "Step 1/1" in caplog.text
    own = make(log_every=1, hooks=[ProgressHook(1)])
    assert sum(isinstance(hook, ProgressHook) for hook in own._engine.hooks) == 1


# -- parity and hooks -------------------------------------------------------------------------------------------------


def test_a_loop_by_hand_gives_the_same_weights_to_the_bit():
    data, loss_fn = loader(graphs(10), shuffle=True), get_loss_fn("regression")
    trainer = make(scheduler=lambda o: get_scheduler(o, "cosine", 3), grad_clip=0.5)
    trainer.fit(data, epochs=3)

    by_hand = make()
    model, optimizer = by_hand.model.train(), by_hand.optimizer
    scheduler = get_scheduler(optimizer, "cosine", 3)
    for _ in range(3):
        for graphs_of_a_batch in data:
            optimizer.zero_grad()
            loss_fn(model(graphs_of_a_batch), graphs_of_a_batch.y).backward()
            # In the optimizer's order, in which the engine adds the norm up too.
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            optimizer.step()
        scheduler.step()
    assert same_weights(trainer, by_hand)


def test_from_a_script_to_the_model_there_are_at_most_eight_frames_of_the_library():
    seen = []

    class Deep(Scale):
        def forward(self, batch):
            seen.append(library_frames())
            return super().forward(batch)

    make(model=Deep()).fit([batch([[1.0]], [[0.0]])], epochs=1)
    assert [names[-2:] for names in seen] == [["fit", "call"]]
    assert len(seen[0]) <= 8


def test_a_hook_sees_every_event_and_the_engine():
    seen = []

    class Watching(BaseHook):
        def on_after_step(self, trainer):
            seen.append((trainer.step, trainer.step_info["applied"]))

    make(hooks=[Watching()]).fit(loader(graphs(8)), epochs=1)
    assert seen == [(1, True), (2, True)]


def test_the_optimizer_may_be_built_before_the_model_is_moved():
    model = model_of()
    optimizer = get_optimizer(model)
    trainer = GraphTrainer(model, optimizer, device=torch.device("cpu"))
    trainer.train_epoch(loader(graphs(4)))
    assert trainer.device == torch.device("cpu")
