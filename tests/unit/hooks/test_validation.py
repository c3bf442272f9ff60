"""Validation in the step face: in the middle of an epoch, best state, early stop, exact over any stop."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers import differences
from treadle import BaseHook, BaseTrainer, CheckpointingHook, ConfigError, EmaHook, ValidationHook, set_seed
from treadle.checkpoint import load_checkpoint
from treadle.cli.runpage.curves import series_of
from treadle.cli.runpage.records import read_run


def data(seed, scale=1.0):
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(seed)) * scale
    return TensorDataset(x, x.sum(1, keepdim=True))


class Fit(BaseTrainer):
    def __init__(self, max_steps, folder, validation, **options):
        super().__init__(max_steps, workspace=folder, device="cpu", **options)
        self.validation = validation

    def build_data_loader(self):
        return DataLoader(data(0), 4, shuffle=True)

    def build_model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), 0.05)

    def build_hooks(self):
        return [EmaHook(0.5), CheckpointingHook(1, exit_signals=signal.SIGTERM), self.validation]

    def forward(self, input):
        x, y = input
        error = self.model(x) - y
        return error.square().mean(), {"mae": error.abs().mean()}


def loader(scale=1.0):
    return DataLoader(data(1, scale), 8)


def trained(steps, folder, *stops, **options):
    """Train to each of the stops and then to the end, each time by a new trainer."""
    for stop in (*stops, steps):
        set_seed(0)
        trainer = Fit(stop, folder, ValidationHook(loader(), **options))
        trainer.train()
    return trainer


def test_it_evaluates_every_interval_and_at_the_end_and_training_does_not_notice(tmp_path):
    trainer = trained(10, tmp_path / "a", interval=4)
    assert [record["step"] for record in trainer.validation.history] == [4, 8, 10]
    assert set(trainer.validation.history[0]) == {"step", "epoch", "val_loss", "val_mae"}
    set_seed(0)
    without = Fit(10, tmp_path / "b", ValidationHook(loader(), interval=1000))
    without.train()
    for one, other in zip(trainer.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_an_interval_it_evaluates_after_each_epoch(tmp_path):
    trainer = trained(15, tmp_path)
    assert [record["step"] for record in trainer.validation.history] == [6, 12, 15]


@pytest.mark.parametrize("options", [{"interval": 2}, {"interval": None}])
def test_a_stop_after_any_step_changes_nothing(options, tmp_path):
    straight = trained(13, tmp_path / "straight", **options)
    for stop in (1, 4, 6, 7, 12):
        folder = tmp_path / str(stop)
        # A target is evaluated as a last step; here the run is to be stopped, and goes on to a later target.
        set_seed(0)
        first = Fit(13, folder, ValidationHook(loader(), **options))

        class Stop(BaseHook):
            def on_after_step(self, trainer, stop=stop):
                if trainer.step == stop:
                    os.kill(os.getpid(), signal.SIGTERM)

        first._given_hooks = [Stop()]
        with pytest.raises(SystemExit):
            first.train()
        set_seed(1)
        again = Fit(13, folder, ValidationHook(loader(), **options))
        again.train()
        assert again.validation.history == straight.validation.history
        assert differences(again.validation.best_rule.state_dict(), straight.validation.best_rule.state_dict()) == []
        for one, other in zip(again.model.parameters(), straight.model.parameters(), strict=True):
            assert torch.equal(one, other)
        lines = (folder / "validation.jsonl").read_text()
        assert lines == (tmp_path / "straight" / "validation.jsonl").read_text()


def test_a_signal_inside_an_evaluation_saves_and_the_rerun_makes_up_for_it(tmp_path):
    straight = trained(9, tmp_path / "straight", interval=3)
    calls = []

    def interrupted(trainer, batch):
        calls.append(trainer.step)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return trainer.forward(batch)

    set_seed(0)
    with pytest.raises(SystemExit) as left:
        Fit(9, tmp_path / "cut", ValidationHook(loader(), interval=3, eval_step=interrupted)).train()
    assert left.value.code == 143
    assert calls[-1] == 6
    again = trained(9, tmp_path / "cut", interval=3)
    assert again.validation.history == straight.validation.history


def test_early_stopping_ends_the_run_for_good_and_the_best_state_is_kept(tmp_path):
    trainer = trained(100, tmp_path, interval=2, patience=3, min_delta=1e9)
    assert (trainer.step, trainer.validation.best_rule.best_epoch) == (8, 2)
    best = load_checkpoint(tmp_path / "best_model.pt")
    assert best["global_step"] == 2
    again = trained(100, tmp_path, interval=2, patience=3, min_delta=1e9)
    assert again.step == 8
    assert again.validation.history == trainer.validation.history


def test_several_loaders_have_results_by_name_and_the_first_or_a_named_one_selects(tmp_path):
    hook = ValidationHook({"near": loader(), "far": loader(5.0)}, interval=2)
    assert hook.metric == "val_near_loss"
    Fit(4, tmp_path, hook).train()
    assert {"val_near_loss", "val_near_mae", "val_far_loss", "val_far_mae"} <= set(hook.history[0])
    by_mae = ValidationHook({"near": loader(), "far": loader(5.0)}, interval=2, metric="val_far_mae", mode="min")
    Fit(4, tmp_path / "mae", by_mae).train()
    assert by_mae.best_rule.best == min(record["val_far_mae"] for record in by_mae.history)


def test_the_averaged_weights_are_scored(tmp_path):
    trainer = trained(6, tmp_path, interval=6)
    with trainer.averages["ema"].applied_to(trainer.model):
        assert trainer.validation.history[-1]["val_loss"] == trainer.evaluate(loader())["loss"]


def test_its_lines_are_drawn_and_reach_trackers(tmp_path):
    trained(8, tmp_path, interval=2)
    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    drawn = {(series.chart, series.label) for series in series_of(read_run(tmp_path))}
    assert {("loss", "training"), ("loss", "validation"), ("mae", "validation")} <= drawn


def test_wrong_values_are_refused():
    with pytest.raises(ConfigError, match="interval=0"):
        ValidationHook([], interval=0)
    with pytest.raises(ConfigError, match="a TensorDataset is a data set"):
        ValidationHook(data(0))
    with pytest.raises(ConfigError, match="empty dict"):
        ValidationHook({})
    with pytest.raises(ConfigError, match="patience"):
        ValidationHook([1], patience=0)
