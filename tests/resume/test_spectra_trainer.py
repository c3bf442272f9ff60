"""The spectra trainer stopped anywhere and rerun equals the uninterrupted run, to the bit."""

from __future__ import annotations

import logging

import pytest
import torch

import spectra_kit as kit
from helpers import differences
from treadle import BaseHook
from treadle.checkpoint import load_checkpoint
from treadle.spectra import SpectraTrainer


class StopAt(BaseHook):
    """Saves as a signal would and ends the run in the middle."""

    def __init__(self, step):
        self.step = step
        self.owner: SpectraTrainer | None = None

    def on_after_step(self, trainer):
        if trainer.step == self.step:
            trainer.request_write(self.leave)

    def leave(self):
        self.owner.save_checkpoint(self.owner.epoch, False)
        raise KeyboardInterrupt


def end_of(folder):
    tree = load_checkpoint(folder / "checkpoints" / "last.pt")
    return {key: value for key, value in tree.items() if key not in ("config", "hooks")}


@pytest.mark.parametrize("settings", [{}, {"amp": True, "workers": 2}, {"accumulation_steps": 3, "use_ema": False}])
def test_stopped_at_any_step_and_rerun(tmp_path, settings, caplog):
    caplog.set_level(logging.ERROR)
    straight = kit.make(tmp_path / "straight", **settings)
    straight.fit(3)
    expected = end_of(tmp_path / "straight")
    for step in range(1, straight.step + 1, 3 if settings.get("workers") else 1):
        folder = tmp_path / f"cut{step}"
        stop = StopAt(step)
        first = kit.make(folder, hooks=[stop], **settings)
        stop.owner = first
        with pytest.raises(KeyboardInterrupt):
            first.fit(3)
        second = kit.make(folder, seed=7, **settings)
        second.fit(3)
        assert differences(expected, end_of(folder)) == [], f"stopped after step {step}"
        history = (folder / "training_history.json").read_text()
        assert history == (tmp_path / "straight" / "training_history.json").read_text()
        best = torch.load(folder / "best_model.pt", weights_only=True)
        assert differences(torch.load(tmp_path / "straight" / "best_model.pt", weights_only=True), best) == []


def test_two_epochs_and_two_more_equal_four(tmp_path):
    kit.make(tmp_path / "a").fit(4)
    kit.make(tmp_path / "b").fit(2)
    kit.make(tmp_path / "b", seed=3).fit(4)
    assert differences(end_of(tmp_path / "a"), end_of(tmp_path / "b")) == []


def test_a_stop_by_patience_is_not_undone_by_a_rerun(tmp_path):
    settings = {"early_stop_patience": 1, "early_stop_start_ratio": 0.0, "early_stop_min_delta": 10.0}
    straight = kit.make(tmp_path, **settings)
    straight.fit(9)
    assert straight.epoch == 2
    rerun = kit.make(tmp_path, seed=4, **settings)
    assert rerun.fit(9)["epochs"] == 2
    assert rerun.step == straight.step


def test_averages_that_a_file_lacks_start_from_the_loaded_weights(tmp_path, caplog):
    kit.make(tmp_path, use_ema=False).fit(1)
    trainer = kit.make(tmp_path, seed=4)
    trainer.load_checkpoint(tmp_path / "checkpoints" / "last.pt")
    assert "starts from the loaded weights" in caplog.text
    raw = trainer.model.state_dict()
    assert all(torch.equal(value, raw[name]) for name, value in trainer.ema.module.state_dict().items())


def test_averages_that_a_run_does_not_keep_are_ignored_with_a_warning(tmp_path, caplog):
    kit.make(tmp_path).fit(1)
    trainer = kit.make(tmp_path, use_ema=False)
    assert trainer.load_checkpoint(tmp_path / "checkpoints" / "last.pt") == 2
    assert "is ignored" in caplog.text
    assert trainer.ema is None
