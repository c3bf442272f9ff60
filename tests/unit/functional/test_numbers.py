"""The numbers that the functional face promises: counters, means, learning rates, best epochs, files."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import treadle
from functional_kit import constant, evaluations, line, loader, make, same_weights, scalar
from helpers import RUN_FILES
from treadle import CheckpointError, ConfigError
from treadle.checkpoint import load_checkpoint


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in RUN_FILES)


def test_twenty_samples_in_batches_of_eight_are_three_steps_an_epoch_and_callbacks_count_from_zero():
    trainer, seen = make(), []

    def callback(given, epoch, metrics):
        assert given is trainer
        assert trainer.epoch == epoch + 1
        seen.append((epoch, metrics))
        return "ignored"

    history = trainer.train(loader(), 2, callbacks=[callback])
    assert (trainer.step, trainer.applied_steps, trainer.micro_steps, trainer.epoch) == (6, 6, 6, 2)
    assert history["epoch"] == [1, 2]
    assert [epoch for epoch, _ in seen] == [0, 1]
    assert [metrics["train_loss"] for _, metrics in seen] == history["train_loss"]
    assert history == trainer.history


def test_the_history_is_a_dict_of_lists_of_plain_numbers_in_the_documented_order():
    history = make().train(loader(), 2, loader(seed=6))
    assert list(history) == ["epoch", "train_loss", "lr", "eval_loss"]
    assert {type(value) for values in history.values() for value in values} == {int, float}
    assert "tensor" not in str(history)


def test_the_loss_of_an_epoch_is_weighted_by_what_each_mean_was_taken_over():
    model = nn.Linear(1, 1, bias=False)
    trainer = make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    batches = []
    for loss, size in ((1, 4), (2, 4), (4, 2)):
        x = torch.ones(size, 1)
        batches.append((x, model(x).detach() + math.sqrt(loss)))
    history = trainer.train(batches, 1, batches)
    assert history["train_loss"] == pytest.approx([2.0])
    assert history["eval_loss"] == pytest.approx([2.0])


@pytest.mark.parametrize(("per_batch", "after", "recorded"), [(True, 0.125, 0.25), (False, 0.5, 1.0)])
def test_the_scheduler_moves_by_one_interval_and_the_record_has_the_rate_that_was_used(per_batch, after, recorded):
    trainer = scalar(lr=1.0, scheduler=lambda o: StepLR(o, 1, 0.5), scheduler_step_per_batch=per_batch)
    history = trainer.train([constant(1)] * 3, 1)
    assert trainer.optimizer.param_groups[0]["lr"] == after
    assert history["lr"] == [recorded]


@pytest.mark.parametrize("name", ["accuracy", "eval_accuracy"])
def test_a_maximised_metric_keeps_the_best_epoch_in_either_spelling(name, tmp_path):
    trainer = scalar(evaluations([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], key="accuracy"))
    train = [constant(1)]
    history = trainer.train(train, 6, train, save_dir=tmp_path, best_model_metric=name, early_stopping_patience=2)
    assert trainer.epoch == 6
    assert (trainer.best_metric, trainer.best_epoch) == (0.6, 6)
    assert history["eval_accuracy"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert load_checkpoint(tmp_path / "best_model.pt")["epoch"] == 6


def test_a_constant_loss_stops_after_patience_and_every_callback_ran():
    trainer, epochs = scalar(), []
    train = [constant(1)]
    trainer.train(train, 9, train, early_stopping_patience=2, callbacks=[lambda t, epoch, m: epochs.append(epoch)])
    assert trainer.epoch == 3
    assert epochs == [0, 1, 2]


def test_a_metric_that_is_first_nan_does_not_stay_the_best():
    trainer = scalar(evaluations([math.nan, 3.0, 2.0, 1.0]))
    train = [constant(1)]
    trainer.train(train, 4, train)
    assert (trainer.best_metric, trainer.best_epoch) == (1.0, 4)


def test_before_the_first_improvement_there_is_no_best():
    trainer = scalar(evaluations([math.nan]))
    assert (trainer.best_metric, trainer.best_epoch) == (None, -1)
    trainer.train([constant(1)], 1, [constant(1)])
    assert (trainer.best_metric, trainer.best_epoch) == (None, -1)


def test_an_exception_of_a_step_leaves_train_unchanged():
    error = KeyError("mine")

    class Fails(treadle.Trainer):
        def train_step(self, batch):
            if self.epoch == 1:
                raise error
            return super().train_step(batch)

    trainer = make(Fails)
    with pytest.raises(KeyError) as caught:
        trainer.train(loader(), 3)
    assert caught.value is error
    assert trainer.epoch == 1


def test_an_exception_of_a_callback_leaves_train_and_the_checkpoint_of_that_epoch_is_written(tmp_path):
    def fail(trainer, epoch, metrics):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        make().train(loader(), 3, save_dir=tmp_path, callbacks=[fail])
    assert files(tmp_path) == [".treadle-callbacks", "best_model.pt", "checkpoint_epoch_1.pt", "history.json"]


def test_the_target_is_absolute_and_a_loaded_run_ends_like_one_that_never_stopped(tmp_path):
    straight = make()
    history = straight.train(loader(shuffle=True), 4, loader(seed=6))
    make().train(loader(shuffle=True), 2, loader(seed=6), save_dir=tmp_path)
    resumed = make(seed=9)
    resumed.load_checkpoint(tmp_path / "checkpoint_epoch_2.pt")
    assert resumed.train(loader(shuffle=True), 4, loader(seed=6)) == history
    assert resumed.step == straight.step == 12
    assert same_weights(resumed, straight)
    assert (resumed.best_metric, resumed.best_epoch) == (straight.best_metric, straight.best_epoch)


def test_files_have_the_documented_names(tmp_path):
    folder = tmp_path / "made" / "here"
    history = make().train(loader(), 5, save_dir=folder, save_freq=2)
    numbered = [f"checkpoint_epoch_{epoch}.pt" for epoch in (2, 4, 5)]  # the last is what the run ended with
    assert files(folder) == ["best_model.pt", *numbered, "history.json"]
    assert json.loads((folder / "history.json").read_text()) == history


@pytest.mark.parametrize("config", [None, {}, {"training": None}, {"training": {"max_grad_norm": None}}])
def test_an_empty_config_trains(config):
    model = nn.Linear(4, 1)
    trainer = treadle.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), config)
    assert len(trainer.train(loader(), 1)["epoch"]) == 1


def test_a_misspelt_setting_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="max_grad_norm"):
        make(max_grad_nrom=1)


def test_a_plateau_scheduler_follows_the_best_metric():
    trainer = scalar(
        evaluations([1.0, 2.0, 2.0]), lr=1.0, scheduler=lambda o: ReduceLROnPlateau(o, patience=0, factor=0.1)
    )
    rates, train = [], [constant(0)]
    history = trainer.train(
        train, 3, train, callbacks=[lambda t, e, m: rates.append(t.optimizer.param_groups[0]["lr"])]
    )
    assert rates == pytest.approx([1.0, 0.1, 0.01])
    assert history["lr"] == pytest.approx([1.0, 1.0, 0.1])


def test_accumulation_of_three_over_seven_batches_is_three_steps_on_the_joint_batches():
    data = loader(27, 4)
    batches = list(data)
    parts = make(gradient_accumulation_steps=3, lr=0.1, model=line())
    parts.train(batches, 1)
    joint = make(lr=0.1, model=line())
    wholes = [tuple(map(torch.cat, zip(*batches[i : i + 3]))) for i in (0, 3, 6)]
    joint.train(wholes, 1)
    assert (parts.step, parts.micro_steps) == (3, 7)
    for a, b in zip(parts.model.parameters(), joint.model.parameters()):
        torch.testing.assert_close(a, b)


def test_a_finished_run_returns_its_history_at_once_and_says_how_to_train_on(caplog, tmp_path):
    trainer = make()
    history = trainer.train(loader(), 2, save_dir=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with caplog.at_level("INFO", "treadle"):
        assert trainer.train(loader(), 2, save_dir=tmp_path) == history
        assert trainer.train(loader(), 1) == history
    assert caplog.text.count("raise the target to train further") == 2  # one line a call
    assert trainer.step == 6
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_run_that_stopped_early_is_finished_until_the_patience_is_raised(caplog):
    trainer, train = scalar(), [constant(1)]
    trainer.train(train, 9, train, early_stopping_patience=2)
    with caplog.at_level("INFO", "treadle"):
        trainer.train(train, 9, train, early_stopping_patience=2)
    assert "larger early_stopping_patience" in caplog.text
    assert trainer.epoch == 3
    trainer.train(train, 9, train, early_stopping_patience=4)
    assert trainer.epoch == 5


def test_should_stop_in_a_callback_ends_after_this_epoch_and_is_not_stored(tmp_path):
    trainer = make()

    def stop(given, epoch, metrics):
        given.should_stop = epoch == 1

    assert trainer.train(loader(), 5, save_dir=tmp_path, callbacks=[stop])["epoch"] == [1, 2]
    again = make()
    again.load_checkpoint(tmp_path / "checkpoint_epoch_2.pt")
    assert again.train(loader(), 5)["epoch"] == [1, 2, 3, 4, 5]


def test_without_a_loader_to_evaluate_the_default_metric_is_the_training_loss():
    trainer = make()
    history = trainer.train(loader(), 3)
    assert trainer.best_metric == min(history["train_loss"])
    assert trainer.best_epoch == history["train_loss"].index(trainer.best_metric) + 1


@pytest.mark.parametrize("metric", ["eval_acuracy", "typo_loss"])
def test_a_metric_that_no_record_can_have_is_refused_before_the_first_step(metric):
    trainer = make()
    with pytest.raises(ConfigError, match="train_loss, lr, eval_loss"):
        trainer.train(loader(), 1, loader(), best_model_metric=metric, best_mode="max")
    assert trainer.step == 0


def test_a_metric_that_an_overridden_evaluation_does_not_give_is_refused_with_the_keys():
    trainer = scalar(evaluations([1.0], key="accuracy"))
    with pytest.raises(ConfigError, match="eval_accuracy"):
        trainer.train([constant(1)], 1, [constant(1)])


def test_another_name_than_the_known_ones_needs_a_mode():
    trainer = scalar(evaluations([1.0, 2.0, 0.5], key="score"))
    train = [constant(1)]
    with pytest.raises(ConfigError, match=r"best_model_metric='eval_score'.* pass best_mode='min' or best_mode='max'"):
        trainer.train(train, 1, train, best_model_metric="score")
    trainer.train(train, 3, train, best_model_metric="score", best_mode="max")
    assert (trainer.best_metric, trainer.best_epoch) == (2.0, 2)


def test_no_metric_selects_nothing_and_patience_then_is_refused(tmp_path):
    trainer = make()
    with pytest.raises(ConfigError, match="early_stopping_patience=3"):
        trainer.train(loader(), 1, best_model_metric=None, early_stopping_patience=3)
    trainer.train(loader(), 1, loader(), save_dir=tmp_path, best_model_metric=None)
    assert files(tmp_path) == ["checkpoint_epoch_1.pt", "history.json"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_epochs": -1}, "num_epochs=-1"), ({"num_epochs": 1.5}, "num_epochs=1.5"),
        ({"save_freq": -1}, "save_freq=-1"), ({"save_freq": 1.5}, "save_freq=1.5"),
        ({"early_stopping_patience": 0}, "early_stopping_patience=0"), ({"best_mode": "least"}, "best_mode='least'"),
        ({"callbacks": print}, "list of functions"), ({"callbacks": ["x"]}, "cannot be called"),
        ({"resume_from": "auto"}, "needs save_dir"), ({"eval_dataloader": []}, "it is empty"),
    ],
)  # fmt: skip
def test_an_argument_out_of_range_is_refused_before_the_first_step(arguments, word):
    trainer = make()
    with pytest.raises(ConfigError, match=word):
        trainer.train(loader(), **{"num_epochs": 1, **arguments})
    assert trainer.step == 0


@pytest.mark.parametrize("save_freq", [None, 0])
def test_no_numbered_files_without_a_frequency(tmp_path, save_freq):
    make().train(loader(), 2, save_dir=tmp_path, save_freq=save_freq)
    assert files(tmp_path) == ["best_model.pt", "history.json"]


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make().train(loader(), 2)
    assert files(tmp_path) == []


def test_nan_becomes_null_in_the_file_and_stays_in_the_history(tmp_path):
    history = scalar(evaluations([math.nan])).train([constant(1)], 1, [constant(1)], save_dir=tmp_path)
    assert math.isnan(history["eval_loss"][0])
    written = json.loads((tmp_path / "history.json").read_text(), parse_constant=pytest.fail)
    assert written["eval_loss"] == [None]


def test_a_key_that_an_epoch_lacks_is_none_there():
    trainer = make()
    trainer.train(loader(), 1)
    history = trainer.train(loader(), 2, loader(), best_model_metric="train_loss")
    assert history["eval_loss"][0] is None
    assert history["eval_loss"][1] > 0
    assert {len(values) for values in history.values()} == {2}


def test_min_delta_counts_for_the_best_epoch():
    values = [1.0, 0.95, 0.5]
    trainer, train = scalar(evaluations(values), min_delta=0.1), [constant(1)]
    trainer.train(train, 3, train)
    assert (trainer.best_metric, trainer.best_epoch) == (0.5, 3)
    trainer = scalar(evaluations(values), min_delta=0.6)
    trainer.train(train, 3, train)
    assert (trainer.best_metric, trainer.best_epoch) == (1.0, 1)


def test_one_train_step_is_one_optimizer_step_with_hooks_clipping_and_schedule():
    class Count(treadle.BaseHook):
        before = after = last = 0

        def on_before_step(self, trainer):
            self.before += 1

        def on_after_step(self, trainer):
            self.after += 1
            self.last += trainer.is_last_step

    hook = Count()
    trainer = scalar(
        lr=1.0, max_grad_norm=0.5, scheduler=lambda o: StepLR(o, 1, 0.5), scheduler_step_per_batch=True, hooks=[hook]
    )
    first = trainer.train_step(constant(2))
    assert first == {"loss": 2.0, "lr": 1.0, "grad_norm": 2.0}
    assert {type(value) for value in first.values()} == {float}
    assert trainer.model.weight.item() == pytest.approx(0.5)
    second = trainer.train_step(constant(2))
    assert second["lr"] == 0.5
    assert (trainer.step, trainer.applied_steps, hook.before, hook.after, hook.last) == (2, 2, 2, 2, 0)


def test_steps_on_their_own_count_in_no_epochs_mean():
    trainer = scalar()
    trainer.train_step(constant(100))
    assert trainer.train([constant(1)], 1)["train_loss"] == [1.0]
    assert trainer.step == 2


def test_a_step_on_its_own_trains_after_an_evaluation_left_eval_mode():
    trainer = make()
    batch = next(iter(loader()))
    trainer.model.eval()
    trainer.train_step(batch)
    assert trainer.model.training


def test_one_train_epoch_trains_evaluates_and_counts():
    trainer = make(scheduler=lambda o: StepLR(o, 1, 0.5))
    record = trainer.train_epoch(loader(), loader(seed=6), epoch=7)
    assert list(record) == ["train_loss", "lr", "eval_loss"]
    assert (trainer.epoch, trainer.step, record["lr"]) == (1, 3, 0.01)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.005
    assert list(trainer.train_epoch(loader())) == ["train_loss", "lr"]
    assert trainer.history["epoch"] == [1, 2]
    assert trainer.train(loader(), 3, loader(seed=6))["epoch"] == [1, 2, 3]


def test_an_epoch_on_its_own_is_trained_though_an_earlier_run_stopped_early():
    trainer, train = scalar(), [constant(1)]
    trainer.train(train, 9, train, early_stopping_patience=1)
    epochs = trainer.epoch
    trainer.train_epoch(train)
    assert trainer.epoch == epochs + 1
    assert trainer.best_epoch == 1


def test_two_calls_select_as_one_does():
    values = [3.0, 1.0, 2.0, 2.5, 2.6]
    train = [constant(1)]
    trainer = scalar(evaluations(values))
    trainer.train(train, 2, train, early_stopping_patience=2)
    trainer.train(train, 5, train, early_stopping_patience=2)
    assert (trainer.epoch, trainer.best_epoch) == (4, 2)


def test_another_metric_in_a_later_call_is_looked_for_anew_in_the_history(caplog):
    trainer, train = scalar(evaluations([3.0, 4.0])), [constant(1)]
    trainer.train(train, 1, train)
    trainer.train(train, 2, train, best_model_metric="train_loss")
    assert "selected anew" in caplog.text
    assert (trainer.best_metric, trainer.best_epoch) == (1.0, 1)


def test_an_empty_loader_is_refused():
    with pytest.raises(treadle.DataExhaustedError):
        make().train([], 1)
    with pytest.raises(ConfigError, match="no batch"):
        make().evaluate(iter([]))


def test_a_checkpoint_that_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.pt"):
        make().load_checkpoint(tmp_path / "nothing.pt")
